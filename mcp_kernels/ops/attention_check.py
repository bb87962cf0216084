"""What attention takes: each rule once, at the border, with words that say the way out.

Letters: B = batch, Sq / Sk = query rows / keys, H = query heads, N = KV heads, D = head dim of q
and k, E = head dim of v.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from mcp_kernels._transforms import shared
from mcp_kernels.ops.attention_mask import AttentionOptions

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INT64 = 2**63 - 1
JOIN_SAMPLES = "lay the samples end to end as more sequences of one call, or call in a loop"
CausalAlign = Literal["bottom_right", "top_left"]


def check_qkv(
    op: str, q: Tensor, k: Tensor, v: Tensor, rank: int = 4, *, same_batch: bool = True
) -> None:
    """Hold q, k and v against each other; ``rank`` is 4 for [B, S, H, D], 3 for [total, H, D].

    A cache (``same_batch`` False) may have another first dimension than q.

    Raises:
        ValueError: a rank, a size or a device does not fit.
        TypeError: a dtype is not floating or differs.
    """
    tensors = {"q": q, "k": k, "v": v}
    try:
        if _agree(q, k, v, rank, same_batch):
            return
    except AttributeError:  # asked for only here, where something is wrong
        kinds = ", ".join(f"{n} {type(t).__name__}" for n, t in tensors.items())
        raise TypeError(f"{op}: q, k and v must be tensors, got {kinds}") from None
    form = "[B, S, H, D]" if rank == 4 else "[total, H, D]"
    for name, tensor in tensors.items():
        if tensor.dim() != rank:
            raise ValueError(f"{op}: {name} must be {form}, got {list(tensor.shape)}")
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"{op}: {name} must be float64, float32, bfloat16 or float16, got {tensor.dtype}"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            error = TypeError if tensor.dtype != q.dtype else ValueError
            raise error(
                f"{op}: q, k and v must have one dtype and device, got "
                + ", ".join(f"{n} {t.dtype} on {t.device}" for n, t in tensors.items())
                + "; cast or move them first"
            )
    if rank == 4 and same_batch and not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(
            f"{op}: q, k and v must have one batch size, got "
            f"{q.shape[0]}, {k.shape[0]}, {v.shape[0]}"
        )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"{op}: k and v must agree in all but the head dim, got "
            f"{list(k.shape)} and {list(v.shape)}"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"{op}: q and k must have one head dim, got {q.shape[-1]} and {k.shape[-1]}"
        )
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"{op}: query heads must be a multiple of KV heads, got {heads} query heads "
            f"and {kv_heads} KV heads"
        )


def _agree(q: Tensor, k: Tensor, v: Tensor, rank: int, same_batch: bool) -> bool:
    """Whether ``check_qkv`` has nothing to say: each property is asked for once."""
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    dtype, device = q.dtype, q.device
    if not len(q_shape) == len(k_shape) == len(v_shape) == rank:
        return False
    if dtype not in DTYPES or k.dtype != dtype or v.dtype != dtype:
        return False
    if k.device != device or v.device != device:
        return False
    # Item by item: a slice of a shape is an object that costs more than the rest.
    if k_shape[0] != v_shape[0] or k_shape[1] != v_shape[1] or k_shape[-2] != v_shape[-2]:
        return False
    if q_shape[-1] != k_shape[-1]:
        return False
    if rank == 4 and same_batch and q_shape[0] != k_shape[0]:
        return False
    kv_heads = k_shape[-2]
    return bool(kv_heads) and q_shape[-2] % kv_heads == 0


def make_options(
    op: str,
    head_dim: int,
    *,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    causal_align: CausalAlign = "bottom_right",
) -> AttentionOptions:
    """The scalars of an attention call, checked; causal becomes a window of 0 to the right.

    Raises:
        ValueError: a value is out of its range.
    """
    left, right = _window(op, window_size)
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"{op}: dropout_p must be in [0, 1], got {dropout_p}")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"{op}: softcap must be >= 0 (0 is off) and finite, got {softcap}")
    if causal_align not in ("bottom_right", "top_left"):
        raise ValueError(
            f"{op}: causal_align must be 'bottom_right' or 'top_left', got {causal_align!r}"
        )
    # torch.compile makes a symbol of a float that it meets, and starts anew when an op wants its
    # value: what has a default never becomes one, and the head dim is a number, not a symbol.
    if softmax_scale is None:
        size = len(range(head_dim))
        softmax_scale = 1 / math.sqrt(size) if size else 1.0
    return AttentionOptions(
        float(softmax_scale),
        left,
        0 if causal else right,
        causal_align == "top_left",
        0.0 if softcap == 0 else float(softcap),
        0.0 if dropout_p == 0 else float(dropout_p),
    )


def _window(op: str, window_size: tuple[int, int]) -> tuple[int, int]:
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(
            f"{op}: window_size must be (left, right), got {window_size!r}; (-1, -1) is no window"
        ) from None
    if left < -1 or right < -1:
        raise ValueError(
            f"{op}: window_size must be >= 0, or -1 for no limit, got {tuple(window_size)}"
        )
    # Not by their type: sizes under torch.compile are integers of its own.
    if not (left == int(left) <= _INT64 and right == int(right) <= _INT64):
        raise ValueError(
            f"{op}: window_size must be integers below 2^63, got {tuple(window_size)}; "
            "-1 is no limit"
        )
    return int(left), int(right)


def check_bias(op: str, bias: Tensor | None, full: tuple[int, int, int, int]) -> Tensor | None:
    """``bias`` with four dimensions, each 1 or that of ``full`` ``[B, H, Sq, Sk]``.

    Raises:
        ValueError: it does not broadcast.
        TypeError: it is neither bool nor floating.
    """
    if bias is None:
        return None
    if bias.dtype != torch.bool and bias.dtype not in DTYPES:
        raise TypeError(f"{op}: bias must be bool (True is attend) or floating, got {bias.dtype}")
    if bias.dim() > 4 or any(
        have not in (1, want)
        for have, want in zip(reversed(bias.shape), reversed(full), strict=False)
    ):
        raise ValueError(
            f"{op}: bias must broadcast to [B, H, Sq, Sk] = {list(full)}, got {list(bias.shape)}"
        )
    return bias.view(*[1] * (4 - bias.dim()), *bias.shape) if bias.dim() < 4 else bias


def check_alibi(op: str, slopes: Tensor | None, batch: int, heads: int) -> Tensor | None:
    """``alibi_slopes`` as ``[1 or B, H]`` without a gradient.

    Raises:
        ValueError: wrong shape, or a gradient is asked for.
    """
    if slopes is None:
        return None
    # Size by size: torch.compile does not find a shape with symbols in a tuple of shapes.
    is_per_batch = slopes.dim() == 2 and slopes.shape[0] == batch
    if (slopes.dim() != 1 and not is_per_batch) or slopes.shape[-1] != heads:
        raise ValueError(
            f"{op}: alibi_slopes must be [{heads}] or [{batch}, {heads}], got {list(slopes.shape)}"
        )
    if slopes.requires_grad:
        raise ValueError(
            f"{op}: alibi_slopes must not require grad, they have no gradient; "
            "pass slopes.detach(), or a bias"
        )
    return slopes[None] if slopes.dim() == 1 else slopes


def check_sink(op: str, sink: Tensor | None, heads: int) -> Tensor | None:
    """``sink`` as ``[H]``.

    Raises:
        ValueError: wrong shape.
        TypeError: not floating.
    """
    if sink is None:
        return None
    if sink.shape != (heads,):
        raise ValueError(f"{op}: sink must be [{heads}], one a query head, got {list(sink.shape)}")
    if sink.dtype not in DTYPES:
        raise TypeError(f"{op}: sink must be floating, got {sink.dtype}")
    return sink


def make_rng(op: str, dropout_p: float, device: torch.device) -> Tensor | None:
    """``[2]`` int64 (seed, offset) from the device's default generator; None without dropout.

    Raises:
        ValueError: inside of a ``torch.vmap`` that does not say how its samples differ.
    """
    if dropout_p == 0:
        return None
    try:
        rng = torch.randint(2**62, (2,), dtype=torch.int64, device=device)
    except RuntimeError as error:
        if "randomness" not in str(error):
            raise
        raise ValueError(
            f"{op}: dropout_p must be 0 under torch.vmap with randomness='error', got {dropout_p}; "
            "say randomness='different' (a mask for each sample) or 'same'"
        ) from None
    rng[1] = 0
    return rng


def check_cu_seqlens(op: str, name: str, cu_seqlens: Tensor, total: int) -> None:
    """Hold the ends of sequences against each other and against ``total`` rows.

    Values are looked at on the CPU only: reading them from a GPU would wait for it.

    Raises:
        ValueError: one for each sample of ``torch.vmap``, not one-dimensional, not starting at 0,
            falling, or past ``total``.
        TypeError: not int32 or int64.
    """
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: {name} must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"{op}: {name} must be [B + 1], got {list(cu_seqlens.shape)}")
    if torch.compiler.is_compiling():
        return
    cu_seqlens = shared(op, name, cu_seqlens, JOIN_SAMPLES)
    if cu_seqlens.device.type != "cpu":
        return
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"{op}: {name} must start at 0 and never fall, got {ends}")
    if ends[-1] > total:
        raise ValueError(f"{op}: {name} must end within the {total} rows given, got {ends[-1]}")
