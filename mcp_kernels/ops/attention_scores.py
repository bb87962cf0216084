"""Scores and probabilities of one block of attention, and how a block is cut out of the tensors.

Letters: n = heads in a chunk (batch entries times KV heads), G = query heads a KV head, R = rows,
K = keys of a block, M = G R, D = head dim of q and k, E = head dim of v, X = D or E.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mcp_kernels.ops.attention_blocks import Block, Chunk, Plan
from mcp_kernels.ops.attention_mask import (
    AttentionOptions,
    alibi_distance,
    dropout_keep,
    hide_outside_window_,
)

LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The tensors of one attention call; q ``[B, Sq, H, D]``, k and v ``[B, Sk, N, D or E]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    """Expanded to ``[B, H, Sq, Sk]``; bool (True is attend) or floating."""
    alibi_slopes: Tensor | None
    """Expanded to ``[B, H]``."""
    sink: Tensor | None
    """``[H]``."""
    rng: Tensor | None
    """``[2]`` int64 (seed, offset); None is no dropout."""
    options: AttentionOptions
    first_batch: int = 0
    """Batch index of entry 0 in the dropout mask."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 for float64, else float32."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def unit(self) -> float:
        """Scores are held times ``unit``: in base 2 unless a bias must not be scaled.

        A bias may be as low as its dtype goes, which times log2(e) would be -inf.
        """
        return LOG2E if self.bias is None or self.bias.dtype == torch.bool else 1.0

    def plan(self, dout: Tensor | None = None) -> Plan:
        """How the call is cut; ``dout`` where backward is meant."""
        batch, num_rows, num_heads, _ = self.q.shape
        hides = self.options.is_windowed or self.bias is not None
        given = [self.q, self.k, self.v, *([] if dout is None else [dout])]
        return Plan(
            batch,
            num_rows,
            self.k.shape[1],
            num_heads,
            self.k.shape[2],
            self.options,
            is_isolated=hides and not _are_finite(given, self.compute_dtype),
        )


def scratch_for(inputs: AttentionInputs, plan: Plan, chunk: Chunk) -> Tensor:
    """Memory for the scores of any block of ``chunk``."""
    heads = _length(chunk.batch, plan.batch) * _length(chunk.heads, plan.num_heads)
    return inputs.q.new_empty(
        heads * plan.rows_per_block() * plan.num_keys, dtype=inputs.compute_dtype
    )


