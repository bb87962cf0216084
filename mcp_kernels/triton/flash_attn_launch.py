"""One attention call as the Triton kernels take it: addresses, scalars, what is switched on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from mcp_kernels.ops.attention_mask import AttentionOptions
from mcp_kernels.triton.flash_attn_config import Chip, chip_of

# Windows reach no further than this: positions stay far from the end of int32.
_FAR = 1 << 29


@dataclass(frozen=True, slots=True)
class Sequences:
    """Where the sequences of a varlen call lie, on their device; nothing waits for it.

    Two sequences more than the caller gave: the rows past the last end (which see no key) and the
    keys past the last end (which no row sees), so that slack is written like everything else.
    """

    cu_seqlens_q: Tensor
    """int64."""
    cu_seqlens_k: Tensor
    count: int
    """Sequences of the caller."""

    @staticmethod
    def of(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, total_k: int) -> Sequences:
        """From the op's arguments and the rows of q and k."""
        q, k = cu_seqlens_q.long(), cu_seqlens_k.long()
        return Sequences(
            torch.cat([q, q.new_full((2,), total_q)]),
            torch.cat([k, k[-1:], k.new_full((1,), total_k)]),
            cu_seqlens_q.numel() - 1,
        )

    def tiles(self, cu_seqlens: Tensor, total: int, size: int) -> Tensor:
        """``[2, tiles]`` int32: whose each tile is (-1: nobody's), and which of that sequence."""
        per_sequence = (cu_seqlens.diff() + (size - 1)) // size
        ends = per_sequence.cumsum(0)
        at_most = -(-total // size) + self.count + 1
        index = torch.arange(at_most, device=cu_seqlens.device)
        owner = torch.searchsorted(ends, index, right=True)
        is_used = owner < self.count + 2
        owner = torch.where(is_used, owner, 0)
        place = index - (ends - per_sequence)[owner]
        return torch.stack([torch.where(is_used, owner, -1), place]).int()


@dataclass(frozen=True, slots=True)
class Problem:
    """The tensors and options of one call; q is ``[B, Sq, H, D]``, or ``[T, H, D]`` with varlen."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    """``[1 or B, 1 or H, 1 or Sq, 1 or Sk]``."""
    slopes: Tensor | None
    """``[1 or B, H]``."""
    sink: Tensor | None
    rng: Tensor | None
    options: AttentionOptions
    sequences: Sequences | None = None
    target: Chip | None = None
    """The GPU to choose tiles for, where it is not the one that q lies on."""

    @property
    def chip(self) -> Chip:
        """The GPU it runs on."""
        return self.target or chip_of(self.q.device)

    @property
    def width(self) -> int:
        """The larger head dim, padded."""
        return max(pad(self.q.shape[-1]), pad(self.v.shape[-1]))

    @property
    def is_plain(self) -> bool:
        """Whether nothing of the size of the scores is read or drawn."""
        return self.bias is None and self.rng is None

    @property
    def rows(self) -> int:
        """Query rows of one sequence; of all with varlen."""
        return self.q.shape[-3]

    @property
    def keys(self) -> int:
        """Keys of one sequence; of all with varlen."""
        return self.k.shape[-3]

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.q.shape[-2]

    @property
    def kv_heads(self) -> int:
        """KV heads."""
        return self.k.shape[-2]

    @property
    def batch(self) -> int:
        """Batch entries; 1 with varlen."""
        return 1 if self.sequences is not None else self.q.shape[0]

    @property
    def bias_kind(self) -> int:
        """As in ``flash_attn_scores``."""
        if self.bias is None:
            return 0
        return 1 if self.bias.dtype == torch.bool else 2

    @property
    def scales(self) -> tuple[float, float]:
        """(factor of the product, factor of the tanh) in the scores' base."""
        unit = 1.0 if self.bias_kind == 2 else math.log2(math.e)
        scale, cap = self.options.softmax_scale, self.options.softcap
        return (scale / cap, cap * unit) if cap > 0 else (scale * unit, 1.0)

    def args(self) -> dict[str, Any]:
        """What every kernel of the family takes."""
        bias = self.bias
        if bias is not None:
            bias = bias.expand(self.batch, self.heads, self.rows, self.keys)
            bias = bias.view(torch.uint8) if bias.dtype == torch.bool else bias
        slopes = self.slopes
        cu_q, cu_k, count = None, None, self.batch
        if self.sequences is not None:
            cu_q, cu_k = self.sequences.cu_seqlens_q, self.sequences.cu_seqlens_k
            count = self.sequences.count
        left, right = self.options.window_left, self.options.window_right
        return {
            "q_ptr": self.q,
            "k_ptr": self.k,
            "v_ptr": self.v,
            "bias_ptr": bias,
            "slopes_ptr": slopes,
            "rng_ptr": self.rng,
            "cu_q_ptr": cu_q,
            "cu_k_ptr": cu_k,
            "q_strides": strides(self.q),
            "k_strides": strides(self.k),
            "v_strides": strides(self.v),
            "bias_strides": (0, 0, 0, 0) if bias is None else bias.stride(),
            "slope_strides": (0, 0) if slopes is None else _batch_strides(slopes),
            "count": count,
            "heads": self.heads,
            "group": self.heads // max(1, self.kv_heads),
            "num_rows": self.rows,
            "num_keys": self.keys,
            "window": (min(left, _FAR), min(right, _FAR)),
            "scales": self.scales,
            "keep_from": round(self.options.dropout_p * 2**32) - 2**31,
        }

    def constants(self) -> dict[str, Any]:
        """The ``tl.constexpr`` arguments that every kernel of the family takes."""
        return {
            "D": self.q.shape[-1],
            "E": self.v.shape[-1],
            "BLOCK_D": pad(self.q.shape[-1]),
            "BLOCK_E": pad(self.v.shape[-1]),
            "TOP_LEFT": self.options.top_left,
            "LEFT": self.options.window_left >= 0,
            "RIGHT": self.options.window_right >= 0,
            "BIAS": self.bias_kind,
            "SOFTCAP": self.options.softcap > 0,
            "ALIBI": self.slopes is not None,
            "DROPOUT": self.rng is not None,
            "VARLEN": self.sequences is not None,
            "PRECISION": precision(self.q),
        }

    def keep_factor(self) -> float:
        """What a kept probability is multiplied by: 1 / (1 - p), 0 where all are dropped."""
        p = self.options.dropout_p
        if self.rng is None:
            return 1.0
        return 1 / (1 - p) if p < 1 else 0.0


def pad(width: int) -> int:
    """``width`` as a power of two, at least 16: what ``tl.arange`` and ``tl.dot`` take."""
    return max(16, 1 << max(0, width - 1).bit_length())


def unit_stride(x: Tensor) -> Tensor:
    """``x``, copied where its last dimension is not contiguous."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def strides(x: Tensor) -> tuple[int, int, int]:
    """(batch, row, head) strides of ``[B, S, H, D]`` or ``[T, H, D]``."""
    return (x.stride(0) if x.dim() == 4 else 0, x.stride(-3), x.stride(-2))


def row_value_strides(x: Tensor) -> tuple[int, int]:
    """(batch, head) strides of one value a row, ``[B, H, Sq]`` or ``[H, T]`` contiguous."""
    return (x.stride(0) if x.dim() == 3 else 0, x.stride(-2))


def precision(q: Tensor) -> str:
    """How products are taken: float32 exactly, unless torch's own matmuls may take TF32."""
    if q.dtype == torch.bfloat16 and knobs.runtime.interpret:
        return "widened"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _batch_strides(slopes: Tensor) -> tuple[int, int]:
    return (slopes.stride(0) if slopes.shape[0] > 1 else 0, slopes.stride(1))
