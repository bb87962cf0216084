"""The command line as a user meets it: commands, refusals, a run, its resumption, torchrun."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import PATIENCE_S

from mcp_parallel.cli import doctor, main, train
from mcp_parallel.cli.arguments import RunOptions
from mcp_parallel.config import Config
from mcp_parallel.errors import ConfigError
from mcp_parallel.launch.context import RankContext
from mcp_parallel.launch.start import choose_folder, find_start
from mcp_parallel.monitor.run_folder import RunFolder

REPOSITORY = Path(__file__).parent.parent

# Small enough for a step in a few milliseconds; two layers so that two stages are possible.
SMALL = [
    f"--set=model.{size}"
    for size in (
        "num_layers=2",
        "hidden_size=32",
        "num_heads=4",
        "num_kv_heads=2",
        "ffn_size=64",
        "seq_len=32",
    )
]
SMALL += ["--set=train.global_batch_size=8", "--set=train.micro_batch_size=2"]
# Takes longer to import than these runs take to train.
NO_EVENTS = "--set=monitor.tensorboard=false"


def environ(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **variables}


def start(*words: str, cwd: Path | None = None, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mcp_parallel", *words],
        env=environ(**variables),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    return process.returncode, out, err


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def step_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# ---------------------------------------------------------------- main


def test_finding_a_command_imports_no_torch():
    code = "import sys, mcp_parallel.cli.main, mcp_parallel.train; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environ(), capture_output=True, text=True
    )
    assert result.stdout == "False\n", result.stderr


@pytest.mark.parametrize(
    "word, hint",
    [
        ("trian", "did you mean train?"),
        ("doctr", "did you mean doctor?"),
        ("xyzzy", "see mcp-parallel --help"),
    ],
)
def test_an_unknown_command_names_the_nearest(capsys, word, hint):
    assert main.main([word, "--dp", "2"]) == 2
    assert capsys.readouterr().err == (
        "mcp-parallel: COMMAND must be one of train, check, parity, plan, data, doctor, generate, "
        f"report, launch, got '{word}'; {hint}\n"
    )


def test_help_version_and_nothing(capsys):
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mcp-parallel ")
    assert main.main(["train", "--help"]) == 0
    assert "--run-dir" in capsys.readouterr().out
    assert main.main([]) == 2
    assert "COMMAND" in capsys.readouterr().out
    assert main.main(["train", "--no-such-flag"]) == 2
    assert "--no-such-flag" in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_refused_config_is_told_in_full_and_exits_with_2(monkeypatch, capsys, as_json):
    def refuse(args):
        raise ConfigError(["first problem", "second problem"])

    monkeypatch.setattr(doctor, "run", refuse)
    assert main.main(["doctor"] + ["--json"] * as_json) == 2
    out, err = capsys.readouterr()
    if as_json:
        assert json.loads(out) == {
            "ok": False,
            "problems": ["first problem", "second problem"],
            "layouts": [],
        }
    else:
        assert (out, err) == ("", "first problem\nsecond problem\n")


def test_ctrl_c_before_the_ranks_start_is_quiet(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupt)
    assert main.main(["doctor"]) == 4
    assert capsys.readouterr() == ("", "")


# ---------------------------------------------------------------- a run and what comes after


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, str]:
    """A finished run of 4 steps in a folder with spaces and accents, on an ASCII terminal."""
    folder = tmp_path_factory.mktemp("runs") / "mod\u00e8le d'\u00e9t\u00e9"
    code, out, err = finish(
        start(
            *("train", *SMALL, "--dp=2", "--steps=4", "--run-dir", str(folder)),
            PYTHONIOENCODING="ascii",
            LC_ALL="C",
        )
    )
    assert (code, err) == (0, "")
    return folder, out


@pytest.fixture
def copied(trained, tmp_path) -> Path:
    """A copy of the finished run, to be changed."""
    return shutil.copytree(trained[0], tmp_path / "copy")


def test_a_run_leaves_its_folder_and_says_what_comes_next(trained):
    folder, out = trained
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4]
    assert rows(folder)[-1]["tokens"] == 4 * 8 * 32
    assert step_names(folder) == ["step_00000004"]
    config = Config.from_file(folder / "config.yaml")
    assert (config.parallel.dp, config.train.steps, config.model.hidden_size) == (2, 4, 32)
    assert len(list((folder / "tensorboard").iterdir())) == 1
    lines = out.splitlines()
    assert lines[0].startswith("tiny, 4 steps on 2 ranks: dp 2 x tp 1 x pp 1")
    assert [line.split()[1] for line in lines if line.startswith("step ")] == [
        f"{step}/4" for step in range(1, 5)
    ]
    assert out.isascii()
    assert "mod\\xe8le d" in out  # the accent, as an ASCII terminal can show it
    assert lines[-1].startswith("next: mcp-parallel generate ")


def test_a_folder_with_a_run_is_refused_unless_resumed(trained, capsys):
    folder, _ = trained
    before = rows(folder)
    assert main.main(["train", *SMALL, "--run-dir", str(folder)]) == 2
    assert "add --resume to go on with it" in capsys.readouterr().err
    assert rows(folder) == before


def test_a_finished_run_ends_at_once(copied, capsys):
    before = (copied / "metrics.jsonl").read_bytes()
    assert main.main(["train", "--resume", "--run-dir", str(copied)]) == 0
    assert "nothing to do: 4 of 4 steps are done" in capsys.readouterr().out
    assert (copied / "metrics.jsonl").read_bytes() == before


def test_a_run_goes_on_in_another_layout_and_answers_programs(copied):
    first = rows(copied)
    words = ("train", "--resume", "--run-dir", str(copied), "--json")
    code, out, err = finish(start(*words, "--steps=6", "--dp=1", "--pp=2", NO_EVENTS))
    assert code == 0, err
    assert [row["step"] for row in rows(copied)] == [1, 2, 3, 4, 5, 6]
    assert rows(copied)[:4] == first
    assert rows(copied)[-1]["tokens"] == 6 * 8 * 32
    assert Config.from_file(copied / "config.yaml").parallel.pp == 2
    assert json.loads(out) == {"status": 0, "run_dir": str(copied), "last": rows(copied)[-1]}
    assert "step 6/6" in err  # progress is for people, and stdout is not


def test_resuming_from_a_run_folder_names_the_flag_that_does_so(copied, tmp_path, capsys):
    fresh = ["--steps=6", "--run-dir", str(tmp_path / "fresh")]
    assert main.main(["train", f"--resume={copied}", *fresh]) == 2
    err = capsys.readouterr().err
    assert err.startswith("train: --resume must be a checkpoint, as in RUN/checkpoints/step_")
    assert f"got the run folder '{copied}'; use --resume without a path and --run-dir" in err
    assert main.main(["train", f"--resume={tmp_path}", *fresh]) == 2
    assert (
        f"got '{tmp_path}' without manifest.json; use --resume without" in capsys.readouterr().err
    )


def test_a_damaged_or_foreign_checkpoint_is_refused_before_any_rank_starts(copied, capsys):
    step = copied / "checkpoints" / "step_00000004"
    fresh = str(copied.parent / "fresh")
    other_model = ["--set=model.ffn_size=128", f"--resume={step}", "--run-dir", fresh]
    assert main.main(["train", "--steps=6", *other_model]) == 2
    assert "--resume must take a checkpoint of this model" in capsys.readouterr().err
    shard = next(step.glob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-5] ^= 1
    shard.write_bytes(damaged)
    assert main.main(["train", "--steps=6", f"--resume={step}", "--run-dir", fresh]) == 2
    err = capsys.readouterr().err
    assert shard.name in err
    assert "damaged" in err


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over(copied, capsys):
    before = (copied / "metrics.jsonl").read_bytes()
    for manifest in copied.glob("checkpoints/step_*/manifest.json"):
        manifest.write_text("{}")
    assert main.main(["train", "--resume", "--run-dir", str(copied), "--steps=6"]) == 2
    err = capsys.readouterr().err
    assert "must find a whole checkpoint" in err
    assert "step_00000004" in err
    assert (copied / "metrics.jsonl").read_bytes() == before


def test_a_second_run_in_the_same_folder_is_refused(copied, capsys):
    with RunFolder(copied).lock():
        assert main.main(["train", "--resume", "--run-dir", str(copied), "--steps=6"]) == 2
    assert "that no other run is using" in capsys.readouterr().err


def test_the_folder_to_resume_must_be_named_and_the_checkpoint_be_its_newest(copied):
    resume = Config().with_overrides(["checkpoint.resume=auto"])
    with pytest.raises(ConfigError, match="--resume must come with the folder of the run"):
        choose_folder(resume, None)
    assert choose_folder(resume, copied).path == copied
    step = copied / "checkpoints" / "step_00000004"
    config = Config.from_file(copied / "config.yaml")
    by_path = config.with_overrides([f"checkpoint.resume={step}"])
    assert choose_folder(by_path, copied).path == copied
    assert find_start(by_path, RunFolder(copied)).step == 4
    other = shutil.copytree(copied, copied.parent / "other")
    with pytest.raises(ConfigError, match="--run-dir must be a folder without a run"):
        choose_folder(by_path, other)
    (step.parent / "step_00000009").mkdir()
    with pytest.raises(ConfigError, match="got step 4 beside step 9"):
        find_start(by_path, RunFolder(copied))


def test_a_run_that_is_interrupted_saves_and_goes_on_where_it_was(tmp_path):
    folder = tmp_path / "run"
    words = ("train", *SMALL, NO_EVENTS, "--run-dir", str(folder))
    process = start(*words, "--tp=2", "--steps=100000")
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / "metrics.jsonl").exists() or len(rows(folder)) < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None, finish(process)
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 4, err
    done = rows(folder)[-1]["step"]
    assert step_names(folder)[-1] == f"step_{done:08d}"  # nothing is lost
    assert f"stopped, checkpoint written: {done} of 100000 steps" in out
    code, _, err = finish(
        start("train", "--resume", "--run-dir", str(folder), f"--steps={done + 1}")
    )
    assert code == 0, err
    assert [row["step"] for row in rows(folder)] == list(range(1, done + 2))


@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_run_stopped_before_its_first_step_leaves_its_folder_free(tmp_path, capsys, has_stepped):
    folder = RunFolder(tmp_path)

    def interrupted():
        with train._opened_run(Config(), RunOptions(run_dir=tmp_path, as_json=False)):
            assert folder.holds_run()
            folder.metrics_file.write_text('{"step": 1}\n' if has_stepped else "")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert folder.holds_run() == has_stepped
    assert folder.config_file.exists() == has_stepped
    assert ("nothing was saved" in capsys.readouterr().err) == (not has_stepped)


# ---------------------------------------------------------------- torchrun


def test_the_classic_torchrun_line_trains(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "mcp_parallel.train", "--model_size", "tiny", "--batch_size", "8"]
    command += ["--micro_batch_size", "2", "--pp_degree", "2", "--use_flash_attn"]
    command += ["--gradient_checkpointing", "--steps", "2", "--json", *SMALL[:-2], NO_EVENTS]
    result = subprocess.run(
        command, env=environ(), cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert [row["step"] for row in rows(folder)] == [1, 2]
    assert step_names(folder) == ["step_00000002"]
    assert result.stderr.count("step 2/2") == 1  # one rank speaks
    assert json.loads(result.stdout)["last"] == rows(folder)[-1]


def test_rank_0_of_torchrun_refuses_for_all(copied):
    store, options = dist.HashStore(), RunOptions(run_dir=copied, as_json=False)

    def context(rank: int) -> RankContext:
        device = torch.device("cpu")
        return RankContext(rank=rank, world_size=2, local_rank=rank, device=device, store=store)

    new_run = Config.from_file(copied / "config.yaml")
    with pytest.raises(ConfigError, match="--run-dir must be a folder without a run"):
        train._be_a_rank(new_run, options, context(0))
    assert train._be_a_rank(new_run, options, context(1)) == 2
    finished = new_run.with_overrides(["checkpoint.resume=auto"])
    assert train._be_a_rank(finished, options, context(0)) == 0
    assert train._be_a_rank(finished, options, context(1)) == 0


def test_a_job_that_torchrun_restarts_goes_on_in_its_own_folder(copied):
    jobs = dist.HashStore()

    def restart(attempt: int, run: Config) -> int:
        context = RankContext(
            rank=0,
            world_size=1,
            local_rank=0,
            device=torch.device("cpu"),
            store=dist.PrefixStore(f"attempt{attempt}", jobs),
            job_store=dist.PrefixStore("job", jobs),
        )
        return train._be_a_rank(run, RunOptions(run_dir=copied, as_json=False), context)

    new_run = Config.from_file(copied / "config.yaml")
    with pytest.raises(ConfigError, match="--run-dir must be a folder without a run"):
        restart(1, new_run)
    with pytest.raises(ConfigError):  # refused at first, hence not this job's folder now
        restart(2, new_run)
    assert restart(3, new_run.with_overrides(["checkpoint.resume=auto"])) == 0
    assert restart(4, new_run) == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_under_torchrun_rank_0_alone_says_what_is_wrong(monkeypatch, capsys, rank):
    slept: list[float] = []
    monkeypatch.setattr(train.time, "sleep", slept.append)
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in {**variables, "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    assert main.main(["train", "--tp=3"]) == 2
    assert (capsys.readouterr().err == "") == (rank == 1)
    assert len(slept) == rank  # or torchrun would end rank 0 before it has spoken


def test_a_data_path_is_kept_absolute_so_that_any_directory_can_resume(tmp_path, monkeypatch):
    from dataclasses import replace

    from mcp_parallel.cli.train import _anchored
    from mcp_parallel.config import Config

    monkeypatch.chdir(tmp_path)
    config = Config()
    assert _anchored(config) == config
    relative = replace(config, data=replace(config.data, path="text/a.txt"))
    assert _anchored(relative).data.path == str(tmp_path / "text" / "a.txt")
