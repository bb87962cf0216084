"""The planner on image models: work, weights and layouts of a vision transformer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import mcp_parallel
from mcp_parallel.check import find_problems
from mcp_parallel.config import Config, ModelConfig
from mcp_parallel.errors import ConfigError
from mcp_parallel.memory.estimate import estimate
from mcp_parallel.planner import block
from mcp_parallel.planner.auto import choose, with_layout
from mcp_parallel.planner.cost import CostModel
from mcp_parallel.planner.flops import flops_per_token
from mcp_parallel.planner.hardware import HARDWARE
from mcp_parallel.planner.layouts import Job, PlannedLayout
from mcp_parallel.planner.machine import Machine, cpu_hardware
from mcp_parallel.planner.memory import peak_memory
from mcp_parallel.planner.shape import shape_of
from mcp_parallel.planner.stages import rank_parameters, rank_stages
from mcp_parallel.presets import num_parameters


def vit(image=224, patch=16, channels=3, classes=1000, **sizes):
    """ViT-L/16 where nothing else is said."""
    large = {"num_layers": 24, "hidden_size": 1024, "num_heads": 16, "ffn_size": 4096, **sizes}
    return ModelConfig(
        preset=None,
        family="vit",
        **{"num_kv_heads": large["num_heads"], **large},
        image_size=image,
        patch_size=patch,
        channels=channels,
        num_classes=classes,
        seq_len=(image // patch) ** 2,
        vocab_size=classes,
    )


# ViT-22B's sizes (Dehghani et al. 2023, table 1).
VIT_22B = vit(patch=14, num_layers=48, hidden_size=6144, num_heads=48, ffn_size=24576)
SMALL = vit(8, 2, 1, 5, num_layers=2, hidden_size=4, num_heads=2, num_kv_heads=1, ffn_size=3)


def layout_of(**changes):
    return PlannedLayout(1, 1, 1, 1, "1f1b", 1, 1, 0, "none")._replace(**changes)


def job_of(model, batch=64):
    return Job(model=model, ranks=8, hardware=HARDWARE["h100"], global_batch_size=batch)


def test_work_of_a_patch_by_hand():
    # q and o 16 each, k and v 8 each, two of 12; 4 pixels into 4 features. The head is 20 an image
    # of 16 patches.
    matrices = 2 * (16 + 16 + 8 + 8 + 24) + 16 + 20 / 16
    attention = 2 * (2 * 2 * 16 * 4)  # of all patches, in either convention
    assert flops_per_token(SMALL) == 6 * matrices + 3 * attention
    assert flops_per_token(SMALL, causal=False) == 6 * matrices + 3 * attention


@pytest.mark.parametrize("model", [SMALL, vit(), VIT_22B], ids=["small", "L/16", "22B"])
@pytest.mark.parametrize("layout", [layout_of(), layout_of(pp=2), layout_of(pp=2, tp=2)])
def test_every_parameter_is_on_a_rank(model, layout):
    """Of several tensor-parallel ranks each holds what is whole."""
    stages = rank_stages(model.num_layers, layout)
    found = sum(rank_parameters(shape_of(model), stage, layout.tp) for stage in stages) * layout.tp
    hidden, pixels = model.hidden_size, model.patch_size**2 * model.channels
    whole = model.num_layers * 6 * hidden + (pixels + 1 + model.seq_len) * hidden + 2 * hidden
    assert found == pytest.approx(num_parameters(model) + (layout.tp - 1) * whole, rel=1e-12)


def test_published_sizes_are_met():
    """ViT-L/16 has 304 million parameters with a class token and its position."""
    assert num_parameters(vit()) == pytest.approx(304e6, rel=2e-3)
    assert num_parameters(VIT_22B) == pytest.approx(21.7e9, rel=5e-3)


def test_a_block_of_images_takes_what_its_parts_take():
    """Against a text block of the same sizes: one matrix less, twice the attention, no rotary."""
    image = dataclasses.replace(vit(), seq_len=1024)
    text = dataclasses.replace(image, family="llama")
    of_image, of_text = job_of(image), job_of(text)
    attention = [block.attention_pair(job, 2048, 1, 1) for job in (of_image, of_text)]
    overhead = HARDWARE["h100"].op_overhead_s
    for with_all, causal in zip(*attention, strict=True):
        assert with_all - overhead == pytest.approx(2 * (causal - overhead))
    assert block.linear_seconds(of_image, 2048, 1) < block.linear_seconds(of_text, 2048, 1)
    assert block.cheap_seconds(of_image, 2048, 1) < block.cheap_seconds(of_text, 2048, 1)


def test_ends_of_images_are_on_their_ranks():
    """The head costs what it does for one token an image; a rank embeds its own patches."""
    job = job_of(vit())
    model, layout = CostModel(job), layout_of(micro_batch_size=8)
    text = CostModel(job_of(dataclasses.replace(vit(), family="llama")))
    one_token_each = dataclasses.replace(vit(), family="llama", seq_len=1)
    assert model._head(layout) == CostModel(job_of(one_token_each))._head(layout)
    assert model._embedding(layout).forward > 0
    assert sum(text._embedding(layout)) == 0
    halves = model._embedding(layout._replace(tp=2))
    assert 0.4 < halves.forward / model._embedding(layout).forward < 1


@pytest.mark.parametrize(
    ("model", "gpus", "batch"), [(vit(), 8, None), (VIT_22B, 256, 65536)], ids=["L/16", "22B"]
)
def test_layouts_of_real_sizes_can_run(model, gpus, batch):
    """All but for the trainer's data, which are digits of 8 x 8 pixels."""
    found = mcp_parallel.plan(model, gpus=gpus, batch=batch)
    assert found.ranked[0].memory.total <= 0.9 * HARDWARE["h100"].memory_bytes
    train = {"global_batch_size": found.job.global_batch_size, "precision": "bf16"}
    base = Config.from_mapping({"model": {"preset": "vit-digits"}, "train": train})
    for one in found.ranked:
        layout = one.layout
        parallel = dataclasses.replace(
            base.parallel,
            **{name: getattr(layout, name) for name in ("dp", "tp", "pp", "cp", "zero")},
            schedule=layout.schedule,
            virtual_stages=layout.virtual_stages,
        )
        size = dataclasses.replace(base.train, micro_batch_size=layout.micro_batch_size)
        config = dataclasses.replace(base, model=model, parallel=parallel, train=size)
        problems = [p for p in find_problems(config, gpus) if "of digits" not in p.name]
        assert not problems, (layout, problems)


