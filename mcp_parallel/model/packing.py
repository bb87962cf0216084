"""Hooks on what autograd saves: kept in fewer bits, or as the recipe to make it again.

A tensor that several operations save is packed once: what was made of it hangs on its storage, as
``mcp_kernels.saved``'s mark does, and ends with it. Left as they are: tensors that others keep
alive (parameters and their views, a pipeline stage's input), integers, tensors of fewer than
``SMALLEST`` elements, and statistics that must stay exact.

What each format may lose is in ``formats.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mcp_kernels.saved import is_exact
from mcp_parallel.model.formats import BYTES_EACH, FORMATS, Compression, OnHost

# Below this, two Python objects and a call cost more than the bytes saved.
SMALLEST = 1024


class _Kept:
    """Memory that autograd waits for, in another form; ``make`` gives its elements, flat."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make = make
        self.uses = 0
        """Operations that saved it: each asks for it once a backward pass."""

    def restore(self) -> Tensor:
        """The elements; made once for all operations of one backward pass that ask for them."""
        if self.uses == 1:
            return self.make()
        return _restored.get(self)


class _View:
    """One operation's view of kept memory."""

    __slots__ = ("kept", "offset", "size", "stride")

    def __init__(self, kept: _Kept, tensor: Tensor, offset: int) -> None:
        self.kept, self.offset = kept, offset
        self.size, self.stride = tensor.size(), tensor.stride()
        kept.uses += 1

    def restore(self) -> Tensor:
        return self.kept.restore().as_strided(self.size, self.stride, self.offset)


class _Restored:
    """Elements that more operations of the backward pass at hand will ask for."""

    def __init__(self) -> None:
        self._task = -1
        self._waiting: dict[_Kept, tuple[Tensor, int]] = {}

    def get(self, kept: _Kept) -> Tensor:
        task = torch._C._current_graph_task_id()
        if task == -1:  # asked from outside of a backward pass
            return kept.make()
        if task != self._task:
            self._task = task
            self._waiting.clear()
            # A pass that splits weight gradients off may never ask for some of them again.
            torch.autograd.Variable._execution_engine.queue_callback(self._waiting.clear)
        flat, left = self._waiting.pop(kept, (None, kept.uses))
        if flat is None:
            flat = kept.make()
        if left > 1:
            self._waiting[kept] = flat, left - 1
        return flat


_restored = _Restored()


def remember_recipe(
    out: Tensor, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> None:
    """Say that ``out``, contiguous, is ``function(*inputs)``, bit for bit, whenever it is called.

    ``Packer`` then keeps the inputs in its place.
    """
    storage = out.untyped_storage()
    storage.mcp_recipe = function, [x.detach() for x in inputs]  # pyright: ignore[reportAttributeAccessIssue]


class Packer:
    """``saved_tensors_hooks`` of one forward pass of one block.

    Args:
        compression: format of what is kept.
        parameters: what outlives the step anyway, DTensors or plain.
        to_host: what is kept waits in host memory.
    """

    def __init__(
        self,
        compression: Compression,
        parameters: Iterable[nn.Parameter],
        *,
        to_host: bool = False,
    ) -> None:
        self.compression: Compression = compression
        self.to_host = to_host
        self._alive = {_local(p).untyped_storage()._cdata for p in parameters}

    def is_kept_anyway(self, tensor: Tensor) -> bool:
        """Whether others keep the tensor, or it is of whole numbers: it is left as it is."""
        if not tensor.is_floating_point() or (tensor.is_leaf and tensor.requires_grad):
            return True
        return tensor.untyped_storage()._cdata in self._alive

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """What autograd keeps instead of ``tensor``, which may be ``tensor``."""
        if tensor.numel() < SMALLEST or self.is_kept_anyway(tensor):
            return _as_it_is(tensor)
        storage = tensor.untyped_storage()
        recipe = getattr(storage, "mcp_recipe", None)
        if recipe is not None:
            key = ("recipe",)
            offset = int(tensor.storage_offset())
            kept = _kept_on(storage, key) or _keep_on(storage, key, self._recipe(*recipe))
            return _View(kept, tensor, offset)
        is_smaller = tensor.element_size() > BYTES_EACH[self.compression]
        if _is_exact(tensor) or not (is_smaller or self.to_host):
            return _as_it_is(tensor)
        return self._formatted(tensor, storage, self.compression if is_smaller else "none")

    def unpack(self, saved: Tensor | _View) -> Tensor:
        """The tensor, or one within the format's bound of it."""
        return saved.restore() if isinstance(saved, _View) else saved

    def _formatted(self, tensor: Tensor, storage: torch.UntypedStorage, name: Compression) -> _View:
        if not _is_dense(tensor):
            tensor = tensor.contiguous()
            storage = tensor.untyped_storage()
        key = (tensor.storage_offset(), tensor.numel(), tensor.dtype, tensor._version)
        kept = _kept_on(storage, key)
        if kept is None:
            flat = tensor.detach().as_strided((tensor.numel(),), (1,))
            packed, dtype = FORMATS[name](flat), tensor.dtype
            if self.to_host:
                packed = OnHost(packed, tensor.device)
            kept = _keep_on(storage, key, _Kept(lambda: packed.decode(dtype)))
        return _View(kept, tensor, 0)

    def _recipe(self, function: Callable[..., Tensor], inputs: list[Tensor]) -> _Kept:
        saved = [self.pack(x) for x in inputs]

        def make() -> Tensor:
            with torch.no_grad():
                return function(*(self.unpack(x) for x in saved))

        return _Kept(make)


def _as_it_is(tensor: Tensor) -> Tensor:
    """``tensor`` outside of its graph: a node that kept its own result would keep itself alive.

    Backward ends such a cycle where it frees the node; one that comes in two passes does not.
    """
    return tensor if tensor.is_leaf else tensor.detach()


def _is_exact(tensor: Tensor) -> bool:
    """Statistics: marked ones, and one number a row, which is what torch's LayerNorm keeps."""
    return is_exact(tensor) or (tensor.dim() > 1 and tensor.shape[-1] == 1)


def _local(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a parameter; what a plain one is itself."""
    return getattr(parameter, "_local_tensor", parameter)


def _kept_on(storage: torch.UntypedStorage, key: tuple[Any, ...]) -> _Kept | None:
    return getattr(storage, "mcp_kept", {}).get(key)


def _keep_on(storage: torch.UntypedStorage, key: tuple[Any, ...], kept: _Kept) -> _Kept:
    # Weakly: only the graph keeps it, so that a freed graph frees it whatever the storage does.
    if not hasattr(storage, "mcp_kept"):
        storage.mcp_kept = weakref.WeakValueDictionary()  # pyright: ignore[reportAttributeAccessIssue]
    storage.mcp_kept[key] = kept  # pyright: ignore[reportAttributeAccessIssue]
    return kept


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a range of memory, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
