"""Source files to one token file: tokenised in parallel into parts, joined, indexed.

Neither the number of processes nor a stop on the way changes a byte of the result: see ``pieces``
for where sources are cut, and ``part`` for what a run takes over from one that was stopped.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from mcp_parallel.data import storage
from mcp_parallel.data.prepare.index import (
    INDEX_FILE,
    TOKENIZER_FILE,
    TOKENS_FILE,
    Index,
    Part,
    Skipped,
    block_bytes_for,
    digest,
    replace_file,
)
from mcp_parallel.data.prepare.part import Made, Maker, Task, kept, make_in_worker, worker
from mcp_parallel.data.prepare.pieces import pieces_of
from mcp_parallel.data.prepare.recipe import REQUEST_FILE, Recipe
from mcp_parallel.data.prepare.sources import Shard, SourceError

PARTS_FOLDER = "parts"
# How often the bar moves.
_LOOK_S = 0.25

Progress = Callable[[int, int], None]
"""Told of bytes read and tokens made so far."""


@dataclass(frozen=True)
class Built:
    """A finished token file."""

    index: Index
    num_kept: int
    """Pieces taken over from a run that was stopped."""


class _Plan(NamedTuple):
    tasks: list[Task]
    numbers: list[int]
    """The shard of each task."""
    bad: dict[int, str]
    """Shards that have no pieces, and why."""


def build(
    shards: Sequence[Shard],
    out: str,
    work: Path,
    recipe: Recipe,
    jobs: int,
    progress: Progress,
    *,
    skip_bad: bool = False,
) -> Built:
    """Tokenise ``shards`` into ``out``.

    Args:
        shards: sources, in the order in which their tokens are to stand.
        out: a folder or a URL, gets ``tokens.bin``, ``tokenizer.json`` and, last, ``index.json``.
        work: a folder of this machine that holds ``parts`` on the way; it may be ``out``.
        recipe: how.
        jobs: processes; each takes a piece at a time.
        progress: called now and then.
        skip_bad: leave broken shards out and name them in the index.

    Raises:
        SourceError: a shard is broken, or none is whole, or a process was ended from outside;
            finished parts stay for the next run.
        StorageError: a URL cannot be reached.
        OSError: a file cannot be read or written.

    Cost: parts and the finished file are both on disk for a moment.
    """
    (work / PARTS_FOLDER).mkdir(parents=True, exist_ok=True)
    storage.remove(storage.below(out, INDEX_FILE))
    plan = _plan(shards, work / PARTS_FOLDER, recipe, skip_bad)
    taken_over = {n: made for n, task in enumerate(plan.tasks) if (made := kept(task, recipe))}
    made = dict(taken_over)
    for number, one in _make(plan, made, recipe, jobs, progress):
        made[number] = one
        if one.bad is not None and not skip_bad:
            raise SourceError(one.bad)
    parts, skipped = _shards_made(shards, plan, made, skip_bad)
    good = {part.name for part in parts}
    whole = [t.stem.with_suffix(".bin") for t in plan.tasks if t.shard.name in good]
    checksums = _join(whole, out)
    num_bytes = sum(part.tokens for part in parts) * recipe.dtype.itemsize
    index = Index(
        recipe.vocab_size,
        recipe.dtype.itemsize,
        recipe.separator,
        tuple(parts),
        block_bytes_for(num_bytes),
        checksums,
        recipe.tokenizer_digest,
        tuple(skipped),
    )
    _write(out, TOKENIZER_FILE, recipe.tokenizer.encode())
    _write(out, INDEX_FILE, index.to_bytes())
    shutil.rmtree(work / PARTS_FOLDER)
    (work / REQUEST_FILE).unlink(missing_ok=True)
    return Built(index, len(taken_over))


def _plan(shards: Sequence[Shard], folder: Path, recipe: Recipe, skip_bad: bool) -> _Plan:
    """Every piece of every shard, and what its part is called."""
    plan = _Plan([], [], {})
    for number, shard in enumerate(shards):
        try:
            pieces = pieces_of(shard, recipe.cut)
        except SourceError as error:
            if not skip_bad:
                raise
            plan.bad[number] = str(error)
            continue
        for at, piece in enumerate(pieces):
            plan.tasks.append(Task(shard, piece, folder / f"{number:06d}-{at:06d}"))
            plan.numbers.append(number)
    return plan


def _make(
    plan: _Plan, made: dict[int, Made], recipe: Recipe, jobs: int, progress: Progress
) -> Iterator[tuple[int, Made]]:
    """(number of the task, its part) of each that is not made yet, as they are done."""
    # The tokenizer has threads of its own, which a forked process would not have.
    context = multiprocessing.get_context("spawn")
    counters = context.Array("q", 2)
    counters[0] = sum(plan.tasks[number].piece.size for number in made)
    counters[1] = sum(one.tokens for one in made.values())
    waiting = [number for number in range(len(plan.tasks)) if number not in made]
    progress(counters[0], counters[1])
    if jobs == 1:
        maker = Maker(recipe, counters)
        for number in waiting:
            yield number, maker.make(plan.tasks[number])
            progress(counters[0], counters[1])
        return
    pool = ProcessPoolExecutor(
        max(1, min(jobs, len(waiting))), context, worker, (recipe, counters, os.getpid())
    )
    with pool:
        running: dict[Future[Made], int] = {
            pool.submit(make_in_worker, plan.tasks[number]): number for number in waiting
        }
        try:
            while running:
                done, _ = wait(running, _LOOK_S, FIRST_COMPLETED)
                progress(counters[0], counters[1])
                for future in done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool:
            raise SourceError(
                f"data: --jobs must be as many processes as the memory holds, got {jobs}, one of "
                "which was ended; use fewer, finished pieces are taken over"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _shards_made(
    shards: Sequence[Shard], plan: _Plan, made: dict[int, Made], skip_bad: bool
) -> tuple[list[Part], list[Skipped]]:
    """The tokens of each whole shard, and the shards that are not."""
    parts, skipped = [], []
    of_shard: list[list[Made]] = [[] for _ in shards]
    for task, number in enumerate(plan.numbers):
        of_shard[number].append(made[task])
    for number, (shard, own) in enumerate(zip(shards, of_shard, strict=True)):
        part = Part(shard.name, sum(m.tokens for m in own), sum(m.documents for m in own))
        # The first break in the file, whichever was found first.
        reason = plan.bad.get(number) or next((m.bad for m in own if m.bad is not None), None)
        if reason is None and part.documents == 0:
            reason = f"data: {shard.name!a} must hold some text, got no document"
        if reason is None:
            parts.append(part)
            continue
        if not skip_bad:
            raise SourceError(reason)
        skipped.append(Skipped(shard.name, reason.removeprefix("data: ")))
    if not parts:
        raise SourceError(
            f"data: SOURCE must hold a file that is whole, got {len(skipped)} that are not; the "
            f"first: {skipped[0].reason}"
        )
    return parts, skipped


def _join(parts: Sequence[Path], out: str) -> tuple[str, ...]:
    """Write ``parts`` as ``out``'s token file; returns the checksums of its blocks."""
    block_bytes = block_bytes_for(sum(part.stat().st_size for part in parts))
    if storage.is_url(out):
        with storage.created(storage.below(out, TOKENS_FILE)) as file:
            return _copied(parts, file, block_bytes)
    folder = storage.local_path(out)
    temporary = folder / f".{TOKENS_FILE}.tmp"
    with temporary.open("wb") as file:
        checksums = _copied(parts, file, block_bytes)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / TOKENS_FILE)
    return checksums


def _copied(parts: Sequence[Path], out: IO[bytes], block_bytes: int) -> tuple[str, ...]:
    checksums: list[str] = []
    block = bytearray()
    for part in parts:
        with part.open("rb") as source:
            while window := source.read(block_bytes - len(block)):
                out.write(window)
                block += window
                if len(block) == block_bytes:
                    checksums.append(digest(block))
                    block.clear()
    return (*checksums, digest(block)) if block else tuple(checksums)


def _write(out: str, name: str, text: bytes) -> None:
    if storage.is_url(out):
        storage.write(storage.below(out, name), text)
    else:
        replace_file(storage.local_path(out) / name, text)
