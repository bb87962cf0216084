"""The configuration of a run: frozen dataclasses, one table each. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]
Precision = Literal["fp64", "fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of the Llama-family model; a preset fills what is not given."""

    preset: str | None = "tiny"
    num_layers: int = 4
    hidden_size: int = 128
    num_heads: int = 8
    num_kv_heads: int = 4
    ffn_size: int = 352
    vocab_size: int = 256
    seq_len: int = 128
    tie_embeddings: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How the run is spread over ranks; world size = dp * tp * pp * cp."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1
    sequence_parallel: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The training run itself; nothing here depends on the layout."""

    steps: int = 200
    seed: int = 0
    global_batch_size: int = 16
    micro_batch_size: int = 4
    lr: float = 3e-3
    min_lr: float = 3e-4
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    optimizer: Literal["adamw", "onebit_adam"] = "adamw"
    freeze_step: int | None = None
    precision: Precision = "fp32"
    fp32_embedding_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where tokens come from; ``path`` None is the Python standard library's source text."""

    path: str | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """What is traded for memory."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    activation_compression: Literal["none", "bf16", "int8", "fp8"] = "none"
    offload: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When checkpoints are written and what ``train`` starts from."""

    every: int = 100
    keep: int = 2
    replicas: int = 1
    # "async" is a Python keyword, so the attribute has a trailing underscore; the key has none.
    async_: bool = False
    resume: str = "never"


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorConfig:
    """What is recorded while training."""

    every: int = 1
    tensorboard: bool = True
    activations: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole run: seven tables."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
