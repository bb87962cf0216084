"""Versions, built kernels and packages."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from mcp_parallel.doctor.finding import Finding, note, problem, unset

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
        return problem(
            "torch",
            "not installed",
            wanted=f"{floor} or newer",
            why="training is built on it",
            how=f"pip install 'torch>={floor}'; on a machine without a GPU take the CPU build",
        )
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < TORCH_FLOOR:
        return problem(
            "torch",
            found,
            wanted=f"{floor} or newer",
            why="older ones lack the ABI of our kernels and a fix of torch.load",
            how=f"pip install 'torch>={floor}'",
        )
    return Finding("torch", "ok", found)


def package_finding(name: str, found: str | None, missed: str | None) -> Finding:
    """Judge one package; ``missed`` says what goes on without it, None when nothing does."""
    if found is not None:
        return Finding(name, "ok", found)
    how = f"pip install {name}"
    if missed is None:
        why = "training needs it"
        return problem(name, "not installed", wanted="any version", why=why, how=how)
    return note(name, "not installed", wanted="any version", why=f"without it {missed}", how=how)


def _kernel_findings() -> Iterator[Finding]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # said once at import; told in full here
        import mcp_kernels
    try:
        info = mcp_kernels.build_info()
    except ValueError as error:
        yield problem(
            "kernels",
            "cannot choose an instruction set",
            wanted="one that this processor has",
            why=str(error),
            how="unset MCP_CPU_ISA",
            fix=unset("MCP_CPU_ISA", "it names no instruction set of this processor"),
        )
        return
    for name, built in info.extensions.items():
        topic = f"kernels {name}"
        if built:
            yield Finding(topic, "ok", "built")
        elif name == "cuda" and not _torch_has_cuda():
            yield Finding(topic, "ok", "not built, none needed with a CPU torch")
        else:
            yield note(
                topic,
                "not built",
                wanted="built",
                why=f"{info.reasons[name]}; plain PyTorch does the same, slower",
                how="install a C++ compiler, then pip install . once more",
            )
    if info.cpu_isa is not None:
        fastest = info.cpu_isa_default
        if info.cpu_isa_forced and info.cpu_isa != fastest:
            why = f"{fastest} is fastest here"
            yield note(
                "instruction set",
                f"{info.cpu_isa}, forced",
                wanted=str(fastest),
                why=why,
                how="unset MCP_CPU_ISA, unless for a test",
                fix=unset("MCP_CPU_ISA", why),
            )
        else:
            yield Finding("instruction set", "ok", info.cpu_isa)


def nccl_version() -> str | None:
    """Of the NCCL that torch is linked to, None where it does not say."""
    from torch.cuda import nccl

    try:
        return ".".join(map(str, nccl.version()))
    except (AttributeError, RuntimeError):
        return None


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
        return problem(
            topic,
            "cannot choose a backend",
            wanted="auto, shm or gloo",
            why=str(error),
            how="unset MCP_BACKEND",
            fix=unset("MCP_BACKEND", "it names no backend"),
        )
    if wanted == "gloo":
        why = "CPU ranks of one host talk faster through shared memory"
        return note(
            topic,
            "not used, MCP_BACKEND=gloo",
            wanted="used",
            why=why,
            how="unset MCP_BACKEND",
            fix=unset("MCP_BACKEND", why),
        )
    if not reason:
        return Finding(topic, "ok", "CPU ranks use it; MCP_BACKEND=gloo would not")
    how = "install a C++ compiler, then pip install . once more"
    if wanted == "shm":
        value = "MCP_BACKEND=shm cannot be had"
        return problem(topic, value, wanted="the module built", why=reason, how=how)
    value = "CPU ranks use gloo, slower"
    return note(topic, value, wanted="shared memory", why=reason, how=how)


def _backend_findings() -> Iterator[Finding]:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        yield problem(
            "gloo",
            "not in this torch",
            wanted="torch.distributed with gloo",
            why="ranks find each other by it",
            how="use a torch built with both, as the official wheels are",
        )
        return
    yield Finding("gloo", "ok", "available")
    yield _shm_finding()
    if dist.is_nccl_available():
        yield Finding("nccl", "ok", nccl_version() or "available")
    elif _torch_has_cuda():
        yield note(
            "nccl",
            "not in this torch",
            wanted="NCCL",
            why="GPU ranks cannot talk to each other",
            how="use an official CUDA build of torch",
        )
    else:
        yield Finding("nccl", "ok", "not in this torch, none needed without CUDA")
    words = "available" if dist.is_mpi_available() else "not in this torch, none needed"
    yield Finding("mpi", "ok", words)
