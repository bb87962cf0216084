"""Published training runs as data: what was run, where, and how fast. No torch.

What a source does not say (micro-batch, stages a rank, checkpointing in A and B) is left to the
planner, given the degrees. Sources, read in 2026:

    A  Megatron-LM README, "Training Speed and Scalability" (images/model_table.png): H100, bf16,
       GPT models with a vocabulary of 131,072 and 4,096 positions. A GELU layer of 4 h is given the
       SwiGLU width of the same cost, 8/3 h. All of the attention matrix counts as work. It is a
       weak scaling: dp is 48 in all rows.
    B  Megatron-Bridge docs/performance-summary-archive.md, containers 25.09, 25.11 and 26.02: dense
       Llama 3 rows in FP8 (current scaling). NVFP4 and MXFP8 rows are left out: formats that
       ``hardware.py`` has no peaks for. What is causal counts as work.
    C  torchtitan benchmarks/llama3_h100_202412_torchtitan.md, with torch.compile: hosts of eight
       H100 with 96 GB of HBM2e at 2.4 TB/s and a limit of 500 W, a type of its own here. Batches of
       a pipeline are cut in pp micro-batches, its default. Each table shows one more kind of
       parallelism; what its heading gives for all of its rows was held: degrees that are not the
       table's subject ("FSDP 32, TP 8"), and the level of checkpointing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mcp_parallel.config import ModelConfig
from mcp_parallel.planner.flops import flops_per_token
from mcp_parallel.planner.hardware import GB, HARDWARE, Hardware
from mcp_parallel.planner.layouts import CHECKPOINTING, Job
from mcp_parallel.planner.runtime import Runtime

MEGATRON = Runtime(
    name="Megatron-LM",
    zero=(0, 1),
    tp_overlap=0.8,
    cp_overlaps=True,
    saves_gathered=False,
    has_uneven=False,
    checkpointing=("none", "full"),
    recomputes_some=True,
    splits_logits=False,
    whole_gradient_bytes={1: 4},
    shard_bytes=12,
)
"""2024: distributed optimizer, fp32 gradients, --tp-comm-overlap and all overlaps on. Its
megatron/training/arguments.py of that year refuses layers that pipeline ranks, or stages on a rank,
do not divide. There "selective" recomputes "core attention" alone, of which FlashAttention keeps
nothing, so that it is no level of its own here."""
BRIDGE = replace(
    MEGATRON,
    name="Megatron-Bridge",
    zero=(1, 3),
    pipeline_zero=(1,),
    has_uneven=True,
    checkpointing=CHECKPOINTING,
    whole_gradient_bytes={1: 2},
    reduce_bytes=2,
    fuses_casts=True,
    gathers_fp8=True,
)
"""Gradients stay in bf16 in its performance recipes; FSDP without a pipeline. Embedding and loss
may count as blocks in the split, and --recompute-modules runs less than a block again. Transformer
Engine finds the largest value as a norm or an activation is computed (normalization.cpp and
activation.cpp in pytorch/csrc/extensions), casts and transposes in one kernel, and gathers the
inputs of sequence-parallel layers in fp8 (pytorch/module/layernorm_linear.py)."""
TITAN = Runtime(
    name="torchtitan",
    keeps_messages=True,
    zero=(3,),
    pipeline_zero=(1,),
    cp_overlaps=True,
    saves_gathered=True,
    splits_logits=False,
    attention=(0.5, 0.42),
)
"""FSDP2 and torch's FlashAttention-2; in a pipeline weights stay whole until the step is over."""
TITAN_ASYNC = replace(TITAN, name="torchtitan, async TP", tp_overlap=0.8)

