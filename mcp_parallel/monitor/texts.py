"""A short text of every rank on all ranks: names of hosts, findings. Collective, without pickle."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mcp_parallel.parallel.mesh import Mesh

# Bytes of a text; what is longer is cut.
WIDTH = 256


def gather_texts(text: str, mesh: Mesh) -> list[str]:
    """The ranks' texts in the order of ranks, each cut to ``WIDTH`` bytes of UTF-8."""
    if mesh.world is None:
        return [text]
    encoded = list(text.encode()[:WIDTH])
    table = torch.zeros(mesh.layout.world_size, WIDTH, dtype=torch.int32)
    table[dist.get_rank(), : len(encoded)] = torch.tensor(encoded, dtype=torch.int32)
    table = table.to(mesh.device)
    dist.all_reduce(table, group=mesh.world)
    rows = table.cpu().tolist()
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]
