"""What the benches of a Transformer block's ops share: shapes, paths, torch's own as peers."""

from __future__ import annotations

import torch
from conftest import Peer

# Rows and features of the trainer's 20M model, and of one whose tensors lie outside of caches.
SIZES = {"20m": (1024, 384), "large": (4096, 2048)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def rows(size, dtype, seed=0, width=None):
    count, features = SIZES[size]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width or features, generator=generator).to(DTYPES[dtype])


def copy_peer(tensors_read, tensors_written):
    """memcpy of as many bytes: the mean of what is read and what is written, read and written."""
    num_bytes = (sum(t.nbytes for t in tensors_read) + sum(t.nbytes for t in tensors_written)) // 2
    source = torch.empty(num_bytes, dtype=torch.uint8).fill_(1)
    target = torch.empty_like(source)
    return Peer(lambda: target.copy_(source), 2 * num_bytes)


def forward_and_backward(function, inputs, dy):
    """``function(*inputs)`` and the gradients of all inputs, as a step of training has it."""

    def run():
        y = function(*inputs)
        return torch.autograd.grad(y, inputs, dy)

    return run


def assert_alike(ours, theirs, dtype):
    """A number is worth nothing when the result is wrong."""
    tolerance = {"fp32": 1e-4, "bf16": 3e-2}[dtype]
    for got, want in zip(ours, theirs, strict=True):
        scale = want.abs().max().item()
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * scale)
