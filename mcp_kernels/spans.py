"""Named spans of time: what a rank does when, for ``torch.profiler``, and how long it communicates.

    with span("forward"):
        ...

Nothing is recorded, and next to nothing is spent, outside of ``recording`` and ``metering``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ParamSpec, TypeVar

from torch.autograd.profiler import record_function

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class Recorder:
    """Adds up the time inside spans of communication; as a context manager it is such a span.

    Args:
        waited_s: seconds that this thread has ever waited for other ranks, as something else
            counts them; those outside of spans, inside of fused ops, are added up too.
    """

    def __init__(self, waited_s: Callable[[], float] = lambda: 0.0) -> None:
        self._waited_s = waited_s
        self._seconds = self._taken = self._start = 0.0
        self._depth = 0
        self._counted_s = waited_s()

    def communication_s(self) -> float:
        """Seconds of communication so far; a span inside another counts once, open ones not yet."""
        if self._depth == 0:
            self._count_waits()
        return self._seconds

    def take_communication_s(self) -> float:
        """Those since the last call."""
        seconds = self.communication_s()
        taken, self._taken = self._taken, seconds
        return seconds - taken

    def __enter__(self) -> None:
        if self._depth == 0:
            self._count_waits()
            self._start = time.perf_counter()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._seconds += time.perf_counter() - self._start
            self._counted_s = self._waited_s()  # those of the span are in its time

    def _count_waits(self) -> None:
        waited_s = self._waited_s()
        self._seconds += waited_s - self._counted_s
        self._counted_s = waited_s


_recorder: Recorder | None = None  # with names, for the profiler
_meter: Recorder | None = None
_NOTHING = nullcontext()


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record the spans of this process by name; the block lies in no other such block."""
    global _recorder
    assert _recorder is None, "spans are being recorded already"
    _recorder = recorder = Recorder()
    try:
        yield recorder
    finally:
        _recorder = None


@contextmanager
def metering(waited_s: Callable[[], float] = lambda: 0.0) -> Iterator[Recorder]:
    """Measure the communication of this process; the block lies in no other such block.

    Args:
        waited_s: see ``Recorder``.

    Cost: half a microsecond a span.
    """
    global _meter
    assert _meter is None, "communication is being measured already"
    _meter = meter = Recorder(waited_s)
    try:
        yield meter
    finally:
        _meter = None


def metered_s() -> float:
    """Seconds of communication that ``metering`` has seen so far; 0 outside of it."""
    return 0.0 if _meter is None else _meter.communication_s()


def span(name: str) -> AbstractContextManager[object]:
    """The body is called ``name`` in traces. Cost: 0.1 microseconds when nothing is recorded."""
    return _NOTHING if _recorder is None else record_function(name)


def communication(name: str) -> AbstractContextManager[object]:
    """As ``span``, of time in which this thread moves bytes between ranks or waits for them."""
    if _recorder is not None:
        return _recorded(_recorder, name)
    return _NOTHING if _meter is None else _meter


@contextmanager
def _recorded(recorder: Recorder, name: str) -> Iterator[None]:
    with record_function(name), recorder, _meter or _NOTHING:
        yield


def communicates(
    name: str,
) -> Callable[[Callable[_Params, _Result]], Callable[_Params, _Result]]:
    """Decorator: every call of the function is a span of communication."""

    def decorate(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        @functools.wraps(function)
        def run(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
            if _recorder is None and _meter is None:
                return function(*args, **kwargs)
            with communication(name):
                return function(*args, **kwargs)

        return run

    return decorate
