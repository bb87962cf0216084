"""Configuration values: presets, types, names, overrides, fingerprint."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest
from configs import problem_of, problems_of

from mcp_parallel.config import Config, ModelConfig
from mcp_parallel.errors import ConfigError, joined, shown, shown_path, spelled
from mcp_parallel.presets import PRESETS

# --- presets and defaults ------------------------------------------------------------------------


def test_nothing_given_is_the_defaults():
    assert Config.from_mapping({}) == Config()
    assert Config.from_mapping({"train": None, "model": {}}) == Config()


def test_preset_fills_what_is_not_given():
    model = Config.from_mapping({"model": {"preset": "7b", "num_layers": 3}}).model
    expected = {**PRESETS["7b"], "num_layers": 3, "preset": "7b", "residual_init_scale": None}
    assert dataclasses.asdict(model) == expected


@pytest.mark.parametrize("none", [None, "none"])
def test_own_shape_needs_every_size(none):
    sizes = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 2,
        "num_kv_heads": 1,
        "ffn_size": 24,
        "vocab_size": 300,
        "seq_len": 8,
    }
    model = Config.from_mapping({"model": {"preset": none, **sizes}}).model
    assert model == ModelConfig(preset=None, **sizes)
    del sizes["ffn_size"], sizes["seq_len"]
    problem = problem_of(lambda: Config.from_mapping({"model": {"preset": none, **sizes}}))
    assert "model.ffn_size and model.seq_len" in problem


def test_unknown_preset_names_the_known_ones():
    problem = problem_of(lambda: Config.from_mapping({"model": {"preset": "125"}}))
    assert "got '125'" in problem
    assert problem.endswith("use 125m")
    assert "175b or 405b" in problem


def test_another_preset_replaces_its_own_sizes_and_no_others():
    config = Config.from_mapping({"model": {"preset": "7b", "num_layers": 3}})
    model = config.with_overrides(["model.preset=13b", "model.seq_len=64"]).model
    assert model == dataclasses.replace(
        Config.from_mapping({"model": {"preset": "13b"}}).model, num_layers=3, seq_len=64
    )


def test_warm_up_and_last_rate_follow_what_they_derive_from():
    train = Config.from_mapping({"train": {"steps": 50, "lr": 1}}).train
    assert (train.warmup_steps, train.min_lr) == (5, 0.1)
    config = Config().with_overrides(["train.steps=5", "train.lr=1e-4"])
    assert (config.train.warmup_steps, config.train.min_lr) == (0, 1e-5)
    again = Config.from_mapping(config.to_mapping()).with_overrides(["train.steps=1000"])
    assert again.train.warmup_steps == 20
    given_by_hand = Config.from_mapping({"train": {"warmup_steps": 7, "min_lr": 0}})
    changed = given_by_hand.with_overrides(["train.steps=1000", "train.lr=1"]).train
    assert (changed.warmup_steps, changed.min_lr) == (7, 0)


# --- types and names -----------------------------------------------------------------------------

WRONG_TYPES = [
    ("train", "steps", 1.5, "must be an integer, got 1.5; use 1 or 2"),
    ("train", "steps", 2.0, "must be an integer, got 2.0; use 2"),
    ("train", "steps", True, "must be an integer, got true"),
    ("train", "steps", "7", "must be an integer, got '7'"),
    ("train", "steps", None, "must be an integer, got null"),
    ("train", "steps", [1], r"must be an integer, got [1]"),
    ("train", "lr", "fast", "must be a finite number, got 'fast'"),
    ("train", "lr", True, "must be a finite number, got true"),
    ("train", "lr", float("nan"), "must be a finite number, got nan"),
    ("train", "lr", float("inf"), "must be a finite number, got inf"),
    ("train", "lr", 10**400, "must be a finite number, got an integer of 1329 bits"),
    ("train", "freeze_step", "x", "must be an integer or null, got 'x'"),
    ("train", "precision", "float32", "must be fp64, fp32, bf16 or fp16, got 'float32'; use fp32"),
    ("train", "precision", None, "got null; use fp64"),
    ("parallel", "schedule", "1F1B", "got '1F1B'; use 1f1b"),
    ("parallel", "sequence_parallel", "yes", "must be true or false, got 'yes'"),
    ("parallel", "sequence_parallel", 1, "must be true or false, got 1"),
    ("data", "path", 7, "must be a string or null, got 7; put it in quotes"),
    ("data", "path", {"a": 1}, "must be a string or null"),
    ("checkpoint", "resume", True, "must be a string, got true"),
    ("checkpoint", "async", 0, "checkpoint.async must be true or false, got 0"),
    ("amp", "dtype", "float16", "must be bf16 or fp16, got 'float16'; use fp16"),
    ("amp", "grad_scaler", True, "must be a table, got true; write for example 'grad_scaler: {"),
    ("amp", "grad_scaler", {"init_scale": "big"}, ".init_scale must be a finite number, got 'big'"),
    ("data", "path", ["caf\u00e9"], r"got ['caf\xe9']"),
]


@pytest.mark.parametrize("table, key, value, words", WRONG_TYPES)
def test_wrong_types_are_refused_in_words(table, key, value, words):
    problem = problem_of(lambda: Config.from_mapping({table: {key: value}}))
    assert problem.startswith((f"config: {table}.{key} must be ", f"config: {table}.{key}."))
    assert words in problem


def test_an_integer_too_long_to_print_is_refused_in_words():
    for key in ("precision", "lr"):
        problem = problem_of(lambda key=key: Config.from_mapping({"train": {key: 10**5000}}))
        assert "got an integer of 16610 bits" in problem


def test_integers_are_numbers():
    lr = Config.from_mapping({"train": {"lr": 1}}).train.lr
    assert lr == 1.0
    assert isinstance(lr, float)


@pytest.mark.parametrize(
    "values, near",
    [
        ({"trian": {}}, "train"),
        ({"train": {"stpes": 3}}, "train.steps"),
        ({"train": {"learning_rate": 3}}, "train.lr"),
        ({"train": {"num_layers": 3}}, "model.num_layers"),
        ({"checkpoint": {"async_": True}}, "checkpoint.async"),
        ({"lr": 3}, "train.lr"),
        ({"model": {"hidden": 3}}, "model.hidden_size"),
        ({"amp": {"grad_scaler": {"init_scal": 1}}}, "amp.grad_scaler.init_scale"),
        ({"amp": {"grad_scaler": {"growth_intervall": 1}}}, "amp.grad_scaler.growth_interval"),
        ({"amp": {"grad_scalar": {}}}, "amp.grad_scaler"),
        ({"amp": {"growth_interval": 1}}, "amp.grad_scaler.growth_interval"),
        ({"grad_scaler": {}}, "amp.grad_scaler"),
        ({"train": {"loss_scale": 1}}, "amp.grad_scaler.init_scale"),
    ],
)
def test_unknown_keys_name_the_nearest(values, near):
    assert problem_of(lambda: Config.from_mapping(values)).endswith(f"did you mean {near}?")


def test_a_key_that_is_no_word_is_unknown():
    assert "train.1 must be a known key" in problem_of(
        lambda: Config.from_mapping({"train": {1: 3}})
    )


def test_a_key_like_no_other_lists_the_table():
    problem = problem_of(lambda: Config.from_mapping({"data": {"xyzzy": 1}}))
    assert problem.endswith(
        "the keys of data are path, mixture, seed, validation_share, validation_path, verify, "
        "document_masking and document_separator"
    )


@pytest.mark.parametrize("value", [3, [], "x", True])
def test_a_table_is_a_mapping(value):
    assert "train must be a table" in problem_of(lambda: Config.from_mapping({"train": value}))


def test_auto_layout_is_a_key_that_one_word_sets():
    auto = Config().with_overrides(["parallel.auto=true"])
    assert auto != Config()
    assert Config.from_mapping({"parallel": "auto"}) == auto
    assert Config().with_overrides(["parallel=auto"]) == auto
    both = Config().with_overrides(["parallel=auto", "parallel.ranks=8"])
    assert (both.parallel.auto, both.parallel.ranks) == (True, 8)
    assert "parallel must be a table" in problem_of(lambda: Config.from_mapping({"parallel": "on"}))


def test_all_problems_are_told_at_once():
    values = {
        "trian": {},
        "parallel": "on",
        "train": {"lr": "x", "steps": 1.5, "sped": 1},
        "model": {"preset": "8b"},
        "memory": {"offload": 1},
    }
    assert len(problems_of(lambda: Config.from_mapping(values))) == 7


def test_config_error_survives_another_process():
    error = pickle.loads(pickle.dumps(ConfigError(["a", "b"])))
    assert error.problems == ["a", "b"]
    assert str(error) == "a\nb"


# --- overrides -----------------------------------------------------------------------------------


def test_overrides_are_typed_by_their_field():
    config = Config().with_overrides(
        [
            "train.lr=1",
            "train.lr=3e-4",
            "train.freeze_step=null",
            "data.path=123",
            "parallel.sequence_parallel=false",
            "checkpoint.async=true",
            "checkpoint.resume= runs/a=b: c ",
        ]
    )
    assert config.train.lr == 3e-4
    assert config.data.path == "123"
    assert config.parallel.sequence_parallel is False
    assert config.checkpoint.async_ is True
    assert config.checkpoint.resume == "runs/a=b: c"
    assert config.with_overrides(["data.path=null"]).data.path is None
    assert config.with_overrides(["data.path='null'"]).data.path == "null"


@pytest.mark.parametrize(
    "override, words",
    [
        ("train.lr", "must be table.key=value"),
        ("", "must be table.key=value"),
        ("=", "must be a known key"),
        ("train=3", "must name a key of train"),
        ("lr=3", "did you mean train.lr?"),
        ("train.lrr=3", "did you mean train.lr?"),
        ("train.lr.x=3", "train.lr.x must be a known key"),
        ("train.steps=1e3", "must be an integer, got 1000.0; use 1000"),
        ("train.steps=true", "must be an integer, got true"),
        ("train.steps=", "must be an integer, got null"),
        ("train.lr=nan", "must be a finite number, got nan"),
        ("train.lr=-.inf", "must be a finite number, got -inf"),
        ("train.lr=1e999", "must be a finite number, got inf"),
        ("train.lr=[1]", "must be a finite number, got '[1]'"),
        ("train.steps=" + "9" * 5000, "the number is too long"),
        ("parallel.sequence_parallel=yes", "must be true or false, got 'yes'"),
        ("data.path='a", None),
        ('train.lr="\\q"', "must be YAML"),
    ],
)
def test_bad_overrides_are_refused_in_words(override, words):
    if words is None:
        assert Config().with_overrides([override]).data.path == "'a"
        return
    assert words in problem_of(lambda: Config().with_overrides([override]))


def test_bad_overrides_are_told_together():
    assert len(problems_of(lambda: Config().with_overrides(["a", "b=1", "train.lr=x"]))) == 3


# --- fingerprint ---------------------------------------------------------------------------------


def test_fingerprint_is_of_the_model_alone():
    config = Config()
    same = [
        "parallel.tp=2",
        "train.lr=1",
        "train.seed=4",
        "data.seed=9",
        "model.seq_len=64",
        "model.preset=tiny",
    ]
    assert config.with_overrides(same).fingerprint() == config.fingerprint()
    by_hand = {**config.to_mapping()["model"], "preset": None}
    assert Config.from_mapping({"model": by_hand}).fingerprint() == config.fingerprint()


@pytest.mark.parametrize(
    "override",
    [
        "num_layers=5",
        "hidden_size=256",
        "num_heads=4",
        "num_kv_heads=2",
        "ffn_size=353",
        "vocab_size=257",
        "tie_embeddings=true",
        "rope_theta=5e5",
        "norm_eps=1e-6",
    ],
)
def test_fingerprint_sees_each_part_of_the_model(override):
    changed = Config().with_overrides([f"model.{override}"])
    assert changed.fingerprint() != Config().fingerprint()


# --- words ---------------------------------------------------------------------------------------


def test_values_are_shown_on_one_short_ascii_line():
    assert shown("caf\u00e9\n") == r"'caf\xe9\n'"
    assert shown(True) == "true"
    assert shown(None) == "null"
    assert len(shown("x" * 1000)) == 80
    assert shown(10**5000) == "an integer of 16610 bits"
    assert spelled("x" * 1000) == f"'{'x' * 1000}'"
    assert spelled(10**5000) == shown(10**5000)
    assert [joined(range(n)) for n in range(4)] == ["", "0", "0 or 1", "0, 1 or 2"]


def test_paths_are_shown_whole_unless_they_are_none():
    assert shown_path(Path("/caf\u00e9") / ("x" * 200)) == rf"'/caf\xe9/{'x' * 200}'"
    assert shown_path(None) == "null"
    assert len(shown_path("x" * 10_000)) == 80
