"""A contiguous range of a Llama-family model: RMSNorm, RoPE, SwiGLU, grouped-query attention.

Source: Touvron et al., "LLaMA" (2023); RoPE: Su et al., "RoFormer" (2021), half-rotation form.
Letters: B = batch, S = sequence (S' = this rank's part of it between blocks under sequence
parallelism), D = hidden size, H = heads, K = head size, F = feed-forward size, V = vocabulary. H,
F and V are this rank's share under tensor parallelism.

This file holds only the model, in plain linear layers and one table. Tensor parallelism is applied
from outside (``parallel/tensor.py``) and changes those layers, not this code; layers on one input
are called together, so that it is gathered once for all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mcp_kernels import add_rms_norm, rms_norm, swiglu
from mcp_kernels.nn import apply_linears
from mcp_parallel.config import ModelConfig
from mcp_parallel.model.attend import Attend, WholeSequence
from mcp_parallel.model.embedding import embed, embed_mixed
from mcp_parallel.model.remat import recomputable
from mcp_parallel.model.rotary import rotate
from mcp_parallel.model.stage import Block, NormAfterSum, StageModel


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions; ``[B, S', D] -> [B, S', D]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_heads
        self.rope_theta = config.rope_theta
        self.attend: Attend = WholeSequence()
        kv_size = config.num_kv_heads * self.head_size
        self.wq = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.wk = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.wv = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, documents: Any = ()) -> Tensor:
        """Attend over the whole sequence, or the documents in it, with this rank's heads."""
        q, k, v = apply_linears(x, [self.wq, self.wk, self.wv])  # [B, S, H * K] each
        q, k, v = (t.unflatten(-1, (-1, self.head_size)) for t in (q, k, v))  # [B, S, H, K]
        q, k = rotate(q, k, self.rope_theta, self.attend.starts)
        out = self.attend(q, k, v, documents)
        return self.wo(out.flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: ``w2 @ (silu(w1 @ x) * (w3 @ x))``; ``[B, S', D] -> [B, S', D]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.w2 = nn.Linear(config.ffn_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the gated projection with this rank's columns."""
        gate, up = apply_linears(x, [self.w1, self.w3])  # [B, S, F]
        return self.w2(recomputable(swiglu, gate, up))


class RMSNorm(NormAfterSum):
    """Root-mean-square norm over the hidden dim (Zhang and Sennrich, 2019)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Normalise each position; shape unchanged. See ``NormAfterSum``."""
        weight = self.weight.to(x.dtype)
        if residual is None:
            return rms_norm(x, weight, self.eps)
        return add_rms_norm(x, residual, weight, self.eps)


def _block(config: ModelConfig) -> Block:
    return Block(RMSNorm(config), Attention(config), RMSNorm(config), FeedForward(config))


class LlamaStage(StageModel):
    """Blocks ``layers`` of the model, with the embedding and the head where this stage has them.

    With tied embeddings ``head`` and ``embed`` share one parameter, called after ``embed``; a stage
    that has the head alone holds an ``embed`` that it does not call.
    """

    can_leave_head = True

    def __init__(
        self, config: ModelConfig, layers: range, *, has_embedding: bool, has_head: bool
    ) -> None:
        super().__init__()
        self.attend: Attend = WholeSequence()
        self.has_embedding = has_embedding
        self.ties_embedding = config.tie_embeddings
        is_tied = has_head and config.tie_embeddings
        sizes = (config.vocab_size, config.hidden_size)
        self.embed = nn.Embedding(*sizes) if has_embedding or is_tied else None
        self.blocks = nn.ModuleDict({str(layer): _block(config) for layer in layers})
        self.norm = RMSNorm(config) if has_head else None
        self.head = nn.Linear(sizes[1], sizes[0], bias=False) if has_head else None
        if is_tied:
            assert self.embed is not None
            assert self.head is not None
            self.head.weight = self.embed.weight

    def share_sequence(self, attend: Attend, group: ProcessGroup) -> None:
        """See ``StageModel.share_sequence``."""
        super().share_sequence(attend, group)
        self.attend = attend

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """This rank's part of the sequence through the stage.

        Args:
            x: tokens ``[B, S]`` (first stage) or activations ``[B, S', D]``.
            documents: ``[B, whole sequence]`` int64, on any device, where each position's document
                begins: then attention stays within documents.

        Returns:
            Logits ``[B, S, V]`` (last stage) or activations, normalised where ``leaves_head``.
        """
        if self.has_embedding:
            assert self.embed is not None
            if self.mixture is None:
                x = embed(self.embed, x)
            else:
                x = embed_mixed(self.embed, x, self.mixture)
        side = () if documents is None else (self.attend.plan(documents, x.device),)
        x = self.run_blocks(x, *side)
        if self.norm is None or self.head is None:
            return x
        x = self.norm(x)
        return x if self.leaves_head else self.head(x.to(self.head.weight.dtype))
