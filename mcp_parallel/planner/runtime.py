"""What the trainer that runs a layout does with memory and links. No torch.

The same layout takes different memory and time in different trainers. ``OURS`` is what a plan for
this package assumes, and ``memory.py`` is tested against its estimator; the others stand for the
systems whose published runs ``validate.py`` predicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mcp_parallel.config import RankOrder

Checkpointing = Literal["none", "selective", "full"]
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
"""From the fastest to the smallest."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Properties of a trainer."""

    name: str
    zero: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages it has without a pipeline."""
    pipeline_zero: tuple[int, ...] = (0, 1)
    """And with one."""
    has_context: bool = True
    """Whether sequences can be split over ranks."""
    has_interleaved: bool = True
    """Whether a pipeline rank can hold several stages."""
    has_uneven: bool = True
    """Whether stages can differ in their number of blocks."""
    tp_overlap: float = 0.0
    """Part of the tensor-parallel collectives that runs beside a matmul."""
    cp_overlaps: bool = False
    """Whether keys and values travel while attention works."""
    dp_overlaps: bool = True
    """Whether gradients are reduced while the last backward pass goes on, and so on."""
    saves_gathered: bool = True
    """Whether a block keeps its gathered inputs for the backward pass, or gathers them again."""
    keeps_messages: bool = False
    """Whether a pipeline's buffers live until the end of the step, as in torch's own runtime."""
    checkpointing: tuple[Checkpointing, ...] = CHECKPOINTING
    """Levels that it has, from the fastest to the smallest."""
    recomputes_some: bool = False
    """Whether full checkpointing can be of no more blocks than it takes to fit."""
    splits_logits: bool = True
    """Whether the loss goes through the vocabulary's logits a part at a time."""
    whole_gradient_bytes: Mapping[int, float] | None = None
    """ZeRO stage -> bytes an element of gradients that are kept whole between micro-batches; None
    is the activations' format."""
    shard_bytes: float = 16
    """Of an element that ZeRO shards: fp32 weight, gradient and two moments."""
    reduce_bytes: int = 4
    """Of a gradient on the wire."""
    fuses_casts: bool = False
    """Whether the largest value of what a norm or an activation makes is found as it is made, and
    a cast to fp8 writes the transposed copy too."""
    gathers_fp8: bool = False
    """Whether tensor-parallel ranks cast their part of an input to fp8 and gather it as that."""
    attention: tuple[float, float] = (0.8, 0.65)
    """Rate of attention's forward and backward pass over that of a large matmul. On an H100, whose
    matmuls reach 750 to 800 TFLOP/s in bf16, FlashAttention-3 reports 600 to 650 and 450 to 550
    with causal masks, head size 128 and 8k to 16k tokens; FlashAttention-2 370 to 400 and 320 to
    340 (Shah et al. 2024, figures 5 and 6)."""
    rank_orders: tuple[RankOrder, ...] = ("pp-dp-cp-tp",)
    """Orders of ranks it has, the axis whose ranks are farthest apart first."""


OURS = Runtime(name="mcp_parallel", rank_orders=("dp-pp-cp-tp", "pp-dp-cp-tp"))
