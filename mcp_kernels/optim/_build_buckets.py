"""From an optimizer's parameter groups to flat buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from mcp_kernels.ops.block_layout import BlockLayout
from mcp_kernels.optim._adam_bucket import AdamBucket
from mcp_kernels.optim._flat_params import FlatParams


def build_buckets(
    param_groups: Sequence[dict[str, Any]],
    group: dist.ProcessGroup | None,
    block_size: int,
    *,
    is_sharded: bool,
    is_sum: bool,
) -> list[AdamBucket]:
    """One bucket for all parameters of equal device, dtype, betas, eps and ``compress``.

    Two collectives a bucket and step: learning rates and weight decays may differ inside one.
    """
    world, rank = (1, 0) if group is None else (group.size(), group.rank())
    members: dict[tuple[Any, ...], list[tuple[str, Any, int]]] = {}
    for index, options in enumerate(param_groups):
        key = (tuple(options["betas"]), float(options["eps"]), bool(options["compress"]))
        names = options.get("param_names") or [
            f"{index}.{i}" for i in range(len(options["params"]))
        ]
        for name, param in zip(names, options["params"], strict=True):
            if param.requires_grad:
                members.setdefault((param.device, param.dtype, *key), []).append(
                    (name, param, index)
                )
    buckets = []
    for (_, _, betas, eps, compresses), found in members.items():
        names, params, groups = (list(column) for column in zip(*found, strict=True))
        layout = BlockLayout([p.numel() for p in params], block_size, world)
        flat = FlatParams(
            params,
            names,
            groups,
            layout,
            rank,
            is_sharded and compresses and world > 1,
        )
        buckets.append(AdamBucket(flat, betas, eps, group, compresses=compresses, is_sum=is_sum))
    return buckets
