"""Mixtures: counts within one of the shares at any place, and any rank's rows from one integer."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from configs import applied, assert_ways_out, config_of, names, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_parallel.check import check, find_problems
from mcp_parallel.config import Config
from mcp_parallel.data.ahead import Ahead
from mcp_parallel.data.blend import Blend, source_seed
from mcp_parallel.data.corpus import Corpus
from mcp_parallel.data.order import sample_indices
from mcp_parallel.data.shares import Share, normalised, parse_mixture, units_of, written
from mcp_parallel.data.source import open_data, source_of
from mcp_parallel.data.sources import anchored
from mcp_parallel.data.texts import Texts
from mcp_parallel.generate import Codec
from mcp_parallel.layout import Layout
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.snapshot import load_step, save_step
from mcp_parallel.step import TrainingStep


@pytest.fixture
def sources(tmp_path):
    paths = [tmp_path / "web.txt", tmp_path / "code, old.txt"]
    for path in paths:
        path.write_text(f"text of {path.name} " * 50)
    return [str(path) for path in paths]


UNITS = st.lists(st.integers(1, 400), min_size=1, max_size=9)


# --- order ---------------------------------------------------------------------------------------


@given(UNITS, st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_every_prefix_holds_each_source_within_one_of_its_share(units, seed):
    total, length = sum(units), 2 * sum(units) + 11
    source, number = Blend(units, seed).at(np.arange(length))
    for one, unit in enumerate(units):
        taken = np.cumsum(source == one)
        owed = np.arange(1, length + 1) * unit  # of a sample, in units
        # Tijdeman's bound, which is below one for any number of sources.
        bound = total * (1 - 1 / max(1, 2 * len(units) - 2))
        assert np.abs(taken * total - owed).max() <= bound + 1e-9 * total
        # And each source's samples are numbered without gap or repeat.
        assert np.array_equal(number[source == one], np.arange(taken[-1]))


@given(UNITS, st.integers(0, 10**12), st.integers(1, 50))
@settings(max_examples=25, deadline=None)
def test_a_position_alone_decides(units, start, length):
    blend = Blend(units, 3)
    source, number = blend.at(np.arange(start, start + length))
    for at in range(length):
        [one], [n] = blend.at(np.array([start + at]))
        assert (one, n) == (source[at], number[at])
    # The counts before any position, however far, are what its shares say.
    period = sum(units) // np.gcd.reduce(units)
    assert abs(int(number[0]) - start * units[source[0]] / sum(units)) <= period


def test_the_seed_decides_between_sources_that_are_due_alike():
    orders = {tuple(Blend([1, 1, 1], seed).at(np.arange(6))[0].tolist()) for seed in range(40)}
    assert len(orders) == 6
    assert all(order[:3] == order[3:] for order in orders)


def corpora(*lengths):
    """Corpora whose tokens are all the corpus's own number."""
    return tuple(Corpus(np.full(n, k, dtype=np.uint8), 256) for k, n in enumerate(lengths))


def mixture_of(lengths, units, seq_len=4, batch=12, seed=5):
    config = config_of(model__seq_len=seq_len, train__global_batch_size=batch, data__seed=seed)
    return Texts(corpora(*lengths), tuple(units)).source(config)


def test_any_split_of_the_rows_gives_the_same_batch_and_documents():
    source = mixture_of((400, 90, 33), (5, 3, 2))
    for step in (0, 1, 17, 10**9):
        inputs, targets = source.batch(step, range(12))
        documents = source.documents(step, range(12))
        for world in (2, 3, 4, 12):
            size = 12 // world
            for rank in range(world):
                rows = range(rank * size, (rank + 1) * size)
                part = source.batch(step, rows)
                assert np.array_equal(part[0], inputs[rows.start : rows.stop])
                assert np.array_equal(part[1], targets[rows.start : rows.stop])
                mine = source.documents(step, rows)
                assert np.array_equal(mine, documents[rows.start : rows.stop])


