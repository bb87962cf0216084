"""Every schedule as a pure function of its sizes. No torch.

A rank's order is written as phases ``(times, "actions")``, which can be held against the papers'
figures by eye. A word is a kind and, where it matters, the chunk: ``"F0 I0 W0"``. Each word takes
that chunk's next micro-batch. Without a chunk, F, B and I go through the chunks in rounds of pp
micro-batches (Narayanan et al.), and W takes the oldest input gradient whose W is still due.

Letters: p = pipeline ranks, r = this rank, m = micro-batches, v = chunks of a rank.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import cast

from mcp_parallel.schedules.action import V_SHAPED, Action, Kind, Plan, stage_of

Phase = tuple[int, str]


def gpipe(p: int, r: int, m: int, v: int) -> list[Phase]:
    """All forwards, then all backwards. Source: Huang et al., "GPipe" (2019)."""
    del p, r, v
    return [(m, "F"), (m, "B")]


def one_f_one_b(p: int, r: int, m: int, v: int) -> list[Phase]:
    """Warm up, one forward one backward, drain: at most p - r micro-batches alive.

    Source: Narayanan et al., "PipeDream" (2019), the flush variant.
    """
    del v
    warmup = min(p - r - 1, m)
    return [(warmup, "F"), (m - warmup, "F B"), (warmup, "B")]


def interleaved(p: int, r: int, m: int, v: int) -> list[Phase]:
    """1F1B over v chunks a rank, in rounds of p micro-batches: a bubble v times smaller.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training" (2021), section 2.2.
    """
    warmup = min((v - 1) * p + 2 * (p - r - 1), m * v)
    return [(warmup, "F"), (m * v - warmup, "F B"), (warmup, "B")]


def zero_bubble(p: int, r: int, m: int, v: int) -> list[Phase]:
    """1F1B whose weight gradients wait until there is nothing better to do.

    Rank r holds back r weight gradients: input gradients reach the ranks before it sooner, and the
    drain has work. One chunk is ZB-H1, which keeps 1F1B's p micro-batches; several are its
    interleaved form. Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2.
    """
    units = m * v
    warmup = min((v - 1) * p + (p - r - 1), units)
    steady = units - warmup
    held = min(r, units)
    late = held - min(held, steady)
    return [
        (warmup, "F"),
        (min(held, steady), "F I"),
        (steady - min(held, steady), "F I W"),
        (late, "I"),
        (warmup - late, "I W"),
        (held, "W"),
    ]


def zbv(p: int, r: int, m: int, v: int) -> list[Phase]:
    """Two chunks in a V and no bubble once F, I and W take the same time.

    Written for 2p - 1 micro-batches or more; ``build_plan`` leaves out what a smaller m lacks.
    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 6.
    """
    del v
    m = max(m, 2 * p - 1)
    first = 2 * (p - r) - 1 + r  # forwards of chunk 0 before the steady phase
    return [
        (2 * (p - r) - 1, "F0"),
        (r, "F1 F0"),
        (p - r, "F1 I1 W1"),
        (m - first, "F0 I0 W0 F1 I1 W1"),
        (first - p, "I0 W0 F1 I1 W1"),
        (r, "I0 I1"),
        (p - r, "I0 W0"),
        (r, "W1"),
        (r, "W0"),
    ]


def dualpipev(p: int, r: int, m: int, v: int) -> list[Phase]:
    """Two chunks in a V; a forward of one is always next to a backward of the other.

    On machines that overlap the pair's communication with its computation the pair costs less than
    its parts. Needs m >= 2p. Source: DeepSeek-AI, "DualPipe" (2025), its V-shaped half.
    """
    del v
    full = (r + 1) // 2  # pairs of the drain before weight gradients are split off
    drain = [(full, "B1 B0"), (r + 1 - full, "I1 I0")]
    if r % 2 == 0:
        drain = [(full, "B1 B0"), (1, "B1 I0"), (r - full, "I1 I0")]
    return [
        (2 * (p - r - 1), "F0"),
        (r + 1, "F0 F1"),
        (p - r - 1, "I1 W F1"),
        (m - 2 * p + r + 1, "F0 B1 F1 B0"),
        (p - r - 1, "B1 F1 B0"),
        *drain,
        (p - r - 1, "W I0"),
        (r + 1, "W"),
    ]


SCHEDULES: dict[str, Callable[[int, int, int, int], list[Phase]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "zbv": zbv,
    "dualpipev": dualpipev,
}


def build_plan(schedule: str, pp: int, num_microbatches: int, chunks: int = 1) -> Plan:
    """The orders of all ranks.

    Args:
        schedule: a name in ``SCHEDULES``.
        pp: pipeline ranks.
        num_microbatches: of one step; with several chunks in rounds a multiple of ``pp``, with
            dualpipev at least ``2 * pp``.
        chunks: stages on each rank; V-shaped schedules have 2, gpipe and 1f1b 1.

    Raises:
        ValueError: sizes that the schedule does not run.

    Cost: linear in actions.
    """
    _check(schedule, pp, num_microbatches, chunks)
    orders = []
    for rank in range(pp):
        phases = SCHEDULES[schedule](pp, rank, num_microbatches, chunks)
        order = _unroll(phases, schedule, pp, rank, chunks)
        orders.append(tuple(a for a in order if a.microbatch < num_microbatches))
    return Plan(schedule, pp, chunks, num_microbatches, tuple(orders))


def _check(schedule: str, pp: int, num_microbatches: int, chunks: int) -> None:
    if schedule not in SCHEDULES:
        names = ", ".join(SCHEDULES)
        raise ValueError(f"build_plan: schedule must be one of {names}, got {schedule!a}")
    low, high = (2, 2) if schedule in V_SHAPED else (1, 1)
    if schedule in ("interleaved", "zero_bubble"):
        high = chunks
    if min(pp, num_microbatches) < 1 or not low <= chunks <= high:
        raise ValueError(
            f"build_plan: pp and num_microbatches must be positive and chunks {low} with schedule "
            f"{schedule}, got {pp}, {num_microbatches} and {chunks}"
        )
    unit = pp if chunks > 1 and schedule not in V_SHAPED else 1
    least = 2 * pp if schedule == "dualpipev" else unit
    if num_microbatches % unit or num_microbatches < least:
        rule = f"at least {least}" if schedule == "dualpipev" else f"a multiple of pp = {unit}"
        raise ValueError(
            f"build_plan: num_microbatches must be {rule} with schedule {schedule} and {chunks} "
            f"chunks, got {num_microbatches}"
        )


def _unroll(
    phases: list[Phase], schedule: str, pp: int, rank: int, chunks: int
) -> Iterator[Action]:
    """The actions that the phases mean on one rank."""
    next_microbatch: Counter[tuple[Kind, int]] = Counter()
    next_unit: Counter[Kind] = Counter()
    due: deque[tuple[int, int]] = deque()  # (chunk, micro-batch) with I done and W not
    for times, words in phases:
        for word in words.split() * times:
            kind = cast("Kind", word[0])
            if word == "W":
                chunk, microbatch = due.popleft()
            else:
                chunk = (
                    int(word[1]) if len(word) > 1 else _chunk_in_turn(next_unit, kind, pp, chunks)
                )
                # B and I take from one row of micro-batches: a chunk may change from B to I.
                counter = ("I" if kind == "B" else kind, chunk)
                microbatch = next_microbatch[counter]
                next_microbatch[counter] += 1
                if kind == "I":
                    due.append((chunk, microbatch))
                elif kind == "B":
                    next_microbatch["W", chunk] += 1
                elif kind == "W":
                    due.remove((chunk, microbatch))
            yield Action(kind, stage_of(schedule, pp, rank, chunk), microbatch, chunk)


def _chunk_in_turn(next_unit: Counter[Kind], kind: Kind, pp: int, chunks: int) -> int:
    """Rounds of ``pp`` micro-batches a chunk, forwards up the chunks and backwards down."""
    turn = next_unit[kind] // pp % chunks
    next_unit[kind] += 1
    return turn if kind == "F" else chunks - 1 - turn
