"""``FlashAttention``: attention as a module, between a model's projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mcp_kernels.ops.attention_check import CausalAlign
from mcp_kernels.ops.attention_functions import flash_attn_func
from mcp_kernels.ops.attention_varlen_functions import flash_attn_varlen_func


class _Fixed:
    """A float attribute that torch.compile takes for the constant it is.

    Of a float it makes a symbol where all is dynamic, and begins anew when an op wants the value;
    text it compares, so a graph is never used with another value.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._kept = f"_{name}_hex"

    def __get__(self, module: nn.Module, owner: type | None = None) -> Any:
        text = module.__dict__[self._kept]
        return None if text is None else float.fromhex(text)

    def __set__(self, module: nn.Module, value: float | None) -> None:
        module.__dict__[self._kept] = None if value is None else float(value).hex()


class FlashAttention(nn.Module):
    """Attention of q over k and v, padded or packed; its only parameter is an optional sink.

    Args:
        num_heads: query heads; needed for ``has_sink`` only.
        causal: row i sees key j only where ``j <= i + offset``.
        softmax_scale: factor of ``q k^T``; None is ``1 / sqrt(D)``.
        window_size: (left, right) keys around the diagonal that a row sees; -1 is no limit.
        softcap: c > 0 turns a scaled score s into ``c tanh(s / c)``.
        dropout_p: probability of dropping a probability, in training mode only.
        causal_align: "bottom_right" aligns the ends of q and k, "top_left" their starts.
        has_sink: learn one logit a head that joins each row's denominator, from 0.

    Raises:
        ValueError: ``has_sink`` without ``num_heads``.
    """

    softmax_scale = _Fixed()
    softcap = _Fixed()
    dropout_p = _Fixed()

    def __init__(
        self,
        num_heads: int | None = None,
        *,
        causal: bool = False,
        softmax_scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        dropout_p: float = 0.0,
        causal_align: CausalAlign = "bottom_right",
        has_sink: bool = False,
    ) -> None:
        super().__init__()
        if has_sink and num_heads is None:
            raise ValueError("FlashAttention: num_heads must be given with has_sink, got None")
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.window_size = window_size
        self.softcap = softcap
        self.dropout_p = dropout_p
        self.causal_align: CausalAlign = causal_align
        self.sink = nn.Parameter(torch.zeros(num_heads or 0)) if has_sink else None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            q: ``[B, Sq, H, D]``, or ``[Tq, H, D]`` with ``cu_seqlens_q``.
            k: ``[B, Sk, N, D]``, or ``[Tk, N, D]``.
            v: ``[B, Sk, N, E]``, or ``[Tk, N, E]``.
            alibi_slopes: ``[H]`` or ``[B, H]``.
            cu_seqlens_q: ends of packed sequences, as in ``flash_attn_varlen_func``.
            cu_seqlens_k: the same of k; None is ``cu_seqlens_q``.

        Returns:
            ``[B, Sq, H, E]``, or ``[Tq, H, E]``.

        Raises:
            ValueError: a shape or value does not fit.
            TypeError: a dtype does not fit.

        Cost: as ``flash_attn_func``.
        """
        sink = self.sink
        dropout_p = self.dropout_p if self.training else 0.0
        if cu_seqlens_q is None:
            return flash_attn_func(
                q,
                k,
                v,
                dropout_p,
                self.softmax_scale,
                self.causal,
                self.window_size,
                self.softcap,
                alibi_slopes,
                causal_align=self.causal_align,
                sink=sink,
            )
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k,
            q.shape[0],
            k.shape[0],
            dropout_p,
            self.softmax_scale,
            self.causal,
            self.window_size,
            self.softcap,
            alibi_slopes,
            causal_align=self.causal_align,
            sink=sink,
        )

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        return (
            f"causal={self.causal}, window_size={self.window_size}, softcap={self.softcap}, "
            f"dropout_p={self.dropout_p}, has_sink={self.sink is not None}"
        )
