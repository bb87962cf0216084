"""Jobs for other launchers: the config they carry, and that their launchers take them."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_parallel.cli.arguments import add_run_arguments, resolve_arguments
from mcp_parallel.cli.main import main
from mcp_parallel.config import Config
from mcp_parallel.errors import BAD_CONFIG, DIVERGED, FAILED, OK, STOPPED, ConfigError
from mcp_parallel.launch.jobs import RENDERERS, Job
from mcp_parallel.launch.jobs.job import config_words
from mcp_parallel.launch.variables import settled_status, wanted_timeout_s

REPOSITORY = Path(__file__).parent.parent


def job_of(nodes=2, per_node=8, **changes):
    config = Config().with_overrides([f"parallel.dp={nodes * per_node}"])
    given = {"on_gpus": True, "name": "a-job", "run_dir": "/data/runs/a job"}
    return Job(config=config, nodes=nodes, ranks_per_node=per_node, **{**given, **changes})


SIZES = "model.preset=null model.num_layers=3 model.hidden_size=64 model.num_heads=4 "
SIZES += "model.num_kv_heads=2 model.ffn_size=96 model.vocab_size=300 model.seq_len=64"

# --- the config that travels ---------------------------------------------------------------------


def resolved(words):
    parser = ArgumentParser()
    add_run_arguments(parser)
    return resolve_arguments(parser.parse_args(words))[0]


@pytest.mark.parametrize(
    "changes",
    [
        "",
        "train.lr=0.5",  # min_lr follows from it
        "train.lr=0.5 train.min_lr=3e-4",  # does not, and is the default
        "train.steps=5 train.warmup_steps=5",
        "train.optimizer=onebit_adam train.freeze_step=50",
        SIZES,
        "amp.enabled=true",
        "amp.enabled=true amp.dtype=fp16",
        "train.precision=bf16",
        "checkpoint.every=7 parallel.rank_order=pp-dp-cp-tp",
        "parallel.sequence_parallel=false data.seed=3",
    ],
)
def test_flags_say_a_config_whole(changes):
    config = Config().with_overrides(changes.split())
    assert resolved(config_words(config)) == config


@pytest.mark.parametrize("preset", ["125m", "7b", "vit-digits"])
def test_flags_start_from_the_preset(preset):
    config = Config.from_mapping({"model": {"preset": preset}})
    assert config_words(config) == ["--preset", preset]
    changed = config.with_overrides(["train.steps=3", "model.num_layers=2"])
    assert resolved(config_words(changed)) == changed
    assert len(config_words(changed)) < 12


def test_where_to_go_on_from_does_not_travel():
    config = Config().with_overrides(["checkpoint.resume=auto"])
    assert resolved(config_words(config)).checkpoint.resume == "never"
    job = job_of()
    assert job.train_words()[-3:] == ["--run-dir", "/data/runs/a job", "--resume"]


# --- scripts -------------------------------------------------------------------------------------


def parses(script):
    return subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)


awkward = st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1, max_size=30)


@given(folder=awkward, file=awkward)
@settings(deadline=None, max_examples=20)
def test_a_script_keeps_any_name_as_one_word(folder, file):
    job = job_of(nodes=1, run_dir=folder, env_file=file)
    script = RENDERERS["torchrun"](job)
    array = script[script.index("train=(") : script.index("# A config that cannot")]
    ask = "printf '%s\\0' \"${train[@]}\""
    done = subprocess.run(["bash", "-c", f"{array}\n{ask}"], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == job.train_words()
    assert shlex.quote(file) in script


def test_no_name_ends_the_script_of_a_node_early(tmp_path):
    """It stands in a here-document of the Slurm script, which a line in it could end."""
    folder = f"runs\nEND_OF_NODE_SCRIPT\ntouch {tmp_path}/made\nEND_OF_NODE_SCRIPT_\n"
    script = RENDERERS["slurm"](job_of(run_dir=folder))
    kept = script[script.index("read -r -d") : script.index("\nsrun ")]
    words = ["bash", "-c", f"{kept}\nprintf '%s' \"$node\""]
    done = subprocess.run(words, capture_output=True, check=True)
    assert folder in done.stdout.decode()
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("nodes", (1, 2))
@pytest.mark.parametrize("on_gpus", (True, False))
def test_scripts_are_bash(nodes, on_gpus):
    for kind in ("torchrun", "slurm"):
        script = RENDERERS[kind](job_of(nodes=nodes, on_gpus=on_gpus, env_file="my env.sh"))
        assert script.startswith("#!/usr/bin/env bash\n")
        done = parses(script)
        assert done.returncode == 0, done.stderr
        assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in script
        assert f"MCP_DEVICE={'cuda' if on_gpus else 'cpu'}" in script


def torchrun_words(script, **environ):
    """The words that ``python -m torch.distributed.run`` is given, as bash makes them."""
    line = re.search(r'"\$python" -m torch\.distributed\.run.*?&$', script, re.S | re.M)
    assert line is not None
    command = line.group().removesuffix("&").replace('"$python"', "printf '%s\\n'")
    done = subprocess.run(
        ["bash", "-c", f"train=(--preset tiny)\nis_host=1\n{command}"],
        env={"PATH": os.environ["PATH"], **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[2:]


def blocks_of(value):
    """Every text in a tree of YAML."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in inner for text in blocks_of(item)]


