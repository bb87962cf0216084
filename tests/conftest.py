"""One thread a process: the suite shares its cores, and results must not depend on the count."""

from __future__ import annotations

import os
import shutil
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
# What somebody measured of this machine must not decide what the planner chooses in a test.
# A folder that no one else has: as root, a path that should not exist would be made.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="mcp-tests-")

import warnings

import pytest
import torch
from global_state import changes, snapshot
from hypothesis import settings
from ranks import RankPool

if not torch.cuda.is_available():
    # Triton chooses its interpreter when it is imported, so before anything here imports it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

with warnings.catch_warnings():
    # A pure-Python installation says so once; the suite holds for it too.
    warnings.simplefilter("ignore", RuntimeWarning)
    import mcp_kernels  # noqa: F401

torch.set_num_threads(1)

# A change is judged by the same examples each time, so that what is red is the change's doing;
# HYPOTHESIS_PROFILE=explore draws new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

CACHE = os.environ["XDG_CACHE_HOME"]

# Files in which a core is busy for longest (some 20 seconds and more), longest first.
LONG_FILES = (
    *("parity", "build", "cuda_compile", "triton_flash_attn_backward", "triton_cubin", "cli"),
    *("memory", "snapshot", "evaluate", "shm_faults", "readme", "triton_matmul_all_reduce"),
    *("triton_flash_attn_decode", "triton_onebit_compress", "split_backward", "bitwise"),
)


def pytest_collection_modifyitems(items):
    """Long files first: workers that share out files then end at about the same time."""
    places = {f"test_{name}": place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_unconfigure():
    shutil.rmtree(CACHE, ignore_errors=True)


@pytest.fixture(autouse=True)
def leaves_no_trace():
    """Every test draws the same numbers whatever ran before, and leaves the process as it was.

    Fixtures of a module or the session are set up before this one and may keep what they change.
    """
    torch.default_generator.manual_seed(0)
    before = snapshot()
    yield
    left = list(changes(before, snapshot()))
    assert not left, "this test left behind for those after it: " + "; ".join(left)


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
