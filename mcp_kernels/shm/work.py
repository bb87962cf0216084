"""What a call of the backend returns: done already, or a transfer that completes later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mcp_kernels.spans import communication

_NO_TIMEOUT = timedelta(0)


class Transfer(Protocol):
    """What the compiled group, or gloo, moves."""

    @property
    def done(self) -> bool:
        """Whether it is complete, without moving anything."""
        ...

    @property
    def peer(self) -> int:
        """Rank of the other side; known for a receive from any rank once it is complete."""
        ...

    def wait(self, timeout_s: float, /) -> None:
        """Until it is complete; 0 is the group's timeout."""
        ...

    def test(self) -> bool:
        """Whether it is complete; moves what can be moved."""
        ...


class DoneWork(dist.Work):
    """A collective that was complete when its call returned."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """True, at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def exception(self) -> None:
        """None: a call that fails raises."""
        return

    def synchronize(self) -> None:
        """Nothing: a CPU tensor has no stream."""

    def result(self) -> list[Tensor]:
        """The tensors that the call wrote."""
        return list(self._tensors)

    def get_future(self) -> Any:
        """A completed future of ``result()``."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(self._tensors))
        return future


class TransferWork(dist.Work):
    """A send or receive; its tensor must not be touched before ``wait`` returned.

    Args:
        transfer: what the group moves.
        tensor: kept alive until then.
        finish: called once after completion, to put staged bytes where they belong.
    """

    def __init__(
        self,
        transfer: Transfer,
        tensor: Tensor,
        finish: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()
        self._transfer = transfer
        self._tensor = tensor
        self._finish = finish
        self.holders: set[TransferWork] = set()
        """Where the work is held while it is open; it leaves when it is complete."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Until the transfer is complete.

        Raises:
            RuntimeError: the peer died or did not take part in time.
        """
        with communication("wait for a message"):
            self._transfer.wait(timeout.total_seconds())
            self._complete()
        return True

    def is_completed(self) -> bool:
        """Whether it is complete; moves what can be moved."""
        if not self._transfer.test():
            return False
        self._complete()
        return True

    def is_success(self) -> bool:
        """Whether it is complete; one that failed raises in ``wait``."""
        return self._transfer.done

    def exception(self) -> None:
        """None: failures are raised by ``wait``."""
        return

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensor that was sent or received."""
        return [self._tensor]

    def source_rank(self) -> int:
        """Rank in the group whose message was received."""
        return self._transfer.peer

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        """A future of ``result()``; completes the transfer first, since nothing else will."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([self._tensor])
        return future

    def _complete(self) -> None:
        if self._finish is not None:
            self._finish()
            self._finish = None
        self.holders.discard(self)
