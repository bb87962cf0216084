"""Versions, built kernels and packages."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from mcp_parallel.doctor.finding import Finding

# The stable ABI that our kernels are built on, and the fix of CVE-2026-24747 in torch.load.
TORCH_FLOOR = (2, 10)

# Package -> what is missed without it; None: training needs it.
_PACKAGES = {
    "numpy": None,
    "safetensors": None,
    "PyYAML": None,
    "rich": "there is no progress bar",
    "tensorboard": "metrics go to metrics.jsonl only",
    "triton": "GPU kernels run as plain PyTorch",
}


def software_findings() -> Iterator[Finding]:
    """Python, torch, our kernels, the backends of torch.distributed, packages."""
    yield Finding("python", "ok", platform.python_version())
    torch_version = installed_version("torch")
    yield torch_finding(torch_version)
    if torch_version is not None:
        yield from _kernel_findings()
        yield from _backend_findings()
    for name, missed in _PACKAGES.items():
        yield package_finding(name, installed_version(name), missed)


def installed_version(package: str) -> str | None:
    """The version of an installed distribution, None when there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def torch_finding(found: str | None) -> Finding:
    """Judge the version of torch."""
    floor = ".".join(map(str, TORCH_FLOOR))
    if found is None:
        advice = f"pip install 'torch>={floor}'; on a machine without a GPU take the CPU build"
        return Finding("torch", "problem", "not installed", advice)
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < TORCH_FLOOR:
        advice = f"use torch {floor} or newer: older ones lack the ABI of our kernels and a fix"
        return Finding("torch", "problem", found, f"{advice} of torch.load")
    return Finding("torch", "ok", found)


def package_finding(name: str, found: str | None, missed: str | None) -> Finding:
    """Judge one package; ``missed`` says what goes on without it, None when nothing does."""
    if found is not None:
        return Finding(name, "ok", found)
    if missed is None:
        return Finding(name, "problem", "not installed", f"pip install {name}")
    return Finding(name, "note", "not installed", f"without it {missed}: pip install {name}")


def _kernel_findings() -> Iterator[Finding]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # said once at import; told in full here
        import mcp_kernels
    try:
        info = mcp_kernels.build_info()
    except ValueError as error:
        yield Finding("kernels", "problem", "cannot choose an instruction set", str(error))
        return
    for name, built in info.extensions.items():
        topic = f"kernels {name}"
        if built:
            yield Finding(topic, "ok", "built")
        elif name == "cuda" and not _torch_has_cuda():
            yield Finding(topic, "ok", "not built, none needed with a CPU torch")
        else:
            advice = f"{info.reasons[name]}; plain PyTorch does the same, slower"
            yield Finding(topic, "note", "not built", advice)
    if info.cpu_isa is not None:
        fastest = info.cpu_isa_default
        if info.cpu_isa_forced and info.cpu_isa != fastest:
            advice = f"unset MCP_CPU_ISA, unless for a test: {fastest} is fastest here"
            yield Finding("instruction set", "note", f"{info.cpu_isa}, forced", advice)
        else:
            yield Finding("instruction set", "ok", info.cpu_isa)


def _torch_has_cuda() -> bool:
    import torch

    return torch.version.cuda is not None


def _shm_finding() -> Finding:
    """What CPU ranks of one host will talk through; ``MCP_BACKEND`` chooses."""
    from mcp_parallel.launch.backend import wanted_backend, why_not_shm

    topic = "shared memory"
    try:
        wanted, reason = wanted_backend(), why_not_shm()
    except ValueError as error:
        return Finding(topic, "problem", "cannot choose a backend", str(error))
    if wanted == "gloo":
        advice = "unset it: CPU ranks of one host then talk through shared memory, which is faster"
        return Finding(topic, "note", "not used, MCP_BACKEND=gloo", advice)
    if not reason:
        return Finding(topic, "ok", "CPU ranks use it; MCP_BACKEND=gloo would not")
    if wanted == "shm":
        return Finding(topic, "problem", "MCP_BACKEND=shm cannot be had", reason)
    return Finding(topic, "note", "CPU ranks use gloo, slower", reason)


def _backend_findings() -> Iterator[Finding]:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        advice = "use a torch built with torch.distributed and gloo, as the official wheels are"
        yield Finding("gloo", "problem", "not in this torch", advice)
        return
    yield Finding("gloo", "ok", "available")
    yield _shm_finding()
    if dist.is_nccl_available():
        yield Finding("nccl", "ok", "available")
    elif _torch_has_cuda():
        advice = "GPU ranks cannot talk to each other: use an official CUDA build of torch"
        yield Finding("nccl", "note", "not in this torch", advice)
    else:
        yield Finding("nccl", "ok", "not in this torch, none needed without CUDA")
    words = "available" if dist.is_mpi_available() else "not in this torch, none needed"
    yield Finding("mpi", "ok", words)
