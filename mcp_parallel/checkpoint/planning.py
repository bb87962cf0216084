"""Who writes which box and who reads which part of it: DCP's planners over plain local tensors.

DCP (``torch.distributed.checkpoint``) gives the global save plan with its validation and the
overlap of wanted and stored boxes. The choice of a writer among replicas is ours: DCP's own counts
a slice as large as its whole tensor, and gives replicated boxes away before it has counted those
that only one rank holds. All functions are pure, so that any number of ranks can be tried in one
process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mcp_parallel.checkpoint.boxes import cover_problem
from mcp_parallel.checkpoint.format import DTYPE_BYTES, CheckpointError, is_safe_name
from mcp_parallel.checkpoint.manifest import (
    ChunkRecord,
    Manifest,
    TensorRecord,
    chunk_key,
)
from mcp_parallel.checkpoint.storage import DTYPE_NAMES, DTYPES


@dataclass(frozen=True, slots=True)
class LocalChunk:
    """A box of a named tensor that this rank holds.

    Attributes:
        name: the whole tensor's name, such as ``model.norm.weight``: ``[A-Za-z0-9._-]+``.
        tensor: this rank's data, a plain tensor of any strides and device; may be empty.
        global_shape: shape of the whole tensor.
        offsets: where the box begins in it, one for each dim.
    """

    name: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


class BoxEntry(NamedTuple):
    """A ``LocalChunk`` without its data, in the form that ranks exchange."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the box."""
        return math.prod(self.sizes) * DTYPE_BYTES[self.dtype]


_Key = tuple[str, tuple[int, ...]]  # name, offsets


@dataclass(frozen=True, slots=True)
class SavePlacement:
    """Who writes what: ``writes[rank]`` is ``(key in the shard, name, offsets)`` of its boxes."""

    writes: list[list[tuple[str, _Key]]]
    files: list[str | None]
    tensors: dict[str, TensorRecord]


def describe(chunk: LocalChunk) -> BoxEntry:
    """The entry of ``chunk``, checked.

    Raises:
        ValueError: a name, dtype, shape or offset that breaks ``LocalChunk``'s contract.
    """
    name, sizes = chunk.name, tuple(chunk.tensor.shape)
    if not is_safe_name(name):
        raise ValueError(f"a chunk's name must match [A-Za-z0-9._-]+ without '..', got {name!r}")
    if chunk.tensor.dtype not in DTYPE_NAMES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
        raise ValueError(
            f"dtype of {name} must be one of {known}, got {chunk.tensor.dtype}; cast it"
        )
    shape, offsets = tuple(chunk.global_shape), tuple(chunk.offsets)
    fits = len(shape) == len(offsets) == len(sizes) and all(
        o >= 0 and o + n <= end for o, n, end in zip(offsets, sizes, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"chunk of {name} must lie inside of its global shape {list(shape)}, got sizes "
            f"{list(sizes)} at {list(offsets)}"
        )
    if math.prod(shape) == 0:  # there is one way to hold nothing, so that replicas look alike
        offsets, sizes = (0,) * len(shape), shape
    return BoxEntry(name, DTYPE_NAMES[chunk.tensor.dtype], shape, offsets, sizes)


def plan_save(entries: Sequence[Sequence[BoxEntry]]) -> SavePlacement:
    """Decide which rank writes which box: each box once, bytes balanced over its holders.

    Args:
        entries: what each rank holds, by rank. Boxes of the same name and offsets are replicas.

    Returns:
        The same placement on every rank that is given the same ``entries``.

    Raises:
        CheckpointError: ranks disagree about a tensor, or the boxes do not tile it.
    """
    boxes, holders = _merge(entries)
    written: list[list[WriteItem]] = [[] for _ in entries]
    for key, rank in _choose_writers(boxes, holders, len(entries)).items():
        written[rank].append(_write_item(boxes[key]))
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        plans, _ = planner.create_global_plan([SavePlan(items) for items in written])
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    return _place(plans)


def _merge(
    entries: Sequence[Sequence[BoxEntry]],
) -> tuple[dict[_Key, BoxEntry], dict[_Key, set[int]]]:
    """Boxes that hold something by (name, offsets), and the ranks that hold each."""
    boxes: dict[_Key, BoxEntry] = {}
    holders: dict[_Key, set[int]] = {}
    seen: dict[str, BoxEntry] = {}
    for rank, held in enumerate(entries):
        for entry in held:
            known = seen.setdefault(entry.name, entry)
            if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"ranks must agree on {entry.name}, got {known.dtype} "
                    f"{list(known.shape)} and {entry.dtype} {list(entry.shape)} (rank {rank})"
                )
            if entry.num_bytes == 0 and math.prod(entry.shape):
                continue
            key = (entry.name, entry.offsets)
            if boxes.setdefault(key, entry).sizes != entry.sizes:
                raise CheckpointError(
                    f"replicas of {entry.name} at {list(entry.offsets)} must have one size, "
                    f"got {list(boxes[key].sizes)} and {list(entry.sizes)} (rank {rank})"
                )
            holders.setdefault(key, set()).add(rank)
    _check_all_covered(seen, boxes)
    return boxes, holders


