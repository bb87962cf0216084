"""``nn.Embedding`` over several ranks: each holds some rows of the table.

    y = sum over ranks of (row of the token where this rank holds it, else 0)

Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.functional import pad
from typing_extensions import Self

from mcp_kernels._transforms import innermost
from mcp_kernels.nn._layer import TensorParallelLayer, check_sequence, check_whole
from mcp_kernels.nn._lookup import lookup
from mcp_kernels.nn.sharding import Group, to_local
from mcp_kernels.ops.collectives import all_reduce, reduce_scatter


class VocabParallelEmbedding(TensorParallelLayer, nn.Embedding):
    """A table of embeddings whose rows are cut over the ranks of a group.

    Args:
        num_embeddings: rows of the whole table; cut as ``torch.chunk`` cuts, so the last ranks
            may hold fewer or none.
        embedding_dim: features of a row.
        padding_idx: row that gets no gradient.
        group: as in ``ColumnParallelLinear``.
        sequence_parallel: leave this rank's part of the sequence, the last dim of the tokens.
        sequence_size: as in ``ColumnParallelLinear``.
        device: as in ``ColumnParallelLinear``.
        dtype: of the table.

    Attributes:
        weight: DTensor ``[num_embeddings, embedding_dim]``, ``Shard(0)``; plain for one process.

    Cost: one all-reduce or reduce-scatter of the output; backward an all-gather of its gradient
    under ``sequence_parallel``.
    """

    PLACEMENTS: ClassVar[dict[str, Placement]] = {"weight": Shard(0)}

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: Group = None,
        sequence_parallel: bool = False,
        sequence_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        target = torch.empty(0, device=device).device
        super().__init__(num_embeddings, embedding_dim, padding_idx, device="meta", dtype=dtype)
        self._configure(sequence_parallel, sequence_size)
        self._settle(group, target)

    def _configure(self, sequence_parallel: bool, sequence_size: int | None) -> None:
        self.sequence_parallel = sequence_parallel
        self.sequence_size = sequence_size

    @classmethod
    def from_embedding(
        cls,
        table: nn.Embedding,
        *,
        group: Group = None,
        sequence_parallel: bool = False,
        sequence_size: int | None = None,
        src_data_rank: int | None = 0,
    ) -> Self:
        """A layer with the parameters of ``table``, which stays as it is. Collective.

        Args:
            table: the whole table, on every rank.
            group: as in ``ColumnParallelLinear``.
            sequence_parallel: as in the constructor.
            sequence_size: as in the constructor.
            src_data_rank: as in ``ColumnParallelLinear.from_linear``.

        Raises:
            ValueError: ``table`` is parallel already, or asks for what rows on several ranks
                cannot do.
        """
        problem = cls._problem(table)
        if problem is not None:
            raise ValueError(f"VocabParallelEmbedding: {problem}")
        layer = cls.__new__(cls)
        sizes = (table.num_embeddings, table.embedding_dim, table.padding_idx)
        nn.Embedding.__init__(layer, *sizes, device="meta")
        layer._configure(sequence_parallel, sequence_size)
        layer._take(table, group, src_data_rank)
        return layer

    @staticmethod
    def _problem(table: nn.Embedding) -> str | None:
        """Why ``table`` cannot be cut into rows, in words."""
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(table, name):
                return (
                    f"{name} must be off, got {getattr(table, name)}: a rank sees its own rows "
                    "alone; leave this table whole"
                )
        return None

    def _whole_module(self, device: torch.device | None) -> nn.Module:
        sizes = (self.num_embeddings, self.embedding_dim, self.padding_idx)
        return nn.Embedding(*sizes, device=device, dtype=self.weight.dtype)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Rows for int64 tokens ``[..., S]``: ``[..., S, D]``, or this rank's ``[..., S / W, D]``.

        Raises:
            IndexError: a token outside of the table (checked on CPU, as ``nn.Embedding`` does).
            ValueError: under ``sequence_parallel``, a sequence of another length than
                ``sequence_size``, or without one a sequence that the ranks do not divide.
        """
        group = self.group
        if group is None:
            table = to_local(self.weight)
            check_whole("VocabParallelEmbedding", table, self.num_embeddings)
            return lookup(input, table, self.padding_idx)
        if self.sequence_parallel:
            size = self.sequence_size
            check_sequence("VocabParallelEmbedding", input, -1, group.size(), size)
        rows = self._rows(input, group.rank() * -(-self.num_embeddings // group.size()))
        if self.sequence_parallel:
            return reduce_scatter(rows, group=group, scatter_dim=rows.dim() - 2)
        return all_reduce(rows, group=group)

    def _rows(self, tokens: Tensor, start: int) -> Tensor:
        """Rows of the tokens that are here, zeros for the others."""
        if not tokens.is_cuda and tokens.numel():
            low, high = (int(t) for t in torch.aminmax(innermost(tokens)))
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(
                    f"VocabParallelEmbedding: tokens must be in [0, {self.num_embeddings - 1}], "
                    f"got {low} to {high}"
                )
        table = to_local(self.weight)
        local = tokens - start
        elsewhere = (local < 0) | (local >= table.shape[0])
        padding = None
        if self.padding_idx is not None and 0 <= self.padding_idx - start < table.shape[0]:
            padding = self.padding_idx - start
        if table.shape[0] == 0:
            # More ranks than rows: a row that nobody asks for keeps this rank in the backward.
            table = pad(table, (0, 0, 0, 1))
        rows = lookup(local.masked_fill(elsewhere, 0), table, padding)
        return rows.masked_fill(elsewhere[..., None], 0)

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        return (
            f"{super().extra_repr()}, sequence_parallel={self.sequence_parallel}, "
            f"{self._ranks_repr()}"
        )
