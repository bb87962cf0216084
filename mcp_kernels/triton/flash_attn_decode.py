"""Attention of few query rows over many keys: the keys are split, and K and V are read once.

A program takes some tiles of one entry's keys for all query rows of one KV head's group, packed
into the rows of one tile: row r is query row ``r // G`` of head ``n G + r % G``. The parts
(m, l, O) are then combined in one order. Keys lie in a cache row, or in pages found by a table.

Lengths and tables are never read by the host: nothing waits for the GPU. An entry whose length or
page lies outside the cache comes out as NaN.

Source: Dao et al., "Flash-Decoding" (2023). Letters: G = query heads of a KV head, as in
``flash_attn_scores.py`` otherwise.
"""

# ruff: noqa: ANN001, ANN202, E741, PLR0913
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcp_kernels.triton import flash_attn_config as config
from mcp_kernels.triton.flash_attn_cache import Cache
from mcp_kernels.triton.flash_attn_config import Tile
from mcp_kernels.triton.flash_attn_launch import Problem, pad, row_value_strides, strides
from mcp_kernels.triton.flash_attn_scores import (
    LN2,
    LOG2E,
    NO_BIAS,
    dot,
    dot_add,
    finish_scores,
    key_range,
    load_tile,
    narrow,
)
from mcp_kernels.triton.launch import Launch


