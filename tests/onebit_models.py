"""Parameters, gradients and a one-process definition of 1-bit Adam, for its tests."""

from __future__ import annotations

import torch

from mcp_kernels import onebit_compress, onebit_decompress
from mcp_kernels.ops.block_layout import BlockLayout
from mcp_kernels.testing import make_gradient

SHAPES = ((7, 13), (1,), (65,), (3, 5, 64))
"""A matrix, a scalar, one past a block of 64, whole blocks."""
BLOCK = 64


def make_params(shapes=SHAPES, dtype=torch.float32):
    return [
        torch.nn.Parameter(make_gradient(torch.Size(shape).numel(), seed=i).view(shape).to(dtype))
        for i, shape in enumerate(shapes)
    ]


def gradients(rank, step, shapes=SHAPES, dtype=torch.float32):
    """One rank's gradients of one step: a part that all ranks share and one of its own."""
    return [
        (
            make_gradient(torch.Size(shape).numel(), seed=7 * i + 1)
            + 0.5 * make_gradient(torch.Size(shape).numel(), seed=1000 * step + 10 * rank + i)
        )
        .view(shape)
        .to(dtype)
        for i, shape in enumerate(shapes)
    ]


def set_gradients(params, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()


def flat_of(tensors, layout):
    flat = torch.zeros(layout.padded_numel)
    for tensor, at in zip(tensors, layout.offsets, strict=True):
        flat[at : at + tensor.numel()] = tensor.reshape(-1)
    return flat


def parts_of(flat, layout):
    return [flat[at : at + size] for at, size in zip(layout.offsets, layout.sizes, strict=True)]


def code(flat, error, layout, blocks=None):
    """Decoded ``C(flat + error)`` by blocks of what each has; ``error`` is updated."""
    counts = layout.counts().tolist()
    out = torch.zeros_like(flat)
    for index, block in enumerate(range(len(counts)) if blocks is None else blocks):
        cut = slice(index * layout.block_size, index * layout.block_size + counts[block])
        if counts[block]:
            bits, scales = onebit_compress(flat[cut], error[cut], layout.block_size)
            out[cut] = onebit_decompress(bits, scales, counts[block], layout.block_size)
    return out


class DefinedOneBitAdam:
    """1-bit Adam of all ranks in one process, as the note has it, tensors whole and in float32."""

    def __init__(self, world, freeze_step, lr, betas, eps, decays, shapes=SHAPES):
        self.world, self.freeze_step, self.lr, self.betas, self.eps = (
            world,
            freeze_step,
            lr,
            betas,
            eps,
        )
        self.decays = decays
        self.params = make_params(shapes)
        self.adam = torch.optim.AdamW(
            [
                {"params": [p], "weight_decay": decay}
                for p, decay in zip(self.params, decays, strict=True)
            ],
            lr=lr,
            betas=betas,
            eps=eps,
            fused=True,
        )
        self.layout = BlockLayout([p.numel() for p in self.params], BLOCK, world)
        padded = self.layout.padded_numel
        self.workers = [torch.zeros(padded) for _ in range(world)]
        self.server = torch.zeros(padded)
        self.momentum = self.factors = None
        self.count = 0

    def step(self, grads_of_ranks):
        self.count += 1
        if self.count <= self.freeze_step:
            total = grads_of_ranks[0]
            for grads in grads_of_ranks[1:]:
                total = [a + b for a, b in zip(total, grads, strict=True)]
            set_gradients(self.params, [t.div(self.world) for t in total])
            self.adam.step()
            if self.count == self.freeze_step:
                self.freeze()
            return
        beta1 = self.betas[0]
        total = torch.zeros_like(self.server)
        for worker, grads in zip(self.workers, grads_of_ranks, strict=True):
            seen = flat_of(grads, self.layout) * self.factors
            mine = self.momentum * beta1 + seen * (1 - beta1)
            total = total + code(mine, worker, self.layout)
        if self.world > 1:
            total = code(total * (1 / self.world), self.server, self.layout)
        self.momentum = total
        self.update(self.lr / (1 - beta1**self.count))

    def freeze(self):
        states = [self.adam.state[p] for p in self.params]
        v = flat_of([s["exp_avg_sq"] for s in states], self.layout)
        root = (v / (1 - self.betas[1] ** self.count)).sqrt()
        self.factors = (1 / (root + self.eps)).bfloat16().float()
        self.factors[v == 0] = 0
        self.momentum = flat_of([s["exp_avg"] for s in states], self.layout) * self.factors

    def update(self, step_size):
        applied = torch.where(self.factors != 0, self.momentum, 0.0)
        moves = parts_of(applied * step_size, self.layout)
        with torch.no_grad():
            for param, move, decay in zip(self.params, moves, self.decays, strict=True):
                param.copy_(param * (1 - self.lr * decay) - move.view(param.shape))
