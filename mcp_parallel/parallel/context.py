"""Context parallelism of the model: attention over the sequence that cp ranks share.

Nearly all else in a model works on positions one by one: each rank runs it on the positions that it
holds. What does not (learned positions, a mean over positions) a family sees to itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcp_parallel.config import Config
from mcp_parallel.context.attention import ContextAttention
from mcp_parallel.context.split import Split
from mcp_parallel.model.loss import IGNORED
from mcp_parallel.model.stage import StageModel
from mcp_parallel.parallel.mesh import Mesh


def split_of(config: Config, mesh: Mesh) -> Split | None:
    """This rank's part of each sequence; None where it holds them whole."""
    if mesh.layout.cp == 1:
        return None
    return Split(mesh.layout.cp, mesh.coordinate.cp, config.model.seq_len)


def share_sequences(model: StageModel, config: Config, mesh: Mesh) -> None:
    """Let every block of ``model`` attend over sequences that the rank's cp group shares."""
    split, group = split_of(config, mesh), mesh.group("cp")
    if split is None or group is None:
        return
    attend = ContextAttention(split, group, mesh.layout.cp_attention, causal=model.causal)
    model.share_sequence(attend, group)


def own_part(split: Split | None, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What this rank trains on of a batch.

    Args:
        split: this rank's; None where it holds sequences whole.
        inputs: ``[rows, S, ...]``.
        targets: ``[rows, S]``, or ``[rows]`` where a sequence has one target: that counts on the
            first of the ranks that share it.
    """
    if split is None:
        return inputs, targets
    if targets.dim() > 1:
        return split.take(inputs), split.take(targets)
    return split.take(inputs), targets if split.rank == 0 else torch.full_like(targets, IGNORED)
