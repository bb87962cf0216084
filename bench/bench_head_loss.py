"""Head and loss without logits beside ``F.cross_entropy``: time and peak memory of a step.

One thread; both give the loss and the gradients of hidden states and head, which are compared
first. Memory is the process's own peak above what it held before (``VmHWM``, which Linux resets on
request), with both gradients in it. The recomputing form and a tiny vocabulary stand beside them.
"""

from __future__ import annotations

import ctypes
import re
import statistics
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from mcp_parallel.parallel.head_loss import head_loss

# positions, hidden size, vocabulary, rounds
SIZES = {
    "256": (512, 128, 256, 200),
    "8k": (1024, 384, 8192, 8),
    "32k": (1024, 512, 32_768, 5),
    "128k": (1024, 512, 131_072, 3),
}


def plain(x, weight, targets):
    return F.cross_entropy(F.linear(x, weight), targets)


def ours(x, weight, targets, recompute=False):
    return head_loss(x, weight, targets, scale=1 / len(targets), recompute=recompute)


WAYS = {"ours": ours, "recomputing": partial(ours, recompute=True), "plain": plain}


def step(way, x, weight, targets):
    x.grad = weight.grad = None
    loss = way(x, weight, targets)
    loss.backward()
    return loss.detach(), x.grad, weight.grad


def memory(field):
    """Bytes of this process: VmRSS now, VmHWM at its peak."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", status)[1])


def peak_bytes(run, *leaves):
    for leaf in leaves:
        leaf.grad = None
    ctypes.CDLL(None).malloc_trim(0)  # what earlier runs left would hide what this one takes
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak
    before = memory("VmRSS")
    run()
    return memory("VmHWM") - before


@pytest.mark.parametrize("size", SIZES)
def bench_head_loss(benchmark, size):
    """In turns; ratios are plain over ours."""
    positions, hidden, vocab, rounds = SIZES[size]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(positions, hidden, generator=generator).requires_grad_()
    weight = (0.02 * torch.randn(vocab, hidden, generator=generator)).requires_grad_()
    targets = torch.randint(vocab, (positions,), generator=generator)
    runs = {name: partial(step, way, x, weight, targets) for name, way in WAYS.items()}
    expected = runs["plain"]()
    for run in (runs["ours"], runs["recomputing"]):
        torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-6)
    del expected
    peaks = {name: peak_bytes(run, x, weight) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}

    def take_turns():
        for name in sorted(runs):
            start = time.process_time()
            runs[name]()
            times[name].append(time.process_time() - start)

    benchmark.pedantic(take_turns, rounds=1 if benchmark.disabled else rounds)
    seconds = {k: {"min": min(t), "median": statistics.median(t)} for k, t in times.items()}
    info = benchmark.extra_info
    info["ms"] = {k: round(1e3 * s, 2) for k, s in seconds["ours"].items()}
    for name in ("ours", "recomputing"):
        info[f"plain over {name}, time"] = {
            k: round(seconds["plain"][k] / seconds[name][k], 2) for k in seconds[name]
        }
    mib = {name: round(peak / 2**20) for name, peak in peaks.items()}
    info["peak MiB, ours / plain"] = {"min": mib["ours"], "median": mib["plain"]}
    info["peak MiB, recomputing / plain"] = {"min": mib["recomputing"], "median": mib["plain"]}
