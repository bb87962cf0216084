"""What OneBitAdam refuses, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_options(
    freeze_step: Any, clip_norm: float, variance_floor: float, zero: int, grads: str, op: str
) -> None:
    """Rules of single options.

    Raises:
        ValueError: one is broken.
    """
    if freeze_step != "auto" and (
        not isinstance(freeze_step, int) or isinstance(freeze_step, bool) or freeze_step < 1
    ):
        raise ValueError(
            f"OneBitAdam: freeze_step must be auto or at least 1, got {freeze_step!r}; a "
            "variance needs steps before it can be frozen, 15 to 25 % of the run do well"
        )
    if not clip_norm >= 0 or math.isinf(clip_norm):
        raise ValueError(f"OneBitAdam: clip_norm must be finite and >= 0, got {clip_norm}")
    if not 0 <= variance_floor <= 1:
        raise ValueError(f"OneBitAdam: variance_floor must be in [0, 1], got {variance_floor}")
    if zero not in (0, 1):
        raise ValueError(
            f"OneBitAdam: zero must be 0 or 1, got {zero}; every rank needs its whole gradient, "
            "momentum and error, so sharding gradients or parameters (ZeRO-2/3) would save "
            "nothing. Use zero=1, or FSDP2 with mcp_kernels.optim.fsdp_hooks, which compresses its "
            "reduce-scatter (int8, int4) or its replicas' all-reduce (onebit)"
        )
    if op not in ("avg", "sum"):
        raise ValueError(f"OneBitAdam: op must be avg or sum, got {op!r}")
    if grads not in ("local", "averaged"):
        raise ValueError(f"OneBitAdam: grads must be local or averaged, got {grads!r}")


def check_shards(param_groups: Sequence[dict[str, Any]]) -> None:
    """Every parameter is a plain tensor of a known float.

    Raises:
        TypeError: a dtype is unknown.
        ValueError: a parameter is sharded over the ranks that would average it, or sparse.
    """
    for group in param_groups:
        beta1, beta2 = group["betas"]
        if not 0 <= beta1 < 1 or not 0 <= beta2 < 1:
            raise ValueError(f"OneBitAdam: betas must be in [0, 1), got {group['betas']}")
        # Written so that NaN, which compares to nothing, is refused too.
        if not (group["lr"] >= 0 and group["eps"] >= 0 and group["weight_decay"] >= 0):
            raise ValueError(
                "OneBitAdam: lr, eps and weight_decay must be >= 0, got "
                f"{group['lr']}, {group['eps']}, {group['weight_decay']}"
            )
        for param in group["params"]:
            if isinstance(param, DTensor):
                raise ValueError(
                    "OneBitAdam: params must be plain tensors, got a DTensor; under tensor "
                    "parallelism pass each local part (param.to_local()) with the data-parallel "
                    "group, under FSDP2 use mcp_kernels.optim.fsdp_hooks"
                )
            if param.dtype not in _DTYPES:
                raise TypeError(
                    f"OneBitAdam: params must be float32, bfloat16, float16 or float64, got "
                    f"{param.dtype}"
                )


def check_dense(names: Sequence[str], params: Sequence[Tensor]) -> None:
    """Gradients are dense.

    Raises:
        TypeError: one is sparse.
    """
    for name, param in zip(names, params, strict=True):
        if param.grad is not None and param.grad.is_sparse:
            raise TypeError(
                f"OneBitAdam: gradients must be dense, got a sparse one of {name}; make its "
                "nn.Embedding with sparse=False, or give it to torch.optim.SparseAdam"
            )
