"""Backward of attention: delta, then dK and dV, then dQ, each summed in one order.

    delta = rowsum(dO * out) - dlse      dsink = -sum_rows exp(sink - lse) delta

Source: Dao, "FlashAttention-2" (2023), section 3.2. Letters: see ``flash_attn_scores.py``.
"""

# ruff: noqa: ANN001, ANN202, PLR0913
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcp_kernels.triton.flash_attn_backward_bias import bias_gradient_launch
from mcp_kernels.triton.flash_attn_backward_keys import key_gradients_launches
from mcp_kernels.triton.flash_attn_backward_queries import query_gradients_launch
from mcp_kernels.triton.flash_attn_config import Tile
from mcp_kernels.triton.flash_attn_launch import (
    Launch,
    Problem,
    pad,
    row_value_strides,
    strides,
    unit_stride,
)
from mcp_kernels.triton.flash_attn_scores import load_tile, tile_pointers

# Bytes are what bounds it: at 64 columns a thread of 4 warps has 16 elements of each tensor.
_DELTA_ELEMENTS = 2048


@triton.jit
def _flash_attn_delta_kernel(
    do_ptr, out_ptr, dlse_ptr, lse_ptr, delta_ptr, do_strides, out_strides, dlse_strides,
    lse_strides, heads, num_rows, num_tiles,
    E: tl.constexpr, BLOCK_E: tl.constexpr, M: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % num_tiles
    head = tl.program_id(0) // num_tiles % heads
    b = tl.program_id(0) // num_tiles // heads
    rows = tile * M + tl.arange(0, M)
    dims = tl.arange(0, BLOCK_E)
    zero = tl.full((), 0, tl.int64)
    do_ptrs = tile_pointers(do_ptr, do_strides, b, zero, head, rows, dims)
    do = load_tile(do_ptrs, rows, num_rows, dims, E, True).to(tl.float32)
    out_ptrs = tile_pointers(out_ptr, out_strides, b, zero, head, rows, dims)
    out = load_tile(out_ptrs, rows, num_rows, dims, E, True).to(tl.float32)
    delta = tl.sum(do * out, 1)
    lse_row = b.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1]
    stored = rows < num_rows
    if HAS_DLSE:
        dlse_row = b.to(tl.int64) * dlse_strides[0] + head.to(tl.int64) * dlse_strides[1]
        dlse_ptrs = dlse_ptr + dlse_row + rows.to(tl.int64) * dlse_strides[2]
        dlse = tl.load(dlse_ptrs, mask=stored, other=0.0).to(tl.float32)
        lse = tl.load(lse_ptr + lse_row + rows, mask=stored, other=0.0)
        delta -= tl.where(lse == float("-inf"), 0.0, dlse)
    tl.store(delta_ptr + lse_row + rows, delta, mask=stored)


def delta_launch(
    dout: Tensor, out: Tensor, dlse: Tensor | None, lse: Tensor, delta: Tensor
) -> Launch:
    """How ``delta`` (as lse) is filled; with varlen all sequences are one."""
    rows, heads, width = out.shape[-3:]
    block = max(1, _DELTA_ELEMENTS // pad(width))
    num_tiles = triton.cdiv(rows, block)
    batch = out.shape[0] if out.dim() == 4 else 1
    args = {
        "do_ptr": dout,
        "out_ptr": out,
        "dlse_ptr": dlse,
        "lse_ptr": lse,
        "delta_ptr": delta,
        "do_strides": strides(dout),
        "out_strides": strides(out),
        "dlse_strides": (0, 0, 0) if dlse is None else (*row_value_strides(dlse), dlse.stride(-1)),
        "lse_strides": row_value_strides(lse),
        "heads": heads,
        "num_rows": rows,
        "num_tiles": num_tiles,
    }
    constants = {"E": width, "BLOCK_E": pad(width), "M": block, "HAS_DLSE": dlse is not None}
    programs = num_tiles * heads * batch
    return Launch(_flash_attn_delta_kernel, programs, args, constants, Tile(block, 0, 4, 1))


def run_backward(
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    needs_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias, dsink); what was not asked for is empty."""
    device, dout = problem.q.device, unit_stride(dout)
    delta = torch.empty_like(lse)
    delta_launch(dout, unit_stride(out), dlse, lse, delta).run(device)
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
