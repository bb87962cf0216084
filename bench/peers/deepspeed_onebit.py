"""DeepSpeed 0.19.6's compressed all-reduce as its algorithm runs, for comparison.

DeepSpeed removed its 1-bit optimizers after that release, and the release never ran on CPU (cupy,
0-dim gathers). This restates its steps on torch and numpy: one scale for the whole tensor, one
torch call for each arithmetic step, ``packbits`` on bools, and four collectives (all-to-all of
signs and all-gather of scales, then all-gather of both again).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist


class DeepSpeedOneBit:
    """Its state and its steps for one flat tensor whose size is a multiple of 8 W."""

    def __init__(self, numel):
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.worker_error = torch.zeros(numel)
        self.server_error = torch.zeros(numel // self.world)

    def __call__(self, x):
        chunk = x.numel() // self.world
        carried = x.add(self.worker_error)
        scale, signs = self._compress(carried, self.worker_error)
        packed = torch.from_numpy(np.packbits(signs.numpy())).view(self.world, -1)
        received = torch.empty_like(packed)
        dist.all_to_all_single(received, packed)
        scales = torch.empty(self.world)
        self._gather(scales, scale.view(1))

        mine = self._unpack(received).view(self.world, chunk)
        total = mine.mul_(scales.view(-1, 1) / self.world).sum(0)
        total.add_(self.server_error)
        scale, signs = self._compress(total, self.server_error)
        packed = torch.from_numpy(np.packbits(signs.numpy()))
        gathered = torch.empty(self.world, packed.numel(), dtype=torch.uint8)
        self._gather(gathered.view(-1), packed)
        self._gather(scales, scale.view(1))
        result = self._unpack(gathered).view(self.world, chunk)
        return result.mul_(scales.view(-1, 1)).view(-1)

    @staticmethod
    def _gather(parts, mine):
        dist.group.WORLD._allgather_base(
            parts, mine
        ).wait()  # its public name changed in torch 2.13

    @staticmethod
    def _compress(carried, error):
        scale = carried.norm() / carried.numel() ** 0.5
        signs = carried.sign().add_(1).bool()
        decoded = signs.float().add_(-0.5).mul_(2.0).mul_(scale)
        error.copy_(carried - decoded)
        return scale, signs

    @staticmethod
    def _unpack(packed):
        bits = torch.from_numpy(np.unpackbits(packed.numpy().reshape(-1)))
        return bits.float().add_(-0.5).mul_(2.0)
