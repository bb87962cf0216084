"""Save at one layout, go on at another: the same losses as a run that was never interrupted."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcp_parallel.config import Config, ParallelConfig
from mcp_parallel.data.batch import BatchSource
from mcp_parallel.data.corpus import open_corpus
from mcp_parallel.layout import Layout
from mcp_parallel.optim.schedule import learning_rate
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.snapshot import load_step, save_step
from mcp_parallel.step import TrainingStep

STEPS, SAVED_AT, BATCH = 5, 2, 8

ONE = Layout()
LAYOUTS = {
    "dp2 zero3": Layout(dp=2, zero=3),
    "dp4 zero1": Layout(dp=4, zero=1),
    "tp2": Layout(tp=2),
    "tp4 no-sp": Layout(tp=4, sequence_parallel=False),
    "pp2": Layout(pp=2),
    "pp2 interleaved": Layout(pp=2, schedule="interleaved", virtual_stages=2),
    "pp2 zbv": Layout(pp=2, schedule="zbv"),
    "dp2tp2 zero2": Layout(dp=2, tp=2, zero=2),
    "tp2pp2": Layout(tp=2, pp=2),
    "dp2cp2 zero3": Layout(dp=2, cp=2, zero=3),
}


def configure(layout, precision, *, tied=True):
    base = Config.from_mapping(
        {
            "model": {
                "preset": None,
                "num_layers": 4,
                "hidden_size": 16,
                "num_heads": 4,
                "num_kv_heads": 4,
                "ffn_size": 20,
                # Odd: tensor parallelism cuts it unevenly, and fully_shard cuts that again.
                "vocab_size": 257,
                "seq_len": 16,
                "tie_embeddings": tied,
            }
        }
    )
    train = replace(
        base.train,
        steps=STEPS,
        warmup_steps=1,
        global_batch_size=BATCH,
        micro_batch_size=BATCH // layout.dp // (2 * layout.pp if layout.pp > 1 else 1),
        precision=precision,
    )
    return replace(base, parallel=ParallelConfig(**asdict(layout)), train=train)


def run(rank, world, layout, folder, start, stop, precision, tied):
    """Train steps ``start`` to ``stop``, saving on the way; returns losses, norms and values."""
    config = configure(layout, precision, tied=tied)
    step = TrainingStep(config, build_mesh(layout, torch.device("cpu")))
    if start:
        assert load_step(Path(folder) / "checkpoints" / f"step_{start:08d}", step) == start
    source = BatchSource(open_corpus(config.data, config.model), 0, config.model.seq_len, BATCH)
    figures = []
    for index in range(start, stop):
        inputs, targets = source.batch(index, step.rows())
        rate = learning_rate(index, config.train)
        result = step(torch.from_numpy(inputs), torch.from_numpy(targets), rate)
        figures.append((result.loss, result.grad_norm))
        if start == 0 and index + 1 == SAVED_AT:
            save_step(Path(folder), SAVED_AT, step)
    values = [(s.name, s.offsets, s.local.clone()) for s in step.shards]
    dist.barrier()
    return figures, values


def figures_of(results):
    figures = [figure for figure, _ in results]
    assert all(figure == figures[0] for figure in figures)  # every rank knows the same
    return torch.tensor(figures[0], dtype=torch.float64)


@pytest.mark.parametrize("name", LAYOUTS)
def test_resume_at_another_layout(ranks, tmp_path, name):
    layout = LAYOUTS[name]
    tied = layout.zero != 2
    args = ("fp64", tied)
    there = ranks.run(run, layout, str(tmp_path / "a"), 0, STEPS, *args, ranks=layout.world_size)
    alone = ranks.run(run, ONE, str(tmp_path / "b"), 0, STEPS, *args, ranks=1)
    torch.testing.assert_close(figures_of(there), figures_of(alone), rtol=1e-11, atol=0)
    # From this layout to one process and back again, against the uninterrupted run.
    down = ranks.run(run, ONE, str(tmp_path / "a"), SAVED_AT, STEPS, *args, ranks=1)
    up = ranks.run(
        run, layout, str(tmp_path / "b"), SAVED_AT, STEPS, *args, ranks=layout.world_size
    )
    rest = figures_of(alone)[SAVED_AT:]
    torch.testing.assert_close(figures_of(down), rest, rtol=1e-11, atol=0)
    torch.testing.assert_close(figures_of(up), rest, rtol=1e-11, atol=0)


@pytest.mark.parametrize("name", ["dp2 zero3", "pp2", "dp2tp2 zero2"])
def test_same_layout_is_equal_bit_for_bit(ranks, tmp_path, name):
    layout = LAYOUTS[name]
    size = layout.world_size

    def values(results):
        return [value for _, shard_values in results for value in shard_values]

    first = ranks.run(run, layout, str(tmp_path / "a"), 0, STEPS, "fp32", True, ranks=size)
    again = ranks.run(run, layout, str(tmp_path / "b"), 0, STEPS, "fp32", True, ranks=size)
    resumed = ranks.run(run, layout, str(tmp_path / "a"), SAVED_AT, STEPS, "fp32", True, ranks=size)
    for other in (again, resumed):
        for (name_a, offsets_a, a), (name_b, offsets_b, b) in zip(
            values(first), values(other), strict=True
        ):
            assert (name_a, offsets_a) == (name_b, offsets_b)
            assert torch.equal(a, b), name_a
    assert torch.equal(figures_of(first), figures_of(again))
    assert torch.equal(figures_of(first)[SAVED_AT:], figures_of(resumed))


def load_other(rank, world, folder):
    config = configure(ONE, "fp64", tied=False)
    step = TrainingStep(config, build_mesh(ONE, torch.device("cpu")))
    before = [s.local.clone() for s in step.shards]
    try:
        load_step(Path(folder) / "checkpoints" / f"step_{SAVED_AT:08d}", step)
    except Exception as error:
        untouched = all(torch.equal(s.local, b) for s, b in zip(step.shards, before, strict=True))
        return str(error), untouched
    return "loaded", False


def test_checkpoint_of_another_model_is_refused_whole(ranks, tmp_path):
    ranks.run(run, ONE, str(tmp_path), 0, SAVED_AT, "fp64", True, ranks=1)
    [(message, untouched)] = ranks.run(load_other, str(tmp_path), ranks=1)
    assert "another model" in message
    assert untouched


def tied_copies(rank, world, folder):
    layout = Layout(pp=2)
    _, values = run(rank, world, layout, folder, 0, STEPS, "fp32", True)
    return {name: value for name, _, value in values}["embed"]


def test_tied_copies_never_drift_apart(ranks, tmp_path):
    first, last = ranks.run(tied_copies, str(tmp_path), ranks=2)
    assert torch.equal(first, last)
