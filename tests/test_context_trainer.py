"""The trainer where ranks share sequences: what is kept for backward, number formats, the command.

That every layout trains alike is the parity matrix's business.
"""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from configs import config_of
from ranks import PATIENCE_S

from mcp_parallel.data.source import documents_of, open_data, source_of
from mcp_parallel.layout import Layout
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.step import TrainingStep

SMALL = {
    "model__preset": None,
    "model__num_layers": 2,
    "model__hidden_size": 32,
    "model__num_heads": 4,
    "model__num_kv_heads": 2,
    "model__ffn_size": 48,
    "model__seq_len": 36,
    "train__global_batch_size": 4,
    "train__micro_batch_size": 2,
}


def run_steps(rank, world, changes, steps=3):
    """(losses, gradient norms, this rank's final values by name) of a few steps."""
    config = config_of(**{**SMALL, **changes})
    layout = Layout.from_config(config.parallel)
    step = TrainingStep(config, build_mesh(layout, torch.device("cpu")))
    source = source_of(open_data(config), config)
    figures = []
    for index in range(steps):
        inputs, targets = source.batch(index, step.rows())
        documents = documents_of(source, config, index, step.rows())
        result = step(
            torch.from_numpy(inputs),
            torch.from_numpy(targets),
            1e-3,
            documents=None if documents is None else torch.from_numpy(documents),
        )
        figures.append((result.loss, result.grad_norm))
    return figures, {shard.name: shard.local.clone() for shard in step.shards}


@pytest.mark.parametrize("kind", ["ring", "all_gather"])
def test_checkpointing_changes_no_bit(ranks, kind):
    """Blocks that run again send again, in the same order on every rank."""
    changes = {"parallel__cp": 3, "parallel__cp_attention": kind}
    changes |= {"data__document_masking": True, "data__document_separator": 10}
    plain = ranks.run(run_steps, changes, ranks=3)
    for policy in ("selective", "full"):
        again = ranks.run(
            run_steps, {**changes, "memory__activation_checkpointing": policy}, ranks=3
        )
        for (figures, values), (want_figures, want_values) in zip(again, plain, strict=True):
            assert figures == want_figures
            for name, value in values.items():
                assert torch.equal(value, want_values[name]), name


def test_kept_bits_may_be_fewer(ranks):
    """int8 activations: the log-sum-exps that join blocks stay exact, so the loss stays near."""
    changes = {"parallel__cp": 2, "parallel__cp_attention": "ring"}
    plain = ranks.run(run_steps, changes, ranks=2)
    packed = ranks.run(run_steps, {**changes, "memory__activation_compression": "int8"}, ranks=2)
    for (loss, norm), (want_loss, want_norm) in zip(packed[0][0], plain[0][0], strict=True):
        assert abs(loss - want_loss) <= 5e-3 * want_loss
        # Half a step of 1/127 of a block's largest value, on every activation alike.
        assert abs(norm - want_norm) <= 2e-2 * want_norm
    assert packed[0][0] != plain[0][0]


def test_bf16_is_near_fp32(ranks):
    """Within what bf16 differs from fp32 on one process."""
    sizes = {"model__seq_len": 40}
    wide = ranks.run(run_steps, sizes, ranks=1)[0][0]
    shared = ranks.run(
        run_steps,
        {**sizes, "train__precision": "bf16", "parallel__cp": 4, "parallel__cp_attention": "ring"},
        ranks=4,
    )
    for (loss, _), (want, _) in zip(shared[0][0], wide, strict=True):
        assert abs(loss - want) <= 5e-3


def test_every_rank_knows_the_same(ranks):
    results = ranks.run(run_steps, {"parallel__cp": 2, "parallel__tp": 2}, ranks=4)
    assert all(figures == results[0][0] for figures, _ in results)
    assert np.isfinite(results[0][0]).all()


def test_one_bit_a_value_goes_over_dp_and_cp_alike(ranks):
    """After the switch the ranks of dp and cp are one group: replicas stay equal bit for bit."""
    changes = {"train__optimizer": "onebit_adam", "train__freeze_step": 2}
    changes |= {"train__warmup_steps": 1, "parallel__dp": 2, "parallel__cp": 2}
    results = ranks.run(run_steps, changes, 5)
    exact = ranks.run(run_steps, {"parallel__dp": 2, "parallel__cp": 2}, 5)
    for figures, values in results:
        assert figures == results[0][0]
        for name, value in values.items():
            assert torch.equal(value, results[0][1][name]), name
    # The same training up to the step whose gradient is the first to be coded, and not after it.
    same = [a == b for (a, _), (b, _) in zip(results[0][0], exact[0][0], strict=True)]
    assert same[0]
    assert not same[-1]


def test_the_command_trains(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "mcp_parallel", "train", "--json"]
    command += ["--run-dir", str(tmp_path), "--set", "data.document_masking=true"]
    sizes = "num_layers=1 hidden_size=16 num_heads=2 num_kv_heads=1 ffn_size=24 vocab_size=256"
    for size in ["preset=none", *sizes.split(), "seq_len=32"]:
        command += ["--set", f"model.{size}"]
    command += ["--cp", "2", "--zero", "1", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])["last"]
    assert last["step"] == 2
    assert last["tokens"] == 2 * 16 * 32
