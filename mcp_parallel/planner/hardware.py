"""What the planner knows of an accelerator and its links: figures of data sheets, with sources.

Rates are of one device ("rank") in one direction. Bandwidths are the data sheets' peaks; what a
collective makes of them is the cost model's business (``links.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mcp_parallel.errors import ConfigError, joined, shown

GB = 10**9
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of rank and the links between ranks of its kind."""

    name: str
    """As printed."""
    peak_flops: Mapping[str, float]
    """Dense matmul peak of a rank in FLOP/s, by number format (bf16, fp16, fp8, fp32)."""
    memory_bytes: int
    """Of a rank, all of it; the planner leaves a reserve."""
    memory_bytes_per_s: float
    """Of a rank's own memory, read plus written."""
    domain_ranks: int
    """Neighbouring ranks that the fast link joins: an NVLink domain, the ranks of one host."""
    domain_bytes_per_s: float
    """Of the fast link, each direction, each rank."""
    network_bytes_per_s: float
    """Between domains, each direction, each rank's share."""
    domain_latency_s: float = 3e-6
    """Of one step of a collective within a domain."""
    network_latency_s: float = 10e-6
    """Of one step between domains."""
    op_overhead_s: float = 3e-6
    """Of one operation, whatever its size: launch and drain of a kernel."""
    overlap_slowdown: float = 0.15
    """Time that a second of communication takes from computation beside it: its kernels hold some
    of the processors (NCCL: 16 to 24 of an H100's 132). 1 where ranks have no engine for it: on a
    CPU nothing is hidden."""
    reserve_bytes: int = 3 * GIB
    """Of a rank's memory, what is neither tensor nor free: contexts, libraries, communicators."""
    matmul_efficiency: float = 0.6
    """Part of the peak that large matmuls reach inside a training step, with all that is not
    counted on its own; alone they reach 0.8. The one constant that is fitted (``validate.py``)."""
    half_efficiency_side: float = 128.0
    """A matmul with one side of this length reaches half of what one with a long side does: about
    a tile (``roofline.py``). It grows with the peak: filling a tile's pipeline takes its time."""
    transposes_fp8: bool = True
    """Whether fp8 matmuls want both operands contiguous along the summed side, as Hopper's do, so
    that the backward pass needs a transposed copy of each; Blackwell's take them either way."""
    attention: tuple[float, float] | None = None
    """Rate of attention's forward and backward pass over that of a large matmul, where it was
    measured; None is the trainer's (``runtime.py``)."""
    step_overhead_s: float = 0.0
    """Of a step, whatever its layout: the program around the layers, and the totals' messages."""
    source: str = ""
    """Where the figures are from."""

    def peak(self, precision: str) -> float:
        """FLOP/s in a number format.

        Raises:
            ConfigError: the hardware has no such format.
        """
        found = self.peak_flops.get(precision)
        if found is None:
            problem = (
                f"plan: train.precision must be {joined(self.peak_flops)} on {self.name}, got "
                f"{shown(precision)}; use bf16"
            )
            raise ConfigError([problem])
        return found


def _with_half_formats(bf16: float, fp8: float | None, fp32: float) -> dict[str, float]:
    peaks = {"bf16": bf16, "fp16": bf16, "fp32": fp32}
    return {**peaks, "fp8": fp8} if fp8 else peaks


_A100 = Hardware(
    name="A100 80GB SXM",
    peak_flops=_with_half_formats(312e12, None, 156e12),
    memory_bytes=80 * GIB,
    memory_bytes_per_s=2039 * GB,
    domain_ranks=8,
    domain_bytes_per_s=300 * GB,
    network_bytes_per_s=25 * GB,
    half_efficiency_side=64.0,
    source="NVIDIA A100 80GB data sheet (dense peaks, TF32 as fp32; HBM2e 2,039 GB/s; NVLink 600 "
    "GB/s both ways); DGX A100: 8 GPUs, eight 200 Gb/s ports",
)
_H100 = Hardware(
    name="H100 80GB SXM",
    peak_flops=_with_half_formats(989.4e12, 1978.9e12, 494.7e12),
    memory_bytes=80 * GIB,
    memory_bytes_per_s=3350 * GB,
    domain_ranks=8,
    domain_bytes_per_s=450 * GB,
    network_bytes_per_s=50 * GB,
    source="NVIDIA H100 data sheet and Hopper white paper (dense peaks, TF32 as fp32; HBM3 3.35 "
    "TB/s; NVLink 900 GB/s both ways); DGX H100: 8 GPUs, eight 400 Gb/s ports",
)
_H200 = replace(
    _H100,
    name="H200 141GB SXM",
    memory_bytes=141 * GB,
    memory_bytes_per_s=4800 * GB,
    source="NVIDIA H200 data sheet (peaks of H100; 141 GB of HBM3e at 4.8 TB/s); DGX H200",
)
_B200 = Hardware(
    name="B200 180GB SXM",
    peak_flops=_with_half_formats(2250e12, 4500e12, 1125e12),
    memory_bytes=180 * GB,
    half_efficiency_side=256.0,
    matmul_efficiency=0.61,
    transposes_fp8=False,
    memory_bytes_per_s=8000 * GB,
    domain_ranks=8,
    domain_bytes_per_s=900 * GB,
    network_bytes_per_s=50 * GB,
    source="NVIDIA DGX B200 data sheet (72 PFLOP/s fp8 dense is half of 'sparse'; 1,440 GB and 64 "
    "TB/s over 8 GPUs; NVLink 1.8 TB/s both ways; eight 400 Gb/s ports)",
)
_GB200 = Hardware(
    name="GB200 NVL72",
    peak_flops=_with_half_formats(2500e12, 5000e12, 1250e12),
    memory_bytes=186 * GB,
    half_efficiency_side=256.0,
    matmul_efficiency=0.61,
    transposes_fp8=False,
    memory_bytes_per_s=8000 * GB,
    domain_ranks=72,
    domain_bytes_per_s=900 * GB,
    network_bytes_per_s=50 * GB,
    source="NVIDIA GB200 NVL72 data sheet (peaks over 72 GPUs, dense is half of 'sparse'; 186 GB "
    "and 8 TB/s a GPU; NVLink 1.8 TB/s both ways; one 400 Gb/s port a GPU)",
)

_GB300 = replace(
    _GB200,
    name="GB300 NVL72",
    memory_bytes=279 * GB,
    network_bytes_per_s=100 * GB,
    matmul_efficiency=0.73,
    source="NVIDIA GB300 NVL72 data sheet (fp8 and bf16 dense peaks as GB200's; 279 GB and 8 TB/s "
    "a GPU; one 800 Gb/s port a GPU)",
)

HARDWARE: Mapping[str, Hardware] = {
    "a100": _A100,
    "h100": _H100,
    "h200": _H200,
    "b200": _B200,
    "gb200": _GB200,
    "gb300": _GB300,
}
"""By the name that ``--gpu`` takes."""


def hardware(name: str) -> Hardware:
    """The hardware of a name, in any case.

    Raises:
        ConfigError: no such name.
    """
    found = HARDWARE.get(name.lower())
    if found is None:
        problem = (
            f"plan: --gpu must be {joined(HARDWARE)}, got {shown(name)}; use h100, or build a "
            "mcp_parallel.planner.hardware.Hardware of your own figures"
        )
        raise ConfigError([problem])
    return found
