"""1-bit Adam: AdamW whose gradients, once the variance has settled, travel as signs.

Stage 1 is torch's AdamW on averaged gradients. At the switch the second moment is frozen; from then
on each rank folds its own gradient, divided by the frozen root, into the momentum and the ranks
average that in one bit an element, with error feedback (``compressed_all_reduce``). The averaged
momentum is those signs and scales, and is kept as such.

    stage 1 (t <= T)   AdamW(mean of g_i)
    switch             f = 1 / (sqrt(v / (1 - beta2^T)) + eps) in bfloat16, floored, 0 where v = 0
                       m = m f
    stage 2 (t > T)    m_i = beta1 m + (1 - beta1) g_i f
                       m   = compressed mean of m_i over the ranks
                       p   = p (1 - lr wd) - lr / (1 - beta1^t) * m

A sign moves every coordinate of a block by the block's scale, so what is coded had better be of one
size all over it. Gradients are not; what Adam applies is, and f, which no longer changes and is the
same everywhere, can be applied before the mean as well as after it. The paper codes m and divides
then, so coordinates of small variance are thrown about by the scale of their neighbours: on the
tiny byte model that ends 1.7 % above AdamW's validation loss, this 0.4 % (one seed, 400 steps).

Source: Tang et al., "1-bit Adam" (ICML 2021, arXiv 2102.02888); coding the preconditioned momentum:
Chen et al., "Quantized Adam with Error Feedback" (2021, arXiv 2004.14180). Ours are block scales,
the bias corrections (folded into f once), the mask, decoupled weight decay, and sharded state.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mcp_kernels.ops import _comm
from mcp_kernels.optim._adam_bucket import Mask
from mcp_kernels.optim._build_buckets import build_buckets
from mcp_kernels.optim._checks import check_dense, check_options, check_shards
from mcp_kernels.optim._switch import SwitchRule
from mcp_kernels.optim.onebit_state import read_state, write_state

# As in torch.nn.utils.clip_grads_with_norm_, so that a zero norm divides nothing by zero.
_CLIP_EPSILON = 1e-6
# A coordinate whose variance happens to be small when it is frozen gives its scale to a whole block
# when its gradient grows; a high floor slows down all others. On the tiny byte model (one seed, two
# ranks, a fifth of the steps in stage 1) the validation loss ends above AdamW's by 2.1 % without a
# floor, 1.5 % with 0.3, 5.7 % with 1 after 200 steps; by 0.3 % without, 0.4 % with 0.1, 0.7 % with
# 0.3 after 400.
VARIANCE_FLOOR = 0.1


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the last step did; the same on every rank but for bytes."""

    phase: Literal["adam", "onebit"]
    """Which stage the step was of."""
    is_skipped: bool
    """A gradient was not finite on some rank, and nothing was changed."""
    grad_norm: float | None
    """Stage 1: norm of the averaged gradient. Stage 2: root mean square over ranks of the norms of
    their own gradients, which is above the norm of the average by their noise. None: not asked."""
    bytes_sent: int
    """By this rank in this step (in stage 1: by a bandwidth-optimal all-reduce)."""
    uncompressed_bytes: int
    """What a bandwidth-optimal float32 all-reduce would have sent."""


def mask_without_variance(name: str, v_hat: Tensor) -> Tensor:
    """The default mask: coordinates whose variance is zero (or not finite) get no update.

    A sign cannot say zero, so a coordinate that never had a gradient (an unused embedding row, an
    idle expert) would otherwise receive the scale of its neighbours over ``eps``.
    """
    return (v_hat <= 0) | ~v_hat.isfinite()


