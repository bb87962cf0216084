"""This machine as ``Hardware``: what was timed, and the figures that explain it. No torch.

The planner's terms are fitted in turn to what they stand for: matrix products give the peak and the
side at which half of it is left, a stream the memory's rate, all-reduces the link, a block of a few
numbers the cost of an operation, and a middle-sized block the part of the peak that is left inside
of a training step. No layout is timed: what one costs remains a prediction.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mcp_parallel.config import Config, ModelConfig
from mcp_parallel.launch.cores import threads_per_rank, usable_cores
from mcp_parallel.planner import block, links, roofline
from mcp_parallel.planner.hardware import Hardware
from mcp_parallel.planner.layouts import Job
from mcp_parallel.planner.topology import Group

_SIDES = [2 ** (exponent / 4) for exponent in range(37)]
"""Half sides that are tried, 1 to 512: a quarter of an octave is finer than times repeat."""
_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Seconds on each of ``ranks`` ranks that worked at the same time, means over the ranks."""

    ranks: int
    matmuls: Sequence[tuple[int, int, int, float]]
    """(m, n, k, seconds) in fp32."""
    formats: dict[str, float]
    """Rate of another number format over that of fp32, in one large product."""
    stream: tuple[float, float]
    """(bytes read and written, seconds)."""
    attention: tuple[float, float, int, float]
    """(seconds forward, backward, positions, operations forward) of causal attention."""
    all_reduces: Sequence[tuple[int, float]]
    """(bytes, seconds), rising; empty with one rank."""
    gather_and_back_s: float
    """An all-gather of a few numbers and its backward pass, a reduce-scatter, as a layer calls
    them: on a CPU the call is most of it. 0 with one rank."""
    small_block_s: float
    """Forward and backward of ``SMALL``'s block, where nothing but overhead is left."""
    middle_block_s: float
    """And of ``MIDDLE``'s."""
    step_overhead_s: float
    """A step of ``SMALL`` beyond its layers."""

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> Samples:
        """From plain values, as ``asdict`` gives and JSON keeps them."""
        pairs = {key: [tuple(row) for row in values[key]] for key in ("matmuls", "all_reduces")}
        whole = {key: tuple(values[key]) for key in ("stream", "attention")}
        return cls(**{**values, **pairs, **whole})


def _shape(hidden: int, ffn: int, vocab: int, length: int) -> ModelConfig:
    return replace(
        Config().model,
        preset=None,
        num_layers=1,
        hidden_size=hidden,
        num_heads=4,
        num_kv_heads=4,
        ffn_size=ffn,
        vocab_size=vocab,
        seq_len=length,
    )


SMALL, SMALL_ROWS = _shape(16, 16, 16, 4), 1
MIDDLE, MIDDLE_ROWS = _shape(192, 512, 256, 128), 4
"""Models whose blocks are timed, and the samples of their micro-batches."""


def calibrate(samples: Samples, base: Hardware) -> Hardware:
    """The figures that explain ``samples``.

    Args:
        samples: of this machine.
        base: what is not timed: memory, network, reserve.
    """
    peak, half = fit_matmuls(samples.matmuls, base)
    num_bytes, seconds = samples.stream
    hardware = replace(
        base,
        name=f"{base.name}, measured with {samples.ranks} ranks",
        peak_flops={"fp32": peak, **{key: peak * r for key, r in samples.formats.items()}},
        half_efficiency_side=half,
        matmul_efficiency=1.0,
        memory_bytes_per_s=num_bytes / seconds / roofline.MEMORY_EFFICIENCY,
        op_overhead_s=0.0,
        attention=fit_attention(samples.attention, peak),
        step_overhead_s=samples.step_overhead_s,
        source="measured on this machine",
    )
    hardware = replace(hardware, **fit_link(samples, hardware))
    overhead = _fit_overhead(samples.small_block_s, hardware)
    hardware = replace(hardware, op_overhead_s=overhead)
    return replace(hardware, matmul_efficiency=_fit_efficiency(samples.middle_block_s, hardware))


