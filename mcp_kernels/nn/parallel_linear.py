"""``nn.Linear`` over several ranks: output features cut, or input features cut.

    ColumnParallelLinear   y_r = x W_r^T + b_r         W_r = rows of W; y is cut, or gathered
    RowParallelLinear      y = sum_r x_r W_r^T + b     W_r = columns of W; x is cut, or split here

A column layer whose output feeds a row layer needs no communication between them. Under sequence
parallelism what lies outside of such a pair is cut along the sequence: the column layer gathers
its input, the row layer scatters its sum.

Gradients count a replicated value once (``ops/collectives.py``): every rank computes the same loss.

Source: Shoeybi et al., "Megatron-LM" (2019), section 3; Korthikanti et al. (2022), section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.functional import linear
from typing_extensions import Self

from mcp_kernels.nn._layer import TensorParallelLayer, check_parts, check_sequence, check_whole
from mcp_kernels.nn._replicated import gather_features, split_features
from mcp_kernels.nn.sharding import Group, describe, to_locals
from mcp_kernels.ops.all_gather_matmul import all_gather_matmul
from mcp_kernels.ops.matmul_all_reduce import matmul_all_reduce
from mcp_kernels.ops.matmul_reduce_scatter import matmul_reduce_scatter


class _ParallelLinear(TensorParallelLayer, nn.Linear):
    sequence_parallel: bool
    sequence_dim: int
    sequence_size: int | None

    def _whole_module(self, device: torch.device | None) -> nn.Module:
        weight = self.weight
        return nn.Linear(
            self.in_features,
            self.out_features,
            self.bias is not None,
            device=device,
            dtype=weight.dtype,
        )

    @classmethod
    def _like(cls, module: nn.Linear) -> Self:
        """A layer of ``module``'s sizes that has no place and no values yet."""
        layer = cls.__new__(cls)
        has_bias = module.bias is not None
        nn.Linear.__init__(layer, module.in_features, module.out_features, has_bias, device="meta")
        return layer

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        return (
            f"{super().extra_repr()}, sequence_parallel={self.sequence_parallel}, "
            f"{self._ranks_repr()}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose output features are cut over the ranks of a group.

    Args:
        in_features: features of the input, whole on every rank.
        out_features: features of the whole output; cut as ``torch.chunk`` cuts, so the last ranks
            may hold fewer or none.
        bias: whether there is one; cut like the output.
        group: a process group or 1-D mesh; None is the world, or this process alone where
            torch.distributed is not set up. Give a slice of a larger mesh where ``fully_shard``
            is to follow on another slice.
        sequence_parallel: the input is this rank's part of ``sequence_dim`` and gathered here.
        gather_output: give every rank the whole output.
        sequence_dim: the dim that is cut; counted from the end, -2 suits ``[S, D]`` and
            ``[B, S, D]``.
        sequence_size: positions of the whole sequence where the ranks do not divide it, the same
            in every layer and call: each rank's part is then what ``torch.chunk`` gives it. None
            takes sequences of any length that the ranks divide.
        device: of the parameters; "meta" leaves them without memory until ``to_empty`` and
            ``reset_parameters``.
        dtype: of the parameters.

    Attributes:
        weight: DTensor ``[out_features, in_features]``, ``Shard(0)``; plain for one process.
        bias: DTensor ``[out_features]``, ``Shard(0)``, or None.

    Cost: 2 M K N / W flops; forward an all-gather of x under ``sequence_parallel`` and one of y
    under ``gather_output``; backward a reduce-scatter or all-reduce of x's gradient.
    """

    PLACEMENTS: ClassVar[dict[str, Placement]] = {"weight": Shard(0), "bias": Shard(0)}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        sequence_dim: int = -2,
        sequence_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        target = torch.empty(0, device=device).device
        super().__init__(in_features, out_features, bias, device="meta", dtype=dtype)
        self._configure(sequence_parallel, gather_output, sequence_dim, sequence_size)
        self._settle(group, target)

    def _configure(
        self,
        sequence_parallel: bool,
        gather_output: bool,
        sequence_dim: int,
        sequence_size: int | None,
    ) -> None:
        self.sequence_parallel = sequence_parallel
        self.gather_output = gather_output
        self.sequence_dim = sequence_dim
        self.sequence_size = sequence_size
        self._has_checked_parts = False

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        group: Group = None,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        sequence_dim: int = -2,
        sequence_size: int | None = None,
        src_data_rank: int | None = 0,
    ) -> Self:
        """A layer with the parameters of ``linear``, which stays as it is. Collective.

        Args:
            linear: the whole layer, on every rank.
            group: as in the constructor.
            sequence_parallel: as in the constructor.
            gather_output: as in the constructor.
            sequence_dim: as in the constructor.
            sequence_size: as in the constructor.
            src_data_rank: rank of the group whose values count; None takes each rank's own,
                without communication.

        Raises:
            ValueError: ``linear`` is parallel already.
        """
        layer = cls._like(linear)
        layer._configure(sequence_parallel, gather_output, sequence_dim, sequence_size)
        layer._take(linear, group, src_data_rank)
        return layer

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """``[..., in_features]`` to this rank's ``[..., out]``, whole under ``gather_output``.

        Raises:
            ValueError: the input has another number of features, or in the first call under
                ``sequence_parallel`` a rank's part another length than it should.
        """
        return apply_linears(input, [self])[0]


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose input features are cut over the ranks of a group.

    Args:
        in_features: features of the whole input; cut as ``torch.chunk`` cuts.
        out_features: features of the output, whole on every rank.
        bias: whether there is one; replicated, added once.
        group: as in ``ColumnParallelLinear``.
        sequence_parallel: leave this rank's part of ``sequence_dim`` of the sum, not all of it.
        input_is_parallel: the input is this rank's features already, as a column layer leaves
            them; False takes the whole input and uses this rank's part.
        sequence_dim: as in ``ColumnParallelLinear``.
        sequence_size: as in ``ColumnParallelLinear``.
        device: as in ``ColumnParallelLinear``.
        dtype: of the parameters.

    Attributes:
        weight: DTensor ``[out_features, in_features]``, ``Shard(1)``; plain for one process.
        bias: DTensor ``[out_features]``, ``Replicate()``, or None.

    Cost: 2 M K N / W flops; forward one all-reduce or reduce-scatter of y; backward an all-gather
    of y's gradient under ``sequence_parallel``, one of x's without ``input_is_parallel``.
    """

    PLACEMENTS: ClassVar[dict[str, Placement]] = {"weight": Shard(1), "bias": Replicate()}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        sequence_parallel: bool = False,
        input_is_parallel: bool = True,
        sequence_dim: int = -2,
        sequence_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        target = torch.empty(0, device=device).device
        super().__init__(in_features, out_features, bias, device="meta", dtype=dtype)
        self._configure(sequence_parallel, input_is_parallel, sequence_dim, sequence_size)
        self._settle(group, target)

    def _configure(
        self,
        sequence_parallel: bool,
        input_is_parallel: bool,
        sequence_dim: int,
        sequence_size: int | None,
    ) -> None:
        self.sequence_parallel = sequence_parallel
        self.input_is_parallel = input_is_parallel
        self.sequence_dim = sequence_dim
        self.sequence_size = sequence_size

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        group: Group = None,
        sequence_parallel: bool = False,
        input_is_parallel: bool = True,
        sequence_dim: int = -2,
        sequence_size: int | None = None,
        src_data_rank: int | None = 0,
    ) -> Self:
        """A layer with the parameters of ``linear``, which stays as it is. Collective.

        Args:
            linear: the whole layer, on every rank.
            group: as in the constructor.
            sequence_parallel: as in the constructor.
            input_is_parallel: as in the constructor.
            sequence_dim: as in the constructor.
            sequence_size: as in the constructor.
            src_data_rank: as in ``ColumnParallelLinear.from_linear``.

        Raises:
            ValueError: ``linear`` is parallel already.
        """
        layer = cls._like(linear)
        layer._configure(sequence_parallel, input_is_parallel, sequence_dim, sequence_size)
        layer._take(linear, group, src_data_rank)
        return layer

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """This rank's ``[..., in]`` (or the whole input) to ``[..., out_features]``.

        Raises:
            ValueError: the input has another number of features, or under ``sequence_parallel``
                a sequence of another length than ``sequence_size``, or without one a sequence
                that the ranks do not divide.
        """
        (weight,), (bias,) = _local_parameters([self])
        group = self.group
        is_whole = group is None or not self.input_is_parallel
        expected = self.in_features if is_whole else weight.shape[1]
        if input.shape[-1] != expected:
            hint = "the whole input" if is_whole else "this rank's part of the input; give the "
            hint += "" if is_whole else "whole input with input_is_parallel=False"
            raise ValueError(
                f"RowParallelLinear: x must have {expected} features, {hint}, got {input.shape[-1]}"
            )
        if group is None:
            return linear(input, weight, bias)
        if not self.input_is_parallel:
            input = split_features(input, group)  # noqa: A001
        if not self.sequence_parallel:
            return matmul_all_reduce(input, weight, bias, group=group)
        dim, size = self.sequence_dim, self.sequence_size
        check_sequence("RowParallelLinear", input, dim, group.size(), size)
        return matmul_reduce_scatter(input, weight, bias, group=group, scatter_dim=dim)


