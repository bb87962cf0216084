"""Philox4x32-10 on tensors: random numbers as a pure function of (key, counter), the same anywhere.

Plain integer arithmetic, so the same words come out on every device, for every chunking and in
every layout. Dropout masks and layout-independent initialisation are built on it.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3.
Letters: n = counters; a word is an unsigned 32-bit value held in an int64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9  # golden ratio
_WEYL_1 = 0xBB67AE85  # sqrt(3) - 1
_ROUNDS = 10
# Six int64 rows of this many counters are 768 KiB: the ten rounds stay in a core's L2.
_CHUNK = 1 << 14


def philox(seed: int, counter: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words for each counter.

    Args:
        seed: 64-bit key; its low 32 bits are the first key word.
        counter: ``[..., 4]`` int64, or four int64 tensors that broadcast; the low 32 bits of each
            value are used.

    Returns:
        Four int64 tensors of the broadcast shape, values in ``[0, 2^32)``.

    Raises:
        ValueError: ``counter`` does not have four words.

    Cost: about 100 integer operations a counter, in chunks that stay in cache.
    """
    words = counter.unbind(-1) if isinstance(counter, Tensor) else tuple(counter)
    if len(words) != 4:
        raise ValueError(
            f"philox: counter must be four words, got {len(words)}; "
            "give a tensor [..., 4] or four tensors"
        )
    words = torch.broadcast_tensors(*words)
    shape = words[0].shape
    flat = [word.reshape(-1) for word in words]
    out = torch.empty((4, flat[0].numel()), dtype=torch.int64, device=flat[0].device)
    for start in range(0, flat[0].numel(), _CHUNK):
        piece = slice(start, start + _CHUNK)
        _run_rounds([word[piece] & _WORD for word in flat], seed, out[:, piece])
    first, second, third, fourth = out.view(4, *shape).unbind(0)
    return first, second, third, fourth


def philox_uint32(key: int, counters: Tensor, stream: int = 0) -> Tensor:
    """Four random words for each 64-bit counter.

    Args:
        key: 64-bit key; its low 32 bits are the first key word.
        counters: ``[n]`` int64, the low 64 bits of the 128-bit counter.
        stream: the high 64 bits of the counter, the same for all ``n``.

    Returns:
        ``[4, n]`` int64, values in ``[0, 2^32)``.

    Raises:
        ValueError: ``counters`` is not one-dimensional int64.

    Cost: about 100 integer operations a counter; writes 32 bytes a counter.
    """
    if counters.dim() != 1 or counters.dtype != torch.int64:
        raise ValueError(
            f"philox_uint32: counters must be int64 [n], got {counters.dtype} "
            f"{list(counters.shape)}; use counters.reshape(-1).long()"
        )
    out = torch.empty((4, counters.numel()), dtype=torch.int64, device=counters.device)
    for start in range(0, counters.numel(), _CHUNK):
        piece = slice(start, start + _CHUNK)
        low = counters[piece]
        words = [
            low & _WORD,
            (low >> 32) & _WORD,
            torch.full_like(low, stream & _WORD),
            torch.full_like(low, (stream >> 32) & _WORD),
        ]
        _run_rounds(words, key, out[:, piece])
    return out


def _run_rounds(words: list[Tensor], key: int, out: Tensor) -> None:
    """Ten Philox rounds on ``words`` (scratch, overwritten), the result into ``out`` ``[4, n]``.

    A product of two words wraps modulo 2^64 in int64, which keeps both of its halves exact. Words
    1 and 3 are only ever the operand of a xor that is masked next, so they keep their upper half.
    """
    c0, c1, c2, c3 = words
    product_0, product_1 = torch.empty_like(c0), torch.empty_like(c0)
    key_0, key_1 = key & _WORD, (key >> 32) & _WORD
    for _ in range(_ROUNDS):
        torch.mul(c0, _MULTIPLIER_0, out=product_0)
        torch.mul(c2, _MULTIPLIER_1, out=product_1)
        torch.bitwise_right_shift(product_1, 32, out=c0)
        c0.bitwise_xor_(c1).bitwise_xor_(key_0).bitwise_and_(_WORD)
        torch.bitwise_right_shift(product_0, 32, out=c2)
        c2.bitwise_xor_(c3).bitwise_xor_(key_1).bitwise_and_(_WORD)
        c1, product_1 = product_1, c1
        c3, product_0 = product_0, c3
        key_0 = (key_0 + _WEYL_0) & _WORD
        key_1 = (key_1 + _WEYL_1) & _WORD
    for row, word in zip(out, (c0, c1, c2, c3), strict=True):
        torch.bitwise_and(word, _WORD, out=row)
