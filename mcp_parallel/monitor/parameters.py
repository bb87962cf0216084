"""Norms of gradients, weights and updates of each layer, each element counted once in any layout.

Letters: L = layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mcp_parallel.monitor.layers import Layers, layer_of
from mcp_parallel.optim.build import Optimizer
from mcp_parallel.parallel.shards import Shard

# Elements of a parameter that an update is measured on: of what has more every k-th place of its
# last dimension is read, so that the copies of a large model take a few percent of its memory.
MOST_ELEMENTS = 1 << 20


def sample_of(shard: Shard) -> Tensor:
    """The local elements that an update is measured on, a view; the same places in any layout."""
    local = shard.local
    shape = shard.global_shape
    stride = min(math.ceil(math.prod(shape) / MOST_ELEMENTS), shape[-1]) if shape else 1
    if stride <= 1:
        return local
    first = -shard.offsets[-1] % stride
    return local[..., first::stride]


def squares_by_layer(tensors: Sequence[Tensor], places: Sequence[int], num_layers: int) -> Tensor:
    """Sums of squares, float64 ``[L]`` on the CPU.

    Args:
        tensors: norms of single ones are taken in their dtype, summed in float64.
        places: the layer of each.
        num_layers: L.
    """
    total = torch.zeros(num_layers, dtype=torch.float64)
    pairs = [(t, place) for t, place in zip(tensors, places, strict=True) if t.numel()]
    if pairs:
        norms = torch.stack(torch._foreach_norm([t for t, _ in pairs]))
        total.index_add_(
            0, torch.tensor([place for _, place in pairs]), norms.double().square().cpu()
        )
    return total


class ParameterNorms:
    """One look at an optimizer step.

    Args:
        shards: this rank's.
        optimizer: theirs; says which gradients this rank counts.
        layers: of the whole model.
    """

    def __init__(self, shards: Sequence[Shard], optimizer: Optimizer, layers: Layers) -> None:
        self._optimizer, self._layers = optimizer, layers
        self._counted = [shard for shard in shards if shard.counted_here]
        self._places = [layers.index(shard.name) for shard in self._counted]
        # Vectors (norm weights of about 1, biases) would hide what becomes of a layer's matrices.
        have_matrices = {layer_of(s.name) for s in shards if len(s.global_shape) > 1}
        self._moved = [
            shard
            for shard in self._counted
            if len(shard.global_shape) > 1 or layer_of(shard.name) not in have_matrices
        ]
        self._moved_places = [layers.index(shard.name) for shard in self._moved]
        self._before: list[Tensor] = []
        self._gradients = self._weights = self._sampled = torch.zeros(0)

    @torch.no_grad()
    def before(self, scale: float) -> None:
        """Read gradients and weights, once gradients are summed and before the update.

        Args:
            scale: that gradients were multiplied with.
        """
        size = len(self._layers.names)
        self._gradients = torch.zeros(size, dtype=torch.float64)
        for weight, shards in self._optimizer.counted():
            present = [(s, grad) for s in shards if (grad := s.local_grad) is not None]
            places = [self._layers.index(shard.name) for shard, _ in present]
            squares = squares_by_layer([grad for _, grad in present], places, size)
            self._gradients += squares * (weight / scale**2)
        self._weights = squares_by_layer([s.local for s in self._counted], self._places, size)
        self._before = [sample_of(shard).clone() for shard in self._moved]
        self._sampled = squares_by_layer(self._before, self._moved_places, size)

    @torch.no_grad()
    def after(self) -> Tensor:
        """This rank's share of the squared norms, float64 ``[4, L]``.

        Of gradients, weights, and of weights and their changes on what is sampled.
        """
        size = len(self._layers.names)
        filled = [i for i, tensor in enumerate(self._before) if tensor.numel()]
        if filled:
            # Before minus after: the sign is nobody's business.
            torch._foreach_sub_(
                [self._before[i] for i in filled], [sample_of(self._moved[i]) for i in filled]
            )
        changes = squares_by_layer(self._before, self._moved_places, size)
        self._before = []
        return torch.stack([self._gradients, self._weights, self._sampled, changes])
