"""A model of tile order and flags, searched in full: no deadlock, no stale read, no early reuse.

Programs of the ranks are lists of steps, made with the functions that the kernels use. Every order
in which they can run is tried (states that were seen are not tried again). A rank is a GPU: it
starts call e + 1 when call e has ended, and runs at most ``resident`` programs at a time, which
stay until they end. Its programs may be started in any order.

    write   a tile (or a rank's rows) into a slot: the number of the call, and what it is, for a
            sum takes the place of a product
    raise   a flag of a rank
    await   a flag of the own rank
    read    from a slot: what must be there is this call's
    end     nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("triton")

from mcp_kernels.triton import tile_order

peer_at: Callable[..., int] = tile_order.peer_at.fn
source_at: Callable[..., int] = tile_order.source_at.fn
tile_of: Callable[..., int] = tile_order.tile_of.fn
local_at: Callable[..., int] = tile_order.local_at.fn
grouped: Callable[..., tuple[int, int]] = tile_order.grouped.fn

Step = tuple[Any, ...]


@dataclass(frozen=True)
class Problem:
    world: int
    programs: int
    """Of each rank and call."""
    resident: int
    """How many of them a rank runs at a time."""
    calls: list[list[list[list[Step]]]]
    """``calls[call][rank][program]``: its steps."""
    slots: int = 2
    parities: int = 2


def two_shot(rank: int, program: int, world: int, programs: int, tiles: int) -> Iterator[Step]:
    """The schedule of ``matmul_reduce`` with an owner for each tile."""
    per_owner = -(-tiles // world)
    steps = -(-per_owner // programs)
    if program == 0:
        yield from (("raise", peer, ("greet", rank)) for peer in range(world))
    for step in range(steps + 2):
        for turn in range(world):
            local, owner = local_at(step, program, programs), peer_at(rank, turn, world)
            tile = tile_of(owner, local, per_owner)
            if local < per_owner and tile < tiles:
                yield ("write", rank, ("product", tile))
                yield ("raise", owner, ("product", local, rank))
        local = local_at(step - 1, program, programs)
        tile = tile_of(rank, local, per_owner)
        if step >= 1 and local < per_owner and tile < tiles:
            for peer in range(world):
                yield ("await", ("product", local, peer))
            for peer in range(world):
                yield ("read", peer, ("product", tile))
            yield ("write", rank, ("sum", tile))
            for peer in range(world):
                yield ("raise", peer, ("sum", local, rank))
        local = local_at(step - 2, program, programs)
        for turn in range(world - 1):
            owner = peer_at(rank, turn, world)
            tile = tile_of(owner, local, per_owner)
            if step >= 2 and local < per_owner and tile < tiles:
                yield ("await", ("sum", local, owner))
                yield ("read", owner, ("sum", tile))
    if program == 0:
        yield from (("await", ("greet", peer)) for peer in range(world))


def one_shot(rank: int, program: int, world: int, programs: int, tiles: int) -> Iterator[Step]:
    steps = -(-tiles // programs)
    if program == 0:
        yield from (("raise", peer, ("greet", rank)) for peer in range(world))
    for step in range(steps + 1):
        tile = local_at(step, program, programs)
        if tile < tiles:
            yield ("write", rank, ("product", tile))
            yield from (("raise", peer, ("product", tile, rank)) for peer in range(world))
        tile = local_at(step - 1, program, programs)
        if step >= 1 and tile < tiles:
            yield from (("await", ("product", tile, peer)) for peer in range(world))
            yield from (("read", peer, ("product", tile)) for peer in range(world))
    if program == 0:
        yield from (("await", ("greet", peer)) for peer in range(world))


def gather(rank: int, program: int, world: int, programs: int, pieces: int) -> Iterator[Step]:
    """The schedule of ``all_gather_matmul``: a tile a piece of rows."""
    if program == 0:
        yield from (("raise", peer, ("greet", rank)) for peer in range(world))
    for turn in range(world + 1):
        if turn < world:
            to = peer_at(rank, turn + world - 1, world)
            for piece in range(program, pieces, programs):
                yield ("write", to, ("rows", rank, piece))
                yield ("raise", to, ("rows", rank, piece))
        source = source_at(rank, turn - 1, world)
        if turn > 0:
            for step in range(-(-pieces // programs)):
                piece = local_at(step, program, programs)
                if piece < pieces:
                    yield ("await", ("rows", source, piece))
                    yield ("read", rank, ("rows", source, piece))
    if program == 0:
        yield from (("await", ("greet", peer)) for peer in range(world))


def problem(
    schedule: Callable[..., Iterator[Step]],
    world: int,
    programs: int,
    work: list[int],
    **options: Any,
) -> Problem:
    """Calls with so many tiles each."""
    calls = [
        [
            [list(schedule(rank, program, world, programs, tiles)) for program in range(programs)]
            for rank in range(world)
        ]
        for tiles in work
    ]
    return Problem(world, programs, options.pop("resident", programs), calls, **options)


class Model:
    """The states of a problem; a state is hashable and holds all that can change."""

    def __init__(self, made: Problem) -> None:
        self.made = made

    def start(self) -> tuple[Any, ...]:
        ranks = tuple((0, (0,) * self.made.programs) for _ in range(self.made.world))
        return ranks, (), ()

    def successors(self, state: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """States after one program's next step; a step that only its program sees goes at once."""
        ranks = state[0]
        found = []
        for rank, (call, places) in enumerate(ranks):
            if call == len(self.made.calls):
                continue
            lists = self.made.calls[call][rank]
            running = [0 < p < len(steps) for p, steps in zip(places, lists, strict=True)]
            is_full = sum(running) >= self.made.resident
            for program, steps in enumerate(lists):
                at = places[program]
                if at == len(steps) or (at == 0 and is_full):
                    continue
                after = self.step(state, rank, program, steps[at])
                if after is not None:
                    found.append(after)
        return found

    def step(
        self, state: tuple[Any, ...], rank: int, program: int, step: Step
    ) -> tuple[Any, ...] | None:
        """The state after ``step``; None where it has to wait."""
        ranks, memory, flags = state
        call, places = ranks[rank]
        held, raised = dict(memory), dict(flags)
        kind = step[0]
        if kind == "write":
            held[step[1], call % self.made.slots, step[2][1:]] = (call, step[2][0])
        elif kind == "raise":
            raised[step[1], call % self.made.parities, step[2]] = call
        elif kind == "await":
            if raised.get((rank, call % self.made.parities, step[1])) != call:
                return None
        elif kind == "read" and (
            held.get((step[1], call % self.made.slots, step[2][1:])) != (call, step[2][0])
        ):
            raise AssertionError(f"stale read: rank {rank} in call {call} reads {step}")
        places = (*places[:program], places[program] + 1, *places[program + 1 :])
        lists = self.made.calls[call][rank]
        if all(p == len(steps) for p, steps in zip(places, lists, strict=True)):
            call, places = call + 1, (0,) * self.made.programs
        ranks = (*ranks[:rank], (call, places), *ranks[rank + 1 :])
        return ranks, tuple(sorted(held.items())), tuple(sorted(raised.items()))


