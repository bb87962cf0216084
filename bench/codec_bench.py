"""What the codecs' benches share: the body to run on, the floor kernel, flat inputs."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from conftest import Peer

from mcp_kernels import build_info, reference_only
from mcp_kernels.optim.flat_buffer import flat_buffer
from mcp_kernels.testing import make_gradient

NUMEL = 1 << 24  # 64 MB of float32: no cache holds it
BLOCK_SIZE = 1024

if build_info().extensions["_C"]:
    from mcp_kernels import _C

    ISAS = [isa for isa in _C.cpu_isas() if isa != "avx512_bf16"]  # the same body as avx512
else:
    ISAS = []
PATHS = [*ISAS, "reference"]


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


def rounds(path):
    return 3 if path == "reference" else 15


def gradient(numel=NUMEL, dtype=torch.float32, seed=0):
    """Gradient-like values on huge pages."""
    return flat_buffer(numel, dtype).copy_(make_gradient(numel, seed=seed, dtype=dtype))


def in_place_scale(numel=NUMEL):
    """The floor: 4 bytes read and 4 written an element, one multiplication, on huge pages."""
    scaled = flat_buffer(numel).fill_(1.0)
    return Peer(lambda: scaled.mul_(1.0000001), 8 * numel)
