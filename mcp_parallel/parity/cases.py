"""The matrix: layouts and variations that must train alike. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mcp_parallel.config import Config
from mcp_parallel.config_amp import AmpConfig, GradScalerConfig
from mcp_parallel.layout import Layout

GLOBAL_BATCH = 8
STEPS = 5
# Steps before the checkpoint of a case that goes on at another layout: Adam's moments and the
# position in the data are then what they are in the middle of a run.
STEPS_BEFORE_RESUME = 3
# A common peak rate. Adam moves an element by about the rate whatever its gradient's size, so
# elements whose gradient is rounding noise carry noise of this size into the next step; at the
# tiny preset's own 3e-3 that noise, not the layout, decides the fifth float32 norm.
LEARNING_RATE = 3e-4
# Most ranks that a case needs.
WORLD_SIZE = 8
# What a case is run in: formats that leave a real difference no room, or 16 bits.
EXACT = ("fp64", "fp32")
NARROW = ("bf16", "fp16")
PRECISIONS = (*EXACT, *NARROW)


@dataclass(frozen=True)
class Variation:
    """What is trained, apart from the layout; each has a one-process run to be compared with."""

    name: str = "plain"
    preset: str | None = None
    """A model of its own, with its own data; None varies the one that the matrix is run for."""
    tie_embeddings: bool = False
    extra_vocab: int = 0
    num_layers: int | None = None
    extra_positions: int = 0
    padding: bool = False
    """Row r of the global batch loses the targets after a length of its own."""
    clip_norm: float = 0.0
    optimizer: Literal["adamw", "onebit_adam"] = "adamw"
    """1-bit Adam before its switch, compared with one process of AdamW."""
    document_separator: int | None = None
    """A byte that ends documents, which attention then stays within."""
    loss_scale: tuple[float, int] | None = None
    """(first scale, growth interval) of loss scaling; None is off, and always so in the run that is
    compared with, but for fp16."""
    fp32_embedding: tuple[int, int] = (0, 0)
    """Steps of the embedding in fp32, and of its switch to 16 bits."""
    offload: bool = False
    """Optimizer state a tier below; never in the run that is compared with."""


PLAIN = Variation()
TIED = Variation("tied", tie_embeddings=True)
ODD_VOCAB = Variation("odd-vocab", extra_vocab=1)
FIVE_LAYERS = Variation("5-layers", num_layers=5)
SIX_LAYERS = Variation("6-layers", num_layers=6)
SEVEN_LAYERS = Variation("7-layers", num_layers=7)
VIT = Variation("vit", preset="vit-digits")
VIT_PADDED = Variation("vit-padded", preset="vit-digits", padding=True)
VIT_CLIPPED = Variation("vit-clipped", preset="vit-digits", clip_norm=0.05)
# Sequences that tp does not divide: 127 positions; 5, of which a fourth rank gets none.
ODD_LENGTH = Variation("odd-length", extra_positions=-1)
FIVE_POSITIONS = Variation("5-positions", extra_positions=-123)
PADDED = Variation("padded", padding=True)
# Far below any gradient norm seen at initialisation, so that every step is clipped.
CLIPPED = Variation("clipped", clip_norm=0.05)
TIED_CLIPPED = Variation("tied-clipped", tie_embeddings=True, clip_norm=0.05)
# Every line of text is a document: a few positions up to a whole sample.
DOCUMENTS = Variation("documents", document_separator=ord("\n"))
ONEBIT = Variation("onebit", optimizer="onebit_adam")
ONEBIT_TIED = Variation("onebit-tied", tie_embeddings=True, optimizer="onebit_adam", clip_norm=0.05)
# Scales that change within the five steps, after the second and the fourth.
SCALED = Variation("scaled", loss_scale=(1024.0, 2))
OFFLOADED = replace(SCALED, offload=True)
SCALED_TIED = Variation("scaled-tied", tie_embeddings=True, clip_norm=0.05, loss_scale=(1024.0, 2))
# Two steps in fp32, two mixed, one in 16 bits.
FP32_EMBEDDING = replace(SCALED, name="fp32-embedding", fp32_embedding=(2, 2))
FP32_EMBEDDING_TIED = replace(FP32_EMBEDDING, name="fp32-embedding-tied", tie_embeddings=True)


@dataclass(frozen=True)
class Case:
    """A layout, what it trains, and in how many micro-batches a replica takes its rows."""

    name: str
    layout: Layout
    variation: Variation = PLAIN
    microbatches: int = 1
    precisions: tuple[str, ...] = EXACT
    then: Layout | None = None
    """Where the run goes on from a checkpoint; the whole of it is compared, before and after."""
    then_microbatches: int = 1

    def legs(self) -> list[tuple[Case, range]]:
        """The runs that this case consists of, and the steps of each."""
        if self.then is None:
            return [(self, range(STEPS))]
        start = replace(self, then=None)
        after = replace(start, layout=self.then, microbatches=self.then_microbatches)
        return [
            (start, range(STEPS_BEFORE_RESUME)),
            (after, range(STEPS_BEFORE_RESUME, STEPS)),
        ]

    def configure(self, base: Config, precision: str) -> Config:
        """``base`` with this case's model variation, layout and batch."""
        v, layout = self.variation, self.layout
        base = base if v.preset is None else preset_config(v.preset)
        model = replace(
            base.model,
            tie_embeddings=v.tie_embeddings,
            vocab_size=base.model.vocab_size + v.extra_vocab,
            num_layers=v.num_layers or base.model.num_layers,
            seq_len=base.model.seq_len + v.extra_positions,
        )
        parallel = replace(
            base.parallel,
            dp=layout.dp,
            tp=layout.tp,
            pp=layout.pp,
            cp=layout.cp,
            zero=layout.zero,
            schedule=layout.schedule,
            virtual_stages=layout.virtual_stages,
            sequence_parallel=layout.sequence_parallel,
            dp_replicate=layout.dp_replicate,
            cp_attention=layout.cp_attention,
            rank_order=layout.rank_order,
            stage_split=layout.stage_split,
            dp_shares=layout.dp_shares,
        )
        train = replace(
            base.train,
            steps=STEPS,
            global_batch_size=GLOBAL_BATCH,
            micro_batch_size=GLOBAL_BATCH // layout.dp // self.microbatches,
            lr=LEARNING_RATE,
            min_lr=LEARNING_RATE / 10,
            warmup_steps=1,
            clip_norm=v.clip_norm,
            optimizer=v.optimizer,
            freeze_step=STEPS + 1 if v.optimizer == "onebit_adam" else None,
            precision=precision,
            fp32_embedding_steps=v.fp32_embedding[0],
            fp32_embedding_switch_steps=v.fp32_embedding[1],
        )
        scale, interval = v.loss_scale or (65536.0, 2000)
        scaler = GradScalerConfig(
            enabled=v.loss_scale is not None, init_scale=scale, growth_interval=interval
        )
        data = replace(
            base.data,
            document_masking=v.document_separator is not None,
            document_separator=v.document_separator,
        )
        amp, memory = AmpConfig(grad_scaler=scaler), replace(base.memory, offload=v.offload)
        return replace(
            base, model=model, parallel=parallel, train=train, amp=amp, data=data, memory=memory
        )

    def reference(self) -> Case:
        """The same training on one process in one micro-batch."""
        variation = replace(self.variation, optimizer="adamw", offload=False)
        if self.precisions == EXACT:  # a scale that is a power of two then changes nothing
            variation = replace(variation, loss_scale=None)
        return Case(f"one process, {variation.name}", Layout(), variation)


