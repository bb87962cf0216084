"""The plain model trained by DeepSpeed's ZeRO on CPU ranks, over gloo, where it is installed."""

from __future__ import annotations

import logging
import os
import warnings

import torch
import torch.distributed as dist
from peers.torch_parallel import WORLD_SIZE
from torch.nn import functional as F  # noqa: N812


def refusal() -> str:
    """Import DeepSpeed before ranks are forked; the reason why it cannot be, or ""."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import deepspeed

            deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    except Exception as error:  # whatever an import may raise
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


class DeepSpeedZero:
    """Stage 1, 2 or 3 of ZeRO; one call is one step. Its optimizer is torch's fused AdamW."""

    def __init__(self, model, *, lr, weight_decay, stage, rows):
        import deepspeed

        rank = dist.get_rank()
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)}
        groups = [
            {
                "params": [p for p in model.parameters() if p.dim() > 1],
                "weight_decay": weight_decay,
            },
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        config = {
            "train_batch_size": rows * WORLD_SIZE,
            "train_micro_batch_size_per_gpu": rows,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        # DeepSpeed makes its groups of the default one's kind, and knows no group of ours.
        self._gloo = dist.new_group(backend="gloo")
        with self._on_gloo(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
            deepspeed.init_distributed(dist_backend="gloo", verbose=False)
            self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def _on_gloo(self):
        return _DefaultGroup(self._gloo)

    def __call__(self, inputs, targets):
        """Train on this rank's rows; returns its mean loss and the norm before clipping."""
        with self._on_gloo(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logits = self.engine(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            self.engine.backward(loss)
            self.engine.step()
        return float(loss.detach()), float(self.engine.get_global_grad_norm())


class _DefaultGroup:
    """``group`` is torch.distributed's default one inside the block."""

    def __init__(self, group):
        self.group = group

    def __enter__(self):
        self.before = dist.group.WORLD
        dist.distributed_c10d._update_default_pg(self.group)

    def __exit__(self, *_):
        dist.distributed_c10d._update_default_pg(self.before)
