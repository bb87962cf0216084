"""The torchrun script that ``launch`` prints, run: killed, stopped, diverging, refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import PATIENCE_S

from mcp_parallel.cli.main import main
from mcp_parallel.errors import BAD_CONFIG, DIVERGED, OK, STOPPED

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parent.parent
# Two ranks, a model that takes a hundredth of a second a step, a checkpoint each tenth step.
SMALL = ["--preset", "tiny", "--dp", "2", "--steps", "300", "--batch-size", "4"]
SMALL += ["--micro-batch-size", "2", "--set", "model.num_layers=1", "--set", "model.seq_len=32"]
SMALL += ["--set", "checkpoint.every=10"]
JOB = ["--ranks-per-node", "2", "--max-restarts", "2", "--grace", "60", "--timeout", "60"]


def script_of(tmp_path, *flags):
    path = tmp_path / "job.sh"
    words = ["launch", "torchrun", *flags, *JOB, "--run-dir", str(tmp_path / "run")]
    assert main([*words, "--out", str(path), "--force"]) == OK
    return path


def started(tmp_path, script):
    environ = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY)}
    environ |= {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("a") as log:
        return subprocess.Popen(
            ["bash", str(script)], env=environ, cwd=tmp_path, stdout=log, stderr=log
        )


def ended(tmp_path, job):
    try:
        return job.wait(PATIENCE_S)
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait()


def log_of(tmp_path):
    return (tmp_path / "log").read_text()


def records(folder):
    file = folder / "metrics.jsonl"
    rows = file.read_text().splitlines() if file.exists() else []
    found = {}
    for row in rows:
        if row.endswith("}"):  # the last one may be in the making
            record = json.loads(row)
            found[record["step"]] = record["loss"]
    return found


def wait_for_step(tmp_path, job, step):
    deadline = time.monotonic() + PATIENCE_S
    while not any(done >= step for done in records(tmp_path / "run")):
        assert job.poll() is None, log_of(tmp_path)
        assert time.monotonic() < deadline, log_of(tmp_path)
        time.sleep(0.02)


def process(folder):
    """Parent and variables of a process, None when it is gone."""
    try:
        parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        return parent, (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return None


def rank_process(job, local_rank):
    """The process of a rank, among the descendants of ``job``."""
    folders = Path("/proc").glob("[0-9]*")
    known = {int(folder.name): found for folder in folders if (found := process(folder))}
    for pid, (parent, environ) in known.items():
        ancestors = []
        while parent in known:
            ancestors.append(parent)
            parent = known[parent][0]
        if job.pid in ancestors and f"LOCAL_RANK={local_rank}".encode() in environ:
            return pid
    raise AssertionError("no such rank")


def undisturbed(tmp_path):
    """Losses of the same run, started by this package itself."""
    folder = tmp_path / "alone"
    command = [sys.executable, "-m", "mcp_parallel", "train", *SMALL, "--run-dir", str(folder)]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == OK, done.stderr
    return records(folder)


def test_a_killed_rank_and_a_stopped_job_go_on_to_the_same_losses(tmp_path):
    script = script_of(tmp_path, *SMALL)
    job = started(tmp_path, script)
    wait_for_step(tmp_path, job, 25)
    os.kill(rank_process(job, 1), signal.SIGKILL)
    wait_for_step(tmp_path, job, 60)
    log = log_of(tmp_path)
    assert "going on after step" in log, log
    # To the script, as Slurm, systemd and Kubernetes send it.
    job.send_signal(signal.SIGTERM)
    assert ended(tmp_path, job) == STOPPED, log_of(tmp_path)
    stopped_at = max(records(tmp_path / "run"))
    assert 60 <= stopped_at < 300
    job = started(tmp_path, script)
    assert ended(tmp_path, job) == OK, log_of(tmp_path)
    assert f"going on after step {stopped_at}:" in log_of(tmp_path)
    assert records(tmp_path / "run") == undisturbed(tmp_path)


def test_two_nodes_restart_together(tmp_path):
    """Two agents, a rank each, meet by the c10d rendezvous; both start anew when one rank dies."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = f"127.0.0.1:{server.getsockname()[1]}"
    words = ["launch", "torchrun", *SMALL, "--nodes", "2", "--ranks-per-node", "1"]
    words += ["--timeout", "60", "--run-dir", str(tmp_path / "run"), "--master", master]
    script = tmp_path / "job.sh"
    assert main([*words, "--out", str(script)]) == OK
    nodes = [started(tmp_path, script) for _ in range(2)]
    try:
        wait_for_step(tmp_path, nodes[0], 25)
        os.kill(rank_process(nodes[1], 0), signal.SIGKILL)
        assert [ended(tmp_path, node) for node in nodes] == [OK, OK], log_of(tmp_path)
    finally:
        for node in nodes:
            node.terminate()  # or torchrun would stay
            node.wait()
    assert starts(tmp_path) == 2
    assert records(tmp_path / "run") == undisturbed(tmp_path)


def starts(tmp_path):
    """How often ranks were started, by rank 0's first line."""
    return log_of(tmp_path).count("steps on 2 ranks")


def test_a_divergence_ends_with_3_and_is_not_tried_again(tmp_path):
    exploding = ["--set", "train.lr=2.0", "--set", "train.weight_decay=2.0"]
    exploding += ["--set", "train.warmup_steps=0"]
    job = started(tmp_path, script_of(tmp_path, *SMALL, *exploding))
    assert ended(tmp_path, job) == DIVERGED, log_of(tmp_path)
    assert starts(tmp_path) == 1
    assert "is not finite" in log_of(tmp_path) or "diverged" in log_of(tmp_path).lower()


def test_a_run_that_cannot_go_on_ends_with_2_and_is_not_tried_again(tmp_path):
    damaged = tmp_path / "run" / "checkpoints" / "step_00000010"
    damaged.mkdir(parents=True)
    (damaged / "manifest.json").write_text("{}")
    job = started(tmp_path, script_of(tmp_path, *SMALL))
    assert ended(tmp_path, job) == BAD_CONFIG, log_of(tmp_path)
    assert log_of(tmp_path).count("must find a whole checkpoint") == 1
    assert starts(tmp_path) == 0


def test_a_config_that_the_nodes_cannot_run_ends_before_torchrun(tmp_path):
    script = script_of(tmp_path, *SMALL)
    text = script.read_text().replace("--set parallel.dp=2", "--set parallel.dp=3")
    script.write_text(text)
    job = started(tmp_path, script)
    assert ended(tmp_path, job) == BAD_CONFIG, log_of(tmp_path)
    assert "make dp * tp * pp * cp the number of ranks, 2" in log_of(tmp_path)
    assert "torch.distributed" not in log_of(tmp_path)
