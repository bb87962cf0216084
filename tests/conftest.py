"""One thread a process: the suite shares its cores, and results must not depend on the count."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import warnings

import pytest
import torch
from ranks import RankPool

if not torch.cuda.is_available():
    # Triton chooses its interpreter when it is imported, so before anything here imports it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

with warnings.catch_warnings():
    # A pure-Python installation says so once; the suite holds for it too.
    warnings.simplefilter("ignore", RuntimeWarning)
    import mcp_kernels  # noqa: F401

torch.set_num_threads(1)


@pytest.fixture
def poisoned_memory():
    """torch.empty holds NaN (or the largest integer): an element left unwritten shows."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(was_deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = was_filling


@pytest.fixture(scope="session")
def ranks():
    """Four forked ranks in a gloo group; see ranks.py."""
    pool = RankPool(4)
    yield pool
    pool.close()
