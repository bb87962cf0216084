"""Model FLOP/s and MFU: the products that the model asks for, over what the hardware could do.

Work is counted as the planner counts it (``planner.flops``): six a weight and token, attention by
what is causal, nothing for what is computed again. No torch.
"""

from __future__ import annotations

from mcp_parallel.config import Config, ModelConfig
from mcp_parallel.division import stage_layers
from mcp_parallel.layout import Layout
from mcp_parallel.planner.flops import attention_flops, block_matrices, flops_per_token, head_matrix


def flops_per_sample(model: ModelConfig) -> float:
    """Forward and backward of one sample: a sequence, or an image."""
    return model.seq_len * flops_per_token(model)


def flops_per_step(config: Config) -> float:
    """Of the global batch, all ranks together."""
    return config.train.global_batch_size * flops_per_sample(config.model)


def stage_flops(config: Config, pp: int) -> float:
    """Of a sequence's forward and backward on the pipeline ranks ``pp`` of a text model."""
    layout, model = Layout.from_config(config.parallel), config.model
    ranges, mine = stage_layers(config), layout.stages_of(pp)
    each = 6 * block_matrices(model) + 3 * attention_flops(model)
    head = 6 * head_matrix(model) if layout.num_stages - 1 in mine else 0
    return model.seq_len * (sum(len(ranges[stage]) for stage in mine) * each + head)
