"""Share of a training step that goes to communication, before and after overlap: tp2 and zero3.

    python bench/communication_share.py [--write] [--rounds N]

Two ranks, a thread each, 20M parameters (``bench_trainer``'s). Without overlap every collective is
a span of its own in which nothing is computed: their sum over the step's time is the share, and the
rest of the step is computing. With overlap the two cannot be told apart by a clock, so the share is
what the step takes beyond that same computing: 1 - computing / step. Both ways run in turns in one
pair of ranks; a waiting for the other rank counts as communication, in either.

    tp2     shared memory; off: each product whole, then its collective; on: products in blocks,
            summed and gathered while others are computed
    zero3   a link of 1 Gbit/s (``peers/throttled.py``, where only time passes); off: a block's
            weights are asked for when it runs, its gradients are waited for when it ran; on: while
            blocks before it run, and before the next but one sends its gradients

Writes the table into docs/performance.md with ``--write``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_trainer import LAYOUTS, LR, SIZES, configure
from peers.throttled import throttled_group

from mcp_kernels.ops import _fused
from mcp_kernels.spans import recording
from mcp_parallel.launch.local import launch_local
from mcp_parallel.layout import Layout
from mcp_parallel.parallel.late_reduce import LateReductions
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.parallel.parallelize import gather_ahead
from mcp_parallel.step import TrainingStep

LINK_BITS_PER_S = 1e9
DOC = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
TITLE = "## Communication share of a step"
LAYOUT_NAMES = ("tp2", "zero3")


def without_fused_bodies():
    return mock.patch.object(_fused, "workspace", return_value=None)


@contextlib.contextmanager
def nothing_ahead(step):
    """Weights come when they are needed, and every sum of gradients is waited for at once."""
    add = LateReductions.add

    def add_and_wait(self, *started):
        add(self, *started)
        self.wait_for(started[0])

    gather_ahead(step.stages[0].model, False)
    try:
        with mock.patch.object(LateReductions, "add", add_and_wait):
            yield
    finally:
        gather_ahead(step.stages[0].model, True)


def measure(context, name, rounds):
    """(step, communication) seconds of each round without overlap, and step seconds with it."""
    torch.set_num_threads(1)
    size = SIZES["20m"]
    config = configure(size, LAYOUTS[name])
    default = dist.group.WORLD
    if name == "zero3":
        link = throttled_group(dist.get_world_size())
        link.bits_per_s = LINK_BITS_PER_S
        dist.distributed_c10d._update_default_pg(link)
    mesh = build_mesh(Layout.from_config(config.parallel), context.device)
    for group in filter(None, (mesh.world, mesh.data_group)):
        if hasattr(group, "bits_per_s"):
            group.bits_per_s = LINK_BITS_PER_S
    step = TrainingStep(config, mesh)
    dist.distributed_c10d._update_default_pg(default)
    rows = step.rows()
    generator = torch.Generator().manual_seed(0)
    shape = (size.global_batch, size.shape.seq_len + 1)
    tokens = torch.randint(size.shape.vocab_size, shape, generator=generator)
    tokens = tokens[rows.start : rows.stop]
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    off = without_fused_bodies if name == "tp2" else lambda: nothing_ahead(step)
    found = {"off": [], "on": []}
    for turn in range(rounds + 1):
        for mode in ("off", "on") if turn % 2 else ("on", "off"):
            with off() if mode == "off" else contextlib.nullcontext(), recording() as recorder:
                dist.barrier()
                recorder.take_communication_s()
                start = time.perf_counter()
                step(inputs, targets, LR)
                seconds = time.perf_counter() - start
            if turn > 0:  # the first makes buffers
                found[mode].append((seconds, recorder.take_communication_s()))
    return found


def shares(found):
    """Shares by minimum and by median of the steps."""
    figures = {}
    for key, pick in (("min", min), ("median", statistics.median)):
        off_s = pick(seconds for seconds, _ in found["off"])
        computing_s = pick(seconds - waited for seconds, waited in found["off"])
        on_s = pick(seconds for seconds, _ in found["on"])
        figures[key] = {
            "off": 1 - computing_s / off_s,
            "on": max(0.0, 1 - computing_s / on_s),
            "faster": off_s / on_s,
        }
    return figures


def table(results):
    lines = [
        TITLE,
        "",
        "`python bench/communication_share.py --write`; its top says what is counted.",
        f"Two ranks on {os.cpu_count()} cores, 20M parameters, fp32; each cell is min, median.",
        "",
        "| layout | share without overlap | with overlap | step without over step with |",
        "| --- | --- | --- | --- |",
    ]
    for name, figures in results.items():
        low, middle = figures["min"], figures["median"]
        cells = [f"{100 * low[k]:.0f} %, {100 * middle[k]:.0f} %" for k in ("off", "on")]
        lines.append(
            f"| {name} | {cells[0]} | {cells[1]} | {low['faster']:.2f}, {middle['faster']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def put(section):
    """Replace the section of ``DOC``, or add it."""
    text = DOC.read_text(encoding="utf-8") if DOC.exists() else "# Performance\n"
    before, found, rest = text.partition(TITLE)
    after = rest.partition("\n## ")[2] if found else ""
    parts = [before.rstrip() + "\n", section, *(["## " + after] if after else [])]
    DOC.parent.mkdir(exist_ok=True)
    DOC.write_text("\n".join(parts), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--layout", choices=LAYOUT_NAMES, action="append", help="only this one")
    args = parser.parse_args()
    results = {}
    for name in args.layout or LAYOUT_NAMES:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "found.json"

            def rank(context, name=name, report=report):
                found = measure(context, name, args.rounds)
                if context.rank == 0:
                    report.write_text(json.dumps(found))
                return 0

            if launch_local(rank, 2):
                return 1
            results[name] = shares(json.loads(report.read_text()))
    section = table(results)
    sys.stdout.write(section)
    if args.write:
        put(section)
    return 0


if __name__ == "__main__":
    sys.exit(main())
