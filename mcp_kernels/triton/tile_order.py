"""The order in which ranks do tiles: who owns one, who is served when. One place for all kernels.

Every function here is used by the writer of a flag, by who waits for it and by who reads the data
behind it, so the three cannot disagree. They are plain integer arithmetic: kernels call them
compiled, tests and the model of the protocol call ``function.fn`` on Python numbers.

Letters: W = ranks, G = programs of a rank, T = tiles, Q = tiles of one owner.
"""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401  (a kernel must see it)


@triton.jit
def peer_at(rank, turn, WORLD):
    """Whom ``rank`` serves at ``turn``: its successors, itself last, so owners are spread.

    At any turn the W ranks serve W different peers.
    """
    return (rank + 1 + turn) % WORLD


@triton.jit
def source_at(rank, turn, WORLD):
    """Whose part ``rank`` consumes at ``turn``: its own first, then its predecessors.

    The inverse of ``peer_at``: ``source_at(r, t + 1)`` served r at its turn t.
    """
    return (rank + WORLD - turn) % WORLD


@triton.jit
def tile_of(owner, local, per_owner):
    """Tile number of an owner's ``local``-th tile: an owner's tiles are neighbours."""
    return owner * per_owner + local


@triton.jit
def local_at(step, program, num_programs):
    """The owner's tile that ``program`` does at ``step``, on every rank the same."""
    return step * num_programs + program


@triton.jit
def grouped(tile, num_m, num_n, GROUP_M):
    """``(row, column)`` of a tile: GROUP_M rows of tiles together, so that they share weights."""
    per_group = GROUP_M * num_n
    first = tile // per_group * GROUP_M
    size = num_m - first
    size = size if size < GROUP_M else GROUP_M
    inside = tile % per_group
    return first + inside % size, inside // size
