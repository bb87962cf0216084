"""Compressed all-reduce: its definition, what it conserves, what it sends, every group there is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from recorder import Recorder

from mcp_kernels import onebit_all_reduce, onebit_buffers, onebit_compress, onebit_decompress
from mcp_kernels.ops import _code_exchange
from mcp_kernels.ops._code_exchange import uncompressed_bytes, wire_bytes
from mcp_kernels.ops._codecs import CODECS, ONEBIT
from mcp_kernels.ops._comm import split_sizes
from mcp_kernels.ops.compressed_all_reduce import ErrorState, compressed_all_reduce
from mcp_kernels.ops.host_groups import HostGroups
from mcp_kernels.testing import assert_same_bits, make_gradient

# 0 and 1; around a byte and a block of 64; chunks that are whole blocks, and none of that.
SIZES = (0, 1, 7, 8, 9, 63, 64, 65, 1000, 4096, 12289)


def inputs_of(rank, step, numel):
    return make_gradient(numel, seed=1000 * step + rank)


def on_ranks(ranks, world, fn, *args):
    """Results of ``fn``; six ranks are made for the call, fewer are there already."""
    if world <= ranks.world_size:
        return ranks.run(fn, *args, ranks=world)
    pool = RankPool(world)
    try:
        return pool.run(fn, *args)
    finally:
        pool.close()


# --- the definition -----------------------------------------------------------------------------


def onebit_steps(rank, world, numel, block_size, steps):
    worker, server = onebit_buffers(numel, block_size=block_size)
    results = [
        onebit_all_reduce(inputs_of(rank, step, numel), worker, server, block_size=block_size)
        for step in range(steps)
    ]
    return results, worker, server


def defined_steps(world, numel, block_size, steps):
    """All ranks at once, from one-rank compression: chunks, mean in rank order, second coding."""
    sizes = split_sizes(numel, world)
    workers = [torch.zeros(numel) for _ in range(world)]
    servers = [torch.zeros(size) for size in sizes]
    results = []
    for step in range(steps):
        xs = [inputs_of(rank, step, numel) for rank in range(world)]
        parts, start = [], 0
        for owner, size in enumerate(sizes):
            cut = slice(start, start + size)
            start += size
            total = torch.zeros(size)
            for x, worker in zip(xs, workers, strict=True):
                bits, scales = onebit_compress(x[cut], worker[cut], block_size)
                total = total + onebit_decompress(bits, scales, size, block_size)
            if world > 1:
                mean = total * (1 / world)
                bits, scales = onebit_compress(mean, servers[owner], block_size)
                total = onebit_decompress(bits, scales, size, block_size)
            parts.append(total)
        results.append(torch.cat(parts))
    return results, workers, servers


@pytest.mark.parametrize("world", (1, 2, 3, 4))
@pytest.mark.parametrize("numel", SIZES)
def test_equals_its_definition(ranks, world, numel):
    expected, workers, servers = defined_steps(world, numel, 64, steps=3)
    for rank, (results, worker, server) in enumerate(
        on_ranks(ranks, world, onebit_steps, numel, 64, 3)
    ):
        for result, wanted in zip(results, expected, strict=True):
            assert_same_bits(result, wanted)
        assert_same_bits(worker, workers[rank], "worker_error")
        assert_same_bits(server, servers[rank], "server_error")


# --- conservation -------------------------------------------------------------------------------


def conserved(rank, world, numel, codec, block_size, steps):
    """(Relative fault of the conserved sum, the same without the errors), in float64."""
    state = ErrorState.zeros(numel)
    applied = torch.zeros(numel, dtype=torch.float64)
    arrived = torch.zeros(numel, dtype=torch.float64)
    for step in range(steps):
        xs = [inputs_of(r, step, numel) for r in range(world)]
        result = compressed_all_reduce(xs[rank], state, None, codec, block_size=block_size)
        applied += result.double()
        arrived += torch.stack([x.double() for x in xs]).mean(0)
    held = state.worker_error.double() / world
    sizes = split_sizes(numel, world)
    start = sum(sizes[:rank])
    if world > 1:
        held[start : start + sizes[rank]] += state.server_error.double()
        dist.all_reduce(held)
    fault = (applied + held - arrived).norm() / arrived.norm()
    return fault.item(), ((applied - arrived).norm() / arrived.norm()).item()


@pytest.mark.parametrize(
    "world, codec",
    [
        *((w, "onebit") for w in (1, 2, 3)),
        (2, "int4"),
        *(
            pytest.param(w, codec, marks=pytest.mark.slow)
            for w, codec in ((4, "onebit"), (6, "onebit"), (3, "int8"), (3, "fp8"))
        ),
    ],
)
def test_conserves_what_came_in_over_200_steps(ranks, world, codec):
    for fault, unsent in on_ranks(ranks, world, conserved, 1000, codec, 64, 200):
        assert fault < 1e-5
        assert unsent > 10 * fault  # the errors do hold something


# --- the wire -----------------------------------------------------------------------------------


def counted(rank, world, numel, codec, block_size):
    recorder = Recorder(dist.group.WORLD)
    group = HostGroups(None, recorder)  # hosts of one rank
    state = ErrorState.zeros(numel)
    compressed_all_reduce(make_gradient(numel), state, group, codec, block_size=block_size)
    return recorder.calls


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("numel", (5, 1000, 1 << 16))
def test_two_collectives_and_their_bytes(ranks, codec, numel):
    world = 4
    for calls in on_ranks(ranks, world, counted, numel, codec, 1024):
        assert [name for name, _ in calls] == ["all_to_all", "all_gather"]
        assert sum(size for _, size in calls) == wire_bytes(numel, world, CODECS[codec], 1024)


@pytest.mark.parametrize("world", (2, 3, 8))
def test_onebit_sends_a_thirty_first_of_float32(world):
    numel = world * 1024 * 100
    assert 31 * wire_bytes(numel, world, ONEBIT) <= uncompressed_bytes(numel, world)


# --- values that are not finite -----------------------------------------------------------------


def with_bad_value(rank, world, bad):
    numel = 1000
    worker, server = onebit_buffers(numel, block_size=64)
    onebit_all_reduce(inputs_of(rank, 0, numel), worker, server, block_size=64)
    before = worker.clone(), server.clone()
    x = inputs_of(rank, 1, numel)
    if rank == 1:
        x[10] = bad
    first = onebit_all_reduce(x, worker, server, block_size=64)
    after = worker.clone(), server.clone()
    second = onebit_all_reduce(inputs_of(rank, 2, numel), worker, server, block_size=64)
    return before, after, first, second


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf")))
def test_a_bad_block_is_nan_everywhere_and_poisons_no_error(ranks, bad):
    results = ranks.run(with_bad_value, bad, ranks=3)
    for rank, (before, after, first, second) in enumerate(results):
        assert first[:64].isnan().all()
        assert first[64:].isfinite().all()
        assert all(error.isfinite().all() for error in after)
        assert second.isfinite().all()
        if rank == 1:
            assert_same_bits(after[0][:64], before[0][:64])
        if rank == 0:  # it owns the bad block
            assert_same_bits(after[1][:64], before[1][:64])


# --- every kind of input, group and backend -----------------------------------------------------


def kinds(rank, world):
    x = make_gradient(30 * 50, seed=rank)
    results = {}
    for name, value in {
        "strided": x.view(30, 50).t(),
        "bfloat16": x.to(torch.bfloat16),
        "empty": x[:0].view(0, 3),
    }.items():
        state = ErrorState.zeros(value.numel())
        before = value.clone()
        got = compressed_all_reduce(value, state, block_size=64)
        assert_same_bits(value, before)
        plain = ErrorState.zeros(value.numel())
        flat = compressed_all_reduce(value.float().reshape(-1), plain, block_size=64)
        results[name] = got, flat, value.dtype, tuple(value.shape)
    return results


def test_any_shape_and_dtype(ranks):
    for results in ranks.run(kinds, ranks=3):
        for got, flat, dtype, shape in results.values():
            assert (got.dtype, tuple(got.shape)) == (dtype, shape)
            assert_same_bits(got.reshape(-1), flat.to(dtype))


def into_memory(rank, world, numel, codec, dtype, op):
    """Results in new memory, in other memory, and in the place of what came in."""
    results, is_written = [], []
    for place in ("new", "other", "same"):
        x = inputs_of(rank, 0, numel).to(dtype)
        before = x.clone()
        out = {"new": None, "other": torch.full_like(x, torch.nan), "same": x}[place]
        state = ErrorState.zeros(numel)
        result = compressed_all_reduce(x, state, None, codec, op, block_size=64, out=out)
        is_written.append(out is None or result.data_ptr() == out.data_ptr())
        if place != "same":
            assert_same_bits(x, before)
        results.append(result)
    return results, all(is_written)


@pytest.mark.parametrize(
    "numel, codec, dtype, op",
    [
        (4096, "onebit", torch.float32, "avg"),
        (1000, "onebit", torch.float32, "sum"),
        (2, "onebit", torch.float32, "avg"),
        (4096, "int8", torch.bfloat16, "avg"),
        (1000, "int4", torch.float32, "avg"),
        (4096, "fp8", torch.float32, "sum"),
    ],
)
def test_results_go_where_they_are_asked_to(ranks, numel, codec, dtype, op):
    for results, is_written in ranks.run(into_memory, numel, codec, dtype, op):
        assert is_written
        assert results[0].dtype == dtype
        for result in results[1:]:
            assert_same_bits(result, results[0])


def subgroup(rank, world):
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    worker, server = onebit_buffers(1000, group, 64)
    x = inputs_of(dist.get_rank(group), 0, 1000)
    return onebit_all_reduce(x, worker, server, group=group, block_size=64)


def test_subgroup(ranks):
    (expected,), _, _ = defined_steps(2, 1000, 64, steps=1)
    results = ranks.run(subgroup, ranks=4)
    for rank in (1, 3):
        assert_same_bits(results[rank], expected)


def by_pairs(rank, world):
    _code_exchange._HAVE_ALL_TO_ALL = frozenset()
    try:
        return onebit_steps(rank, world, 1000, 64, 3)[0]
    finally:
        _code_exchange._HAVE_ALL_TO_ALL = frozenset({"gloo", "nccl", "shm", "mpi", "xccl", "hccl"})


def test_sends_and_receives_give_what_all_to_all_gives(ranks):
    expected, _, _ = defined_steps(4, 1000, 64, steps=3)
    for results in ranks.run(by_pairs, ranks=4):
        for result, wanted in zip(results, expected, strict=True):
            assert_same_bits(result, wanted)


def over_shm(rank, world):
    import mcp_kernels.shm

    assert mcp_kernels.shm
    group = dist.new_group(list(range(world)), backend="shm")
    worker, server = onebit_buffers(4096, group, 64)
    x = inputs_of(rank, 0, 4096)
    return onebit_all_reduce(x, worker, server, group=group, block_size=64)


def test_shared_memory(ranks):
    pytest.importorskip("mcp_kernels._shm", reason="the _shm extension was not built")
    (expected,), _, _ = defined_steps(3, 4096, 64, steps=1)
    for result in ranks.run(over_shm, ranks=3):
        assert_same_bits(result, expected)


def in_flight(rank, world, is_async):
    states = [ErrorState.zeros(numel) for numel in (1000, 4096, 65)]
    results = []
    for step in range(3):
        calls = [
            compressed_all_reduce(
                inputs_of(rank, 10 * step + index, state.worker_error.numel()),
                state,
                op="sum",
                async_op=is_async,
                block_size=64,
            )
            for index, state in enumerate(states)
        ]
        if is_async:
            for work in calls:
                work.advance()
            calls = [work.wait() for work in calls]
        results += calls
    return results


def test_several_in_flight_give_what_one_by_one_gives(ranks):
    for together, alone in zip(
        ranks.run(in_flight, True), ranks.run(in_flight, False), strict=True
    ):
        for result, wanted in zip(together, alone, strict=True):
            assert_same_bits(result, wanted)


def sum_and_mean(rank, world):
    x = inputs_of(rank, 0, 1000)
    sums = compressed_all_reduce(x, ErrorState.zeros(1000), op="sum")
    return sums, compressed_all_reduce(x, ErrorState.zeros(1000))


def test_sum_is_the_mean_times_the_ranks(ranks):
    for total, mean in ranks.run(sum_and_mean, ranks=4):
        assert_same_bits(total, mean * 4)


# --- messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: onebit_all_reduce(torch.ones(8), torch.zeros(7), torch.zeros(8)),
            "worker_error must be 8 contiguous elements .* onebit_buffers",
        ),
        (
            lambda: onebit_all_reduce(torch.ones(8), torch.zeros(8), torch.zeros(3)),
            "server_error must be 8",
        ),
        (
            lambda: onebit_all_reduce(torch.ones(8), torch.zeros(8).half(), torch.zeros(8)),
            "worker_error must be float32",
        ),
        (
            lambda: onebit_all_reduce(torch.ones(8).int(), torch.zeros(8), torch.zeros(8)),
            "flat must be float32, bfloat16 or float16, got torch.int32",
        ),
        (
            lambda: onebit_all_reduce(*[torch.zeros(8)] * 3, block_size=12),
            "block_size must be a positive multiple of 8, got 12",
        ),
        (
            lambda: compressed_all_reduce(torch.ones(8), ErrorState.zeros(8), None, "int3"),
            "codec must be one of onebit, int4, int8, fp8, got 'int3'",
        ),
        (
            lambda: compressed_all_reduce(torch.ones(8), ErrorState.zeros(8), op="max"),
            "op must be avg or sum, got 'max'",
        ),
        (
            lambda: onebit_all_reduce(*[torch.zeros(8)] * 3, out=torch.zeros(9)),
            r"out must be contiguous, \[8\] on cpu, got \[9\] on cpu",
        ),
        (
            lambda: onebit_all_reduce(*[torch.zeros(8)] * 3, out=torch.zeros(8).half()),
            "out must be torch.float32 as flat is, got torch.float16",
        ),
        (lambda: onebit_buffers(-1), "numel must be >= 0, got -1"),
        (lambda: onebit_buffers(8, block_size=7), "block_size must be .* got 7"),
    ],
)
def test_messages(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
