"""The mesh of ranks and the process groups that it stands on."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard

from mcp_parallel.layout import Layout
from mcp_parallel.parallel.mesh import build_mesh


def mesh_of_an_alias(rank, world):
    mesh = build_mesh(Layout(tp=2), torch.device("cpu")).device_mesh["tp"]
    weight = DTensor.from_local(torch.zeros(4, 3), mesh, [Shard(0)], run_check=False)
    return torch.nn.Parameter(weight).device_mesh is mesh


def test_a_second_process_group_does_not_get_the_mesh_of_the_first(ranks):
    for _ in range(2):  # in the same processes
        assert ranks.run(mesh_of_an_alias, ranks=2) == [True, True]