def test_each_source_has_epochs_and_an_order_of_its_own():
    """Every sample of a source comes once before one comes again, whatever the others do."""
    rng = np.random.default_rng(0)
    both = tuple(Corpus(rng.integers(0, 250, n).astype(np.uint8), 256) for n in (161, 81))
    config = config_of(model__seq_len=4, train__global_batch_size=10, data__seed=9)
    source = Texts(both, (1, 1)).source(config)
    rows = np.concatenate([source.batch(step, range(10))[0] for step in range(8)])
    picked, _ = Blend((1, 1), 9).at(np.arange(80))
    for number, corpus in enumerate(both):
        count = corpus.num_samples(4)
        mine = rows[picked == number]
        order = sample_indices(source_seed(9, number), np.arange(40), count)
        assert np.array_equal(mine, corpus.samples(order, 4)[0])
        assert sorted(order[:count].tolist()) == list(range(count))
    assert source_seed(9, 0) == 9
    assert (
        len({source_seed(9, n) for n in range(50)} | {source_seed(10, n) for n in range(50)}) == 100
    )


def test_a_mixture_of_one_is_the_source_alone():
    alone, [corpus] = mixture_of((400,), (1,)), corpora(400)
    config = config_of(model__seq_len=4, train__global_batch_size=12, data__seed=5)
    assert np.array_equal(
        alone.batch(3, range(12))[0], source_of(corpus, config).batch(3, range(12))[0]
    )


def trained(rank, world, dp, mixture, folder, steps):
    """Losses of ``steps`` of a small model, from the checkpoint before them if there is one."""
    config = config_of(
        data__mixture=mixture,
        parallel__dp=dp,
        model__num_layers=1,
        model__hidden_size=16,
        model__seq_len=16,
        train__global_batch_size=8,
        train__precision="fp64",
        train__steps=6,
        train__warmup_steps=1,
    )
    step = TrainingStep(config, build_mesh(Layout(dp=dp), torch.device("cpu")))
    if steps.start > 0:
        load_step(Path(folder) / "checkpoints" / f"step_{steps.start:08d}", step)
    ahead = Ahead(source_of(open_data(config), config), config)
    losses = []
    for at in steps:
        batch = ahead.take(at, step.rows())
        tensors = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
        losses.append(step(*tensors, config.train.lr, step=at).loss)
    ahead.close()
    if folder is not None and steps.start == 0:
        save_step(Path(folder), steps.stop, step)
        if world > 1:
            dist.barrier()
    return losses


def test_a_run_goes_on_at_another_degree_with_the_samples_it_would_have_had(
    ranks, sources, tmp_path
):
    mixture = f"0.65 {sources[0]}, 0.35 {sources[1]}"
    whole = trained(0, 1, 1, mixture, None, range(6))
    before = ranks.run(trained, 4, mixture, str(tmp_path), range(3), ranks=4)[0]
    after = ranks.run(trained, 2, mixture, str(tmp_path), range(3, 6), ranks=2)[1]
    # Float64 sums in another order, carried through updates (see parity's bound).
    assert [*before, *after] == pytest.approx(whole, rel=1e-10)


def test_documents_end_at_each_source_s_own_separator():
    tokens = np.array([1, 7, 2, 3, 9, 4, 5], dtype=np.uint8)
    both = (Corpus(tokens, 16, separator=7), Corpus(tokens, 16, separator=9))
    config = config_of(model__seq_len=6, train__global_batch_size=2)
    source = Texts(both, (1, 1)).source(config)
    first, _ = Blend((1, 1), 0).at(np.arange(2))
    begins = {0: [0, 0, 2, 2, 2, 2], 1: [0, 0, 0, 0, 0, 5]}
    assert source.documents(0, range(2)).tolist() == [begins[number] for number in first]
    given = config_of(model__seq_len=6, train__global_batch_size=2, data__document_separator=2)
    assert (
        Texts(both, (1, 1)).source(given).documents(0, range(2)).tolist()
        == [[0, 0, 0, 3, 3, 3]] * 2
    )


# --- in a configuration --------------------------------------------------------------------------


def test_a_mixture_is_read_from_a_file_a_flag_and_back(sources, tmp_path):
    text = f"0.7 {sources[0]}, 0.3 {sources[1]}"
    file = tmp_path / "run.yaml"
    file.write_text(f"data:\n  mixture: >\n    0.7 {sources[0]},\n    0.3 {sources[1]}\n")
    for config in (Config().with_overrides([f"data.mixture={text}"]), Config.from_file(file)):
        check(config)
        assert parse_mixture(config.data.mixture) == [
            Share(Fraction(7, 10), sources[0]),
            Share(Fraction(3, 10), sources[1]),
        ]
        data = open_data(config)
        assert data.units == (7000, 3000)
        assert Config.from_mapping(config.to_mapping()) == config
    assert Codec.of(config).is_text


