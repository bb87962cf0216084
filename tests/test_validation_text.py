"""Validation loss of text: what is held out, and the same figure in every layout."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from configs import config_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_parallel.config import Config, DataConfig, ParallelConfig
from mcp_parallel.data.corpus import Corpus
from mcp_parallel.data.held_out import split
from mcp_parallel.data.source import open_data, source_of, validation_batches
from mcp_parallel.evaluate import Evaluator
from mcp_parallel.layout import Layout
from mcp_parallel.model.family import whole_model
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.step import TrainingStep
from mcp_parallel.trainer import Trainer

ONE = Layout()
# Masking is about positions: these are where they and their documents take another way.
MASKED_TOO = ("cp2", "pp2 zbv")
LAYOUTS = {
    "dp2 zero3": Layout(dp=2, zero=3),
    "tp3": Layout(tp=3),
    "cp2": Layout(cp=2),
    "pp2 zbv": Layout(pp=2, schedule="zbv"),
    "dp2pp2 zero1": Layout(dp=2, pp=2, zero=1),
    "tp2cp2 no-sp": Layout(tp=2, cp=2, sequence_parallel=False),
}
STEPS = 2


def configure(layout, folder, **data):
    sizes = {"num_layers": 4, "hidden_size": 12, "num_heads": 6, "num_kv_heads": 6, "ffn_size": 10}
    # A vocabulary that 3 and 2 ranks cut unevenly; 16 positions for 2 chunks of 2 cp ranks.
    base = Config.from_mapping({"model": {**sizes, "vocab_size": 257, "seq_len": 16}})
    train = replace(
        base.train,
        steps=STEPS,
        warmup_steps=1,
        global_batch_size=8,
        micro_batch_size=2,
        lr=1e-2,
        precision="fp64",
    )
    data = DataConfig(path=str(folder), validation_share=0.2, **data)
    return replace(base, parallel=ParallelConfig(**asdict(layout)), train=train, data=data)


def run(rank, world, layout, folder, masked):
    options = {"document_masking": True, "document_separator": 10} if masked else {}
    config = configure(layout, folder, **options)
    step = TrainingStep(config, build_mesh(layout, torch.device("cpu")))
    source = source_of(open_data(config), config)
    evaluate = Evaluator(step, source)
    losses, seen = [], []
    for index in range(STEPS):
        inputs, targets = source.batch(index, step.rows())
        seen.append(evaluate().loss)
        result = step(torch.from_numpy(inputs), torch.from_numpy(targets), config.train.lr)
        losses.append(result.loss)
    assert evaluate().accuracy is None
    return losses, seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four files of lines; a fifth of their bytes is no whole number of batches."""
    path = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(5)
    for number in range(5):
        lines = [bytes(rng.integers(97, 123, rng.integers(1, 40)).tolist()) for _ in range(37)]
        (path / f"{number}.txt").write_bytes(b"\n".join(lines))
    return path


@pytest.fixture(scope="module")
def alone(folder):
    """One process, without and with document masking."""
    return {masked: run(0, 1, ONE, folder, masked) for masked in (False, True)}


@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_is_that_of_its_definition(alone, folder, masked):
    """Every held-out position once, by the plain model: no batches, no filling, no chunks."""
    _, seen = alone[masked]
    options = {"document_masking": True, "document_separator": 10} if masked else {}
    config = configure(ONE, folder, **options)
    corpus = open_data(config).held_out[0]
    model = whole_model(config.model).double()
    step = TrainingStep(config, build_mesh(ONE, torch.device("cpu")))
    model.load_state_dict(step.stages[0].model.state_dict())
    at = np.arange(corpus.num_samples(16))
    inputs, targets = (torch.from_numpy(part) for part in corpus.samples(at, 16))
    documents = torch.from_numpy(corpus.documents(at, 16, 10)) if masked else None
    logits = model(inputs, documents)
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    assert seen[0] == pytest.approx(wanted, rel=1e-12)
    assert (targets != -100).sum() == len(corpus.tokens) - 1


