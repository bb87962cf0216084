"""Under ZeRO-3 on CPU ranks, a block's weights are on their way while the block before it runs."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from mcp_parallel.config import Config
from mcp_parallel.layout import Layout
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.parallel.parallelize import build_stages, gather_ahead

NUM_LAYERS = 3


def order_of_events(rank, world, is_on):
    """What happens first to each block in one forward and backward: its gathering, its end."""
    base = Config()
    model_config = replace(base.model, num_layers=NUM_LAYERS, hidden_size=16, ffn_size=16)
    layout = Layout(dp=world, zero=3)
    config = replace(
        base,
        model=replace(model_config, num_heads=2, num_kv_heads=2, seq_len=8),
        parallel=replace(base.parallel, dp=world, zero=3),
    )
    mesh = build_mesh(layout, torch.device("cpu"))
    model = build_stages(config, mesh)[0].model
    if not is_on:
        gather_ahead(model, False)
    events, index_of = [], {}
    for index, block in enumerate(model.blocks.values()):
        block.register_forward_hook(lambda *_, i=index: events.append(f"forward {i} ends"))
        block.register_full_backward_hook(lambda *_, i=index: events.append(f"backward {i} ends"))
        index_of[id(block._get_fsdp_state()._fsdp_param_groups[0])] = index
    unshard = FSDPParamGroup.unshard

    def noted(self, async_op=False):
        if id(self) in index_of and self._all_gather_result is None and not self.is_unsharded:
            events.append(f"{direction} {index_of[id(self)]} gathers")
            assert async_op == is_on
        return unshard(self, async_op)

    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with mock.patch.object(FSDPParamGroup, "unshard", noted):
        direction = "forward"
        loss = model(tokens).sum()
        direction = "backward"
        loss.backward()
    return events


@pytest.mark.parametrize("is_on", [True, False])
def test_blocks_are_gathered_ahead(ranks, is_on):
    for events in ranks.run(order_of_events, is_on, ranks=2):
        for index in range(NUM_LAYERS - 1):
            before = f"forward {index} ends"
            assert (events.index(f"forward {index + 1} gathers") < events.index(before)) == is_on
        for index in range(NUM_LAYERS):
            assert events.count(f"forward {index} gathers") == 1
            assert events.count(f"backward {index} gathers") == 1
        if is_on:
            for index in range(1, NUM_LAYERS):
                ahead = events.index(f"backward {index - 1} gathers")
                assert ahead < events.index(f"backward {index} ends")
