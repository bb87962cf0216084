"""flat_buffer: zeroed memory that behaves like any tensor, on huge pages where there are some."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from mcp_kernels.optim.flat_buffer import HUGE_PAGE_BYTES, flat_buffer

SMAPS = Path("/proc/self/smaps")


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 1000, 3 * HUGE_PAGE_BYTES + 5])
def test_is_zero_and_holds_what_is_written(numel, dtype):
    buffer = flat_buffer(numel, dtype)
    assert (buffer.shape, buffer.dtype) == ((numel,), dtype)
    assert not buffer.any()
    values = torch.arange(numel).remainder(100).to(dtype)
    buffer.copy_(values)
    assert torch.equal(buffer, values)
    assert torch.equal(buffer[numel // 2 :] * 2, values[numel // 2 :] * 2)


def flags_of(address):
    """Flags of the mapping that holds an address, as the kernel tells them."""
    inside = False
    for line in SMAPS.read_text(encoding="ascii").splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, end = (int(word, 16) for word in words[0].split("-"))
            inside = start <= address < end
        elif inside and words[0] == "VmFlags:":
            return words[1:]
    return []


@pytest.mark.skipif(not SMAPS.exists(), reason="no /proc/self/smaps: not Linux")
def test_large_buffers_ask_for_huge_pages_and_start_at_one():
    buffer = flat_buffer(2 * HUGE_PAGE_BYTES)
    assert buffer.data_ptr() % HUGE_PAGE_BYTES == 0
    assert "hg" in flags_of(buffer.data_ptr())


def test_small_buffers_are_zeros_of_torch_and_ask_for_nothing():
    # Flags of a small buffer's mapping would tell what the heap below it was used for before; a
    # mapping of our own, which alone is advised, cannot be resized.
    assert flat_buffer(HUGE_PAGE_BYTES // 4).untyped_storage().resizable()
    assert not flat_buffer(2 * HUGE_PAGE_BYTES).untyped_storage().resizable()


@pytest.mark.skipif(not SMAPS.exists(), reason="no /proc/self/smaps: not Linux")
def test_memory_lives_as_long_as_a_view_and_no_longer():
    buffer = flat_buffer(2 * HUGE_PAGE_BYTES)
    address, view = buffer.data_ptr(), buffer[10:20]
    del buffer
    gc.collect()
    assert "hg" in flags_of(address)
    assert view.add_(1).sum() == 10
    del view
    gc.collect()
    assert "hg" not in flags_of(address)


def test_other_devices_get_zeros():
    assert flat_buffer(2 * HUGE_PAGE_BYTES, device="meta").is_meta


def test_refuses_a_negative_size():
    with pytest.raises(ValueError, match="flat_buffer: numel must be >= 0, got -1"):
        flat_buffer(-1)
