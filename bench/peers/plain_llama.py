"""A Llama-type model as a user of plain PyTorch writes it: what ours is compared with.

Letters: B = batch, S = sequence, D = hidden size, H = heads, K = head size, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class Shape:
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int
    seq_len: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotation RoPE of [B, S, H, K] by tables [S, 1, K / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.hidden_size // shape.num_heads
        self.is_grouped = shape.num_kv_heads != shape.num_heads
        kv_size = shape.num_kv_heads * self.head_size
        self.wq = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.wk = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.wv = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.wo = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # -1: under tensor parallelism a rank has its share of the heads.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_size)) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, H, S, K]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.is_grouped)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.w3 = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.w2 = nn.Linear(shape.ffn_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.attn = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.ffn = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class PlainLlama(nn.Module):
    """Tokens [B, S] in, logits [B, S, V] out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        head_size = shape.hidden_size // shape.num_heads
        exponent = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
        angle = torch.outer(
            torch.arange(shape.seq_len, dtype=torch.float64), shape.rope_theta**-exponent
        )
        self.register_buffer("cos", angle.cos().float()[:, None], persistent=False)
        self.register_buffer("sin", angle.sin().float()[:, None], persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))