@pytest.mark.parametrize("kind", RENDERERS)
@pytest.mark.parametrize("nodes", (1, 4))
def test_torchrun_itself_takes_the_line(kind, nodes):
    from torch.distributed.run import get_args_parser

    job = job_of(nodes=nodes, numa=True, max_restarts=5, timeout_s=60, monitor_interval_s=0.5)
    text = RENDERERS[kind](job)
    if kind.startswith("kubernetes"):
        # The script is a block of the YAML, one level deep in each pod.
        text = next(arg for arg in blocks_of(list(yaml.safe_load_all(text))) if "torch.dist" in arg)
    environ = {"MASTER": "head:29500", "PET_MASTER_ADDR": "head", "PET_MASTER_PORT": "29500"}
    environ |= {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    args = get_args_parser().parse_args(torchrun_words(text, **environ))
    assert (args.nproc_per_node, args.max_restarts, args.monitor_interval) == ("8", 5, 0.5)
    assert (args.module, args.training_script) == (True, "mcp_parallel.train")
    assert args.training_script_args == ["--preset", "tiny"]
    assert args.numa_binding == "node"
    assert args.standalone == (nodes == 1)
    if nodes > 1:
        assert (args.nnodes, args.rdzv_backend, args.rdzv_id) == ("4", "c10d", "a-job")
        assert args.rdzv_endpoint == "head:29500"
        assert "join_timeout=900" in args.rdzv_conf
        assert ("is_host=1" in args.rdzv_conf) == (kind != "torchrun")
    assert "export MCP_TIMEOUT_S=60" in text


def test_several_nodes_need_to_know_where_to_meet():
    head = "\n".join(RENDERERS["torchrun"](job_of()).splitlines()[:3])
    done = subprocess.run(["bash", "-c", head], capture_output=True, text=True, env={})
    assert done.returncode != 0
    assert "set MASTER to HOST:PORT" in done.stderr
    named = "\n".join(RENDERERS["torchrun"](job_of(master="node0")).splitlines()[:3])
    done = subprocess.run(
        ["bash", "-c", f"{named}\necho $MASTER"], capture_output=True, text=True, env={}
    )
    assert done.stdout == "node0:29500\n"


# What sbatch takes, of its manual page; a word that it does not know ends the submission.
SBATCH_OPTIONS = {
    "account",
    "cpus-per-task",
    "exclusive",
    "gpus-per-node",
    "job-name",
    "mem",
    "nodes",
    "ntasks-per-node",
    "open-mode",
    "output",
    "partition",
    "requeue",
    "signal",
    "time",
}


def sbatch_options(script):
    """What sbatch reads: lines of #SBATCH before the first command."""
    lines = script.splitlines()[1:]
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    words = [line.removeprefix("#SBATCH --") for line in lines[:first]]
    assert not any("#SBATCH" in line for line in lines[first:])
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def test_sbatch_takes_the_file():
    job = job_of(cpus_per_node=96, memory="900Gi", partition="gpu", account="me", grace_s=120)
    options = sbatch_options(RENDERERS["slurm"](job))
    assert set(options) <= SBATCH_OPTIONS
    assert options["nodes"] == "2"
    assert options["ntasks-per-node"] == "1"  # torchrun starts the ranks
    assert options["gpus-per-node"] == "8"
    assert options["signal"] == "TERM@120"  # to the steps, long enough before the end
    assert options["mem"] == "900G"
    assert (options["requeue"], options["open-mode"]) == ("", "append")
    assert "gpus-per-node" not in sbatch_options(RENDERERS["slurm"](job_of(on_gpus=False)))


@pytest.mark.parametrize(
    "status, restarts, requeued, ends",
    [
        (OK, 0, False, OK),
        (BAD_CONFIG, 0, False, BAD_CONFIG),
        (DIVERGED, 0, False, DIVERGED),
        (STOPPED, 99, True, OK),  # out of time is no failure: it may happen any number of times
        (FAILED, 2, True, OK),
        (FAILED, 3, False, FAILED),
    ],
)
def test_a_slurm_job_is_requeued_when_that_is_of_use(tmp_path, status, restarts, requeued, ends):
    for name, code in (("srun", f"exit {status}"), ("scontrol", f'echo "$*" >> {tmp_path}/told')):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\n{code}\n")
        tool.chmod(0o755)
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]"}
    environ |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_RESTART_COUNT": str(restarts)}
    script = RENDERERS["slurm"](job_of())
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True)
    assert done.returncode == ends, done.stderr
    told = (tmp_path / "told").read_text().splitlines()
    assert ("requeue 7" in told) == requeued


