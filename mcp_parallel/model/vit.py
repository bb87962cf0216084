"""A contiguous range of a vision transformer: patches, learned positions, LayerNorm, GELU, mean.

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021). The class is read from the mean
over positions in place of a class token, which trains as well or better (Beyer et al., "Better
plain ViT baselines for ImageNet-1k", 2022) and keeps the sequence the patches alone.
Letters: B = batch, S = patches (S' = this rank's part of them between blocks under sequence
parallelism), P = values of a patch, D = hidden size, H = heads, K = head size, F = feed-forward
size, C = classes. H, F and C are this rank's share under tensor parallelism.

As ``llama.py`` it holds only the model; ``parallel/tensor.py`` changes its layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import gelu, linear

from mcp_kernels import all_reduce, copy_to_group
from mcp_kernels.nn import apply_linears
from mcp_parallel.config import ModelConfig
from mcp_parallel.model.attend import Attend, WholeSequence
from mcp_parallel.model.init import onto_residual
from mcp_parallel.model.remat import recomputable
from mcp_parallel.model.stage import Block, SharesSequence, StageModel


class PatchEmbedding(SharesSequence):
    """A linear layer on each patch, plus its position's learned vector.

    Its weights are small and whole on every rank, which needs no communication: under sequence
    parallelism a rank embeds its own patches alone.
    """

    starts: tuple[int, ...] = (0,)
    """Position of the first patch of each of the equal chunks that this rank is given."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size, patch_values(config)))
        self.bias = nn.Parameter(torch.empty(config.hidden_size))
        self.positions = nn.Parameter(torch.empty(config.seq_len, config.hidden_size))

    def forward(self, patches: Tensor) -> Tensor:
        """``[B, S, P] -> [B, S', D]``."""
        here = self.own_part(patches.shape[1])
        x = patches[:, here].to(self.weight.dtype)
        return linear(x, self.weight, self.bias) + self._own_positions(patches.shape[1])[here]

    def _own_positions(self, length: int) -> Tensor:
        """Vectors of the patches that this rank is given, in their order."""
        chunk = length // len(self.starts)
        parts = [self.positions[start : start + chunk] for start in self.starts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Attention(nn.Module):
    """Attention of every patch to every other; ``[B, S', D] -> [B, S', D]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_heads
        self.attend: Attend = WholeSequence(causal=False)
        kv_size = config.num_kv_heads * self.head_size
        self.wq = nn.Linear(config.hidden_size, config.hidden_size)
        # A bias of the keys adds the same to every score of a query, which softmax takes out again:
        # its gradient is nothing but rounding, as in BEiT and Whisper it is left out.
        self.wk = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.wv = nn.Linear(config.hidden_size, kv_size)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over all patches with this rank's heads."""
        q, k, v = apply_linears(x, [self.wq, self.wk, self.wv])  # [B, S, H * K] each
        q, k, v = (t.unflatten(-1, (-1, self.head_size)) for t in (q, k, v))  # [B, S, H, K]
        return self.wo(self.attend(q, k, v).flatten(2))


class FeedForward(nn.Module):
    """``w2 @ gelu(w1 @ x)``; ``[B, S', D] -> [B, S', D]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.ffn_size)
        self.w2 = nn.Linear(config.ffn_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Apply with this rank's columns."""
        return self.w2(recomputable(gelu, self.w1(x)))


class MeanPool(SharesSequence):
    """Mean over all positions, the same on every rank; ``[B, S', D] -> [B, D]``."""

    context_group: ProcessGroup | None = None
    """The ranks that share each sequence from the first layer on; None where there are none."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.seq_len = config.seq_len

    def forward(self, x: Tensor) -> Tensor:
        """Sum this rank's part, and then the ranks' sums."""
        mean = x.sum(1) / self.seq_len
        if self.sequence_group is not None:
            mean = all_reduce(mean, group=self.sequence_group)
        if self.context_group is None:
            return mean
        # Each of these ranks has a loss of its own, and the mean's gradient is the sum of theirs.
        mean = all_reduce(mean, group=self.context_group)
        return copy_to_group(mean, group=self.context_group)


def _norm(config: ModelConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)


def _block(config: ModelConfig) -> Block:
    return Block(_norm(config), Attention(config), _norm(config), FeedForward(config))


class VitStage(StageModel):
    """Blocks ``layers`` of the model, with the patch embedding and the head where it has them."""

    whole_input = frozenset({"head"})
    causal = False

    def __init__(
        self, config: ModelConfig, layers: range, *, has_embedding: bool, has_head: bool
    ) -> None:
        super().__init__()
        self.patches = PatchEmbedding(config) if has_embedding else None
        self.blocks = nn.ModuleDict({str(layer): _block(config) for layer in layers})
        self.norm = _norm(config) if has_head else None
        self.pool = MeanPool(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size) if has_head else None

    def share_sequence(self, attend: Attend, group: ProcessGroup) -> None:
        """See ``StageModel.share_sequence``."""
        super().share_sequence(attend, group)
        self.pool.context_group = group
        if self.patches is not None:
            self.patches.starts = attend.starts

    def forward(self, x: Tensor) -> Tensor:
        """Patches ``[B, S, P]`` (first stage) or activations ``[B, S', D]`` in; logits ``[B, C]``
        (last stage) or activations out.
        """  # noqa: D205
        if self.patches is not None:
            x = self.patches(x)
        x = self.run_blocks(x)
        if self.norm is None or self.head is None:
            return x
        return self.head(self.pool(self.norm(x)))


def parameter_std(name: str, config: ModelConfig) -> float | None:
    """Standard deviation of a parameter; None for ones (norm weights), 0 for zeros (biases).

    Layers keep the variance of what they are given, 1 / sqrt(fan in) (LeCun et al., "Efficient
    BackProp", 1998), those onto the residual stream scaled as in Llama. GPT-2's 0.02 is that of a
    width of 2500; at the widths of small images all patches would start alike. Positions start at
    half of what a patch of normalised pixels gives, so that the first layers see both. The head
    starts small: the first loss is that of no idea, log C.
    """
    if name.endswith("norm.weight"):
        return None
    if name.endswith(".bias"):
        return 0.0
    if name == "patches.positions":
        return 0.5
    if name == "head":
        return 0.02
    fan_in = config.ffn_size if name.endswith(".w2") else config.hidden_size
    if name == "patches":
        fan_in = patch_values(config)
    std = 1 / math.sqrt(fan_in)
    return onto_residual(std, config) if name.endswith((".wo", ".w2")) else std


def patch_values(config: ModelConfig) -> int:
    """Numbers in a patch."""
    assert config.patch_size is not None
    assert config.channels is not None
    return config.patch_size**2 * config.channels
