"""setuptools' build backend, plus one thing: under build isolation it finds the target's torch.

``torch`` in ``[build-system] requires`` would make every isolated build download gigabytes, though
only headers are needed and the environment that installs us has them. So the requirement is
added here, bounded, and only where no usable torch is found.
"""

from __future__ import annotations

from typing import Any

from find_torch import TORCH_REQUIREMENT, find_torch
from native import find_compiler
from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def _torch_requirement() -> list[str]:
    """Nothing where torch is found, or where no compiler could use its headers."""
    compiler, _ = find_compiler()
    return [] if compiler is None or find_torch() is not None else [TORCH_REQUIREMENT]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """PEP 517 hook: what a wheel build needs beyond pyproject.toml."""
    return build_meta.get_requires_for_build_wheel(config_settings) + _torch_requirement()


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """PEP 660 hook: what an editable build needs beyond pyproject.toml."""
    return build_meta.get_requires_for_build_editable(config_settings) + _torch_requirement()