def scores(
    inputs: AttentionInputs,
    plan: Plan,
    chunk: Chunk,
    block: Block,
    q_nMD: Tensor,
    k_nKD: Tensor,
    scratch: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """(scores ``[n, G, R, K]`` times ``unit``, their tanh where there is a softcap)."""
    s = product(q_nMD, k_nKD[:, block.key_index], len(block.rows), scratch)
    tanh = None
    if inputs.options.softcap > 0:
        cap = inputs.options.softcap * inputs.unit
        tanh = s.div(cap).tanh_()
        torch.mul(tanh, cap, out=s)
    by_head = _by_head(s, chunk)
    if inputs.bias is not None:
        _add_bias_(by_head, inputs.bias[chunk.batch, chunk.heads][:, :, block.row_slice], block)
    if inputs.alibi_slopes is not None:
        rows, keys = block.row_positions(s.device), block.key_positions(s.device)
        distance = alibi_distance(rows, keys, plan.offset).to(s.dtype)
        slopes = inputs.alibi_slopes[chunk.batch, chunk.heads].to(s.dtype) * inputs.unit
        by_head.sub_(slopes[:, :, None, None] * distance)
    return hide_(inputs, plan, block, s, -math.inf), tanh


def product(a_nMX: Tensor, b_nKX: Tensor, num_rows: int, scratch: Tensor) -> Tensor:
    """``a b^T`` in ``scratch``, ``[n, G, R, K]``."""
    heads, group_rows, num_keys = a_nMX.shape[0], a_nMX.shape[1], b_nKX.shape[1]
    s_nMK = scratch[: heads * group_rows * num_keys].view(heads, group_rows, num_keys)
    torch.bmm(a_nMX, b_nKX.transpose(1, 2), out=s_nMK)
    return s_nMK.view(heads, group_rows // num_rows, num_rows, num_keys)


def hide_(inputs: AttentionInputs, plan: Plan, block: Block, s: Tensor, fill: float) -> Tensor:
    """Set what the window hides from a block to ``fill``; a tensor of keys holds nothing hidden."""
    if isinstance(block.keys, range) and inputs.options.is_windowed and s.numel():
        hide_outside_window_(s, inputs.options, block.rows, block.keys, plan.offset, fill)
    return s


def exponentials_(inputs: AttentionInputs, chunk: Chunk, s: Tensor) -> tuple[Tensor, Tensor]:
    """Turn scores into exponentials over the row's maximum; (maximum, sum) ``[n, G, R, 1]``.

    The maximum is times ``unit`` and never below the lowest finite value: on a row that sees no
    key all exponentials are then 0, not NaN.
    """
    no_keys = s.shape[-1] == 0
    row_max = s.new_full((*s.shape[:-1], 1), -math.inf) if no_keys else s.amax(-1, keepdim=True)
    sink = None
    if inputs.sink is not None:
        sink = inputs.sink[chunk.heads].to(s.dtype).mul(inputs.unit).view(-1, s.shape[1], 1, 1)
        sink = sink.repeat(s.shape[0] // sink.shape[0], 1, 1, 1)
        row_max = torch.maximum(row_max, sink)
    row_max.clamp_(min=torch.finfo(s.dtype).min)
    to_base2 = LOG2E / inputs.unit
    _exp2_(s.sub_(row_max), to_base2)
    row_sum = s.sum(-1, keepdim=True)
    if sink is not None:
        row_sum += _exp2_(sink - row_max, to_base2)
    return row_max, row_sum


def probabilities_(inputs: AttentionInputs, s: Tensor, lse: Tensor) -> Tensor:
    """Turn scores into probabilities, from ``lse`` times ``unit``, ``[n, G, R, 1]``."""
    return _exp2_(s.sub_(lse), LOG2E / inputs.unit)


def drop_factors(inputs: AttentionInputs, chunk: Chunk, block: Block, s: Tensor) -> Tensor:
    """0 where dropout drops and 1 / (1 - p) where it keeps, shaped like ``s``."""
    assert inputs.rng is not None
    p, device = inputs.options.dropout_p, s.device
    batch = torch.arange(chunk.batch.start, chunk.batch.stop, device=device) + inputs.first_batch
    heads = torch.arange(chunk.heads.start, chunk.heads.stop, device=device)
    rows, keys = block.row_positions(device), block.key_positions(device)
    keep = dropout_keep(inputs.rng, p, batch, heads, rows, keys)
    return keep.to(s.dtype).mul_(1 / (1 - p) if p < 1 else 0.0).view(s.shape)


def take_rows(x: Tensor, inputs: AttentionInputs, chunk: Chunk, block: Block) -> Tensor:
    """Rows of a block out of ``[B, Sq, H, X]``, as ``[n, M, X]`` in the compute dtype."""
    taken = x[chunk.batch, block.row_slice, chunk.heads].transpose(1, 2).to(inputs.compute_dtype)
    num_kv_heads = chunk.kv_heads.stop - chunk.kv_heads.start
    heads, rows, width = taken.shape[0] * num_kv_heads, taken.shape[1] // num_kv_heads, x.shape[3]
    return taken.reshape(heads, rows * taken.shape[2], width)


def store_rows(values_nMX: Tensor, x: Tensor, chunk: Chunk, block: Block) -> None:
    """The way back of ``take_rows``."""
    to = x[chunk.batch, block.row_slice, chunk.heads]
    batch, rows, heads, width = to.shape
    to.copy_(values_nMX.view(batch, heads, rows, width).transpose(1, 2))


def take_row_values(x: Tensor, chunk: Chunk, block: Block, like: Tensor) -> Tensor:
    """One value a row out of ``[B, H, Sq]``, as ``[n, G, R, 1]`` for ``like``."""
    return x[chunk.batch, chunk.heads, block.row_slice].reshape(*like.shape[:-1], 1)


def store_row_values(values: Tensor, x: Tensor, chunk: Chunk, block: Block) -> None:
    """The way back of ``take_row_values``."""
    to = x[chunk.batch, chunk.heads, block.row_slice]
    to.copy_(values.view(to.shape))


def take_keys(x: Tensor, inputs: AttentionInputs, chunk: Chunk) -> Tensor:
    """KV heads of a chunk out of ``[B, Sk, N, X]``, as ``[n, Sk, X]`` in the compute dtype."""
    taken = x[chunk.batch, :, chunk.kv_heads].transpose(1, 2).to(inputs.compute_dtype)
    return taken.reshape(taken.shape[0] * taken.shape[1], *taken.shape[2:])


def add_keys(values_nKX: Tensor, x: Tensor, chunk: Chunk) -> None:
    """Add ``[n, Sk, X]`` to the KV heads of a chunk in ``[B, Sk, N, X]``."""
    to = x[chunk.batch, :, chunk.kv_heads]
    batch, num_keys, heads, width = to.shape
    to.add_(values_nKX.view(batch, heads, num_keys, width).transpose(1, 2))


def add_bias_gradient(dbias: Tensor, ds: Tensor, chunk: Chunk, block: Block) -> None:
    """Add a block's ``ds`` to ``dbias``, summed over the dimensions it was broadcast in."""
    grad = _by_head(ds, chunk)
    summed = [dim for dim in range(4) if dbias.shape[dim] == 1]
    if summed:
        grad = grad.sum(summed, keepdim=True)
    index = (chunk.batch, chunk.heads, block.row_slice, block.key_index)
    dbias[tuple(slice(None) if d in summed else index[d] for d in range(4))] += grad


def _by_head(s: Tensor, chunk: Chunk) -> Tensor:
    """``[n, G, R, K]`` as ``[B, H, R, K]`` of the chunk."""
    heads = chunk.heads.stop - chunk.heads.start
    return s.view(s.shape[0] * s.shape[1] // heads, heads, *s.shape[2:])


def _add_bias_(s: Tensor, bias: Tensor, block: Block) -> None:
    bias = bias[..., block.key_index]
    if bias.dtype == torch.bool:
        s.masked_fill_(~bias, -math.inf)
    else:
        s.add_(bias)


def _exp2_(x: Tensor, factor: float) -> Tensor:
    return (x if factor == 1 else x.mul_(factor)).exp2_()


def _length(part: slice, size: int) -> int:
    return min(part.stop, size) - part.start


def _are_finite(tensors: list[Tensor], dtype: torch.dtype) -> bool:
    """Whether the sums are finite: no NaN or infinity is missed, and finite sums cost one read."""
    sums = [t.sum(dtype=dtype) for t in tensors]
    return bool(torch.stack(sums).isfinite().all())
