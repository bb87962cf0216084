"""The doctor: each kind of trouble is found, and a healthy machine gets a clean bill."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mcp_parallel.cli import doctor as command
from mcp_parallel.doctor import Finding, devices, examine, machine, network, settings, software

REPOSITORY = Path(__file__).parent.parent


def by_topic(findings) -> dict[str, Finding]:
    return {finding.topic: finding for finding in findings}


def test_this_machine_can_train_and_every_area_is_looked_at():
    findings = examine()
    assert [finding for finding in findings if finding.status == "problem"] == []
    topics = {finding.topic for finding in findings}
    areas = {"python", "torch", "kernels _C", "gloo", "nccl", "mpi", "safetensors", "CUDA"}
    areas |= {"cores", "threads", "open files", "locked memory", "loopback", "interface"}
    assert areas - topics <= {"CUDA"}  # with devices there is cuda:0 in its place
    for finding in findings:
        assert finding.advice or finding.status == "ok", f"what to do about {finding.topic}?"


@pytest.mark.parametrize(
    "version, status",
    [
        (None, "problem"),
        ("2.9.1", "problem"),
        ("2.10.0", "ok"),
        ("2.13.0+cpu", "ok"),
        ("3.0.0.dev1", "ok"),
    ],
)
def test_torch_has_a_floor(version, status):
    assert software.torch_finding(version).status == status


def test_a_package_that_training_needs_is_a_problem_and_another_a_note():
    assert software.package_finding("safetensors", None, None).status == "problem"
    finding = software.package_finding("tensorboard", None, "metrics go to metrics.jsonl only")
    assert finding.status == "note"
    assert "pip install tensorboard" in finding.advice
    assert software.package_finding("triton", "3.6.0", "x").status == "ok"


CPUINFO = """\
processor\t: 0
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu avx2 fma avx512f avx512_bf16 sse2

processor\t: 1
physical id\t: 0
core id\t\t: 0

