"""A Trainer in a process of its user's: called again, interrupted, given paths as text."""

from __future__ import annotations

import json

import pytest
from test_divergence import EXPLODING, run_config

from mcp_parallel.checkpoint.format import CheckpointError
from mcp_parallel.errors import DIVERGED, OK
from mcp_parallel.step import TrainingStep
from mcp_parallel.trainer import Trainer

CONFIG = run_config(1, steps=4, every=2, lr=1e-3)


def losses(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed")
    trainer = Trainer(CONFIG, run_dir=run_dir)
    assert trainer.fit() == OK
    return trainer, run_dir


def test_after_the_last_step_another_call_does_nothing(undisturbed):
    trainer, run_dir = undisturbed
    before = losses(run_dir)
    assert trainer.fit() == OK
    assert trainer.step == 4
    assert losses(run_dir) == before
    assert list(before) == [1, 2, 3, 4]


def test_after_an_interrupt_another_call_goes_on_with_the_step_that_it_ended(
    undisturbed, tmp_path, monkeypatch
):
    trainer = Trainer(CONFIG, run_dir=tmp_path)
    whole_step = TrainingStep.__call__

    def interrupted(self, *args, **kwargs):
        if trainer.step == 2:
            raise KeyboardInterrupt
        return whole_step(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingStep, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
    assert trainer.step == 2
    assert trainer.fit() == OK
    assert losses(tmp_path) == losses(undisturbed[1])


def test_a_run_that_diverged_is_not_trained_on_by_the_same_trainer(tmp_path):
    trainer = Trainer(run_config(1, steps=50, every=0, **EXPLODING), run_dir=tmp_path)
    assert trainer.fit() == DIVERGED
    with pytest.raises(RuntimeError, match="must be called on a new Trainer"):
        trainer.fit()


def test_a_checkpoint_may_be_named_by_text(undisturbed, tmp_path):
    _, run_dir = undisturbed
    step_2 = str(run_dir / "checkpoints" / "step_00000002")
    trainer = Trainer(CONFIG, run_dir=tmp_path, resume_from=step_2)
    assert trainer.step == 2
    assert trainer.fit() == OK
    before = losses(run_dir)
    assert losses(tmp_path) == {step: before[step] for step in (3, 4)}
    with pytest.raises(CheckpointError, match="nowhere"):
        Trainer(CONFIG, run_dir=tmp_path / "other", resume_from="nowhere")
