"""Context parallelism of the model: attention over the sequence that cp ranks share.

All else in the model works on positions one by one, so it needs no change: each rank runs it on the
positions that it holds.
"""

from __future__ import annotations

from mcp_parallel.config import Config
from mcp_parallel.context.attention import ContextAttention
from mcp_parallel.context.split import Split
from mcp_parallel.model.llama import LlamaStage
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
    assert isinstance(model, LlamaStage), "checked: other families have cp = 1"
    model.attend_with(ContextAttention(split, group, mesh.layout.cp_attention))
