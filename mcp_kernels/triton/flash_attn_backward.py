"""Backward of attention: delta, then dK and dV, then dQ, each summed in one order.

    delta = rowsum(P dP) - dlse          dsink = -sum_rows exp(sink - lse) delta

Source: Dao, "FlashAttention-2" (2023), section 3.2. Letters: see ``flash_attn_scores.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcp_kernels.triton.flash_attn_backward_bias import bias_gradient_launch
from mcp_kernels.triton.flash_attn_backward_delta import delta_launch
from mcp_kernels.triton.flash_attn_backward_keys import key_gradients_launches
from mcp_kernels.triton.flash_attn_backward_queries import query_gradients_launch
from mcp_kernels.triton.flash_attn_launch import Problem, unit_stride


def run_backward(
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    needs_dbias: bool,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias, dsink); what was not asked for is empty.

    ``delta`` is given where the keys are a part of those that ``lse`` is of.
    """
    device, dout = problem.q.device, unit_stride(dout)
    if delta is not None:
        delta = torch.empty_like(lse).copy_(delta)
    else:
        delta = torch.empty_like(lse)
        delta_launch(problem, dout, out, dlse, lse, delta).run(device)
    dq, dk, dv = (
        torch.empty(t.shape, dtype=t.dtype, device=device)
        for t in (problem.q, problem.k, problem.v)
    )
    for launch in key_gradients_launches(problem, dout, lse, delta, dk, dv):
        launch.run(device)
    query_gradients_launch(problem, dout, lse, delta, dq).run(device)
    dbias = torch.empty(0, dtype=problem.q.dtype, device=device)
    if needs_dbias and problem.bias is not None:
        dbias = torch.zeros(problem.bias.shape, dtype=problem.bias.dtype, device=device)
        if lse.numel():
            bias_gradient_launch(problem, dout, lse, delta, dbias).run(device)
    dsink = torch.empty(0, dtype=problem.q.dtype, device=device)
    if problem.sink is not None:
        by_head = problem.sink.float()[:, None]
        # Slack rows of a varlen call have no sink, and lse = -inf.
        p_sink = torch.where(lse == -torch.inf, 0.0, (by_head - lse).exp())
        rows = (0, 2) if lse.dim() == 3 else 1
        dsink = (p_sink * delta).sum(rows).neg().to(problem.sink.dtype)
    return dq, dk, dv, dbias, dsink
