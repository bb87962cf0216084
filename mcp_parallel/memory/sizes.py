"""Numbers of elements on one rank: what the replay of a step counts in. No torch.

The rank is the first of its dp, cp and tp groups, which hold the largest parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcp_parallel.config import Config
from mcp_parallel.division import stage_layers
from mcp_parallel.layout import Layout, split_dim

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Sizes:
    """One rank's shapes, in elements, and the bytes of each kind of element."""

    samples: int
    """Of a micro-batch."""
    tokens: int
    """Positions of a micro-batch on this rank, where a layer sees the whole sequence."""
    cut_tokens: int
    """Positions between layers: this rank's part under sequence parallelism."""
    hidden: int
    heads: int
    head_size: int
    kv_width: int
    """Features of the keys on this rank; of the values as well."""
    ffn: int
    vocab: int
    """Of the head's outputs on this rank."""
    seq_len: int
    """Positions of a whole sample."""
    patch_values: int
    """Numbers in a patch of an image; 0 with text."""
    gathers_from: int
    """Ranks whose keys and values attention has whole: those of cp, where it is by all-gather."""
    compute_bytes: int
    """Of an activation."""
    state_bytes: int
    """Of a weight as the optimizer sees it, a gradient sum and a moment."""
    tp: int
    sequence_parallel: bool

    @classmethod
    def of(cls, config: Config) -> Sizes:
        """The sizes of a checked config."""
        model, parallel, train = config.model, config.parallel, config.train
        tp = parallel.tp
        seq_len = -(-model.seq_len // parallel.cp)
        cut = parallel.sequence_parallel and tp > 1
        head_size = model.hidden_size // model.num_heads
        each = BYTES[train.precision]
        return cls(
            samples=train.micro_batch_size,
            tokens=train.micro_batch_size * seq_len,
            cut_tokens=train.micro_batch_size * (-(-seq_len // tp) if cut else seq_len),
            hidden=model.hidden_size,
            heads=model.num_heads // tp,
            head_size=head_size,
            kv_width=model.num_kv_heads // tp * head_size,
            ffn=split_dim(model.ffn_size, tp, 0)[1],
            vocab=split_dim(model.vocab_size, tp, 0)[1],
            seq_len=model.seq_len,
            patch_values=(model.patch_size or 0) ** 2 * (model.channels or 0),
            gathers_from=parallel.cp if parallel.cp_attention == "all_gather" else 1,
            compute_bytes=each,
            state_bytes=max(4, each),
            tp=tp,
            sequence_parallel=cut,
        )

    @property
    def q_width(self) -> int:
        """Features of the queries on this rank."""
        return self.heads * self.head_size


@dataclass(frozen=True)
class StageSizes:
    """One pipeline stage of a rank."""

    index: int
    num_layers: int
    has_embedding: bool
    has_head: bool


def stages_of(config: Config, pp_rank: int) -> list[StageSizes]:
    """The stages of pipeline rank ``pp_rank``, in the order of the model."""
    layout = Layout.from_config(config.parallel)
    ranges = stage_layers(config)
    return [
        StageSizes(index, len(ranges[index]), index == 0, index == layout.num_stages - 1)
        for index in layout.stages_of(pp_rank)
    ]
