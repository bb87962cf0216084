"""What a configuration holds that nobody wrote: a preset's sizes and recipe, and what follows.

Values are plain, as from a file and not checked yet. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcp_parallel import config_schema
from mcp_parallel.errors import joined, shown
from mcp_parallel.presets import PRESETS, RECIPES

Tables = Mapping[str, Mapping[str, Any]]

_SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size")
_FAMILY_SIZES = {
    "llama": ("vocab_size", "seq_len"),
    "vit": ("image_size", "patch_size", "channels", "num_classes"),
}


def fill(tables: Tables, problems: list[str]) -> dict[str, Mapping[str, Any]]:
    """``tables`` with the preset's values where they give none, and what follows from theirs.

    Args:
        tables: table -> key -> value.
        problems: is told of an unknown preset, and of sizes missing without one.
    """
    filled: dict[str, Mapping[str, Any]] = dict(tables)
    if "model" in tables:
        filled["model"] = _with_preset(tables["model"], problems)
        for table, recipe in _recipe(filled["model"]["preset"]).items():
            filled[table] = {**recipe, **filled.get(table, {})}
    if "train" in filled:
        filled["train"] = {**_from_train(filled["train"]), **filled["train"]}
    return filled


def forget(values: Tables, changes: Tables, defaults: Tables) -> dict[str, dict[str, Any]]:
    """``values`` without what ``fill`` put there, where ``changes`` replace what it came from.

    Args:
        values: every key of every table.
        changes: keys that are about to be replaced.
        defaults: as ``values``, of the default config.
    """
    kept = {table: dict(keys) for table, keys in values.items()}
    model_changes, train_changes = changes.get("model", {}), dict(changes.get("train", {}))
    _drop_following(kept["model"], model_changes, _from_images(values["model"]), _IMAGE_SOURCES)
    if "preset" in model_changes:
        old, new = values["model"]["preset"], model_changes["preset"]
        sizes = PRESETS.get(old or "", values["model"])
        kept["model"] = {k: v for k, v in kept["model"].items() if sizes.get(k) != v}
        before, after = _recipe(old), _recipe(new)
        train_changes = {**before.get("train", {}), **after.get("train", {}), **train_changes}
        _drop_following(kept["train"], train_changes, _from_train(values["train"]), _TRAIN_SOURCES)
        for table in {**before, **after}:
            given = {**defaults[table], **before.get(table, {})}
            for key in {**before.get(table, {}), **after.get(table, {})}:
                if kept[table].get(key) == given[key]:
                    del kept[table][key]
    else:
        _drop_following(kept["train"], train_changes, _from_train(values["train"]), _TRAIN_SOURCES)
    return kept


def _recipe(preset: Any) -> Tables:
    return RECIPES.get(preset.lower(), {}) if isinstance(preset, str) else {}


def _with_preset(given: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The model table with the sizes of its preset where it gives none itself."""
    preset = given.get("preset", "tiny")
    sizes: Mapping[str, Any] = {}
    if preset == "none":  # TOML has no null
        preset = None
    if preset is None:
        missing = [key for key in _sizes_of(given) if key not in given]
        if missing:
            problems.append(
                f"config: model.preset must be a name when sizes are missing, got null; give "
                f"{joined((f'model.{key}' for key in missing), 'and')}, or use model.preset = tiny"
            )
    elif isinstance(preset, str):
        if preset.lower() in PRESETS:
            preset = preset.lower()
            sizes = PRESETS[preset]
        else:
            near = config_schema.nearest(preset.lower(), list(PRESETS)) or "tiny"
            problems.append(
                f"config: model.preset must be {joined(PRESETS)}, got {shown(preset)}; use {near}"
            )
    model = {**sizes, **given, "preset": preset}
    following = _from_images(model)
    return {**model, **{key: following[key] for key in following.keys() - given.keys()}}


def _sizes_of(given: Mapping[str, Any]) -> tuple[str, ...]:
    family = given.get("family", "llama")
    own = _FAMILY_SIZES.get(family) if isinstance(family, str) else None
    return (*_SIZES, *(own or _FAMILY_SIZES["llama"]))


_IMAGE_SOURCES = {
    "seq_len": ("image_size", "patch_size"),
    "vocab_size": ("num_classes",),
}


def _from_images(model: Mapping[str, Any]) -> dict[str, int]:
    """Positions and outputs of an image model: its patches and its classes."""
    following: dict[str, int] = {}
    if model.get("family") != "vit":
        return following
    image, patch, classes = (model.get(k) for k in ("image_size", "patch_size", "num_classes"))
    if type(image) is int and type(patch) is int and patch > 0:
        following["seq_len"] = (image // patch) ** 2
    if type(classes) is int:
        following["vocab_size"] = classes
    return following


_TRAIN_SOURCES = {"warmup_steps": ("steps",), "min_lr": ("lr",)}


def _from_train(train: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that follow from other keys, so that ``--steps 10`` alone is a legal change."""
    following: dict[str, Any] = {}
    steps, lr = train.get("steps"), train.get("lr")
    if type(steps) is int:
        following["warmup_steps"] = max(0, min(20, steps // 10))
    if isinstance(lr, (int, float)) and not isinstance(lr, bool) and 0 < lr <= 1e300:
        # Rounded, so that 0.003 gives 0.0003 and not 0.00030000000000000003.
        following["min_lr"] = float(f"{lr / 10:.15g}")
    return following


def _drop_following(
    table: dict[str, Any],
    changes: Mapping[str, Any],
    following: Mapping[str, Any],
    sources: Mapping[str, tuple[str, ...]],
) -> None:
    """Drop from ``table`` what followed from a key that ``changes`` replaces."""
    for key, causes in sources.items():
        if any(cause in changes for cause in causes) and table.get(key) == following.get(key):
            table.pop(key, None)
