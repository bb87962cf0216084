"""Processor, memory and limits of this machine. No torch."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

from mcp_parallel.doctor.finding import Finding
from mcp_parallel.launch.cores import affinity_cores, quota_cores, usable_cores

_CPUINFO = Path("/proc/cpuinfo")
_SHM = Path("/dev/shm")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

# What our CPU kernels and torch's make use of, as /proc/cpuinfo spells it.
_FEATURES = ("avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "amx_tile", "asimd", "sve")

# Docker's own size of /dev/shm: too little for eight ranks' buffers.
_SMALL_SHM_BYTES = 64 << 20
# Shared-memory files that processes of ours, of torch or of Python leave when they are killed.
_SHM_PREFIXES = ("mcp", "torch_", "psm_", "nccl-")
# A rank opens a few sockets for every other rank, its checkpoint's files and torch's own.
_FEW_FILES = 1024


def processor_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Instruction sets, cores and thread settings."""
    features = cpu_features(_read(_CPUINFO))
    yield Finding("processor", "ok", f"{platform.machine()}: {' '.join(features) or 'baseline'}")
    yield _cores_finding()
    yield from thread_findings(environ, usable_cores())


def cpu_features(cpuinfo: str) -> list[str]:
    """Those of ``_FEATURES`` that the text of /proc/cpuinfo lists."""
    for line in cpuinfo.splitlines():
        if line.split(":")[0].strip() in ("flags", "Features"):
            present = set(line.split(":", 1)[1].split())
            return [name for name in _FEATURES if name in present]
    return []


def physical_cores(cpuinfo: str) -> int | None:
    """Distinct (socket, core) pairs in the text of /proc/cpuinfo; None where it tells none."""
    pairs: set[tuple[str, str]] = set()
    socket = ""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "physical id":
            socket = value.strip()
        elif key.strip() == "core id":
            pairs.add((socket, value.strip()))
    return len(pairs) or None


def _cores_finding() -> Finding:
    logical = os.cpu_count() or 1
    physical = physical_cores(_read(_CPUINFO))
    affinity, quota = affinity_cores(), quota_cores()
    value = f"{logical} logical" + (f", {physical} physical" if physical else "")
    limits = []
    if affinity < logical:
        limits.append(f"the affinity mask allows {affinity}")
    if quota is not None and quota < affinity:
        limits.append(f"the container's quota grants {quota:g}")
    if not limits:
        return Finding("cores", "ok", value)
    advice = f"plan for {usable_cores()} threads over all ranks; more only wait for each other"
    return Finding("cores", "note", f"{value}; {' and '.join(limits)}", advice)


def thread_findings(environ: Mapping[str, str], cores: int) -> Iterator[Finding]:
    """OpenMP and BLAS settings, judged for several ranks on ``cores`` cores."""
    wanted = environ.get("OMP_NUM_THREADS")
    if wanted is None:
        yield Finding("threads", "ok", f"each rank gets its share of {cores} cores")
    elif not wanted.split(",")[0].strip().isdigit():
        yield Finding(
            "threads", "note", f"OMP_NUM_THREADS={wanted}", "it must be a number: unset it"
        )
    elif int(wanted.split(",")[0]) > cores:
        advice = f"more threads than the {cores} usable cores are far slower: unset it"
        yield Finding("threads", "note", f"OMP_NUM_THREADS={wanted}", advice)
    else:
        yield Finding("threads", "ok", f"OMP_NUM_THREADS={wanted} for every rank")
    for name in ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_DYNAMIC"):
        if name in environ:
            advice = "it overrides the share that each rank is given: unset it"
            yield Finding("threads", "note", f"{name}={environ[name]}", advice)
    for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
        if environ.get(name, "false").lower() not in ("false", "disabled", "none"):
            advice = "it ties the threads of all ranks to the same cores: unset it"
            yield Finding("threads", "note", f"{name}={environ[name]}", advice)


def memory_findings() -> Iterator[Finding]:
    """Memory, shared memory, huge pages."""
    available = available_memory_bytes()
    if available is not None:
        yield Finding("memory", "ok", f"{available / 2**30:.1f} GiB available")
    if _SHM.is_dir():
        yield from shm_findings(_SHM)
    modes = _read(_HUGE_PAGES).strip()
    if modes:
        yield huge_page_finding(modes)


def available_memory_bytes() -> int | None:
    """Memory that could be used without swapping; None where the system does not say."""
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def shm_findings(folder: Path) -> Iterator[Finding]:
    """Size of the shared-memory file system, and what dead processes of this user left there."""
    stats = os.statvfs(folder)
    size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    value = f"{folder}: {free / 2**20:.0f} of {size / 2**20:.0f} MiB free"
    if free < _SMALL_SHM_BYTES:
        advice = "ranks of one host share memory there: free it, or start docker with --shm-size=1g"
        yield Finding("shared memory", "note", value, advice)
    else:
        yield Finding("shared memory", "ok", value)
    left = [
        entry.name
        for entry in os.scandir(folder)
        if entry.name.startswith(_SHM_PREFIXES)
        and entry.stat(follow_symlinks=False).st_uid == os.getuid()
    ]
    if left:
        shown = ", ".join(sorted(left)[:3]) + (", ..." if len(left) > 3 else "")
        advice = f"when no run of yours is alive, remove them from {folder}: they hold memory"
        yield Finding("shared memory", "note", f"{len(left)} files of yours: {shown}", advice)


def huge_page_finding(modes: str) -> Finding:
    """Judge ``/sys/kernel/mm/transparent_hugepage/enabled``, such as ``always [madvise] never``."""
    mode = modes[modes.find("[") + 1 : modes.find("]")] if "[" in modes else modes
    if mode == "never":
        advice = "large tensors take longer to map; an administrator can set madvise"
        return Finding("huge pages", "note", mode, advice)
    return Finding("huge pages", "ok", mode)


def limit_findings() -> Iterator[Finding]:
    """Open files, and locked memory where a network card needs it."""
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < _FEW_FILES:
        advice = f"raise it (ulimit -n {hard if hard > files else 4096}): every rank opens sockets"
        yield Finding("open files", "note", str(files), advice)
    else:
        yield Finding("open files", "ok", str(files) if files >= 0 else "unlimited")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    value = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked >> 10} KiB"
    if locked != resource.RLIM_INFINITY and Path("/sys/class/infiniband").is_dir():
        advice = "InfiniBand registers memory: set ulimit -l unlimited"
        yield Finding("locked memory", "note", value, advice)
    else:
        yield Finding("locked memory", "ok", value)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
