"""1-bit Adam's state at another layout: what momentum and errors hold together stays the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_onebit_trainer import advance, make_step

from mcp_kernels import onebit_decompress
from mcp_kernels.ops import _comm
from mcp_parallel.layout import Layout
from mcp_parallel.snapshot import load_step, save_step

STOP = 6


def held_momentum(step):
    """{name: of plain gradients, float64, what the momentum says and the errors still owe}."""
    found = {}
    for bucket in step.optimizer.adam.buckets:
        padded, block = bucket.layout.padded_numel, bucket.layout.block_size
        total = bucket.exp_avg
        if bucket.is_frozen:
            if total is None:
                total = onebit_decompress(bucket.bits, bucket.scales, padded, block)
            owed = bucket.worker_error.double()
            if bucket.group is not None:
                dist.all_reduce(owed, group=bucket.group)
                owed /= bucket.group.size()
                owed += _comm.gather(bucket.server_error, bucket.group, 0)
            factors = bucket.preconditioner.double()
            total = torch.where(factors > 0, (total.double() + owed) / factors, 0.0)
        views = bucket.flat.views(total.double())
        found |= {name: view.clone() for name, view in zip(bucket.flat.names, views, strict=True)}
    return found


def masked(step):
    """Coordinates without update, here."""
    adam = step.optimizer.adam
    return sum(
        0 if b.preconditioner is None else int((b.preconditioner == 0).sum()) for b in adam.buckets
    )


def save(rank, world, folder, layout, options):
    step = make_step(layout, **options)
    advance(step, 0, STOP)
    held = held_momentum(step)
    save_step(Path(folder), STOP, step)
    return held, masked(step)


def load(rank, world, folder, layout, options):
    step = make_step(layout, **options)
    load_step(Path(folder) / "checkpoints" / f"step_{STOP:08d}", step)
    held, hidden = held_momentum(step), masked(step)
    before = {shard.name: shard.local.clone() for shard in step.shards}
    advance(step, STOP, STOP + 1)
    return held, hidden, before, {shard.name: shard.local.clone() for shard in step.shards}


@pytest.mark.parametrize(
    "old, new",
    [
        (Layout(dp=2), Layout(dp=2, pp=2)),  # the tied embedding is not compressed any more
        (Layout(dp=2, pp=2), Layout(dp=2)),  # and the other way round
        (Layout(dp=2), Layout(dp=4)),
    ],
    ids=str,
)
def test_nothing_that_was_owed_is_lost(ranks, tmp_path, old, new):
    saved = ranks.run(save, str(tmp_path), old, {}, ranks=old.world_size)
    loaded = ranks.run(load, str(tmp_path), new, {}, ranks=new.world_size)
    before = {name: value for held, _ in saved for name, value in held.items()}
    after = {name: value for held, *_ in loaded for name, value in held.items()}
    assert before.keys() == after.keys()
    for name, value in before.items():
        # Momenta and errors are float32; errors are up to some ten times what they are added to.
        assert (after[name] - value).norm() <= 20 * 2.0**-24 * value.norm(), name
        assert value.norm() > 0


@pytest.mark.parametrize("new", [Layout(dp=2), Layout(dp=4, zero=1)], ids=str)
def test_masked_coordinates_stay_masked(ranks, tmp_path, new):
    """Tokens that no step of stage 1 had have rows of the embedding without variance."""
    options, old = {"tied": False}, Layout(dp=2)
    _, hidden = ranks.run(save, str(tmp_path), old, options, ranks=2)[0]
    assert hidden > 0
    for _, found, before, after in ranks.run(
        load, str(tmp_path), new, options, ranks=new.world_size
    ):
        assert found == hidden
        decay = 1 - 1e-2 * 0.1  # lr of these steps, the default weight decay
        rows = (after["embed"] - before["embed"] * decay).abs().amax(1)
        still = rows <= 2.0**-23 * before["embed"].abs().amax(1)
        # All of a masked row decays and does nothing else.
        assert still.sum() * before["embed"].shape[1] == hidden
