"""What is refused, in which words, and the command that says so."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from array import array

import pytest
from configs import applied, assert_ways_out, config_of, names
from ranks import PATIENCE_S

from mcp_parallel import check
from mcp_parallel.cli import check as check_command
from mcp_parallel.config import Config, ModelConfig, TrainConfig
from mcp_parallel.errors import BAD_CONFIG, OK, ConfigError
from mcp_parallel.rules.values import BOUNDS

# --- what is refused -----------------------------------------------------------------------------

MISSING = "/nonexistent/data"

# Flags of `check`, the key the message must be about, and the value it must show.
BAD = [
    ("--set model.hidden_size=100", "model.hidden_size", "100"),
    ("--set model.hidden_size=72", "model.hidden_size", "72"),  # heads of 9: odd under RoPE
    ("--set model.num_heads=6", "model.hidden_size", "128"),
    ("--set model.num_kv_heads=3", "model.num_kv_heads", "3"),
    ("--tp 3", "parallel.tp", "3"),
    ("--tp 8", "parallel.tp", "8"),  # divides the heads, not the kv heads
    ("--pp 5", "parallel.pp", "5 * 1 = 5 stages"),
    ("--pp 2 --schedule interleaved", "parallel.virtual_stages", "1"),
    ("--pp 2 --set parallel.virtual_stages=2", "parallel.virtual_stages", "2"),
    ("--set parallel.virtual_stages=2", "parallel.virtual_stages", "2"),
    (
        "--pp 2 --schedule interleaved --set parallel.virtual_stages=3",
        "parallel.pp",
        "2 * 3 = 6 stages",
    ),
    ("--batch-size 18", "train.global_batch_size", "18"),
    ("--dp 3", "train.global_batch_size", "16"),
    ("--dp 4 --pp 2", "train.micro_batch_size", "4 and 1 of them"),
    (
        "--pp 2 --schedule interleaved --set parallel.virtual_stages=2 --batch-size 12",
        "train.micro_batch_size",
        "4 and 3 of them",
    ),
    ("--tp 2 --world-size 7", "parallel.dp", "1 * 2 * 1 * 1 = 2"),
    ("--dp 2 --world-size 8", "parallel.dp", "2 * 1 * 1 * 1 = 2"),
    ("--cp 3", "model.seq_len", "128"),
    ("--zero 4", "parallel.zero", "4"),
    ("--zero -1", "parallel.zero", "-1"),
    ("--dp 4 --zero 1 --set parallel.dp_replicate=3", "parallel.dp_replicate", "3"),
    ("--dp 4 --set parallel.dp_replicate=2", "parallel.zero", "0"),
    (
        "--dp 4 --zero 1 --set parallel.dp_replicate=2 --set train.optimizer=onebit_adam",
        "parallel.dp_replicate",
        "2",
    ),
    ("--dp 2 --tp 4 --zero 3 --set model.vocab_size=5 --set model.ffn_size=7", "parallel.tp", "4"),
    ("--dp 0", "parallel.dp", "0"),
    ("--tp -2", "parallel.tp", "-2"),
    ("--steps 0", "train.steps", "0"),
    ("--set model.num_layers=0", "model.num_layers", "0"),
    ("--set model.seq_len=1000000000000000000", "model.seq_len", "1000000000000000000"),
    ("--set train.lr=0", "train.lr", "0.0"),
    ("--set train.lr=-1", "train.lr", "-1.0"),
    ("--set train.min_lr=1", "train.min_lr", "1.0"),
    ("--set train.warmup_steps=201", "train.warmup_steps", "201"),
    ("--set train.clip_norm=-1", "train.clip_norm", "-1.0"),
    ("--set train.weight_decay=-0.1", "train.weight_decay", "-0.1"),
    ("--set train.seed=-1", "train.seed", "-1"),
    ("--set data.seed=9223372036854775808", "data.seed", "9223372036854775808"),
    ("--set amp.grad_scaler.init_scale=0.5", "amp.grad_scaler.init_scale", "0.5"),
    ("--set amp.grad_scaler.growth_interval=0", "amp.grad_scaler.growth_interval", "0"),
    ("--set model.residual_init_scale=-1", "model.residual_init_scale", "-1.0"),
    ("--zero 2 --set train.optimizer=onebit_adam", "parallel.zero", "2"),
    ("--set train.optimizer=onebit_adam --set train.freeze_step=3", "train.freeze_step", "3"),
    ("--set train.freeze_step=5", "train.freeze_step", "5"),
    ("--set train.fp32_embedding_steps=-1", "train.fp32_embedding_steps", "-1"),
    ("--set train.fp32_embedding_switch_steps=-1", "train.fp32_embedding_switch_steps", "-1"),
    ("--pp 4 --schedule zbv", "parallel.pp", "4 * 2 = 8 stages"),
    ("--pp 2 --schedule zbv --set parallel.virtual_stages=3", "parallel.virtual_stages", "3"),
    ("--pp 2 --schedule dualpipev --batch-size 12", "train.micro_batch_size", "4 and 3 of them"),
    (
        "--pp 2 --schedule zero_bubble --set parallel.virtual_stages=2 --batch-size 12",
        "train.micro_batch_size",
        "4 and 3 of them",
    ),
    (
        "--set memory.offload=true --set train.optimizer=onebit_adam",
        "memory.offload",
        "true",
    ),
    ("--set checkpoint.async=true", "checkpoint.async", "true"),
    ("--set checkpoint.replicas=2", "checkpoint.replicas", "2"),
    ("--set checkpoint.keep=0", "checkpoint.keep", "0"),
    ("--set monitor.health_every=-1", "monitor.health_every", "-1"),
    ("--set monitor.straggler_factor=1", "monitor.straggler_factor", "1.0"),
    ("--set monitor.straggler_steps=2", "monitor.straggler_steps", "2"),
    ("--set monitor.peak_tflops=0", "monitor.peak_tflops", "0.0"),
    ("--set monitor.every=0", "monitor.every", "0"),
    (f"--set data.path={MISSING}", "data.path", f"'{MISSING}'"),
    ("--set data.path=/dev/null", "data.path", "'/dev/null'"),
    ("--set data.path=''", "data.path", "''"),
    ("--set model.vocab_size=255", "model.vocab_size", "255"),
    (f"--resume {MISSING}", "checkpoint.resume", f"'{MISSING}'"),
    ("--set train.lr=nan", "train.lr", "nan"),
    ("--set train.lrr=1", "train.lrr", "no such key"),
    ("--steps 1.5", "train.steps", "1.5"),
    ("--preset 8b", "model.preset", "'8b'"),
]


def run_check(*words):
    parser = argparse.ArgumentParser()
    check_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["check", *words])
    return args.run(args)


@pytest.mark.parametrize("flags, key, value", BAD, ids=[row[0] for row in BAD])
def test_bad_configs_are_refused_with_a_way_out(capsys, flags, key, value):
    words = [word.strip("'") if word == "''" else word for word in flags.split()]
    assert run_check(*words) == BAD_CONFIG
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    about = [line for line in lines if f": {key} must " in line and f", got {value}" in line]
    assert about, lines
    assert all("; " in line and line.isascii() for line in lines)


def test_refusal_imports_neither_torch_nor_numpy():
    """Refusing takes the time of starting Python; importing torch alone takes seconds."""
    code = (
        "import sys, mcp_parallel\n"
        "from mcp_parallel.cli import arguments\n"
        "config = mcp_parallel.Config()\n"
        "mcp_parallel.check(config)\n"
        "mcp_parallel.Layout.from_config(config.parallel)\n"
        "try:\n"
        "    mcp_parallel.check(config.with_overrides(['parallel.tp=3', 'train.steps=0']))\n"
        "except ValueError as error:\n"
        "    print(sorted({'torch', 'numpy'} & set(sys.modules)), len(error.problems))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert ran.stdout == "[] 3\n"


def test_name_check_is_the_function_whatever_is_imported_first():
    for first in ("import mcp_parallel.check", "from mcp_parallel.check import find_problems"):
        code = f"{first}\nfrom mcp_parallel import check, Config\ncheck(Config())\nprint(check)"
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert ran.stdout.startswith("<function check"), ran.stderr


def test_all_problems_are_told_at_once():
    config = config_of(
        parallel__tp=3, parallel__pp=9, train__lr=-1.0, train__seed=-1, data__path=MISSING
    )
    with pytest.raises(ConfigError) as refused:
        check(config)
    keys = {problem.split(" must ")[0] for problem in refused.value.problems}
    expected = "parallel.tp parallel.pp train.micro_batch_size train.lr train.seed"
    assert keys == {f"check: {key}" for key in (*expected.split(), "data.path")}


@pytest.mark.parametrize("key", BOUNDS)
def test_each_number_is_refused_just_outside_its_range_only(key):
    bound = BOUNDS[key]
    name = f"range {key}"
    is_float = isinstance(bound.low, float)
    below = math.nextafter(bound.low, -math.inf) if is_float else int(bound.low) - 1
    above = math.nextafter(bound.high, math.inf) if is_float else int(bound.high) + 1
    for value in (below, above, -(10**18), 10**18):
        if is_float:
            value = float(value)
        if not bound.low <= value <= bound.high:
            config = applied(Config(), {key: value})
            assert name in names(config)
            assert_ways_out(config)
    low = bound.low if not bound.above else math.nextafter(bound.low, math.inf)
    for value in (low, bound.high):
        edge = applied(Config(), {key: value if is_float else int(value)})
        assert name not in names(edge)
        assert_ways_out(edge)
    if bound.above:
        assert name in names(applied(Config(), {key: bound.low}))


def test_a_config_built_in_python_is_held_to_its_types():
    for train in (TrainConfig(steps=1.5), TrainConfig(lr=math.nan), TrainConfig(lr="1")):  # pyright: ignore[reportArgumentType]
        with pytest.raises(ConfigError, match=r"config: train\.\w+ must be"):
            check(Config(train=train))


def test_a_preset_that_was_never_filled_in_is_refused():
    config = Config(model=ModelConfig(preset="7b"))
    assert names(config) == ["preset"]
    assert_ways_out(config)


@pytest.mark.parametrize("world_size", [0, -1, 10**12])
def test_a_world_of_no_size_is_refused(world_size):
    with pytest.raises(ConfigError, match="world_size must be at least 1"):
        check(Config(), world_size)


# --- data ----------------------------------------------------------------------------------------


def data_names(path, **changes):
    config = config_of(data__path=str(path), **changes)
    assert_ways_out(config)
    return names(config)


def test_text_must_fill_one_sample(tmp_path):
    path = tmp_path / "d\u00e4ta file.txt"
    for size, expected in ((129, []), (128, ["data too short"]), (0, ["data must hold some text"])):
        path.write_bytes(b"x" * size)
        assert data_names(path) == expected


def test_a_folder_counts_as_its_text_joined(tmp_path):
    (tmp_path / "empty").mkdir()
    assert data_names(tmp_path) == ["data must hold some text"]
    for name in "ab":
        (tmp_path / name).write_bytes(b"x" * 64)
    assert data_names(tmp_path) == []  # 64 + newline + 64
    (tmp_path / "a").write_bytes(b"x" * 128)  # not enough alone, by one token
    assert data_names(tmp_path) == []
    (tmp_path / "a").write_bytes(b"x" * 64)
    (tmp_path / "b").write_bytes(b"x" * 63)
    assert data_names(tmp_path) == ["data too short"]
    (tmp_path / "b").write_bytes(b"\0" * 500)
    assert data_names(tmp_path) == ["data too short"]


def test_binary_files_are_no_text(tmp_path):
    path = tmp_path / "model.npy"
    path.write_bytes(b"\x93NUMPY\0" * 100)
    assert data_names(path) == ["data must be text (or end in .bin)"]


@pytest.mark.parametrize("vocab_size, code", [(300, "H"), (65536, "H"), (65537, "I")])
def test_token_files(tmp_path, vocab_size, code):
    path = tmp_path / "tokens.bin"

    def found(tokens, extra=b""):
        values = array(code, tokens)
        if sys.byteorder == "big":
            values.byteswap()
        path.write_bytes(values.tobytes() + extra)
        return data_names(path, model__vocab_size=vocab_size)

    width = array(code).itemsize
    assert found([vocab_size - 1] * 129) == []
    assert found([0] * 128) == ["data too short"]
    assert found([]) == ["data must hold some tokens"]
    assert found([0] * 129, b"\0") == [f"data must hold whole uint{8 * width} tokens"]
    if vocab_size != 65536:
        # Both ends of a file of several megabytes are looked at.
        for place in (0, -1):
            tokens = array(code, bytes(width * 2_000_000))
            tokens[place] = vocab_size
            assert found(tokens) == ["token out of vocabulary"]


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs Linux")
def test_data_that_cannot_be_read():
    # A regular file whose first byte no one may read, not even root.
    assert data_names("/proc/self/mem") == ["data must be readable"]


def test_a_pipe_is_refused_unopened(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer for ever
    assert data_names(tmp_path / "pipe") == ["data must name a file or a folder"]


def test_checkpoint_to_resume_from_must_be_there(tmp_path):
    for resume, expected in (
        ("never", []),
        ("auto", []),
        (str(tmp_path), []),
        (str(tmp_path / "none"), ["resume"]),
        ("", ["resume"]),
    ):
        config = config_of(checkpoint__resume=resume)
        assert names(config) == expected
        assert_ways_out(config)


# --- the command ---------------------------------------------------------------------------------


def test_json_of_a_legal_config(capsys):
    flags = "--dp 2 --tp 2 --pp 2 --schedule interleaved --set parallel.virtual_stages=2 --json"
    assert run_check(*flags.split()) == OK
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is True
    assert Config.from_mapping(result["config"]).parallel.virtual_stages == 2
    assert (result["world_size"], result["microbatches"]) == (8, 2)
    assert result["tokens_per_step"] == 16 * 128
    assert result["parameters"] == 803_968
    assert [stage["layers"] for stage in result["stages"]] == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert [stage["ranks"] for stage in result["stages"]] == [
        [[0, 2], [4, 6]],
        [[2, 4], [6, 8]],
    ] * 2


def test_json_of_a_refused_config(capsys):
    assert run_check("--tp", "3", "--json") == BAD_CONFIG
    out, err = capsys.readouterr()
    assert err == ""
    result = json.loads(out)
    assert result["ok"] is False
    assert len(result["problems"]) == 2


def test_table_names_what_would_run(capsys):
    assert run_check("--pp", "3", "--set", "model.num_layers=5") == OK
    out = capsys.readouterr().out
    assert "stage   0: layers 0-1 on ranks 0\n" in out
    assert "stage   2: layers 4 on ranks 2\n" in out
    config_text = out[out.index("model:") :]
    assert "  num_layers: 5\n" in config_text


def test_table_shows_groups_of_replicas(capsys):
    flags = ["--dp", "4", "--zero", "3", "--set", "parallel.dp_replicate=2"]
    assert run_check(*flags) == OK
    assert "zero 3 in 2 groups of dp 2" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["x", "-1", "1.5", "", "\u0663"])
def test_world_size_is_a_number(capsys, text):
    assert run_check(f"--world-size={text}") == BAD_CONFIG
    assert "--world-size must be a number of ranks" in capsys.readouterr().err
