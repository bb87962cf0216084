"""TensorBoard's event files, written without TensorBoard.

A file is a row of records (TFRecord): length, uint64; its checksum; the bytes; their checksum, all
little-endian. A checksum is CRC-32C, rotated and offset by a constant. The bytes are an ``Event``
of TensorBoard's event.proto, which takes any number of values of one step: a scalar is a tag and a
float. Sources: tensorflow/core/example/tfrecord.h (format), event.proto, summary.proto and
tensor.proto of TensorBoard (numbers of the fields).

TensorBoard's own writer makes an event of each scalar and computes checksums byte by byte in
Python, on a thread that the training step waits for: a millisecond a step. No torch.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import struct
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np

# CRC-32C (Castagnoli), bits reversed.
_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
# Bytes of a message that are taken together: the table of their places is 256 KB.
_CHUNK = 256
# Points wait so long for others: what takes 20 us in a loop takes ten times as long alone in a
# step, after all that the step has driven out of a core's caches.
FLUSH_S = 5.0

_LARGEST_FLOAT = 3.4028234663852886e38

# Wire types of protobuf.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_DT_STRING = 7
_SESSION_START = 1

_count = itertools.count()


class EventWriter:
    """Appends to an event file of its own; what was added is on disk ``FLUSH_S`` later, or closed.

    Args:
        folder: where the file goes; made when it is not there.
        first_step: what other files of the folder say of this step and later ones is void.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Readers take the files of a folder in the order of their names.
        seconds, rest = divmod(time.time_ns() // 1000, 10**6)
        name = f"events.out.tfevents.{seconds:010d}.{rest:06d}"
        name = f"{name}.{socket.gethostname()}.{os.getpid()}.{next(_count)}"
        self._file = (folder / name).open("xb")
        self._heads: dict[str, bytes] = {}
        self._waiting: list[tuple[float, int, Iterable[tuple[str, float]]]] = []
        now_s = time.time()
        self._append(_event(now_s, first_step, _message(3, b"brain.Event:2")))
        self._append(_event(now_s, first_step, _message(7, _number(1, _SESSION_START))))
        self._file.flush()
        self._flushed_s = now_s

    def scalars(self, step: int, values: Iterable[tuple[str, float]]) -> None:
        """Points of curves.

        Args:
            step: of all of them.
            values: tag and number of each, read once and later; beyond float32 it is infinite.
        """
        now_s = time.time()
        self._waiting.append((now_s, step, values))
        # A clock that was set back waits for nothing.
        if not 0 <= now_s - self._flushed_s < FLUSH_S:
            self.flush()

    def text(self, step: int, tag: str, text: str) -> None:
        """A text, as the Text tab shows it; on disk at once."""
        self._write_waiting()
        plugin = _message(9, _message(1, _message(1, b"text")))
        shape = _message(2, _message(2, _number(1, 1)))
        tensor = _message(8, _number(1, _DT_STRING) + shape + _message(8, text.encode()))
        value = _message(1, _message(1, f"{tag}/text_summary".encode()) + plugin + tensor)
        self._append(_event(time.time(), step, _message(5, value)))
        self.flush()

    def flush(self) -> None:
        """Hand everything to the system."""
        self._write_waiting()
        self._file.flush()
        self._flushed_s = time.time()

    def close(self) -> None:
        """Write what is left."""
        self.flush()
        self._file.close()

    def _write_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for wall_s, step, values in waiting:
            parts = [part for tag, value in values for part in (self._head(tag), _float(value))]
            self._append(_event(wall_s, step, _message(5, b"".join(parts))))

    def _head(self, tag: str) -> bytes:
        """A value's bytes up to its number, which is of one length."""
        found = self._heads.get(tag)
        if found is None:
            named = _message(1, tag.encode()) + bytes([2 << 3 | _FIXED32])
            found = bytes([1 << 3 | _BYTES]) + _varint(len(named) + 4) + named
            self._heads[tag] = found
        return found

    def _append(self, data: bytes) -> None:
        self._file.write(_header(len(data)) + data + _checksum(data))


def _event(wall_s: float, step: int, what: bytes) -> bytes:
    head = struct.pack("<Bd", 1 << 3 | _FIXED64, wall_s)
    return head + _number(2, step) + what


def _message(field: int, data: bytes) -> bytes:
    """A field that is a message, a string or bytes."""
    return bytes([field << 3 | _BYTES]) + _varint(len(data)) + data


def _number(field: int, value: int) -> bytes:
    return bytes([field << 3 | _VARINT]) + _varint(value)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the top bit says that more follow."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _float(value: float) -> bytes:
    if abs(value) > _LARGEST_FLOAT:
        value = math.copysign(math.inf, value)
    return struct.pack("<f", value)


@lru_cache(maxsize=64)
def _header(length: int) -> bytes:
    """A record's length and its checksum; those of steps are of a few lengths."""
    packed = struct.pack("<Q", length)
    return packed + _checksum(packed)


def _checksum(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """CRC-32C of four bytes or more.

    A CRC is linear: that of a message is the exclusive or of those of its bytes, each followed by
    as many zero bytes as there are behind it, which a table has for each place and value. The
    register's start, all ones, is the same as the first four bytes inverted; zero bytes before them
    leave an empty register empty.

    Cost: ten microseconds and 5 a kilobyte.
    """
    table, ahead = _tables()
    padded = np.zeros(-(-len(data) // _CHUNK) * _CHUNK, dtype=np.uint8)
    start = len(padded) - len(data)
    padded[start:] = np.frombuffer(data, dtype=np.uint8)
    padded[start : start + 4] ^= 0xFF
    chunks = table.take(padded.reshape(-1, _CHUNK) + _PLACES)
    register = 0
    for chunk in np.bitwise_xor.reduce(chunks, axis=1).tolist():
        register = chunk ^ (
            ahead[0][register & 0xFF]
            ^ ahead[1][register >> 8 & 0xFF]
            ^ ahead[2][register >> 16 & 0xFF]
            ^ ahead[3][register >> 24]
        )
    return register ^ 0xFFFFFFFF


_PLACES = np.arange(_CHUNK) * 256


@lru_cache(maxsize=1)
def _tables() -> tuple[np.ndarray, list[list[int]]]:
    """CRC of each byte at each place of a chunk ``[_CHUNK * 256]``; those of its first four places.

    What is in the register moves past a chunk as if it stood in the chunk's first four bytes.
    """
    last = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        last = np.where(last & 1, last >> 1 ^ _POLYNOMIAL, last >> 1).astype(np.uint32)
    places: list[np.ndarray] = [last]
    while len(places) < _CHUNK:
        places.append(last[places[-1] & 0xFF] ^ places[-1] >> 8)
    table = np.stack(places[::-1])
    return table.reshape(-1), table[:4].tolist()
