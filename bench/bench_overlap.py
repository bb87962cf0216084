"""The tensor-parallel matmuls in pieces under their communication, beside communication at the end.

Two ranks. On a slow link (``peers/throttled.py``: 10 and 1 Gbit/s, where only time passes) pieces
are what a group takes; on gloo over loopback, where the ranks' own cores move the bytes, they are
forced here and a group would refuse them (``mcp_kernels/ops/_overlap_group.py``). ``bare_linear``
is the product alone.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_ranks import compare_on_ranks
from peers.throttled import throttled_group

from mcp_kernels._op import definitions
from mcp_kernels.ops import _comm

LINKS = {"loopback": None, "10Gbit": 1e10, "1Gbit": 1e9}
# rows, in features of a rank, out features
SHAPES = [(1024, 1024, 2048)]
CALLS = ["matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul", "backward"]


def arguments(call, x, weight, name, world):
    """The op behind ``call`` and what it takes."""
    if call == "matmul_all_reduce":
        return call, (x, weight, None, name)
    if call == "matmul_reduce_scatter":
        return call, (x, weight, None, name, 0)
    part = x[: x.shape[0] // world].contiguous()
    if call == "all_gather_matmul":
        return call, (part, [weight], [], name, 0, None, True)
    dy = torch.randn(part.shape[0], weight.shape[0], dtype=x.dtype)
    needs = [True, True, False]
    return "matmul_reduce_scatter_backward", (dy, x, weight, needs, name, 0, x.shape[0])


def make(rank, world, call, shape, link):
    rows, in_features, out_features = shape
    torch.manual_seed(rank)
    x, weight = torch.randn(rows, in_features), torch.randn(out_features, in_features)
    group = dist.group.WORLD
    if link is not None:
        group = throttled_group(world)
        group.bits_per_s = link
    op, args = arguments(call, x, weight, _comm.group_name(group), world)
    definition = definitions[op]

    def first(result):
        result = result[0] if isinstance(result, tuple) else result
        return result[0] if isinstance(result, list) else result

    return {
        "ours": lambda: first(definition.general.body(*args)),
        "reference": lambda: first(definition.reference(*args)),
        "bare_linear": lambda: torch.nn.functional.linear(x, weight),
    }


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("call", CALLS)
def bench_overlap(benchmark, call, shape, link):
    rows, in_features, out_features = shape
    elements = rows * (in_features + out_features) + in_features * out_features
    args = (call, shape, LINKS[link])
    compare_on_ranks(benchmark, make, *args, num_bytes=4 * elements, rounds=10)