def search(made: Problem, most: int = 400_000) -> int:
    """States reached; every one can go on or is the end."""
    model = Model(made)
    seen = {model.start()}
    waiting = list(seen)
    while waiting:
        state = waiting.pop()
        after = model.successors(state)
        if not after and any(call < len(made.calls) for call, _ in state[0]):
            raise AssertionError(f"deadlock: {state[0]}")
        for new in after:
            if new not in seen:
                seen.add(new)
                waiting.append(new)
        assert len(seen) <= most, "too many states to search in full"
    return len(seen)


def ids(value: Any) -> str:
    return getattr(value, "__name__", str(value))


# Few enough states to search all of them; work differs from call to call, down to nothing.
CASES = [
    (one_shot, 2, 1, [2, 1, 2]),
    (one_shot, 2, 2, [2, 1]),
    (one_shot, 3, 1, [1, 1]),
    (two_shot, 2, 1, [3, 1, 2]),
    (two_shot, 2, 2, [2]),
    (two_shot, 3, 1, [2]),
    (gather, 2, 1, [2, 0, 1]),
    (gather, 3, 1, [1]),
]
LONG_CASES = [
    (gather, 2, 2, [2]),
    (two_shot, 2, 2, [4, 0, 3]),
    (two_shot, 3, 1, [4, 1]),
    (one_shot, 4, 1, [1]),
    (gather, 2, 2, [3, 1]),
    (gather, 3, 1, [2]),
]


