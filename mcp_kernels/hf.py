"""Hugging Face models on this package's attention: ``attn_implementation="mcp_attention"``.

    import mcp_kernels.hf
    mcp_kernels.hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="mcp_attention")

``register`` adds two functions to transformers' own registries; nothing of transformers is changed.
Causal masks and sliding windows never become a matrix: the mask function returns None, or the
padding mask ``[B, Sk]``, wherever that and the layer's own arguments say it all. Any other mask
(packed sequences, chunks, static caches) is the dense one that SDPA would get.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcp_kernels.ops.attention_functions import flash_attn_func

# transformers 5 takes every name with "flash" in it for a FlashAttention package or a kernel on its
# hub, tries to load that, and fails: no registered function may be called so.
NAME = "mcp_attention"


def register() -> None:
    """Make ``attn_implementation="mcp_attention"`` known to transformers; again is no harm.

    Raises:
        ImportError: transformers 4.56 or newer is not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "register: transformers must be installed, 4.56 or newer; pip install 'mcp-kernels[hf]'"
        ) from error
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **rest: Any,
) -> Tensor | None:
    """The mask that ``attention`` gets, built once for all layers of a kind.

    Args:
        batch_size: as transformers calls a mask function, like all that follow.
        q_length: query rows.
        kv_length: keys, with those of the cache.
        q_offset: position of the first row.
        kv_offset: position of the first key.
        attention_mask: ``[B, positions]`` bool, False on padding.
        local_size: sliding window or chunk.
        allow_is_causal_skip: whether the pattern is no more than causal, window or chunk.
        allow_is_bidirectional_skip: whether the pattern is no more than all keys.
        **rest: what a dense mask needs more.

    Returns:
        None: the layer's own causality and window say it all. ``[B, Sk]`` bool: they do, on the
        keys where it is True. ``[B, 1, Sq, Sk]`` bool: it says it all.
    """
    from transformers.masking_utils import sdpa_mask

    config = rest.get("config")
    is_all_keys = allow_is_bidirectional_skip and local_size is None
    is_window = local_size is None or local_size == getattr(config, "sliding_window", None)
    is_chunk = local_size is not None and getattr(config, "attention_chunk_size", None) is not None
    # With a static cache keys go on behind the last row: the ends of rows and keys do not align.
    are_aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if is_all_keys or (allow_is_causal_skip and is_window and not is_chunk and are_aligned):
        return _padding(attention_mask, kv_length, kv_offset)
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **rest,
    )


def _padding(mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """``[B, Sk]`` bool; None where nothing is padding."""
    if mask is None:
        return None
    mask = mask[:, kv_offset : kv_offset + kv_length].bool()
    missing = kv_length - mask.shape[1]
    if missing > 0:  # keys that the caller's mask does not reach are not there yet
        mask = torch.nn.functional.pad(mask, (0, missing))
    if not torch.compiler.is_compiling() and bool(mask.all()):
        return None
    return mask


def attention(  # noqa: PLR0913
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One attention layer, as transformers calls it.

    Args:
        module: the layer; its ``is_causal`` counts where the argument is None.
        query: ``[B, H, Sq, D]``.
        key: ``[B, N, Sk, D]``.
        value: ``[B, N, Sk, E]``.
        attention_mask: what the function of that name made, or any dense bool or float mask.
        dropout: probability of dropping, 0 in evaluation.
        scaling: factor of ``q k^T``; None is ``1 / sqrt(D)``.
        sliding_window: keys that a row sees, itself included; None is all.
        softcap: as in ``flash_attn_func``; None is off.
        is_causal: whether rows see no later key.
        s_aux: ``[H]``, attention sinks.
        position_bias: ``[1 or B, H, Sq, Sk]``, added to the scores.
        **kwargs: what other implementations take.

    Returns:
        ``([B, Sq, H, E], None)``: there are no attention weights.

    Raises:
        ValueError: attention weights are asked for.
    """
    if kwargs.get("output_attentions"):
        raise ValueError(
            f"{NAME}: output_attentions must be False, got True; load the model with "
            "attn_implementation='eager' to see attention weights"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = (-1, -1)
    if attention_mask is not None and attention_mask.dim() == 4:
        # A dense mask says it all. It may be longer than the keys (static caches).
        attention_mask = attention_mask[..., : key.shape[2]]
        causal = False
    else:
        if attention_mask is not None:
            attention_mask = attention_mask[:, None, None, :]
        if causal and sliding_window is not None:
            window = (sliding_window - 1, 0)
    out = flash_attn_func(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        dropout,
        scaling,
        causal,
        window,
        softcap or 0.0,
        sink=s_aux,
        bias=_bias(attention_mask, position_bias),
    )
    return out, None


def _bias(mask: Tensor | None, position_bias: Tensor | None) -> Tensor | None:
    """A mask and a position bias in one."""
    if position_bias is None or mask is None:
        return mask if position_bias is None else position_bias
    if mask.dtype == torch.bool:
        return position_bias.masked_fill(~mask, float("-inf"))
    return position_bias + mask
