"""The compiled group: every collective against its definition, bit for bit where that is exact."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

_shm = pytest.importorskip("mcp_kernels._shm", reason="the _shm extension was not built")

PAGE = 4096
SUM = _shm.Reduction.sum
EPS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
TYPES = {
    torch.float32: _shm.Type.float32,
    torch.float64: _shm.Type.float64,
    torch.bfloat16: _shm.Type.bfloat16,
    torch.float16: _shm.Type.float16,
    torch.int64: _shm.Type.int64,
    torch.int32: _shm.Type.int32,
    torch.int16: _shm.Type.int16,
    torch.int8: _shm.Type.int8,
    torch.uint8: _shm.Type.uint8,
}
# None, one, a partial block, a block and a bit, several pieces of the smallest slots.
SIZES = (0, 1, 63, 64, 65, 1000, 20_011)


def make_group(rank, world, slot_bytes=PAGE, ring_bytes=PAGE, timeout_s=60.0):
    group = _shm.Group(
        name="test",
        token=secrets.token_hex(8),
        rank=rank,
        world=world,
        slot_bytes=slot_bytes,
        ring_bytes=ring_bytes,
        crowd=world,
        timeout_s=timeout_s,
    )
    names = [None] * world
    dist.all_gather_object(names, group.segment_name)
    group.connect(names)
    return group


def data(rank, n, dtype, seed=0):
    """The same on every rank for a given rank: each can compute what the others have."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(n, generator=generator).to(dtype)
    info = torch.iinfo(dtype)
    low, high = max(info.min, -(2**62)), min(info.max, 2**62)
    return torch.randint(low, high, (n,), generator=generator, dtype=torch.int64).to(dtype)


def poisoned(n, dtype):
    return torch.full((n,), float("nan") if dtype.is_floating_point else 77, dtype=dtype)


def all_reduce(group, x, out, reduction=SUM, average=False):
    at = (x.data_ptr(), out.data_ptr(), x.numel())
    group.all_reduce(*at, TYPES[x.dtype], reduction, average)


def check_sum(result, parts, divisor=1):
    """The sum in float64 of the same rounded inputs, within the error of adding in float32."""
    exact = torch.stack([part.double() for part in parts]).sum(0) / divisor
    dtype = result.dtype
    if dtype == torch.float64:
        torch.testing.assert_close(result, exact, rtol=2.0**-50, atol=1e-12)
        return
    steps = len(parts) * EPS[torch.float32] * sum(part.double().abs() for part in parts) / divisor
    bound = EPS[dtype] * exact.abs() * 1.01 + steps + 2.0**-25  # the last: half subnormals
    assert torch.all((result.double() - exact).abs() <= bound)


def _reductions(rank, world, dtype):
    group = make_group(rank, world)
    bits = []
    for n in SIZES:
        parts = [data(peer, n, dtype) for peer in range(world)]
        mine, out = parts[rank].clone(), poisoned(n, dtype)
        all_reduce(group, mine, out)
        assert torch.equal(mine, parts[rank]), "the input must stay"
        if dtype.is_floating_point:
            check_sum(out, parts)
        else:
            assert torch.equal(out, torch.stack(parts).sum(0, dtype=dtype))
        bits.append(out.clone())
        all_reduce(group, mine, mine)
        assert torch.equal(mine, out), "in place must be the same"

        for reduction, name in ((_shm.Reduction.max, "amax"), (_shm.Reduction.min, "amin")):
            all_reduce(group, parts[rank], out, reduction)
            assert n == 0 or torch.equal(out, getattr(torch.stack(parts), name)(0))
        all_reduce(group, parts[rank], out, SUM, average=True)
        if dtype.is_floating_point:
            check_sum(out, parts, world)

        rows = data(rank, world * n, dtype, seed=1)
        group.reduce_scatter(rows.data_ptr(), out.data_ptr(), n, TYPES[dtype], SUM, False)
        theirs = [data(peer, world * n, dtype, seed=1)[rank * n :][:n] for peer in range(world)]
        if dtype.is_floating_point:
            check_sum(out, theirs)
        else:
            assert torch.equal(out, torch.stack(theirs).sum(0, dtype=dtype))

        root = n % world
        target = poisoned(n, dtype)
        group.reduce(parts[rank].data_ptr(), target.data_ptr(), n, TYPES[dtype], SUM, False, root)
        if rank == root:
            assert torch.equal(target, bits[-1]), "one order of summing, so the same bits"
        else:
            assert torch.equal(target.isnan(), poisoned(n, dtype).isnan())
    return bits


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_reductions(ranks, dtype, world):
    first, *others = ranks.run(_reductions, dtype, ranks=world)
    for bits in others:
        for one, other in zip(first, bits, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), "equal bits"


