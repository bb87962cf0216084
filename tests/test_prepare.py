"""``mcp-parallel data``: every document, in order, in whole, or an error with its place."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from configs import problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_parallel.cli.data import TokenBar
from mcp_parallel.cli.main import main
from mcp_parallel.config import Config
from mcp_parallel.data.prepare import build as steps
from mcp_parallel.data.prepare import index as index_module
from mcp_parallel.data.prepare import recipe as recipes
from mcp_parallel.data.prepare.index import Index, TokenFileError, verify
from mcp_parallel.data.prepare.pieces import Cut, pieces_of, texts_of
from mcp_parallel.data.prepare.sources import Shard, SourceError, find_sources
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


def prepare(source, out, *more, jobs=1):
    vocab = () if "--tokenizer" in more else ("--train-vocab", "300")
    return main(["data", str(source), "--out", str(out), "--jobs", str(jobs), *vocab, *more])


def texts_in(out):
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
    (folder / ".hidden.txt").write_text("no")
    (folder / "b" / "_SUCCESS").touch()
    assert prepare(folder, out, "--json", jobs=2) == 0
    told = capsys.readouterr()
    assert "2 files are hidden and left out: .hidden.txt, b/_SUCCESS" in told.err
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


# --- pieces --------------------------------------------------------------------------------------


def shard_of(path):
    return Shard(path.name, str(path), path.stat().st_size, "")


def segments(path, cut, field="text"):
    shard = shard_of(path)
    return [list(texts_of(shard, piece, field, cut)) for piece in pieces_of(shard, cut)]


@given(
    st.lists(
        st.sampled_from(["a", "bc", "\n", "\r\n", " ", "\u00e9", "\u2603", "\U0001f41f"]),
        min_size=1,
    ),
    st.integers(1, 7),
    st.integers(1, 3),
)
@settings(max_examples=200, deadline=None)
def test_a_text_is_cut_at_characters_and_lost_nowhere(tmp_path_factory, letters, size, count):
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    text = "".join(letters)
    path.write_bytes(text.encode())
    cut = Cut(max(4, size), count)  # a character has up to four bytes
    found = segments(path, cut)
    assert len(found) == -(-len(text.encode()) // (cut.segment_bytes * count))
    flat = [segment for piece in found for segment in piece]
    assert "".join(segment.text for segment in flat) == text
    assert [segment.is_end for segment in flat] == [False] * (len(flat) - 1) + [True]
    # Every piece on its own gives what it gives among the others.
    shard = shard_of(path)
    for piece, wanted in zip(pieces_of(shard, cut), found, strict=True):
        assert list(texts_of(shard, piece, "text", cut)) == wanted


@given(st.lists(st.integers(0, 30), min_size=1), st.integers(1, 40), st.booleans())
@settings(max_examples=100, deadline=None)
def test_each_line_belongs_to_one_piece(tmp_path_factory, lengths, size, ends):
    path = tmp_path_factory.getbasetemp() / "pieces.jsonl"
    lines = [json.dumps({"text": f"{n} " + "x" * length}) for n, length in enumerate(lengths)]
    path.write_text("\n".join(lines) + "\n" * ends)
    found = [text.text for piece in segments(path, Cut(size, 1)) for text in piece]
    assert found == [json.loads(line)["text"] for line in lines]


def test_cuts_change_no_token(tmp_path):
    """Byte-level tokens end at lines, so a text cut between two has the tokens of the whole."""
    path = tmp_path / "text.py"
    lines = Path(os.__file__).read_text().split("\n")
    path.write_text("\n".join(line.strip() for line in lines))  # a cut in every 500 bytes
    shards, _ = find_sources(str(path))
    tokenizer = recipes.train_tokenizer(shards, "text", 400)
    whole = tokenizer.encode(path.read_text()).ids
    flat = [s for piece in segments(path, Cut(500, 3)) for s in piece]
    assert len(flat) > 50
    assert [i for segment in flat for i in tokenizer.encode(segment.text).ids] == whole


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Text, JSONL and Parquet of many pieces each, and what they are cut into."""
    source = tmp_path_factory.mktemp("many")
    rng = np.random.default_rng(1)
    words = ["fish", "one", "two", "red", "blue", "caf\u00e9"]
    texts = [" ".join(rng.choice(words, 30)) for _ in range(120)]
    (source / "a.txt").write_text("\n".join(texts))
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (source / "b.jsonl").write_text(rows)
    table = pyarrow.table({"id": list(range(120)), "text": texts})
    parquet.write_table(table, source / "c.parquet", row_group_size=25)
    shards, _ = find_sources(str(source))
    tokenizer = recipes.train_tokenizer(shards, "text", 300)
    recipe = recipes.recipe_of(tokenizer, "text", recipes.SEPARATOR)
    return shards, replace(recipe, cut=Cut(1000, 2)), ["\n".join(texts), *texts, *texts]


