"""Boxes in an index space: do they tile a tensor? No torch."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def cover_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Why ``boxes`` do not tile a tensor of ``shape``, or None when they do.

    Boxes that lie inside, are disjoint and have the tensor's volume in sum leave no gap.

    Cost: O(n log n) for slices along one dim; for grids, n times the boxes that one sweep
    position crosses.
    """
    for offsets, sizes in boxes:
        if any(o + n > end for o, n, end in zip(offsets, sizes, shape, strict=True)):
            return f"chunk at {list(offsets)} of {list(sizes)} sticks out of {list(shape)}"
    clash = _first_overlap([box for box in boxes if math.prod(box[1])])
    if clash is not None:
        return f"chunks at {list(clash[0][0])} and {list(clash[1][0])} overlap"
    covered = sum(math.prod(sizes) for _, sizes in boxes)
    if covered != math.prod(shape) or not boxes:
        return f"chunks hold {covered} of {math.prod(shape)} elements"
    return None


def _first_overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, found by a sweep; all boxes have elements."""
    if len(boxes) < 2:
        return None
    dims = range(len(boxes[0][0]))
    # The dim that cuts the boxes into most slabs keeps the fewest alive at a time.
    axis = max(dims, key=lambda dim: len({box[0][dim] for box in boxes}), default=None)
    if axis is None:
        return boxes[0], boxes[1]  # two chunks of a 0-d tensor
    alive: list[tuple[int, int]] = []  # (end along axis, index into boxes), by end
    order = sorted(range(len(boxes)), key=lambda i: boxes[i][0][axis])
    for index in order:
        start = boxes[index][0][axis]
        del alive[: bisect_right(alive, (start, len(boxes)))]
        for _, other in alive:
            if _overlap(boxes[index], boxes[other]):
                return boxes[other], boxes[index]
        insort(alive, (start + boxes[index][1][axis], index))
    return None


def _overlap(a: Box, b: Box) -> bool:
    return all(
        a_start < b_start + b_size and b_start < a_start + a_size
        for a_start, a_size, b_start, b_size in zip(*a, *b, strict=True)
    )
