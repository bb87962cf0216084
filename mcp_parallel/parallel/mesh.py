"""The ranks of a run as a named mesh (pp, dp * cp, tp), and this rank's groups on it.

dp and cp are one axis of the mesh, for their ranks hold the same parameters: gradients are summed
over both and ZeRO shards over both. The ranks that share a sequence are a group beside the mesh.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from mcp_parallel.layout import Coordinate, Layout

DATA = "dp_cp"
"""Axis of the ranks that hold the same parameters and train on different tokens: dp and cp as one,
cp varying faster."""
AXES = ("pp", DATA, "tp")
# With HSDP it is two axes: replicas are far apart, the ranks that ZeRO shards over are near.
HYBRID_AXES = ("dp_replicate", "dp_shard_cp")


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the mesh.

    A layout of one rank needs no torch.distributed: then ``device_mesh`` and all groups are None.
    """

    layout: Layout
    coordinate: Coordinate
    device: torch.device
    device_mesh: DeviceMesh | None
    world: dist.ProcessGroup | None
    data_group: dist.ProcessGroup | None = None
    """The group along ``DATA``, of one rank too; None in a layout of one rank."""
    cp_group: dist.ProcessGroup | None = None

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The group of ranks that differ from this one on ``axis`` alone; None for a size of 1.

        Args:
            axis: pp, cp, tp or ``DATA``.
        """
        if self.device_mesh is None or getattr(self.layout, axis) == 1:
            return None
        if axis == "cp":
            return self.cp_group
        return self.data_group if axis == DATA else self.device_mesh.get_group(axis)

    @property
    def zero_axes(self) -> str | tuple[str, ...]:
        """The axes of ``device_mesh`` that ``fully_shard`` works on."""
        return HYBRID_AXES if self.layout.is_hybrid else DATA

    def places(self) -> dict[str, int]:
        """This rank's index on every axis over which ranks may hold the same parameters."""
        index, tp = self.layout.data_index(self.coordinate), self.coordinate.tp
        if not self.layout.is_hybrid:
            return {DATA: index, "tp": tp}
        return {
            **dict(zip(HYBRID_AXES, divmod(index, self.layout.zero_ranks), strict=True)),
            "tp": tp,
        }

    def peer_at_stage(self, pp: int) -> int:
        """Global rank of the rank on pipeline rank ``pp`` with this one's place on other axes."""
        return self.layout.rank_of(replace(self.coordinate, pp=pp))


def build_mesh(layout: Layout, device: torch.device) -> Mesh | None:
    """Lay the first ``layout.world_size`` ranks out as a mesh.

    Collective over the default group. Ranks beyond the layout get None (``parity`` runs layouts of
    several sizes in one worker set).
    """
    size = layout.world_size
    rank = dist.get_rank() if dist.is_initialized() else 0
    if size == 1:
        return Mesh(layout, layout.coordinate(0), device, None, None) if rank == 0 else None
    # torch remembers what ops on DTensors give by shapes and ranks, their mesh with it: after a
    # second init_process_group even ``detach`` would give the first one's, whose groups are gone.
    _clear_sharding_prop_cache()
    world = dist.group.WORLD
    if size != dist.get_world_size():
        world = cast("dist.ProcessGroup", dist.new_group(list(range(size))))
    sizes: dict[str, int] = {axis: getattr(layout, axis) for axis in AXES}
    if layout.is_hybrid:
        sizes = _with_hybrid_data(sizes, layout)
    # Ranks by place: the mesh is (pp, dp * cp, tp) in both orders of ranks.
    ranks = torch.tensor([layout.rank_of(place) for place in layout.places()])
    device_mesh = DeviceMesh(
        device.type,
        ranks.view(*sizes.values()),
        mesh_dim_names=tuple(sizes),
        _init_backend=True,
    )
    # Collective over the default group, ranks beyond the layout included, both.
    cp_group = _own_line(ranks.view(-1, layout.cp, layout.tp), rank) if layout.cp > 1 else None
    data_lines = ranks.view(layout.pp, layout.dp_cp, layout.tp)
    data_group = _own_line(data_lines, rank) if layout.is_hybrid else None
    if rank >= size:
        return None
    place = layout.coordinate(rank)
    data_group = data_group or device_mesh.get_group(DATA)
    return Mesh(layout, place, device, device_mesh, world, data_group, cp_group)


def _own_line(ranks: torch.Tensor, rank: int) -> dist.ProcessGroup | None:
    """Of the groups along dim 1 of ``ranks`` [_, size, tp], each made here: the one of ``rank``."""
    mine: dist.ProcessGroup | None = None
    for line in ranks.transpose(1, 2).reshape(-1, ranks.shape[1]).tolist():
        group = dist.new_group(line)  # ranks rise along the line in both orders of ranks
        mine = cast("dist.ProcessGroup", group) if rank in line else mine
    return mine


def _with_hybrid_data(sizes: dict[str, int], layout: Layout) -> dict[str, int]:
    """``sizes`` of the axes with ``DATA`` as its two axes of HSDP, in its place."""
    hybrid = dict(zip(HYBRID_AXES, (layout.dp_replicate, layout.zero_ranks), strict=True))
    parts = ({axis: size} if axis != DATA else hybrid for axis, size in sizes.items())
    return {axis: size for part in parts for axis, size in part.items()}


def is_main() -> bool:
    """Whether this process is the one that prints and writes what is written once."""
    return not dist.is_initialized() or dist.get_rank() == 0
