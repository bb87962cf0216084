"""Styles for ``torch.distributed.tensor.parallel.parallelize_module`` that run on our fused ops.

    parallelize_module(model, mesh["tp"], {"*.up": ColumnParallel(), "*.down": RowParallel()})

The module stays where it is and becomes a ``ColumnParallelLinear``, ``RowParallelLinear`` or
``VocabParallelEmbedding`` with DTensor parameters. ``parallelize`` takes the same styles, checks
the whole plan before it touches anything, and keeps tied parameters tied.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from mcp_kernels.nn._layer import TensorParallelLayer
from mcp_kernels.nn.parallel_embedding import VocabParallelEmbedding
from mcp_kernels.nn.parallel_linear import ColumnParallelLinear, RowParallelLinear
from mcp_kernels.nn.replicated import replicate
from mcp_kernels.nn.sharding import check_mesh


class TensorParallelStyle(ParallelStyle):
    """What the styles of this package share: they can be asked before they act."""

    @abstractmethod
    def problem(self, module: nn.Module, ranks: int) -> str | None:
        """Why ``module`` cannot take this style on ``ranks`` ranks, in words; None if it can."""

    @abstractmethod
    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        """Where each of the module's own parameters will lie."""

    @abstractmethod
    def convert(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Make the module parallel in place."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_mesh(type(self).__name__, device_mesh)
        problem = self.problem(module, device_mesh.size())
        if problem is not None:
            raise ValueError(f"{type(self).__name__}: {problem}")
        self.convert(module, device_mesh)
        return module


class ColumnParallel(TensorParallelStyle):
    """Cut the output features of an ``nn.Linear`` over the mesh; see ``ColumnParallelLinear``.

    Args:
        sequence_parallel: the input is cut along the sequence and gathered by the layer.
        gather_output: give every rank the whole output.
        sequence_dim: the dim that is cut.
        sequence_size: as in ``ColumnParallelLinear``.
        heads: the output is so many equal heads, and no rank may get a part of one.
    """

    def __init__(
        self,
        *,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        sequence_dim: int = -2,
        sequence_size: int | None = None,
        heads: int | None = None,
    ) -> None:
        self.sequence_parallel = sequence_parallel
        self.gather_output = gather_output
        self.sequence_dim = sequence_dim
        self.sequence_size = sequence_size
        self.heads = heads

    def problem(self, module: nn.Module, ranks: int) -> str | None:
        """See ``TensorParallelStyle.problem``."""
        return _type_problem(module, (nn.Linear,)) or _heads_problem(self.heads, ranks)

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        """``Shard(0)`` for weight and bias."""
        return ColumnParallelLinear.PLACEMENTS

    def convert(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """See ``TensorParallelStyle.convert``."""
        module.__class__ = ColumnParallelLinear
        assert isinstance(module, ColumnParallelLinear)
        module._configure(
            self.sequence_parallel, self.gather_output, self.sequence_dim, self.sequence_size
        )
        module._distribute(mesh, self.src_data_rank)

    def __repr__(self) -> str:
        return (
            f"ColumnParallel(sequence_parallel={self.sequence_parallel}, "
            f"gather_output={self.gather_output}, heads={self.heads})"
        )


class RowParallel(TensorParallelStyle):
    """Cut the input features of an ``nn.Linear``, or the rows of an ``nn.Embedding``.

    See ``RowParallelLinear`` and ``VocabParallelEmbedding``.

    Args:
        sequence_parallel: leave the output cut along the sequence.
        input_is_parallel: the input of a linear layer is this rank's features already.
        sequence_dim: the dim that is cut (of a linear layer's output; an embedding cuts the last
            dim of its tokens).
        sequence_size: as in ``ColumnParallelLinear``.
        heads: the input is so many equal heads, and no rank may get a part of one.
    """

    def __init__(
        self,
        *,
        sequence_parallel: bool = False,
        input_is_parallel: bool = True,
        sequence_dim: int = -2,
        sequence_size: int | None = None,
        heads: int | None = None,
    ) -> None:
        self.sequence_parallel = sequence_parallel
        self.input_is_parallel = input_is_parallel
        self.sequence_dim = sequence_dim
        self.sequence_size = sequence_size
        self.heads = heads

    def problem(self, module: nn.Module, ranks: int) -> str | None:
        """See ``TensorParallelStyle.problem``."""
        found = _type_problem(module, (nn.Linear, nn.Embedding))
        if found is None and isinstance(module, nn.Embedding):
            return VocabParallelEmbedding._problem(module)
        return found or _heads_problem(self.heads, ranks)

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        """``Shard(1)`` and a replicated bias for a linear layer, ``Shard(0)`` for a table."""
        is_table = isinstance(module, nn.Embedding)
        return (VocabParallelEmbedding if is_table else RowParallelLinear).PLACEMENTS

    def convert(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """See ``TensorParallelStyle.convert``."""
        if isinstance(module, nn.Embedding):
            module.__class__ = VocabParallelEmbedding
            assert isinstance(module, VocabParallelEmbedding)
            module._configure(self.sequence_parallel, self.sequence_size)
        else:
            module.__class__ = RowParallelLinear
            assert isinstance(module, RowParallelLinear)
            module._configure(
                self.sequence_parallel,
                self.input_is_parallel,
                self.sequence_dim,
                self.sequence_size,
            )
        module._distribute(mesh, self.src_data_rank)

    def __repr__(self) -> str:
        return (
            f"RowParallel(sequence_parallel={self.sequence_parallel}, "
            f"input_is_parallel={self.input_is_parallel}, heads={self.heads})"
        )


class Replicated(TensorParallelStyle):
    """Keep a module's own parameters whole on every rank, as DTensors like all others.

    For norms and whatever else is not cut: ``clip_grad_norm_`` and foreach optimizers refuse
    DTensors and plain tensors in one call.

    Args:
        sums_gradients: each rank finds a part of the gradient (norms between layers under sequence
            parallelism, norms of single heads between a column and a row layer).
    """

    def __init__(self, *, sums_gradients: bool = False) -> None:
        self.sums_gradients = sums_gradients

    def problem(self, module: nn.Module, ranks: int) -> str | None:
        """See ``TensorParallelStyle.problem``."""
        if isinstance(module, nn.ParameterList | nn.ParameterDict):
            return (
                f"module must read its parameters in its own forward, got {type(module).__name__}; "
                "make a module of its own for them"
            )
        return _state_problem(module)

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        """``Replicate()`` for all."""
        return dict.fromkeys(module._parameters, Replicate())

    def convert(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """See ``TensorParallelStyle.convert``."""
        sums, source = self.sums_gradients, self.src_data_rank
        replicate(module, mesh, sums_gradients=sums, src_data_rank=source)

    def __repr__(self) -> str:
        return f"Replicated(sums_gradients={self.sums_gradients})"


def _state_problem(module: nn.Module) -> str | None:
    parameters = [p for p in module._parameters.values() if p is not None]
    if isinstance(module, TensorParallelLayer) or any(isinstance(p, DTensor) for p in parameters):
        return (
            f"module must not be parallel yet, got {type(module).__name__}; apply tensor "
            "parallelism once, and before fully_shard"
        )
    return None


def _type_problem(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> str | None:
    """A subclass with a forward of its own would lose it."""
    if type(module) in kinds:
        return _state_problem(module)
    names = " or ".join(f"nn.{kind.__name__}" for kind in kinds)
    return _state_problem(module) or (
        f"module must be {names} itself, got {type(module).__name__}; use Replicated() or leave "
        "it out of the plan"
    )


def _heads_problem(heads: int | None, ranks: int) -> str | None:
    if heads is None or heads % ranks == 0:
        return None
    fitting = [n for n in range(1, heads + 1) if heads % n == 0]
    return f"heads must be divisible by {ranks} ranks, got {heads}; use one of {fitting} ranks"
