"""Norms of gradients, weights and updates of each layer, each element counted once in any layout.

Letters: L = layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcp_parallel.monitor.layers import Layers, layer_of
from mcp_parallel.optim.build import Optimizer
from mcp_parallel.parallel.shards import Shard

# Elements of a parameter that an update is measured on: of what has more every k-th place of its
# last dimension is read, so that the copies of a large model take a few percent of its memory.
MOST_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Sample:
    """The elements of a shard that an update is measured on: the same places in any layout."""

    first: int
    stride: int

    @classmethod
    def of(cls, shard: Shard) -> Sample:
        """Of one parameter on this rank."""
        shape = shard.global_shape
        stride = min(math.ceil(math.prod(shape) / MOST_ELEMENTS), shape[-1]) if shape else 1
        return cls(-shard.offsets[-1] % stride if stride > 1 else 0, stride)

    def view(self, local: Tensor) -> Tensor:
        """Those of the shard's local values."""
        return local if self.stride <= 1 else local[..., self.first :: self.stride]


class _Places:
    """Which layer each of some tensors belongs to.

    Args:
        places: the layer of each tensor.
        num_layers: L.
    """

    def __init__(self, places: Sequence[int], num_layers: int) -> None:
        self._places = torch.tensor(places, dtype=torch.int64)
        self._num_layers = num_layers

    def by_layer(self, squares: Tensor) -> Tensor:
        """Sums of squared norms, float64 ``[L]`` on the CPU."""
        return torch.zeros(self._num_layers, dtype=torch.float64).index_add_(
            0, self._places, squares.cpu()
        )


def squares_of(tensors: Sequence[Tensor]) -> Tensor:
    """Squared norms, float64 ``[len(tensors)]``; norms are taken in the tensors' dtype."""
    filled = [i for i, tensor in enumerate(tensors) if tensor.numel()]
    if len(filled) == len(tensors) > 0:
        return torch.stack(torch._foreach_norm(list(tensors))).double().square()
    squares = torch.zeros(len(tensors), dtype=torch.float64)
    if filled:
        squares[filled] = squares_of([tensors[i] for i in filled]).cpu()
    return squares


class ParameterNorms:
    """Looks at optimizer steps: ``before`` each of them and ``after`` it.

    Args:
        shards: this rank's.
        optimizer: theirs; says which gradients this rank counts.
        layers: of the whole model.
    """

    def __init__(self, shards: Sequence[Shard], optimizer: Optimizer, layers: Layers) -> None:
        self._optimizer, self._size = optimizer, len(layers.names)
        self._place = {shard.name: layers.index(shard.name) for shard in shards}
        self._counted = [shard for shard in shards if shard.counted_here]
        self._places = self._places_of(self._counted)
        # Vectors (norm weights of about 1, biases) would hide what becomes of a layer's matrices.
        have_matrices = {layer_of(s.name) for s in shards if len(s.global_shape) > 1}
        self._moved_at = [
            at
            for at, shard in enumerate(self._counted)
            if len(shard.global_shape) > 1 or layer_of(shard.name) not in have_matrices
        ]
        self._moved = [self._counted[at] for at in self._moved_at]
        self._moved_places = self._places_of(self._moved)
        self._samples = [Sample.of(shard) for shard in self._moved]
        self._thinned = [i for i, sample in enumerate(self._samples) if sample.stride > 1]
        self._before: list[Tensor] = []
        self._gradients = self._weights = self._sampled = torch.zeros(0)

    def _places_of(self, shards: Sequence[Shard]) -> _Places:
        return _Places([self._place[shard.name] for shard in shards], self._size)

    @torch.no_grad()
    def before(self, scale: float) -> None:
        """Read gradients and weights, once gradients are summed and before the update.

        Args:
            scale: that gradients were multiplied with.
        """
        self._gradients = torch.zeros(self._size, dtype=torch.float64)
        for weight, shards in self._optimizer.counted():
            present = [(s, grad) for s in shards if (grad := s.local_grad) is not None]
            places = self._places_of([shard for shard, _ in present])
            squares = places.by_layer(squares_of([grad for _, grad in present]))
            self._gradients += squares * (weight / scale**2)
        weights = squares_of([s.local for s in self._counted])
        self._weights = self._places.by_layer(weights)
        self._before = [sample.clone() for sample in self._sampled_now()]
        sampled = weights[self._moved_at]
        if self._thinned:
            sampled[self._thinned] = squares_of([self._before[i] for i in self._thinned])
        self._sampled = self._moved_places.by_layer(sampled)

    @torch.no_grad()
    def after(self) -> Tensor:
        """This rank's share of the squared norms, float64 ``[4, L]``.

        Of gradients, weights, and of weights and their changes on what is sampled.
        """
        pairs = zip(self._before, self._sampled_now(), strict=True)
        filled = [(before, now) for before, now in pairs if before.numel()]
        if filled:
            # Before minus after: the sign is nobody's business.
            torch._foreach_sub_([before for before, _ in filled], [now for _, now in filled])
        changes = self._moved_places.by_layer(squares_of(self._before))
        self._before = []
        return torch.stack([self._gradients, self._weights, self._sampled, changes])

    def _sampled_now(self) -> list[Tensor]:
        return [s.view(shard.local) for s, shard in zip(self._samples, self._moved, strict=True)]
