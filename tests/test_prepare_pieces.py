"""Pieces of large files, made by any number of processes, some of which are killed."""

from __future__ import annotations

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
from hypothesis import given, settings
from hypothesis import strategies as st
from preparing import segments, shard_of, texts_in
from ranks import PATIENCE_S

from mcp_parallel.data.prepare import build as steps
from mcp_parallel.data.prepare import recipe as recipes
from mcp_parallel.data.prepare.pieces import Cut, pieces_of, texts_of
from mcp_parallel.data.prepare.sources import SourceError, find_sources

tokenizers = pytest.importorskip("tokenizers")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@given(
    st.lists(
        st.sampled_from(["a", "bc", "\n", "\r\n", " ", "\u00e9", "\u2603", "\U0001f41f"]),
        min_size=1,
    ),
    st.integers(1, 7),
    st.integers(1, 3),
)
@settings(max_examples=80, deadline=None)
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
@settings(max_examples=40, deadline=None)
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
    # A place to cut in every 500 bytes, and runs of white space that are tokens of their own.
    ends = ("\n", "\n", "\n", "\n\n   ")
    path.write_text("".join(line.strip() + ends[n % 4] for n, line in enumerate(lines)))
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
    # Those of pieces that are whole in a shard that is not were made as well.
    assert seen[-1][1] - made.index.tokens >= 0 if options else seen[-1][1] == made.index.tokens
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


def test_of_a_shard_that_breaks_late_nothing_is_taken(many, tmp_path):
    shards, recipe, wanted = many
    lines = (Path(shards[1].path)).read_text().split("\n")
    broken = tmp_path / "b.jsonl"
    broken.write_text("\n".join([*lines[:100], "{", *lines[100:]]))
    others = [shards[0], shard_of(broken), shards[2]]
    assert len(pieces_of(others[1], recipe.cut)) > 4
    made = built((others, recipe, None), tmp_path / "out", 2, skip_bad=True)
    assert [part.name for part in made.index.parts] == ["a.txt", "c.parquet"]
    [skipped] = made.index.skipped
    assert skipped.reason.startswith("'b.jsonl line 101' must be JSON")
    assert texts_in(tmp_path / "out") == [wanted[0], *wanted[121:]]


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
    for number in range(16):
        (source / f"{number:02d}.txt").write_text(f"{number}\n{text}")
    shards, _ = find_sources(str(source))
    tokenizer = recipes.train_tokenizer(shards[:1], "text", 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    out = tmp_path / "out"
    words = [str(source), "--out", str(out), "--tokenizer", str(tmp_path / "tokenizer.json")]
    command = [sys.executable, "-m", "mcp_parallel", "data", *words, "--jobs", "2"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + PATIENCE_S
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
    assert texts_in(out) == [f"{number}\n{text}" for number in range(16)]


def test_a_worker_that_is_ended_is_an_error_with_a_way_out(many, tmp_path):
    shards, recipe, wanted = many

    def end_one(num_bytes, tokens):
        for pid in child_pids(os.getpid()):
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)

    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(SourceError, match="--jobs must be as many processes as the memory holds"):
        steps.build(shards, str(out), out, recipe, 2, end_one)
    built(many, out, 1)
    assert texts_in(out) == wanted


def child_pids(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
