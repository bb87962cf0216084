"""``mcp-parallel data``: every document, in order and in whole, in a file that tells of changes."""

from __future__ import annotations

import io
import json
import os
import shlex
import time
from pathlib import Path

import pytest
from configs import problem_of
from preparing import prepare, texts_in

from mcp_parallel.cli.data import TokenBar
from mcp_parallel.cli.main import main
from mcp_parallel.config import Config
from mcp_parallel.data.prepare import index as index_module
from mcp_parallel.data.prepare.index import Index, TokenFileError, verify
from mcp_parallel.data.source import open_data

tokenizers = pytest.importorskip("tokenizers")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


TEXTS = {
    "a.txt": "One fish, two fish,\nred fish, blue fish.\n" * 20,
    "b/c.jsonl": "".join(
        json.dumps({"text": text, "id": number}) + "\n\n"
        for number, text in enumerate(["caf\u00e9 \u2603", "spelt <|endoftext|> out", ""])
    ),
    "d.txt": "last words",
}
# In the order of the files: a folder's own files come before its folders.
WANTED = [TEXTS["a.txt"], TEXTS["d.txt"], "caf\u00e9 \u2603", "spelt <|endoftext|> out", ""]


@pytest.fixture
def folder(tmp_path):
    for name, text in TEXTS.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "source"


def test_all_documents_come_back_in_order(folder, tmp_path, capsys):
    out = tmp_path / "out"
    (folder / ".hidden.txt").write_text("no")
    (folder / "b" / "_SUCCESS").touch()
    os.mkfifo(folder / "a-pipe")
    (folder / "gone.txt").symlink_to("nowhere")
    (folder / "more").symlink_to(".")
    assert prepare(folder, out, "--json", jobs=2) == 0
    told = capsys.readouterr()
    assert ": .hidden.txt, a-pipe, b/_SUCCESS, gone.txt, more\n" in told.err
    report = json.loads(told.out)
    assert (report["documents"], report["files"], report["skipped"]) == (5, 3, [])
    assert texts_in(out) == WANTED
    assert sorted(path.name for path in out.iterdir()) == [
        "index.json",
        "tokenizer.json",
        "tokens.bin",
    ]
    # What it says to set is what the trainer takes.
    settings = [f"{k}={v}" for k, v in report["set"].items()]
    config = Config().with_overrides([*settings, "data.document_masking=true"])
    assert len(open_data(config).tokens) == report["tokens"]
    assert main(["data", "--verify", str(out)]) == 0
    # Another run with that tokenizer, which now also asks for padding and truncation, is the same.
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding()
    tokenizer.save(str(tmp_path / "own.json"))
    assert prepare(folder, tmp_path / "more", "--tokenizer", str(tmp_path / "own.json")) == 0
    assert (tmp_path / "more" / "tokens.bin").read_bytes() == (out / "tokens.bin").read_bytes()


def test_a_changed_token_file_is_found(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(index_module, "_MIN_BLOCK_BYTES", 64)
    assert prepare(folder, out) == 0
    assert Index.read(out).block_bytes == 64
    path = out / "tokens.bin"
    whole = path.read_bytes()
    assert len(whole) > 3 * 64
    for position in (0, 64, len(whole) - 1):
        changed = bytearray(whole)
        changed[position] ^= 1
        path.write_bytes(changed)
        with pytest.raises(TokenFileError, match=f"between {position // 64 * 64} and"):
            verify(out)
    path.write_bytes(whole[:-2])
    assert "must hold" in problem_of(lambda: main_raising(["data", "--verify", str(out)]))
    path.unlink()
    assert "got 0 bytes" in problem_of(lambda: main_raising(["data", "--verify", str(out)]))
    path.write_bytes(whole)
    verify(out)
    for broken in (b"{}", b"[]", b"\xff", (out / "index.json").read_bytes()[:-9]):
        (out / "index.json").write_bytes(broken)
        with pytest.raises(TokenFileError, match="index of a finished token file"):
            verify(out)


def test_an_index_of_the_first_version_is_read(folder, tmp_path):
    out = tmp_path / "out"
    assert prepare(folder, out) == 0
    values = json.loads((out / "index.json").read_bytes())
    old = {key: values[key] for key in ("vocab_size", "width", "separator", "parts", "checksums")}
    old |= {"version": 1, "block_bytes": 64 << 20}
    (out / "index.json").write_text(json.dumps(old))
    assert verify(out).tokens == sum(part["tokens"] for part in old["parts"])
    second = {key: value for key, value in values.items() if key != "checksum"} | {"version": 2}
    (out / "index.json").write_text(json.dumps(second))
    assert verify(out).tokenizer == values["tokenizer"]
    (out / "index.json").write_text(json.dumps(old | {"version": 4}))
    with pytest.raises(TokenFileError, match="version 4"):
        verify(out)


@pytest.mark.parametrize("key", ["separator", "vocab_size", "tokenizer", "version", "checksum"])
def test_a_changed_digit_of_an_index_is_found(folder, tmp_path, key):
    """It is JSON as before, and what it says of the tokens is wrong."""
    out = tmp_path / "out"
    assert prepare(folder, out) == 0
    text = (out / "index.json").read_text()
    start = text.index(f'"{key}": ') + len(key) + 4
    at = next(at for at in range(start, len(text)) if text[at].isdigit())
    (out / "index.json").write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])
    with pytest.raises(TokenFileError, match="index of a finished token file"):
        Index.read(out)