class OneBitAdam(torch.optim.Optimizer):
    """AdamW in one bit an element after ``freeze_step`` steps.

    Gradients are averaged by this class (``grads="local"``), or in stage 1 by whoever does so
    already, DDP through ``attach`` or a trainer (``grads="averaged"``); in stage 2 every rank's
    ``param.grad`` must be its own. With several micro-batches a step, accumulate and divide as for
    any optimizer and step once.

    Args:
        params: parameters or groups, named ones preferred: checkpoints go by name. A group may set
            ``lr``, ``betas``, ``eps``, ``weight_decay``, and also ``compress=False`` (averaged in
            full and stepped by AdamW for ever: tied embeddings of a pipeline) and
            ``norm_weight`` (this rank's share of the squared norm: 1 / tp for replicas over tp).
        lr: learning rate. Schedulers may lower it after the switch; a rise is warned of once.
        betas: decay of the two moments.
        eps: added to the root of the variance.
        weight_decay: decoupled, as AdamW's.
        freeze_step: T, steps of stage 1, the same on all ranks; "auto" watches the variance
            (``SwitchRule``) and switches when every rank of ``norm_group`` agrees.
        group: ranks that average gradients (the data-parallel ones of this rank's tensor and
            pipeline place); None is the world, or this process alone.
        norm_group: ranks that step together, whose gradients make one norm and one decision to
            skip: data x tensor x pipeline. None takes ``group``.
        clip_norm: largest norm of a gradient, 0 for no clipping. All ranks use one coefficient;
            the norm is that of ``StepReport.grad_norm``.
        skip_nonfinite: look for NaN and infinities on any rank before anything is changed, and
            skip the step on all. Off saves a pass over the gradients where nothing is clipped.
        mask: ``mask(name, v_hat) -> bool tensor or None``: coordinates without update after the
            switch.
        variance_floor: at the switch no root of a variance stays below this part of its block's
            root mean variance, since its updates are the block's scale over it; 0 is the paper's
            algorithm.
        block_size: elements that share a scale, a positive multiple of 8.
        zero: 1 keeps variance, master weights and server error on the owner of each chunk; updated
            parameters then travel uncompressed.
        grads: who averages in stage 1, see above.
        op: "sum" where the ranks' gradients are terms of a sum (the loss is divided by the global
            count) instead of estimates to be averaged.

    Raises:
        TypeError: a parameter has a dtype that is no float.
        ValueError: an option breaks its rule, or parameters are sharded (ZeRO-2/3).

    State after the switch, bytes a parameter: preconditioner 2, worker error 4, codes 1/8, scales
    4 / 1024, server error 4 / W; with ``zero=1`` also master weights, 4 / W.
    """

    def __init__(  # noqa: PLR0913 (options of an optimizer, by keyword)
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        freeze_step: int | Literal["auto"] = "auto",
        group: dist.ProcessGroup | None = None,
        norm_group: dist.ProcessGroup | None = None,
        clip_norm: float = 0.0,
        skip_nonfinite: bool = True,
        mask: Mask = mask_without_variance,
        variance_floor: float = VARIANCE_FLOOR,
        block_size: int = 1024,
        zero: int = 0,
        grads: Literal["local", "averaged"] = "local",
        op: Literal["avg", "sum"] = "avg",
    ) -> None:
        check_options(freeze_step, clip_norm, variance_floor, zero, grads, op)
        self._is_built = self._is_attached = False
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "compress": True,
            "norm_weight": 1.0,
        }
        super().__init__(params, defaults)
        self.group = _comm.resolve(_comm.group_name(group))
        self.norm_group = self.group if norm_group is None else norm_group
        self.clip_norm, self.skip_nonfinite = clip_norm, skip_nonfinite
        self.grads: Literal["local", "averaged"] = grads
        self.count = 0
        """Steps done, skipped ones not counted."""
        self.num_skipped = 0
        self.switch_step: int | None = None
        """Steps of stage 1, once it is over."""
        self.lr_at_switch: list[float] = []
        """Learning rate of each group at the switch."""
        self.num_masked = 0
        """Masked coordinates in this rank's part of the state."""
        self.last_step: StepReport | None = None
        self.block_size, self.zero = block_size, zero
        self.mask, self._floor = mask, variance_floor
        self._freeze_step: int | Literal["auto"] = freeze_step
        self._is_sum = op == "sum"
        self._build()
        self._warned_lr = False

    def _build(self) -> None:
        """Buckets and the rule of the switch for the parameters at hand."""
        check_shards(self.param_groups)
        options = {"is_sharded": self.zero == 1, "is_sum": self._is_sum}
        self.buckets = build_buckets(self.param_groups, self.group, self.block_size, **options)
        compressing = [bucket for bucket in self.buckets if bucket.compresses]
        self._rule, self._is_built = SwitchRule(self._freeze_step, compressing), True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank, before ``attach`` and the first step.

        Raises:
            ValueError: it comes later: there is one switch, which would find no variance to freeze.
        """
        if self._is_built and (self.count or self.num_skipped):
            raise ValueError(
                "OneBitAdam: add_param_group must come before the first step, got a group after "
                f"{self.count} steps; make a new optimizer of all groups"
            )
        if self._is_attached:
            raise ValueError(
                "OneBitAdam: add_param_group must come before attach, got a group after it"
            )
        super().add_param_group(param_group)
        if self._is_built:
            try:
                self._build()
            except Exception:  # whatever is wrong with the group, the optimizer stays what it was
                self.param_groups.pop()
                raise

    @property
    def is_compressing(self) -> bool:
        """Whether stage 2 has begun: the next step sends signs."""
        return self.switch_step is not None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters from their gradients; collective over ``norm_group``.

        Under ``torch.amp.GradScaler`` gradients are unscaled here, and a step that overflowed on
        any rank is skipped on all.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = getattr(self, "grad_scale", None)  # set by GradScaler
        factor = 1.0 if scale is None else 1.0 / float(scale)
        present = self._average()
        norm, votes_all = self._agree(factor, present)
        if norm is not None and not math.isfinite(norm):
            self._skip(norm)
            return loss
        if self.clip_norm > 0 and norm is not None:
            factor *= min(1.0, self.clip_norm / (norm + _CLIP_EPSILON))
        self._apply(factor, present, norm, votes_all)
        return loss

    # GradScaler then calls ``step`` in any case and leaves the decision to us.
    _step_supports_amp_scaling = True

    def apply(self, factor: float = 1.0, votes_all: bool = True) -> None:
        """Update without a norm, a check or a message of its own: for trainers that did all that.

        Args:
            factor: of the gradients: clipping.
            votes_all: whether ``ready_to_switch`` was true on every rank that steps together.
        """
        with torch.no_grad():
            self._apply(factor, self._average(), None, votes_all)

    def ready_to_switch(self) -> bool:
        """This rank's vote for ending stage 1 with the step to come."""
        return self._rule.wants_switch(self.count, self.param_groups)

    def attach(self, ddp: torch.nn.parallel.DistributedDataParallel) -> None:
        """Make DDP average gradients in stage 1 and leave them alone in stage 2.

        Registers DDP's communication hook; groups with ``compress=False`` are still averaged.

        Raises:
            ValueError: DDP averages over other ranks than ``group``.
        """
        from mcp_kernels.optim._attach import attach  # DDP is imported by its users alone

        attach(self, ddp)
        self._is_attached = True

    # --- one step -------------------------------------------------------------------------------

    def _average(self) -> list[list[bool]]:
        """Averaged gradients of buckets in stage 1; which parameters have one on some rank."""
        is_local = self.grads == "local"
        for bucket in self.buckets:
            check_dense(bucket.flat.names, bucket.flat.params)
        present = [[p.grad is not None for p in b.flat.params] for b in self.buckets]
        if is_local and self.group is not None and not all(b.is_frozen for b in self.buckets):
            flags = torch.tensor(
                list(chain.from_iterable(present)), dtype=torch.float32, device=self._device
            )
            _comm.sum_over_ranks_(flags, self.group)
            shared = (flags > 0).tolist()
            for index, bucket in enumerate(self.buckets):
                size = len(bucket.flat.params)
                if not bucket.is_frozen:
                    present[index] = shared[:size]
                shared = shared[size:]
        for bucket, has_grad in zip(self.buckets, present, strict=True):
            if not bucket.is_frozen:
                bucket.average(has_grad, is_local=is_local)
        return present

    @property
    def _device(self) -> torch.device:
        return self.buckets[0].flat.device

    def _agree(self, factor: float, present: list[list[bool]]) -> tuple[float | None, bool]:
        """The norm and whether all ranks vote for the switch, in one message."""
        is_norm_needed = self.clip_norm > 0 or self.skip_nonfinite
        vote = self._rule.wants_switch(self.count, self.param_groups)
        if not is_norm_needed and not self._rule.asks:
            return None, vote
        square_sum = self._square_sum() if is_norm_needed else torch.zeros(())
        sums = torch.stack([square_sum.double(), torch.tensor(float(vote)).double()])
        ranks = averaging = 1
        if self.norm_group is not None:
            ranks = self.norm_group.size()
            averaging = 1 if self.group is None else self.group.size()
            sums = sums.to(self._device)
            _comm.sum_over_ranks_(sums, self.norm_group)
        total, votes = sums.tolist()
        # Every data-parallel rank added a norm: of the average in stage 1, of its own in stage 2.
        norm = math.sqrt(total / averaging) * factor if total >= 0 else math.nan
        return norm if is_norm_needed else None, votes == ranks

    def _square_sum(self) -> Tensor:
        """This rank's share of the squared norm, float64 ``[]`` on the CPU."""
        total = torch.zeros((), dtype=torch.float64)
        for bucket in self.buckets:
            total += bucket.square_sum(self.param_groups).cpu()
        return total

    def _skip(self, norm: float) -> None:
        self.num_skipped += 1
        for bucket in self.buckets:
            bucket.averaged = []
        self._report(True, norm)

    def _apply(
        self, factor: float, present: list[list[bool]], norm: float | None, votes_all: bool
    ) -> None:
        self._report(False, norm)
        count = self.count + 1
        frozen = [b for b in self.buckets if b.is_frozen]
        for bucket in frozen:
            bucket.start_compressed_step(factor)
        for bucket, has_grad in zip(self.buckets, present, strict=True):
            if not bucket.is_frozen:
                bucket.adam_step(self.param_groups, factor, has_grad)
        for bucket in frozen:
            bucket.advance(self.param_groups, count)
        for bucket in frozen:
            bucket.finish(self.param_groups, count)
        self.count = count
        self._rule.observe(count, self.param_groups)
        if self.is_compressing:
            self._warn_of_rise()
        elif self._rule.is_due(count, votes_all):
            self._switch()

    def _switch(self) -> None:
        self.switch_step = self.count
        self.lr_at_switch = [float(g["lr"]) for g in self.param_groups]
        for bucket in self.buckets:
            if bucket.compresses:
                self.num_masked += bucket.freeze(self.mask, self._floor, self.count)

    def _warn_of_rise(self) -> None:
        now = [float(g["lr"]) for g in self.param_groups]
        if not self._warned_lr and any(
            a > b * (1 + 1e-6) for a, b in zip(now, self.lr_at_switch, strict=True)
        ):
            self._warned_lr = True
            warnings.warn(
                "OneBitAdam: lr must not rise after the switch, since the frozen variance then "
                f"is too small, got {now} above {self.lr_at_switch}; switch after the warm-up",
                RuntimeWarning,
                stacklevel=4,
            )

    def _report(self, is_skipped: bool, norm: float | None) -> None:
        sent = [bucket.bytes_sent() for bucket in self.buckets]
        self.last_step = StepReport(
            phase="onebit" if self.is_compressing else "adam",
            is_skipped=is_skipped,
            grad_norm=norm,
            bytes_sent=0 if is_skipped and self.is_compressing else sum(s for s, _ in sent),
            uncompressed_bytes=sum(plain for _, plain in sent),
        )

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, errors included: every rank must save its own.

        Tensors, numbers, strings, lists and dicts only; ``reshard`` in
        ``mcp_kernels.optim.onebit_state`` turns a set of them into one for another number of ranks.
        """
        return write_state(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from ``state_dict`` of this rank, bit by bit; parameters are loaded elsewhere.

        Raises:
            ValueError: it is of other parameters, of another rank or of another layout.
        """
        read_state(self, state_dict)