def _check_all_covered(seen: Mapping[str, BoxEntry], boxes: Mapping[_Key, BoxEntry]) -> None:
    by_name: dict[str, list[BoxEntry]] = {name: [] for name in seen}
    for (name, _), entry in boxes.items():
        by_name[name].append(entry)
    for name, parts in by_name.items():
        problem = cover_problem(seen[name].shape, [(p.offsets, p.sizes) for p in parts])
        if problem is not None:
            raise CheckpointError(f"tensor {name} must be held whole by the ranks: {problem}")


def _choose_writers(
    boxes: Mapping[_Key, BoxEntry], holders: Mapping[_Key, set[int]], num_ranks: int
) -> dict[_Key, int]:
    """The writer of each box: those with the least choice first, then the largest first."""
    planned_bytes = [0] * num_ranks
    writers = {}
    for key in sorted(boxes, key=lambda k: (len(holders[k]), -boxes[k].num_bytes, k)):
        rank = min(holders[key], key=lambda r: (planned_bytes[r], r))
        planned_bytes[rank] += boxes[key].num_bytes
        writers[key] = rank
    return dict(sorted(writers.items()))


def _write_item(entry: BoxEntry) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(entry.name, entry.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk_metadata(entry.offsets, entry.sizes),
            properties=TensorProperties(dtype=DTYPES[entry.dtype]),
            size=torch.Size(entry.shape),
        ),
    )


def _place(plans: Sequence[SavePlan]) -> SavePlacement:
    """Name the shards of those that write and list every tensor's boxes."""
    num_files = sum(bool(plan.items) for plan in plans)
    files: list[str | None] = []
    writes: list[list[tuple[str, _Key]]] = []
    chunks: dict[str, list[ChunkRecord]] = {}
    heads: dict[str, tuple[str, tuple[int, ...]]] = {}
    for plan in plans:
        number = sum(file is not None for file in files)
        file = f"shard_{number:05d}_of_{num_files:05d}.safetensors" if plan.items else None
        files.append(file)
        writes.append([])
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            assert file is not None
            assert item.index.offset is not None
            name, shape = item.index.fqn, tuple(data.size)
            offsets, sizes = tuple(item.index.offset), tuple(data.chunk.sizes)
            key = chunk_key(name, offsets, sizes == shape)
            writes[-1].append((key, (name, offsets)))
            heads[name] = (DTYPE_NAMES[data.properties.dtype], shape)
            chunks.setdefault(name, []).append(ChunkRecord(file, key, offsets, sizes))
    tensors = {
        name: TensorRecord(dtype, shape, tuple(chunks[name]))
        for name, (dtype, shape) in sorted(heads.items())
    }
    return SavePlacement(writes=writes, files=files, tensors=tensors)


@dataclass(frozen=True, slots=True)
class Read:
    """Copy a box of stored chunk ``source`` into a box of local chunk ``target``."""

    source: ChunkRecord
    source_offsets: tuple[int, ...]
    target: LocalChunk
    target_offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def plan_load(path: Path, manifest: Manifest, chunks: Sequence[LocalChunk]) -> list[Read]:
    """What to copy from where so that every element of ``chunks`` is filled.

    Raises:
        CheckpointError: the checkpoint has no such tensor, or another shape or dtype of it.
        ValueError: a chunk breaks ``LocalChunk``'s contract.
    """
    wanted: dict[str, list[LocalChunk]] = {}
    for chunk in chunks:
        entry = describe(chunk)
        _check_same_model(path, manifest.tensors.get(chunk.name), entry)
        if chunk.tensor.numel():
            wanted.setdefault(chunk.name, []).append(chunk)
    reads: list[Read] = []
    for name, targets in wanted.items():
        record = manifest.tensors[name]
        items = create_read_items_for_chunk_list(
            name,
            TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[record.dtype]),
                size=torch.Size(record.shape),
                chunks=[_chunk_metadata(c.offsets, c.sizes) for c in record.chunks],
            ),
            [_chunk_metadata(t.offsets, tuple(t.tensor.shape)) for t in targets],
        )
        reads += [_read(item, record, targets) for item in items]
    return reads


def _check_same_model(path: Path, record: TensorRecord | None, entry: BoxEntry) -> None:
    other = f"checkpoint {path} is of another model"
    if record is None:
        raise CheckpointError(f"{other}: it has no tensor {entry.name}")
    if record.shape != entry.shape:
        raise CheckpointError(
            f"{other}: {entry.name} has shape {list(record.shape)} there, {list(entry.shape)} here"
        )
    if record.dtype != entry.dtype:
        raise CheckpointError(
            f"{other}: {entry.name} has dtype {record.dtype} there, {entry.dtype} here"
        )


def _read(item: ReadItem, record: TensorRecord, targets: Sequence[LocalChunk]) -> Read:
    source, target = item.storage_index.index, item.dest_index.index
    assert source is not None
    assert target is not None
    return Read(
        source=record.chunks[source],
        source_offsets=tuple(item.storage_offsets),
        target=targets[target],
        target_offsets=tuple(item.dest_offsets),
        sizes=tuple(item.lengths),
    )


def _chunk_metadata(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
