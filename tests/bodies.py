"""Every body of an op on this CPU: the reference and each instruction set, held to equal bits."""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager

import numpy as np

from mcp_kernels import reference_only
from mcp_kernels.testing import assert_same_bits

if importlib.util.find_spec("mcp_kernels._C") is not None:
    from mcp_kernels import _C

    ISAS = list(_C.cpu_isas())
else:
    ISAS = []

PATHS = ["reference", *ISAS]


@contextmanager
def running_on(path):
    """Run our ops on the reference or on one instruction set."""
    if path == "reference":
        with reference_only():
            yield
        return
    before = _C.cpu_isa()
    _C.set_cpu_isa(path)
    try:
        yield
    finally:
        _C.set_cpu_isa(before)


def on_every_path(call):
    """What ``call()`` gives on the reference, after every other body gave the same bits.

    ``call`` makes its own copies of what the op changes and returns a tuple of tensors.
    """
    with running_on("reference"):
        expected = call()
    for path in ISAS:
        with running_on(path):
            actual = call()
        for number, (got, want) in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(got, want, f"output {number} on {path}")
    return expected


def rms_within_half_an_ulp(scale, values):
    """Whether ``scale`` is the root mean square of float32 ``values``, rounded once.

    Half an ulp of float32 for the one rounding to it; the float64 sums before it are far below a
    hundredth of that. An ulp is 2^-149 at the least.
    """
    exact = np.sqrt(np.mean(values.astype(np.longdouble) ** 2))
    half_ulp = max(np.spacing(np.float32(exact)), np.float32(2**-149)) / 2
    return abs(np.longdouble(scale) - exact) <= 1.01 * half_ulp