@pytest.mark.parametrize(
    "name, masked", [*((name, False) for name in LAYOUTS), *((name, True) for name in MASKED_TOO)]
)
def test_every_layout_and_every_rank_sees_the_same(ranks, alone, folder, name, masked):
    layout = LAYOUTS[name]
    losses, seen = alone[masked]
    for found_losses, found in ranks.run(run, layout, folder, masked, ranks=layout.world_size):
        # Float64 sums in another order, carried through an update (see parity's bound).
        assert found == pytest.approx(seen, rel=1e-10)
        assert found_losses == pytest.approx(losses, rel=1e-10)


# --- what is held out ----------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 5), min_size=20, max_size=300),
    st.sets(st.integers(1, 299), max_size=5),
    st.floats(0.01, 0.5),
    st.sampled_from([None, 0]),
)
@settings(max_examples=60, deadline=None)
def test_the_last_documents_are_held_out(tokens, starts, share, separator):
    starts = (0, *sorted(at for at in starts if at < len(tokens)))
    corpus = Corpus(np.array(tokens, dtype=np.uint8), 6, tuple(map(str, starts)), starts)
    try:
        train, held_out = split(corpus, share, separator)
    except ValueError as error:
        assert "must leave two tokens" in str(error)  # noqa: PT017
        return
    cut, total = len(train.tokens), len(tokens)
    assert [*train.tokens, *held_out.tokens] == tokens
    begins = {*starts, *(i + 1 for i, token in enumerate(tokens) if token == separator)}
    target = total - round(share * total)
    later = [at for at in sorted(begins) if target <= at <= total - 2]
    assert cut == (later[0] if later else target)
    # Each part knows the files in it.
    back = [(name, at) for name, at in zip(train.names, train.starts, strict=True)]
    assert back == [(str(at), at) for at in starts if at < cut]
    file = max(at for at in starts if at <= cut)
    assert held_out.names == (str(file), *(str(at) for at in starts if at > cut))
    assert held_out.starts == (0, *(at - cut for at in starts if at > cut))


def test_a_limit_measures_the_same_samples_every_time_and_some_of_every_source(folder, tmp_path):
    (tmp_path / "more.txt").write_bytes(b"0123456789" * 40)
    config = configure(ONE, folder)
    data = replace(config.data, path=None, mixture=f"0.5 {folder}, 0.5 {tmp_path / 'more.txt'}")
    config = replace(config, data=data, monitor=replace(config.monitor, validate_batches=3))
    source = source_of(open_data(config), config)
    first = [batch.inputs for batch in validation_batches(source, config, range(8))]
    again = [batch.inputs for batch in validation_batches(source, config, range(8))]
    assert len(first) == 3
    assert np.array_equal(first, again)
    kinds = {(48 <= row[0] < 58) for row in np.concatenate(first)}
    assert kinds == {True, False}


def test_no_position_is_trained_on_and_measured(folder):
    config = configure(ONE, folder)
    data = open_data(config)
    (train,), (held_out,) = data.corpora, data.held_out
    assert bytes(train.tokens) + bytes(held_out.tokens) == b"\n".join(
        path.read_bytes() for path in sorted(folder.iterdir())
    )
    # The fifth file is a fifth of the text, give or take the lengths of lines.
    assert held_out.names[-1] == "4.txt"


def test_a_run_writes_and_shows_its_validation_loss(folder, tmp_path, capsys):
    validation = tmp_path / "own.txt"
    validation.write_text("held out by hand\n" * 9)
    config = config_of(
        data__path=str(folder),
        data__validation_path=str(validation),
        model__num_layers=1,
        train__steps=3,
        train__warmup_steps=0,
        monitor__validate_every=2,
        monitor__tensorboard=False,
        checkpoint__every=0,
    )
    assert Trainer(config, run_dir=tmp_path / "run").fit() == 0
    rows = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    seen = [row["step"] for row in rows if "val_loss" in row]
    assert seen == [2, 3]
    assert not any("val_accuracy" in row for row in rows)
    out = capsys.readouterr().out
    assert f"validation: loss {rows[-1]['val_loss']:.4f}" in out
    assert "val loss" in out
