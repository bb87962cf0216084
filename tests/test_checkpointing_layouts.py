"""Activation checkpointing and offload change no bit at any layout; compression, no first loss."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from mcp_parallel.check import check
from mcp_parallel.config import Config, ParallelConfig
from mcp_parallel.layout import Layout
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.step import TrainingStep

STEPS, BATCH = 2, 8
LAYOUTS = {
    "one": Layout(),
    "dp2": Layout(dp=2),
    "tp2": Layout(tp=2),
    "tp2 no-sp": Layout(tp=2, sequence_parallel=False),
    "pp2": Layout(pp=2),
    "pp2 zero_bubble": Layout(pp=2, schedule="zero_bubble"),
    "pp2 zbv": Layout(pp=2, schedule="zbv"),
    "zero3": Layout(dp=2, zero=3),
    "tp2pp2 dualpipev": Layout(tp=2, pp=2, schedule="dualpipev"),
    "dp2tp2 zero3": Layout(dp=2, tp=2, zero=3),
}
POLICIES = {
    "plain": {},
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "offload": {"offload": True},
}
COMPRESSED = {
    "int8": {"activation_compression": "int8"},
    "selective fp8": {
        "activation_checkpointing": "selective",
        "activation_compression": "fp8",
    },
    "full bf16": {"activation_checkpointing": "full", "activation_compression": "bf16"},
}


def configure(layout, memory, precision="fp32"):
    base = Config.from_mapping(
        {
            "model": {
                "preset": None,
                "num_layers": 4,
                "hidden_size": 32,
                "num_heads": 4,
                "num_kv_heads": 2,
                "ffn_size": 48,
                "vocab_size": 257,
                "seq_len": 36,
            }
        }
    )
    train = replace(
        base.train,
        steps=STEPS,
        warmup_steps=1,
        precision=precision,
        global_batch_size=BATCH,
        micro_batch_size=BATCH // layout.dp // (4 if layout.pp > 1 else 2),
    )
    parallel = ParallelConfig(**asdict(layout))
    config = replace(base, parallel=parallel, train=train, memory=replace(base.memory, **memory))
    check(config)
    return config


def run(rank, world, layout, policies, precision="fp32"):
    """Losses, norms and this rank's values after some steps, of each policy."""
    mesh = build_mesh(layout, torch.device("cpu"))
    results = []
    for memory in policies:
        config = configure(layout, memory, precision)
        step = TrainingStep(config, mesh)
        figures = []
        for index in range(STEPS):
            generator = torch.Generator().manual_seed(index)
            tokens = torch.randint(257, (BATCH, 36), generator=generator)
            rows = tokens[step.rows().start : step.rows().stop]
            result = step(rows, rows.roll(-1, 1), 1e-3)
            figures.append((result.loss, result.grad_norm))
        results.append((figures, [shard.local.clone() for shard in step.shards]))
    return results


@pytest.mark.parametrize("name", ["tp2", "pp2"])
def test_offload_changes_no_bit_in_16_bits(ranks, name):
    """fp32 values of the weights are below the model, and moments."""
    layout, policies = LAYOUTS[name], [POLICIES["plain"], POLICIES["offload"]]
    for plain, below in ranks.run(run, layout, policies, "bf16", ranks=layout.world_size):
        assert plain[0] == below[0]
        assert all(torch.equal(got, want) for got, want in zip(below[1], plain[1], strict=True))


SLOW = ("tp2 no-sp", "pp2 zero_bubble", "tp2pp2 dualpipev", "dp2tp2 zero3")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in LAYOUTS]
)
def test_checkpointing_and_offload_change_no_bit(ranks, name):
    layout = LAYOUTS[name]
    policies = {**POLICIES, **COMPRESSED}
    for results in ranks.run(run, layout, list(policies.values()), ranks=layout.world_size):
        plain, *others = results
        for policy, (figures, values) in zip(list(policies)[1:], others, strict=True):
            if policy in COMPRESSED:
                assert figures[0][0] == plain[0][0][0], policy
                assert figures[0][1] != plain[0][0][1], policy  # something was packed
                # Near: two steps of 1e-3 on gradients that are off by 2^-4 at most.
                assert abs(figures[-1][0] - plain[0][-1][0]) < 1e-2, policy
                continue
            assert figures == plain[0], policy
            for got, want in zip(values, plain[1], strict=True):
                assert torch.equal(got, want), policy
