"""Accuracy and loss on held-out images: equal in every layout, and without a trace in training."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcp_parallel.config import Config, ParallelConfig
from mcp_parallel.data.source import open_data, source_of, validation_batches
from mcp_parallel.evaluate import Evaluator
from mcp_parallel.layout import Layout
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.parallel.tensor import vocab_parallel_argmax
from mcp_parallel.snapshot import load_step, save_step
from mcp_parallel.step import TrainingStep
from mcp_parallel.trainer import Trainer

ONE = Layout()
LAYOUTS = {
    "dp2": Layout(dp=2),
    "dp2 zero3": Layout(dp=2, zero=3),
    # Six and two micro-batches of each batch.
    "dp2 zero1 shares": Layout(dp=2, zero=1, dp_shares="3,1"),
    "tp2 no-sp": Layout(tp=2, sequence_parallel=False),
    # 16 patches and 10 classes over 3 ranks: 6, 6 and 4; 4, 4 and 2.
    "tp3": Layout(tp=3),
    "pp2": Layout(pp=2),
    "pp2 interleaved": Layout(pp=2, schedule="interleaved", virtual_stages=2),
    "pp2 zbv": Layout(pp=2, schedule="zbv"),
    "dp2pp2 zero3": Layout(dp=2, pp=2, zero=3),
    "cp2pp2": Layout(cp=2, pp=2),
    "cp2tp2 ring": Layout(cp=2, tp=2, cp_attention="ring"),
}
STEPS, EVALUATED_AT = 3, 2


def configure(layout):
    """A model of a few thousand parameters: 6 heads divide by 2 and 3."""
    sizes = {"num_layers": 4, "hidden_size": 12, "num_heads": 6, "num_kv_heads": 6, "ffn_size": 10}
    base = Config.from_mapping({"model": {"preset": "vit-digits", **sizes}})
    train = replace(
        base.train,
        steps=STEPS,
        warmup_steps=1,
        global_batch_size=32,
        micro_batch_size=4,
        lr=1e-2,
        precision="fp64",
    )
    return replace(base, parallel=ParallelConfig(**asdict(layout)), train=train)


def run(rank, world, layout, evaluates, folder=None, start=0):
    """Train, with a look at the validation part on the way; losses, norms and what was seen."""
    config = configure(layout)
    step = TrainingStep(config, build_mesh(layout, torch.device("cpu")))
    if start:
        assert load_step(Path(folder) / "checkpoints" / f"step_{start:08d}", step) == start
    source = source_of(open_data(config), config)
    evaluate = Evaluator(step, source)
    figures, seen = [], None
    for index in range(start, STEPS):
        inputs, targets = source.batch(index, step.rows())
        result = step(torch.from_numpy(inputs), torch.from_numpy(targets), config.train.lr)
        figures.append((result.loss, result.grad_norm))
        if evaluates and index + 1 == EVALUATED_AT:
            seen = evaluate()
            if folder is not None:
                save_step(Path(folder), EVALUATED_AT, step)
    if world > 1:
        dist.barrier()
    return torch.tensor(figures, dtype=torch.float64), seen


@pytest.fixture(scope="module")
def alone():
    """One process that never looks at the validation part, and the same one that does."""
    plain, none = run(0, 1, ONE, evaluates=False)
    assert none is None
    watched, seen = run(0, 1, ONE, evaluates=True)
    assert torch.equal(plain, watched)  # not a bit of training depends on it
    return plain, seen


def test_figures_are_those_of_their_definition(alone):
    _, seen = alone
    config = configure(ONE)
    step = TrainingStep(config, build_mesh(ONE, torch.device("cpu")))
    data = open_data(config)
    source = source_of(data, config)
    for index in range(EVALUATED_AT):
        inputs, targets = source.batch(index, step.rows())
        step(torch.from_numpy(inputs), torch.from_numpy(targets), config.train.lr)
    batches = list(validation_batches(source, config, step.rows()))
    patches = torch.cat([torch.from_numpy(batch.inputs) for batch in batches])[:359]
    labels = torch.from_numpy(data.validation.labels)
    logits = step.stages[0].model(patches)
    right = (logits.argmax(1) == labels).double().mean().item()
    assert seen.accuracy == pytest.approx(right, abs=1e-12)
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    assert seen.loss == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_and_every_rank_sees_the_same(ranks, alone, name):
    layout = LAYOUTS[name]
    expected, seen = alone
    results = ranks.run(run, layout, True, ranks=layout.world_size)
    for figures, found in results:
        assert found == results[0][1]
        assert found.accuracy == seen.accuracy
        # Float64 sums in another order, carried through two updates (see parity's bound).
        assert found.loss == pytest.approx(seen.loss, rel=1e-10)
        torch.testing.assert_close(figures, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["tp3", "dp2pp2 zero3"])
def test_a_checkpoint_of_an_image_model_goes_on_at_another_layout(ranks, alone, tmp_path, name):
    layout, folder = LAYOUTS[name], str(tmp_path)
    ranks.run(run, layout, True, folder, ranks=layout.world_size)
    figures, _ = run(0, 1, ONE, evaluates=False, folder=folder, start=EVALUATED_AT)
    torch.testing.assert_close(figures, alone[0][EVALUATED_AT:], rtol=1e-10, atol=0)


def argmax_of_parts(rank, world, logits):
    start = [0, 2, 4, 5][rank] if world == 4 else 0
    part = logits[:, start : [2, 4, 5, 5][rank]] if world == 4 else logits
    return vocab_parallel_argmax(part, 5, dist.group.WORLD if world > 1 else None)


def test_the_most_likely_class_is_the_first_of_equal_ones_wherever_they_lie(ranks):
    # Five classes over four ranks: 2, 2, 1 and none.
    logits = torch.tensor(
        [
            [0.0, 3.0, 1.0, 3.0, 3.0],
            [0.0, 0.0, 0.0, 0.0, 0.0],
            [1.0, 2.0, 3.0, 4.0, 5.0],
            [-1.0, -3.0, -0.5, -0.5, -2.0],
        ]
    )
    for found in ranks.run(argmax_of_parts, logits):
        assert found.tolist() == [1, 0, 4, 2] == logits.argmax(1).tolist()


def metrics_of(folder):
    return [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_short_run_learns_and_records_its_accuracy(tmp_path, capsys):
    config = Config.from_mapping(
        {
            "model": {"preset": "vit-digits", "num_layers": 2},
            "train": {"steps": 60, "micro_batch_size": 64},
            "monitor": {"validate_every": 25, "every": 10, "tensorboard": False},
            "checkpoint": {"every": 0},
        }
    )
    assert Trainer(config, run_dir=tmp_path).fit() == 0
    rows = metrics_of(tmp_path)
    # Every tenth step, and each that was followed by a look at the validation part.
    assert [row["step"] for row in rows] == [10, 20, 25, 30, 40, 50, 60]
    seen = {row["step"]: row for row in rows if "val_accuracy" in row}
    assert sorted(seen) == [25, 50, 60]
    assert seen[60]["val_loss"] < 0.8 * seen[25]["val_loss"]
    # Chance is 0.1, with a standard error of 0.016 on 359 images.
    assert seen[60]["val_accuracy"] > 0.7
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert rows[-1]["tokens"] == 60 * 64
    out = capsys.readouterr().out
    assert f"validation: accuracy {seen[60]['val_accuracy']:.2%}" in out
    assert "images/s" in out
    assert "tokens" not in out
    assert "generate" not in out


def test_generate_refuses_a_model_of_images(tmp_path, capsys):
    from mcp_parallel.cli.main import main

    config = configure(ONE)
    step = TrainingStep(config, build_mesh(ONE, torch.device("cpu")))
    save_step(tmp_path, 1, step)
    assert main(["generate", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "must hold a model that reads text, got one of family vit" in message


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--dp=1", "--dp=2", "--tp=2", "--pp=2"])
def test_the_preset_reads_digits_at_97_percent(tmp_path, layout):
    command = [sys.executable, "-W", "ignore", "-m", "mcp_parallel", "train", "--json"]
    command += ["--preset", "vit-digits", "--run-dir", str(tmp_path / "run"), layout]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout)["last"]
    assert last["step"] == 400
    assert last["val_accuracy"] >= 0.97, last
