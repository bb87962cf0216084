"""Attention over a KV cache, for generation: append in place, rotate, attend, in one call.

The cache holds ``[B, capacity, N, D]``, or pages found by a block table. ``cache_seqlens`` is what
is in it before the call; new keys are written there, and the queries are aligned with the end of
what is in it afterwards.

Letters: B = batch, Sq = query rows, Sn = new keys, H = query heads, N = KV heads, D = head dim of q
and k, E = of v, P = pages, R = rotated dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcp_kernels._op import call, define_op
from mcp_kernels._transforms import Result, loop, sample_by_sample, shared
from mcp_kernels.ops.attention import lse_dtype, make_inputs
from mcp_kernels.ops.attention_check import (
    check_alibi,
    check_qkv,
    check_sink,
    make_options,
)
from mcp_kernels.ops.attention_mask import AttentionOptions
from mcp_kernels.ops.attention_paged import page_slots
from mcp_kernels.ops.attention_reference import attention_forward
from mcp_kernels.ops.rotary import rotate

_OP = "flash_attn_with_kvcache"


def flash_attn_with_kvcache(  # noqa: PLR0913
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    sink: Tensor | None = None,
) -> Any:
    """Attend to a KV cache, after writing new keys and values into it.

    Args:
        q: ``[B, Sq, H, D]``.
        k_cache: ``[C, capacity, N, D]``, C >= B entries; with ``block_table`` pages
            ``[P, page size, N, D]`` of any size. **Updated in place** where ``k`` is given.
        v_cache: the same with E for D. **Updated in place** where ``v`` is given.
        k: ``[B, Sn, N, D]`` new keys, written at ``cache_seqlens``.
        v: ``[B, Sn, N, E]`` new values.
        rotary_cos: ``[positions, R / 2]``; with ``k`` only. Rotates the first R dims of new keys by
            their positions, and of q by its own where causal or windowed, else by that of the
            first new key.
        rotary_sin: as ``rotary_cos``.
        cache_seqlens: int or ``[B]`` int32 or int64: keys in the cache before this call. None is a
            full cache (and then nothing can be appended).
        cache_batch_idx: ``[B]`` int: the cache entry of each batch entry; no entry twice where
            something is appended. Not with ``block_table``.
        cache_leftpad: ``[B]`` int: where in its cache row each entry begins. Not with
            ``block_table``.
        block_table: ``[B, max pages]`` int; entries past the length are never read.
        softmax_scale: as in ``flash_attn_func``.
        causal: as there, with the queries at the end of the appended keys.
        window_size: as there.
        softcap: as there.
        rotary_interleaved: rotate pairs (0, 1), (2, 3), ..; else (0, R / 2), (1, R / 2 + 1), ..
        alibi_slopes: ``[H]`` or ``[B, H]``.
        num_splits: taken for FlashAttention's sake; the result does not depend on it.
        return_softmax_lse: return ``(out, lse)``.
        sink: ``[H]``; as in ``flash_attn_func``.

    Returns:
        ``out`` contiguous ``[B, Sq, H, E]``; an entry with nothing in its cache is 0. ``lse``
        ``[B, H, Sq]``.

    Raises:
        ValueError: a shape or value does not fit, or the appended keys do not.
        TypeError: a dtype does not fit.
        RuntimeError: a gradient is asked for; there is none.

    Cost: reads each entry's keys and values once.
    """
    _check_no_grad(q, k_cache, v_cache, k, v)
    batch, _, heads, head_dim = _check_shapes(q, k_cache, v_cache, k, v)
    _check_rotary(rotary_cos, rotary_sin, k, head_dim)
    if block_table is not None and (cache_batch_idx is not None or cache_leftpad is not None):
        raise ValueError(
            f"{_OP}: cache_batch_idx and cache_leftpad must be None with block_table; "
            "the table says where each entry lies"
        )
    lengths = _as_lengths(cache_seqlens, k_cache, batch, has_table=block_table is not None)
    if cache_seqlens is None and k is not None:
        raise ValueError(f"{_OP}: cache_seqlens must be given with k, else where to append?")
    # On a CPU the op's bodies look, in a compiled graph too and at each sample of torch.vmap.
    looks_here = not (q.is_cpu or torch.compiler.is_compiling())
    if k is not None and cache_batch_idx is not None and looks_here:
        _check_named_once(cache_batch_idx)
    options = make_options(
        _OP,
        head_dim,
        dropout_p=0.0,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
    )
    slopes = check_alibi(_OP, alibi_slopes, batch, heads)
    sink = check_sink(_OP, sink, heads)
    out, lse = call(
        torch.ops.mcp_kernels.flash_attn_kvcache.default,
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, lengths, cache_batch_idx, cache_leftpad,
        block_table, slopes, sink, rotary_interleaved, *options[:-1],
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def _check_named_once(cache_batch_idx: Tensor) -> None:
    entries = shared(_OP, "cache_batch_idx", cache_batch_idx, "call in a loop").tolist()
    if len(set(entries)) != len(entries):
        raise ValueError(f"{_OP}: cache_batch_idx must name no entry twice with k, got {entries}")


def _check_no_grad(*tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{_OP}: has no backward, but an input requires grad; call it under torch.no_grad(), "
            "or use flash_attn_func to train"
        )


def _check_shapes(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None
) -> torch.Size:
    if (k is None) != (v is None):
        raise ValueError(f"{_OP}: k and v must be given together, got one of them")
    check_qkv(_OP, q, k_cache, v_cache, same_batch=False)
    if k is not None and v is not None:
        check_qkv(_OP, q, k, v)
        if k.shape[2:] != k_cache.shape[2:] or v.shape[2:] != v_cache.shape[2:]:
            raise ValueError(
                f"{_OP}: k and v must have the cache's heads and dims, got {list(k.shape)} and "
                f"{list(v.shape)} for {list(k_cache.shape)} and {list(v_cache.shape)}"
            )
    return q.shape


def _check_rotary(cos: Tensor | None, sin: Tensor | None, k: Tensor | None, head_dim: int) -> None:
    if (cos is None) != (sin is None):
        raise ValueError(f"{_OP}: rotary_cos and rotary_sin must be given together")
    if cos is None or sin is None:
        return
    if k is None:
        raise ValueError(f"{_OP}: k must be given with rotary_cos; rotate q yourself without")
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > head_dim:
        raise ValueError(
            f"{_OP}: rotary_cos and rotary_sin must be [positions, R / 2] with R <= {head_dim}, "
            f"got {list(cos.shape)} and {list(sin.shape)}"
        )


def _as_lengths(
    cache_seqlens: int | Tensor | None, k_cache: Tensor, batch: int, *, has_table: bool
) -> Tensor:
    if cache_seqlens is None:
        if has_table:
            raise ValueError(f"{_OP}: cache_seqlens must be given with block_table")
        cache_seqlens = k_cache.shape[1]
    if isinstance(cache_seqlens, int):
        return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=k_cache.device)
    if cache_seqlens.shape != (batch,) or cache_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{_OP}: cache_seqlens must be an int or [{batch}] int32 or int64, got "
            f"{cache_seqlens.dtype} {list(cache_seqlens.shape)}"
        )
    return cache_seqlens


def _ref(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    cos, sin, lengths, batch_idx, leftpad, table, slopes, sink, is_interleaved, *scalars = rest
    options = AttentionOptions(*scalars, dropout_p=0.0)
    out, lse = _fake(q, k_cache, v_cache)
    new = 0 if k is None else k.shape[1]
    starts = [0] * q.shape[0] if leftpad is None else leftpad.tolist()
    places = _find_keys(k_cache, starts, lengths.tolist(), new, batch_idx, table)
    for b, (index, new_index) in enumerate(places):
        own_q, before = q[b : b + 1], int(lengths[b]) - starts[b]
        if k is not None and v is not None:
            own_k = k[b : b + 1]
            if cos is not None:
                q_steps = own_q.shape[1] if options.is_windowed else 1
                own_q = rotate(own_q, cos, sin, range(before, before + q_steps), is_interleaved)
                own_k = rotate(own_k, cos, sin, range(before, before + new), is_interleaved)
            k_cache[new_index], v_cache[new_index] = own_k[0], v[b]
        own_slopes = None
        if slopes is not None:
            own_slopes = slopes[b : b + 1] if slopes.shape[0] > 1 else slopes
        own_kv = (k_cache[index][None], v_cache[index][None])
        inputs = make_inputs((own_q, *own_kv), None, own_slopes, sink, None, options)
        attention_forward(inputs, out[b : b + 1], lse[b : b + 1])
    return out, lse


def _find_keys(
    k_cache: Tensor,
    starts: list[int],
    lengths: list[int],
    new: int,
    batch_idx: Tensor | None,
    table: Tensor | None,
) -> list[tuple[Any, Any]]:
    """Index into the cache of each entry's keys, and of its new ones.

    Every bound is held before anything is written. Pages need tensors of places, which copy what
    they take; a row of the cache needs slices, which do not.
    """
    if new and batch_idx is not None:
        _check_named_once(batch_idx)
    entries, capacity = k_cache.shape[:2]
    places = []
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if not 0 <= start <= length:
            raise ValueError(
                f"{_OP}: cache_seqlens must be at least cache_leftpad ({start}), got {length}"
            )
        stop = length + new
        if table is not None:
            slot = page_slots(_OP, table[b], range(start, stop), capacity, entries)
            page, offset = slot // capacity, slot % capacity
            places.append(((page, offset), (page[length - start :], offset[length - start :])))
            continue
        entry = b if batch_idx is None else int(batch_idx[b])
        if not 0 <= entry < entries or stop > capacity:
            raise ValueError(
                f"{_OP}: k_cache must hold entry {entry} with {stop} keys, got "
                f"{entries} entries of {capacity}"
            )
        places.append(((entry, slice(start, stop)), (entry, slice(length, stop))))
    return places


def _fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, num_rows, heads, _ = q.shape
    out = q.new_empty(batch, num_rows, heads, v_cache.shape[3])
    return out, q.new_empty(batch, heads, num_rows, dtype=lse_dtype(q))


def _vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> Result:
    op = torch.ops.mcp_kernels.flash_attn_kvcache.default
    if args[3] is None:  # nothing is written
        return loop(op, info, in_dims, args)
    return sample_by_sample(op)(info, in_dims, *args)


define_op(
    "flash_attn_kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k, Tensor? v,"
    " Tensor? rotary_cos, Tensor? rotary_sin, Tensor cache_seqlens, Tensor? cache_batch_idx,"
    " Tensor? cache_leftpad, Tensor? block_table, Tensor? alibi_slopes, Tensor? sink,"
    " bool rotary_interleaved, float softmax_scale, int window_left, int window_right,"
    " bool top_left, float softcap) -> (Tensor out, Tensor lse)",
    reference=_ref,
    fake=_fake,
    vmap=_vmap,
    no_gradient="call it under torch.no_grad(), or use flash_attn_func to train",
)