@triton.jit
def _flash_attn_decode_kernel(
    q_ptr, k_ptr, v_ptr, slopes_ptr, lengths_ptr, entries_ptr, starts_ptr, table_ptr,
    part_o_ptr, part_m_ptr, part_l_ptr,
    q_strides, k_strides, v_strides, slope_strides, table_stride, num_entries, page_size, capacity,
    kv_heads, group, num_rows, num_tiles, num_splits, window, scales,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TOP_LEFT: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PAGED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    split = pid % num_splits
    tile = pid // num_splits % num_tiles
    kv_head = pid // (num_splits * num_tiles) % kv_heads
    b = pid // (num_splits * num_tiles * kv_heads)
    packed = tile * M + tl.arange(0, M)
    in_tile = packed < num_rows * group
    row = packed // group
    head = kv_head * group + packed % group

    begin = 0
    if starts_ptr is not None:
        begin = tl.load(starts_ptr + b).to(tl.int32)
    end = tl.load(lengths_ptr + b).to(tl.int32)
    entry = b.to(tl.int64)
    if entries_ptr is not None:
        entry = tl.load(entries_ptr + b).to(tl.int64)
    is_valid = (begin >= 0) & (begin <= end) & (end <= capacity)
    if not PAGED:
        is_valid = is_valid & (entry >= 0) & (entry < num_entries)
    num_keys = tl.where(is_valid, end - begin, 0)
    offset = 0 if TOP_LEFT else num_keys - num_rows
    diagonal = row + offset

    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_E)
    q_rows = q_ptr + b.to(tl.int64) * q_strides[0] + row.to(tl.int64) * q_strides[1]
    q_ptrs = (q_rows + head.to(tl.int64) * q_strides[2])[:, None] + dims[None, :]
    q = load_tile(q_ptrs, packed, num_rows * group, dims, D, True)
    slope = 0.0
    if ALIBI:
        slope_ptrs = slopes_ptr + b * slope_strides[0] + head * slope_strides[1]
        slope = (tl.load(slope_ptrs, mask=in_tile, other=0.0).to(tl.float32) * LOG2E)[:, None]

    first_row = tile * M // group
    last_row = tl.minimum(tile * M + M, num_rows * group) - 1
    lo, _full_lo, _full_hi, hi = key_range(
        first_row, last_row // group, offset, num_keys, window, N, LEFT, RIGHT
    )
    tiles_each = tl.cdiv(tl.cdiv(tl.maximum(hi - lo, 0), N), num_splits)
    lo += split * tiles_each * N
    hi = tl.minimum(hi, lo + tiles_each * N)

    m = tl.full((M,), float("-inf"), tl.float32)
    l = tl.zeros((M,), tl.float32) + tl.where(is_valid, 0.0, float("nan"))
    o = tl.zeros((M, BLOCK_E), tl.float32)
    for start in range(lo, hi, N):
        keys = start + tl.arange(0, N)
        is_key = keys < num_keys
        at = begin + keys
        place = entry
        is_found = is_key
        if PAGED:
            place = tl.load(
                table_ptr + b.to(tl.int64) * table_stride + at // page_size, mask=is_key, other=0
            ).to(tl.int64)
            is_found = is_key & (place >= 0) & (place < num_entries)
            at = at % page_size
        k_rows = k_ptr + place * k_strides[0] + at.to(tl.int64) * k_strides[1]
        k_rows += kv_head.to(tl.int64) * k_strides[2]
        k_mask = is_found[:, None] & (dims < D)[None, :]
        k = tl.load(k_rows[:, None] + dims[None, :], mask=k_mask, other=0.0)
        s = dot(q, tl.trans(k), PRECISION)
        inside = in_tile[:, None] & is_key[None, :]
        s, _squashed, visible = finish_scores(
            s, diagonal[:, None], keys[None, :], inside, window, scales, q_ptr, slope,
            True, LEFT, RIGHT, NO_BIAS, SOFTCAP, ALIBI,
        )  # fmt: skip
        if PAGED:
            s = tl.where(visible & ~is_found[None, :], float("nan"), s)
        new_m = tl.maximum(m, tl.max(s, 1))
        base = tl.where(new_m == float("-inf"), 0.0, new_m)
        p = tl.exp2(s - base[:, None])
        decay = tl.exp2(m - base)
        l = l * decay + tl.sum(p, 1)
        v_rows = v_ptr + place * v_strides[0] + at.to(tl.int64) * v_strides[1]
        v_rows += kv_head.to(tl.int64) * v_strides[2]
        v_mask = is_found[:, None] & (value_dims < E)[None, :]
        v = tl.load(v_rows[:, None] + value_dims[None, :], mask=v_mask, other=0.0)
        # A hidden pair has probability 0, and 0 * NaN is NaN.
        is_finite = tl.abs(v.to(tl.float32)) < float("inf")
        is_good = tl.min(is_finite.to(tl.int32), 1) != 0
        v = tl.where(is_finite, v, 0.0).to(v.dtype)
        p = tl.where(visible & ~is_good[None, :], float("nan"), p)
        o = dot_add(narrow(p, v.dtype, PRECISION), v, o * decay[:, None], PRECISION)
        m = new_m

    # Parts are [entries, heads, rows, splits(, E)].
    part = (b.to(tl.int64) * (kv_heads * group) + head) * num_rows + row
    part = part * num_splits + split
    tl.store(part_m_ptr + part, m, mask=in_tile)
    tl.store(part_l_ptr + part, l, mask=in_tile)
    o_ptrs = part_o_ptr + (part * E)[:, None] + value_dims[None, :]
    tl.store(o_ptrs, o, mask=in_tile[:, None] & (value_dims < E)[None, :])