def apply_linears(x: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    """Several column-parallel layers on one input, which is gathered once for all of them.

    q, k and v, or gate and up: one all-gather (or, in backward, one sum of x's gradient) in place
    of one for each layer. Plain ``nn.Linear`` layers are simply called, so a model may be written
    with this and be parallelised later or not at all; so are layers with forward hooks, which must
    see their calls.

    Args:
        x: ``[..., in_features]``.
        layers: all plain, or all ``ColumnParallelLinear`` of one group and one
            ``sequence_parallel``.

    Returns:
        Each layer's output, as the layer alone gives it.

    Raises:
        ValueError: the layers differ, or do not take ``x``'s features.
    """
    first = layers[0]
    is_plain = not isinstance(first, ColumnParallelLinear)
    if is_plain or (len(layers) > 1 and any(map(_has_hooks, layers))):
        return [layer(x) for layer in layers]
    columns = _check_together(layers, x)
    weights, biases = _local_parameters(columns)
    group = first.group
    if group is None:
        for layer, weight in zip(columns, weights, strict=True):
            check_whole("ColumnParallelLinear", weight, layer.out_features)
        ys = [linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    elif first.sequence_parallel:
        dim, size = first.sequence_dim, first.sequence_size
        if not first._has_checked_parts and not torch.compiler.is_compiling():
            check_parts("ColumnParallelLinear", x, dim, group, size)
            first._has_checked_parts = True
        ys = all_gather_matmul(x, weights, biases, group=group, gather_dim=dim, gather_size=size)
    else:  # in backward the gradient of x is summed under those of the weights
        ys = all_gather_matmul(x, weights, biases, group=group, gather_dim=None)
    return [_finish(layer, y, group) for layer, y in zip(columns, ys, strict=True)]


def _local_parameters(
    layers: Sequence[_ParallelLinear],
) -> tuple[list[Tensor], list[Tensor | None]]:
    """(weights, biases) of this rank."""
    parameters = [layer.weight for layer in layers]
    for weight in parameters:
        if isinstance(weight, DTensor) and weight.device_mesh.ndim > 1:
            raise RuntimeError(
                f"{type(layers[0]).__name__}: weight must be gathered from fully_shard's ranks, "
                f"got {describe(weight)}; call the module that was given to fully_shard"
            )
    biases: list[Tensor | None] = [layer.bias for layer in layers]
    parameters += [bias for bias in biases if bias is not None]
    locals_ = to_locals(parameters)
    found = iter(locals_[len(layers) :])
    return locals_[: len(layers)], [None if bias is None else next(found) for bias in biases]


def _has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def _finish(layer: ColumnParallelLinear, y: Tensor, group: ProcessGroup | None) -> Tensor:
    if group is None or not layer.gather_output:
        return y
    return gather_features(y, group, layer.out_features)


def _check_together(layers: Sequence[nn.Linear], x: Tensor) -> list[ColumnParallelLinear]:
    first, columns = layers[0], []
    assert isinstance(first, ColumnParallelLinear)
    for layer in layers:
        if not isinstance(layer, ColumnParallelLinear):
            raise ValueError(
                f"apply_linears: layers must all be ColumnParallelLinear or all plain, got "
                f"{type(layer).__name__} among them"
            )
        if x.shape[-1] != layer.in_features:
            raise ValueError(
                f"ColumnParallelLinear: x must have {layer.in_features} features, got {x.shape[-1]}"
            )
        if layer is not first and not _is_same_kind(layer, first):
            raise ValueError(
                "apply_linears: layers must have one group, sequence_parallel, sequence_dim and "
                "sequence_size, got several; call them one by one"
            )
        columns.append(layer)
    return columns


def _is_same_kind(layer: ColumnParallelLinear, other: ColumnParallelLinear) -> bool:
    kinds = [(a.sequence_parallel, a.sequence_dim, a.sequence_size) for a in (layer, other)]
    if kinds[0] != kinds[1]:
        return False
    meshes = [getattr(each.weight, "device_mesh", None) for each in (layer, other)]
    return meshes[0] is meshes[1] or layer.group is other.group
