"""What the Triton attention kernels share: scores of a tile, who sees whom, dropout, addresses.

Scores are held in base 2 (times log2(e)), so that an exponential is one ``exp2``; with a floating
bias they stay natural, since a bias as low as its dtype goes times log2(e) would be -inf. A tile is
addressed by the diagonal keys of its rows and by its keys, shaped to broadcast: ``[M, 1]`` and
``[1, N]``, or the other way round in the kernel that holds keys still.

Letters: M = rows of a tile, N = keys of a tile, D = head dim of q and k, E = of v.
"""

# Triton types its kernels as the functions they are written as, not as what a launch takes.
# ruff: noqa: ANN001, ANN201, PLR0913
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Kinds of bias.
NO_BIAS = tl.constexpr(0)
BOOL_BIAS = tl.constexpr(1)
FLOAT_BIAS = tl.constexpr(2)


@triton.jit
def tanh(x):
    """Hyperbolic tangent of float32 to a few units in the last place.

    Below 0.625 the odd polynomial of Cephes' tanhf, where ``1 - 2 / (e^2x + 1)`` would cancel.
    """
    z = x * x
    odd = ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z
    small = ((odd + 1.33314422036e-1) * z - 3.33332819422e-1) * z * x + x
    size = tl.abs(x)
    large = 1.0 - 2.0 / (tl.exp2(size * (2 * LOG2E)) + 1.0)
    return tl.where(size < 0.625, small, tl.where(x < 0, -large, large))


