"""Save a run's state and load it at any layout. Collective over a group, or one process alone.

All ranks see the same file system. Whatever goes wrong on one rank becomes the same error on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from mcp_parallel.checkpoint.exchange import Group, all_gather_json, raise_first, rank_in
from mcp_parallel.checkpoint.format import CheckpointError, dump_json, is_count
from mcp_parallel.checkpoint.manifest import FILE_NAME, FileRecord, Manifest, step_name
from mcp_parallel.checkpoint.planning import (
    BoxEntry,
    LocalChunk,
    Read,
    SavePlacement,
    describe,
    plan_load,
    plan_save,
)
from mcp_parallel.checkpoint.steps import (
    commit_dir,
    fsync_dir,
    new_nonce,
    staging_dir,
    tmp_path,
    verify_files,
)
from mcp_parallel.checkpoint.storage import ShardReader, write_file, write_shard


def save(
    directory: Path,
    chunks: Sequence[LocalChunk],
    *,
    step: int,
    fingerprint: str,
    layout: Mapping[str, Any],
    extra: Mapping[str, Any],
    group: Group = None,
) -> Path:
    """Write ``directory/step_XXXXXXXX`` from what every rank holds; it appears whole or not at all.

    Every rank of ``group`` calls this with the same ``step``, ``fingerprint`` and ``layout``; rank
    0's ``extra`` is kept. Each box is written once, whoever of its holders has the least to write.
    Replicas are taken to be equal; their contents are not compared. A folder of the same step that
    is there already is replaced.

    Args:
        directory: the run's ``checkpoints`` folder; made when missing.
        chunks: this rank's part. Together the ranks' chunks must tile every tensor.
        step: optimizer steps done, at least 0.
        fingerprint: says which model this is a state of; ``load`` compares it.
        layout: the parallel layout, a JSON object, for people.
        extra: a JSON object of the caller's: data position, seeds, versions.
        group: the ranks that take part; None is all of them.

    Returns:
        The folder.

    Raises:
        CheckpointError: on all ranks alike, when one could not write, a chunk breaks
            ``LocalChunk``'s contract, ranks disagree, or a tensor is not covered. Nothing is left
            under the final name then, and an older folder of this step stays.

    Cost: the bytes written once over all ranks; memory for one tensor at a time at most.
    """
    rank = rank_in(group)

    def begin() -> dict[str, Any]:
        head = _head(step, fingerprint, layout, extra)
        entries = [describe(chunk) for chunk in chunks]
        nonce = new_nonce()
        if rank == 0:
            stack.enter_context(staging_dir(tmp_path(directory, step, nonce)))
        return {"head": head, "nonce": nonce, "entries": entries}

    def finish() -> None:
        if rank == 0:
            write_file(tmp / FILE_NAME, manifest.encode())
            fsync_dir(tmp)
            commit_dir(tmp, final)

    with ExitStack() as stack:
        plans = _together("save", begin, group)
        head, tmp = plans[0]["head"], tmp_path(directory, step, plans[0]["nonce"])
        placement = _plan(plans)
        written = _together("save", lambda: write_share(tmp, placement, chunks, rank), group)
        files = {name: FileRecord(*record) for part in written for name, record in part.items()}
        manifest = Manifest(**head, extra=extra, files=files, tensors=placement.tensors)
        final = directory / step_name(step)
        _together("save", finish, group)
    return final


def load(
    path: Path,
    chunks: Sequence[LocalChunk],
    *,
    fingerprint: str | None,
    group: Group = None,
) -> Manifest:
    """Fill ``chunks`` in place from checkpoint ``path``, whatever layout it was saved at.

    Every rank of ``group`` calls this with the chunks that it wants; tensors of the checkpoint
    that nobody wants are left alone. All shards are verified first, shared out among the ranks;
    no destination is touched before every rank has said that all is well. After that only the
    wanted byte ranges are read, straight from the mapped files.

    Args:
        path: a step folder.
        chunks: destinations, of the dtype that was saved, of any strides and device.
        fingerprint: must equal the one given to ``save``; None skips this check.
        group: the ranks that take part; None is all of them.

    Returns:
        The manifest, with ``extra``.

    Raises:
        CheckpointError: on all ranks alike, when a file is damaged (named), when the checkpoint
            is of another model (first difference named), or ranks see different files.

    Cost: each shard is read once by one rank to verify it, and its wanted parts once more.
    """
    prepared: list[tuple[Manifest, list[Read]]] = []

    def prepare() -> str:
        prepared.append(_prepare(path, chunks, fingerprint))
        return prepared[0][0].checksum()

    checksums = _together("load", prepare, group)
    if len(set(checksums)) > 1:
        raise CheckpointError(f"load: checkpoint {path} must be the same on all ranks")
    manifest, reads = prepared[0]
    mine = _share_of(manifest, len(checksums), rank_in(group))
    _together("load", lambda: verify_files(path, manifest, mine), group)
    _together("load", lambda: _copy(path, manifest, reads), group)
    return manifest


def _together(op: str, work: Callable[[], Any], group: Group) -> list[Any]:
    """Run ``work`` on every rank and hand each rank's result to all.

    Raises:
        CheckpointError: it failed somewhere; the failure of the lowest such rank, on all ranks.
    """
    value, problem, cause = None, None, None
    try:
        value = work()
    except Exception as error:  # whatever it is, the peers wait for an answer
        is_plain = isinstance(error, CheckpointError | ValueError | OSError)
        problem, cause = str(error) if is_plain else repr(error), error
    answers = all_gather_json([problem, isinstance(cause, OSError), value], group)
    problems, refused, values = (list(column) for column in zip(*answers, strict=True))
    try:
        raise_first(op, problems, refused)
    except CheckpointError as error:
        raise error from cause
    return values


def _head(
    step: int, fingerprint: str, layout: Mapping[str, Any], extra: Mapping[str, Any]
) -> dict[str, Any]:
    if not is_count(step):
        raise ValueError(f"step must be a whole number from 0, got {step!r}")
    if not isinstance(fingerprint, str):
        raise ValueError(f"fingerprint must be a string, got {type(fingerprint).__name__}")
    for name, table in (("layout", layout), ("extra", extra)):
        if not isinstance(table, Mapping):
            raise ValueError(f"{name} must be a JSON object, got {type(table).__name__}")
        dump_json(dict(table), name)
    return {"step": step, "fingerprint": fingerprint, "layout": dict(layout)}


def _plan(plans: Sequence[dict[str, Any]]) -> SavePlacement:
    """The same placement on every rank, from what all said they hold."""
    for rank, plan in enumerate(plans):
        if plan["head"] != plans[0]["head"]:
            raise CheckpointError(
                f"save: step, fingerprint and layout must be the same on all ranks, got "
                f"{plans[0]['head']} (rank 0) and {plan['head']} (rank {rank})"
            )
    entries = [
        [
            BoxEntry(name, dtype, tuple(shape), tuple(offsets), tuple(sizes))
            for name, dtype, shape, offsets, sizes in plan["entries"]
        ]
        for plan in plans
    ]
    try:
        return plan_save(entries)
    except CheckpointError as error:
        raise CheckpointError(f"save: {error}") from None


def write_share(
    tmp: Path, placement: SavePlacement, chunks: Sequence[LocalChunk], rank: int
) -> dict[str, tuple[int, str]]:
    """Write the shard of ``rank`` into ``tmp``, if it has one.

    Returns:
        ``{file: (bytes, checksum)}``, empty when this rank has nothing to write.

    Raises:
        OSError: the system refused.
    """
    file = placement.files[rank]
    if file is None:
        return {}
    held = {}
    for chunk in chunks:
        entry = describe(chunk)
        if entry.num_bytes or 0 in entry.shape:
            held[entry.name, entry.offsets] = chunk.tensor
    record = write_shard(tmp / file, [(key, held[box]) for key, box in placement.writes[rank]])
    return {file: (record.size_bytes, record.checksum)}


def _prepare(
    path: Path, chunks: Sequence[LocalChunk], fingerprint: str | None
) -> tuple[Manifest, list[Read]]:
    """All that ``load`` can check without opening a shard."""
    manifest = Manifest.read(path)
    if fingerprint is not None and fingerprint != manifest.fingerprint:
        raise CheckpointError(
            f"checkpoint {path} is of another model: its fingerprint is "
            f"{manifest.fingerprint!r}, this model's is {fingerprint!r}"
        )
    return manifest, plan_load(path, manifest, chunks)


def _share_of(manifest: Manifest, num_ranks: int, rank: int) -> list[str]:
    """The files that ``rank`` verifies: largest first to whoever has the fewest bytes."""
    planned_bytes, mine = [0] * num_ranks, []
    for name in sorted(manifest.files, key=lambda n: (-manifest.files[n].size_bytes, n)):
        verifier = planned_bytes.index(min(planned_bytes))
        planned_bytes[verifier] += manifest.files[name].size_bytes
        if verifier == rank:
            mine.append(name)
    return mine


def _copy(path: Path, manifest: Manifest, reads: Sequence[Read]) -> None:
    contents = manifest.contents()
    by_file: dict[str, list[Read]] = {}
    for read in reads:
        by_file.setdefault(read.source.file, []).append(read)
    for name, parts in by_file.items():
        with ShardReader(path / name, f"checkpoint {path}: {name}", contents[name]) as reader:
            for read in parts:
                source = reader.tensor(read.source.key)
                target = read.target.tensor.detach()  # a leaf that requires grad is filled too
                _box(target, read.target_offsets, read.sizes).copy_(
                    _box(source, read.source_offsets, read.sizes)
                )


def _box(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor
