"""Damage, death and full disks: what is wrong is found and named, nothing is loaded in part."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import random
import resource
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from ranks import RankError

from mcp_parallel.checkpoint import CheckpointError, LocalChunk, find_latest, load, prune, save
from mcp_parallel.checkpoint.format import checksum
from mcp_parallel.checkpoint.manifest import FILE_NAME, FileRecord, Manifest
from mcp_parallel.checkpoint.steps import step_name, verify

FACTS = {"fingerprint": "tiny", "layout": {}, "extra": {"sample": 3}}
ROWS = 12


def chunks(step: int, rank: int = 0, world: int = 1) -> list[LocalChunk]:
    """Rows of a float tensor and one more tensor, both told apart by ``step``."""
    rows = ROWS // world
    w = torch.full((rows, 5), float(step))
    n = torch.full((3,), step, dtype=torch.int64)
    return [LocalChunk("w", w, (ROWS, 5), (rank * rows, 0)), LocalChunk("n", n, (3,), (0,))]


def save_on(rank: int, world: int, folder: Path, step: int) -> Path:
    return save(folder, chunks(step, rank, world), step=step, **FACTS)


def assert_refused(path: Path, named: str) -> None:
    """Both ``verify`` and ``load`` refuse, name the file, and no destination changes."""
    with pytest.raises(CheckpointError, match=named):
        verify(path)
    targets = chunks(-1)
    with pytest.raises(CheckpointError, match=named):
        load(path, targets, fingerprint="tiny")
    assert all(bool((t.tensor == -1).all()) for t in targets), "loaded in part"


def assert_holds(path: Path, step: int) -> None:
    targets = chunks(-1)
    assert load(path, targets, fingerprint="tiny").step == step
    assert all(bool((t.tensor == step).all()) for t in targets)


@pytest.fixture
def good(tmp_path, ranks) -> Path:
    """Step 2, written by two ranks; step 1 lies beside it."""
    ranks.run(save_on, tmp_path, 1, ranks=1)
    return ranks.run(save_on, tmp_path, 2, ranks=2)[0]


def test_every_flipped_bit_is_found(good):
    """All bits of the manifest, and of each shard its length, header and data."""
    for path in sorted(good.iterdir()):
        data = path.read_bytes()
        for position in range(len(data)):
            damaged = bytearray(data)
            damaged[position] ^= 1 << position % 8
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=path.name):
                verify(good)
        path.write_bytes(data)
    assert verify(good).step == 2


def test_flipped_bits_are_never_loaded(good, caplog):
    """66 random flips, a third of them in each file."""
    generator = random.Random(0)
    for path in sorted(good.iterdir()):
        data = path.read_bytes()
        for _ in range(22):
            damaged = bytearray(data)
            damaged[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
            path.write_bytes(damaged)
            assert_refused(good, path.name)
            with caplog.at_level(logging.WARNING):
                assert find_latest(good.parent) == good.parent / step_name(1)
            assert path.name in caplog.text
            caplog.clear()
        path.write_bytes(data)
    assert_holds(good, 2)


def test_truncated_and_missing_files_are_found(good):
    for path in sorted(good.iterdir()):
        data = path.read_bytes()
        for length in (0, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:length])
            assert_refused(good, path.name)
            assert find_latest(good.parent) == good.parent / step_name(1)
        path.unlink()
        assert_refused(good, f"{path.name} is missing")
        assert find_latest(good.parent) == good.parent / step_name(1)
        path.write_bytes(data + b"\0")
        assert_refused(good, path.name)
        path.write_bytes(data)
    assert_holds(good, 2)


def test_swapped_shards_and_a_stale_manifest_are_found(good):
    first, second = sorted(good.glob("shard_*"))
    first.rename(good / "x")
    second.rename(first)
    (good / "x").rename(second)
    assert_refused(good, first.name)
    older = good.parent / step_name(1)
    shutil.copy(older / FILE_NAME, good / FILE_NAME)
    assert_refused(good, f"{FILE_NAME} is of step 1")
    assert find_latest(good.parent) == older


def replace_shard(path: Path, data: bytes) -> str:
    """Put ``data`` in place of a shard and make the manifest agree, as an enemy would."""
    manifest = Manifest.read(path)
    shard = sorted(manifest.files)[0]
    (path / shard).write_bytes(data)
    files = {**manifest.files, shard: FileRecord(len(data), checksum(data))}
    forged = Manifest(step=manifest.step, fingerprint="tiny", files=files, tensors=manifest.tensors)
    (path / FILE_NAME).write_bytes(forged.encode())
    return shard


class Payload:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_posing_as_a_shard_is_not_run(good, tmp_path):
    trace = tmp_path / "executed"
    for data in (pickle.dumps(Payload(trace)), pickle.dumps(Payload(trace), protocol=0)):
        assert_refused(good, replace_shard(good, data))
        torch.save(Payload(trace), tmp_path / "x.pt")
        assert_refused(good, replace_shard(good, (tmp_path / "x.pt").read_bytes()))
        assert not trace.exists()
    pickle.loads(pickle.dumps(Payload(trace)))
    assert trace.exists(), "the payload does nothing, the test proves nothing"


def test_a_header_of_huge_length_is_refused(good):
    for length in (1 << 62, (1 << 64) - 1, 100_000_001, 17):
        data = length.to_bytes(8, "little") + b"{}" + b" " * 14
        assert_refused(good, replace_shard(good, data))


def test_a_sound_shard_of_other_tensors_is_refused(good):
    shards = sorted(good.glob("shard_*"))
    name = replace_shard(good, shards[1].read_bytes())
    assert_refused(good, f"{name} does not hold what the manifest says")


SYSTEM_CALLS = ("mkdir", "open", "write", "fsync", "rename")


@contextmanager
def interrupted(call_number: int, action):
    """Run ``action`` in place of the ``call_number``-th system call that changes or opens files.

    Every other ``write`` writes only a part of what it is given, as the system may.
    """
    real = {name: getattr(os, name) for name in SYSTEM_CALLS}
    counter = [0]

    def wrap(name):
        def call(*args, **kwargs):
            counter[0] += 1
            if counter[0] == call_number:
                action()
            if name == "write" and counter[0] % 2:
                args = (args[0], args[1][: max(1, len(args[1]) // 2)])
            return real[name](*args, **kwargs)

        return call

    for name in SYSTEM_CALLS:
        setattr(os, name, wrap(name))
    try:
        yield counter
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def count_calls(folder: Path) -> int:
    with interrupted(0, None) as counter:
        save_on(0, 1, folder, 2)
    shutil.rmtree(folder / step_name(2))
    return counter[0]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_at_any_moment_the_older_step_stays(tmp_path):
    """A forked writer is killed before each of its system calls in turn."""
    save_on(0, 1, tmp_path, 1)
    total = count_calls(tmp_path)
    found = []
    for call_number in range(1, total + 1):
        pid = os.fork()
        if pid == 0:
            with interrupted(call_number, die):
                save_on(0, 1, tmp_path, 2)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        latest = find_latest(tmp_path)
        assert latest is not None
        found.append(int(latest.name[-1]))
        assert_holds(latest, found[-1])
        prune(tmp_path, 2)  # clears what the dead one left
        kept = {step_name(1), step_name(2)} if found[-1] == 2 else {step_name(1)}
        assert {p.name for p in tmp_path.iterdir()} == kept
        shutil.rmtree(tmp_path / step_name(2), ignore_errors=True)
    assert total >= 12
    # The rename is what makes the new step count: only the sync of the parent comes after it.
    assert found == [1] * (total - 2) + [2, 2]


def test_data_is_on_disk_before_the_name_is(tmp_path, monkeypatch):
    """Files are synced, then their folder, then it is renamed, then the parent is synced."""
    synced, real_fsync, real_rename = [], os.fsync, os.rename

    def fsync(fd):
        real_fsync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        assert path.stat().st_size, "synced before it was written"
        synced.append(path.name if path.is_file() else path.name.partition("tmp-")[0])

    def rename(source, target):
        real_rename(source, target)
        synced.append("renamed")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save_on(0, 1, tmp_path, 2)
    shard = "shard_00000_of_00001.safetensors"
    assert synced == [shard, FILE_NAME, "step_00000002.", "renamed", tmp_path.name]


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("replacing", [False, True])
def test_a_refusing_system_leaves_what_was_there(tmp_path, replacing):
    """Each system call of a save fails once; ``replacing``: step 2 is there already.

    From the second on: the first makes ``checkpoints/``, which may fail as that is there.
    """
    save_on(0, 1, tmp_path, 1)
    total = count_calls(tmp_path)
    if replacing:
        save(tmp_path, chunks(20), step=2, **FACTS)
        total += 1  # the older folder is moved aside
    names = {p.name for p in tmp_path.iterdir()}
    for call_number in range(2, total + 1):
        with interrupted(call_number, disk_full), pytest.raises(CheckpointError, match=r"^save: "):
            save_on(0, 1, tmp_path, 2)
        assert {p.name for p in tmp_path.iterdir()} == names, call_number
        latest = find_latest(tmp_path)
        assert latest == tmp_path / step_name(2 if replacing else 1)
    assert_holds(tmp_path / step_name(1), 1)
    save_on(0, 1, tmp_path, 2)
    assert_holds(tmp_path / step_name(2), 2)


def save_limited(rank, world, folder, limited_rank, limit_bytes, names):
    """``save`` with one rank's files limited in size, the portable stand-in for a full disk."""
    large = torch.zeros(4000, 1)
    mine = LocalChunk("w", large, (4000 * world, 1), (4000 * rank, 0))
    small = [LocalChunk(f"n{i}", torch.zeros(1), (1,), (0,)) for i in range(names)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == limited_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        with pytest.raises(CheckpointError) as caught:
            save(folder, [mine, *small], step=2, **FACTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return str(caught.value)


@pytest.mark.parametrize(
    ("limited_rank", "limit_bytes", "names"),
    [
        (0, 5000, 1),  # inside of rank 0's shard
        (2, 50, 1),  # inside of rank 2's header
        (0, 30_000, 600),  # shards of 25 kB pass, the manifest of 100 kB does not
    ],
)
def test_a_full_disk_on_one_rank_is_an_error_on_all(
    tmp_path, ranks, limited_rank, limit_bytes, names
):
    ranks.run(save_on, tmp_path, 1, ranks=1)
    messages = ranks.run(save_limited, tmp_path, limited_rank, limit_bytes, names, ranks=4)
    assert len(set(messages)) == 1
    assert os.strerror(errno.EFBIG) in messages[0]
    assert f"(rank {limited_rank} of 4)" in messages[0]
    assert [p.name for p in tmp_path.iterdir()] == [step_name(1)]
    ranks.run(save_on, tmp_path, 2, ranks=4)
    assert_holds(tmp_path / step_name(2), 2)


def save_and_die(rank, world, folder, dying_rank, call_number):
    with interrupted(call_number if rank == dying_rank else 0, die):
        save_on(rank, world, folder, 2)


@pytest.mark.parametrize(("dying_rank", "call_number"), [(1, 1), (0, 6)])
def test_a_rank_killed_while_all_write(tmp_path, ranks, dying_rank, call_number):
    """Rank 1 before its shard, rank 0 with its shard done; the others end by themselves."""
    ranks.run(save_on, tmp_path, 1, ranks=2)
    with pytest.raises(RankError, match="the process died"):
        ranks.run(save_and_die, tmp_path, dying_rank, call_number, ranks=2)
    assert find_latest(tmp_path) == tmp_path / step_name(1)
    prune(tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == [step_name(1)]
    ranks.run(save_on, tmp_path, 2, ranks=2)
    assert_holds(tmp_path / step_name(2), 2)


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    with pytest.raises(CheckpointError, match=r"^save: .*checkpoints"):
        save_on(0, 1, tmp_path / "checkpoints", 2)


def load_damaged(rank, world, path):
    targets = chunks(-1, rank, world)
    with pytest.raises(CheckpointError) as caught:
        load(path, targets, fingerprint="tiny")
    assert all(bool((t.tensor == -1).all()) for t in targets)
    return str(caught.value)


def test_damage_seen_by_one_rank_stops_all(good, ranks):
    """Each shard is verified by one rank only; all of them hear of it."""
    for shard in sorted(good.glob("shard_*")):
        data = shard.read_bytes()
        shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        messages = ranks.run(load_damaged, good, ranks=4)
        assert len(set(messages)) == 1
        assert shard.name in messages[0]
        shard.write_bytes(data)