def preset_config(preset: str) -> Config:
    """The config of a preset, nothing else given."""
    return Config.from_mapping({"model": {"preset": preset}})


def _case(name: str, variation: Variation = PLAIN, microbatches: int = 1, **layout: object) -> Case:
    return Case(name, Layout(**layout), variation, microbatches)  # pyright: ignore[reportArgumentType]


def _narrow(name: str, variation: Variation, microbatches: int = 1, **layout: object) -> Case:
    return replace(_case(name, variation, microbatches, **layout), precisions=NARROW)


def _resumed(start: Case, microbatches: int = 1, **layout: object) -> Case:
    """``start`` for a few steps, then from its checkpoint at another layout, in float64."""
    then = _case("", PLAIN, microbatches, **layout).layout
    return replace(start, precisions=("fp64",), then=then, then_microbatches=microbatches)


def _resume_cases() -> tuple[Case, ...]:
    """Each kind of parallelism is left and entered once, the ways ZeRO shards included."""
    return (
        _resumed(_case("resume zero3 to tp2", microbatches=2, dp=2, zero=3), tp=2),
        _resumed(_case("resume tp2pp2 to dp4 zero1", microbatches=2, tp=2, pp=2), dp=4, zero=1),
        _resumed(
            _case("resume pp4 to hsdp2x2 zero3", microbatches=4, pp=4),
            dp=4,
            zero=3,
            dp_replicate=2,
        ),
        _resumed(
            _case("resume hsdp2x2 zero2 to pp2 zbv", dp=4, zero=2, dp_replicate=2),
            microbatches=4,
            pp=2,
            schedule="zbv",
        ),
        _resumed(_case("resume cp2 to dp2tp2 zero3", cp=2), dp=2, tp=2, zero=3),
        _resumed(_case("resume dp2tp2pp2 to cp2tp2", microbatches=2, dp=2, tp=2, pp=2), cp=2, tp=2),
        _resumed(
            _case("resume zero1 to stages apart", microbatches=2, dp=2, pp=2, zero=1),
            microbatches=2,
            dp=2,
            pp=2,
            zero=1,
            rank_order="pp-dp-cp-tp",
        ),
        _resumed(
            _case("resume tied pp2 zbv to dp2", TIED, microbatches=4, pp=2, schedule="zbv"), dp=2
        ),
        _resumed(
            _case("resume pp2 split 1,4 to pp2 zbv", FIVE_LAYERS, 4, pp=2, stage_split="1,4"),
            microbatches=4,
            pp=2,
            schedule="zbv",
            stage_split="model",
        ),
        _resumed(
            _case("resume dp2 3,1 to pp2 split 4,1", FIVE_LAYERS, 2, dp=2, dp_shares="3,1"),
            microbatches=2,
            pp=2,
            stage_split="4,1",
        ),
        _resumed(
            _case("resume odd-vocab tp4 to dp2pp2", ODD_VOCAB, tp=4), microbatches=2, dp=2, pp=2
        ),
    )


