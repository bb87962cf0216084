"""Sequences that ranks share: memory of a training step at 32k tokens, and ring against all-gather.

Memory is a whole step of the trainer on one sample: the peak of what torch had allocated while the
step ran, beyond what was there before (parameters, their optimizer state), and the peak growth of
the process, which the kernels' own scratch is part of. The largest rank counts.
Time is forward and backward of attention alone, both ways in turns, the slowest rank counting.

    python bench/bench_context.py --write docs/context_parallel.md

puts the tables between the marks in that file; without ``--write`` it prints them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcp_parallel.config import Config
from mcp_parallel.context.attention import ContextAttention
from mcp_parallel.context.split import Split
from mcp_parallel.launch.local import launch_local
from mcp_parallel.layout import Layout
from mcp_parallel.memory.track import AllocationTracker
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.step import TrainingStep

KINDS = ("ring", "all_gather")
LENGTH = 32_768
TIMED_LENGTH = 8_192
TIMED_SHAPE = (4, 2, 64)  # heads, KV heads, head size
MARKS = ("<!-- measured by bench/bench_context.py -->", "<!-- end -->")
MIB = 2**20


def status_mib(name: str) -> float:
    """``VmRSS`` or ``VmHWM`` of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    raise OSError(f"no {name} in /proc/self/status")


def forget_high_water() -> None:
    """Let ``VmHWM`` begin anew at the present size."""
    Path("/proc/self/clear_refs").write_text("5")


def configure(cp: int, kind: str, length: int) -> Config:
    base = Config()
    model = replace(
        base.model,
        preset=None,
        num_layers=2,
        hidden_size=64,
        num_heads=2,
        num_kv_heads=1,
        ffn_size=176,
        seq_len=length,
    )
    parallel = replace(base.parallel, cp=cp, cp_attention=kind)
    train = replace(base.train, global_batch_size=1, micro_batch_size=1)
    return replace(base, model=model, parallel=parallel, train=train)


def measure_step(cp: int, kind: str, length: int) -> dict[str, float]:
    """One step: MiB of tensors and of the process at their peaks, and its seconds; collective."""
    config = configure(cp, kind, length)
    mesh = build_mesh(Layout.from_config(config.parallel), torch.device("cpu"))
    assert mesh is not None
    step = TrainingStep(config, mesh)
    tokens = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(1))
    forget_high_water()
    before, start = status_mib("VmRSS"), time.perf_counter()
    with AllocationTracker() as tracker:
        result = step(tokens, tokens.roll(-1, 1), 1e-3)
    seconds = time.perf_counter() - start
    figures = torch.tensor([tracker.peak_bytes / MIB, status_mib("VmHWM") - before, seconds])
    if mesh.world is not None:
        dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    return {
        **dict(zip(("tensors", "process", "seconds"), figures.tolist(), strict=True)),
        "loss": result.loss,
    }


