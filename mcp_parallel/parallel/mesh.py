"""The ranks of a run as a named mesh (pp, dp, tp), and this rank's groups on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mcp_parallel.layout import Coordinate, Layout

AXES = ("pp", "dp", "tp")
# With HSDP dp is two axes: replicas are far apart, the ranks that ZeRO shards over are near.
HYBRID_DP_AXES = ("dp_replicate", "dp_shard")


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

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The group of ranks that differ from this one on ``axis`` alone; None for a size of 1."""
        if self.device_mesh is None or getattr(self.layout, axis) == 1:
            return None
        return self.device_mesh.get_group(axis)

    @property
    def zero_axes(self) -> str | tuple[str, ...]:
        """The axes of ``device_mesh`` that ``fully_shard`` works on."""
        return HYBRID_DP_AXES if self.layout.is_hybrid else "dp"

    def places(self) -> dict[str, int]:
        """This rank's index on every axis over which ranks may hold the same parameters."""
        dp, shard = self.coordinate.dp, self.layout.dp_shard
        if self.layout.is_hybrid:
            return {"dp_replicate": dp // shard, "dp_shard": dp % shard, "tp": self.coordinate.tp}
        return {"dp": dp, "tp": self.coordinate.tp}

    def peer_at_stage(self, pp: int) -> int:
        """Global rank of the rank on pipeline rank ``pp`` with this one's dp and tp place."""
        return (pp * self.layout.dp + self.coordinate.dp) * self.layout.tp + self.coordinate.tp


def build_mesh(layout: Layout, device: torch.device) -> Mesh | None:
    """Lay the first ``layout.world_size`` ranks out as a mesh.

    Collective over the default group. Ranks beyond the layout get None (``parity`` runs layouts of
    several sizes in one worker set).
    """
    size = layout.world_size
    rank = dist.get_rank() if dist.is_initialized() else 0
    if size == 1:
        return Mesh(layout, layout.coordinate(0), device, None, None) if rank == 0 else None
    world = dist.group.WORLD
    if size != dist.get_world_size():
        world = cast("dist.ProcessGroup", dist.new_group(list(range(size))))
    sizes: dict[str, int] = dict(zip(AXES, (layout.pp, layout.dp, layout.tp), strict=True))
    if layout.is_hybrid:
        sizes = _with_hybrid_dp(sizes, layout)
    device_mesh = DeviceMesh(
        device.type,
        torch.arange(size).view(*sizes.values()),
        mesh_dim_names=tuple(sizes),
        _init_backend=True,
    )
    if layout.is_hybrid:
        device_mesh[HYBRID_DP_AXES]._flatten("dp")  # collective over the default group
    if rank >= size:
        return None
    return Mesh(layout, layout.coordinate(rank), device, device_mesh, world)


def _with_hybrid_dp(sizes: dict[str, int], layout: Layout) -> dict[str, int]:
    """``sizes`` of the axes with dp as its two axes of HSDP, in dp's place."""
    hybrid = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard}
    parts = ({axis: size} if axis != "dp" else hybrid for axis, size in sizes.items())
    return {axis: size for part in parts for axis, size in part.items()}


def is_main() -> bool:
    """Whether this process is the one that prints and writes what is written once."""
    return not dist.is_initialized() or dist.get_rank() == 0
