"""Keys of a model family: presets, what follows from them, and every refusal."""

from __future__ import annotations

import importlib.util

import pytest
from configs import applied, assert_ways_out, names, problem_of

from mcp_parallel.check import find_problems
from mcp_parallel.config import Config


def vit(**changes):
    """The image preset with some keys replaced by hand, as a plain mapping takes them."""
    mapping = Config.from_mapping({"model": {"preset": "vit-digits"}}).to_mapping()
    for name, value in changes.items():
        table, key = name.split("__")
        mapping[table][key] = value
    return Config.from_mapping(mapping)


REFUSED = [
    ({"model__image_size": None}, ["image_size of vit"]),
    ({"model__patch_size": None}, ["patch_size of vit"]),
    ({"model__channels": None}, ["channels of vit"]),
    ({"model__num_classes": None}, ["num_classes of vit"]),
    ({"model__patch_size": 3, "model__seq_len": 4}, ["image_size over patch_size"]),
    ({"model__seq_len": 17}, ["seq_len of vit"]),
    ({"model__vocab_size": 11}, ["vocab_size of vit"]),
    ({"model__tie_embeddings": True}, ["tie_embeddings of vit"]),
    ({"model__image_size": 16, "model__seq_len": 64}, ["image_size of digits"]),
    ({"model__channels": 3}, ["channels of digits"]),
    ({"model__num_classes": 9, "model__vocab_size": 9}, ["num_classes of digits"]),
    ({"model__num_heads": 3, "model__num_kv_heads": 3}, ["hidden_size over num_heads"]),
    ({"parallel__cp": 3}, ["seq_len over cp"]),
    ({"data__path": "somewhere"}, ["data of vit"]),
    ({"data__document_masking": True}, ["documents of vit"]),
    ({"train__fp32_embedding_steps": 5}, ["fp32_embedding_steps of vit"]),
    ({"train__fp32_embedding_switch_steps": 5}, ["fp32_embedding_switch_steps of vit"]),
    ({"model__family": "llama", "data__path": None}, None),
]


@pytest.mark.parametrize("changes, expected", REFUSED)
def test_what_an_image_model_cannot_be_is_refused_with_a_way_out(changes, expected):
    config = vit(**changes)
    found = names(config)
    if expected is None:  # a text model keeps none of an image model's sizes
        expected = [
            f"{name} of llama" for name in ("image_size", "patch_size", "channels", "num_classes")
        ]
        assert set(expected) < set(found)
    else:
        assert found == expected
    assert_ways_out(config)


def test_the_preset_is_legal_at_the_layouts_it_is_made_for():
    for parallel in ({}, {"dp": 4}, {"tp": 4}, {"pp": 4}, {"cp": 4}, {"dp": 2, "tp": 2, "pp": 2}):
        changes = {f"parallel__{key}": value for key, value in parallel.items()}
        assert names(vit(**changes)) == [], parallel
    assert names(vit(data__path="digits")) == []
    assert names(vit(model__num_classes=12, model__vocab_size=12)) == []


def test_heads_of_an_odd_size_need_no_rotation():
    odd = {"model__hidden_size": 60, "model__num_heads": 4}
    assert names(vit(**odd)) == []


def test_without_scikit_learn_the_check_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = vit()
    (problem,) = find_problems(config)
    assert "pip install scikit-learn" in str(problem)
    for way in problem.ways:
        assert problem.name not in names(applied(config, way))


def test_sizes_of_the_sequence_follow_from_the_image():
    values = {"model": {"preset": "vit-digits", "patch_size": 4, "num_classes": 12}}
    model = Config.from_mapping(values).model
    assert (model.seq_len, model.vocab_size) == (4, 12)
    changed = Config.from_mapping(values).with_overrides(["model.patch_size=1"]).model
    assert (changed.seq_len, changed.vocab_size) == (64, 12)
    wrong = Config.from_mapping({"model": {**values["model"], "seq_len": 5}})
    assert names(wrong) == ["seq_len of vit"]
    # An image size that is no number is told once, and not tripped over on the way.
    wrong_type = {"model": {"preset": "vit-digits", "image_size": "8"}}
    assert "must be an integer or null" in problem_of(lambda: Config.from_mapping(wrong_type))


def test_own_image_shape_needs_every_size_of_images():
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 2, "ffn_size": 8}
    given = {"preset": None, "family": "vit", **sizes, "image_size": 8, "patch_size": 4}
    problem = problem_of(lambda: Config.from_mapping({"model": given}))
    assert "give model.channels and model.num_classes" in problem
    model = Config.from_mapping({"model": {**given, "channels": 1, "num_classes": 10}}).model
    assert (model.seq_len, model.vocab_size) == (4, 10)


def test_a_recipe_comes_and_goes_with_its_preset():
    config = Config().with_overrides(["model.preset=vit-digits"])
    train = config.train
    assert (train.steps, train.global_batch_size, train.lr) == (400, 64, 2e-3)
    assert (train.warmup_steps, train.min_lr) == (20, 2e-4)
    assert config == Config.from_mapping({"model": {"preset": "vit-digits"}})
    assert config.with_overrides(["model.preset=tiny"]) == Config()
    by_hand = Config().with_overrides(["train.steps=50", "train.lr=1e-4"])
    mixed = by_hand.with_overrides(["model.preset=vit-digits"]).train
    assert (mixed.steps, mixed.lr, mixed.global_batch_size) == (50, 1e-4, 64)
    short = config.with_overrides(["train.steps=10"]).train
    assert (short.steps, short.warmup_steps) == (10, 1)


def test_fingerprints_tell_image_models_apart_and_leave_text_models_alone():
    config = vit()
    assert config.fingerprint() != Config().fingerprint()
    for change in ("image_size=12", "patch_size=4", "channels=3", "num_classes=11"):
        other = config.with_overrides([f"model.{change}"])
        assert other.fingerprint() != config.fingerprint(), change
    # Of the keys that checkpoints had before there were families; others would orphan them.
    assert Config().fingerprint() == TINY_FINGERPRINT


TINY_FINGERPRINT = "16dab25c4f0c73af376192111c1deb8275d02f619fcdfb50c1ce30f7798f4710"
