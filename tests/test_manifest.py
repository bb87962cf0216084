"""The half of checkpoints that needs no torch: manifest, names, boxes, step folders."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_parallel.checkpoint.boxes import cover_problem
from mcp_parallel.checkpoint.format import (
    CheckpointError,
    checksum,
    encode_header,
    is_safe_name,
    read_header,
)
from mcp_parallel.checkpoint.manifest import FILE_NAME, FileRecord, Manifest, parse_step_name
from mcp_parallel.checkpoint.steps import (
    commit_dir,
    find_latest,
    prune,
    staging_dir,
    step_name,
    verify,
)

SHARD = "shard_00000_of_00001.safetensors"


def document() -> dict:
    """A valid manifest of a [2, 3] uint8 tensor in two slices."""
    chunks = [
        {"file": SHARD, "key": f"w@0-{o}", "offsets": [0, o], "sizes": [2, n]}
        for o, n in ((0, 1), (1, 2))
    ]
    return {
        "format": "mcp-checkpoint",
        "version": 1,
        "step": 5,
        "fingerprint": "tiny",
        "checksum": "crc32",
        "layout": {"dp": 1},
        "extra": {"sample": 80},
        "files": {SHARD: {"bytes": 6, "crc32": "00000000"}},
        "tensors": {"w": {"dtype": "U8", "shape": [2, 3], "chunks": chunks}},
    }


def write_document(path: Path, table: object) -> Path:
    """``table`` as a manifest whose own checksum is right, in a new folder ``path``."""
    path.mkdir(parents=True, exist_ok=True)
    body = json.dumps(table).encode()[1:] + b"\n"
    (path / FILE_NAME).write_bytes(b'{"self_crc32":"%s",\n' % checksum(body).encode() + body)
    return path


def make_step(folder: Path, step: int, data: bytes = b"abcdef") -> Path:
    """A whole, valid step folder, written without torch."""
    path = folder / step_name(step)
    table = document()
    shard = encode_header({"w@0-0": ("U8", (2, 1)), "w@0-1": ("U8", (2, 2))}) + data
    table |= {"step": step, "files": {SHARD: {"bytes": len(shard), "crc32": checksum(shard)}}}
    write_document(path, table)
    (path / SHARD).write_bytes(shard)
    return path


def change(table: dict, keys: tuple, value: object) -> dict:
    """``table`` with ``table[k0][k1]... = value``."""
    *first, last = keys
    target = table
    for key in first:
        target = target[key]
    target[last] = value
    return table


def test_needs_no_torch():
    blocked = "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
    code = blocked + "from mcp_parallel.checkpoint import find_latest, prune, verify, Manifest"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_read_gives_back_what_was_encoded(tmp_path):
    first = Manifest.read(write_document(tmp_path / "step_00000005", document()))
    assert first.step == 5
    assert first.fingerprint == "tiny"
    assert first.extra == {"sample": 80}
    assert first.files[SHARD] == FileRecord(size_bytes=6, checksum="00000000")
    assert first.tensors["w"].shape == (2, 3)
    again = tmp_path / "again"
    again.mkdir()
    (again / FILE_NAME).write_bytes(first.encode())
    assert Manifest.read(again) == first


BAD_VALUES = [
    (("format",), "other", "format must be"),
    (("version",), 2, "version must be 1, got 2"),
    (("version",), True, "version must be"),
    (("step",), -1, "step must be a count"),
    (("step",), 5.0, "step must be a count"),
    (("step",), True, "step must be a count"),
    (("fingerprint",), None, "fingerprint must be"),
    (("checksum",), "md5", "checksum must be"),
    (("layout",), [], "layout must be a JSON object"),
    (("extra",), "x", "extra must be a JSON object"),
    (("files",), [], "files must be a JSON object"),
    (("tensors",), None, "tensors must be a JSON object"),
    (("surprise",), 1, "unknown keys"),
    (("files", SHARD, "bytes"), -1, "bad record of file"),
    (("files", SHARD, "bytes"), 1 << 70, "bad record of file"),
    (("files", SHARD, "crc32"), "0000000G", "bad record of file"),
    (("files", "../x.safetensors"), {"bytes": 6, "crc32": "00000000"}, "file name"),
    (("files", "/etc/passwd"), {"bytes": 6, "crc32": "00000000"}, "file name"),
    (("files", "a..b"), {"bytes": 6, "crc32": "00000000"}, "file name"),
    (("files", "x\x00y"), {"bytes": 6, "crc32": "00000000"}, "file name"),
    (("files", "x" * 600), {"bytes": 6, "crc32": "00000000"}, "file name"),
    (("files", FILE_NAME), {"bytes": 6, "crc32": "00000000"}, "file name"),
    (("tensors", "../w"), {"dtype": "U8", "shape": [0], "chunks": []}, "tensor name"),
    (("tensors", "w", "dtype"), "F8", "unknown dtype"),
    (("tensors", "w", "dtype"), ["U8"], "unknown dtype"),
    (("tensors", "w", "shape"), [2, -3], "bad shape"),
    (("tensors", "w", "shape"), [2.0, 3], "bad shape"),
    (("tensors", "w", "shape"), [1 << 40, 1 << 40], "bad shape"),
    (("tensors", "w", "shape"), [1] * 17, "bad shape"),
    (("tensors", "w", "shape"), [2, 4], "hold 6 of 8"),
    (("tensors", "w", "shape"), [3, 2], "sticks out"),
    (("tensors", "w", "shape"), [6], "bad chunk"),
    (("tensors", "w", "chunks"), {}, "bad record of tensor"),
    (("tensors", "w", "chunks"), [], "hold 0 of 6"),
    (("tensors", "w", "chunks", 1), 7, "bad chunk"),
    (("tensors", "w", "chunks", 1, "file"), "elsewhere", "bad chunk"),
    (("tensors", "w", "chunks", 1, "file"), [SHARD], "bad chunk"),
    (("tensors", "w", "chunks", 1, "key"), "v@0-1", "bad chunk"),
    (("tensors", "w", "chunks", 1, "sizes"), [2, 1], "hold 4 of 6"),
    (("tensors", "w", "chunks", 1, "sizes"), [2, -1], "bad chunk"),
    (("tensors", "w", "chunks", 1, "sizes"), [3, 2], "sticks out"),
    (("tensors", "w", "chunks", 0, "sizes"), [2, 2], "overlap"),
    (("tensors", "w", "chunks", 1, "offsets"), [0, True], "bad chunk"),
]


@pytest.mark.parametrize(("keys", "value", "message"), BAD_VALUES)
def test_read_refuses_a_bad_value(tmp_path, keys, value, message):
    path = write_document(tmp_path / "step_00000005", change(document(), keys, value))
    with pytest.raises(CheckpointError, match=message) as caught:
        Manifest.read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("key", sorted(document()))
def test_read_refuses_a_missing_key(tmp_path, key):
    table = document()
    del table[key]
    with pytest.raises(CheckpointError, match=key):
        Manifest.read(write_document(tmp_path / "step_00000005", table))


def raw_bodies() -> list[bytes]:
    deep = b'"extra":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    good = json.dumps(document()).encode()[1:]
    return [
        deep,
        good[:-1],  # cut short, with a checksum that agrees
        good.replace(b"80", b"NaN"),
        good.replace(b"80", b"9" * 5000),
        good.replace(b'"step"', b'"step": 5, "step"'),
        good.replace(b"tiny", b"\xff\xfe"),
        b'"format":',
    ]


@pytest.mark.parametrize("body", raw_bodies(), ids=lambda body: repr(body[:12]))
def test_read_refuses_what_is_no_json(tmp_path, body):
    path = tmp_path / "step_00000005"
    path.mkdir()
    (path / FILE_NAME).write_bytes(b'{"self_crc32":"%s",\n' % checksum(body).encode() + body)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        Manifest.read(path)


def test_read_refuses_symlinks_and_strange_files(tmp_path):
    good = make_step(tmp_path, 5)
    (tmp_path / "elsewhere").symlink_to(good)
    with pytest.raises(CheckpointError, match="symlink"):
        Manifest.read(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="found none"):
        Manifest.read(tmp_path / "nowhere")
    manifest = good / FILE_NAME
    manifest.rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match="is missing"):
        Manifest.read(good)
    manifest.symlink_to(tmp_path / "away")
    with pytest.raises(CheckpointError, match="symlink"):
        Manifest.read(good)
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.raises(CheckpointError, match="regular file"):
        Manifest.read(good)


def test_verify_refuses_a_symlinked_shard_and_a_moved_step(tmp_path):
    good = make_step(tmp_path, 5)
    assert verify(good).step == 5
    moved = good.rename(tmp_path / step_name(6))
    with pytest.raises(CheckpointError, match="of step 5"):
        verify(moved)
    moved.rename(good)
    (good / SHARD).rename(tmp_path / "away")
    (good / SHARD).symlink_to(tmp_path / "away")
    with pytest.raises(CheckpointError, match=f"{SHARD} must be a regular file, got a symlink"):
        verify(good)


def test_names():
    good = ["w", "model.layers.0.q_proj.weight", "A-1", "x" * 512, ".hidden"]
    bad = ["", ".", "..", "a/b", "a\\b", "a b", "a..b", "w@0", "\n", "w\n", "é", "x" * 513, None, 7]
    assert all(map(is_safe_name, good))
    assert not any(map(is_safe_name, bad))
    assert [parse_step_name(n) for n in ("step_00000012", "step_123456789")] == [12, 123456789]
    for name in ("step_12", "step_00000012.tmp-ab", "step_0000000x", "step_000000012", "ste"):
        assert parse_step_name(name) is None


HEADER = {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": 1},
        {"a": HEADER["a"] | {"dtype": "U9"}},
        {"a": HEADER["a"] | {"shape": [5]}},
        {"a": HEADER["a"] | {"shape": [-4]}},
        {"a": HEADER["a"] | {"shape": [True, 4]}},
        {"a": HEADER["a"] | {"data_offsets": [-4, 0]}},
        {"a": HEADER["a"] | {"data_offsets": [4, 8]}},
        {"a": HEADER["a"] | {"data_offsets": [0, 4, 4]}},
        {"a": HEADER["a"] | {"more": 1}},
        HEADER | {"b": HEADER["a"]},
        {"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}},
    ],
    ids=str,
)
def test_header_must_describe_the_file(tmp_path, header):
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"data")
    with path.open("rb") as file, pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_header(file, path.stat().st_size, path.name)


@pytest.mark.parametrize(
    ("length", "file_bytes"),
    [(5, 12), (1 << 20, 12), ((1 << 64) - 1, 12), (100_000_001, 200_000_000), (0, 7)],
)
def test_header_length_is_not_believed(tmp_path, length, file_bytes):
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}{}")
    os.truncate(path, file_bytes)  # a large one is sparse
    with path.open("rb") as file, pytest.raises(CheckpointError, match=f"a header of {length} by"):
        read_header(file, path.stat().st_size, path.name)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_cover_agrees_with_counting(data):
    """Against a count of every element: exactly one box each means that the boxes tile."""
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    cuts = [sorted({0, n, *data.draw(st.sets(st.integers(0, n), max_size=2))}) for n in shape]
    boxes = [
        (tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
        for spans in itertools.product(*(itertools.pairwise(c) for c in cuts))
    ]
    for _ in range(data.draw(st.integers(0, 2))):
        if boxes:  # a box dropped, doubled or moved makes it wrong, mostly
            index = data.draw(st.integers(0, len(boxes) - 1))
            offsets, sizes = boxes[index]
            moved = tuple(max(0, o + data.draw(st.integers(-1, 1))) for o in offsets)
            boxes[index : index + 1] = data.draw(
                st.sampled_from([[], [boxes[index]] * 2, [(moved, sizes)]])
            )
    counts = dict.fromkeys(itertools.product(*map(range, shape)), 0)
    sticks_out = False
    for offsets, sizes in boxes:
        spans = (range(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        for element in itertools.product(*spans):
            sticks_out |= element not in counts
            counts[element] = counts.get(element, 0) + 1
        sticks_out |= any(o + n > e for o, n, e in zip(offsets, sizes, shape, strict=True))
    is_tiled = bool(boxes) and not sticks_out and all(n == 1 for n in counts.values())
    if not boxes and math.prod(shape) == 0:
        is_tiled = False  # an empty tensor is listed by one empty box
    assert (cover_problem(shape, boxes) is None) == is_tiled


def test_find_latest_skips_damage_and_leftovers(tmp_path, caplog):
    assert find_latest(tmp_path / "missing") is None
    assert find_latest(tmp_path) is None
    first, second, third = (make_step(tmp_path, step) for step in (1, 2, 10))
    (tmp_path / "step_00000099.tmp-abcd").mkdir()
    (tmp_path / "step_00000098").symlink_to(first)
    (tmp_path / "step_00000097").write_text("a file")
    assert find_latest(tmp_path) == third
    (third / SHARD).write_bytes((third / SHARD).read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert find_latest(tmp_path) == second
    assert f"{third}: {SHARD} is damaged" in caplog.text
    (second / FILE_NAME).unlink()
    assert find_latest(tmp_path) == first


def test_prune_keeps_the_newest_complete_ones(tmp_path):
    steps = [make_step(tmp_path, step) for step in (1, 2, 3, 4)]
    (steps[3] / FILE_NAME).unlink()  # damaged: does not count, and is newer than what is kept
    assert prune(tmp_path, 2) == [steps[0]]
    assert sorted(p.name for p in tmp_path.iterdir()) == [step_name(s) for s in (2, 3, 4)]
    assert prune(tmp_path, 3) == []
    (steps[2] / SHARD).write_bytes(b"short")
    assert prune(tmp_path, 1) == []  # only step 2 is complete
    make_step(tmp_path, 5)
    assert prune(tmp_path, 1) == [steps[3], steps[2], steps[1]]
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        prune(tmp_path, 0)
    assert prune(tmp_path / "missing", 1) == []


def test_prune_removes_leftovers_of_dead_writers_only(tmp_path):
    dead = tmp_path / "step_00000007.tmp-0123abcd"
    dead.mkdir()
    (dead / SHARD).write_bytes(b"half")
    foreign = tmp_path / "step_00000007.tmp"
    foreign.mkdir()
    with staging_dir(tmp_path / "step_00000008.tmp-4567cdef"):
        assert prune(tmp_path, 1) == [dead]
        assert sorted(tmp_path.iterdir()) == [foreign, tmp_path / "step_00000008.tmp-4567cdef"]
    assert list(tmp_path.iterdir()) == [foreign]


def test_commit_replaces_an_older_folder_and_nothing_else(tmp_path):
    final = make_step(tmp_path, 3, b"older!")
    (tmp_path / "new").mkdir()
    tmp = make_step(tmp_path / "new", 3, b"newer!")
    commit_dir(tmp, final)
    assert (final / SHARD).read_bytes().endswith(b"newer!")
    assert verify(final).step == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", step_name(3)]
    (tmp_path / step_name(4)).symlink_to(final)
    with pytest.raises(CheckpointError, match="must be a folder"):
        commit_dir(final, tmp_path / step_name(4))