def test_a_model_that_fits_nowhere_is_refused_with_what_would():
    with pytest.raises(ConfigError, match="% too much"):
        mcp_parallel.plan(VIT_22B, gpus=2)


def test_sizes_that_do_not_go_together_are_refused():
    with pytest.raises(ConfigError, match=r"model\.seq_len must be"):
        mcp_parallel.plan("vit-digits", gpus=4, seq=32)
    without = dataclasses.replace(vit(), patch_size=None)
    with pytest.raises(ConfigError, match=r"model\.patch_size must be given"):
        mcp_parallel.plan(without, gpus=4)


@pytest.mark.parametrize("optimizer", ["adamw", "onebit_adam"])
def test_auto_chooses_for_images(optimizer):
    config = Config.from_mapping(
        {"model": {"preset": "vit-digits"}, "train": {"optimizer": optimizer}, "parallel": "auto"}
    )
    choice = choose(config, Machine(cpu_hardware(4), 4, is_cpu=True))
    assert "chose" in choice.line
    assert not find_problems(choice.config, 4)


REPLAYED: dict[str, tuple[Any, ...]] = {
    "dp": (4, 1, 1, 1, "1f1b", 1, 4, 0, "none"),
    "full": (4, 1, 1, 1, "1f1b", 1, 4, 1, "full"),
    "zero 3": (8, 1, 1, 1, "1f1b", 1, 4, 3, "selective"),
    "tp": (1, 4, 1, 1, "1f1b", 1, 4, 0, "none"),
    "cp": (2, 1, 1, 4, "1f1b", 1, 4, 1, "selective"),
    "1f1b": (1, 1, 4, 1, "1f1b", 1, 4, 0, "none"),
    "interleaved": (2, 2, 4, 1, "interleaved", 2, 4, 1, "none"),
}


@pytest.mark.parametrize("name", REPLAYED)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_memory_is_near_the_replay(name, precision):
    layout, model = PlannedLayout(*REPLAYED[name]), vit(num_layers=16)
    train = {"global_batch_size": 64, "precision": precision}
    base = Config.from_mapping({"model": {"preset": "vit-digits"}, "train": train})
    config = with_layout(dataclasses.replace(base, model=model), layout)
    job = dataclasses.replace(job_of(model), precision=precision)
    found = peak_memory(job, layout)
    truth = max(estimate(config, rank).peak_bytes for rank in range(config.parallel.pp))
    assert abs((found.total - found.reserve) / truth - 1) <= 0.05  # that of the replay itself
    if layout.pp == 1:  # what is kept is no text block's
        as_text = dataclasses.replace(job, model=dataclasses.replace(model, family="llama"))
        other = peak_memory(as_text, layout)
        assert abs((other.total - other.reserve) / truth - 1) > 0.05
