"""A run that leaves the finite numbers ends, saves nothing, and says where to go on from."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from configs import config_of
from contexts import rank_context
from ranks import PATIENCE_S

from mcp_parallel.cli.arguments import add_run_arguments, resolve_arguments
from mcp_parallel.errors import DIVERGED, OK
from mcp_parallel.launch.start import choose_folder, find_start
from mcp_parallel.monitor.divergence import find_recovery
from mcp_parallel.trainer import Trainer

MODEL = {
    "preset": None,
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "ffn_size": 24,
    "vocab_size": 256,
    "seq_len": 16,
}
# Decoupled decay multiplies every matrix by 1 - lr * weight_decay a step, -3 here: within a few
# steps products of a few of them leave float32.
EXPLODING = {"lr": 2.0, "weight_decay": 2.0}


def run_config(dp, *, steps, every, lr, **train):
    return config_of(
        **{f"model__{key}": value for key, value in MODEL.items()},
        **{f"train__{key}": value for key, value in train.items()},
        train__lr=lr,
        train__min_lr=lr / 10,
        train__warmup_steps=0,
        train__steps=steps,
        train__global_batch_size=4,
        train__micro_batch_size=2,
        parallel__dp=dp,
        checkpoint__every=every,
        checkpoint__keep=100,
    )


def fit(config, run_dir, rank=0, world=1, resume_from=None):
    context = rank_context(rank, world)
    return Trainer(config, context, None, run_dir, resume_from=resume_from).fit()


def fit_on_rank(rank, world, run_dir, every):
    config = run_config(world, steps=50, every=every, **EXPLODING)
    return fit(config, Path(run_dir), rank, world)


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("every", [1, 2])
def test_ranks_stop_alike_and_name_the_last_good_checkpoint(ranks, tmp_path, capfd, every):
    run_dir = tmp_path / "a run"
    assert ranks.run(fit_on_rank, str(run_dir), every, ranks=2) == [DIVERGED, DIVERGED]
    failed = rows(run_dir)[-1]["step"] - 1
    assert 1 < failed < 20
    steps = sorted(int(path.name[-8:]) for path in (run_dir / "checkpoints").iterdir())
    # Nothing after the failure, and the newest that a finite step was taken from is the good one.
    assert steps == list(range(every, failed + 1, every))
    good = max(step for step in steps if step < failed)
    recovery = find_recovery(run_dir, failed)
    assert recovery.step == good
    assert recovery.is_newest == (good == steps[-1])

    # It is good: from there a step with a small rate is finite. From the newest, if it is another,
    # it is not.
    for step in {good, steps[-1]}:
        config = run_config(1, steps=step + 1, every=0, lr=1e-6)
        path = run_dir / "checkpoints" / f"step_{step:08d}"
        status = fit(config, tmp_path / f"again-{step}", resume_from=path)
        assert status == (OK if step == good else DIVERGED)
    capfd.readouterr()


def test_what_a_run_began_with_is_the_last_resort(tmp_path, capfd):
    first = tmp_path / "first"
    assert fit(run_config(1, steps=1, every=0, lr=1e-3), first) == OK
    start = first / "checkpoints" / "step_00000001"
    config = run_config(1, steps=50, every=0, **EXPLODING)
    capfd.readouterr()
    assert fit(config, tmp_path / "second", resume_from=start) == DIVERGED
    out = capfd.readouterr().out
    assert f"last good checkpoint: step 1, {start}" in out
    assert f"next: mcp-parallel train --resume {start} --run-dir NEW --set train.lr=0.2" in out


def test_a_damaged_checkpoint_is_not_good(tmp_path, capfd):
    config = run_config(1, steps=3, every=1, lr=1e-3)
    assert fit(config, tmp_path) == OK
    checkpoints = tmp_path / "checkpoints"
    assert find_recovery(tmp_path, 4).step == 3
    assert find_recovery(tmp_path, 3).step == 2
    (checkpoints / "step_00000002" / "manifest.json").write_text("{}")
    assert find_recovery(tmp_path, 3).step == 1
    assert find_recovery(tmp_path, 1).path is None
    capfd.readouterr()


def test_the_command_tells_people_and_programs(tmp_path):
    """Through the launcher on two ranks; and the command that it prints trains on."""
    run_dir = tmp_path / "run"
    sets = {**{f"model.{key}": value for key, value in MODEL.items() if value}, "monitor.every": 7}
    sets |= {"model.preset": "null", "train.global_batch_size": 4, "train.micro_batch_size": 2}
    sets |= {f"train.{key}": value for key, value in EXPLODING.items()}
    sets["train.warmup_steps"] = 0
    sets |= {"parallel.dp": 2, "train.steps": 50, "checkpoint.every": 2, "checkpoint.keep": 100}
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-W", "ignore", "-m", "mcp_parallel", "train", "--json"]
    done = subprocess.run(
        [*command, "--run-dir", str(run_dir), *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == DIVERGED, done.stderr
    outcome = json.loads(done.stdout)
    good = outcome["last_good"]
    assert outcome["status"] == DIVERGED
    assert good["step"] < outcome["last"]["step"] - 1
    assert f"last good checkpoint: step {good['step']}, {good['path']}\n" in done.stderr

    [advice] = re.findall(r"^next: mcp-parallel train (.*)$", done.stderr, re.MULTILINE)
    again = advice.replace("NEW", str(tmp_path / "again")).replace("lr=0.2", "lr=1e-6")
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    again += f" --set train.steps={good['step'] + 1} --set parallel.dp=1 --set train.min_lr=0"
    config, options = resolve_arguments(parser.parse_args(shlex.split(again)))
    start = find_start(config, choose_folder(config, options.run_dir))
    assert (start.step, str(start.resume_from)) == (good["step"], good["path"])
