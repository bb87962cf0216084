"""Data that cannot be read while a run trains: one message, one status, nothing lost."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from contexts import rank_context
from token_files import config_for, put_tokens

from mcp_parallel.config import ParallelConfig
from mcp_parallel.data.prepare import index as index_module
from mcp_parallel.data.prepare.index import TokenFileError
from mcp_parallel.data.source import open_data, source_of
from mcp_parallel.data.storage import StorageError
from mcp_parallel.errors import BAD_CONFIG, FAILED, OK
from mcp_parallel.layout import Layout
from mcp_parallel.trainer import Trainer

STEPS, GLOBAL_BATCH = 12, 4
BLOCK = 7
LAYOUTS = {
    "one": Layout(),
    "dp2": Layout(dp=2),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "dp2 zero3": Layout(dp=2, zero=3),
}


def configure(folder, layout=Layout(), **changes):  # noqa: B008 (frozen)
    config = config_for(
        folder,
        **{
            "model__num_layers": 2,
            "model__hidden_size": 32,
            "model__num_heads": 4,
            "model__num_kv_heads": 2,
            "model__ffn_size": 40,
            "train__steps": STEPS,
            "train__global_batch_size": GLOBAL_BATCH,
            "train__micro_batch_size": 1,
            "train__warmup_steps": 1,
            "checkpoint__every": 0,
            "monitor__tensorboard": False,
        }
        | changes,
    )
    return replace(config, parallel=ParallelConfig(**asdict(layout)))


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    """A token file whose block ``BLOCK`` has one wrong bit, and what it was before."""
    monkeypatch.setattr(index_module, "_MIN_BLOCK_BYTES", 256)
    folder = tmp_path / "tokens"
    folder.mkdir()
    put_tokens(str(folder))
    path = folder / "tokens.bin"
    good = path.read_bytes()
    content = bytearray(good)
    content[BLOCK * 256 + 100] ^= 4
    path.write_bytes(content)
    return folder, good


def first_bad_step(config):
    source = source_of(open_data(config), config)

    def is_good(step):
        try:
            source.batch(step, range(GLOBAL_BATCH))
        except TokenFileError:
            return False
        return True

    return next(step for step in range(STEPS) if not is_good(step))


def train(rank, world, config, folder, resume=None, plant=None):
    """Exit status of a rank and what it says on stderr and stdout."""
    err, out = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
        context = rank_context(rank, world)
        trainer = Trainer(config, context, run_dir=folder, resume_from=resume)
        if plant is not None:
            plant(trainer)
        status = trainer.fit()
    return status, err.getvalue(), out.getvalue()


def losses(folder: Path) -> list[float]:
    return [json.loads(x)["loss"] for x in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_damaged_block_ends_all_ranks_with_one_message_and_a_checkpoint(
    ranks, tmp_path, tokens, layout
):
    data, good = tokens
    config, run = configure(data, layout), tmp_path / "run"
    bad_step = first_bad_step(config)
    assert bad_step > 0
    ends = ranks.run(train, config, run, ranks=layout.world_size)
    assert {status for status, _, _ in ends} == {BAD_CONFIG}
    # Those that read the rows, all of which may, or those of one dp rank alone: the first speaks.
    [message] = [err for _, err, _ in ends if err]
    assert message.count("\n") == 1
    path = f"{data}/tokens.bin"
    assert message.startswith(f"data: {path!a} must be as it was written, got other bytes in ")
    assert f"block {BLOCK}, between {BLOCK * 256} and {(BLOCK + 1) * 256}" in message
    out = ends[0][2]
    assert f"the data is not what was written: {bad_step} of {STEPS} steps" in out
    assert "next: mcp-parallel train --resume" in out
    assert len(losses(run)) == bad_step  # the step that was given up is no record
    [checkpoint] = (run / "checkpoints").iterdir()
    assert checkpoint.name == f"step_{bad_step:08d}"
    # Mended, it goes on as if nothing had been.
    Path(path).write_bytes(good)
    ends = ranks.run(train, config, run, checkpoint, ranks=layout.world_size)
    assert {status for status, _, _ in ends} == {OK}
    whole = tmp_path / "whole"
    ranks.run(train, config, whole, ranks=layout.world_size)
    assert losses(run) == losses(whole)


def validation_damaged(trainer):
    """The first rank's rows of the second batch of the validation part."""
    if trainer.context.rank == 0:
        held_out = trainer.data.held_out

        def fails(index, rows):
            if index == 1:
                raise TokenFileError("data: 'x' must be as it was written")
            return held_out(index, rows)

        trainer.data.held_out = fails


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2)], ids=["dp2", "pp2"])
def test_a_damaged_validation_part_ends_likewise_after_its_step(ranks, tmp_path, tokens, layout):
    data, good = tokens
    (data / "tokens.bin").write_bytes(good)
    keys = {"data__validation_share": 0.2, "monitor__validate_every": 2}
    config, run = configure(data, layout, **keys), tmp_path / "run"
    ends = ranks.run(train, config, run, None, validation_damaged, ranks=2)
    assert [end[0] for end in ends] == [BAD_CONFIG, BAD_CONFIG]
    assert [end[1] for end in ends] == ["data: 'x' must be as it was written\n", ""]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert not any("val_loss" in row for row in rows)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000002"]


def storage_gone(trainer):
    """The second rank cannot reach its storage in step 3."""
    if trainer.context.rank == 1:
        take = trainer.batches.take

        def fails(step, rows):
            if step == 3:
                raise StorageError("data: 's3://b/t.bin' must be reachable, got a timeout")
            return take(step, rows)

        trainer.batches.take = fails


def test_a_storage_that_is_gone_is_a_failure_that_another_try_may_mend(ranks, tmp_path, tokens):
    data, good = tokens
    (data / "tokens.bin").write_bytes(good)
    config, run = configure(data, Layout(dp=2)), tmp_path / "run"
    ends = ranks.run(train, config, run, None, storage_gone, ranks=2)
    assert [end[0] for end in ends] == [FAILED, FAILED]
    assert [end[1] for end in ends] == [
        "",
        "data: 's3://b/t.bin' must be reachable, got a timeout\n",
    ]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000003"]


def test_the_command_shows_no_traceback(tmp_path, tokens):
    data, _ = tokens
    config = configure(data, Layout(dp=2))
    bad_step = first_bad_step(config)
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    words = ["train", "--config", str(file), "--run-dir", str(tmp_path / "run"), "--json"]
    ended = subprocess.run(
        [sys.executable, "-m", "mcp_parallel", *words],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == BAD_CONFIG
    outcome = json.loads(ended.stdout)
    assert (outcome["status"], outcome["last"]["step"]) == (BAD_CONFIG, bad_step)
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count(f"got other bytes in block {BLOCK}") == 1
