"""Stage 1 of a flat bucket: averaged gradients, their norm, torch's fused AdamW.

Letters: P, S as in ``_flat_params``; B = blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcp_kernels.ops import _comm
from mcp_kernels.optim._flat_params import FlatParams
from mcp_kernels.optim._fused_adamw import fused_adamw_
from mcp_kernels.optim.flat_buffer import flat_buffer


class AdamStage:
    """State of the parameters of one device, dtype, betas and eps on this rank.

    Args:
        flat: the parameters.
        betas: decay of the two moments.
        eps: added to the root of the second.
        group: ranks that average gradients; None is this rank alone.
        compresses: False stays in stage 1 for ever.
        is_sum: what ranks have are terms of a sum: each alone is 1 / W of the gradient.
    """

    def __init__(
        self,
        flat: FlatParams,
        betas: tuple[float, float],
        eps: float,
        group: dist.ProcessGroup | None,
        *,
        compresses: bool,
        is_sum: bool,
    ) -> None:
        self.flat, self.betas, self.eps = flat, betas, eps
        self.group, self.compresses = group, compresses
        self.layout = flat.layout
        world = 1 if group is None else group.size()
        self.own_scale = float(world) if is_sum else 1.0
        """What makes a rank's own gradient an estimate of the whole one."""
        span = flat.span[1] - flat.span[0]
        # The momentum: [S] float32 in stage 1, [P] until the first compressed step, then codes.
        self.exp_avg: Tensor | None = self.new_buffer(span, flat.state_dtype)  # [S]
        self.exp_avg_sq: Tensor | None = self.new_buffer(span, flat.state_dtype)  # [S], stage 1
        self.preconditioner: Tensor | None = None  # [P] bfloat16, stage 2
        self.moves: Tensor | None = None  # [S / 8] uint8, stage 2, where coordinates are masked
        self.bits: Tensor | None = None  # [P / 8] uint8
        self.scales: Tensor | None = None  # [B] float32
        self.worker_error: Tensor | None = None  # [P] float32
        self.server_error: Tensor | None = None  # [P / W] float32
        self.steps = [torch.zeros((), device=flat.device) for _ in flat.params]
        self.master: Tensor | None = None
        if flat.has_master:
            self.master = self.new_buffer(span, flat.state_dtype)
            flat.fill_span(self.master, flat.params)
        self._grads: Tensor | None = None
        self.averaged: list[Tensor] = []
        """Stage 1: the averaged gradient of each segment that has one, set by ``average``."""
        self._with_grad: list[int] = []
        self._zero = torch.zeros((), dtype=flat.dtype, device=flat.device)

    @property
    def is_frozen(self) -> bool:
        """Whether this bucket is in stage 2."""
        return self.preconditioner is not None

    def new_buffer(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Zeros on the bucket's device, on huge pages where there are any."""
        return flat_buffer(numel, dtype, self.flat.device)

    def refresh_master(self) -> None:
        """Take master weights from the parameters, which were loaded."""
        if self.master is not None:
            self.flat.fill_span(self.master, self.flat.params)

    # --- stage 1 --------------------------------------------------------------------------------

    def average(self, present: Sequence[bool], *, is_local: bool) -> None:
        """Collect the averaged gradients of this rank's span.

        Args:
            present: for each parameter, whether some rank has a gradient.
            is_local: gradients are this rank's own and are averaged here; otherwise they arrive
                averaged.
        """
        flat, grads = self.flat, [p.grad for p in self.flat.params]
        self._with_grad = [i for i, segment in enumerate(flat.segments) if present[segment.index]]
        if is_local and self.group is not None:
            views = flat.span_views(self._average_flat(grads, self.group))
            self.averaged = [views[i] for i in self._with_grad]
        elif not flat.has_master:
            self.averaged = [self._grad(flat.segments[i].index) for i in self._with_grad]
        else:
            if self._grads is None:
                self._grads = self.new_buffer(flat.span[1] - flat.span[0], flat.state_dtype)
            flat.fill_span(self._grads, grads)
            views = flat.span_views(self._grads)
            self.averaged = [views[i] for i in self._with_grad]

    def square_sum(self, options: Sequence[Mapping[str, Any]]) -> Tensor:
        """Squared norm of this rank's gradients, float64 ``[]``, by groups' ``norm_weight``.

        In stage 1 of the averaged gradient, which every rank of the group counts; in stage 2 of
        this rank's own.
        """
        flat = self.flat
        if self.is_frozen:
            found = [(flat.groups[i], p.grad) for i, p in enumerate(flat.params)]
        else:
            indices = (flat.groups[flat.segments[i].index] for i in self._with_grad)
            found = list(zip(indices, self.averaged, strict=True))
        grads = [(group, grad) for group, grad in found if grad is not None and grad.numel()]
        if not grads:
            return torch.zeros((), dtype=torch.float64)
        squares = torch.stack(torch._foreach_norm([grad for _, grad in grads])).double().square()
        weights = [float(options[group]["norm_weight"]) for group, _ in grads]
        if any(weight != 1.0 for weight in weights):
            squares *= torch.tensor(weights, dtype=torch.float64, device=squares.device)
        if self.is_frozen:
            squares *= self.own_scale**2
        ranks_counting = 1 if self.group is None or self.is_frozen else self.group.size()
        return squares.sum() * (ranks_counting if flat.is_sharded else 1)

    def variance_norm(self, count: int) -> float:
        """1-norm of this rank's part of the second moment after ``count`` steps, bias-corrected."""
        assert self.exp_avg_sq is not None
        total = self.exp_avg_sq.sum(dtype=torch.float64).item()
        return total / (1 - self.betas[1] ** count)

    def _grad(self, index: int) -> Tensor:
        """A parameter's gradient, zeros without memory where it has none."""
        param = self.flat.params[index]
        return self._zero.expand(param.shape) if param.grad is None else param.grad

    def _average_flat(self, grads: Sequence[Tensor | None], group: dist.ProcessGroup) -> Tensor:
        """Mean over ranks, as this rank's span of the flat buffer."""
        if self._grads is None:
            self._grads = self.new_buffer(self.layout.padded_numel, self.flat.state_dtype)
        for view, grad in zip(self.flat.views(self._grads), grads, strict=True):
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad)
        if self.flat.is_sharded:
            mine = _comm.scatter_sum(self._grads, group, 0)
        else:
            mine = _comm.sum_over_ranks_(self._grads, group)
        return mine if self.own_scale > 1 else mine.div_(group.size())

    def adam_step(
        self, options: Sequence[Mapping[str, Any]], factor: float, present: Sequence[bool]
    ) -> None:
        """Take a step of torch's fused AdamW on what ``average`` collected, times ``factor``.

        Args:
            options: of every parameter group: ``lr`` and ``weight_decay``.
            factor: of the gradients: clipping and loss scale.
            present: as given to ``average``; those parameters' steps are counted.
        """
        flat = self.flat
        assert self.exp_avg is not None
        assert self.exp_avg_sq is not None
        counted = [
            steps for steps, is_present in zip(self.steps, present, strict=True) if is_present
        ]
        if counted:
            torch._foreach_add_(counted, 1)
        moments = [self._segment_views(m) for m in (self.exp_avg, self.exp_avg_sq)]
        if self.master is None:
            targets: list[Tensor] = [flat.params[s.index] for s in flat.segments]
        else:
            targets = self._segment_views(self.master)
        grads = dict(zip(self._with_grad, self.averaged, strict=True))
        for group in sorted({flat.groups[flat.segments[i].index] for i in grads}):
            chosen = [i for i in grads if flat.groups[flat.segments[i].index] == group]
            fused_adamw_(
                [targets[i] for i in chosen],
                [grads[i].view(targets[i].shape) for i in chosen],
                ([moments[0][i] for i in chosen], [moments[1][i] for i in chosen]),
                [self.steps[flat.segments[i].index] for i in chosen],
                lr=float(options[group]["lr"]),
                betas=self.betas,
                weight_decay=float(options[group]["weight_decay"]),
                eps=self.eps,
                factor=factor,
            )
        self.averaged = []
        if self.master is not None:
            self._publish()

    def _segment_views(self, flat_S: Tensor) -> list[Tensor]:
        """Views of the segments, in their parameters' shapes where those are whole."""
        flat = self.flat
        return [
            view if flat.has_master else view.view(flat.params[segment.index].shape)
            for segment, view in zip(flat.segments, flat.span_views(flat_S), strict=True)
        ]

    def _publish(self) -> None:
        """Give the parameters the values of the master weights."""
        assert self.master is not None
        values = self.master.to(self.flat.dtype)
        if self.flat.is_sharded:
            assert self.group is not None
            values = _comm.gather(values, self.group, 0)
        self.flat.load_params(values)
