"""Symmetric buffers between test processes: files that every rank maps, a table of addresses.

What a GPU reaches over NVLink a process reaches here through shared memory; the kernels run in
Triton's interpreter and meet on real flags.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankError
from torch import Tensor

from mcp_kernels.symmetric.layout import Layout
from mcp_kernels.symmetric.peers import Peers

SECOND_NS = 1_000_000_000


def make_peers(
    folder: str,
    rank: int,
    layout: Layout,
    *,
    num_programs: int = 2,
    timeout_ns: int = 20 * SECOND_NS,
) -> tuple[Peers, list[Tensor]]:
    """The view of ``rank``, and the mapped buffers, which must be kept as long as it."""
    buffers = [
        torch.from_file(
            f"{folder}/{peer}", shared=True, size=layout.buffer_bytes // 8, dtype=torch.int64
        )
        for peer in range(layout.world)
    ]
    table = torch.tensor([buffer.data_ptr() for buffer in buffers])
    error = torch.zeros(1, dtype=torch.int64)
    return Peers(rank, layout, table, error, timeout_ns, num_programs), buffers


def new_buffers(folder: Path, layout: Layout) -> str:
    """Files of one group's buffers: words and flags zero, slots NaN (whatever the type)."""
    folder.mkdir(exist_ok=True)
    for rank in range(layout.world):
        slots = b"\xff" * (2 * layout.slot_bytes)
        (folder / str(rank)).write_bytes(b"\0" * layout.slots_at + slots)
    return str(folder)


def assert_seen(words: str, run: Callable[[float], Any]) -> None:
    """``run(delay_s)`` fails with ``words``, where only being early or late shows what is wrong.

    On a busy machine a short delay may be over before the other ranks begin, so longer ones follow.
    """
    with pytest.raises(RankError, match=words):  # noqa: PT012 (any of the runs)
        for delay_s in (0.3, 2.0, 10.0):
            run(delay_s)


def planted(module: types.ModuleType, right: str, wrong: str, folder: str) -> types.ModuleType:
    """A copy of ``module`` whose source has ``wrong`` in place of ``right``."""
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert right in text, f"{module.__name__} has no {right!r}"
    name = f"planted_{module.__name__.rpartition('.')[2]}"
    path = Path(folder, f"{name}_{torch.distributed.get_rank()}.py")
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made