@triton.jit
def exponential(x, BIAS: tl.constexpr):
    """``exp`` of a difference of scores, whatever base they are held in."""
    if BIAS == FLOAT_BIAS:
        return tl.exp2(x * LOG2E)
    return tl.exp2(x)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """``a b`` summed in float32."""
    if PRECISION == "widened":
        # Triton's interpreter multiplies the bits of bfloat16 as integers; float32 copies have
        # the same products.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def dot_add(a, b, total, PRECISION: tl.constexpr):
    """``total + a b``, float32."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def narrow(x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """float32 as ``dtype``, rounded to the nearest."""
    if PRECISION == "widened":
        # Triton's interpreter cuts bits off where GPUs round.
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) & -65536
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def sequence(b, cu_q_ptr, cu_k_ptr, num_rows, num_keys, VARLEN: tl.constexpr):
    """(first row, first key, rows, keys) of batch entry b; the firsts are int64."""
    if VARLEN:
        row_base = tl.load(cu_q_ptr + b).to(tl.int64)
        key_base = tl.load(cu_k_ptr + b).to(tl.int64)
        num_rows = (tl.load(cu_q_ptr + b + 1) - row_base).to(tl.int32)
        num_keys = (tl.load(cu_k_ptr + b + 1) - key_base).to(tl.int32)
    else:
        row_base = tl.full((), 0, tl.int64)
        key_base = tl.full((), 0, tl.int64)
    return row_base, key_base, num_rows, num_keys


@triton.jit
def tile_of(pid, tiles_ptr, num_tiles, lanes, LAST_FIRST: tl.constexpr, VARLEN: tl.constexpr):
    """(batch entry, lane, tile of the sequence): the tiles of one lane run side by side.

    A lane is a head or a KV head. Under a causal mask the last rows see the most keys, so their
    tiles go first. With varlen the map says whose tile each one is; entry -1 is nobody's.
    """
    tile = pid % num_tiles
    lane = pid // num_tiles
    if VARLEN:
        return tl.load(tiles_ptr + tile), lane, tl.load(tiles_ptr + num_tiles + tile)
    if LAST_FIRST:
        tile = num_tiles - 1 - tile
    return lane // lanes, lane % lanes, tile


@triton.jit
def tile_pointers(base, strides, b, first, head, size, dims):
    """``[size, dims]`` pointers to row ``first`` of one head; every row offset is 64 bits wide."""
    start = base + b.to(tl.int64) * strides[0] + first * strides[1] + head.to(tl.int64) * strides[2]
    return start + size.to(tl.int64)[:, None] * strides[1] + dims[None, :]


@triton.jit
def load_tile(ptrs, index, limit, dims, WIDTH: tl.constexpr, CHECK: tl.constexpr):
    """A ``[size, dims]`` tile, 0 past ``limit`` rows (where CHECK) and past WIDTH columns."""
    if CHECK:
        return tl.load(ptrs, mask=(index < limit)[:, None] & (dims < WIDTH)[None, :], other=0.0)
    if dims.shape[0] == WIDTH:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=(dims < WIDTH)[None, :], other=0.0)


@triton.jit
def load_rows(ptrs, taken, dims, WIDTH: tl.constexpr):
    """A ``[size, dims]`` tile of the rows that are ``taken``, 0 elsewhere."""
    return tl.load(ptrs, mask=taken[:, None] & (dims < WIDTH)[None, :], other=0.0)


@triton.jit
def finite_rows(ptrs, index, limit, dims, WIDTH: tl.constexpr):
    """Which rows of a tile hold neither NaN nor infinity; rows past ``limit`` do not.

    A hidden pair has probability 0, and 0 * NaN is NaN: what a masked tile multiplies by has to be
    finite. Bad rows are left out of it, and what does see one is made NaN by name. The tile is read
    here and once more, since registers are dearer than a second read of what is in L1.
    """
    x = load_tile(ptrs, index, limit, dims, WIDTH, True).to(tl.float32)
    return (tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), 1) == 0) & (index < limit)


@triton.jit
def key_range(
    first_row, last_row, offset, num_keys, window, N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """(lo, full_lo, full_hi, hi): keys that rows first..last see, in tiles of N.

    Some row sees a key of every tile in [lo, hi); in [full_lo, full_hi) all rows see all keys.
    """
    lo = 0
    hi = num_keys
    full_lo = 0
    full_hi = num_keys // N * N
    if RIGHT:
        hi = tl.minimum(hi, last_row + offset + window[1] + 1)
        full_hi = tl.minimum(full_hi, tl.maximum(first_row + offset + window[1] + 1, 0) // N * N)
    if LEFT:
        lo = tl.maximum(first_row + offset - window[0], 0) // N * N
        full_lo = tl.cdiv(tl.maximum(last_row + offset - window[0], 0), N) * N
    return lo, full_lo, tl.maximum(full_lo, full_hi), hi


@triton.jit
def row_range(
    first_key, last_key, offset, num_rows, window, M: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """(lo, full_lo, full_hi, hi): rows that see keys first..last; ``key_range`` transposed.

    Rows past the last one count as full: with lse = +inf they have no probabilities.
    """
    lo = 0
    hi = num_rows
    full_lo = 0
    full_hi = num_rows
    if RIGHT:
        lo = tl.maximum(first_key - offset - window[1], 0) // M * M
        full_lo = tl.cdiv(tl.maximum(last_key - offset - window[1], 0), M) * M
    if LEFT:
        hi = tl.minimum(hi, last_key - offset + window[0] + 1)
        full_hi = tl.minimum(full_hi, tl.maximum(first_key - offset + window[0] + 1, 0)) // M * M
    return lo, full_lo, tl.maximum(full_lo, full_hi), hi


@triton.jit
def finish_scores(
    qk, diagonal, keys, inside, window, scales, bias_ptrs, slope,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """(scores, tanh, visible) of a tile from its products ``q k^T``.

    Args:
        qk: float32 products.
        diagonal: key on the diagonal of each row, keys of a row's tile, in broadcasting shapes.
        keys: as ``diagonal``.
        inside: full-shaped bool, False past the last row or key.
        window: (left, right).
        scales: (of the product, of the tanh); without softcap only the first counts.
        bias_ptrs: full-shaped pointers, or None.
        slope: ALiBi slope in the scores' base, broadcasting.
        MASKED: hide what ``inside``, window or bias hide. Otherwise all is known to be visible.
        LEFT: whether the window ends to the left.
        RIGHT: whether it ends to the right.
        BIAS: kind of bias.
        SOFTCAP: whether there is one.
        ALIBI: whether there are slopes.
    """
    s = qk * scales[0]
    squashed = s
    if SOFTCAP:
        squashed = tanh(s)
        s = squashed * scales[1]
    visible = inside
    if BIAS == BOOL_BIAS:
        visible = visible & (tl.load(bias_ptrs, mask=inside, other=0) != 0)
    if BIAS == FLOAT_BIAS:
        bias = tl.load(bias_ptrs, mask=inside, other=0.0).to(tl.float32)
        visible = visible & (bias != float("-inf"))
        s += bias
    if ALIBI:
        s -= slope * tl.abs(diagonal - keys).to(tl.float32)
    if MASKED:
        if LEFT:
            visible = visible & (keys >= diagonal - window[0])
        if RIGHT:
            visible = visible & (keys <= diagonal + window[1])
        s = tl.where(visible, s, float("-inf"))
    return s, squashed, visible


@triton.jit
def dropout_keep(
    rng_ptr, lane, rows, first_key, keep_from, M: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """``[M, N]`` bool, the mask of ``attention_mask.dropout_keep``; ``first_key`` divides by 4.

    ``lane`` is h + 2^16 b, ``rows`` is [M, 1], ``keep_from`` is round(p 2^32) - 2^31.
    """
    seed = tl.load(rng_ptr)
    shape = tl.zeros((M, N // 4), tl.int32)
    quads = shape + (first_key // 4 + tl.arange(0, N // 4))[None, :]
    offset = shape + (tl.load(rng_ptr + 1) & 0xFFFFFFFF).to(tl.int32)
    word_0, word_1, word_2, word_3 = tl.philox(seed, quads, shape + rows, shape + lane, offset)
    # Word j % 4 is key j's: joined by pairs, the last two dims count 0, 1, 2, 3.
    words = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))
    word = tl.reshape(words, (M, N)).to(tl.int32, bitcast=True)
    # Flipping the highest bit turns the order of unsigned words into that of signed ones.
    return (word ^ -2147483648) >= keep_from


@triton.jit
def load_base(lse_ptr, rows, num_rows, BIAS: tl.constexpr):
    """What scores are held against in backward: lse in their base.

    +inf past the last row and on rows that saw no key: all their probabilities are then 0.
    """
    base = tl.load(lse_ptr + rows, mask=rows < num_rows, other=float("inf"))
    base = tl.where(base == float("-inf"), float("inf"), base)
    return base if BIAS == FLOAT_BIAS else base * LOG2E


@triton.jit
def probabilities(s, base, visible, MASKED: tl.constexpr, BIAS: tl.constexpr):
    """``exp(S - lse)``, 0 where hidden, whatever is there."""
    p = exponential(s - base, BIAS)
    return tl.where(visible, p, 0.0) if MASKED else p


@triton.jit
def score_gradients(p, dp, delta, visible, MASKED: tl.constexpr):
    """``P (dP - delta)``, 0 where hidden, whatever is there."""
    ds = p * (dp - delta)
    return tl.where(visible, ds, 0.0) if MASKED else ds
