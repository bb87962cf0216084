"""Tensors as the compiled group sees them: an address, a count, an element type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcp_kernels import _shm

_Red: Any = dist.ReduceOp.RedOpType
_Reduction = _shm.Reduction

TYPES = {
    torch.float32: _shm.Type.float32,
    torch.float64: _shm.Type.float64,
    torch.bfloat16: _shm.Type.bfloat16,
    torch.float16: _shm.Type.float16,
    torch.int64: _shm.Type.int64,
    torch.int32: _shm.Type.int32,
    torch.int16: _shm.Type.int16,
    torch.int8: _shm.Type.int8,
    torch.uint8: _shm.Type.uint8,
}
_REDUCTIONS = {
    _Red.SUM: (_Reduction.sum, False),
    _Red.AVG: (_Reduction.sum, True),
    _Red.PRODUCT: (_Reduction.product, False),
    _Red.MIN: (_Reduction.min, False),
    _Red.MAX: (_Reduction.max, False),
    _Red.BAND: (_Reduction.bit_and, False),
    _Red.BOR: (_Reduction.bit_or, False),
    _Red.BXOR: (_Reduction.bit_xor, False),
}
# Truth values: a sum is true where any is, a product where all are.
_OF_BOOLS = {
    _Red.SUM: _Reduction.max,
    _Red.MAX: _Reduction.max,
    _Red.BOR: _Reduction.max,
    _Red.PRODUCT: _Reduction.min,
    _Red.MIN: _Reduction.min,
    _Red.BAND: _Reduction.min,
    _Red.BXOR: _Reduction.bit_xor,
}


Kind = tuple[_shm.Type, _shm.Reduction, bool]


def _all_kinds() -> dict[torch.dtype, dict[int, Kind]]:
    """By element type and torch's number of the reduction."""
    kinds: dict[torch.dtype, dict[int, Kind]] = {}
    for dtype, kind in TYPES.items():
        kinds[dtype] = {
            op.value: (kind, *entry)
            for op, entry in _REDUCTIONS.items()
            if not (dtype.is_floating_point and op in (_Red.BAND, _Red.BOR, _Red.BXOR))
        }
    kinds[torch.bool] = {
        op.value: (_shm.Type.uint8, reduction, False) for op, reduction in _OF_BOOLS.items()
    }
    for dtype, real in ((torch.complex64, torch.float32), (torch.complex128, torch.float64)):
        kinds[dtype] = {op.value: kinds[real][op.value] for op in (_Red.SUM, _Red.AVG)}
    return kinds


_KINDS = _all_kinds()
# Of dtypes whose elements are what the compiled group adds.
REAL_KINDS = {dtype: kinds for dtype, kinds in _KINDS.items() if not dtype.is_complex}


def _slow_number(reduce_op: Any) -> int:
    return getattr(reduce_op, "op", reduce_op).value


# torch's number of a reduction. Its hash is that number wherever it was looked at; reading it by
# name makes two objects and takes 0.4 us longer, a tenth of a small collective.
number_of_reduction = (
    hash if all(hash(dist.ReduceOp(op)) == op.value for op in _REDUCTIONS) else _slow_number
)


def kind_of_reduction(call: str, dtype: torch.dtype, reduce_op: Any) -> Kind:
    """The compiled group's element type, reduction and whether to divide by the ranks.

    Raises:
        ValueError: the elements have no such reduction.
    """
    kinds = _KINDS.get(dtype, {})
    kind = kinds.get(number_of_reduction(reduce_op))
    if kind is None:
        red = getattr(reduce_op, "op", reduce_op)
        legal = ", ".join(op.name for op in _REDUCTIONS if op.value in kinds) or "none"
        raise ValueError(
            f"{call}: op must be a reduction that {dtype} has ({legal}), got {red.name}; "
            "convert the tensor first"
        )
    return kind


def num_elements(x: Tensor) -> int:
    """Real numbers in ``x``: a complex element has two."""
    return 2 * x.numel() if x.is_complex() else x.numel()


def check_tensor(op: str, x: Tensor) -> None:
    """Hold a tensor to what the group can read.

    Raises:
        ValueError: it is sparse or not on the CPU.
    """
    if x.layout != torch.strided or x.device.type != "cpu":
        raise ValueError(
            f"{op}: tensors must be dense and on the CPU, got {x.layout} on {x.device}; "
            "move them, or name a backend for that device in init_process_group"
        )


def check_like(op: str, name: str, x: Tensor, numel: int, dtype: torch.dtype) -> None:
    """Hold an argument's size and type against those that the call needs.

    Raises:
        ValueError: they differ.
    """
    check_tensor(op, x)
    if x.numel() != numel or x.dtype != dtype:
        raise ValueError(
            f"{op}: {name} must have {numel} elements of {dtype}, got {x.numel()} of {x.dtype}"
        )


def dense(x: Tensor) -> Tensor:
    """``x`` with its elements in order in memory: itself, or a copy."""
    if x.is_contiguous() and not x.is_conj() and not x.is_neg():
        return x
    return x.detach().resolve_conj().resolve_neg().contiguous()


def put_back(targets: Sequence[Tensor], staged: Sequence[Tensor]) -> None:
    """Copy what was written to ``dense`` stand-ins of ``targets`` to where it belongs."""
    for target, source in zip(targets, staged, strict=True):
        if source is not target:
            with torch.no_grad():
                target.detach().copy_(source)
