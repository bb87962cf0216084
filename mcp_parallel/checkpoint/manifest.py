"""What a checkpoint holds and how to tell that it is whole: ``manifest.json``. No torch.

The file is one JSON object. Its first line carries the checksum of all that follows, so damage to
the manifest itself is found before a word of it is believed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcp_parallel.checkpoint.boxes import cover_problem
from mcp_parallel.checkpoint.format import (
    CHECKSUM,
    DTYPE_BYTES,
    CheckpointError,
    checksum,
    dump_json,
    is_count,
    is_safe_name,
    is_sizes,
    open_regular,
    parse_json,
)

FILE_NAME = "manifest.json"
FORMAT = "mcp-checkpoint"
VERSION = 1

# 1024 ranks, 3000 tensors in 1024 pieces each would be about this much; more is no manifest.
MAX_BYTES = 1 << 28

_SELF_CHECK = re.compile(rb'\{"self_crc32":"([0-9a-f]{8})",\n')
_STEP_NAME = re.compile(r"step_([0-9]{8,})")
_TOP_KEYS = ("format", "version", "step", "fingerprint", "checksum", "layout", "extra")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A shard as it was written: its length in bytes and its checksum in hex."""

    size_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A box of a tensor and the shard that holds it under ``key``."""

    file: str
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A whole tensor: safetensors dtype name, global shape and the boxes that make it up."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[ChunkRecord, ...]


def step_name(step: int) -> str:
    """The folder name of ``step``, as ``step_00000123``."""
    return f"step_{step:08d}"


def parse_step_name(name: str) -> int | None:
    """The step that a folder name stands for; None when it is no step folder's name."""
    match = _STEP_NAME.fullmatch(name)
    if match is None or step_name(int(match[1])) != name:
        return None
    return int(match[1])


def chunk_key(name: str, offsets: tuple[int, ...], is_whole: bool) -> str:
    """The safetensors key of a box: the tensor's own name when the box is all of it."""
    return name if is_whole else f"{name}@{'-'.join(map(str, offsets))}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The contents of ``manifest.json``; ``read`` is the only way in from disk.

    Attributes:
        step: optimizer steps done.
        fingerprint: the model that this is a state of; ``load`` compares it.
        layout: the parallel layout that it was written with, for people; ``load`` takes any.
        extra: JSON of the caller's: data position, seeds, versions.
        files: shard name -> length and checksum.
        tensors: tensor name -> dtype, shape, boxes.
    """

    step: int
    fingerprint: str
    layout: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """The manifest of step folder ``path``, checked in full; no shard is opened.

        Raises:
            CheckpointError: the folder or the manifest is missing, is a symlink, is damaged, is
                of an unknown version, names files outside of the folder, or describes tensors
                whose chunks leave a gap, overlap or stick out.
        """
        if path.is_symlink():
            raise CheckpointError(f"checkpoint {path} must be a folder, got a symlink")
        where = f"checkpoint {path}: {FILE_NAME}"
        document = _parse(_read_bytes(path, where), where)
        manifest = cls._from_document(document, where)
        named_step = parse_step_name(path.name)
        if named_step is not None and named_step != manifest.step:
            raise CheckpointError(
                f"{where} is of step {manifest.step}, not of this folder: it was moved or is stale"
            )
        return manifest

    def encode(self) -> bytes:
        """The bytes of ``manifest.json``.

        Raises:
            ValueError: ``layout`` or ``extra`` is not JSON.
        """
        document = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "fingerprint": self.fingerprint,
            "checksum": CHECKSUM,
            "layout": dict(self.layout),
            "extra": dict(self.extra),
            "files": {
                n: {"bytes": f.size_bytes, "crc32": f.checksum} for n, f in self.files.items()
            },
            "tensors": {name: _tensor_document(t) for name, t in self.tensors.items()},
        }
        body = dump_json(document)[1:] + b"\n"
        return b'{"self_crc32":"%s",\n' % checksum(body).encode() + body

    def checksum(self) -> str:
        """Short word for the whole checkpoint: the same wherever contents are the same."""
        return checksum(self.encode())

    def contents(self) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
        """What every shard must hold: ``{file: {key: (dtype, shape)}}``."""
        table: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {f: {} for f in self.files}
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                table[chunk.file][chunk.key] = (tensor.dtype, chunk.sizes)
        return table

    @classmethod
    def _from_document(cls, document: dict[str, Any], where: str) -> Manifest:
        _check_top(document, where)
        files = _check_files(document["files"], where)
        tensors = {
            name: _check_tensor(name, value, files, where)
            for name, value in _object(document["tensors"], "tensors", where).items()
        }
        keys = [(c.file, c.key) for t in tensors.values() for c in t.chunks]
        if len(set(keys)) != len(keys):
            raise CheckpointError(f"{where} is damaged: two chunks share a shard's key")
        return cls(
            step=document["step"],
            fingerprint=document["fingerprint"],
            layout=_object(document["layout"], "layout", where),
            extra=_object(document["extra"], "extra", where),
            files=files,
            tensors=tensors,
        )


def _read_bytes(path: Path, where: str) -> bytes:
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} must be a folder, found none there")
    with open_regular(path / FILE_NAME, where) as file:
        parts, total = [], 0
        while part := file.read(1 << 20):
            parts.append(part)
            total += len(part)
            if total > MAX_BYTES:
                raise CheckpointError(f"{where} must be at most {MAX_BYTES} bytes")
    return b"".join(parts)


def _parse(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in ``data`` once its own checksum agrees."""
    match = _SELF_CHECK.match(data)
    if match is None:
        raise CheckpointError(f"{where} is damaged: it does not begin with its own checksum")
    found, said = checksum(memoryview(data)[match.end() :]), match[1].decode()
    if found != said:
        raise CheckpointError(f"{where} is damaged: {CHECKSUM} {found}, its first line says {said}")
    document = parse_json(data, where)
    document.pop("self_crc32")
    return document


