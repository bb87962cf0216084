"""BlockLayout: every element has one place, every block one tensor, every rank whole blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_kernels.ops.block_layout import BlockLayout


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 100), max_size=6),
    eighths=st.integers(1, 5),
    world_size=st.integers(1, 6),
)
def test_places_do_not_overlap_and_ranks_get_whole_blocks(sizes, eighths, world_size):
    layout = BlockLayout(sizes, 8 * eighths, world_size)
    owner = [None] * layout.padded_numel
    for tensor, (at, size) in enumerate(zip(layout.offsets, sizes, strict=True)):
        assert at % layout.block_size == 0
        for element in range(at, at + size):
            assert owner[element] is None
            owner[element] = tensor
    blocks = [owner[i : i + layout.block_size] for i in range(0, len(owner), layout.block_size)]
    assert len(blocks) == layout.num_blocks == layout.chunk_blocks * world_size
    assert layout.chunk_numel * world_size == layout.padded_numel
    for block, count in zip(blocks, layout.counts().tolist(), strict=True):
        assert len(set(block[:count])) <= 1
        assert None not in block[:count]
        assert set(block[count:]) <= {None}
    # No rank has a block more than it must.
    assert layout.chunk_blocks == -(-sum(-(-s // layout.block_size) for s in sizes) // world_size)


def test_counts_are_int32_and_the_fields_are_what_was_given():
    layout = BlockLayout([10, 0, 1024, 1025], world_size=4)
    assert layout.offsets == (0, 1024, 1024, 2048)
    assert (layout.numel, layout.num_blocks, layout.chunk_numel) == (2059, 4, 1024)
    assert layout.counts().tolist() == [10, 1024, 1024, 1]
    assert layout.counts().dtype == torch.int32
    assert layout == BlockLayout((10, 0, 1024, 1025), 1024, 4)


@pytest.mark.parametrize(
    "args, message",
    [
        (([1, -1],), "sizes must be >= 0, got -1"),
        (([1], 12), "block_size must be a positive multiple of 8 up to 2147483640, got 12"),
        (([1], 0), "block_size must be a positive multiple of 8"),
        (([1], 1 << 31), "block_size must be a positive multiple of 8"),
        (([1], 8, 0), "world_size must be >= 1, got 0"),
    ],
)
def test_refuses_in_words(args, message):
    with pytest.raises(ValueError, match=f"^BlockLayout: {message}"):
        BlockLayout(*args)
