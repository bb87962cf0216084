"""Under ZeRO on CPU ranks with a network, gradients are summed while backward goes on."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from mcp_parallel.config import Config
from mcp_parallel.layout import Layout
from mcp_parallel.parallel import late_reduce
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.step import TrainingStep

NUM_LAYERS = 5
REDUCE = DefaultReduceScatter.__call__


def build(world, zero, rows):
    base = Config()
    model = replace(base.model, num_layers=NUM_LAYERS, hidden_size=16, ffn_size=16, seq_len=8)
    config = replace(
        base,
        model=replace(model, num_heads=2, num_kv_heads=2),
        parallel=replace(base.parallel, dp=world, zero=zero),
        train=replace(base.train, global_batch_size=6 * world, micro_batch_size=rows),
    )
    mesh = build_mesh(Layout(dp=world, zero=zero), torch.device("cpu"))
    assert mesh is not None
    return TrainingStep(config, mesh)


def train(step, index):
    tokens = torch.randint(256, (6, 9), generator=torch.Generator().manual_seed(index))
    result = step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 1e-2)
    assert step.gradients.late
    assert not any(late._under_way for late in step.gradients.late)
    return result.loss, result.grad_norm


class _SlowWork:
    """A sum whose result appears in memory when it is waited for, and not before."""

    def __init__(self, output, result):
        self.output, self.result = output, result
        output.fill_(float("nan"))

    def wait(self):
        self.output.copy_(self.result)


def _at_once(self, output_tensor, input_tensor, group, op, async_op=False):
    REDUCE(DefaultReduceScatter(), output_tensor, input_tensor, group, op)


def _when_waited_for(self, output_tensor, input_tensor, group, op, async_op=False):
    _at_once(self, output_tensor, input_tensor, group, op)
    return _SlowWork(output_tensor, output_tensor.clone())


def same_bits(rank, world, zero, rows):
    """Three steps with each sum done at once, and with each not there until it is waited for."""
    found = []
    for call in (_at_once, _when_waited_for):
        is_late = call is _when_waited_for
        step = build(world, zero, rows)
        if not is_late:
            for block in [*step.stages[0].model.blocks.values(), step.stages[0].model]:
                block.set_custom_reduce_scatter(DefaultReduceScatter())
        with mock.patch.object(DefaultReduceScatter, "__call__", call):
            results = [train(step, index) for index in range(3)]
        found.append((results, [shard.local.clone() for shard in step.shards]))
    (results, values), (late_results, late_values) = found
    assert results == late_results
    for one, other in zip(values, late_values, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("rows", [6, 2])
def test_late_sums_change_no_bit(ranks, zero, rows):
    ranks.run(same_bits, zero, rows, ranks=2)


def order_of_events(rank, world):
    step = build(world, 3, 6)
    events = []
    wait, add = late_reduce.LateReductions._wait_for_oldest, late_reduce.LateReductions.add

    def noted_wait(self):
        events.append("wait")
        wait(self)

    def noted_add(self, owner, work, packed):
        add(self, owner, work, packed)
        events.append(f"start {len(self._under_way)}")

    blocks = step.stages[0].model.blocks.values()
    for index, block in enumerate(blocks):
        block.register_full_backward_hook(lambda *_, i=index: events.append(f"backward {i} ends"))
    with (
        mock.patch.object(late_reduce.LateReductions, "_wait_for_oldest", noted_wait),
        mock.patch.object(late_reduce.LateReductions, "add", noted_add),
    ):
        train(step, 0)
    return events


def test_backward_goes_on_while_sums_travel(ranks):
    for events in ranks.run(order_of_events, ranks=2):
        starts = [event for event in events if event.startswith("start")]
        assert len(starts) == NUM_LAYERS + 1
        # One is under way when the next starts, and never a third.
        assert starts == ["start 1", *["start 2"] * NUM_LAYERS]
        assert events.count("wait") == NUM_LAYERS + 1
        # The last block's sum starts before the block below it runs backward, and is waited for
        # after that.
        below = events.index(f"backward {NUM_LAYERS - 2} ends")
        assert events.index("start 1") < below < events.index("wait")
