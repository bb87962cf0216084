"""Collectives of two ranks on one host: shared memory beside gloo and beside plain memcpy.

Both backends live in the same two forked processes, one thread each, pinned to a core each where
there are two. A round runs a block of calls of gloo, then of ours, each after a barrier, so that a
busy moment hits both; a block of small calls holds many, as a training step does. What counts is
the time of one call on the slower of the two ranks. The limit is what memory alone would take:
a two-rank all-reduce by halves moves 1.5 times its bytes a rank, both ranks at once; copying that
much is timed in the same rounds. DeepSpeed's shared-memory all-reduce stands beside ours where
`deepspeed` and what it needs to compile that op are installed; where not, the bench says why.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("mcp_kernels._shm", reason="the _shm extension was not built")
pytest.importorskip("mcp_kernels.shm")  # registers the backend

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from ranks import RankPool

WORLD = 2
KIB, MIB = 1 << 10, 1 << 20
SIZES = {
    "4KiB": 4 * KIB,
    "64KiB": 64 * KIB,
    "256KiB": 256 * KIB,
    "1MiB": MIB,
    "4MiB": 4 * MIB,
    "16MiB": 16 * MIB,
    "64MiB": 64 * MIB,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Bytes that a rank copies, as a multiple of those of the tensor.
COPIED = {"all_reduce": 1.5, "reduce_scatter": 1.0, "all_gather": 2.0, "broadcast": 1.0}


ROUNDS = 40


def calls_per_block(size):
    return max(1, min(50, 2 * MIB // size))


def num_rounds(size):
    return ROUNDS if size < 16 * MIB else 8


def calls(op, x, group):
    """The call to be timed, and a check of what it did."""
    half = x.numel() // WORLD
    if op == "all_reduce":
        return lambda: dist.all_reduce(x, group=group)
    if op == "broadcast":
        return lambda: dist.broadcast(x, 0, group=group)
    if op == "all_gather":
        out = torch.empty(2 * x.numel(), dtype=x.dtype)
        return lambda: group._allgather_base(out, x).wait()
    out = torch.empty(half, dtype=x.dtype)
    return lambda: group._reduce_scatter_base(out, x, dist.ReduceScatterOptions()).wait()


def load_deepspeed():
    """Compile DeepSpeed's shared-memory op, once; the reason why it cannot be, or ""."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from deepspeed.ops.op_builder import ShareMemCommBuilder

            ShareMemCommBuilder().load(verbose=False)
    except Exception as error:  # whatever a compiler or an import may raise
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def deepspeed_all_reduce(rank, world, x):
    """DeepSpeed's call for ``x``; it has one group, all ranks of one host."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepspeed.ops.op_builder import ShareMemCommBuilder

        module = ShareMemCommBuilder().load(verbose=False)
    if not hasattr(deepspeed_all_reduce, "is_ready"):
        # Its segment is named after these, and stays in /dev/shm when the program has ended.
        os.environ |= {"LOCAL_SIZE": str(world), "MASTER_ADDR": "bench"}
        os.environ["MASTER_PORT"] = str(os.getppid())
        module.initialize(world, rank)
        deepspeed_all_reduce.is_ready = True
    return lambda: torch.ops.deepspeed.inference_all_reduce_(x)


def check_all_reduce(group, rank, size, dtype):
    """No number is told of a sum that is wrong."""
    x = torch.arange(size // dtype.itemsize) % 32 + rank
    total = x.to(dtype)
    dist.all_reduce(total, group=group)
    assert torch.equal(total.long(), 2 * x + 1 - 2 * rank)


def compare(rank, world, op, size, dtype, has_deepspeed):
    """Seconds of a call in each round of gloo, shm and memcpy on this rank."""
    if len(os.sched_getaffinity(0)) >= WORLD:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    gloo = dist.group.WORLD
    shm = dist.new_group(list(range(world)), backend="shm")
    check_all_reduce(shm, rank, size, dtype)
    x = torch.zeros(size // dtype.itemsize, dtype=dtype)  # zeros stay zeros, however often summed
    runs = {"gloo": calls(op, x, gloo), "shm": calls(op, x, shm)}
    if op == "all_reduce":
        y = torch.zeros_like(x)  # each has its own, so that none finds it in the cache
        runs["direct"] = lambda: shm.direct.sum_(y)  # as the ops of this package call it
    if has_deepspeed:
        runs["deepspeed"] = deepspeed_all_reduce(rank, world, torch.zeros_like(x))
    source = torch.ones(int(COPIED[op] * size), dtype=torch.uint8)
    target = torch.empty_like(source)
    runs["memcpy"] = lambda: target.copy_(source)
    times = {name: [] for name in runs}
    count = calls_per_block(size)
    for number in range(num_rounds(size) + 2):
        for name, run in runs.items():
            shm.barrier()
            start = time.perf_counter()
            for _ in range(count):
                run()
            if number >= 2:  # the first rounds touch memory for the first time
                times[name].append((time.perf_counter() - start) / count)
    return times


@pytest.fixture(scope="module")
def pair():
    pool = RankPool(WORLD)
    yield pool
    pool.close()
    for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*bench_{os.getpid()}_*"):
        left.unlink()


@pytest.fixture(scope="module")
def deepspeed_refusal():
    """Why DeepSpeed is not timed; "" where it is."""
    return load_deepspeed()


def quartile(values):
    return sorted(values)[len(values) // 4]


# Only a reduction looks at what the bytes mean.
CASES = [
    (op, size, dtype)
    for op in COPIED
    for size in SIZES
    for dtype in DTYPES
    if dtype == "fp32" or op == "all_reduce"
]


@pytest.mark.parametrize(("op", "size", "dtype"), CASES, ids=["-".join(case) for case in CASES])
def bench_shm(benchmark, pair, deepspeed_refusal, op, size, dtype):
    """One call of ``op``; bytes are those of the tensor that a rank passes in."""
    found = []
    has_deepspeed = op == "all_reduce" and not deepspeed_refusal

    def run():
        found.append(pair.run(compare, op, SIZES[size], DTYPES[dtype], has_deepspeed, timeout=300))

    benchmark.pedantic(run, rounds=1, iterations=1)
    slower = {
        name: [max(pair) for pair in zip(*(times[name] for times in found[-1]), strict=True)]
        for name in found[-1][0]
    }
    stats = {name: {"min": min(t), "median": quartile(t)} for name, t in slower.items()}
    ours = stats["shm"]
    ratio = {name: {k: stats[name][k] / ours[k] for k in ours} for name in stats}
    benchmark.extra_info |= {
        "us (min / p25)": {k: round(v * 1e6, 1) for k, v in ours.items()},
        "us of gloo (min / p25)": {k: round(v * 1e6, 1) for k, v in stats["gloo"].items()},
        "times faster than gloo": {k: round(v, 2) for k, v in ratio["gloo"].items()},
        "times the memcpy limit": {k: round(1 / v, 2) for k, v in ratio["memcpy"].items()},
    }
    if has_deepspeed:
        # DeepSpeed's is the op itself; torch.distributed's own Python is 4 us of ours.
        peer, direct = stats["deepspeed"], stats["direct"]
        benchmark.extra_info |= {
            "us of DeepSpeed (min / p25)": {k: round(v * 1e6, 1) for k, v in peer.items()},
            "times faster than DeepSpeed": {k: round(peer[k] / ours[k], 2) for k in peer},
            "the same, without torch.distributed": {k: round(peer[k] / direct[k], 2) for k in peer},
        }
    elif op == "all_reduce":
        why = {"min": "not timed", "median": deepspeed_refusal}
        benchmark.extra_info["times faster than DeepSpeed"] = why
