"""What one rank's hardware can do at most, for MFU: known GPUs by name, a CPU by a measurement."""

from __future__ import annotations

import time

import torch

from mcp_parallel.config import Config
from mcp_parallel.parallel.precision import Precision
from mcp_parallel.planner.hardware import HARDWARE

# A matmul of this side stays within a core's last-level cache and is long enough for a clock: 0.27
# GFLOP, some milliseconds of a core.
_SIDE = 512
_ROUNDS = 8


def peak_tflops(config: Config, device: torch.device) -> float | None:
    """TFLOP/s of one rank in the number format that the model computes in; None: not known.

    ``monitor.peak_tflops`` where it is given.

    Cost: on a CPU a tenth of a second.
    """
    if config.monitor.peak_tflops is not None:
        return config.monitor.peak_tflops
    if device.type == "cuda":
        return of_gpu(torch.cuda.get_device_name(device), config.train.precision)
    return _measured(Precision.of(config).compute)


def of_gpu(name: str, precision: str) -> float | None:
    """The data sheet's peak of a GPU by the name that its driver gives it."""
    words = name.upper().replace("-", " ").split()
    # The longest name first: an H100 is in "NVIDIA H100 80GB HBM3", a GB200 is no B200.
    for key in sorted(HARDWARE, key=len, reverse=True):
        if key.upper() in words:
            peak = HARDWARE[key].peak_flops.get(precision)
            return None if peak is None else peak / 1e12
    return None


def _measured(dtype: torch.dtype) -> float:
    """The best of some square matmuls on this process's threads."""
    a, b = (torch.ones(_SIDE, _SIDE, dtype=dtype) for _ in range(2))
    out = torch.empty(_SIDE, _SIDE, dtype=dtype)
    best_s = float("inf")
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * _SIDE**3 / best_s / 1e12