# --- the command ---------------------------------------------------------------------------------


def test_the_command_checks_for_the_nodes_and_prints(capsys, tmp_path):
    flags = ["--preset", "tiny", "--tp", "4", "--gpus-per-node", "4", "--nodes", "2"]
    assert main(["launch", "torchrun", *flags]) == OK
    text = capsys.readouterr().out
    assert "--set parallel.dp=2" in text  # what tp leaves of 8 ranks
    assert "--world-size 8" in text
    path = tmp_path / "job.sh"
    assert main(["launch", "torchrun", *flags, "--out", str(path)]) == OK
    assert capsys.readouterr().out == f"{path}: on each node: bash {path}\n"
    assert path.read_text() == text
    assert main(["launch", "slurm", *flags, "--out", str(path)]) == BAD_CONFIG
    assert "choose another, or add --force" in capsys.readouterr().err
    assert main(["launch", "slurm", *flags, "--out", str(path), "--force", "--json"]) == OK
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["text"]) == ("slurm", path.read_text())
    assert told["config"]["parallel"]["dp"] == 2


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--tp 4 --gpus-per-node 2 --nodes 2", "keep each group of neighbouring ranks on one host"),
        ("--tp 3 --gpus-per-node 3", "parallel.tp must divide num_heads"),
        ("--nodes 2", "got neither; write for example --gpus-per-node 8"),
        ("--gpus-per-node 2 --ranks-per-node 2", "got both"),
        ("--gpus-per-node 0", "--gpus-per-node must be a number of at least 1, got '0'"),
        ("--gpus-per-node 1 --nodes x", "--nodes must be a number of at least 1, got 'x'"),
        ("--gpus-per-node 1 --name A_b", "--name must be a lower-case word"),
        ("--gpus-per-node 1 --time soon", "--time must be a time such as 24:00:00"),
        ("--gpus-per-node 1 --partition $(x)", "--partition must be one plain word"),
        ("--gpus-per-node 1 --python 'x\";y'", "--python must be one plain word"),
        ("--gpus-per-node 1 --set parallel=auto", "and use --plan plan.json"),
        ("--gpus-per-node 1 --memory 9GB", "--memory must be a size such as 512Gi"),
        ("--gpus-per-node 1 --plan none.json", "--plan must be what `mcp-parallel plan --json`"),
    ],
)
def test_bad_jobs_are_refused(flags, message, capsys):
    assert main(["launch", "slurm", "--preset", "tiny", *shlex.split(flags)]) == BAD_CONFIG
    assert message in capsys.readouterr().err