def fit_matmuls(
    matmuls: Sequence[tuple[int, int, int, float]], base: Hardware
) -> tuple[float, float]:
    """(peak, half side) with the least sum of squared errors of the logarithm of the time.

    For a half side the best peak is known: that at which the errors' mean is 0.
    """
    best = (math.inf, 0.0, 0.0)
    for half in _SIDES:
        trial = replace(
            base,
            peak_flops={"fp32": 1.0},
            half_efficiency_side=half,
            matmul_efficiency=1.0,
            memory_bytes_per_s=math.inf,
            op_overhead_s=0.0,
        )
        errors = [
            math.log(roofline.matmul_seconds(trial, m, n, k, "fp32") / seconds)
            for m, n, k, seconds in matmuls
        ]
        mean = sum(errors) / len(errors)
        spread = sum((error - mean) ** 2 for error in errors)
        best = min(best, (spread, math.exp(mean), half))
    return best[1], best[2]


def fit_link(samples: Samples, base: Hardware) -> dict[str, float]:
    """Latency of a collective as layers call it, and the rate of large all-reduces."""
    ranks = samples.ranks
    if ranks == 1:
        return {}
    (_, short), (num_bytes, long) = samples.all_reduces[0], samples.all_reduces[-1]
    unit = replace(base, domain_bytes_per_s=1.0, domain_latency_s=0.0)
    moved = links.all_reduce_seconds(num_bytes, Group(ranks, ranks), unit)
    return {
        "domain_latency_s": samples.gather_and_back_s / 2 / math.log2(ranks),
        "domain_bytes_per_s": moved / max(long - short, long / 100),
    }


def fit_attention(timed: tuple[float, float, int, float], peak: float) -> tuple[float, float]:
    """Rates of long sequences over the peak; the backward pass has five products to two."""
    forward, backward, length, flops = timed
    full = (length + roofline.ATTENTION_HALF_LENGTH) / length
    return flops / forward / peak * full, 2.5 * flops / backward / peak * full


def block_seconds(
    model: ModelConfig, rows: int, hardware: Hardware, precision: str = "fp32"
) -> float:
    """What the cost model says of one block and micro-batch on a rank alone."""
    job = Job(
        model=model,
        ranks=1,
        hardware=hardware,
        global_batch_size=rows,
        precision=precision,
    )
    alone = Group(1, 1)
    time = block.block_time(
        job,
        tokens=rows * model.seq_len,
        tp=1,
        tp_group=alone,
        cp_group=alone,
        checkpointing="none",
    )
    return time.forward + time.backward


def _fit_overhead(seconds: float, hardware: Hardware) -> float:
    """An operation's own time: what a small block takes beyond its work, by its operations."""
    work = block_seconds(SMALL, SMALL_ROWS, hardware)
    each = block_seconds(SMALL, SMALL_ROWS, replace(hardware, op_overhead_s=1.0)) - work
    return max(0.0, (seconds - work) / each)


def _fit_efficiency(seconds: float, hardware: Hardware) -> float:
    """The part of the peak at which a middle block takes what it took; 0.05 to 1.5."""
    low, high = 0.05, 1.5
    for _ in range(40):
        middle = math.sqrt(low * high)
        trial = replace(hardware, matmul_efficiency=middle)
        if block_seconds(MIDDLE, MIDDLE_ROWS, trial) > seconds:
            low = middle
        else:
            high = middle
    return high


# --- the cache -----------------------------------------------------------------------------------


def machine_facts(ranks: int) -> dict[str, Any]:
    """What the figures depend on, and by which a cached file is found."""
    return {
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "ranks": ranks,
        "threads": threads_per_rank(ranks),
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line.partition(":")[2].strip() for line in file if "model name" in line]
    except OSError:
        lines = []
    return lines[0] if lines else platform.processor() or platform.machine()


def cached(ranks: int, base: Hardware) -> Hardware | None:
    """``base`` with what an earlier calibration of this machine found; None where there is none."""
    samples = load(machine_facts(ranks))
    return None if samples is None else calibrate(samples, base)


def cache_file(facts: dict[str, Any]) -> Path:
    """Where the samples of a machine with such facts are kept."""
    text = json.dumps({"version": _VERSION, **facts}, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "mcp_parallel" / f"calibration-{key}.json"


def load(facts: dict[str, Any]) -> Samples | None:
    """What an earlier calibration measured under the same facts; None where there is none."""
    file = cache_file(facts)
    try:
        record = json.loads(file.read_text(encoding="ascii"))
        return Samples.from_mapping(record["samples"]) if record["facts"] == facts else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a cache: what cannot be read is measured again


def save(facts: dict[str, Any], samples: Samples) -> Path:
    """Keep samples; replaces the file as a whole."""
    file = cache_file(facts)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    record = {"facts": facts, "samples": asdict(samples)}
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="ascii")
    temporary.replace(file)
    return file