def _check_top(document: dict[str, Any], where: str) -> None:
    if document.get("format") != FORMAT:
        raise CheckpointError(f"{where}: format must be {FORMAT}, got {document.get('format')!r}")
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"{where}: version must be {VERSION}, got {version!r}; load it with the release that "
            "wrote it"
        )
    if set(document) != {*_TOP_KEYS, "files", "tensors"}:
        odd = sorted(set(document) ^ {*_TOP_KEYS, "files", "tensors"})
        raise CheckpointError(f"{where}: missing or unknown keys {odd}")
    if not is_count(document["step"]):
        raise CheckpointError(f"{where}: step must be a count, got {document['step']!r}")
    if not isinstance(document["fingerprint"], str):
        raise CheckpointError(f"{where}: fingerprint must be a string")
    if document["checksum"] != CHECKSUM:
        raise CheckpointError(f"{where}: checksum must be {CHECKSUM}, got {document['checksum']!r}")


def _check_files(value: Any, where: str) -> dict[str, FileRecord]:
    files = {}
    for name, record in _object(value, "files", where).items():
        if not is_safe_name(name) or name == FILE_NAME:
            raise CheckpointError(
                f"{where}: a file name must match [A-Za-z0-9._-]+ without '..', got {name!r}"
            )
        if (
            not isinstance(record, dict)
            or set(record) != {"bytes", "crc32"}
            or not is_count(record["bytes"])
            or not isinstance(record["crc32"], str)
            or not re.fullmatch(r"[0-9a-f]{8}", record["crc32"])
        ):
            raise CheckpointError(f"{where}: bad record of file {name!r}")
        files[name] = FileRecord(size_bytes=record["bytes"], checksum=record["crc32"])
    return files


def _check_tensor(
    name: str, value: Any, files: Mapping[str, FileRecord], where: str
) -> TensorRecord:
    if not is_safe_name(name):
        raise CheckpointError(
            f"{where}: a tensor name must match [A-Za-z0-9._-]+ without '..', got {name!r}"
        )
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "chunks"}:
        raise CheckpointError(f"{where}: bad record of tensor {name!r}")
    dtype, shape, chunks = value["dtype"], value["shape"], value["chunks"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{where}: tensor {name!r} has an unknown dtype {dtype!r}")
    # Above 2^56 bytes an offset could pass 2^62 and a plan could overflow.
    if not is_sizes(shape) or math.prod(shape) * DTYPE_BYTES[dtype] > 1 << 56:
        raise CheckpointError(f"{where}: tensor {name!r} has a bad shape {shape!r}")
    if not isinstance(chunks, list):
        raise CheckpointError(f"{where}: bad record of tensor {name!r}")
    shape = tuple(shape)
    records = tuple(_check_chunk(name, chunk, shape, files, where) for chunk in chunks)
    problem = cover_problem(shape, [(c.offsets, c.sizes) for c in records])
    if problem is not None:
        raise CheckpointError(f"{where}: tensor {name!r}: {problem}")
    return TensorRecord(dtype=dtype, shape=shape, chunks=records)


def _check_chunk(
    name: str, value: Any, shape: tuple[int, ...], files: Mapping[str, FileRecord], where: str
) -> ChunkRecord:
    wrong = CheckpointError(f"{where}: bad chunk of tensor {name!r}: {str(value)[:200]}")
    if not isinstance(value, dict) or set(value) != {"file", "key", "offsets", "sizes"}:
        raise wrong
    if not is_sizes(value["offsets"]) or not is_sizes(value["sizes"]):
        raise wrong
    offsets, sizes = tuple(value["offsets"]), tuple(value["sizes"])
    if len(offsets) != len(shape) or len(sizes) != len(shape):
        raise wrong
    if value["key"] != chunk_key(name, offsets, sizes == shape):
        raise wrong
    if not isinstance(value["file"], str) or value["file"] not in files:
        raise wrong
    return ChunkRecord(file=value["file"], key=value["key"], offsets=offsets, sizes=sizes)


def _tensor_document(tensor: TensorRecord) -> dict[str, Any]:
    return {
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "chunks": [
            {"file": c.file, "key": c.key, "offsets": list(c.offsets), "sizes": list(c.sizes)}
            for c in tensor.chunks
        ],
    }


def _object(value: Any, what: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {what} must be a JSON object")
    return value
