"""Initial values depend on seed, name and global index alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_parallel.config import ModelConfig
from mcp_parallel.layout import split_dim
from mcp_parallel.model.init import fill_shard, parameter_std


def filled(shape, offsets, global_shape, *, name="blocks.0.attn.wq", seed=0, std=1.0, dtype=None):
    local = torch.full(shape, math.nan, dtype=dtype or torch.float64)
    fill_shard(local, name, global_shape, offsets, seed=seed, std=std)
    return local


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    parts=st.integers(1, 5),
    dim=st.integers(0, 1),
)
def test_any_shard_is_the_slice_of_the_whole(rows, columns, parts, dim):
    whole = filled((rows, columns), (0, 0), (rows, columns))
    for part in range(parts):
        start, length = split_dim((rows, columns)[dim], parts, part)
        shape, offsets = [rows, columns], [0, 0]
        shape[dim], offsets[dim] = length, start
        shard = filled(shape, offsets, (rows, columns))
        assert torch.equal(shard, whole.narrow(dim, start, length))


def test_chunks_of_the_filling_loop_join_without_a_seam():
    # Larger than the loop's chunk, with a width that does not divide it.
    shape = (700, 131)
    whole = filled(shape, (0, 0), shape)
    tail = filled((100, 131), (600, 0), shape)
    assert torch.equal(tail, whole[600:])


def test_values_are_normal_enough():
    x = filled((1000, 1000), (0, 0), (1000, 1000))
    n = x.numel()
    # Standard errors of mean, variance and fourth moment of n normal draws; 5 of them.
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    # A sum of 8 uniforms has kurtosis 3 - 6 / (5 * 8).
    assert abs((x**4).mean() - 2.85) < 5 * math.sqrt(96 / n)
    assert x.abs().max() < 4.9
    neighbours = (x[:, 1:] * x[:, :-1]).mean()
    assert abs(neighbours) < 5 / math.sqrt(n)


def test_seed_and_name_each_change_everything():
    shape = (64, 64)
    base = filled(shape, (0, 0), shape)
    for other in (
        filled(shape, (0, 0), shape, seed=1),
        filled(shape, (0, 0), shape, name="blocks.1.attn.wq"),
    ):
        # 64 * 64 draws from a grid of about half a million sums: a few coincide by chance.
        assert (other == base).float().mean() < 0.01


def test_float32_is_the_float64_value_rounded_once():
    shape = (50, 7)
    assert torch.equal(
        filled(shape, (0, 0), shape, dtype=torch.float32), filled(shape, (0, 0), shape).float()
    )


def test_known_values():
    # A change of these numbers changes every run that was ever started from a seed.
    x = filled((1, 4), (0, 0), (1, 4), name="embed", seed=1)
    torch.testing.assert_close(x, KNOWN, rtol=0, atol=1e-15)


KNOWN = torch.tensor(
    [[-1.0501230441474607, -1.2312296504407594, -0.8831820355809518, -0.5940206983426677]],
    dtype=torch.float64,
)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("embed", 0.02),
        ("blocks.3.attn.wq", 0.02),
        ("blocks.3.attn.wo", 0.02 / math.sqrt(8)),
        ("blocks.3.ffn.w2", 0.02 / math.sqrt(8)),
        ("blocks.3.attn_norm.weight", None),
        ("norm.weight", None),
    ],
)
def test_standard_deviations(name, expected):
    assert parameter_std(name, ModelConfig()) == expected


def test_norms_start_at_one():
    x = torch.zeros(5)
    fill_shard(x, "norm.weight", (5,), (0,), seed=0, std=None)
    assert torch.equal(x, torch.ones(5))
