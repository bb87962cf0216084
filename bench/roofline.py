"""The limits that kernels are held against, measured in the same run: multiply-adds and reading."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cpp")
REPETITIONS = 2_000_000  # ~10 ms of multiply-adds


@functools.cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "roofline.so"
        compiler = os.environ.get("CXX", "c++")
        flags = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, str(SOURCE), "-o", str(target)], check=True)
        library = ctypes.CDLL(str(target))
    for name in ("fma", "dpbf16"):
        getattr(library, f"{name}_flops").restype = ctypes.c_int64
        getattr(library, f"run_{name}").restype = ctypes.c_float
        getattr(library, f"run_{name}").argtypes = [ctypes.c_int64]
    library.read_bytes.restype = ctypes.c_uint64
    library.read_bytes.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    return library


def compute_limits() -> dict[str, tuple[Callable[[], object], float]]:
    """``{"fp32_fma": (run, its flops), "dpbf16": ...}``, those that this CPU has; one core."""
    library, limits = _library(), {}
    for name, label in (("fma", "fp32_fma"), ("dpbf16", "dpbf16")):
        flops = getattr(library, f"{name}_flops")()
        if flops:
            run = functools.partial(getattr(library, f"run_{name}"), REPETITIONS)
            limits[label] = (run, float(flops * REPETITIONS))
    return limits


def read_all(tensors: Sequence[Tensor]) -> Callable[[], object]:
    """A run that reads the memory of contiguous (or permuted) tensors once, in its order."""
    library = _library()
    spans = [(t.data_ptr(), t.numel() * t.element_size()) for t in tensors]
    return lambda: [library.read_bytes(*span) for span in spans]
