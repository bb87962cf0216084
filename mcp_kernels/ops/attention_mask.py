"""Who sees whom in attention: windows, causality, ALiBi distances, dropout masks.

Query row i sits on the diagonal at key ``i + offset``: offset is Sk - Sq where the ends of the two
sequences are aligned ("bottom_right", as in FlashAttention) and 0 where their starts are
("top_left", as in torch). A window (l, r) shows keys ``i + offset - l .. i + offset + r``, both
ends included; a negative number means no limit, and causal is r = 0.

Letters: B = batch, H = query heads, Sq / Sk = query rows / keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mcp_kernels._transforms import shared
from mcp_kernels.ops.philox import philox


class AttentionOptions(NamedTuple):
    """The scalars of an attention op, in the order of its schema."""

    softmax_scale: float
    window_left: int
    """Keys to the left of the diagonal that a row sees; negative is all."""
    window_right: int
    top_left: bool
    softcap: float
    """0 is off."""
    dropout_p: float

    def offset(self, num_rows: int, num_keys: int) -> int:
        """Key on the diagonal of row 0."""
        return 0 if self.top_left else num_keys - num_rows

    @property
    def is_windowed(self) -> bool:
        """Whether position alone hides a key."""
        return self.window_left >= 0 or self.window_right >= 0


def visible_keys(options: AttentionOptions, rows: range, offset: int, num_keys: int) -> range:
    """Smallest range of keys that holds all that ``rows`` see."""
    first, last = 0, num_keys
    if options.window_left >= 0:
        first = max(0, rows.start + offset - options.window_left)
    if options.window_right >= 0:
        last = min(num_keys, rows.stop + offset + options.window_right)
    return range(first, max(first, last))


def hide_outside_window_(
    scores: Tensor, options: AttentionOptions, rows: range, keys: range, offset: int, fill: float
) -> Tensor:
    """Set ``scores[..., row, key]`` to ``fill`` where the window hides the key, whatever it holds.

    tril_ and triu_ select, so a NaN in a hidden place is gone, and cost a fraction of masked_fill_;
    they leave 0, to which the fill is added.
    """
    last = rows.start + offset + options.window_right - keys.start
    if options.window_right >= 0 and len(keys) > last + 1:
        scores.tril_(last)
        if fill != 0:
            scores.add_(_full_matrix(scores, fill).triu_(last + 1))
    first = rows.start + offset - options.window_left - keys.start
    if options.window_left >= 0 and first + len(rows) > 1:
        scores.triu_(first)
        if fill != 0:
            scores.add_(_full_matrix(scores, fill).tril_(first - 1))
    return scores


def visible_mask(
    options: AttentionOptions, num_rows: int, num_keys: int, device: torch.device
) -> Tensor:
    """``[Sq, Sk]`` bool, True where the window shows the key."""
    row = torch.arange(num_rows, device=device)[:, None] + options.offset(num_rows, num_keys)
    key = torch.arange(num_keys, device=device)[None, :]
    visible = torch.ones(num_rows, num_keys, dtype=torch.bool, device=device)
    if options.window_left >= 0:
        visible &= key >= row - options.window_left
    if options.window_right >= 0:
        visible &= key <= row + options.window_right
    return visible


def alibi_distance(rows: Tensor, keys: Tensor, offset: int) -> Tensor:
    """``|i + offset - j|`` for rows i and keys j, ``[len(rows), len(keys)]``."""
    return (rows[:, None] + offset - keys[None, :]).abs()


def dropout_keep(
    rng: Tensor, dropout_p: float, batch: Tensor, heads: Tensor, rows: Tensor, keys: Tensor
) -> Tensor:
    """``[B, H, rows, keys]`` bool: which probabilities stay, a pure function of its arguments.

    The word of element (b, h, i, j) is word ``j % 4`` of Philox at counter
    ``(j // 4, i, h + 2^16 b, offset)`` under the key ``seed``; it stays when the word is at least
    ``p * 2^32``.

    Args:
        rng: ``[2]`` int64, (seed, offset).
        dropout_p: probability of dropping, in [0, 1].
        batch: int64 batch indices, below 2^16.
        heads: int64 query head indices, below 2^16.
        rows: int64 row indices.
        keys: int64 key indices.
    """
    if keys.numel() == 0:
        shape = (len(batch), len(heads), len(rows), 0)
        return torch.empty(shape, dtype=torch.bool, device=keys.device)
    seed, offset = shared(
        *("flash_attn", "rng", rng),
        "take the second gradient under randomness='same', or call in a loop",
    ).tolist()
    first = int(keys.min()) // 4
    quads = torch.arange(first, int(keys.max()) // 4 + 1, device=keys.device)
    lanes = (batch[:, None] << 16) + heads[None, :]
    words = philox(
        seed,
        [
            quads.view(1, 1, 1, -1),
            rows.view(1, 1, -1, 1),
            lanes[:, :, None, None],
            torch.tensor(offset, device=keys.device),
        ],
    )
    by_key = torch.stack(words, dim=-1).flatten(-2)
    return by_key.index_select(-1, keys - 4 * first) >= round(dropout_p * 2**32)


def _full_matrix(scores: Tensor, fill: float) -> Tensor:
    return torch.full(scores.shape[-2:], fill, dtype=scores.dtype, device=scores.device)
