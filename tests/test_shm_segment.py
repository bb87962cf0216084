"""Segments of shared memory: two processes see one memory, and nothing stays behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import stat
import uuid
from pathlib import Path

import pytest

_shm = pytest.importorskip("mcp_kernels._shm", reason="the _shm extension was not built")

SHM = Path("/dev/shm")

# Forking with threads around is risky in general; these children touch nothing but the segment.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def name():
    """A name of this test alone; the test fails when the name outlives it."""
    chosen = f"mcp-test-{uuid.uuid4().hex}"
    yield chosen
    gc.collect()
    left = (SHM / chosen).exists()
    (SHM / chosen).unlink(missing_ok=True)
    assert not left


def test_create_reserves_zeroed_memory_of_this_user_alone(name):
    segment = _shm.Segment.create(name, 10_000)
    status = (SHM / name).stat()
    assert (segment.name, segment.nbytes) == (name, 10_000)
    assert status.st_size == 10_000
    assert status.st_blocks * 512 >= 10_000  # really there, not a hole in the file
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert bytes(memoryview(segment)) == bytes(10_000)


def test_the_buffer_is_writable_bytes(name):
    view = memoryview(_shm.Segment.create(name, 16))
    assert (view.format, view.itemsize, view.shape, view.readonly) == ("B", 1, (16,), False)
    view[3] = 200
    assert view[3] == 200


def test_an_open_segment_is_the_same_memory(name):
    created = _shm.Segment.create(name, 64)
    opened = _shm.Segment.open(name, 64)
    memoryview(created)[10] = 7
    memoryview(opened)[11] = 8
    assert bytes(memoryview(opened)[9:12]) == bytes(memoryview(created)[9:12]) == b"\x00\x07\x08"


def _answer(name, pipe):
    segment = _shm.Segment.open(name, 4096)
    view = memoryview(segment)
    pipe.send(_shm.host_id())
    pipe.recv()
    view[:5] = bytes(view[:5])[::-1]
    pipe.send("done")


def test_two_processes_share_it(name):
    segment = _shm.Segment.create(name, 4096)
    memoryview(segment)[:5] = b"hello"
    here, there = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=_answer, args=(name, there))
    child.start()
    assert here.recv() == _shm.host_id()
    segment.unlink()
    assert not (SHM / name).exists()
    here.send("go")  # both mappings outlive the name
    assert here.recv() == "done"
    assert bytes(memoryview(segment)[:5]) == b"olleh"
    child.join(30)
    assert child.exitcode == 0


def test_a_forked_child_does_not_take_the_name_away(name):
    segment = _shm.Segment.create(name, 64)

    def drop():
        nonlocal segment
        del segment
        gc.collect()

    child = multiprocessing.get_context("fork").Process(target=drop)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert (SHM / name).exists()
    del segment


def test_the_name_goes_with_the_creator_but_not_with_a_guest(name):
    created = _shm.Segment.create(name, 64)
    opened = _shm.Segment.open(name, 64)
    del opened
    gc.collect()
    assert (SHM / name).exists()
    del created
    gc.collect()
    assert not (SHM / name).exists()


def test_memory_lives_as_long_as_a_view_of_it(name):
    view = memoryview(_shm.Segment.create(name, 64))
    gc.collect()
    view[0] = 5
    assert view[0] == 5


def test_unlink_twice_and_after_another_took_the_name(name):
    first = _shm.Segment.create(name, 64)
    first.unlink()
    first.unlink()
    second = _shm.Segment.create(name, 64)
    first.unlink()
    assert (SHM / name).exists(), "the second segment's name is not the first one's to remove"
    second.unlink()


def test_more_than_dev_shm_holds_is_an_error_now(name):
    file_system = os.statvfs(SHM)
    too_much = (file_system.f_blocks + 1) * file_system.f_frsize
    with pytest.raises(OSError, match=f"{name}: cannot reserve {too_much} bytes in /dev/shm"):
        _shm.Segment.create(name, too_much)
    assert not (SHM / name).exists()


def test_an_existing_name_is_not_taken_over(name):
    segment = _shm.Segment.create(name, 64)
    memoryview(segment)[0] = 9
    with pytest.raises(FileExistsError, match=f"Segment {name}: cannot create it"):
        _shm.Segment.create(name, 64)
    assert memoryview(segment)[0] == 9
    assert (SHM / name).exists()


def test_a_missing_name_and_a_wrong_size(name):
    with pytest.raises(FileNotFoundError, match=f"Segment {name}: cannot open it"):
        _shm.Segment.open(name, 64)
    segment = _shm.Segment.create(name, 64)
    with pytest.raises(ValueError, match="bytes must be its size, 64, got 65"):
        _shm.Segment.open(name, 65)
    assert segment.nbytes == 64


def test_a_link_is_not_followed(name, tmp_path):
    target = tmp_path / "target"
    target.write_bytes(bytes(64))
    (SHM / name).symlink_to(target)
    try:
        with pytest.raises(OSError, match="cannot open it"):
            _shm.Segment.open(name, 64)
    finally:
        (SHM / name).unlink()


@pytest.mark.parametrize("wrong", ["", "a/b", "..", ".hidden", "x" * 201])
def test_names_that_could_leave_the_folder(wrong):
    with pytest.raises(ValueError, match="Segment: name must be 1 to 200 characters"):
        _shm.Segment.create(wrong, 64)


@pytest.mark.parametrize("wrong", [0, -1])
def test_sizes_that_are_none(name, wrong):
    with pytest.raises(ValueError, match=f"Segment: bytes must be >= 1, got {wrong}"):
        _shm.Segment.create(name, wrong)


def test_host_id_names_boot_file_system_and_namespace():
    boot, device, namespace = _shm.host_id().split("/")
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert device == str(os.stat(SHM).st_dev)
    assert namespace == os.readlink("/proc/self/ns/ipc")