MATRIX = (
    _case("dp2", dp=2),
    _case("dp4", dp=4),
    _case("dp2 accumulate2", microbatches=2, dp=2),
    _case("zero1", microbatches=2, dp=2, zero=1),
    _case("zero2", microbatches=2, dp=2, zero=2),
    _case("zero3", microbatches=2, dp=2, zero=3),
    _case("hsdp2x2 zero1", microbatches=2, dp=4, zero=1, dp_replicate=2),
    _case("hsdp2x2 zero2", microbatches=2, dp=4, zero=2, dp_replicate=2),
    _case("hsdp2x2 zero3", microbatches=2, dp=4, zero=3, dp_replicate=2),
    _case("hsdp2x2 zero3 tp2", dp=4, tp=2, zero=3, dp_replicate=2),
    _case("hsdp2x2 zero2 pp2", microbatches=2, dp=4, pp=2, zero=2, dp_replicate=2),
    _case("tp2", tp=2),
    _case("tp4", tp=4),
    _case("tp2 no-sp", tp=2, sequence_parallel=False),
    _case("pp2 gpipe", microbatches=4, pp=2, schedule="gpipe"),
    _case("pp2 1f1b", microbatches=4, pp=2),
    _case("pp2 interleaved", microbatches=4, pp=2, schedule="interleaved", virtual_stages=2),
    _case("pp4", microbatches=4, pp=4),
    _case("pp2 zero_bubble", microbatches=4, pp=2, schedule="zero_bubble"),
    _case("pp2 zero_bubble v2", microbatches=4, pp=2, schedule="zero_bubble", virtual_stages=2),
    _case("pp2 zbv", microbatches=4, pp=2, schedule="zbv"),
    _case("pp2 dualpipev", microbatches=4, pp=2, schedule="dualpipev"),
    _case("pp4 zero_bubble", microbatches=8, pp=4, schedule="zero_bubble"),
    _case("dp2tp2", dp=2, tp=2),
    _case("dp2tp2 zero3", dp=2, tp=2, zero=3),
    _case("dp2pp2", microbatches=2, dp=2, pp=2),
    _case("dp2pp2 zero1", microbatches=2, dp=2, pp=2, zero=1),
    _case("tp2pp2", microbatches=2, tp=2, pp=2),
    _case("dp2tp2pp2", microbatches=2, dp=2, tp=2, pp=2),
    _case("dp2tp2pp2 stages apart", PLAIN, 2, dp=2, tp=2, pp=2, rank_order="pp-dp-cp-tp"),
    _case("tp2pp2 zbv", microbatches=4, tp=2, pp=2, schedule="zbv"),
    _case("dp2pp2 zbv zero1", microbatches=4, dp=2, pp=2, zero=1, schedule="zbv"),
    _case("dp2pp2 dualpipev zero2", microbatches=4, dp=2, pp=2, zero=2, schedule="dualpipev"),
    _case(
        "dp2pp2 interleaved zero3",
        microbatches=2,
        dp=2,
        pp=2,
        zero=3,
        schedule="interleaved",
        virtual_stages=2,
    ),
    _case("dp2pp2 zero_bubble zero3", microbatches=2, dp=2, pp=2, zero=3, schedule="zero_bubble"),
    _case("dp2pp2 zbv zero3", microbatches=4, dp=2, pp=2, zero=3, schedule="zbv"),
    _case(
        "dp2tp2pp2 dualpipev zero3", microbatches=4, dp=2, tp=2, pp=2, zero=3, schedule="dualpipev"
    ),
    _case("dp2tp2pp2 zero3", microbatches=2, dp=2, tp=2, pp=2, zero=3),
    _case("cp2", cp=2, cp_attention="ring"),
    _case("cp4", cp=4, microbatches=2, cp_attention="ring"),
    _case("cp2 all_gather", cp=2, cp_attention="all_gather"),
    _case("cp2tp2", cp=2, tp=2),
    _case("dp2cp2 zero3", microbatches=2, dp=2, cp=2, zero=3),
    _case("hsdp2x2 cp2 zero3", dp=2, cp=2, zero=3, dp_replicate=2, cp_attention="ring"),
    _case("cp2pp2", microbatches=2, cp=2, pp=2, cp_attention="ring"),
    _case("cp2tp2pp2", microbatches=2, cp=2, tp=2, pp=2, cp_attention="ring"),
    _case("documents dp2", DOCUMENTS, dp=2),
    _case("documents cp2", DOCUMENTS, cp=2, cp_attention="ring"),
    _case("documents cp4 ring", DOCUMENTS, microbatches=2, cp=4, cp_attention="ring"),
    _case("documents cp4 all_gather", DOCUMENTS, cp=4, cp_attention="all_gather"),
    _case("documents tp2pp2", DOCUMENTS, microbatches=2, tp=2, pp=2),
    _case("padded cp2", PADDED, cp=2),
    _case("onebit cp2 zero1", ONEBIT, cp=2, zero=1),
    _case("tied tp2", TIED, tp=2),
    _case("tied pp2", TIED, microbatches=2, pp=2),
    _case("tied pp2 zbv", TIED, microbatches=4, pp=2, schedule="zbv"),
    _case("tied dp2pp2 dualpipev zero1", TIED, 4, dp=2, pp=2, zero=1, schedule="dualpipev"),
    _case("tied zero2", TIED, dp=2, zero=2),
    _case("tied hsdp2x2 pp2 zero3", TIED, 2, dp=4, pp=2, zero=3, dp_replicate=2),
    _case("tied dp2tp2pp2 zero1", TIED, microbatches=2, dp=2, tp=2, pp=2, zero=1),
    _case("odd-vocab tp2", ODD_VOCAB, tp=2),
    _case("odd-vocab tp4 no-sp", ODD_VOCAB, tp=4, sequence_parallel=False),
    _case("odd-vocab tp2pp2 zero_bubble", ODD_VOCAB, 2, tp=2, pp=2, schedule="zero_bubble"),
    _case("odd-vocab dp2tp2 zero3", ODD_VOCAB, dp=2, tp=2, zero=3),
    _case("odd-length dp2tp2pp2", ODD_LENGTH, microbatches=2, dp=2, tp=2, pp=2),
    _case("5-positions tp4 zbv", FIVE_POSITIONS, microbatches=4, tp=4, pp=2, schedule="zbv"),
    _case("5-layers pp2", FIVE_LAYERS, microbatches=2, pp=2),
    _case("5-layers pp2 zbv", FIVE_LAYERS, microbatches=2, pp=2, schedule="zbv"),
    _case("5-layers dp2tp2pp2", FIVE_LAYERS, microbatches=2, dp=2, tp=2, pp=2),
    _case("5-layers pp4", FIVE_LAYERS, microbatches=4, pp=4),
    _case("6-layers pp4 zero_bubble", SIX_LAYERS, microbatches=4, pp=4, schedule="zero_bubble"),
    _case("7-layers pp4 gpipe", SEVEN_LAYERS, microbatches=2, pp=4, schedule="gpipe"),
    _case("5-layers pp2 split 4,1", FIVE_LAYERS, 4, pp=2, stage_split="4,1"),
    _case(
        "7-layers pp2 zbv split 3,2,1,1",
        SEVEN_LAYERS,
        4,
        pp=2,
        schedule="zbv",
        stage_split="3,2,1,1",
    ),
    _case("dp2 shares 3,1", microbatches=2, dp=2, dp_shares="3,1"),
    _case("padded dp2 zero1 shares 1,3", PADDED, 2, dp=2, zero=1, dp_shares="1,3"),
    _case(
        "dp2pp2 zero1 shares 1,3", PLAIN, 4, dp=2, pp=2, zero=1, dp_shares="1,3", schedule="gpipe"
    ),
    _case("padded dp4", PADDED, dp=4),
    _case("padded pp2", PADDED, microbatches=4, pp=2),
    _case("padded pp2 dualpipev", PADDED, microbatches=4, pp=2, schedule="dualpipev"),
    _case("padded dp2tp2pp2", PADDED, microbatches=2, dp=2, tp=2, pp=2),
    _case("clipped zero3", CLIPPED, dp=2, zero=3),
    _case("clipped hsdp2x2 zero3", CLIPPED, dp=4, zero=3, dp_replicate=2),
    _case("clipped tied pp4", TIED_CLIPPED, microbatches=4, pp=4),
    _case("clipped dp2tp2pp2", CLIPPED, microbatches=2, dp=2, tp=2, pp=2),
    _case("vit dp2", VIT, dp=2),
    _case("vit zero3", VIT, microbatches=2, dp=2, zero=3),
    _case("vit tp2", VIT, tp=2),
    _case("vit tp2 no-sp", VIT, tp=2, sequence_parallel=False),
    _case("vit pp2", VIT, microbatches=4, pp=2),
    _case("vit dp2tp2pp2", VIT, microbatches=2, dp=2, tp=2, pp=2),
    _case("vit cp2", VIT, cp=2),
    _case("vit cp4 ring", VIT, microbatches=2, cp=4, cp_attention="ring"),
    _case("vit cp2tp2", VIT, cp=2, tp=2),
    _case("vit padded dp2cp2pp2 zbv", VIT_PADDED, 2, dp=2, cp=2, pp=2, schedule="zbv"),
    _case("vit padded dp4", VIT_PADDED, dp=4),
    _case("vit clipped tp2pp2 zbv", VIT_CLIPPED, microbatches=4, tp=2, pp=2, schedule="zbv"),
    _case("onebit dp4 zero1", ONEBIT, dp=4, zero=1),
    _case("onebit dp2tp2", ONEBIT, microbatches=2, dp=2, tp=2),
    _case("onebit dp2pp2 zbv", ONEBIT, microbatches=2, dp=2, pp=2, schedule="zbv"),
    _case("onebit tied dp2pp2", ONEBIT_TIED, microbatches=2, dp=2, pp=2),
    _case("onebit tied dp2pp2 zbv", ONEBIT_TIED, microbatches=2, dp=2, pp=2, schedule="zbv"),
    _case("onebit tied dp2tp2pp2 zero1", ONEBIT_TIED, microbatches=2, dp=2, tp=2, pp=2, zero=1),
    _narrow("16-bit vit dp2tp2", replace(VIT, loss_scale=SCALED.loss_scale), dp=2, tp=2),
    _case("scaled tied dp2tp2pp2 zero1", SCALED_TIED, 2, dp=2, tp=2, pp=2, zero=1),
    _narrow("16-bit dp2", SCALED, dp=2),
    _narrow("16-bit dp2cp2tp2 zero2", SCALED, 2, dp=2, cp=2, tp=2, zero=2),
    _narrow("16-bit tp2", SCALED, tp=2),
    _narrow("16-bit offload tp2", OFFLOADED, tp=2),
    _narrow("16-bit zero3", SCALED, microbatches=2, dp=2, zero=3),
    _narrow("16-bit pp2", SCALED, microbatches=4, pp=2),
    _narrow("16-bit dp2tp2pp2", SCALED, microbatches=2, dp=2, tp=2, pp=2),
    _narrow("16-bit tied dp2pp2 zbv zero2", SCALED_TIED, 4, dp=2, pp=2, zero=2, schedule="zbv"),
    _narrow("16-bit fp32-embedding zero2", FP32_EMBEDDING, microbatches=2, dp=2, zero=2),
    _narrow("16-bit fp32-embedding tied tp2pp2", FP32_EMBEDDING_TIED, 2, tp=2, pp=2),
    *_resume_cases(),
)
"""All cases, in the order of the table."""
