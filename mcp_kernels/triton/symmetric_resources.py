"""Registers, spills and shared memory of the symmetric-memory kernels, for GPUs that are not here.

``python -m mcp_kernels.triton.symmetric_resources`` prints them for sm_80 and sm_90.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch

from mcp_kernels.symmetric.layout import Layout
from mcp_kernels.symmetric.peers import Peers
from mcp_kernels.triton import all_gather_matmul_launch as gather
from mcp_kernels.triton import all_gather_steps as steps
from mcp_kernels.triton import matmul_reduce_launch as reduce
from mcp_kernels.triton.cubin import Resources, compile_launch_with_ptx
from mcp_kernels.triton.symmetric_launch import Launch

_WORLD = 4


def _peers(multicast: int, rank: int = 0) -> Peers:
    layout = Layout(_WORLD, 1025, 16 << 20)
    table = torch.zeros(_WORLD, dtype=torch.int64)
    error = torch.zeros(1, dtype=torch.int64)
    return Peers(rank, layout, table, error, 10**10, 132, multicast)


def _reduction(form: int, rows: int, dtype: torch.dtype, multicast: int = 0) -> Launch:
    product = _product(rows, dtype)
    y = torch.empty(rows, 4096, dtype=dtype)
    tile = reduce.choose_tile(rows, dtype)
    down, across = -(-rows // tile.block_m), -(-4096 // tile.block_n)
    parts = (rows, -(-rows // _WORLD), 0, rows, down, across, reduce.GROUP_M)
    tiles = down * across
    per_owner = tiles if form == reduce.ONE_SHOT else -(-tiles // _WORLD)
    peers = _peers(multicast, rank=int(rows == 1))  # a 1 is a constant to a launch
    return reduce.launch_of(product, y, peers, form, tile, parts, tiles, per_owner)


def _product(rows: int, dtype: torch.dtype) -> reduce.Product:
    x, weight = torch.empty(rows, 2048, dtype=dtype), torch.empty(4096, 2048, dtype=dtype)
    return reduce.Product(x, weight, torch.empty(4096, dtype=dtype))


def _gather() -> Launch:
    y = torch.empty(4096, 4096, dtype=torch.bfloat16)
    gathered = torch.empty(4096, 2048, dtype=torch.bfloat16)
    return next(gather.launches(_product(1024, torch.bfloat16), y, gathered, _peers(0, rank=1)))


def launches(arch: int) -> dict[str, Launch]:
    """A launch of each form by name."""
    bf16 = torch.bfloat16
    found = {
        "one_shot": _reduction(reduce.ONE_SHOT, 64, bf16),
        "two_shot": _reduction(reduce.TWO_SHOT, 4096, bf16),
        "scatter": _reduction(reduce.SCATTER, 4096, bf16),
        "all_gather": _gather(),
        "small": _reduction(reduce.ONE_SHOT, 1, bf16),
        "offer": steps.offer_launch(_product(1024, bf16).x, _peers(0, rank=1)),
        "pull": steps.pull_launch(torch.empty(1024, 2048, dtype=bf16), 1, _peers(0, rank=1)),
        "float32": _reduction(reduce.TWO_SHOT, 4096, torch.float32),
    }
    if arch >= 90:
        found["multicast"] = _reduction(reduce.TWO_SHOT, 4096, bf16, multicast=1 << 40)
    return found


def rows(archs: Sequence[int], names: Sequence[str]) -> Iterator[tuple[str, Resources, str]]:
    """``(label, resources, PTX)`` of the named kernels; "all" names every one."""
    for arch in archs:
        for name, launch in launches(arch).items():
            if "all" in names or name in names:
                yield (f"sm_{arch} {name}:", *compile_launch_with_ptx(launch, arch))


if __name__ == "__main__":
    for label, used, _ in rows((80, 90), ("all",)):
        sys.stdout.write(f"{label} {used}\n")
