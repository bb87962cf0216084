"""Broken shards: an error with its place, or skipped and named when asked."""

from __future__ import annotations

import io
import json
import os

import pytest
from preparing import prepare, segments, shard_of, texts_in

from mcp_parallel.data.prepare.index import Index
from mcp_parallel.data.prepare.pieces import Cut, pieces_of, texts_of
from mcp_parallel.data.prepare.sources import SourceError

tokenizers = pytest.importorskip("tokenizers")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def parquet_of(**columns):
    out = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


WHOLE_PARQUET = parquet_of(text=["one", "two"], body=["x", "y"])
BROKEN = [
    ("x.txt", b"ok\xff", "'x.txt' must be UTF-8, got byte 0xff at 2"),
    ("x.txt", b"", "'x.txt' must hold some text, got an empty file"),
    ("x.txt", b"a\0b", "'x.txt' must be text, got NUL bytes"),
    ("x.jsonl", b'{"text": "a"}\n{"text": "\xc3"}\n', "'x.jsonl line 2' must be UTF-8"),
    ("x.jsonl", b'{"text": "a"}\n\n{"text": "b', "'x.jsonl line 3' must be JSON"),
    ("x.jsonl", b"[1]\n", "must be a JSON object, got [1]"),
    ("x.jsonl", b"[" * 100_000, "'x.jsonl line 1' must be JSON"),
    ("x.jsonl", b'{"body": "a"}\n', "in 'text', got no such key; give --field, text is in 'body'"),
    ("x.jsonl", b'{"text": null}\n', "got null; mend the line, or leave it out"),
    ("x.jsonl", b'{"text": "a\\ud800"}\n', "'x.jsonl line 1' must have whole characters in 'text'"),
    ("x.gz", b"\x1f\x8b\x08\0", "'x.gz' must be text, got gzip; unpack it (gunzip)"),
    ("x.jsonl", b"\xff\xfe{\0}\0", "'x.jsonl' must be text, got UTF-16; convert it"),
    ("x.jsonl", b'{"text": 3}\n', "got 3"),
    ("x.jsonl", b"\n \n", "'x.jsonl' must hold some text, got no document"),
    ("x.parquet", b"PAR1", "'x.parquet' must be a whole Parquet file"),
    ("x.parquet", WHOLE_PARQUET[:-9], "'x.parquet' must be a whole Parquet file"),
    ("x.parquet", parquet_of(body=["a"]), "must have a column 'text', got none; give --field"),
    ("x.parquet", parquet_of(text=["a", None]), "'x.parquet row 2' must have text in 'text'"),
    ("x.parquet", parquet_of(text=[1, 2]), "'x.parquet row 1' must have text in 'text', got 1"),
    ("x.parquet", parquet_of(text=pyarrow.array([], "string")), "got no rows"),
]


@pytest.mark.parametrize("name, content, words", BROKEN)
def test_a_broken_shard_is_an_error_with_its_place_or_skipped_and_named(
    tmp_path, capsys, name, content, words
):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / name).write_bytes(content)
    (source / "w.txt").write_text("before")
    (source / "y.txt").write_text("after")
    assert prepare(source, out) == 2
    assert words in capsys.readouterr().err
    assert not (out / "index.json").exists()
    assert prepare(source, out, "--skip-bad") == 0
    assert f"skipped 1 broken files (why is in index.json): {name}" in capsys.readouterr().out
    [skipped] = Index.read(out).skipped
    assert skipped.name == name
    assert words.removeprefix("data: ") in skipped.reason
    assert texts_in(out) == ["before", "after"]


def test_a_flipped_byte_of_parquet_data_is_found(tmp_path):
    path = tmp_path / "x.parquet"
    table = pyarrow.table({"text": ["abcdefgh" * 50] * 9})
    parquet.write_table(table, path, compression="none", write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[content.index(b"abcdefgh") + 50] ^= 1
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"'x.parquet' must be a whole Parquet file"):
        segments(path, Cut())


def test_nothing_whole_is_an_error_when_skipping_too(tmp_path, capsys):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "x.txt").write_bytes(b"\xff")
    assert prepare(tmp_path / "source", tmp_path / "out", "--skip-bad") == 2
    assert "must hold a file that is whole, got 1 that are not" in capsys.readouterr().err


def test_a_break_is_placed_in_the_file_and_not_in_the_piece(tmp_path):
    lines = [json.dumps({"text": "x" * 20})] * 50
    lines[40] = "{"
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    with pytest.raises(SourceError, match=r"'x.jsonl line 41' must be JSON"):
        segments(tmp_path / "x.jsonl", Cut(100, 2))
    (tmp_path / "x.txt").write_bytes(b"fish\n" * 100 + b"\xff")
    with pytest.raises(SourceError, match="byte 0xff at 500;"):
        segments(tmp_path / "x.txt", Cut(64, 2))


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path, name):
    path = tmp_path / name
    path.write_text(json.dumps({"text": "fish"}))
    shard = shard_of(path)._replace(size=500)
    with pytest.raises(SourceError, match="must keep its 500 bytes while it is read"):
        [list(texts_of(shard, piece, "text", Cut())) for piece in pieces_of(shard, Cut())]


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.parquet"])
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, name):
    """Of as many bytes as before, too: tokens of two versions would stand in one file."""
    path = tmp_path / name
    path.write_bytes(WHOLE_PARQUET if name == "x.parquet" else b'{"text": "fish"}')
    shard = shard_of(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(SourceError, match=f"'{name}' must stay as it is while it is read"):
        [list(texts_of(shard, piece, "text", Cut())) for piece in pieces_of(shard, Cut())]


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path, name):
    record = "two\ufefffish" if name == "x.txt" else '{"text": "two\ufefffish"}'
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + record.encode())
    assert segments(tmp_path / name, Cut())[0][0].text == "two\ufefffish"
    # Cut into the smallest pieces, it is read once and the rest stays whole.
    pieces = segments(tmp_path / name, Cut(4, 1))
    assert "".join(s.text for piece in pieces for s in piece) == "two\ufefffish"


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_another_field_is_read_when_asked_for(tmp_path, name):
    rows = b'{"body": "one"}\n{"body": "two"}\n'
    (tmp_path / name).write_bytes(rows if name == "x.jsonl" else parquet_of(body=["one", "two"]))
    [texts] = segments(tmp_path / name, Cut(), "body")
    assert [text.text for text in texts] == ["one", "two"]
    with pytest.raises(SourceError, match="text is in 'body'"):
        segments(tmp_path / name, Cut(), "text")