@triton.jit
def _flash_attn_combine_kernel(
    part_o_ptr, part_m_ptr, part_l_ptr, sink_ptr, out_ptr, lse_ptr, out_strides, lse_strides,
    heads, num_rows, num_splits,
    E: tl.constexpr, BLOCK_E: tl.constexpr, SINK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One row: its parts, first to last."""
    pid = tl.program_id(0)
    row = pid % num_rows
    head = pid // num_rows % heads
    b = pid // (num_rows * heads)
    value_dims = tl.arange(0, BLOCK_E)
    part = pid.to(tl.int64) * num_splits
    m = tl.full((), float("-inf"), tl.float32)
    l = tl.full((), 0.0, tl.float32)
    if SINK:
        m = tl.load(sink_ptr + head).to(tl.float32) * LOG2E
        l = tl.where(m > float("-inf"), 1.0, 0.0)
    o = tl.zeros((BLOCK_E,), tl.float32)
    for split in range(num_splits):
        part_m = tl.load(part_m_ptr + part + split)
        part_l = tl.load(part_l_ptr + part + split)
        part_o = tl.load(
            part_o_ptr + (part + split) * E + value_dims, mask=value_dims < E, other=0.0
        )
        new_m = tl.maximum(m, part_m)
        base = tl.where(new_m == float("-inf"), 0.0, new_m)
        decay = tl.exp2(m - base)
        part_decay = tl.exp2(part_m - base)
        l = l * decay + part_l * part_decay
        o = o * decay + part_o * part_decay
        m = new_m
    o /= tl.where(l == 0.0, 1.0, l)
    to = out_ptr + b.to(tl.int64) * out_strides[0] + row.to(tl.int64) * out_strides[1]
    to += head.to(tl.int64) * out_strides[2]
    o = narrow(o, out_ptr.dtype.element_ty, PRECISION)
    tl.store(to + value_dims, o, mask=value_dims < E)
    lse = tl.where(l == 0.0, float("-inf"), m * LN2 + tl.log(tl.where(l == 0.0, 1.0, l)))
    tl.store(
        lse_ptr + b.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1] + row, lse
    )


def decode_launches(problem: Problem, cache: Cache, out: Tensor, lse: Tensor) -> list[Launch]:
    """How ``out`` ``[B, Sq, H, E]`` and ``lse`` ``[B, H, Sq]`` are filled from a cache."""
    if lse.numel() == 0:
        return []
    batch, num_rows, heads, _ = problem.q.shape
    given, kv_heads = problem.args(), problem.kv_heads
    packed = num_rows * given["group"]
    tile = config.decode_tile(packed, problem.width, problem.q.element_size(), problem.chip)
    num_tiles = triton.cdiv(packed, tile.rows)
    programs = batch * kv_heads * num_tiles
    splits = config.num_splits(programs, cache.capacity, tile, problem.chip)
    shape, width = (batch, heads, num_rows, splits), problem.v.shape[-1]
    parts = {
        "part_o_ptr": torch.empty((*shape, width), dtype=torch.float32, device=out.device),
        "part_m_ptr": torch.empty(shape, dtype=torch.float32, device=out.device),
        "part_l_ptr": torch.empty(shape, dtype=torch.float32, device=out.device),
    }
    args = {
        **given,
        **parts,
        "lengths_ptr": cache.lengths,
        "entries_ptr": cache.entries,
        "starts_ptr": cache.starts,
        "table_ptr": cache.table,
        "table_stride": 0 if cache.table is None else cache.table.stride(0),
        "num_entries": problem.k.shape[0],
        "page_size": problem.k.shape[1],
        "capacity": cache.capacity,
        "kv_heads": kv_heads,
        "num_tiles": num_tiles,
        "num_splits": splits,
    }
    constants = {
        **problem.constants(),
        "M": tile.rows,
        "N": tile.keys,
        "PAGED": cache.table is not None,
    }
    combine_args = {
        **parts,
        "sink_ptr": problem.sink,
        "out_ptr": out,
        "lse_ptr": lse,
        "out_strides": strides(out),
        "lse_strides": row_value_strides(lse),
        "heads": heads,
        "num_rows": num_rows,
        "num_splits": splits,
    }
    combine_constants = {
        "E": width,
        "BLOCK_E": pad(width),
        "SINK": problem.sink is not None,
        "PRECISION": constants["PRECISION"],
    }
    taken = set(_flash_attn_decode_kernel.arg_names)
    return [
        Launch(
            _flash_attn_decode_kernel,
            programs * splits,
            {name: value for name, value in args.items() if name in taken},
            {name: value for name, value in constants.items() if name in taken},
            tile,
        ),
        Launch(
            _flash_attn_combine_kernel,
            batch * heads * num_rows,
            combine_args,
            combine_constants,
            Tile(1, 0, 1, 1),
        ),
    ]


def run_decode(problem: Problem, cache: Cache) -> tuple[Tensor, Tensor]:
    """(out, lse) as the ops return them."""
    batch, num_rows, heads, _ = problem.q.shape
    device = problem.q.device
    shape = (batch, num_rows, heads, problem.v.shape[-1])
    out = torch.empty(shape, dtype=problem.q.dtype, device=device)
    lse = torch.empty((batch, heads, num_rows), dtype=torch.float32, device=device)
    for launch in decode_launches(problem, cache, out, lse):
        launch.run(device)
    return out, lse
