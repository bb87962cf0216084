"""Decides whether CUDA bodies are built, for which GPUs, and how nvcc is called."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from find_torch import FoundTorch

# A100 by plain SASS; H100 and H200 by the variant that has their wgmma and TMA instructions.
DEFAULT_ARCHS = "8.0;9.0a"


@dataclass(frozen=True)
class Cuda:
    """How to compile .cu files."""

    nvcc: Path
    archs: tuple[str, ...]


def find_nvcc() -> Path | None:
    """Nvcc of CUDA_HOME (or CUDA_PATH), else of PATH."""
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home and (Path(home) / "bin" / "nvcc").is_file():
            return Path(home) / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    return Path(on_path) if on_path else None


def choose_cuda(torch: FoundTorch | None) -> tuple[Cuda | None, str]:
    """How to build CUDA bodies, or None and the reason; MCP_CUDA=0, 1 or auto decides.

    Raises:
        ValueError: MCP_CUDA is none of these, or it is 1 and CUDA bodies cannot be built.
    """
    wanted = os.environ.get("MCP_CUDA", "auto")
    if wanted not in ("0", "1", "auto"):
        raise ValueError(f"MCP_CUDA: must be 0, 1 or auto, got {wanted}")
    if wanted == "0":
        return None, "MCP_CUDA=0 was set at build time"
    nvcc, reason = find_nvcc(), ""
    if torch is None:
        reason = "no torch was found at build time"
    elif torch.cuda is None:
        reason = f"the torch found at build time, {torch.version}, is a CPU build"
    elif nvcc is None:
        reason = "nvcc was not found on PATH or in CUDA_HOME at build time"
    elif nvcc_release(nvcc).split(".")[0] != torch.cuda.split(".")[0]:
        reason = f"nvcc is CUDA {nvcc_release(nvcc)} but torch was built with CUDA {torch.cuda}"
    if reason or nvcc is None:
        if wanted == "1":
            raise ValueError(
                f"MCP_CUDA=1: CUDA kernels cannot be built, {reason}; install a CUDA build of "
                f"torch and nvcc of the same major version, or set MCP_CUDA=auto"
            )
        return None, reason
    return Cuda(nvcc, cuda_archs()), ""


def nvcc_release(nvcc: Path) -> str:
    """The release of nvcc, "13.0" in "Cuda compilation tools, release 13.0, V13.0.88"."""
    text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release (\d+\.\d+)", text.stdout)
    return found.group(1) if found else "unknown"


def cuda_archs() -> tuple[str, ...]:
    """TORCH_CUDA_ARCH_LIST ("8.0;9.0a", "9.0+PTX"), split."""
    text = os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_ARCHS
    return tuple(part for part in re.split(r"[;,\s]+", text) if part)


def gencode_flags(archs: tuple[str, ...]) -> list[str]:
    """Nvcc flags of architectures.

    Raises:
        ValueError: one is not written as torch's list is.
    """
    flags = []
    for arch in archs:
        parsed = re.fullmatch(r"(\d+)\.(\d+[af]?)(\+PTX)?", arch)
        if parsed is None:
            raise ValueError(
                f'TORCH_CUDA_ARCH_LIST: must look like "8.0;9.0a" or "9.0+PTX", got {arch}'
            )
        number = parsed[1] + parsed[2]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if parsed[3]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def nvcc_flags(archs: tuple[str, ...]) -> list[str]:
    """Flags of every .cu file. USE_CUDA opens the CUDA part of torch's stable headers."""
    return [
        *("-O3", "-std=c++17", "-DUSE_CUDA", "-Xcompiler=-fPIC,-fvisibility=hidden"),
        # As -ffp-contract=off on CPU: bits must not depend on what the compiler fuses.
        *("--fmad=false", "-diag-suppress=20012"),
        *gencode_flags(archs),
    ]
