"""The watch over state that tests share: each change is named, and nothing else is."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from contextlib import contextmanager

import pytest
import torch
from global_state import changes, snapshot
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def changed(change, undo):
    change()
    try:
        yield
    finally:
        undo()


@contextmanager
def moved():
    was = os.getcwd()
    with changed(lambda: os.chdir(os.sep), lambda: os.chdir(was)):
        yield


@contextmanager
def deaf():
    was = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with changed(lambda: None, lambda: signal.signal(signal.SIGTERM, was)):
        yield


def logger():
    return logging.getLogger("mcp_parallel")


CHANGES = {
    "the environment": lambda: changed(
        lambda: os.environ.update(MCP_LEFT_BEHIND="1"), lambda: os.environ.pop("MCP_LEFT_BEHIND")
    ),
    "the working directory": moved,
    "sys.path": lambda: changed(lambda: sys.path.append("nowhere"), sys.path.pop),
    "signal handlers": deaf,
    "garbage collection": lambda: changed(gc.disable, gc.enable),
    "logging": lambda: changed(
        lambda: setattr(logger(), "disabled", True), lambda: setattr(logger(), "disabled", False)
    ),
    "torch's default dtype": lambda: changed(
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "torch's threads": lambda: changed(
        lambda: torch.set_num_threads(2), lambda: torch.set_num_threads(1)
    ),
    "torch's deterministic mode": lambda: changed(
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "torch's autograd": torch.no_grad,
    "torch's autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "torch's modes": TorchDispatchMode,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_while_it_lasts(name):
    before = snapshot()
    with CHANGES[name]():
        left = list(changes(before, snapshot()))
    assert len(left) == 1
    assert left[0].startswith(f"{name}: was ")
    assert list(changes(before, snapshot())) == []


def test_a_device_is_named():
    before = snapshot()
    with torch.device("meta"):  # torch has it as a mode too
        left = list(changes(before, snapshot()))
    assert "torch's default device: was cpu, is meta" in left


def test_of_the_environment_only_what_changed_is_told(monkeypatch):
    before = snapshot()
    monkeypatch.setenv("MCP_LEFT_BEHIND", "1")
    monkeypatch.delenv("PATH")
    (told,) = changes(before, snapshot())
    assert "MCP_LEFT_BEHIND" in told
    assert "PATH" in told
    assert "HOME" not in told
