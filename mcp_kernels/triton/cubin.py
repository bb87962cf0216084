"""Compile a Triton launch for a GPU that is not there, and read what it would use of one.

A launch compiled here is the one that a GPU would run: types, alignment and constants come from its
arguments by Triton's own rules. Registers and spills are read off the compiled object.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mcp_kernels.triton.launch import Launch

_TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
_ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True)
class Resources:
    """What one program of a kernel takes."""

    registers: int
    """32-bit registers a thread."""
    spill_bytes: int
    """Bytes of stack a thread, where values go for want of registers."""
    shared_bytes: int
    """Shared memory of a program."""
    has_wgmma: bool
    """Whether products run on Hopper's warp-group instructions."""


def compile_launch(launch: Launch, arch: int) -> Resources:
    """Compile ``launch`` for compute capability ``arch`` (80, 90).

    Raises:
        RuntimeError: the compiled object does not say what it takes.
    """
    return compile_launch_with_ptx(launch, arch)[0]


def compile_launch_with_ptx(launch: Launch, arch: int) -> tuple[Resources, str]:
    """As ``compile_launch``, with the PTX text."""
    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    given = {**launch.args, **launch.constants}
    for index, name in enumerate(launch.kernel.arg_names):
        if name in launch.constants:
            signature[name] = "constexpr"
            constants[(index,)] = launch.constants[name]
            continue
        signature[name] = _signature(given[name], (index,), constants, attributes)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    target = GPUTarget("cuda", arch, 32)
    compiled = triton.compile(source, target=target, options=launch.options())
    cubin, ptx = compiled.asm["cubin"], compiled.asm["ptx"]
    return _resources(cubin, ptx, compiled.metadata.shared), ptx


def _signature(
    value: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[Any, Any]
) -> Any:
    """Triton's type of an argument; notes constants and alignment as a launch would."""
    if isinstance(value, tuple):
        return tuple(
            _signature(item, (*path, at), constants, attributes) for at, item in enumerate(value)
        )
    if value is None or (isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, Tensor):
        attributes[path] = _ALIGNED  # what torch's allocator gives
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if value % 16 == 0:
        attributes[path] = _ALIGNED
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _resources(cubin: bytes, ptx: str, shared_bytes: int) -> Resources:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if found is None:
        raise RuntimeError(f"compile_launch: cuobjdump must report registers, got {report!r}")
    registers, spill_bytes = map(int, found.groups())
    return Resources(registers, spill_bytes, shared_bytes, "wgmma.mma_async" in ptx)
