"""The machine at hand as ``Hardware``: its GPUs by name, or its cores. No torch.

Cores that ``calibrate.py`` has measured are as measured, others have rough figures.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import NamedTuple

from mcp_parallel.errors import ConfigError, joined, shown
from mcp_parallel.launch.cores import usable_cores
from mcp_parallel.planner import calibration
from mcp_parallel.planner.hardware import GB, HARDWARE, Hardware

_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_TIMEOUT_S = 20
_MIB = 2**20
_NO_NVLINK = ("PCIE", "NVL")
"""Variants of a card with other peaks and without an NVLink switch; GB200 NVL72 is no such card."""


class Machine(NamedTuple):
    """What one host offers."""

    hardware: Hardware
    """Of a rank, when the host runs ``ranks`` of them."""
    ranks: int
    is_cpu: bool = False
    """Whether ranks are processes on cores; what was measured of them is taken where there is."""


def machine_here(local_ranks: int | None = None, device: str = "auto") -> Machine:
    """The host as it would run ``local_ranks`` ranks.

    Args:
        local_ranks: ranks that the host runs; None takes one for each GPU, or else for each core.
        device: auto, cpu or cuda, as ``MCP_DEVICE``; auto takes GPUs where each rank has one.

    Raises:
        ConfigError: the GPUs are of a kind that the planner has no figures of.

    Cost: starts nvidia-smi where there is one.
    """
    gpus = [] if device == "cpu" else _gpus()
    if gpus and len(gpus) >= (local_ranks or 1):
        ranks = local_ranks or len(gpus)
        return Machine(replace(gpu_hardware(*gpus[0]), domain_ranks=ranks), ranks)
    ranks = local_ranks or usable_cores()
    base = cpu_hardware(ranks)
    return Machine(calibration.cached(ranks, base) or base, ranks, is_cpu=True)


def _gpus() -> list[tuple[str, int]]:
    """(name, bytes) of each GPU that the driver shows."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = (line.rpartition(",") for line in done.stdout.splitlines() if done.returncode == 0)
    return [(name.strip(), int(size) * _MIB) for name, _, size in rows if size.strip().isdigit()]


def gpu_hardware(name: str, memory_bytes: int) -> Hardware:
    """The known hardware of a driver's name for a GPU, with the memory it reports.

    Raises:
        ConfigError: there are no figures of such a GPU.
    """
    words = name.upper()
    is_known_variant = (
        "GB200" in words or "GB300" in words or not any(word in words for word in _NO_NVLINK)
    )
    # Longer names first: GB200 before B200.
    for key in sorted(HARDWARE, key=len, reverse=True):
        if key.upper() in words and is_known_variant:
            return replace(HARDWARE[key], memory_bytes=memory_bytes)
    problem = (
        f"plan: parallel.auto must run on GPUs that the planner knows ({joined(HARDWARE)}, with "
        f"NVLink), got {shown(name)}; give parallel.dp, parallel.tp and parallel.pp"
    )
    raise ConfigError([problem])


def cpu_hardware(ranks: int) -> Hardware:
    """Ranks that share this host's cores and memory; rough figures of a server's core.

    32 single-precision operations a cycle (two 256-bit multiply-adds) at 2.5 GHz, 10 GB/s of memory
    and 4 GB/s of shared-memory collectives. Only their ratios matter for the choice of a layout.
    """
    share = usable_cores() / ranks
    fp32 = 80e9 * share
    return Hardware(
        name=f"{usable_cores()} CPU cores",
        peak_flops={"fp32": fp32, "fp64": fp32 / 2, "bf16": fp32, "fp16": fp32 / 2},
        memory_bytes=_host_memory() // ranks,
        memory_bytes_per_s=10 * GB * share,
        domain_ranks=ranks,
        domain_bytes_per_s=4 * GB * min(1.0, share),
        network_bytes_per_s=1 * GB,
        domain_latency_s=30e-6,
        network_latency_s=100e-6,
        op_overhead_s=10e-6,
        overlap_slowdown=1.0,
        reserve_bytes=300 * _MIB,
        half_efficiency_side=16.0,
        source="rough figures of a server's core",
    )


def _host_memory() -> int:
    """Bytes that this process may use: the container's limit, else the host's memory."""
    total = 1 << 62
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    with open("/proc/meminfo", encoding="ascii") as file:
        kib = next(int(line.split()[1]) for line in file if line.startswith("MemTotal"))
    return min(total, kib * 1024)
