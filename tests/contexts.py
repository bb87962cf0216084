"""What the launcher gives a rank, for ranks that tests start themselves."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mcp_parallel.launch.context import RankContext


def rank_context(rank=0, world=1):
    """Rank ``rank`` of ``world`` on a CPU, with a store that no other rank sees."""
    return RankContext(
        rank=rank,
        world_size=world,
        local_rank=rank,
        device=torch.device("cpu"),
        store=dist.HashStore(),
    )
