"""The plain model trained by PyTorch's own parallelism: DDP, DTensor TP with SP, FSDP2.

On gloo, the backend that torch has for CPU ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from peers.plain_llama import PlainLlama
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

WORLD_SIZE = 2


class Peer:
    """A parallelised model with its optimizer; one call is one step."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        weight_decay: float,
        loss_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.model = model
        self.loss_context = loss_context
        decay = [p for p in model.parameters() if p.dim() > 1]
        plain = [p for p in model.parameters() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decay, "weight_decay": weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=lr,
            betas=(0.9, 0.95),
            fused=True,
        )

    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
        """Train on this rank's rows; returns its mean loss and the norm before clipping."""
        self.optimizer.zero_grad()
        with self.loss_context():
            logits = self.model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(_whole(loss.detach())), float(_whole(norm))


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _gloo() -> dist.ProcessGroup:
    return cast("dist.ProcessGroup", dist.new_group(backend="gloo"))


def _mesh(axis: str) -> DeviceMesh:
    return DeviceMesh.from_group(_gloo(), "cpu", mesh_dim_names=(axis,))


def data_parallel(model: PlainLlama, *, lr: float, weight_decay: float, **_: object) -> Peer:
    ddp = DistributedDataParallel(model, process_group=_gloo(), gradient_as_bucket_view=True)
    return Peer(ddp, lr=lr, weight_decay=weight_decay)


def tensor_parallel(model: PlainLlama, *, lr: float, weight_decay: float, **_: object) -> Peer:
    """Heads, feed-forward and vocabulary split; activations between blocks split by sequence."""
    mesh = _mesh("tp")
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attn_norm": SequenceParallel(),
                "attn": PrepareModuleInput(
                    input_layouts=(Shard(1), None, None),
                    desired_input_layouts=(Replicate(), None, None),
                ),
                "attn.wq": ColwiseParallel(),
                "attn.wk": ColwiseParallel(),
                "attn.wv": ColwiseParallel(),
                "attn.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "ffn": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "ffn.w1": ColwiseParallel(),
                "ffn.w3": ColwiseParallel(),
                "ffn.w2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    return Peer(model, lr=lr, weight_decay=weight_decay, loss_context=loss_parallel)


def fully_sharded(
    model: PlainLlama,
    *,
    lr: float,
    weight_decay: float,
    reshard_after_forward: bool = True,
    **_: object,
) -> Peer:
    """FSDP2: ZeRO-3, or ZeRO-2 where parameters are kept after forward."""
    mesh = _mesh("dp")
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return Peer(model, lr=lr, weight_decay=weight_decay)