H100_500W = replace(
    HARDWARE["h100"],
    name="H100 96GB 500W",
    memory_bytes=96 * GB,
    memory_bytes_per_s=2400 * GB,
    source="torchtitan benchmarks/llama3_h100_202412_torchtitan.md",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row of a table."""

    name: str
    table: str
    """A, B or C."""
    hardware: Hardware
    runtime: Runtime
    model: ModelConfig
    ranks: int
    global_batch_size: int
    precision: str
    layout: Mapping[str, Any]
    """Of ``PlannedLayout``, what the source says."""
    tflops: float
    """Of model work, each GPU, as the source counts it."""
    causal: bool
    held: Mapping[str, Any] = field(default_factory=dict)
    """What the experiment held fixed by design, so that it was no choice of a layout."""
    memory_gib: float | None = None
    """Peak of a GPU, where the source has it."""

    @property
    def job(self) -> Job:
        """What the planner is asked."""
        return Job(
            model=self.model,
            ranks=self.ranks,
            hardware=self.hardware,
            global_batch_size=self.global_batch_size,
            precision=self.precision,
            runtime=self.runtime,
        )

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        """(dp, tp, pp, cp)."""
        tp, pp, cp = (int(self.layout[name]) for name in ("tp", "pp", "cp"))
        return self.ranks // (tp * pp * cp), tp, pp, cp


def _llama(layers: int, hidden: int, heads: int, ffn: int, seq_len: int) -> ModelConfig:
    return ModelConfig(
        preset=None,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=8,
        ffn_size=ffn,
        vocab_size=128256,
        seq_len=seq_len,
    )


def llama3(size: str, seq_len: int = 8192) -> ModelConfig:
    """Llama 3 of 8b, 70b or 405b (Llama team 2024, table 3)."""
    shapes = {
        "8b": (32, 4096, 32, 14336),
        "70b": (80, 8192, 64, 28672),
        "405b": (126, 16384, 128, 53248),
    }
    return _llama(*shapes[size], seq_len)


def _gpt(layers: int, hidden: int) -> ModelConfig:
    return ModelConfig(
        preset=None,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=hidden // 128,
        num_kv_heads=hidden // 128,
        ffn_size=round(8 * hidden / 3),
        vocab_size=131072,
        seq_len=4096,
    )


def _weak_scaling() -> list[Run]:
    """A: size, layers, hidden size, tp, pp, batch, TFLOP/s; dp is 48 in all rows."""
    rows = (
        ("1.7B", 24, 2048, 1, 1, 192, 408.8),
        ("7.1B", 30, 4096, 2, 1, 192, 465.9),
        ("16B", 32, 6144, 4, 1, 192, 489.1),
        ("32B", 48, 7168, 8, 1, 192, 459.6),
        ("70B", 84, 8192, 8, 2, 384, 419.7),
        ("119B", 92, 10240, 8, 4, 768, 420.5),
        ("177B", 96, 12288, 8, 6, 1152, 432.8),
        ("314B", 96, 16384, 8, 8, 1536, 474.4),
        ("462B", 112, 18432, 8, 16, 3072, 459.9),
    )
    return [
        Run(
            name=f"GPT {size}",
            table="A",
            hardware=HARDWARE["h100"],
            runtime=MEGATRON,
            model=_gpt(layers, hidden),
            ranks=48 * tp * pp,
            global_batch_size=batch,
            precision="bf16",
            layout={"tp": tp, "pp": pp, "cp": 1},
            tflops=tflops,
            causal=False,
            held={"dp": 48},
        )
        for size, layers, hidden, tp, pp, batch, tflops in rows
    ]


def _bridge() -> list[Run]:
    """B: GPU, model, GPUs, batch, micro-batch, zero, tp, pp, cp, stages a rank, TFLOP/s."""
    rows = (
        ("h100", "8b", 8, 128, 1, 3, 1, 1, 1, 1, 744),  # 25.11
        ("h100", "8b", 8, 128, 1, 3, 1, 1, 1, 1, 725),  # 25.09
        ("h100", "70b", 64, 128, 1, 1, 4, 8, 1, 5, 719),  # 25.11
        ("h100", "70b", 64, 128, 1, 1, 4, 8, 1, 5, 727),  # 25.09
        ("h100", "70b", 64, 256, 1, 1, 4, 8, 1, 5, 728),  # 26.02
        ("h100", "405b", 1024, 512, 1, 1, 8, 8, 2, 8, 737),  # 25.11
        ("h100", "405b", 1024, 512, 1, 1, 8, 8, 2, 8, 763),  # 25.09
        ("h100", "405b", 1024, 1536, 1, 1, 8, 8, 2, 8, 784),  # 26.02
        ("b200", "8b", 8, 128, 2, 1, 1, 1, 1, 1, 1576),  # 25.11
        ("b200", "8b", 8, 128, 2, 1, 1, 1, 1, 1, 1544),  # 25.09
        ("b200", "405b", 128, 64, 1, 1, 4, 8, 2, 8, 1667),  # 25.11
        ("b200", "405b", 128, 64, 1, 1, 4, 8, 2, 8, 1676),  # 25.09
        ("gb200", "8b", 8, 128, 2, 1, 1, 1, 1, 1, 1622),  # 25.11
        ("gb200", "70b", 64, 256, 2, 3, 1, 1, 1, 1, 1937),  # 25.11
        ("gb200", "70b", 64, 256, 2, 3, 1, 1, 1, 1, 1815),  # 26.02
        ("gb200", "405b", 256, 1536, 1, 1, 4, 16, 1, 4, 2053),  # 25.11
        ("gb200", "405b", 256, 1536, 1, 1, 4, 16, 1, 4, 2004),  # 26.02
        ("gb200", "8b", 8, 128, 2, 1, 1, 1, 1, 1, 1614),  # 25.09
        ("gb200", "70b", 64, 128, 2, 3, 1, 1, 1, 1, 1791),  # 25.09
        ("gb200", "405b", 128, 64, 1, 3, 2, 1, 1, 1, 1840),  # 25.09
        ("gb300", "8b", 8, 128, 2, 1, 1, 1, 1, 1, 1933),  # 25.11
        ("gb300", "70b", 64, 256, 2, 3, 1, 1, 1, 1, 2030),  # 25.11
        ("gb300", "70b", 64, 256, 2, 3, 1, 1, 1, 1, 2248),  # 26.02
        ("gb300", "405b", 256, 1536, 1, 1, 2, 8, 2, 4, 2522),  # 25.11
        ("gb300", "405b", 256, 1536, 1, 1, 4, 8, 1, 4, 2495),  # 26.02
    )
    return [
        Run(
            name=f"Llama 3 {size} x {ranks}",
            table="B",
            hardware=HARDWARE[gpu],
            runtime=BRIDGE,
            model=llama3(size),
            ranks=ranks,
            global_batch_size=batch,
            precision="fp8",
            layout={
                "tp": tp,
                "pp": pp,
                "cp": cp,
                "micro_batch_size": micro,
                "zero": zero,
                "virtual_stages": virtual,
                "schedule": "interleaved" if virtual > 1 else "1f1b",
            },
            tflops=tflops,
            causal=True,
        )
        for gpu, size, ranks, batch, micro, zero, tp, pp, cp, virtual, tflops in rows
    ]


def _titan() -> list[Run]:
    """C, table by table."""
    one, context, two = {"tp": 1, "pp": 1, "cp": 1}, {"tp": 1, "pp": 1}, {"tp": 8, "pp": 1, "cp": 1}
    three, four = {"tp": 8, "pp": 8, "cp": 1}, {"tp": 8, "pp": 8}
    # model, GPUs, thousands of tokens, samples of a dp rank, precision, tp, pp, cp, stages a rank,
    # checkpointing, async TP, tokens/s, GiB, held
    rows = (
        ("8b", 8, 8, 2, "bf16", 1, 1, 1, 1, "selective", False, 6667, 77.0, one),
        ("8b", 8, 8, 2, "fp8", 1, 1, 1, 1, "selective", False, 8532, 76.8, one),
        ("8b", 8, 32, 1, "fp8", 1, 1, 1, 1, "full", False, 3890, 83.9, context),
        ("8b", 8, 64, 1, "fp8", 1, 1, 2, 1, "full", False, 2540, 84.2, context),
        ("8b", 8, 128, 1, "fp8", 1, 1, 4, 1, "full", False, 1071, 84.0, context),
        ("8b", 8, 256, 1, "fp8", 1, 1, 8, 1, "full", False, 548, 84.5, context),
        ("8b", 128, 8, 2, "bf16", 1, 1, 1, 1, "selective", False, 6514, 62.0, one),
        ("8b", 128, 8, 2, "fp8", 1, 1, 1, 1, "selective", False, 8380, 61.8, one),
        ("70b", 256, 8, 16, "fp8", 8, 1, 1, 1, "full", False, 829, 71.9, two),
        ("70b", 256, 8, 16, "fp8", 8, 1, 1, 1, "full", True, 876, 67.6, two),
        ("405b", 512, 8, 32, "fp8", 8, 8, 1, 1, "full", True, 100, 82.5, three),
        ("405b", 512, 8, 32, "fp8", 8, 8, 1, 2, "full", True, 128, 72.7, three),
        ("405b", 512, 32, 8, "fp8", 8, 8, 1, 1, "full", True, 76, 75.3, four),
        ("405b", 512, 64, 8, "fp8", 8, 8, 2, 1, "full", True, 47, 75.9, four),
        ("405b", 512, 128, 8, "fp8", 8, 8, 4, 1, "full", True, 31, 77.1, four),
        ("405b", 512, 256, 8, "fp8", 8, 8, 8, 1, "full", True, 16, 84.9, four),
    )
    return [_titan_run(row) for row in rows]


def _titan_run(row: tuple[Any, ...]) -> Run:
    size, ranks, thousands, samples, precision, tp, pp, cp, virtual = row[:9]
    checkpointing, is_async, tokens_per_s, memory_gib, held = row[9:]
    model = llama3(size, 1024 * thousands)
    return Run(
        name=f"Llama 3 {size} x {ranks}, {thousands}k",
        table="C",
        hardware=H100_500W,
        runtime=TITAN_ASYNC if is_async else TITAN,
        model=model,
        ranks=ranks,
        global_batch_size=samples * ranks // (tp * pp * cp),
        precision=precision,
        layout={
            "tp": tp,
            "pp": pp,
            "cp": cp,
            "micro_batch_size": samples // pp,
            "virtual_stages": virtual,
            "schedule": "interleaved" if virtual > 1 else "1f1b",
            "activation_checkpointing": checkpointing,
        },
        tflops=tokens_per_s * flops_per_token(model) / 1e12,
        causal=True,
        held={**held, "activation_checkpointing": checkpointing},
        memory_gib=memory_gib,
    )


RUNS: tuple[Run, ...] = (*_weak_scaling(), *_bridge(), *_titan())
"""All rows, in the order of their tables."""
