"""Configurations for tests: changes to the default one, and the advice of a refusal applied."""

from __future__ import annotations

import pytest

from mcp_parallel.check import find_problems
from mcp_parallel.config import Config
from mcp_parallel.errors import ConfigError


def _at(mapping, tables):
    for name in tables:
        mapping = mapping[name]
    return mapping


def config_of(**changes):
    """``config_of(parallel__tp=2)``: the default config with some keys replaced."""
    mapping = Config().to_mapping()
    for name, value in changes.items():
        *tables, key = name.split("__")
        _at(mapping, tables)[key] = value
    return Config.from_mapping(mapping)


def applied(config, way):
    mapping = config.to_mapping()
    for name, value in way.items():
        *tables, key = name.split(".")
        _at(mapping, tables)[key] = value
    return Config.from_mapping(mapping)


def names(config, world_size=None):
    return [problem.name for problem in find_problems(config, world_size)]


def assert_ways_out(config, world_size=None):
    """Each problem names its key and value, and each choice it offers mends it."""
    for problem in find_problems(config, world_size):
        text = str(problem)
        assert text.isascii()
        assert text.startswith(f"check: {problem.key} must {problem.rule}, got {problem.got}; use ")
        assert 1 <= len(problem.ways) <= 3
        for way in problem.ways:
            assert problem.name not in names(applied(config, way), world_size), (text, way)


def problems_of(action):
    with pytest.raises(ConfigError) as refused:
        action()
    assert refused.value.problems
    for problem in refused.value.problems:
        assert problem.isascii()
        assert "\n" not in problem
    return refused.value.problems


def problem_of(action):
    (problem,) = problems_of(action)
    return problem
