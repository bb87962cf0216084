"""What every model family is made of: pre-norm blocks, and the stages that a pipeline cuts it into.

The trainer knows a model by these classes and by its ``Family`` (``family.py``) alone.
Letters: B = batch, S' = this rank's part of the sequence, D = hidden size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mcp_parallel.layout import split_dim
from mcp_parallel.model.attend import Attend
from mcp_parallel.model.embedding import Mixture
from mcp_parallel.model.remat import Remat, recomputable, remember_if_recomputable


class NormAfterSum(nn.Module):
    """A norm that takes the addition before it along, in one pass over memory.

    ``norm(x, residual)`` is ``(norm(x + residual), x + residual)``, bit for bit.
    """


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(
        self, attn_norm: nn.Module, attn: nn.Module, ffn_norm: nn.Module, ffn: nn.Module
    ) -> None:
        super().__init__()
        self.remat = Remat()
        self.attn_norm = attn_norm
        self.attn = attn
        self.ffn_norm = ffn_norm
        self.ffn = ffn

    def forward(self, x: Tensor, *side: Any) -> Tensor:
        """``[B, S', D] -> [B, S', D]``; ``side`` is what attention takes beside activations."""
        run = partial(self._forward, side=side) if side else self._forward
        return self.remat(run, x, self.parameters())

    def _forward(self, x: Tensor, side: tuple[Any, ...] = ()) -> Tensor:
        attended = self.attn(recomputable(self.attn_norm, x), *side)
        if not isinstance(self.ffn_norm, NormAfterSum):
            x = x + attended
            del attended
            return x + self.ffn(recomputable(self.ffn_norm, x))
        normed, x = self.ffn_norm(attended, x)
        del attended  # nobody needs it again
        remember_if_recomputable(normed, self.ffn_norm, x)
        return x + self.ffn(normed)


class StageModel(nn.Module):
    """A contiguous range of a model's blocks, with its first and last layers where it has them.

    Parameter names carry the global block number, so they are the same in every layout. A family
    registers its modules in the order in which they run: gradients come in the reverse of it, and
    are sent as they come.
    """

    whole_input: frozenset[str] = frozenset()
    """Linear layers whose input every rank holds whole, under sequence parallelism too."""
    ties_embedding: bool = False
    """The head's weight is the parameter ``embed``; a stage that has the head alone holds an
    ``embed`` of its own, which it does not call."""
    mixture: Mixture | None = None
    """How the embedding, and a head tied to it, mix two formats; None: one, that of the table."""
    blocks: nn.ModuleDict
    """By global number, as text."""
    can_leave_head: bool = False
    """Logits are one bias-free linear layer ``head`` of what ``forward`` gives without it."""
    leaves_head: bool = False
    """``forward`` ends before the head, which the loss then applies without making logits."""

    causal: bool = True
    """A position sees none that come after it."""

    def share_sequence(self, attend: Attend, group: ProcessGroup) -> None:
        """Hold a part of each sequence from the first layer on.

        Args:
            attend: attention of every block, over the whole sequence.
            group: the ranks that share it.
        """
        del group
        for block in self.blocks.values():
            assert isinstance(block, Block)
            block.attn.attend = attend  # pyright: ignore[reportArgumentType]

    def run_blocks(self, x: Tensor, *side: Any) -> Tensor:
        """All blocks in order, ``side`` to each; ``[B, S', D] -> [B, S', D]``."""
        for block in self.blocks.values():
            x = block(x, *side)
        return x


class SharesSequence(nn.Module):
    """A layer outside of the blocks that itself goes between a whole sequence and a rank's part.

    Linear layers and tables leave that to ``mcp_kernels.nn``.
    """

    sequence_group: ProcessGroup | None = None
    """The ranks that share each sequence; None where every rank holds all of it."""

    def own_part(self, length: int) -> slice:
        """Which of ``length`` positions are this rank's; the last ranks may have none."""
        group = self.sequence_group
        if group is None:
            return slice(0, length)
        start, size = split_dim(length, group.size(), group.rank())
        return slice(start, start + size)


def stable_name(name: str) -> str:
    """What a parameter is called in checkpoints and in its initial values' seed.

    A matrix is called after its layer (``blocks.0.attn.wq``), whatever module holds it, so that
    runs and checkpoints outlive a change of modules.
    """
    return name if name.endswith("norm.weight") else name.removesuffix(".weight")
