"""Bad configurations through the real commands: refused at once, in words that lead out."""

from __future__ import annotations

import json
import os
import re
import time

import pytest

from mcp_parallel.cli.arguments import _FLAGS
from mcp_parallel.cli.main import main
from mcp_parallel.errors import BAD_CONFIG, OK

# Words of the command line, then for each line of the refusal: key, rule, value.
MODEL = (
    "--set model.preset=null --set model.num_layers={} --set model.hidden_size=64 --set "
    "model.num_heads={} --set model.num_kv_heads={} --set model.ffn_size=96 --set "
    "model.vocab_size={} --set model.seq_len={}"
)
BAD = [
    # what tp cannot share out
    ("--tp 3", ("parallel.tp", "divide num_heads = 8", "3")),
    ("--tp 8", ("parallel.tp", "divide num_kv_heads = 4", "8")),
    (f"--tp 4 {MODEL.format(4, 8, 2, 256, 128)}", ("parallel.tp", "divide num_kv_heads = 2", "4")),
    (
        f"--tp 8 {MODEL.format(4, 8, 8, 6, 128)} --set data.path=TOKENS",
        ("parallel.tp", "be at most vocab_size = 6", "8"),
    ),
    # sequences
    (
        "--cp 2 --set model.seq_len=126",
        ("model.seq_len", "a multiple of 2 * cp = 4", "126"),
    ),
    # heads
    ("--set model.hidden_size=100", ("model.hidden_size", "multiple of 2 * num_heads = 16", "100")),
    ("--set model.num_kv_heads=3", ("model.num_kv_heads", "divide num_heads = 8", "3")),
    ("--set model.vocab_size=255", ("model.vocab_size", "at least 256 for text", "255")),
    # stages
    ("--pp 5", ("parallel.pp", "num_layers = 4", "5 * 1 = 5 stages")),
    ("--pp 4 --schedule zbv", ("parallel.pp", "num_layers = 4", "4 * 2 = 8 stages")),
    ("--pp 2 --schedule interleaved", ("parallel.virtual_stages", "2 or more", "1")),
    ("--set parallel.virtual_stages=2", ("parallel.virtual_stages", "1 with pp = 1", "2")),
    (
        "--pp 2 --schedule zbv --set parallel.virtual_stages=3",
        ("parallel.virtual_stages", "be 2 with schedule zbv", "3"),
    ),
    # batches
    ("--dp 3", ("train.global_batch_size", "dp * micro_batch_size = 3 * 4", "16")),
    ("--batch-size 18", ("train.global_batch_size", "dp * micro_batch_size = 1 * 4", "18")),
    ("--dp 4 --pp 2", ("train.micro_batch_size", "at least pp = 2", "4 and 1 of them")),
    (
        "--pp 2 --schedule interleaved --set parallel.virtual_stages=2 --batch-size 12",
        ("train.micro_batch_size", "a multiple of pp = 2", "4 and 3 of them"),
    ),
    (
        "--pp 2 --schedule dualpipev --batch-size 12",
        ("train.micro_batch_size", "at least 2 * pp = 4", "4 and 3 of them"),
    ),
    # zero and replicas
    ("--zero 4", ("parallel.zero", "at most 3", "4")),
    ("--dp 4 --zero 3 --set parallel.dp_replicate=3", ("parallel.dp_replicate", "divide", "3")),
    ("--dp 4 --set parallel.dp_replicate=2", ("parallel.zero", "1, 2 or 3", "0")),
    (
        "--dp 2 --tp 4 --zero 1 --set model.ffn_size=5",
        ("parallel.tp", "each rank a part of ffn_size = 5", "4"),
    ),
    ("--zero 2 --set train.optimizer=onebit_adam", ("parallel.zero", "0 or 1", "2")),
    # the number of ranks
    ("--dp 2 --world-size 8", ("parallel.dp", "the number of ranks, 8", "2 * 1 * 1 * 1 = 2")),
    ("--tp 2 --pp 2 --world-size 6", ("parallel.dp", "ranks, 6", "1 * 2 * 2 * 1 = 4")),
    ("--world-size 0", (None, "at least 1", "0")),
    # numbers
    ("--dp 0", ("parallel.dp", "at least 1", "0")),
    ("--tp -2", ("parallel.tp", "at least 1", "-2")),
    ("--steps 0", ("train.steps", "at least 1", "0")),
    (
        "--set model.seq_len=1000000000000000000",
        ("model.seq_len", "at most", "1000000000000000000"),
    ),
    (
        f"--set model.num_layers={'9' * 5000}",
        (None, "too long", "'model.num_layers=9999"),
    ),
    ("--set train.lr=nan", ("train.lr", "", "nan")),
    ("--set train.lr=0", ("train.lr", "above 0", "0.0")),
    ("--set train.lr=inf", ("train.lr", "", "inf")),
    ("--set train.min_lr=1", ("train.min_lr", "at most train.lr = 0.003", "1.0")),
    ("--steps 50 --set train.warmup_steps=51", ("train.warmup_steps", "train.steps = 50", "51")),
    ("--set train.freeze_step=5", ("train.freeze_step", "null with optimizer adamw", "5")),
    (
        "--set train.optimizer=onebit_adam --set train.freeze_step=3",
        ("train.freeze_step", "at least 20", "3"),
    ),
    ("--set data.seed=9223372036854775808", ("data.seed", "at most", "9223372036854775808")),
    # words
    ("--preset 8b", ("model.preset", "tiny", "'8b'")),
    ("--preset tyni", ("model.preset", "tiny", "'tyni'")),
    ("--schedule 1b1f", ("parallel.schedule", "1f1b", "'1b1f'")),
    ("--set train.precision=fp8", ("train.precision", "bf16", "'fp8'")),
    (
        "--set memory.activation_checkpointing=half",
        ("memory.activation_checkpointing", "selective", "'half'"),
    ),
    ("--set train.learning_rate=1", ("train.learning_rate", "", "no such key")),
    ("--set trian.lr=1", ("trian.lr", "", "no such key")),
    ("--set train.steps=many", ("train.steps", "", "'many'")),
    ("--set train.steps=1.5", ("train.steps", "", "1.5")),
    ("--set model.tie_embeddings=7", ("model.tie_embeddings", "", "7")),
    ("--dp 2 --set parallel.dp=4", ("parallel.dp", "given once", "--dp 2")),
    # paths
    ("--set data.path=/nonexistent/text", ("data.path", "exists", "'/nonexistent/text'")),
    ("--set data.path=/dev/null", ("data.path", "a file or a folder", "'/dev/null'")),
    ("--config /nonexistent/run.yaml", (None, "", "/nonexistent/run.yaml")),
    ("--resume /nonexistent/step_1", ("checkpoint.resume", "exists", "'/nonexistent/step_1'")),
    # several at once
    (
        "--tp 3 --pp 9 --set train.seed=-1",
        ("parallel.tp", "num_heads", "3"),
        ("parallel.pp", "num_layers", "9 * 1"),
        ("train.seed", "at least 0", "-1"),
    ),
]
IDS = [row[0][:60] for row in BAD]


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """``command(name, words)``: exit status and refusal; nothing may be started or left."""
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(bytes(1000))

    def refuse_to_fork():
        raise AssertionError("a process was started")

    monkeypatch.setattr(os, "fork", refuse_to_fork)

    def run(name, words):
        folder = [] if name == "check" else ["--run-dir", str(tmp_path / "run")]
        words = [word.replace("TOKENS", str(tokens)) for word in words]
        start_s = time.process_time()
        status = main([name, *folder, "--json", *words])
        # Seconds of work, not of waiting: a loaded machine does not change it much.
        assert time.process_time() - start_s < 2
        assert not (tmp_path / "run").exists()
        result = json.loads(capsys.readouterr().out)
        return status, result

    return run


