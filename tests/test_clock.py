"""The measured bubble: what a clock counts as work, and what ranks make of it together."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from mcp_parallel.config import Config
from mcp_parallel.data.batch import BatchSource
from mcp_parallel.data.corpus import open_corpus
from mcp_parallel.layout import Layout
from mcp_parallel.parallel.clock import Clock, Occupation, bubbles
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.step import TrainingStep


def test_a_clock_tells_work_from_waiting():
    clock = Clock(torch.device("cpu"))
    for _ in range(2):  # the second run forgets the first
        clock.start()
        with clock.working():
            time.sleep(0.02)
        time.sleep(0.03)
        with clock.working():
            time.sleep(0.01)
        occupation = clock.stop()
        # sleep never returns early, so these hold on any machine.
        assert occupation.busy_s >= 0.03
        assert occupation.wall_s - occupation.busy_s >= 0.03


def test_the_slowest_rank_sets_the_makespan():
    assert bubbles([Occupation(3.0, 4.0), Occupation(1.0, 3.0)]) == (0.25, 0.75)
    assert bubbles([Occupation(0.0, 0.0)] * 2) == (0.0, 0.0)


def train(rank, world, layout, slow_rank):
    """One step; the first block of the slow rank sleeps in its forwards."""
    base = Config.from_mapping(
        {
            "model": {
                "preset": None,
                "num_layers": 4,
                "hidden_size": 16,
                "num_heads": 2,
                "num_kv_heads": 2,
                "ffn_size": 16,
                "vocab_size": 256,
                "seq_len": 16,
            },
            "train": {"global_batch_size": 8, "micro_batch_size": 1},
        }
    )
    parallel = replace(
        base.parallel, dp=layout.dp, tp=layout.tp, pp=layout.pp, schedule=layout.schedule
    )
    config = replace(base, parallel=parallel)
    step = TrainingStep(config, build_mesh(layout, torch.device("cpu")))
    if rank == slow_rank:
        block = next(iter(step.stages[0].model.blocks.values()))
        block.register_forward_pre_hook(lambda *_: time.sleep(0.03))
    source = BatchSource(open_corpus(base.data, base.model), 0, 16, 8)
    inputs, targets = (torch.from_numpy(x) for x in source.batch(0, step.rows()))
    step(inputs, targets, 1e-3)
    dist.barrier()
    result = step(inputs, targets, 1e-3)
    occupation = step.executor.occupation
    return result.bubbles, None if occupation is None else (occupation.busy_s, occupation.wall_s)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_every_rank_learns_the_bubbles_of_all(ranks, schedule):
    layout = Layout(dp=2, pp=2, schedule=schedule)
    results = ranks.run(train, layout, 2)
    assert len({found for found, _ in results}) == 1
    times = [own for _, own in results]
    stages = [[r for r in range(4) if layout.coordinate(r).pp == p] for p in range(2)]
    means = [
        Occupation(*((a + b) / 2 for a, b in zip(times[one], times[two], strict=True)))
        for one, two in stages
    ]
    assert results[0][0] == pytest.approx(bubbles(means), rel=1e-12)
    # Rank 2's four forwards sleep, which is work of its stage and nobody else's.
    assert times[2][0] >= 4 * 0.03
    assert all(0 < busy_s < wall_s for busy_s, wall_s in times)


def test_without_a_pipeline_there_is_no_bubble(ranks):
    assert ranks.run(train, Layout(dp=2), -1, ranks=2)[0] == (None, None)
