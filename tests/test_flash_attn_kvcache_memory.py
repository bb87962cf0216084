"""The scratch of decoding steps on CPU: kept by its thread, apart from that of other threads."""

from __future__ import annotations

import ctypes
import resource
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_flash_attn_cpu import ISAS, threads
from torch import Tensor

from mcp_kernels import flash_attn_with_kvcache
from mcp_kernels.testing import assert_same_bits

pytestmark = pytest.mark.skipif(not ISAS, reason="a pure-Python install has no compiled body")


def decode(seed: int, length: int) -> Tensor:
    """One query row of 8 heads against `length` keys of 2 KV heads."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 1, 8, 128, generator=generator).bfloat16()
    k, v = (torch.randn(1, length, 2, 128, generator=generator).bfloat16() for _ in "kv")
    return flash_attn_with_kvcache(q, k, v)


def test_threads_that_call_at_once_keep_their_scratch_apart() -> None:
    """Each thread's results of long, short and long caches are those of a call alone."""
    cases = [(i, (40, 2100, 1030, 5000)[i % 4]) for i in range(12)]
    alone = [decode(*case) for case in cases]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(8):
            for out, wanted in zip(pool.map(decode, *zip(*cases, strict=True)), alone, strict=True):
                assert_same_bits(out, wanted, "out")


@pytest.mark.skipif(sys.platform != "linux", reason="counts the page faults of Linux")
def test_a_decoding_step_takes_no_fresh_pages() -> None:
    """Scratch is kept from step to step, even if the allocator gives all it can to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        pytest.skip("the C library cannot give memory back when asked")
    q = torch.randn(1, 1, 32, 128)
    k, v = (torch.randn(1, 2100, 8, 128) for _ in "kv")

    def faults_of_step() -> int:
        trim(0)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        flash_attn_with_kvcache(q, k, v)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    with threads(1):
        faults = sorted(faults_of_step() for _ in range(20))
    # Partial sums of 3 splits of 32 rows of 160 floats alone are 15 pages of 4 KiB; the results are
    # 4 and a bit, and small blocks around them may take a page each.
    assert faults[10] < 15, faults