def test_paths_of_a_mixture_are_kept_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = config_of(
        data__mixture="0.5 a.txt, 0.5 s3://bucket/tokens.bin", data__validation_path="c.txt"
    ).data
    kept = anchored(data)
    assert kept.mixture == f"0.5 {tmp_path / 'a.txt'}, 0.5 s3://bucket/tokens.bin"
    assert kept.validation_path == str(tmp_path / "c.txt")
    assert anchored(kept) == kept


@pytest.mark.parametrize(
    "shares, wanted",
    [
        ("2 {0}, 1 {1}", "0.6667 and 0.3333 do"),
        ("0.7 {0}, 0.2 {1}", "0.7778 and 0.2222 do"),
        ("0.33333 {0}, 0.66667 {1}", "0.3333 and 0.6667 do"),
        ("1 {0}, 0.00001 {1}", "0.9999 and 0.0001 do"),
    ],
)
def test_shares_that_do_not_sum_are_refused_with_those_that_do(sources, shares, wanted):
    config = config_of(data__mixture=shares.format(*sources))
    message = problem_of(lambda: check(config))
    assert "data.mixture must have shares above 0 that sum to 1" in message
    assert wanted in message
    [problem] = find_problems(config)
    check(applied(config, problem.ways[0]))
    assert_ways_out(config)


@given(st.lists(st.fractions(0, 1000, max_denominator=1000), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_normalised_shares_are_taken_and_near(shares):
    given = [Share(share, f"s{number}") for number, share in enumerate(shares)]
    near = normalised(given)
    if any(share <= 0 for share in shares):
        assert near is None
        return
    if near is None:  # so many are tiny that a unit for each is more than there is
        assert len(shares) > 1
        return
    units = units_of(near)
    assert sum(units) == 10_000
    again = parse_mixture(written(near))
    assert again == near
    for unit, share in zip(units, shares, strict=True):
        # Rounded down or up; tiny shares get a unit that others then give up.
        assert abs(unit - share / sum(shares) * 10_000) <= len(shares)


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"data__mixture": "half {0}, half {1}"}, "mixture"),
        ({"data__mixture": ""}, "mixture"),
        ({"data__mixture": "0.5 {0}, 0.5 {0}"}, "source twice"),
        ({"data__mixture": "1.0 {0}, 0 {1}"}, "shares"),
        ({"data__mixture": "1 {0}", "data__path": "{1}"}, "path beside mixture"),
        (
            {"data__mixture": "0.5 {0}, 0.5 nowhere.txt"},
            "data must name a file or folder that exists",
        ),
        ({"data__validation_path": "nowhere.txt"}, "data must name a file or folder that exists"),
        ({"data__validation_path": "{0}", "data__validation_share": 0.1}, "validation twice"),
        ({"data__validation_share": 0.9}, "range data.validation_share"),
        ({"data__mixture": "0.5 {0}, 0.5 {2}"}, "text beside tokens"),
        ({"data__path": "{2}", "data__validation_path": "{0}"}, "text beside tokens"),
        ({"monitor__validate_batches": 0}, "range monitor.validate_batches"),
    ],
)
def test_refusals_name_a_way_out(sources, tmp_path, changes, name):
    np.arange(256, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    sources.append(str(tmp_path / "tokens.bin"))
    filled = {
        key: value.format(*sources) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    config = config_of(**filled)
    assert name in names(config)
    assert_ways_out(config)


def test_an_image_model_takes_no_text(sources):
    config = Config.from_mapping({"model": {"preset": "vit-digits"}})
    data = replace(
        config.data, mixture=f"1 {sources[0]}", validation_share=0.1, validation_path=sources[1]
    )
    config = replace(config, data=data)
    assert {"mixture of vit", "validation_share of vit", "validation_path of vit"} <= set(
        names(config)
    )
    assert_ways_out(config)
