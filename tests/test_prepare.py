"""``mcp-parallel data``: every document, in order, in whole, or an error with its place."""

from __future__ import annotations

import json

import numpy as np
import pytest
from configs import problem_of

from mcp_parallel.cli.main import main
from mcp_parallel.config import Config
from mcp_parallel.data.prepare import build as steps
from mcp_parallel.data.prepare import index as index_module
from mcp_parallel.data.prepare.documents import SourceError, documents, find_sources
from mcp_parallel.data.prepare.index import TokenFileError, verify
from mcp_parallel.data.source import open_data

tokenizers = pytest.importorskip("tokenizers")

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


def prepare(folder, out, *more):
    vocab = () if "--tokenizer" in more else ("--train-vocab", "300")
    return main(["data", str(folder), "--out", str(out), "--jobs", "2", *vocab, *more])


def texts_of(out):
    """The token file read back, document by document."""
    found = verify(out)
    tokens = np.fromfile(out / "tokens.bin", dtype=f"<u{found.width}").tolist()
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    texts, start = [], 0
    for position, token in enumerate(tokens):
        if token == found.separator:
            texts.append(tokenizer.decode(tokens[start:position], skip_special_tokens=False))
            start = position + 1
    assert start == len(tokens) == found.tokens
    return texts


def test_all_documents_come_back_in_order(folder, tmp_path, capsys):
    out = tmp_path / "out"
    (folder / "empty.txt").touch()
    assert prepare(folder, out, "--json") == 0
    told = capsys.readouterr()
    assert "1 files are hidden, empty or no text: empty.txt" in told.err
    report = json.loads(told.out)
    assert (report["documents"], report["files"]) == (5, 3)
    assert texts_of(out) == WANTED
    assert sorted(path.name for path in out.iterdir()) == [
        "index.json",
        "tokenizer.json",
        "tokens.bin",
    ]
    # What it says to set is what the trainer takes.
    config = Config().with_overrides([f"{k}={v}" for k, v in report["set"].items()])
    assert len(open_data(config).tokens) == report["tokens"]
    assert main(["data", "--verify", str(out)]) == 0
    # Another run with that tokenizer, which now also asks for padding and truncation, is the same.
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding()
    tokenizer.save(str(tmp_path / "own.json"))
    assert prepare(folder, tmp_path / "more", "--tokenizer", str(tmp_path / "own.json")) == 0
    assert (tmp_path / "more" / "tokens.bin").read_bytes() == (out / "tokens.bin").read_bytes()


def test_a_stopped_run_goes_on_and_makes_again_what_has_changed(folder, tmp_path, monkeypatch):
    files, _ = find_sources(str(folder))
    out = tmp_path / "out"
    tokenizer = steps.trained_tokenizer(files, out, "text", 300)
    recipe = steps.recipe_of(tokenizer, "text", steps.SEPARATOR)
    for number, file in enumerate(files):
        steps.make_part(file, out / "parts" / f"{number:06d}", recipe)
    # One part is cut short, as by a full disk, and one source is edited after it was read.
    cut = out / "parts" / "000000.bin"
    cut.write_bytes(cut.read_bytes()[:-2])
    (folder / "d.txt").write_text("other words")
    files, _ = find_sources(str(folder))
    made = []
    monkeypatch.setattr(steps, "ProcessPoolExecutor", lambda jobs, context: Here(made))
    seen = []
    steps.build(files, out, recipe, 2, lambda size, tokens: seen.append(size))
    assert made == ["a.txt", "d.txt"]
    assert seen[-1] == sum(file.size for file in files)
    assert texts_of(out) == [WANTED[0], "other words", *WANTED[2:]]


class Here:
    """Runs what a pool would, in this process, and notes which files those were."""

    def __init__(self, made):
        self.made = made

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, function, file, stem, recipe):
        from concurrent.futures import Future

        self.made.append(file.name)
        future = Future()
        future.set_result(function(file, stem, recipe))
        return future


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("x.txt", b"ok\xff", "'x.txt' must be UTF-8, got byte 0xff at 2"),
        ("x.jsonl", b'{"text": "a"}\n\xc3\n', "'x.jsonl line 2' must be UTF-8"),
        ("x.jsonl", b'{"text": "a"}\n{"text"\n', "'x.jsonl line 2' must be JSON"),
        ("x.jsonl", b"[1]\n", "must be a JSON object, got [1]"),
        ("x.jsonl", b'{"body": "a"}\n', "must have text in 'text', got null; give --field"),
        ("x.jsonl", b'{"text": 3}\n', "got 3"),
        ("x.parquet", b"PAR1", "must be text or JSONL in this version"),
        ("x.txt", b"", "must hold some text"),
    ],
)
def test_what_cannot_be_read_is_an_error_with_its_place(tmp_path, capsys, name, content, words):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / name).write_bytes(content)
    assert prepare(tmp_path / "source", tmp_path / "out") == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out" / "index.json").exists()


def test_another_field_is_read_when_asked_for(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"body": "one"}\n{"body": "two"}\n')
    [file], _ = find_sources(str(path))
    assert list(documents(file, "body")) == ["one", "two"]
    with pytest.raises(SourceError, match="text is in 'body'"):
        list(documents(file, "text"))


def test_a_changed_token_file_is_found(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(index_module, "BLOCK_BYTES", 64)
    files, _ = find_sources(str(folder))
    recipe = steps.recipe_of(steps.train_tokenizer(files, "text", 300), "text", steps.SEPARATOR)
    monkeypatch.setattr(steps, "ProcessPoolExecutor", lambda jobs, context: Here([]))
    steps.build(files, out, recipe, 1, lambda size, tokens: None)
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
    path.write_bytes(whole)
    verify(out)
    (out / "index.json").write_text("{}")
    with pytest.raises(TokenFileError, match="index of a finished token file"):
        verify(out)


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
        (["nowhere", "--out", "y", "--train-vocab", "300"], "SOURCE must be a text file"),
        ([".", "--out", "y", "--tokenizer", "nowhere"], "--tokenizer must be a tokenizer.json"),
    ],
)
def test_a_wrong_command_line_is_refused(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("x")
    assert main(["data", *words]) == 2
    assert told in capsys.readouterr().err
