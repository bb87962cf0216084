"""One flat bucket of OneBitAdam: the switch, and the steps after it.

``freeze`` turns the second moment into the preconditioner of stage 2 and the first moment into that
of preconditioned gradients; from then on the momentum is codes.

Letters: P, S as in ``_flat_params``; B = blocks; t = steps done, this one included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mcp_kernels.ops import _comm
from mcp_kernels.ops._blocks import pack_bits
from mcp_kernels.ops._code_exchange import Chunks, CodeExchange, uncompressed_bytes
from mcp_kernels.ops._codecs import ONEBIT
from mcp_kernels.ops.onebit_adam_update import onebit_adam_update
from mcp_kernels.ops.onebit_compress_momentum import onebit_compress_momentum
from mcp_kernels.optim._adam_stage import AdamStage


class Mask(Protocol):
    """Says which coordinates have no usable variance."""

    def __call__(self, name: str, v_hat: Tensor, /) -> Tensor | None:
        """Bool like ``v_hat`` (1-D, part of parameter ``name``), True where masked, or None."""
        ...


class AdamBucket(AdamStage):
    """Parameters of one device, dtype, betas and eps on this rank, in both stages."""

    # --- the switch -----------------------------------------------------------------------------

    def freeze(self, mask: Mask, floor: float, count: int) -> int:
        """Leave stage 1 after ``count`` steps; collective where the state is sharded.

        The bias corrections are folded in once: ``1 / (sqrt(v / (1 - beta2^t)) + eps)``.

        Args:
            mask: coordinates that get no update.
            floor: smallest root of a variance, as a part of the root mean variance of its block.
            count: t.

        Returns:
            Masked coordinates in this rank's span.
        """
        flat, masked = self.flat, 0
        assert self.exp_avg is not None
        assert self.exp_avg_sq is not None
        if self.exp_avg.dtype != torch.float32:
            raise TypeError(
                f"OneBitAdam: parameters must be float32, bfloat16 or float16 after the switch, "
                f"got {self.flat.dtype}; keep freeze_step above the number of steps"
            )
        hidden: list[tuple[Tensor, Tensor]] = []
        views = zip(flat.span_views(self.exp_avg), flat.span_views(self.exp_avg_sq), strict=True)
        for segment, (m, v) in zip(flat.segments, views, strict=True):
            steps = self.steps[segment.index].item()
            if 0 < steps < count:  # as if its momentum had the bias of t steps, like all others
                m.mul_((1 - self.betas[0] ** count) / (1 - self.betas[0] ** steps))
            v.div_(1 - self.betas[1] ** max(steps, 1))
            where = mask(flat.names[segment.index], v)
            if where is not None:
                hidden.append((v, where))
        if floor > 0:
            self._raise_to_floor(self.exp_avg_sq, floor)
        factors = self.exp_avg_sq.sqrt_().add_(self.eps).reciprocal_()
        for v, where in hidden:
            v.masked_fill_(where, 0.0)
            masked += int(where.sum())
        factors = self.new_buffer(factors.numel(), torch.bfloat16).copy_(factors)
        self.exp_avg_sq = None
        if flat.is_sharded:  # every rank codes all of its gradient
            assert self.group is not None
            factors = _comm.gather(factors, self.group, 0)
            self.exp_avg = _comm.gather(self.exp_avg, self.group, 0)
        self.exp_avg *= factors
        self.precondition_by(factors)
        # The buffer of averaged gradients is not needed any more and has the right size.
        reused = None if self._grads is None else self._grads
        self._grads = None
        if reused is None or reused.numel() != self.layout.padded_numel:
            reused = self.new_buffer(self.layout.padded_numel)
        self.make_codes(reused.zero_())
        return masked

    def _raise_to_floor(self, v_S: Tensor, floor: float) -> None:
        """No variance below ``floor`` squared times the mean of its block."""
        start, stop = (edge // self.layout.block_size for edge in self.flat.span)
        counts = self.layout.counts(self.flat.device)[start:stop].clamp(min=1)
        blocks = v_S.view(-1, self.layout.block_size)
        lowest = blocks.sum(1).div_(counts).mul_(floor * floor)
        torch.maximum(blocks, lowest[:, None], out=blocks)

    def precondition_by(self, factors_P: Tensor) -> None:
        """Gradients are multiplied by these from now on; 0 masks a coordinate."""
        self.preconditioner = factors_P
        start, stop = self.flat.span
        moves = factors_P[start:stop] != 0
        # A sign cannot say zero, so what is masked must be known where codes are applied.
        self.moves = None if moves.all() else pack_bits(moves)

    def make_codes(self, worker_error: Tensor) -> None:
        """Zero codes and errors."""
        device, layout = self.flat.device, self.layout
        self.worker_error = worker_error
        server = layout.chunk_numel if self.group is not None else 0
        self.server_error = self.new_buffer(server)
        self.bits = torch.zeros(layout.padded_numel // 8, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(layout.num_blocks, device=device)
        if self.group is not None:
            chunk, rank = layout.chunk_blocks, self.group.rank()
            self._counts = layout.counts(device)[rank * chunk : (rank + 1) * chunk].clone()

    # --- stage 2 --------------------------------------------------------------------------------

    def start_compressed_step(self, factor: float) -> None:
        """Momentum and codes of this rank's gradients; starts the all-to-all.

        Args:
            factor: of the gradients: clipping and loss scale.
        """
        factor *= self.own_scale
        assert self.bits is not None
        assert self.scales is not None
        assert self.worker_error is not None
        assert self.server_error is not None
        block, factors = self.layout.block_size, self.preconditioner
        grads, beta1 = [self._grad(i) for i in range(len(self.flat.params))], self.betas[0]
        if self.exp_avg is not None:  # the first compressed step: the momentum is float32 still
            grads, factors = self._first_momentum(grads, factor), None
            beta1, factor = 0.0, 1.0
        bits, scales = onebit_compress_momentum(
            grads,
            *(self.bits, self.scales, self.worker_error),
            beta1=beta1,
            grad_scale=factor,
            block_size=block,
            preconditioner=factors,
        )
        world = 1 if self.group is None else self.group.size()
        chunks = Chunks(self.layout.padded_numel, world, block, ONEBIT)
        if self.group is None:
            self.bits, self.scales, self.exp_avg = bits, scales, None
            self._exchange = None
            return
        rows = torch.empty(world, chunks.row_bytes, dtype=torch.uint8, device=self.flat.device)
        chunks.write_all(rows, bits, scales)
        self._exchange = CodeExchange(
            chunks, rows, self.server_error, self.group, counts=self._counts
        )

    def _first_momentum(self, grads: Sequence[Tensor], factor: float) -> list[Tensor]:
        """``beta1 * m + (1 - beta1) * g`` from the float32 momentum, in its place."""
        assert self.exp_avg is not None
        assert self.preconditioner is not None
        self.exp_avg.mul_(self.betas[0])
        views = self.flat.views(self.exp_avg)
        factors = self.flat.views(self.preconditioner)
        for view, grad, factors_here in zip(views, grads, factors, strict=True):
            view.addcmul_(
                grad.to(torch.float32) * factor, factors_here.float(), value=1 - self.betas[0]
            )
        return views

    def advance(self, options: Sequence[Mapping[str, Any]], count: int) -> None:
        """Reduce this rank's chunk and start the all-gather; the owner of state updates here."""
        if self._exchange is None:
            return
        if not self.flat.is_sharded:
            self._exchange.advance()
            return
        bits, scales = self._exchange.reduce()
        self._update(bits, scales, options, count)
        assert self.master is not None
        values = self.master.to(self.flat.dtype)
        self._exchange.gather(bits, scales, values.view(torch.uint8))

    def finish(self, options: Sequence[Mapping[str, Any]], count: int) -> None:
        """Wait for the averaged momentum; update, or take over what the owners updated."""
        if self._exchange is not None:
            chunks = self._exchange.chunks
            rows = self._exchange.wait()
            bits, scales = chunks.read(rows, chunks.step)
            self.bits, self.scales, self.exp_avg = bits.view(-1), scales.view(-1), None
            self._exchange = None
            if self.flat.is_sharded:
                values = rows[:, chunks.row_bytes :].contiguous().view(-1).view(self.flat.dtype)
                self.flat.load_params(values)
                return
        assert self.bits is not None
        assert self.scales is not None
        self._update(self.bits, self.scales, options, count)

    def _update(
        self, bits: Tensor, scales: Tensor, options: Sequence[Mapping[str, Any]], count: int
    ) -> None:
        """Update this rank's span by the codes of its span."""
        flat, block = self.flat, self.layout.block_size
        master_views = None
        if flat.is_sharded:
            assert self.master is not None
            master_views = dict(zip(flat.segments, flat.span_views(self.master), strict=True))
        for group, segments, start, stop in flat.group_runs:
            lr = float(options[group]["lr"])
            master = None
            if master_views is not None:
                targets = [master_views[s] for s in segments]
            else:
                targets = [flat.params[s.index] for s in segments]
                master = None if self.master is None else self.master[start:stop]
            decay = float(options[group]["weight_decay"])
            onebit_adam_update(
                targets,
                None,
                bits[start // 8 : stop // 8],
                scales[start // block : stop // block],
                lr=lr,
                step_size=lr / (1 - self.betas[0] ** count),
                weight_decays=[decay if self.steps[s.index] > 0 else 0.0 for s in segments],
                block_size=block,
                master=master,
                moves=None if self.moves is None else self.moves[start // 8 : stop // 8],
            )

    # --- bytes ----------------------------------------------------------------------------------

    def bytes_sent(self) -> tuple[int, int]:
        """(bytes that this rank sends in a step as it is now, in float32 without compression)."""
        world = 1 if self.group is None else self.group.size()
        plain = uncompressed_bytes(self.layout.numel, world)
        if not self.is_frozen:
            return plain * self.flat.state_dtype.itemsize // 4, plain
        row = Chunks(self.layout.padded_numel, world, self.layout.block_size, ONEBIT).row_bytes
        shared = self.layout.chunk_numel * self.flat.dtype.itemsize if self.flat.is_sharded else 0
        return (world - 1) * (2 * row + shared), plain
