"""Sources cut into pieces that are read on their own, and the texts in each.

Where a piece begins is a function of the file alone: however many processes read them, the texts
and hence the tokens are the same. JSONL is cut at lines and Parquet at row groups. A text file is
one document; a long one is cut at a newline between two visible characters, where byte-level
tokenizers end a token anyway, so its tokens are those of the whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from mcp_parallel.data import storage
from mcp_parallel.data.files import SNIFFED_BYTES, looks_like_text
from mcp_parallel.data.prepare.index import read_exactly
from mcp_parallel.data.prepare.sources import Shard, SourceError
from mcp_parallel.errors import joined, shown

_BETWEEN_LINES = re.compile(rb"(?<=[!-~])\n(?=[!-~])")
_NEVER_INSIDE = re.compile(rb"[^\x80-\xbf]")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# What files that are often taken for text begin with, and what makes text of them.
_OTHER_FORMATS = (
    (b"\x1f\x8b", "gzip", "unpack it (gunzip)"),
    (b"BZh", "bzip2", "unpack it (bunzip2)"),
    (b"\x28\xb5\x2f\xfd", "zstd", "unpack it (unzstd)"),
    (b"\xfd7zXZ\0", "xz", "unpack it (unxz)"),
    (b"PK\x03\x04", "zip", "unpack it (unzip)"),
    (b"PAR1", "Parquet", "name it .parquet"),
    (b"\xff\xfe", "UTF-16", "convert it (iconv -f UTF-16 -t UTF-8)"),
    (b"\xfe\xff", "UTF-16", "convert it (iconv -f UTF-16 -t UTF-8)"),
)


class Cut(NamedTuple):
    """How long the pieces are."""

    segment_bytes: int = 1 << 20
    """Of a text, given to the tokenizer at once: its records take a hundred times as much."""
    segments: int = 32
    """In a piece, which is a few seconds of work: little is lost with a process, and 1 TB of files
    has 30,000."""


DEFAULT_CUT = Cut()


class Piece(NamedTuple):
    """A part of a shard."""

    start: int
    """In bytes; of Parquet the row group."""
    stop: int
    size: int
    """Bytes to read, for the progress bar."""
    first_row: int = 0
    """Of Parquet, in the file."""


class Text(NamedTuple):
    """What is tokenised at once."""

    text: str
    is_end: bool
    """The document ends here."""


def pieces_of(shard: Shard, cut: Cut) -> list[Piece]:
    """The pieces of a file, in order; at least one.

    Args:
        shard: the file.
        cut: how long they are; row groups are what they are.

    Raises:
        SourceError: the file is empty, no text, or no Parquet.
        StorageError: a URL that cannot be reached.
        OSError: the file cannot be read.
    """
    if shard.size == 0:
        raise SourceError(f"data: {shard.name!a} must hold some text, got an empty file")
    if shard.kind == "parquet":
        from mcp_parallel.data.prepare.parquet import row_groups

        return [Piece(number, number + 1, size, row) for number, size, row in row_groups(shard)]
    with storage.opened(shard.path) as file:
        _refuse_other_format(shard, file.read(SNIFFED_BYTES))
    step = cut.segments * cut.segment_bytes
    starts = range(0, shard.size, step)
    ends = [*starts[1:], shard.size]
    return [Piece(a, b, b - a) for a, b in zip(starts, ends, strict=True)]


def _refuse_other_format(shard: Shard, start: bytes) -> None:
    for magic, name, way in _OTHER_FORMATS:
        # A text may begin with the letters of a format, but then holds no bytes beyond ASCII.
        if start.startswith(magic) and not start.isascii():
            raise SourceError(f"data: {shard.name!a} must be text, got {name}; {way}")
    if not looks_like_text(start):
        raise SourceError(f"data: {shard.name!a} must be text, got NUL bytes; leave the file out")


def texts_of(shard: Shard, piece: Piece, field: str, cut: Cut) -> Iterator[Text]:
    """The texts of a piece, in order.

    Args:
        shard: the file.
        piece: of it.
        field: key or column of the text, in JSONL and Parquet.
        cut: as for ``pieces_of``.

    Raises:
        SourceError: bytes that are no UTF-8, a line that is no JSON object, a record without
            text, or a file of this machine that has changed since it was found.
        StorageError: a URL that cannot be reached.
        OSError: the file cannot be read.
    """
    if shard.kind == "parquet":
        from mcp_parallel.data.prepare.parquet import texts_of_group

        for text in texts_of_group(shard, piece.start, piece.first_row, field):
            yield Text(text, is_end=True)
        _refuse_changed(shard)
        return
    with storage.opened(shard.path) as file:
        if shard.kind == "jsonl":
            yield from _lines(shard, piece, file, field)
        else:
            yield from _segments(shard, piece, file, cut.segment_bytes)
    _refuse_changed(shard)


def _segments(shard: Shard, piece: Piece, file: IO[bytes], size: int) -> Iterator[Text]:
    """The segments of a text that belong to the piece.

    Segment k goes from the cut in window k, ``[k size, (k + 1) size)``, to the cut in the next; the
    first begins with the file, and the last ends with it.
    """
    last = -(-shard.size // size)
    first, stop = piece.start // size, -(-piece.stop // size)
    file.seek(piece.start)
    at, pending = piece.start, b""
    for number in range(first, stop + 1):
        window = _read(file, min(size, shard.size - number * size), shard) if number < last else b""
        cut = _cut_in(window) if number > 0 else 0
        if number > first:
            segment = pending + window[:cut]
            text = _decoded(segment, at, shard.name)
            # A byte order mark says how the file is written and is no part of the document.
            yield Text(text.removeprefix("\ufeff") if at == 0 else text, is_end=number == last)
            at += len(segment)
        else:
            at += cut
        pending = window[cut:]


def _cut_in(window: bytes) -> int:
    """Where in a window the text is cut: between lines as above, else after any, else anywhere."""
    found = _BETWEEN_LINES.search(window)
    if found:
        return found.end()
    newline = window.find(b"\n")
    if newline >= 0:
        return newline + 1
    character = _NEVER_INSIDE.search(window)
    return character.start() if character else len(window)


def _lines(shard: Shard, piece: Piece, file: IO[bytes], field: str) -> Iterator[Text]:
    """The texts of the lines that begin in the piece."""
    at = piece.start
    if at > 0:
        file.seek(at - 1)
        at += len(file.readline()) - 1
    first, number = at, 0
    while at < piece.stop and (line := file.readline()):
        if at == 0:
            at = len(line) - len(line := line.removeprefix(_BYTE_ORDER_MARK))
        at += len(line)
        number += 1
        if line.strip():
            try:
                yield Text(text_of_line(line, field), is_end=True)
            except SourceError as error:
                place = f"{shard.name} line {_lines_before(shard, first) + number}"
                raise SourceError(f"data: {place!a} {error}") from None
    if at < piece.stop:
        raise _changed(shard)


def _lines_before(shard: Shard, stop: int) -> int:
    """Lines that end before ``stop``: what a message has to add. Cost: reads that far."""
    count, at = 0, 0
    with storage.opened(shard.path) as file:
        while at < stop and (window := file.read(min(1 << 20, stop - at))):
            count, at = count + window.count(b"\n"), at + len(window)
    return count


def text_of_line(line: bytes, field: str) -> str:
    """The text in one line of JSONL; errors begin after the place."""
    try:
        value: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise SourceError(_no_utf8(line, error.start, 0)) from None
    except (ValueError, RecursionError) as error:
        words = shown(str(error))[1:-1]
        raise SourceError(f"must be JSON, got an error: {words}; write an object a line") from None
    if not isinstance(value, dict):
        raise SourceError(f"must be a JSON object, got {shown(value)}; write an object a line")
    text = value.get(field)
    if not isinstance(text, str):
        raise SourceError(_without_text(field, value))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise SourceError(
            f"must have whole characters in {shown(field)}, got half of a pair, {half}, at "
            f"character {error.start}; mend the line, or leave it out"
        ) from None
    return text


def _without_text(field: str, record: dict[str, Any]) -> str:
    """The words on a record whose ``field`` is no text."""
    keys = joined((shown(key) for key, held in record.items() if isinstance(held, str)), "and")
    got = shown(record[field]) if field in record else "no such key"
    way = f"give --field, text is in {keys}" if keys else "mend the line, or leave it out"
    return f"must have text in {shown(field)}, got {got}; {way}"


def _decoded(content: bytes, start: int, name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"data: {name!a} {_no_utf8(content, error.start, start)}") from None


def _no_utf8(content: bytes, at: int, start: int) -> str:
    return (
        f"must be UTF-8, got byte 0x{content[at]:02x} at {start + at}; convert it, or leave the "
        "file out"
    )


def _read(file: IO[bytes], size: int, shard: Shard) -> bytes:
    """``size`` bytes."""
    found = read_exactly(file, size)
    if len(found) < size:
        raise _changed(shard)
    return found


def _refuse_changed(shard: Shard) -> None:
    """Tokens of two versions of a file must not stand in one. Of URLs that would be a request."""
    if not storage.is_url(shard.path) and storage.stamp_of(shard.path) != shard.stamp:
        raise SourceError(
            f"data: {shard.name!a} must stay as it is while it is read, got a change; start again "
            "when it is no longer written"
        )


def _changed(shard: Shard) -> SourceError:
    return SourceError(
        f"data: {shard.name!a} must keep its {shard.size} bytes while it is read, got fewer; start "
        "again when it is no longer written"
    )
