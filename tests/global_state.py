"""What a test can change for all that run after it in the same process, and who changed it.

A test that passes alone and fails after another was failed by what the other left behind. Here the
leaker is named instead: the ``conftest.py`` of this folder compares ``snapshot()`` around every
test, and ``ranks.py`` around everything that its forked ranks run. Only what costs little to read
is read: a snapshot takes some 15 us.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

LOGGERS = tuple(map(logging.getLogger, (None, "mcp_kernels", "mcp_parallel")))
# Those that the trainer and the launcher catch; pytest-timeout's own SIGALRM comes and goes.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# pytest says here what it is running, torch where its cache always was, and scikit-learn at its
# import what its OpenMP may do.
NOT_OURS = (
    *("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"),
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
)


def snapshot() -> dict[str, Any]:
    """State of the process that every later test shares, by a name that an error can say."""
    return {
        "the environment": _environment(),
        "the working directory": os.getcwd(),
        "sys.path": tuple(sys.path),
        "signal handlers": tuple(map(signal.getsignal, SIGNALS)),
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "logging": (logging.root.manager.disable, *map(_settings, LOGGERS)),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's threads": torch.get_num_threads(),
        "torch's deterministic mode": (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "torch's autograd": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "torch's autocast": torch.is_autocast_enabled("cpu"),
        "torch's modes": (
            torch._C._len_torch_dispatch_stack(),
            torch._C._len_torch_function_stack(),
        ),
        "the default process group": dist.is_initialized(),
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """One phrase for each state that is no longer what it was."""
    for name, was in before.items():
        now = after[name]
        if now == was:
            continue
        if isinstance(was, dict):
            keys = sorted(key for key in was.keys() | now.keys() if was.get(key) != now.get(key))
            was = {key: was.get(key) for key in keys}
            now = {key: now.get(key) for key in keys}
        yield f"{name}: was {was}, is {now}"


def _environment() -> dict[Any, Any]:
    """The environment as the system has it: to decode all of it would cost more than the rest."""
    raw = dict(getattr(os.environ, "_data", os.environ))
    for name in NOT_OURS:
        raw.pop(name.encode(), None)
        raw.pop(name, None)
    return raw


def _settings(logger: logging.Logger) -> tuple[Any, ...]:
    return logger.level, logger.disabled, logger.propagate, tuple(logger.handlers)
