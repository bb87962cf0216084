"""The mesh of ranks and the process groups that it stands on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from mcp_parallel.layout import Coordinate, Layout
from mcp_parallel.parallel.mesh import build_mesh


def mesh_of_an_alias(rank, world):
    mesh = build_mesh(Layout(tp=2), torch.device("cpu")).device_mesh["tp"]
    weight = DTensor.from_local(torch.zeros(4, 3), mesh, [Shard(0)], run_check=False)
    return torch.nn.Parameter(weight).device_mesh is mesh


def test_a_second_process_group_does_not_get_the_mesh_of_the_first(ranks):
    for _ in range(2):  # in the same processes
        assert ranks.run(mesh_of_an_alias, ranks=2) == [True, True]


LAYOUTS = [
    {"dp": 2, "pp": 2},
    {"dp": 2, "tp": 2},
    {"dp": 2, "cp": 2},
    {"tp": 2, "pp": 2},
    {"dp": 4, "zero": 3, "dp_replicate": 2},
    {"dp": 2, "cp": 2, "zero": 3, "dp_replicate": 2},
]


def groups_of(rank, world, layout):
    """Each group of this rank on the mesh, as ranks in the order of the group."""
    mesh = build_mesh(layout, torch.device("cpu"))
    axes = ("pp", "cp", "tp", "dp_cp")
    groups = {axis: mesh.group(axis) for axis in axes}
    if layout.is_hybrid:
        groups |= {axis: mesh.device_mesh.get_group(axis) for axis in mesh.zero_axes}
    ranks = {axis: dist.get_process_group_ranks(group) for axis, group in groups.items() if group}
    return ranks, mesh.peer_at_stage(layout.pp - 1)


def expected_groups(rank, layout):
    """By the definition of an axis: the ranks whose other coordinates are those of ``rank``."""
    mine = layout.coordinate(rank)

    def line(*axes):
        fixed = [axis for axis in ("pp", "dp", "cp", "tp") if axis not in axes]
        places = list(layout.places())
        same = [p for p in places if all(getattr(p, a) == getattr(mine, a) for a in fixed)]
        return [layout.rank_of(place) for place in same]

    found = {axis: line(axis) for axis in ("pp", "cp", "tp") if getattr(layout, axis) > 1}
    if layout.dp_cp > 1:
        found["dp_cp"] = line("dp", "cp")
    if layout.is_hybrid:
        group, index = divmod(layout.data_index(mine), layout.zero_ranks)
        cut = [found["dp_cp"][i : i + layout.zero_ranks] for i in range(0, layout.dp_cp, 2)]
        found |= {"dp_shard_cp": cut[group], "dp_replicate": [part[index] for part in cut]}
    return found


@pytest.mark.parametrize("order", ("dp-pp-cp-tp", "pp-dp-cp-tp"))
@pytest.mark.parametrize("degrees", LAYOUTS, ids=lambda d: "".join(f"{k}{v}" for k, v in d.items()))
def test_groups_join_the_ranks_that_differ_on_one_axis(ranks, degrees, order):
    layout = Layout(**degrees, rank_order=order)
    for rank, (groups, last) in enumerate(ranks.run(groups_of, layout)):
        assert groups == expected_groups(rank, layout)
        place = layout.coordinate(rank)
        moved = Coordinate(pp=layout.pp - 1, dp=place.dp, cp=place.cp, tp=place.tp)
        assert layout.coordinate(last) == moved