def words_of(row):
    return row[0].split()


def without(words, keys):
    """``words`` without the flags that set one of ``keys``."""
    key_of = {name: flag.key for flag in _FLAGS for name in flag.names}
    key_of["--resume"] = "checkpoint.resume"
    kept, rest = [], iter(words)
    for word in rest:
        value = next(rest)
        key = value.partition("=")[0] if word == "--set" else key_of.get(word)
        if key not in keys:
            kept += [word, value]
    return kept


def with_change(words, change):
    changed = [f"{key}={value}" for key, value in change.items()]
    return [*without(words, change), *(part for each in changed for part in ("--set", each))]


@pytest.mark.parametrize("row", BAD, ids=IDS)
def test_is_refused_in_words_that_name_key_rule_value_and_a_way_out(command, row):
    status, result = command("check", words_of(row))
    assert status == BAD_CONFIG
    assert not result["ok"]
    for key, rule, value in row[1:]:
        about = [
            problem
            for problem in result["problems"]
            if (key is None or f": {key} " in problem) and rule in problem and value in problem
        ]
        assert about, result["problems"]
    for problem in result["problems"]:
        assert problem.isascii()
        assert "\n" not in problem
        assert len(problem) < 500
        assert "; " in problem  # what follows is the way out


@pytest.mark.parametrize("row", BAD, ids=IDS)
def test_what_is_suggested_is_accepted(command, row):
    words = words_of(row)
    _, result = command("check", words)
    for layout in result["layouts"]:
        status, after = command("check", with_change(words, layout))
        if status != OK:  # what no layout mends is left
            left = set(after["problems"])
            assert left < set(result["problems"]), (layout, after)
            assert not any("parallel." in problem.split(" must ")[0] for problem in left)
    if len(result["problems"]) == 1:
        [problem] = result["problems"]
        key, values = ways_of(problem)
        statuses = [command("check", with_change(words, {key: value}))[0] for value in values]
        assert not values or OK in statuses, problem


