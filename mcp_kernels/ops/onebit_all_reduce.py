"""Mean over ranks in one bit an element, the collective of 1-bit Adam.

Source: Tang et al., "1-bit Adam" (ICML 2021, arXiv 2102.02888), figure 3, with a scale a block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcp_kernels.ops._codecs import ONEBIT
from mcp_kernels.ops.compressed_all_reduce import ErrorState, Group, compressed_all_reduce
from mcp_kernels.ops.host_groups import HostGroups


def onebit_all_reduce(
    x: Tensor,
    worker_error: Tensor,
    server_error: Tensor,
    *,
    group: ProcessGroup | HostGroups | None = None,
    block_size: int = 1024,
    out: Tensor | None = None,
) -> Tensor:
    """Mean of ``x`` over the ranks, sent as signs and block scales, with error feedback.

    ``compressed_all_reduce`` is the same with other codecs, sums and asynchronous work.

    Args:
        x: N elements of float32, bfloat16 or float16, any shape and strides; unchanged.
        worker_error: N elements, float32, what this rank could not send yet; **updated in place**.
        server_error: this rank's own chunk (``ceil(N / W)`` elements, as ``torch.chunk`` cuts),
            float32, what it could not pass on yet; **updated in place**.
        group: None is the world, or this process alone where torch.distributed is not set up.
        block_size: elements that share a scale, a positive multiple of 8.
        out: where the result goes, as in ``compressed_all_reduce``; it may be x itself.

    Returns:
        ``out``, or a new tensor of x's shape and dtype, the same bits on every rank. Blocks with a
        NaN or an infinity on some rank are NaN on all.

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: a size, a device or ``block_size`` breaks its rule.

    Cost: two collectives; a rank sends about ``(W - 1) / W * N / 4`` bytes, 1/31 of float32.
    """
    state = ErrorState(worker_error, server_error)
    result = compressed_all_reduce(x, state, group, ONEBIT, block_size=block_size, out=out)
    assert isinstance(result, Tensor)
    return result


def onebit_buffers(
    numel: int,
    group: Group = None,
    block_size: int = 1024,
    *,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """``worker_error`` and ``server_error`` of a tensor of ``numel`` elements, zeros, float32.

    Args:
        numel: elements of the tensor, >= 0.
        group: as in ``onebit_all_reduce``.
        block_size: as in ``onebit_all_reduce``; sizes don't depend on it.
        device: of the tensor.

    Raises:
        ValueError: ``numel`` is negative or ``block_size`` is no positive multiple of 8.
    """
    if numel < 0:
        raise ValueError(f"onebit_buffers: numel must be >= 0, got {numel}")
    if block_size <= 0 or block_size % 8:
        raise ValueError(
            f"onebit_buffers: block_size must be a positive multiple of 8, got {block_size}; "
            "use 1024"
        )
    state = ErrorState.zeros(numel, group, device)
    return state.worker_error, state.server_error
