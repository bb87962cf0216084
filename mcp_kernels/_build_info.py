"""What was built, what was not and why; loads ``_C``. The one place here that reads our env."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import warnings
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from mcp_kernels._version import __version__

RECORD = Path(__file__).with_name("_build_record.json")


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """The state of this installation, as ``build_info()`` found it.

    ``extensions`` and ``reasons`` share keys: "_C" (CPU kernels), "cuda" (CUDA kernels inside
    ``_C``), "_shm" (shared memory of one host). ``reasons[x]`` is "" where ``x`` is usable.
    """

    version: str
    torch_running: str
    torch_built_against: str | None
    extensions: dict[str, bool]
    reasons: dict[str, str]
    compiler: str | None = None
    cpu_isa: str | None = None
    """The instruction set the CPU bodies run on; None without ``_C``."""
    cpu_isas: tuple[str, ...] = ()
    """What this CPU could run, lowest first: each runs everything that those before it do."""
    cpu_isa_default: str | None = None
    """The fastest of them on this CPU, which runs where MCP_CPU_ISA is not set."""
    cpu_isa_forced: bool = False
    """Whether MCP_CPU_ISA chose ``cpu_isa``."""
    cuda_archs: tuple[str, ...] = ()
    triton: str | None = None
    """Version of Triton where it is installed."""
    record: dict[str, Any] = field(default_factory=dict, repr=False)
    """What the build wrote down, as it is."""

    def __str__(self) -> str:
        """A short table for people."""
        lines = [f"mcp-kernels {self.version}, torch {self.torch_running}"]
        lines += [
            f"  {name}: " + ("built" if built else f"not built ({self.reasons[name]})")
            for name, built in self.extensions.items()
        ]
        if self.cpu_isa:
            how = "forced by MCP_CPU_ISA" if self.cpu_isa_forced else "detected"
            lines.append(
                f"  CPU bodies: {self.cpu_isa} ({how}; can run {', '.join(self.cpu_isas)})"
            )
        lines.append(f"  triton: {self.triton or 'not installed'}")
        return "\n".join(lines)


@lru_cache(maxsize=1)
def _extension() -> tuple[Any, str]:
    """The module ``mcp_kernels._C``, or None and why it cannot be used."""
    try:
        return importlib.import_module("mcp_kernels._C"), ""
    except ModuleNotFoundError:
        return None, _record_reason("_C")
    except ImportError as failure:
        return None, f"mcp_kernels._C does not load: {failure}"


@lru_cache(maxsize=1)
def _record() -> dict[str, Any]:
    try:
        return json.loads(RECORD.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def _record_reason(name: str) -> str:
    if not _record():
        return "this source tree was never built; run: pip install ."
    return _record()["reasons"].get(name) or f"the build made {name}, but its file is gone"


def load_extension() -> None:
    """Load ``_C``, which registers its bodies; without it, warn once and go on with references.

    Raises:
        ImportError: MCP_REQUIRE_EXT=1 is set and ``_C`` cannot be used.
    """
    module, reason = _extension()
    if module is not None:
        return
    message = f"mcp_kernels runs on its plain-PyTorch references: {reason}"
    if os.environ.get("MCP_REQUIRE_EXT", "0") == "1":
        raise ImportError(f"{message} (MCP_REQUIRE_EXT=1 makes this an error)")
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _triton_version() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return None
    for distribution in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "of unknown version"


def current_isa() -> str | None:
    """The instruction set of the CPU bodies now; None without ``_C``."""
    module, _ = _extension()
    return None if module is None else module.cpu_isa()


def cpu_isa_of(op: str, *, is_bfloat16: bool) -> str | None:
    """The instruction set whose body ``op`` runs now, given bfloat16 or not; None without ``_C``.

    Only products of bfloat16 have a body of their own at "avx512_bf16"; all else runs "avx512".
    """
    module, _ = _extension()
    return None if module is None else module.cpu_isa_of(op, is_bfloat16)


def build_info() -> BuildInfo:
    """What was built, what was not and why, and what the CPU bodies run on.

    Raises:
        ValueError: MCP_CPU_ISA names an instruction set that is unknown or that this CPU lacks.
    """
    module, reason = _extension()
    record = _record()
    has_shm = importlib.util.find_spec("mcp_kernels._shm") is not None
    has_cuda = module is not None and module.has_cuda()
    reasons = {
        "_C": reason,
        "cuda": "" if has_cuda else (reason or _record_reason("cuda")),
        "_shm": "" if has_shm else _record_reason("_shm"),
    }
    return BuildInfo(
        version=__version__,
        torch_running=str(torch.__version__),
        torch_built_against=record.get("torch") if module is not None else None,
        extensions={"_C": module is not None, "cuda": has_cuda, "_shm": has_shm},
        reasons=reasons,
        compiler=record.get("compiler"),
        cpu_isa=current_isa(),
        cpu_isas=() if module is None else tuple(module.cpu_isas()),
        cpu_isa_default=None if module is None else module.default_cpu_isa(),
        cpu_isa_forced=module is not None and "MCP_CPU_ISA" in os.environ,
        cuda_archs=tuple(record.get("cuda_archs", ())) if has_cuda else (),
        triton=_triton_version(),
        record=record,
    )
