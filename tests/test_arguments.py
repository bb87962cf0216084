from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from mcp_parallel.cli.arguments import add_run_arguments, resolve_arguments
from mcp_parallel.config import Config
from mcp_parallel.errors import ConfigError

CLASSIC = (
    "--model_size tiny --batch_size 32 --micro_batch_size 4 --pp_degree 2 --tp_degree 2 "
    "--use_flash_attn --gradient_checkpointing"
)


def resolved(*words, world_size=None):
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    return resolve_arguments(parser.parse_args(words), world_size)


def config_of(text, **options):
    config, _ = resolved(*text.split(), **options)
    return config


def problems_of(text, **options):
    with pytest.raises(ConfigError) as refused:
        config_of(text, **options)
    return refused.value.problems


@pytest.fixture
def write(tmp_path):
    def write(text, name="config.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    return write


def test_no_flag_is_the_default_run():
    config, options = resolved()
    assert config == Config()
    assert options.run_dir is None
    assert options.as_json is False


@pytest.mark.parametrize(
    "flags, table, key, value",
    [
        ("--preset 350m", "model", "preset", "350m"),
        ("--steps 7", "train", "steps", 7),
        ("--dp 2", "parallel", "dp", 2),
        ("--tp 2", "parallel", "tp", 2),
        ("--pp 2", "parallel", "pp", 2),
        ("--cp 1", "parallel", "cp", 1),
        ("--zero 3", "parallel", "zero", 3),
        ("--schedule gpipe", "parallel", "schedule", "gpipe"),
        ("--resume", "checkpoint", "resume", "auto"),
        ("--resume never", "checkpoint", "resume", "never"),
        ("--set train.lr=3e-2", "train", "lr", 3e-2),
        ("--model-size 125m", "model", "preset", "125m"),
        ("--batch-size 64", "train", "global_batch_size", 64),
        ("--micro-batch-size 2", "train", "micro_batch_size", 2),
        ("--dp-degree 4", "parallel", "dp", 4),
        ("--tp-degree 4", "parallel", "tp", 4),
        ("--mp-degree 4", "parallel", "tp", 4),
        ("--pp-degree 4", "parallel", "pp", 4),
        ("--cp-degree 1", "parallel", "cp", 1),
        ("--gradient-checkpointing", "memory", "activation_checkpointing", "full"),
    ],
)
def test_each_flag_sets_its_key_in_both_spellings(flags, table, key, value):
    flag, *rest = flags.split()
    for spelling in (flag, "--" + flag[2:].replace("-", "_")):
        config = config_of(" ".join([spelling, *rest]))
        assert getattr(getattr(config, table), key) == value


def test_run_dir_and_json_are_options(tmp_path):
    for flag in ("--run-dir", "--run_dir"):
        _, options = resolved(flag, str(tmp_path / "my r\u00fcn"), "--json")
        assert options.run_dir == Path(tmp_path / "my r\u00fcn")
        assert options.as_json is True


def test_classic_line_under_torchrun():
    config = config_of(CLASSIC, world_size=8)
    parallel = config.parallel
    assert (parallel.dp, parallel.tp, parallel.pp) == (2, 2, 2)
    assert config.train.global_batch_size == 32
    assert config.memory.activation_checkpointing == "full"
    assert config == config_of(CLASSIC.replace("_", "-"), world_size=8)


def test_classic_line_with_context_parallel():
    assert config_of(f"{CLASSIC} --cp_degree 2", world_size=16).parallel.cp == 2


def test_dp_is_derived_from_the_world_unless_it_is_given(write):
    assert config_of("--tp 2", world_size=8).parallel.dp == 4
    (problem,) = problems_of("--tp 2", world_size=7)
    assert "the number of ranks, 7" in problem
    for given in ("--dp 2 --tp 2", "--set parallel.dp=2 --tp 2"):
        (problem,) = problems_of(given, world_size=8)
        assert "the number of ranks, 8, got 2 * 2 * 1 * 1 = 4" in problem
    (problem,) = problems_of(f"--config {write('parallel: {dp: 1}')}", world_size=2)
    assert "the number of ranks, 2" in problem
    assert config_of(f"--config {write('parallel: {tp: 2}')}", world_size=2).parallel.dp == 1


def test_flags_win_over_the_file(write):
    path = write("model: {preset: 125m, num_layers: 4}\ntrain: {lr: 1e-3, steps: 50}")
    config = config_of(f"--config {path} --steps 70 --model_size 350m")
    assert config.train.steps == 70
    assert config.train.lr == 1e-3
    assert config.model.hidden_size == 1024
    assert config.model.num_layers == 4


@pytest.mark.parametrize(
    "flags",
    [
        "--tp 2 --tp_degree 4",
        "--tp_degree 2 --mp-degree 4",
        "--preset tiny --model_size 125m",
        "--dp 2 --set parallel.dp=4",
        "--set train.lr=1 --set train.lr=2",
        "--resume --resume never",
    ],
)
def test_contradictions_are_refused(flags):
    (problem,) = problems_of(flags)
    assert "must be given once, got --" in problem
    assert "keep one of them" in problem


def test_saying_it_twice_is_no_contradiction():
    assert config_of("--tp 2 --tp-degree 2 --set parallel.tp=2").parallel.tp == 2


def test_problems_of_file_and_flags_are_told_together(write):
    path = write("train: {lrr: 1, steps: x}")
    problems = problems_of(f"--config {path} --tp two --set model.depth=3 --dp 1 --dp 2")
    assert len(problems) == 5
    for words in ("train.lrr", "train.steps", "parallel.tp", "model.depth", "--dp 1 and --dp 2"):
        assert any(words in problem for problem in problems), words


def test_a_config_that_cannot_run_is_refused():
    problems = problems_of("--tp 3 --pp 9")
    assert {problem.split(" must ")[0] for problem in problems} == {
        "check: parallel.tp",
        "check: parallel.pp",
        "check: train.micro_batch_size",
    }


def test_flags_are_not_abbreviated(capsys):
    with pytest.raises(SystemExit) as refused:
        resolved("--step", "3")
    assert refused.value.code == 2
    assert "--step" in capsys.readouterr().err


def test_empty_names_are_refused():
    with pytest.raises(ConfigError, match="--run-dir must name a folder"):
        resolved("--run-dir", "")
    with pytest.raises(ConfigError, match="file must end in"):
        resolved("--config", "")


# --- resuming ------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path, write):
    saved = Config().with_overrides(["model.num_layers=6", "train.lr=1e-3", "parallel.dp=4"])
    write(saved.to_yaml(), "run/config.yaml")
    (tmp_path / "run/checkpoints/step_00000100").mkdir(parents=True)
    return tmp_path / "run"


def test_a_resumed_run_keeps_its_config(run_folder):
    by_folder, _ = resolved("--run-dir", str(run_folder), "--resume")
    by_step, _ = resolved("--resume", str(run_folder / "checkpoints/step_00000100"))
    for config in (by_folder, by_step):
        assert config.model.num_layers == 6
        assert config.train.lr == 1e-3
        assert config.parallel.dp == 4
    assert by_folder.checkpoint.resume == "auto"
    assert by_step.checkpoint.resume.endswith("step_00000100")


def test_a_resumed_run_takes_another_layout_and_longer(run_folder):
    words = ("--run-dir", str(run_folder), "--resume", "--steps", "900")
    config, _ = resolved(*words, world_size=2)
    assert config.parallel.dp == 2  # of this world, not of the one that wrote the folder
    assert config.train.steps == 900
    assert config.train.warmup_steps == 20
    config, _ = resolved(*words, "--dp", "1", "--tp", "2")
    assert (config.parallel.dp, config.parallel.tp) == (1, 2)


def test_a_config_file_wins_over_the_folder_of_the_run(run_folder, write):
    path = write("train: {lr: 1e-2}")
    config, _ = resolved("--run-dir", str(run_folder), "--resume", "--config", path)
    assert config.model.num_layers == 4
    assert config.train.lr == 1e-2


def test_a_new_run_takes_nothing_from_its_folder(run_folder):
    config, _ = resolved("--run-dir", str(run_folder))
    assert config == Config()


def test_resuming_where_nothing_ran_starts_from_the_defaults(tmp_path):
    config, _ = resolved("--run-dir", str(tmp_path / "new"), "--resume")
    assert config == Config().with_overrides(["checkpoint.resume=auto"])