def built(many, out, jobs, **options):
    shards, recipe, _ = many
    out.mkdir(exist_ok=True)
    seen = []
    made = steps.build(
        shards, str(out), out, recipe, jobs, lambda *now: seen.append(now), **options
    )
    assert seen == sorted(seen)
    assert seen[-1][1] == made.index.tokens
    return made


def test_workers_change_no_byte(many, tmp_path):
    outs = [tmp_path / str(jobs) for jobs in (1, 3)]
    for jobs, out in zip((1, 3), outs, strict=True):
        made = built(many, out, jobs)
        assert made.num_kept == 0
        assert [part.documents for part in made.index.parts] == [1, 120, 120]
    assert texts_in(outs[0]) == many[2]
    for name in ("tokens.bin", "index.json"):
        assert (outs[0] / name).read_bytes() == (outs[1] / name).read_bytes()


def test_parquet_is_read_by_row_groups(many):
    shard = many[0][2]
    pieces = pieces_of(shard, Cut())
    assert [piece.first_row for piece in pieces] == [0, 25, 50, 75, 100]
    texts = [text.text for text in texts_of(shard, pieces[3], "text", Cut())]
    assert texts == many[2][1:][75:100]


# --- stopped runs --------------------------------------------------------------------------------


def test_a_run_takes_over_whole_parts_and_makes_what_has_changed(many, tmp_path):
    out = tmp_path / "out"
    shards, recipe, _ = many
    whole = built(many, out, 1)
    wanted = (out / "tokens.bin").read_bytes()
    plan = steps._plan(shards, out / "parts", recipe, False)
    (out / "parts").mkdir()
    maker = steps.Maker(recipe, [0, 0] and steps.multiprocessing.Array("q", 2))
    for task in plan.tasks:
        maker.make(task)
    # One part is cut short, as by a full disk; one is of a source that was edited since.
    cut = plan.tasks[1].stem.with_suffix(".bin")
    cut.write_bytes(cut.read_bytes()[:-2])
    record = plan.tasks[-1].stem.with_suffix(".json")
    record.write_text(record.read_text().replace('"c.parquet"', '"d.parquet"'))
    again = built(many, out, 1)
    assert again.num_kept == len(plan.tasks) - 2
    assert again.index == whole.index
    assert (out / "tokens.bin").read_bytes() == wanted


def test_a_run_killed_at_any_time_goes_on(tmp_path):
    """kill -9 while parts are made; the second run takes them over, and the bytes are the same."""
    source = tmp_path / "source"
    source.mkdir()
    text = Path(os.__file__).read_text()
    for number in range(30):
        (source / f"{number:02d}.txt").write_text(f"{number}\n{text}")
    shards, _ = find_sources(str(source))
    tokenizer = recipes.train_tokenizer(shards[:1], "text", 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    out = tmp_path / "out"
    words = [str(source), "--out", str(out), "--tokenizer", str(tmp_path / "tokenizer.json")]
    command = [sys.executable, "-m", "mcp_parallel", "data", *words, "--jobs", "2"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(list(out.glob("parts/*.json"))) < 4:
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    children = child_pids(running.pid)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert not (out / "index.json").exists()
    assert len(children) >= 2
    while any(Path(f"/proc/{pid}").exists() and not is_zombie(pid) for pid in children):
        assert time.monotonic() < deadline  # its workers end with it
        time.sleep(0.01)
    made = len(list(out.glob("parts/*.json")))
    shards, _ = find_sources(str(source))
    recipe = recipes.recipe_of(tokenizer, "text", recipes.SEPARATOR)
    again = built((shards, recipe, None), out, 1)
    assert again.num_kept == made
    assert texts_in(out) == [f"{number}\n{text}" for number in range(30)]


def child_pids(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# --- broken shards -------------------------------------------------------------------------------


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
    ("x.jsonl", b'{"body": "a"}\n', "must have text in 'text', got null; give --field"),
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


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_another_field_is_read_when_asked_for(tmp_path, name):
    rows = b'{"body": "one"}\n{"body": "two"}\n'
    (tmp_path / name).write_bytes(rows if name == "x.jsonl" else parquet_of(body=["one", "two"]))
    [texts] = segments(tmp_path / name, Cut(), "body")
    assert [text.text for text in texts] == ["one", "two"]
    with pytest.raises(SourceError, match="text is in 'body'"):
        segments(tmp_path / name, Cut(), "text")


# --- the finished file ---------------------------------------------------------------------------


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
    (out / "index.json").write_text(json.dumps(old | {"version": 3}))
    with pytest.raises(TokenFileError, match="version 3"):
        verify(out)


def test_blocks_grow_with_the_file():
    for num_bytes in (0, 1, 10**10, 10**12, 10**15):
        size = index_module.block_bytes_for(num_bytes)
        assert num_bytes <= size * 65536
        assert size == 1 << 20 or num_bytes > size // 2 * 65536


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