def _special_values(rank, world):
    """NaN, infinities, the largest values and the rounding of ties."""
    group = make_group(rank, world)
    results = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        nan, inf = float("nan"), float("inf")
        largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
        ones = (nan, 1.0, inf, inf, -inf, largest, tiny, -tiny, 1.0, 1.0, 0.0, -0.0)
        eps = torch.finfo(dtype).eps
        others = (
            1.0,
            nan,
            -inf,
            inf,
            -inf,
            largest,
            tiny / 2,
            tiny / 4,
            eps / 2,
            1.5 * eps,
            -0.0,
            -0.0,
        )
        pair = [torch.tensor(v, dtype=torch.float64).to(dtype) for v in (ones, others)]
        for name in ("sum", "max", "min", "product"):
            out = poisoned(len(ones), dtype)
            all_reduce(group, pair[rank], out, getattr(_shm.Reduction, name))
            wide = [x.to(torch.float32) if dtype.itemsize == 2 else x for x in pair]
            meaning = {
                "sum": torch.add,
                "max": torch.maximum,
                "min": torch.minimum,
                "product": torch.mul,
            }
            expected = meaning[name](*wide).to(dtype)
            assert torch.equal(out.isnan(), expected.isnan()), (name, dtype)
            same = (out == expected) | out.isnan()
            assert torch.all(same), (name, dtype, out, expected)
        results[dtype] = True
    return len(results)


def test_special_values(ranks):
    assert ranks.run(_special_values, ranks=2) == [4, 4]


def _every_half(rank, world):
    """Each of the 65,536 patterns of a 16-bit type, plus zero and plus 0.3, is what torch says."""
    group = make_group(rank, world, slot_bytes=64 * PAGE)
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = patterns.view(dtype)
        for other in (0.0, 0.3):
            y = torch.full_like(x, other)
            out = poisoned(x.numel(), dtype)
            all_reduce(group, x if rank == 0 else y, out)
            expected = (x.float() + y.float()).to(dtype)
            assert torch.equal(out.isnan(), expected.isnan())
            assert torch.equal(out[~out.isnan()], expected[~out.isnan()])


def test_every_pattern_of_16_bits(ranks):
    ranks.run(_every_half, ranks=2)


def _bit_reductions(rank, world):
    group = make_group(rank, world)
    a, b = data(0, 100, torch.int32), data(1, 100, torch.int32)
    for name, expected in (("bit_and", a & b), ("bit_or", a | b), ("bit_xor", a ^ b)):
        out = poisoned(100, torch.int32)
        all_reduce(group, (a, b)[rank], out, getattr(_shm.Reduction, name))
        assert torch.equal(out, expected)
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="must have integers, got float32"):
        all_reduce(group, x, x, _shm.Reduction.bit_xor)
    x = torch.tensor([7, -7, 8], dtype=torch.int64)
    all_reduce(group, x, x, SUM, average=True)
    assert x.tolist() == [7, -7, 8]
    group.barrier()  # the refused call above left no trace
    return group.calls


def test_bits_and_refusals(ranks):
    assert ranks.run(_bit_reductions, ranks=2) == [5, 5]


def _copies(rank, world):
    group = make_group(rank, world)
    for n in (0, 1, 4096, 10_001):
        mine = data(rank, n, torch.uint8)
        everyone = [data(peer, n, torch.uint8) for peer in range(world)]
        rows = [poisoned(n, torch.uint8) for _ in range(world)]
        group.all_gather(mine.data_ptr(), [row.data_ptr() for row in rows], n)
        assert all(torch.equal(row, x) for row, x in zip(rows, everyone, strict=True))

        packed = poisoned(n * world, torch.uint8)  # a rank's part may already lie in its row
        packed[rank * n : (rank + 1) * n] = mine
        places = [packed.data_ptr() + n * peer for peer in range(world)]
        group.all_gather(places[rank], places, n)
        assert torch.equal(packed, torch.cat(everyone))

        for root in range(world):
            x = mine.clone()
            group.broadcast(x.data_ptr(), n, root)
            assert torch.equal(x, everyone[root])

            rows = [poisoned(n, torch.uint8) for _ in range(world)] if rank == root else []
            group.gather(mine.data_ptr(), [row.data_ptr() for row in rows], n, root)
            assert all(torch.equal(row, x) for row, x in zip(rows, everyone, strict=False))

            out = poisoned(n, torch.uint8)
            sources = everyone if rank == root else []
            group.scatter([x.data_ptr() for x in sources], out.data_ptr(), n, root)
            assert torch.equal(out, mine)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_copies(ranks, world):
    ranks.run(_copies, ranks=world)


