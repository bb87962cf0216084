"""Every source that a configuration names, and the key that names it. No torch, no numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from mcp_parallel.config import DataConfig
from mcp_parallel.data.shares import parse_mixture, written
from mcp_parallel.data.storage import absolute


class Source(NamedTuple):
    """One source."""

    key: str
    """``data.path``, ``data.mixture`` or ``data.validation_path``."""
    path: str | None
    """None is the default text."""

    @property
    def is_trained_on(self) -> bool:
        """Not merely measured."""
        return self.key != "data.validation_path"

    @property
    def holds_tokens(self) -> bool:
        """Numbers of a vocabulary; else bytes of text."""
        return self.path is not None and self.path.lower().endswith(".bin")


def named_sources(data: DataConfig) -> list[Source]:
    """The sources of a run; of a mixture that cannot be read, none."""
    if data.mixture is None:
        found = [Source("data.path", data.path)]
    else:
        found = [Source("data.mixture", s.path) for s in parse_mixture(data.mixture) or []]
    if data.validation_path is not None:
        found.append(Source("data.validation_path", data.validation_path))
    return found


def anchored(data: DataConfig) -> DataConfig:
    """``data`` with each path absolute, so that it means the same from any directory."""
    path, mixture, validation = data.path, data.mixture, data.validation_path
    shares = None if mixture is None else parse_mixture(mixture)
    if shares is not None:
        mixture = written([replace(share, path=absolute(share.path)) for share in shares])
    return replace(
        data,
        path=path and absolute(path),
        mixture=mixture,
        validation_path=validation and absolute(validation),
    )
