"""Which of the tensors that autograd saves must come back bit for bit.

Activations that wait for the backward pass may be kept in fewer bits (``saved_tensors_hooks``).
Statistics may not: an error in a row's log-sum-exp is an error in every probability of the row,
and they are small. An op marks them here, a hook asks. The mark sits on the storage, so views and
the detached copies that autograd makes of an op's outputs carry it, and it ends with the memory.
"""

from __future__ import annotations

from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor


def keep_exact(tensor: Tensor) -> None:
    """Ask whoever packs saved tensors to leave this one as it is.

    Tensors without memory of their own (traced, under a transform) are never packed: no mark.

    Cost: about a microsecond.
    """
    if type(tensor) is Tensor and not is_functorch_wrapped_tensor(tensor):
        tensor.untyped_storage().mcp_exact = True  # pyright: ignore[reportAttributeAccessIssue]


def is_exact(tensor: Tensor) -> bool:
    """Whether ``keep_exact`` was called for this tensor or one that shares its memory."""
    return hasattr(tensor.untyped_storage(), "mcp_exact")