def _exchange(rank, world, scale):
    group = make_group(rank, world)

    def block(source, target):
        size = scale * ((source + 2 * target) % 4)  # some are empty
        return data(source * world + target, size, torch.uint8)

    ins = [block(rank, peer) for peer in range(world)]
    expected = [block(peer, rank) for peer in range(world)]
    outs = [poisoned(x.numel(), torch.uint8) for x in expected]
    group.all_to_all(
        [x.data_ptr() for x in ins],
        [x.nbytes for x in ins],
        [x.data_ptr() for x in outs],
        [x.nbytes for x in outs],
    )
    assert all(torch.equal(out, x) for out, x in zip(outs, expected, strict=True))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("scale", [0, 1, 5000])
def test_all_to_all_of_uneven_parts(ranks, world, scale):
    ranks.run(_exchange, scale, ranks=world)


def _random_program(rank, world, seed):
    """A long row of calls of all kinds and sizes, with ranks that dawdle at random."""
    group = make_group(rank, world, slot_bytes=2 * PAGE)
    program = torch.Generator().manual_seed(seed)
    dawdle = torch.Generator().manual_seed(seed + 1 + rank)
    for number in range(300):
        kind, n = (int(torch.randint(high, (), generator=program)) for high in (5, 6000))
        root = number % world
        if torch.rand((), generator=dawdle) < 0.05:
            os.sched_yield()
        parts = [torch.full((n,), peer + number) for peer in range(world)]
        out = torch.full((n,), -1)
        if kind == 0:
            all_reduce(group, parts[rank], out)
            assert torch.equal(out, sum(parts))
        elif kind == 1:
            x = parts[rank].clone()
            group.broadcast(x.data_ptr(), x.nbytes, root)
            assert torch.equal(x, parts[root])
        elif kind == 2:
            rows = [torch.empty_like(out) for _ in parts]
            places = [row.data_ptr() for row in rows]
            group.all_gather(parts[rank].data_ptr(), places, out.nbytes)
            assert all(torch.equal(row, x) for row, x in zip(rows, parts, strict=True))
        elif kind == 3:
            rows = parts[rank].repeat(world)
            group.reduce_scatter(rows.data_ptr(), out.data_ptr(), n, TYPES[out.dtype], SUM, False)
            assert torch.equal(out, sum(parts))
        else:
            group.barrier()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_slots_are_never_rewritten_too_early(ranks, world):
    ranks.run(_random_program, 5, ranks=world)


def _two_groups(rank, world):
    one, two = make_group(rank, world), make_group(rank, world)
    x, y = torch.ones(10_000), torch.full((10_000,), 2.0)
    for _ in range(5):
        all_reduce(one, x, x)
        all_reduce(two, y, y)
    return x[0].item(), y[0].item()


def test_groups_do_not_meet(ranks):
    assert ranks.run(_two_groups, ranks=2) == [(32.0, 64.0)] * 2


def _names(rank, world):
    group = make_group(rank, world)
    return (Path("/dev/shm") / group.segment_name).exists()


def test_a_connected_group_has_no_name(ranks):
    assert ranks.run(_names) == [False] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world": 0}, "Group: world must be >= 1, got 0"),
        ({"rank": 1}, r"Group: rank must be in \[0, world\), got 1"),
        ({"slot_bytes": 100}, "Group: slot_bytes must be whole pages with a line for each rank"),
        ({"ring_bytes": 5000}, "Group: ring_bytes must be a power of two, at least a page"),
        ({"timeout_s": 0.0}, "Group: timeout_s must be > 0, got 0"),
    ],
)
def test_settings_are_checked(change, message):
    settings = {"name": "test", "token": "t", "rank": 0, "world": 1, "slot_bytes": PAGE}
    settings |= {"ring_bytes": PAGE, "crowd": 1, "timeout_s": 1.0} | change
    with pytest.raises(ValueError, match=message):
        _shm.Group(**settings)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_instruction_sets_agree_bit_for_bit(dtype):
    n = 4 * 64 + 37
    sources = [data(rank, n, dtype) for rank in range(3)]
    if dtype.is_floating_point:
        for x in sources:
            x[::11] *= 2.0**-10  # down to subnormals in float16
    best = _shm.supported_isas()[-1]
    results = {}
    try:
        for isa in _shm.supported_isas():
            _shm.set_isa(isa)
            for name in ("sum", "product", "min", "max"):
                for average in (False, True):
                    out, copy = poisoned(n, dtype), poisoned(n, dtype)
                    places = [x.data_ptr() for x in sources], out.data_ptr(), copy.data_ptr()
                    reduction = getattr(_shm.Reduction, name)
                    _shm.reduce(*places, n, TYPES[dtype], reduction, average)
                    assert torch.equal(out.view(torch.uint8), copy.view(torch.uint8))
                    results.setdefault((name, average), []).append(out.view(torch.uint8))
    finally:
        _shm.set_isa(best)
    for outs in results.values():
        assert all(torch.equal(out, outs[0]) for out in outs)