processor\t: 2
physical id\t: 1
core id\t\t: 0
"""


def test_cores_and_features_are_read_from_cpuinfo():
    assert machine.physical_cores(CPUINFO) == 2  # two threads of one core, one core elsewhere
    assert machine.cpu_features(CPUINFO) == ["avx2", "fma", "avx512f", "avx512_bf16"]
    assert machine.physical_cores("") is None
    assert machine.cpu_features("nothing : here") == []


@pytest.mark.parametrize(
    "environ, topic_status",
    [
        ({}, ["ok"]),
        ({"OMP_NUM_THREADS": "4"}, ["ok"]),
        ({"OMP_NUM_THREADS": "5"}, ["note"]),
        ({"OMP_NUM_THREADS": "all"}, ["note"]),
        ({"MKL_NUM_THREADS": "1"}, ["ok", "note"]),
        ({"OMP_PROC_BIND": "true"}, ["ok", "note"]),
        ({"OMP_PROC_BIND": "false"}, ["ok"]),
    ],
)
def test_thread_settings_are_judged_by_the_cores(environ, topic_status):
    findings = machine.thread_findings(environ, 4)
    assert [finding.status for finding in findings] == topic_status


def test_leftovers_in_shared_memory_are_named(tmp_path):
    before = list(machine.shm_findings(tmp_path))
    (tmp_path / "torch_123_456").touch()
    (tmp_path / "somebody-elses").touch()
    *others, leftovers = machine.shm_findings(tmp_path)
    assert [finding.topic for finding in others] == [finding.topic for finding in before]
    assert leftovers.value == "1 files of yours: torch_123_456"


@pytest.mark.parametrize(
    "modes, status",
    [
        ("always [madvise] never", "ok"),
        ("[always] madvise never", "ok"),
        ("always madvise [never]", "note"),
    ],
)
def test_huge_page_modes(modes, status):
    assert machine.huge_page_finding(modes).status == status


def test_an_interface_that_is_not_there_makes_training_impossible():
    assert network.interface_finding({"GLOO_SOCKET_IFNAME": "eth99"}).status == "problem"
    present = socket.if_nameindex()[0][1]
    assert network.interface_finding({"GLOO_SOCKET_IFNAME": present}).status == "ok"


def test_a_host_name_that_does_not_resolve_is_a_note(monkeypatch):
    monkeypatch.setattr(network, "resolve", lambda name: None)
    finding = network.interface_finding({})
    assert finding.status == "note"
    assert "GLOO_SOCKET_IFNAME" in finding.advice


@pytest.mark.parametrize(
    "address, status", [("127.0.0.1", "ok"), ("10.1.2.3", "ok"), ("8.8.8.8", "note")]
)
def test_a_public_master_address_is_warned_of(address, status):
    assert [finding.status for finding in network.master_findings({"MASTER_ADDR": address})] == [
        status
    ]


def test_launcher_variables():
    assert by_topic(network.launcher_findings({}))["launcher"].status == "ok"
    left = by_topic(network.launcher_findings({"SLURM_PROCID": "1", "RANK": "2", "HOME": "/"}))
    assert left["launcher"].status == "note"
    assert "SLURM_PROCID, RANK" in left["launcher"].value
    torchrun = dict.fromkeys(
        ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"), "1"
    )
    assert by_topic(network.launcher_findings(torchrun))["torchrun"].status == "note"
    torchrun["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    assert by_topic(network.launcher_findings(torchrun))["torchrun"].status == "ok"


@pytest.mark.parametrize(
    "name, value, status",
    [
        ("NCCL_P2P_DISABLE", "1", "note"),
        ("NCCL_P2P_DISABLE", "0", "ok"),
        ("NCCL_DEBUG", "INFO", "note"),
        ("NCCL_DEBUG", "WARN", "ok"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1", "note"),
        ("NCCL_ALGO", "Ring", "note"),
        ("NCCL_SOCKET_IFNAME", "eth99", "note"),
        ("NCCL_SOCKET_IFNAME", "^docker", "ok"),
        ("NCCL_SOCKET_IFNAME", "lo", "ok"),
        ("NCCL_SOCKET_IFNAME", "=l", "note"),
        ("CUDA_LAUNCH_BLOCKING", "1", "note"),
    ],
)
def test_settings_that_slow_or_break_runs(name, value, status):
    assert [finding.status for finding in settings.setting_findings({name: value})] == [status]
    assert list(settings.setting_findings({"PATH": "/bin"})) == []


@pytest.mark.parametrize(
    "environ, status",
    [
        ({}, "note"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "ok"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "note"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:1"}, "note"),
    ],
)
def test_allocator_settings(environ, status):
    assert devices.allocator_finding(environ).status == status


FINDINGS = [
    Finding("one", "ok", "fine"),
    Finding("two", "note", "caf\u00e9 " * 30, "do \u00e9 " * 30, "tea", "it is late"),
    Finding("three", "problem", "broken", "mend it", "whole", "it leaks"),
]


def test_the_table_is_ascii_fits_the_terminal_and_a_problem_is_exit_status_1(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setattr("mcp_parallel.doctor.examine", lambda: FINDINGS)
    assert command.run(argparse.Namespace(json=False, fix=None)) == 1
    out = capsys.readouterr().out
    assert out.isascii()
    assert "problem  three  broken" in out
    assert "wanted: whole; it leaks" in out
    assert "-> mend it" in out
    assert out.endswith("training is impossible here: 1 ok, 1 notes, 1 problems\n")
    # An escape is longer than the letter it stands for, hence wrapping before would not do.
    assert max(len(line) for line in out.splitlines()) <= 70
    monkeypatch.setattr("mcp_parallel.doctor.examine", lambda: FINDINGS[:2])
    assert command.run(argparse.Namespace(json=False, fix=None)) == 0


def test_json_is_for_programs(monkeypatch, capsys):
    monkeypatch.setattr("mcp_parallel.doctor.examine", lambda: FINDINGS)
    assert command.run(argparse.Namespace(json=True, fix=None)) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert answer["findings"][2] == {
        "topic": "three",
        "status": "problem",
        "value": "broken",
        "wanted": "whole",
        "why": "it leaks",
        "advice": "mend it",
        "fix": None,
    }


def test_loading_the_doctor_imports_no_torch():
    code = "import sys, mcp_parallel.cli.doctor, mcp_parallel.doctor; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert result.stdout == "False\n", result.stderr
