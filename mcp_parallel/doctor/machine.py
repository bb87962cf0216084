"""Processor, memory and limits of this machine. No torch."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

from mcp_parallel.doctor.finding import Finding, ShellLine, note, unset
from mcp_parallel.doctor.host import ROOT, read
from mcp_parallel.launch.cores import affinity_cores, quota_cores, usable_cores

_CPUINFO = "proc/cpuinfo"
_SHM = "dev/shm"
_HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"

# What our CPU kernels and torch's make use of, as /proc/cpuinfo spells it.
_FEATURES = ("avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "amx_tile", "asimd", "sve")

# Docker's own size of /dev/shm: too little for eight ranks' buffers.
_SMALL_SHM_BYTES = 64 << 20
# Shared-memory files that processes of ours, of torch or of Python leave when they are killed.
_SHM_PREFIXES = ("mcp", "torch_", "psm_", "nccl-")
# A rank opens a few sockets for every other rank, its checkpoint's files and torch's own; a
# thousand ranks are no rarity.
_FEW_FILES = 4096


def processor_findings(environ: Mapping[str, str], root: Path = ROOT) -> Iterator[Finding]:
    """Instruction sets, cores and thread settings."""
    features = cpu_features(read(root, _CPUINFO))
    yield Finding("processor", "ok", f"{platform.machine()}: {' '.join(features) or 'baseline'}")
    yield _cores_finding(root)
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


def _cores_finding(root: Path) -> Finding:
    logical = os.cpu_count() or 1
    physical = physical_cores(read(root, _CPUINFO))
    affinity, quota = affinity_cores(), quota_cores()
    value = f"{logical} logical" + (f", {physical} physical" if physical else "")
    limits = []
    if affinity < logical:
        limits.append(f"the affinity mask allows {affinity}")
    if quota is not None and quota < affinity:
        limits.append(f"the container's quota grants {quota:g}")
    if not limits:
        return Finding("cores", "ok", value)
    return note(
        "cores",
        f"{value}; {' and '.join(limits)}",
        wanted="all cores, or a plan for those there are",
        why="threads beyond them only wait for each other",
        how=f"plan for {usable_cores()} threads over all ranks",
    )


def thread_findings(environ: Mapping[str, str], cores: int) -> Iterator[Finding]:
    """OpenMP and BLAS settings, judged for several ranks on ``cores`` cores."""
    wanted = environ.get("OMP_NUM_THREADS")
    if wanted is None:
        yield Finding("threads", "ok", f"each rank gets its share of {cores} cores")
    elif not wanted.split(",")[0].strip().isdigit():
        yield _thread_note("OMP_NUM_THREADS", wanted, "it is no number")
    elif int(wanted.split(",")[0]) > cores:
        why = f"more threads than the {cores} usable cores are far slower"
        yield _thread_note("OMP_NUM_THREADS", wanted, why)
    else:
        yield Finding("threads", "ok", f"OMP_NUM_THREADS={wanted} for every rank")
    for name in ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_DYNAMIC"):
        if name in environ:
            why = "it overrides the share that each rank is given"
            yield _thread_note(name, environ[name], why)
    for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
        if environ.get(name, "false").lower() not in ("false", "disabled", "none"):
            why = "it ties the threads of all ranks to the same cores"
            yield _thread_note(name, environ[name], why)


def _thread_note(name: str, value: str, why: str) -> Finding:
    return note(
        "threads",
        f"{name}={value}",
        wanted="unset, so that each rank gets its share of the cores",
        why=why,
        how=f"unset {name}",
        fix=unset(name, why),
    )


def memory_findings(root: Path = ROOT) -> Iterator[Finding]:
    """Memory, shared memory, huge pages."""
    available = available_memory_bytes(root)
    if available is not None:
        yield Finding("memory", "ok", f"{available / 2**30:.1f} GiB available")
    if (root / _SHM).is_dir():
        yield from shm_findings(root / _SHM)
    modes = read(root, _HUGE_PAGES)
    if modes:
        yield huge_page_finding(modes)


def available_memory_bytes(root: Path = ROOT) -> int | None:
    """Memory that could be used without swapping; None where the system does not say."""
    for line in read(root, "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def shm_findings(folder: Path) -> Iterator[Finding]:
    """Size of the shared-memory file system, and what dead processes of this user left there."""
    stats = os.statvfs(folder)
    size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    value = f"{folder}: {free / 2**20:.0f} of {size / 2**20:.0f} MiB free"
    if free < _SMALL_SHM_BYTES:
        yield note(
            "shared memory",
            value,
            wanted=f"{_SMALL_SHM_BYTES >> 20} MiB or more free",
            why="ranks of one host, and NCCL, share memory there",
            how="free it, or start docker with --shm-size=1g; a Kubernetes pod needs an emptyDir "
            "of medium Memory on /dev/shm, as `mcp-parallel launch` writes it",
        )
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
        yield note(
            "shared memory",
            f"{len(left)} files of yours: {shown}",
            wanted="none when no run of yours is alive",
            why="they hold memory",
            how=f"when no run of yours is alive, remove them from {folder}",
        )


def huge_page_finding(modes: str) -> Finding:
    """Judge ``/sys/kernel/mm/transparent_hugepage/enabled``, such as ``always [madvise] never``."""
    mode = modes[modes.find("[") + 1 : modes.find("]")] if "[" in modes else modes
    if mode == "never":
        return note(
            "huge pages",
            mode,
            wanted="madvise or always",
            why="large tensors take longer to map, and more of the processor's page cache",
            how="as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    return Finding("huge pages", "ok", mode)


def limit_findings(root: Path = ROOT) -> Iterator[Finding]:
    """Open files, and locked memory where a network card needs it."""
    yield open_files_finding(*resource.getrlimit(resource.RLIMIT_NOFILE))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    value = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked >> 10} KiB"
    if locked != resource.RLIM_INFINITY and (root / "sys/class/infiniband").is_dir():
        yield note(
            "locked memory",
            value,
            wanted="unlimited",
            why="InfiniBand registers memory, which fails or falls back to TCP at the limit",
            how="ulimit -l unlimited; an administrator sets memlock in /etc/security/limits.conf, "
            "docker --ulimit memlock=-1",
        )
    else:
        yield Finding("locked memory", "ok", value)


def open_files_finding(files: int, hard: int) -> Finding:
    """Judge the limits of open files, soft and hard; -1 is none."""
    if not 0 <= files < _FEW_FILES:
        return Finding("open files", "ok", str(files) if files >= 0 else "unlimited")
    why = "every rank opens a socket for each other rank"
    raised = _FEW_FILES if hard < 0 else min(hard, _FEW_FILES)
    fix = ShellLine(f"ulimit -S -n {raised}", why) if raised > files else None
    how = f"ulimit -S -n {raised}" if fix else "an administrator sets nofile in limits.conf"
    wanted = f"{_FEW_FILES} or more"
    return note("open files", f"{files}, at most {hard}", wanted=wanted, why=why, how=how, fix=fix)
