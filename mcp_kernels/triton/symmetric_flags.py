"""Flags between GPUs in Triton: publish, wait, count a call. The protocol is that of symmetric.cuh.

A buffer starts with the words ``epoch``, ``ticket`` and ``dead``; rows of W flags follow, a set for
each parity of the epoch, then two slots. ``Row 0`` is the greeting: every call's first program
posts it to every peer and waits for theirs, which is what makes two parities enough (a call that
ends has heard from every peer, so every peer has ended the call before).

Stores release and loads acquire at system scope. A barrier of the program stands before a release
and after an acquire, so that one thread's flag speaks for all.
"""

# ruff: noqa: ANN001, ANN201, ANN202
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

# 64-bit words of a buffer's head: one 128-byte line each.
EPOCH = tl.constexpr(0)
TICKET = tl.constexpr(16)
DEAD = tl.constexpr(32)
FLAGS = tl.constexpr(64)

# Triton has had a store and a wait with a clock since 3.9; before, they are read-modify-writes.
HAS_POLL = tl.constexpr(hasattr(tl, "atomic_poll"))
# What one poll by read-modify-write takes at least, on the fastest GPU; a slower one waits longer.
NS_PER_POLL = tl.constexpr(250)


@triton.jit
def words_of(buffers, rank):
    """A rank's buffer as 64-bit words."""
    return tl.load(buffers + rank).to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
def epoch_of(own):
    """Number of the running call."""
    return tl.load(own + EPOCH) + 1


@triton.jit
def flag_row(epoch, row, num_rows, WORLD):
    """Where the W flags of ``row`` lie, in words."""
    return FLAGS + ((epoch % 2) * num_rows + row) * WORLD


@triton.jit
def publish_to(buffers, peer, at, epoch):
    """Raise one flag in ``peer``'s buffer; what this program wrote before is seen behind it."""
    tl.debug_barrier()
    flag = words_of(buffers, peer) + at
    if HAS_POLL:
        tl.atomic_store(flag, epoch, sem="release", scope="sys")
    else:
        tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def publish(buffers, at, epoch, WORLD: tl.constexpr, LANES: tl.constexpr):
    """Raise a flag in every rank's buffer, the own one too."""
    tl.debug_barrier()
    lane = tl.arange(0, LANES)
    base = tl.load(buffers + tl.minimum(lane, WORLD - 1))
    flags = base.to(tl.pointer_type(tl.int64), bitcast=True) + at
    value = tl.zeros((LANES,), tl.int64) + epoch
    if HAS_POLL:
        tl.atomic_store(flags, value, mask=lane < WORLD, sem="release", scope="sys")
    else:
        tl.atomic_xchg(flags, value, mask=lane < WORLD, sem="release", scope="sys")


@triton.jit
def _poll(flags, expected, LANES: tl.constexpr, TIMEOUT_NS: tl.constexpr):
    """``[LANES]`` int32: 1 where the flag came in time."""
    if HAS_POLL:
        came = tl.atomic_poll(flags, expected, sem="acquire", scope="sys", timeout_ns=TIMEOUT_NS)
        came = came.to(tl.int32)
    else:
        zero = tl.zeros((LANES,), tl.int64)
        came = tl.zeros((LANES,), tl.int32)
        polls = tl.zeros((), tl.int64)
        while (tl.min(came, 0) == 0) & (polls < TIMEOUT_NS // NS_PER_POLL):
            seen = tl.atomic_add(flags, zero, sem="acquire", scope="sys")
            came = (seen == expected).to(tl.int32)
            polls += 1
    tl.debug_barrier()
    return came


@triton.jit
def _report(own, error, first_missing, epoch):
    """The error word: bit 63, the missing rank in bits 40..55, the epoch; and stop later calls."""
    low = epoch & 0xFFFFFFFFFF
    tl.store(
        error, (-0x7FFFFFFFFFFFFFFF - 1) | ((tl.zeros((), tl.int64) + first_missing) << 40) | low
    )
    tl.store(own + DEAD, epoch)


@triton.jit
def wait_all(
    own, error, at, epoch, WORLD: tl.constexpr, LANES: tl.constexpr, TIMEOUT_NS: tl.constexpr
):
    """1 when every rank's flag of a row is up; 0 and the error word where one is late."""
    lane = tl.arange(0, LANES)
    flags = own + at + tl.minimum(lane, WORLD - 1)
    expected = tl.zeros((LANES,), tl.int64) + epoch
    came = _poll(flags, expected, LANES, TIMEOUT_NS)
    all_came = tl.min(came, 0)
    if all_came == 0:
        _report(own, error, tl.argmin(came, 0), epoch)
    return all_came


@triton.jit
def wait_one(own, error, at, peer, epoch, TIMEOUT_NS: tl.constexpr):
    """As ``wait_all`` for the flag of one peer."""
    flags = own + at + peer + tl.zeros((1,), tl.int32)
    expected = tl.zeros((1,), tl.int64) + epoch
    came = tl.min(_poll(flags, expected, 1, TIMEOUT_NS), 0)
    if came == 0:
        _report(own, error, peer, epoch)
    return came


@triton.jit
def finish(own, epoch, num_programs):
    """Count the call, once all programs of this rank are done with it."""
    tl.debug_barrier()
    done = tl.atomic_add(own + TICKET, 1, sem="acq_rel", scope="gpu") + 1
    if done == num_programs:
        tl.store(own + TICKET, 0)
        tl.store(own + EPOCH, epoch)


@triton.jit
def wait_pieces(
    own, error, at, first, count, source, epoch, PIECES: tl.constexpr, TIMEOUT_NS: tl.constexpr
):
    """As ``wait_all`` for PIECES flags from ``first`` on, of the ``count`` that one rank sets."""
    piece = tl.minimum(first + tl.arange(0, PIECES), count - 1)
    expected = tl.zeros((PIECES,), tl.int64) + epoch
    came = tl.min(_poll(own + at + piece, expected, PIECES, TIMEOUT_NS), 0)
    if came == 0:
        _report(own, error, source, epoch)
    return came
