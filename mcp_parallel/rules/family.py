"""Rules of a model's family: which keys it has, and what follows from which. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from mcp_parallel.config import Config
from mcp_parallel.data.image_files import DIGITS, DIGITS_SHAPE, digits_file
from mcp_parallel.errors import shown, shown_path
from mcp_parallel.rules import data
from mcp_parallel.rules.problem import Problem, divisors, nearest, ways
from mcp_parallel.rules.values import value_of

_IMAGE_KEYS = ("image_size", "patch_size", "channels", "num_classes")
_DEFAULTS = {**DIGITS_SHAPE._asdict(), "patch_size": 2}


def family_problems(config: Config) -> Iterator[Problem]:
    """Keys of images without images, and images without them."""
    family = config.model.family
    for name in _IMAGE_KEYS:
        key = f"model.{name}"
        value = value_of(config, key)
        if family == "llama" and value is not None:
            rule = f"be null with family {family}"
            yield Problem(f"{name} of llama", key, rule, str(value), ({key: None},))
        if family == "vit" and value is None:
            rule = f"be given with family {family}"
            yield Problem(f"{name} of vit", key, rule, "null", ({key: _DEFAULTS[name]},))
    if family == "vit":
        yield from _vit_problems(config)


def _vit_problems(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.tie_embeddings:
        yield Problem(
            "tie_embeddings of vit",
            "model.tie_embeddings",
            "be false with family vit (patches have no table that a head could share)",
            "true",
            ({"model.tie_embeddings": False},),
        )
    for name in ("fp32_embedding_steps", "fp32_embedding_switch_steps"):
        key = f"train.{name}"
        if value_of(config, key):
            rule = "be 0 with family vit (it has no table of tokens)"
            yield Problem(f"{name} of vit", key, rule, str(value_of(config, key)), ({key: 0},))
    if config.data.document_masking:
        yield Problem(
            "documents of vit",
            "data.document_masking",
            "be false with family vit (an image is no text)",
            "true",
            ({"data.document_masking": False},),
        )
    for name, off in (("mixture", None), ("validation_share", 0.0), ("validation_path", None)):
        key = f"data.{name}"
        if value_of(config, key) != off:
            rule = f"be {shown(off)} with family vit (its images are held out by themselves)"
            yield Problem(f"{name} of vit", key, rule, shown(value_of(config, key)), ({key: off},))
    image, patch = model.image_size, model.patch_size
    if image is not None and patch is not None:
        if image % patch:
            yield Problem(
                "image_size over patch_size",
                "model.patch_size",
                f"divide image_size = {image}",
                str(patch),
                ways("model.patch_size", nearest(divisors(image), patch)),
            )
        yield from _following(
            "seq_len", (image // patch) ** 2, "(image_size / patch_size)^2", config
        )
    if model.num_classes is not None:
        yield from _following("vocab_size", model.num_classes, "num_classes", config)


def _following(name: str, value: int, source: str, config: Config) -> Iterator[Problem]:
    key = f"model.{name}"
    if value_of(config, key) != value and value > 0:
        rule = f"be {source} = {value} with family vit (leave it out)"
        yield Problem(f"{name} of vit", key, rule, shown(value_of(config, key)), ({key: value},))


def data_problems(config: Config) -> Iterator[Problem]:
    """What is wrong with the data that the family reads."""
    yield from _DATA_RULES[config.model.family](config)


def _image_problems(config: Config) -> Iterator[Problem]:
    """Images that are not there, or are of another shape than the model's."""
    path = config.data.path
    if path not in (None, DIGITS):
        yield Problem(
            "data of vit",
            "data.path",
            f"be {DIGITS} or null with family vit",
            shown_path(path),
            ({"data.path": DIGITS}, {"data.path": None}),
        )
        return
    if digits_file() is None:
        yield Problem(
            "digits without scikit-learn",
            "data.path",
            "have its images in an installed scikit-learn (pip install scikit-learn)",
            "no such package",
            ({"model.family": "llama", "data.path": None, **_NO_IMAGES},),
        )
    for name, value in DIGITS_SHAPE._asdict().items():
        key = f"model.{name}"
        got = value_of(config, key)
        fits = got is None or (got >= value if name == "num_classes" else got == value)
        if not fits:
            least = "at least " if name == "num_classes" else ""
            rule = f"be {least}{value} for data.path = {DIGITS}"
            yield Problem(f"{name} of digits", key, rule, str(got), ({key: value},))


_DATA_RULES = {"llama": data.data_problems, "vit": _image_problems}
_NO_IMAGES = {f"model.{name}": None for name in _IMAGE_KEYS}