def test_a_layout_of_a_plan_becomes_the_job(capsys, tmp_path):
    first = {"dp": 1, "tp": 2, "pp": 2, "cp": 1, "zero": 0, "step_time_s": 1.5}
    second = {**first, "dp": 2, "tp": 2, "pp": 1, "zero": 1, "micro_batch_size": 2}
    second |= {"virtual_stages": 1, "activation_checkpointing": "full"}
    plan = tmp_path / "plan.json"
    job = {"ranks": 4, "global_batch_size": 32, "seq_len": 64, "precision": "bf16"}
    plan.write_text(json.dumps({"job": job, "layouts": [first, second], "refused": []}))
    flags = ["launch", "slurm", "--gpus-per-node", "4", "--plan", str(plan), "--json"]
    assert main(flags) == OK
    config = json.loads(capsys.readouterr().out)["config"]
    parallel, train = config["parallel"], config["train"]
    assert (parallel["dp"], parallel["tp"], parallel["pp"]) == (1, 2, 2)
    assert (train["global_batch_size"], train["precision"]) == (32, "bf16")
    assert config["model"]["seq_len"] == 64
    assert main([*flags, "--plan-row", "2"]) == OK
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["parallel"]["zero"], config["train"]["micro_batch_size"]) == (1, 2)
    assert config["memory"]["activation_checkpointing"] == "full"
    for row, told in (("0", "got ValueError: 2 layouts"), ("3", "2 layouts"), ("x", "got Value")):
        assert main([*flags, "--plan-row", row]) == BAD_CONFIG
        assert told in capsys.readouterr().out
    assert main([*flags, "--tp", "4"]) == BAD_CONFIG
    assert "parallel.tp must be given once" in capsys.readouterr().out


def test_the_plan_of_the_planner_becomes_a_job(capsys, monkeypatch):
    """``plan --json | launch --plan -``."""
    assert main(["plan", "--preset", "7b", "--gpus", "16", "--gpu", "h100", "--json"]) == OK
    plan = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO(plan))
    layout = json.loads(plan)["layouts"][1]
    flags = ["--preset", "7b", "--nodes", "2", "--gpus-per-node", "8", "--plan-row", "2"]
    assert main(["launch", "kubernetes-trainer", *flags, "--plan", "-", "--json"]) == OK
    config = json.loads(capsys.readouterr().out)["config"]
    for key in ("dp", "tp", "pp", "cp", "zero", "schedule", "rank_order"):
        assert config["parallel"][key] == layout[key]
    assert config["train"]["micro_batch_size"] == layout["micro_batch_size"]


def test_printing_a_job_needs_no_torch():
    code = (
        "import sys; from mcp_parallel.cli.main import main; "
        "main(['launch', 'kubernetes-trainer', '--gpus-per-node', '1']); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True)
    assert done.returncode == 0, done.stderr


# --- what ranks tell the script ------------------------------------------------------------------

RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1", "LOCAL_RANK": "0"}
RANK |= {"TORCHELASTIC_RUN_ID": "x"}


def test_ranks_of_torchrun_leave_a_status_that_a_restart_would_not_change(tmp_path):
    file = tmp_path / "status"
    environ = {**RANK, "MCP_EXIT_FILE": str(file)}
    for status in (OK, FAILED):
        assert settled_status(status, environ) == status
        assert not file.exists()
    for status in (BAD_CONFIG, DIVERGED, STOPPED):
        assert settled_status(status, RANK) == status  # nobody reads it: torchrun's own way
        assert settled_status(status, environ) == OK
        assert file.read_text() == f"{status}\n"
    assert settled_status(DIVERGED, {"MCP_EXIT_FILE": str(file)}) == DIVERGED  # no rank of torchrun


def test_a_refused_rank_burns_no_restart(tmp_path):
    file = tmp_path / "status"
    environ = {**os.environ, **RANK, "MCP_EXIT_FILE": str(file), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "mcp_parallel.train", "--tp", "3"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == OK
    assert file.read_text() == f"{BAD_CONFIG}\n"
    assert "parallel.tp must divide num_heads" in done.stderr


def test_how_long_a_rank_waits():
    assert wanted_timeout_s({}) == 120.0
    assert wanted_timeout_s({"MCP_TIMEOUT_S": "7.5"}) == 7.5
    for text in ("0", "-1", "nan", "inf", "soon"):
        with pytest.raises(ConfigError, match="MCP_TIMEOUT_S must be a number of seconds above 0"):
            wanted_timeout_s({"MCP_TIMEOUT_S": text})
