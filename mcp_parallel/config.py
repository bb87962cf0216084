"""The configuration of a run: frozen dataclasses, one table each. No torch is imported here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mcp_parallel import config_defaults, config_schema, config_text
from mcp_parallel.config_amp import (
    DEFAULT_PRECISION,
    AmpConfig,
    Precision,
    forget_precision,
    with_amp,
)
from mcp_parallel.errors import ConfigError

CpAttention = Literal["ring", "all_gather"]
RankOrder = Literal["dp-pp-cp-tp", "pp-dp-cp-tp"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]
FamilyName = Literal["llama", "vit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Family and shape of the model; a preset fills what is not given.

    The preset is applied when a config is loaded (``Config.from_mapping`` and its siblings), never
    by this constructor, which takes each field as it stands.
    """

    preset: str | None = "tiny"
    """A name of ``presets.PRESETS``, or null (none will do) when every size is given."""
    family: FamilyName = "llama"
    """llama reads text, vit classifies images."""
    num_layers: int = 4
    """Transformer blocks, at least one for each pipeline stage."""
    hidden_size: int = 128
    """Width of the residual stream, an even multiple of num_heads."""
    num_heads: int = 8
    """Query heads, a multiple of num_kv_heads and of tp."""
    num_kv_heads: int = 4
    """Key and value heads, a multiple of tp."""
    ffn_size: int = 352
    """Inner width of SwiGLU, or of GELU in vit; any, divisible by tp or not. With zero each tp rank
    needs a part of it."""
    vocab_size: int = 256
    """Rows of the embedding, at least tp; 256 or more for text read as bytes. With vit it follows
    from num_classes."""
    seq_len: int = 128
    """Tokens of a sample; any number, whatever tp is. With vit it follows from image_size and
    patch_size."""
    tie_embeddings: bool = False
    """The head uses the embedding's weight."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm, to the variance in LayerNorm."""
    residual_init_scale: float | None = None
    """Factor of the initial standard deviation (0.02 in llama) of the projections onto the residual
    stream (wo and w2); null is 1 / sqrt(2 num_layers), which keeps its variance from growing with
    depth. 0 starts every block as the identity."""
    image_size: int | None = None
    """Pixels along a side of vit's square images, a multiple of patch_size; null with llama."""
    patch_size: int | None = None
    """Pixels along a side of vit's square patches; null with llama."""
    channels: int | None = None
    """Values of a pixel, 1 for gray images; null with llama."""
    num_classes: int | None = None
    """Classes that vit tells apart; null with llama."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How the run is spread over ranks; world size = dp * tp * pp * cp."""

    auto: bool = False
    """The planner chooses all degrees, and schedule, virtual_stages, zero, rank_order,
    train.micro_batch_size and, from the given level up, memory.activation_checkpointing, for the
    ranks there are. Writing ``parallel: auto`` is the same. What it chose is recorded in the run
    folder, and stands when the run is resumed on as many ranks."""
    ranks: int | None = None
    """Ranks that auto spreads the run over; null is torchrun's number, else the machine's GPUs, or
    its cores where it has none. null without auto."""
    dp: int = 1
    """Data-parallel replicas."""
    tp: int = 1
    """Ranks that share each layer's heads and columns."""
    pp: int = 1
    """Ranks that the layers are spread over."""
    cp: int = 1
    """Ranks that share each sequence, of a multiple of 2 * cp positions."""
    cp_attention: CpAttention = "all_gather"
    """How keys and values reach the ranks that share a sequence: all of them at once, or block by
    block round a ring while each works, which holds less of them; no effect with cp = 1."""
    zero: int = 0
    """What dp * cp ranks shard: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters.
    With dp * cp / dp_replicate = 1 there is nothing to shard and each level runs as 0."""
    dp_replicate: int = 1
    """Groups of dp * cp / dp_replicate ranks, each of which holds all that zero shards (HSDP); more
    than 1 keeps ZeRO's messages within a group, and needs zero 1 to 3 and a divisor of dp."""
    schedule: Schedule = "1f1b"
    """Order of pipeline work; no effect with pp = 1."""
    virtual_stages: int = 1
    """Stages on each pipeline rank: 2 or more with schedule interleaved, any number with
    zero_bubble, else 1. zbv and dualpipev always have 2 and take either 1 or 2 here."""
    sequence_parallel: bool = True
    """Shard the norms' activations along the sequence over tp, which need not divide it; no effect
    with tp = 1."""
    rank_order: RankOrder = "dp-pp-cp-tp"
    """How ranks are numbered, the axis whose ranks are farthest apart first: replicas apart, or
    stages apart. tp ranks are neighbours in both. Losses, gradients and checkpoints are the same in
    both."""
    link_domain: int = 0
    """Consecutive ranks that a fast link joins (NVLink, shared memory), within which tp groups must
    stay; 0 is the ranks of one host."""
    stage_split: str = "count"
    """Blocks of each pipeline stage: count (alike, earlier stages take what is left over), model
    (the costliest rank's work is least, embedding, head and loss counted by their arithmetic),
    measured (the same by times that the ranks take at the start; a run folder keeps the split),
    remeasured (measured anew even so), or a number a stage: "8,8,7,7"; no effect with pp = 1."""
    dp_shares: str | None = None
    """Shares of the global batch by data-parallel rank: "3,1" has the first train on three quarters
    of it, in three times the micro-batches; measured and remeasured follow the ranks' speeds, as in
    stage_split; null is equal shares. Unequal ones need zero 0 or 1 and optimizer adamw."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The training run itself; nothing here depends on the layout."""

    steps: int = 200
    """Optimizer steps in the whole run."""
    seed: int = 0
    """Seed of the initial parameters."""
    global_batch_size: int = 16
    """Samples of a step over all ranks, a multiple of dp * micro_batch_size."""
    micro_batch_size: int = 4
    """Samples of one forward pass on one rank."""
    lr: float = 3e-3
    """Peak learning rate, reached after the warm-up."""
    min_lr: float = 3e-4
    """Learning rate at the end of the cosine, at most lr; lr / 10 when a file gives lr alone."""
    warmup_steps: int = 20
    """Steps of linear warm-up, at most steps; steps // 10, up to 20, when a file gives none."""
    weight_decay: float = 0.1
    """Decoupled weight decay; 0 turns it off."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    optimizer: Literal["adamw", "onebit_adam"] = "adamw"
    """Update rule."""
    freeze_step: int | None = None
    """Steps before onebit_adam compresses, above train.steps for never; null watches the variance.
    null with adamw."""
    precision: Precision = DEFAULT_PRECISION
    """Number format of activations and of the weights that they meet. With bf16 and fp16 the master
    weights, the optimizer's state, sums of gradients, norms, softmax and loss stay fp32; fp16
    scales the loss (amp.grad_scaler). Set by amp when amp.enabled."""
    fp32_embedding_steps: int = 0
    """First steps in which the embedding, and a head tied to it, are computed in fp32 under bf16 or
    fp16; no effect with fp32 and fp64."""
    fp32_embedding_switch_steps: int = 0
    """Steps after those in which both are computed, with a weight for fp32 that falls linearly from
    1 to 0; 0 switches at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where samples come from; ``path`` None is the family's own data.

    That is the Python standard library's source text for llama and ``digits`` for vit.
    """

    path: str | None = None
    """A text file, a folder of them (both read as bytes), or a token file ``.bin``, which may be a
    URL (``s3://``, ``hdfs://``, ``memory://``); with vit ``digits``, which null is too."""
    mixture: str | None = None
    """Several sources in place of path, each after its share of the samples:
    ``0.7 web/tokens.bin, 0.3 code/tokens.bin``. Shares have at most 4 decimals and sum to 1."""
    seed: int = 0
    """Seed of the order of samples, and of the order in which a mixture takes its sources."""
    validation_share: float = 0.0
    """Part of the documents, the last ones of each source, that is kept out of training and
    measured instead (see monitor.validate_every); text only."""
    validation_path: str | None = None
    """Text to measure in place of a share of the training data; named as path is."""
    verify: Literal["read", "all", "size"] = "read"
    """How a token file is compared with the checksums of its index.json: each block when a process
    first reads it, every byte before training starts, or its size alone."""
    document_masking: bool = False
    """Attention stays within documents: files of text, and what document_separator ends. Positions
    and targets go on through them."""
    document_separator: int | None = None
    """Token that ends a document and belongs to it; needed where path is a token file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """What is traded for memory."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again: nothing, norms and SwiGLU, or each block."""
    activation_compression: Literal["none", "bf16", "int8", "fp8"] = "none"
    """Format in which a block's activations wait for the backward pass. An element x of it loses at
    most 2^-8 |x| with bf16, 1/254 of the largest of 256 neighbours with int8, 2^-4 |x| with fp8
    (E4M3). The forward pass and log-sum-exps keep their bits; parameters are never packed."""
    offload: bool = False
    """Keep optimizer state one tier of memory below the parameters, bit for bit the same. On a GPU
    that is pinned host memory, where the blocks' saved activations go too. On a CPU it is the disk:
    moments, and the fp32 values of 16-bit weights without ``parallel.zero``, are mapped from
    nameless files on the disk of the run folder, so that the memory they take can be dropped when
    it is needed; saved activations stay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When checkpoints are written and what ``train`` starts from."""

    every: int = 100
    """Steps between checkpoints; the last step always writes one, and is the only one with 0."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    replicas: int = 1
    """Copies of each shard."""
    # "async" is a Python keyword, so the attribute has a trailing underscore; the key has none.
    async_: bool = False
    """Write while training goes on."""
    resume: str = "never"
    """never, auto (the newest checkpoint of the run folder that verifies), or a path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorConfig:
    """What is recorded while training."""

    every: int = 1
    """Steps between two lines of metrics."""
    validate_every: int = 100
    """Steps between two passes over the data's validation part, where it has one; the last step
    always makes one, and is the only one with 0."""
    validate_batches: int = 50
    """Most batches of such a pass over text; which samples they hold is the same every time."""
    tensorboard: bool = True
    """Also write TensorBoard events."""
    activations: bool = True
    """Record statistics of activations in the steps that health_every divides."""
    health_every: int = 20
    """Steps between two looks at gradients, updates and activations of each layer and at each
    rank's memory; 0 never looks."""
    step_memory: bool = False
    """Track what one step allocates, in the first step that is looked into, which a profiler then
    makes about a second longer; on CPUs."""
    straggler_factor: float = 1.5
    """A rank whose own work takes more than this times its peers' median is named."""
    straggler_steps: int = 20
    """Steps over which that is judged, by each rank's median."""
    peak_tflops: float | None = None
    """What one rank's hardware can do at most, for MFU; null knows common GPUs by their name and
    measures a CPU by a matmul at the start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole run: eight tables.

    Loading takes care of types, names and the preset; ``mcp_parallel.check`` says whether the
    values can run together.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    amp: AmpConfig = field(default_factory=AmpConfig)
    data: DataConfig = field(default_factory=DataConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Config:
        """The config that nested plain values describe.

        Args:
            values: table -> key -> value, keys as in a file (``checkpoint.async``). Tables and
                keys that are absent keep their defaults; the preset fills model sizes, and may have
                a recipe that fills other tables.

        Raises:
            ConfigError: unknown tables or keys, wrong types, an unknown preset; all at once.
        """
        return _build(values, [])

    @classmethod
    def from_file(cls, path: str | Path) -> Config:
        """The config in a ``.yaml``, ``.yml`` or ``.toml`` file.

        Raises:
            ConfigError: as ``from_mapping``, and when the file cannot be read or parsed.
        """
        return cls.from_mapping(config_text.read_config_file(path))

    def with_overrides(self, overrides: Sequence[str]) -> Config:
        """This config with some keys replaced.

        Args:
            overrides: ``table.key=value`` each, ``train.lr=3e-4``; a later one wins. A new
                ``model.preset`` replaces what came from the old preset (sizes, and values of other
                tables from its recipe) and keeps what differs from it: that was given by hand.
                Likewise a new ``train.lr`` or
                ``train.steps`` moves ``min_lr`` or ``warmup_steps`` where it had its default.

        Raises:
            ConfigError: as ``from_mapping``.
        """
        changes, problems = config_schema.parse_overrides(overrides, TABLES)
        values = config_defaults.forget(self.to_mapping(), changes, Config().to_mapping())
        if {"enabled", "dtype"} & set(changes.get("amp", {})):
            forget_precision(values)
        return _build(config_schema.merged(values, changes), problems)

    def to_mapping(self) -> dict[str, dict[str, Any]]:
        """Plain values, table by table, that ``from_mapping`` turns back into this config."""
        return config_schema.plain(self)

    def to_yaml(self) -> str:
        """ASCII YAML text that ``from_file`` reads back into this config."""
        return config_text.dump_yaml(self.to_mapping())

    def fingerprint(self) -> str:
        """SHA-256 of what makes a checkpoint another model: its shape, whatever the layout.

        The preset's name, ``seq_len`` and the scale of initial values are left out: none changes a
        parameter's place or the function that the parameters compute (the length of vit's sequence
        follows from the image's and the patch's sizes). So are sizes that the family does not have,
        and llama's own name, which older checkpoints lack.
        """
        items = config_schema.table_items(self.model)
        left_out = {"preset", "seq_len", "residual_init_scale"}
        identity = {k: v for k, v in items if v is not None and k not in left_out}
        if self.model.family == "llama":
            del identity["family"]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


TABLES: Mapping[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "train": TrainConfig,
    "amp": AmpConfig,
    "data": DataConfig,
    "memory": MemoryConfig,
    "checkpoint": CheckpointConfig,
    "monitor": MonitorConfig,
}


def _build(values: Mapping[str, Any], problems: list[str]) -> Config:
    """The config of ``values``, or one ConfigError with ``problems`` and all that are found."""
    problems = list(problems)
    tables: dict[str, Any] = {}
    for name, given in values.items():
        if name not in TABLES:
            problems.append(config_schema.unknown_key("", str(name), TABLES))
        elif name == "parallel" and given == "auto":
            tables[name] = {"auto": True}
        elif given is None:
            continue  # a table whose keys are all commented out
        elif not isinstance(given, Mapping):
            problems.append(config_schema.not_a_table(name, TABLES[name], given))
        else:
            tables[name] = given
    tables = config_defaults.fill(tables, problems)
    if "amp" in tables:
        tables["train"] = with_amp(tables.get("train", {}), tables["amp"], problems)
    built: dict[str, Any] = {}
    for name, given in tables.items():
        built[name], found = config_schema.build(name, TABLES[name], given, TABLES)
        problems += found
    if problems:
        raise ConfigError(problems)
    return Config(**built)
