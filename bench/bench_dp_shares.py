"""What unequal shares give on unequal hosts: one of two replicas takes twice as long.

The second rank sleeps after each block's forward pass for as long as its forward and backward take,
which uses no core. Equal shares, 2 to 1 by hand, and those that the ranks find by measuring take
turns in one pair of ranks; losses have to agree before anything is timed. Twelve micro-batches at
two speeds that differ by 2 are done in 8 units in place of 12: at best 1.5 times faster.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from bench_schedules import rounded

from mcp_parallel.config import Config
from mcp_parallel.launch.local import launch_local
from mcp_parallel.layout import Layout
from mcp_parallel.model.stage import Block
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.settle import settle
from mcp_parallel.step import TrainingStep

SLOWER = 2.0
# A block's backward pass takes about two of its forward.
FORWARDS = 3.0
SHARES = {"equal": None, "2,1": "2,1", "measured": "measured"}


def configure(shares):
    train = {"global_batch_size": 24, "micro_batch_size": 2}
    parallel = {"dp": 2, "dp_shares": shares}
    return Config.from_mapping({"model": {"preset": "tiny"}, "parallel": parallel, "train": train})


def slow_down():
    """Make every block of this process take ``SLOWER`` times as long."""
    forward = Block.forward

    def slowly(self, x, *side):
        start = time.perf_counter()
        out = forward(self, x, *side)
        time.sleep((SLOWER - 1) * FORWARDS * (time.perf_counter() - start))
        return out

    Block.forward = slowly


def measure(rank, rounds, folder):
    """Seconds of each shares' steps, and the shares themselves."""
    if rank == 1:
        slow_down()
    steps, shares = {}, {}
    for name, wanted in SHARES.items():
        config = configure(wanted)
        mesh = build_mesh(Layout.from_config(config.parallel), torch.device("cpu"))
        assert mesh is not None
        config = settle(config, mesh, folder)
        mesh = replace(mesh, layout=Layout.from_config(config.parallel))
        steps[name], shares[name] = TrainingStep(config, mesh), config.parallel.dp_shares
    model = configure(None).model
    length, vocab = model.seq_len, model.vocab_size
    whole = torch.randint(vocab, (24, length), generator=torch.Generator().manual_seed(0))
    times = {name: [] for name in steps}
    for turn in range(rounds + 1):
        losses = []
        for name, step in steps.items():
            tokens = whole[step.rows().start : step.rows().stop]
            dist.barrier()
            start = time.perf_counter()
            losses.append(step(tokens, tokens.roll(-1, 1), 1e-3).loss)
            seconds = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if turn > 0:
                times[name].append(seconds.item())
        # One update apart at most: sums in another order, carried on by Adam.
        assert max(losses) - min(losses) < 1e-3 * max(losses), losses
    return times, shares


def bench_dp_shares(benchmark):
    """Steps of each shares, and how many times faster than equal ones."""
    rounds = 1 if benchmark.disabled else 9
    # A process of its own: ranks are forks, and this one has run other benches' threads.
    command = [sys.executable, "-W", "ignore", __file__, str(rounds)]
    done = benchmark.pedantic(
        lambda: subprocess.run(command, capture_output=True, text=True, timeout=300), rounds=1
    )
    assert done.returncode == 0, done.stderr
    benchmark.extra_info.update(json.loads(done.stdout.splitlines()[-1]))


def main(rounds):
    """Run, and print one JSON object as the last line."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:

        def entry(context):
            times, shares = measure(context.rank, rounds, Path(folder) / str(context.rank))
            figures = {}
            for name, each in times.items():
                figures[f"{name} ({shares[name] or '1,1'})"] = rounded(
                    {
                        "min_s": min(each),
                        "median_s": statistics.median(each),
                        "times_faster_min": min(times["equal"]) / min(each),
                        "times_faster_median": statistics.median(times["equal"])
                        / statistics.median(each),
                    }
                )
            if context.rank == 0:
                sys.stdout.write(json.dumps(figures) + "\n")
            return 0

        return launch_local(entry, 2, preload=("mcp_parallel.step",))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 9))