def ways_of(problem):
    """``; use train.steps = 1 or 200``: the key and its values, none where advice is in prose."""
    way = re.search(
        r"; use ([a-z]+\.\w+) = ((?:[^\s,]+, )*[^\s,]+(?: or [^\s,]+)?)(?=$|, or )", problem
    )
    return (way[1], re.split(", | or ", way[2])) if way else ("", [])


def test_layouts_are_suggested_wherever_one_would_do(command):
    """And three of them, on the ranks that were asked for where these can be shared out."""
    counts = {}
    for row in BAD:
        _, result = command("check", words_of(row))
        counts[row[0]] = [
            (layout["parallel.dp"] * layout["parallel.tp"] * layout["parallel.pp"])
            for layout in result["layouts"]
        ]
    for words in ("--tp 3", "--tp 8", "--pp 5", "--dp 3", "--dp 4 --pp 2", "--pp 4 --schedule zbv"):
        assert len(counts[words]) == 3, (words, counts[words])
    assert counts["--dp 2 --world-size 8"] == [8, 8, 8]  # torchrun's number is not ours to change
    assert counts["--tp 8"] == [8, 8, 8]
    assert counts["--tp 3"][0] == 3  # pp 3: the same ranks before nearer degrees on others
    assert counts["--set train.lr=nan"] == []


# Every few rows of those that train takes too: --world-size is a flag of check alone.
FOR_TRAIN = [row for row in BAD if "--world-size" not in row[0]][:: len(BAD) // 12]


@pytest.mark.parametrize("row", FOR_TRAIN, ids=[row[0][:60] for row in FOR_TRAIN])
def test_train_refuses_before_a_rank_starts(command, row):
    status, result = command("train", words_of(row))
    assert status == BAD_CONFIG
    assert result["problems"] == command("check", words_of(row))[1]["problems"]


def test_a_world_of_another_size_under_torchrun_is_refused(command, monkeypatch):
    torchrun = "WORLD_SIZE=8 RANK=0 LOCAL_RANK=0 GROUP_RANK=0 MASTER_ADDR=x MASTER_PORT=1"
    for name, _, value in (pair.partition("=") for pair in torchrun.split()):
        monkeypatch.setenv(name, value)
    status, result = command("train", ["--dp", "2", "--tp", "2"])
    assert status == BAD_CONFIG
    [problem] = result["problems"]
    assert "the number of ranks, 8, got 2 * 2 * 1 * 1 = 4" in problem
    for layout in result["layouts"]:
        assert layout["parallel.dp"] * layout["parallel.tp"] * layout["parallel.pp"] == 8
        words = with_change(["--dp", "2", "--tp", "2", "--world-size", "8"], layout)
        assert command("check", words)[0] == OK
    assert len(result["layouts"]) == 3
