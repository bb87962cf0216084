"""The ``amp`` table: nested keys, and what it says of ``train.precision``."""

import pytest
from configs import config_of, problem_of, problems_of

from mcp_parallel.check import check
from mcp_parallel.config import Config
from mcp_parallel.config_text import parse_toml, parse_yaml

CLASSIC = """
amp:
  enabled: true
  dtype: fp16
  grad_scaler: {enabled: true, init_scale: 1024, growth_interval: 100}
"""


def test_the_classic_block_is_taken_from_yaml_and_toml():
    config = Config.from_mapping(parse_yaml(CLASSIC))
    assert config.train.precision == config.amp.dtype == "fp16"
    scaler = config.amp.grad_scaler
    assert (scaler.enabled, scaler.init_scale, scaler.growth_interval) == (True, 1024.0, 100)
    toml = "[amp]\nenabled = true\ndtype = 'fp16'\n"
    toml += "[amp.grad_scaler]\nenabled = true\ninit_scale = 1024\ngrowth_interval = 100\n"
    assert Config.from_mapping(parse_toml(toml)) == config
    assert Config.from_mapping(parse_yaml(config.to_yaml())) == config


@pytest.mark.parametrize(
    "values, precision",
    [
        ({}, "fp32"),
        ({"amp": {"enabled": True}}, "bf16"),
        ({"amp": {"enabled": True, "dtype": "fp16"}, "train": {"steps": 5}}, "fp16"),
        ({"amp": {"enabled": True}, "train": {"precision": "bf16"}}, "bf16"),
        ({"amp": {"enabled": False, "dtype": "fp16"}}, "fp32"),
        ({"amp": {"enabled": False}, "train": {"precision": "bf16"}}, "bf16"),
        ({"amp": None, "train": None}, "fp32"),
        ({"amp": {"grad_scaler": None}}, "fp32"),
    ],
)
def test_amp_sets_the_precision(values, precision):
    config = Config.from_mapping(values)
    assert config.train.precision == precision
    assert Config.from_mapping(config.to_mapping()) == config


def test_a_contradiction_is_refused_with_the_way_out():
    values = {"amp": {"enabled": True, "dtype": "fp16"}, "train": {"precision": "bf16"}}
    assert problem_of(lambda: Config.from_mapping(values)) == (
        "config: train.precision must be fp16 as amp.dtype with amp.enabled = true, got 'bf16'; "
        "use train.precision = fp16, amp.enabled = false, or amp.dtype = bf16"
    )
    in_python = config_of(amp__enabled=True, train__precision="bf16")
    assert in_python.train.precision == "bf16"
    built = Config(amp=in_python.amp)  # by hand: the loader did not set the precision
    assert "got 'fp32'" in problem_of(lambda: check(built))


@pytest.mark.parametrize(
    "first, overrides, precision",
    [
        ({}, ["amp.enabled=true"], "bf16"),
        ({}, ["amp.dtype=fp16", "amp.enabled=true"], "fp16"),
        ({"enabled": True}, ["amp.dtype=fp16"], "fp16"),
        ({"enabled": True}, ["amp.enabled=false"], "fp32"),
        ({"enabled": True}, ["amp.enabled=false", "train.precision=fp16"], "fp16"),
        ({"enabled": True}, ["train.steps=5"], "bf16"),
        ({"enabled": True}, ["amp.grad_scaler.init_scale=1024"], "bf16"),
    ],
)
def test_overrides_of_amp_decide_the_precision_anew(first, overrides, precision):
    config = Config.from_mapping({"amp": first}).with_overrides(overrides)
    assert config.train.precision == precision


def test_overrides_that_contradict_are_refused():
    amp = Config.from_mapping({"amp": {"enabled": True}})
    assert "got 'fp32'" in problem_of(lambda: amp.with_overrides(["train.precision=fp32"]))
    given = Config.from_mapping({"train": {"precision": "bf16"}})
    overrides = ["amp.enabled=true", "amp.dtype=fp16"]
    assert "got 'bf16'" in problem_of(lambda: given.with_overrides(overrides))


def test_overrides_reach_nested_keys_and_keep_their_neighbours():
    config = Config.from_mapping(parse_yaml(CLASSIC)).with_overrides(
        ["amp.grad_scaler.init_scale=2048", "amp.grad_scaler.growth_interval=7"]
    )
    assert config.amp.grad_scaler.init_scale == 2048.0
    assert config.amp.grad_scaler.growth_interval == 7
    assert config.amp.grad_scaler.enabled is True


@pytest.mark.parametrize(
    "override, words",
    [
        ("amp.grad_scaler=1", "must name a key of amp.grad_scaler, got 'amp.grad_scaler=1'"),
        ("amp.grad_scaler.init_scal=1", "did you mean amp.grad_scaler.init_scale?"),
        ("amp.grad_scaler.init_scale.x=1", "got no such key"),
        ("amp.init_scale=1", "did you mean amp.grad_scaler.init_scale?"),
        ("amp=true", "must name a key of amp, got 'amp=true'; write for example amp.enabled=value"),
        ("amp.grad_scaler.init_scale=big", "must be a finite number, got 'big'"),
    ],
)
def test_overrides_that_name_no_key_are_refused(override, words):
    [problem] = problems_of(lambda: Config().with_overrides([override]))
    assert words in problem
