from __future__ import annotations

import dataclasses

import pytest
import torch

from mcp_parallel.check import find_problems
from mcp_parallel.config import Config, ModelConfig
from mcp_parallel.model.family import whole_model
from mcp_parallel.presets import PRESETS, num_parameters

# Parameters in billions as published, and how far our architecture may be from them.
# Llama models are this architecture: only the rounding of the published number is between.
# GPT-3 models have learned positions, biases and LayerNorm, which ours lacks, and a SwiGLU width
# rounded to 16; table 2.1 rounds 1.3B to two digits.
PUBLISHED = {
    "125m": (0.125, 0.02),
    "350m": (0.356, 0.02),
    "1.3b": (1.3, 0.04),
    "7b": (6.74, 0.001),
    "13b": (13.02, 0.001),
    "34b": (33.74, 0.001),
    "70b": (70.55, 0.001),
    "175b": (174.6, 0.002),
    "405b": (405.85, 0.001),
}


def model_of(preset):
    return Config.from_mapping({"model": {"preset": preset}}).model


def test_every_preset_has_its_published_size():
    assert set(PRESETS) == {"tiny", "vit-digits", *PUBLISHED}
    for preset, (billions, tolerance) in PUBLISHED.items():
        assert num_parameters(model_of(preset)) / 1e9 == pytest.approx(billions, rel=tolerance)


def test_tiny_is_the_default():
    assert model_of("tiny") == ModelConfig() == Config.from_mapping({}).model


def test_presets_fill_every_shape_field():
    shape = {field.name for field in dataclasses.fields(ModelConfig)} - {
        "preset",
        "residual_init_scale",
    }
    for preset, sizes in PRESETS.items():
        assert set(sizes) == shape, preset


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_legal(preset):
    config = Config.from_mapping({"model": {"preset": preset}})
    assert [str(problem) for problem in find_problems(config)] == []


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tie_embeddings": True},
        {"num_kv_heads": 8},
        {"num_layers": 1, "ffn_size": 7, "vocab_size": 13},
        {"preset": "vit-digits"},
        {"preset": "vit-digits", "num_layers": 1, "ffn_size": 7, "num_kv_heads": 2, "channels": 3},
    ],
)
def test_parameters_are_those_of_the_model_that_is_built(change):
    config = Config.from_mapping({"model": {"preset": "tiny", **change}}).model
    with torch.device("meta"):
        model = whole_model(config)
    assert num_parameters(config) == sum(weight.numel() for weight in model.parameters())