def test_another_tokenizer_than_the_one_of_the_tokens_is_found(folder, tmp_path):
    out = tmp_path / "out"
    assert prepare(folder, out) == 0
    path = out / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b"endoftext", b"endoftexT"))
    with pytest.raises(TokenFileError, match=r"tokenizer that made the tokens, got another; copy"):
        verify(out)
    path.unlink()
    with pytest.raises(TokenFileError, match=r"tokenizer that made the tokens, got none; copy"):
        verify(out)


def test_a_folder_of_any_name_is_told_as_the_shell_reads_it(folder, tmp_path, capsys):
    out = tmp_path / "it's $HOME"
    assert prepare(folder, out) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert f"data.path={out}/tokens.bin" in shlex.split(told)


def test_a_token_file_inside_of_its_source_is_no_part_of_it(folder, tmp_path, capsys):
    """Nor are the parts that a stopped run has left there."""
    (tmp_path / "link").symlink_to("source")
    (folder / "tokens" / "parts").mkdir(parents=True)
    (folder / "tokens" / "parts" / "000000-000000.bin").write_bytes(b"left")
    for _ in range(2):
        assert prepare(folder, tmp_path / "link" / "tokens", "--json") == 0
        assert texts_in(folder / "tokens") == WANTED
    capsys.readouterr()
    assert prepare(folder, tmp_path / "link") == 2
    assert "--out must be another folder than SOURCE" in capsys.readouterr().err
    assert not (folder / "tokenizer.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_told_in_one_line(folder, tmp_path, capsys, monkeypatch):
    """With what is on the way kept: a write of the result fails as on a full file system."""
    out = tmp_path / "out"
    out.mkdir()
    (out / ".tokens.bin.tmp").symlink_to("/dev/full")
    assert prepare(folder, out) == 2
    [told] = capsys.readouterr().err.splitlines()
    assert told == (
        f"data: {str(out)!a} must be usable, got No space left on device; free some space, "
        "finished pieces are taken over"
    )


def test_blocks_grow_with_the_file():
    for num_bytes in (0, 1, 10**10, 10**12, 10**15):
        size = index_module.block_bytes_for(num_bytes)
        assert num_bytes <= size * 2**18
        assert size == 1 << 16 or num_bytes > size // 2 * 2**18


def main_raising(words):
    from mcp_parallel.cli import data
    from mcp_parallel.cli.main import _parser

    return data.run(_parser()[0].parse_args(words))


@pytest.mark.parametrize(
    "words, told",
    [
        ([], "SOURCE and --out must be given"),
        (["x", "--out", "y"], "one of --tokenizer and --train-vocab must be given, got neither"),
        (["x", "--out", "y", "--train-vocab", "100"], "must be at least 257"),
        (["x", "--out", "y", "--train-vocab", "300", "--jobs", "0"], "--jobs must be at least 1"),
        (["nowhere", "--out", "y", "--train-vocab", "300"], "SOURCE must be a text, .jsonl"),
        ([".", "--out", "y", "--tokenizer", "nowhere"], "--tokenizer must be a tokenizer.json"),
    ],
)
def test_a_wrong_command_line_is_refused(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("x")
    assert main(["data", *words]) == 2
    assert told in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_shows_tokens_and_their_rate():
    terminal = Terminal()
    with TokenBar(1000, terminal) as bar:
        bar.show(0, 5000)
        time.sleep(0.01)
        bar.show(400, 7000)
        rate = int(bar._bar.tasks[0].description.split()[2].removesuffix("/s").replace(",", ""))
    # 2000 tokens in at least 0.01 s; those of an earlier run are not counted.
    assert 0 < rate <= 200_000
    assert "7,000 tokens" in terminal.getvalue()
    with TokenBar(1000, io.StringIO()) as silent:
        silent.show(1, 1)