def measure_attention(cp: int, length: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of forward and backward by kind and round, the slowest rank's; collective."""
    heads, kv_heads, size = TIMED_SHAPE
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    split = Split(cp, rank, length)
    generator = torch.Generator().manual_seed(2)
    shapes = [
        (1, length, heads, size),
        *[(1, length, kv_heads, size)] * 2,
        (1, length, heads, size),
    ]
    q, k, v, dout = (split.take(torch.randn(s, generator=generator)) for s in shapes)
    attends = {kind: ContextAttention(split, group, kind) for kind in KINDS}  # pyright: ignore[reportArgumentType]
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    grads = {}
    for turn in range(rounds + 1):
        for kind in KINDS if turn % 2 else reversed(KINDS):
            mine = [t.clone().requires_grad_() for t in (q, k, v)]
            dist.barrier()
            start = time.perf_counter()
            attends[kind](mine[0], mine[1], mine[2]).backward(dout)
            spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            if turn:  # the first connects the ranks
                times[kind].append(spent.item())
            grads[kind] = mine[1].grad
    # Sums of up to S products in two orders.
    torch.testing.assert_close(grads["ring"], grads["all_gather"], rtol=1e-3, atol=1e-4)
    return times


def run(request: dict[str, Any]) -> int:
    """What one process with ranks of its own does: forks must not follow threads."""

    def entry(context):
        if request["what"] == "step":
            found: Any = measure_step(request["cp"], request["kind"], request["length"])
        else:
            found = measure_attention(request["cp"], request["length"], request["rounds"])
        if context.rank == 0:
            sys.stdout.write(json.dumps(found) + "\n")
        return 0

    return launch_local(entry, request["cp"])


def ask(**request: Any) -> Any:
    """``run`` in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--run", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def steps_at(length: int) -> dict[tuple[int, str], dict[str, float]]:
    """A step's figures by (cp, kind); all train alike."""
    cases = [(1, "ring"), *((cp, kind) for cp in (2, 4) for kind in KINDS)]
    found = {(cp, kind): ask(what="step", cp=cp, kind=kind, length=length) for cp, kind in cases}
    losses = [figures["loss"] for figures in found.values()]
    # A mean of S losses near ln 256, each of sums in another order: units in its last place.
    assert max(losses) - min(losses) <= 4e-6, losses
    return found


def attention_at(length: int, rounds: int) -> dict[int, dict[str, list[float]]]:
    """Times of attention by cp, then kind."""
    return {cp: ask(what="attention", cp=cp, length=length, rounds=rounds) for cp in (2, 4)}


def tables(length: int, timed: int, rounds: int) -> str:
    """Both tables as Markdown."""
    steps, times = steps_at(length), attention_at(timed, rounds)
    one = steps[1, "ring"]
    lines = [
        f"A training step on one sample of {length:,} tokens, the largest rank:",
        "",
        "| cp | attention | tensors, MiB | of cp 1 | process, MiB | of cp 1 |",
        "|---|---|---|---|---|---|",
    ]
    for (cp, kind), figures in steps.items():
        tensors, process = figures["tensors"], figures["process"]
        lines.append(
            f"| {cp} | {kind if cp > 1 else '-'} | {tensors:.0f} | {tensors / one['tensors']:.2f} "
            f"| {process:.0f} | {process / one['process']:.2f} |"
        )
    heads, kv_heads, size = TIMED_SHAPE
    shape = f"{heads} heads of {size} over {kv_heads} KV heads"
    lines += [
        "",
        f"Forward and backward of attention over {timed:,} tokens, {shape}, {rounds} rounds:",
        "",
        "| cp | ring, ms (min / median) | all_gather, ms | all_gather over ring |",
        "|---|---|---|---|",
    ]
    for cp, by_kind in times.items():
        least, middle = (
            {kind: f(values) * 1e3 for kind, values in by_kind.items()}
            for f in (min, statistics.median)
        )
        ratio = [stat["all_gather"] / stat["ring"] for stat in (least, middle)]
        lines.append(
            f"| {cp} | {least['ring']:.0f} / {middle['ring']:.0f} "
            f"| {least['all_gather']:.0f} / {middle['all_gather']:.0f} "
            f"| {ratio[0]:.2f} / {ratio[1]:.2f} |"
        )
    return "\n".join(lines)


def write(path: Path, text: str) -> None:
    """Put ``text`` between the marks of a file."""
    before, _, rest = path.read_text().partition(MARKS[0])
    _, mark, after = rest.partition(MARKS[1])
    if not mark:
        raise ValueError(
            f"bench_context: {path} must hold {MARKS[0]} and {MARKS[1]}, in this order"
        )
    path.write_text(f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{after}")


def bench_context(benchmark):
    """Memory of a step over that of cp 1, and all-gather's time over the ring's."""
    length, timed, rounds = (1024, 512, 1) if benchmark.disabled else (16_384, 4096, 7)
    steps = benchmark.pedantic(lambda: steps_at(length), rounds=1)
    info = benchmark.extra_info
    for (cp, kind), figures in steps.items():
        ratio = figures["tensors"] / steps[1, "ring"]["tensors"]
        info[f"cp{cp} {kind} MiB"] = {"tensors": round(figures["tensors"]), "of cp1": ratio}
        # Every rank holds its share of the positions; without that there is no point in sharing.
        assert cp == 1 or ratio < 0.75, (cp, kind, ratio)
    for cp, by_kind in attention_at(timed, rounds).items():
        info[f"cp{cp} all_gather over ring"] = {
            name: round(f(by_kind["all_gather"]) / f(by_kind["ring"]), 3)
            for name, f in (("min", min), ("median", statistics.median))
        }


def main() -> int:
    """Print the tables, or write them into a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="file whose marked part the tables replace")
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--timed-length", type=int, default=TIMED_LENGTH)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        return run(json.loads(args.run))
    text = tables(args.length, args.timed_length, args.rounds)
    if args.write:
        write(args.write, text)
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