@pytest.mark.parametrize("schedule, world, programs, work", CASES, ids=ids)
def test_every_order_ends_and_reads_what_was_meant(
    schedule: Any, world: int, programs: int, work: list[int]
) -> None:
    assert search(problem(schedule, world, programs, work)) > 50


@pytest.mark.slow
@pytest.mark.parametrize("schedule, world, programs, work", LONG_CASES, ids=ids)
def test_every_order_of_more(schedule: Any, world: int, programs: int, work: list[int]) -> None:
    assert search(problem(schedule, world, programs, work), most=3_000_000) > 50


def test_one_slot_is_reused_early() -> None:
    with pytest.raises(AssertionError, match="stale read"):
        search(problem(one_shot, 2, 1, [1, 1], slots=1))


def test_one_set_of_flags_deadlocks() -> None:
    """A peer that is a call ahead overwrites the flag that was not seen yet."""
    with pytest.raises(AssertionError, match="deadlock"):
        search(problem(one_shot, 2, 1, [1, 1], parities=1))


def test_without_the_greeting_a_slot_is_reused_early() -> None:
    """A call without work must wait for its peers all the same."""

    def without_greeting(*args: int) -> Iterator[Step]:
        steps = [step for step in two_shot(*args) if "greet" not in step[-1]]
        yield from steps or [("end",)]

    with pytest.raises(AssertionError, match="stale read"):
        search(problem(without_greeting, 2, 1, [2, 0, 2]))


def test_more_programs_than_are_resident_deadlock() -> None:
    """Ranks that start their programs in different orders hold each other's places."""
    with pytest.raises(AssertionError, match="deadlock"):
        search(problem(one_shot, 2, 2, [2], resident=1))


def test_waiting_for_a_larger_tile_deadlocks() -> None:
    """Reducing a tile in the step of its products, with one more turn to compute after it."""

    def hasty(rank: int, program: int, world: int, programs: int, tiles: int) -> Iterator[Step]:
        steps = list(two_shot(rank, program, world, programs, tiles))
        await_own = [s for s in steps if s[0] == "await" and s[1][0] == "product"]
        rest = [s for s in steps if s not in await_own]
        yield from (*await_own, *rest)

    with pytest.raises(AssertionError, match="deadlock"):
        search(problem(hasty, 2, 1, [2]))


def test_a_wrong_rotation_reads_stale() -> None:
    """The writer's rotation and the reader's must be one."""

    def wrong(*args: int) -> Iterator[Step]:
        world = args[2]
        for step in two_shot(*args):
            if step[0] == "read" and step[2][0] == "sum":
                yield ("read", (step[1] + 1) % world, step[2])
            else:
                yield step

    with pytest.raises(AssertionError, match="stale read"):
        search(problem(wrong, 3, 1, [3]))


@pytest.mark.parametrize("world", range(1, 9))
def test_rotation(world: int) -> None:
    for turn in range(world):
        # At a turn, ranks serve different peers; over the turns, each serves every peer once.
        assert {peer_at(rank, turn, world) for rank in range(world)} == set(range(world))
        for rank in range(world):
            assert source_at(peer_at(rank, turn, world), turn + 1, world) == rank
    for rank in range(world):
        assert {peer_at(rank, turn, world) for turn in range(world)} == set(range(world))
        assert peer_at(rank, world - 1, world) == rank
        assert source_at(rank, 0, world) == rank


@pytest.mark.parametrize("world, programs, tiles", [(1, 3, 7), (2, 2, 5), (3, 2, 13), (4, 5, 3)])
def test_every_tile_is_done_once(world: int, programs: int, tiles: int) -> None:
    per_owner = -(-tiles // world)
    steps = -(-per_owner // programs)
    done = [
        tile_of(owner, local_at(step, program, programs), per_owner)
        for owner in range(world)
        for program in range(programs)
        for step in range(steps)
        if local_at(step, program, programs) < per_owner
    ]
    assert sorted(tile for tile in done if tile < tiles) == list(range(tiles))
    assert len(set(done)) == len(done)


@pytest.mark.parametrize("num_m, num_n, group", [(1, 1, 8), (9, 4, 8), (16, 3, 8), (7, 5, 2)])
def test_grouping_visits_every_tile(num_m: int, num_n: int, group: int) -> None:
    places = [grouped(tile, num_m, num_n, group) for tile in range(num_m * num_n)]
    assert sorted(places) == [(m, n) for m in range(num_m) for n in range(num_n)]
