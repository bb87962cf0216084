"""Layers under sequence parallelism on sequences that the ranks do not divide.

The bound is that of test_nn_linear.py: sums of at most 40 products of order 1 in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_matmul import carried, carriers
from ranks import RankPool
from torch import Tensor, nn

from mcp_kernels.nn import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from mcp_kernels.ops._comm import split_sizes

BOUND = {"rtol": 0, "atol": 1e-12}
VOCAB, WIDTH, HIDDEN = 11, 6, 10


class _Model(nn.Module):
    """Embedding, norm, a column and a row layer with a residual, and a column layer as the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64)
        self.up = nn.Linear(WIDTH, HIDDEN, dtype=torch.float64)
        self.down = nn.Linear(HIDDEN, WIDTH, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, VOCAB, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.tanh(self.up(x)))
        return self.head(x)


def _train(length: int, *, is_cut: bool) -> list[Tensor]:
    model: Any = _Model()
    if is_cut:
        options: Any = {"sequence_parallel": True, "sequence_size": length}
        model.embed = VocabParallelEmbedding.from_embedding(model.embed, **options)
        model.up = ColumnParallelLinear.from_linear(model.up, **options)
        model.down = RowParallelLinear.from_linear(model.down, **options)
        model.head = ColumnParallelLinear.from_linear(model.head, gather_output=True, **options)
    tokens = torch.arange(2 * length).view(2, length) * 7 % VOCAB
    logits = model(tokens)
    logits.square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    return [logits.detach(), *(g.full_tensor() if is_cut else g for g in grads)]


def _uneven(rank: int, world: int, length: int) -> None:
    for got, expected in zip(
        _train(length, is_cut=True), _train(length, is_cut=False), strict=True
    ):
        # The bias of the row layer is replicated and sees this rank's positions alone.
        torch.testing.assert_close(got, expected, **BOUND)


@carriers
@pytest.mark.parametrize("world, length", [(2, 7), (4, 7), (4, 5), (4, 3)])  # 4 of 3: 1, 1, 1, 0
def test_a_model_on_an_uneven_sequence_is_the_whole_model(
    ranks: RankPool, carrier: str, world: int, length: int
) -> None:
    ranks.run(carried, carrier, _uneven, length, ranks=world)


def _refused(rank: int, world: int) -> list[str]:
    def layer(cls: Any, size: int | None) -> nn.Module:
        return cls(4, 4, sequence_parallel=True, sequence_size=size)

    mine = torch.zeros(split_sizes(7, world)[rank], 4)
    raised = []
    for call in (
        lambda: layer(ColumnParallelLinear, None)(mine),
        lambda: layer(ColumnParallelLinear, 6)(mine),
        lambda: layer(RowParallelLinear, 6)(torch.zeros(7, 2)),
        lambda: layer(RowParallelLinear, None)(torch.zeros(7, 2)),
        lambda: layer(VocabParallelEmbedding, 6)(torch.zeros(7, dtype=torch.int64)),
    ):
        with pytest.raises(ValueError, match="must") as caught:
            call()
        raised.append(str(caught.value))
        dist.barrier()  # nobody is left in a collective
    return raised


@pytest.mark.parametrize("carrier", ["gloo"])
def test_a_wrong_length_is_refused_on_every_rank(ranks: RankPool, carrier: str) -> None:
    expected = [
        (
            "ColumnParallelLinear: x must have equally many positions in dim -2 on every rank with "
            "sequence_parallel, got [4, 3]; cut as torch.chunk does and give every layer "
            "sequence_size, or pad the sequence"
        ),
        (
            "ColumnParallelLinear: x must have this rank's part of sequence_size = 6 in dim -2, "
            "[3, 3] positions by rank, got [4, 3]; cut as torch.chunk does"
        ),
        (
            "RowParallelLinear: x must have sequence_size = 6 positions in dim -2, got 7; give "
            "layers for sequences of several lengths no sequence_size"
        ),
        (
            "RowParallelLinear: x must have a multiple of 2 positions in dim -2 with "
            "sequence_parallel, got 7; give every layer sequence_size=7, pad the sequence or turn "
            "it off"
        ),
        (
            "VocabParallelEmbedding: x must have sequence_size = 6 positions in dim -1, got 7; "
            "give layers for sequences of several lengths no sequence_size"
        ),
    ]
    assert ranks.run(carried, carrier, _refused, ranks=2) == [expected] * 2
