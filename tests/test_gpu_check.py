"""The GPU check without a GPU: its report, its sections on tiny sizes of the CPU, its refusal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mcp_kernels.gpu_check import __main__ as cli
from mcp_kernels.gpu_check import attention_checks, attention_speed, onebit
from mcp_kernels.gpu_check.apart import run_apart
from mcp_kernels.gpu_check.report import Check, Measurement, Report, Section, run_section
from mcp_kernels.gpu_check.sections import SECTIONS
from mcp_kernels.gpu_check.timing import Bench

CPU = torch.device("cpu")
QUICK = Bench(CPU, rounds=2, warmup=1)
TINY = attention_speed.Sizes(
    batch=1, heads=2, head_dim=16, rows=64, windowed_rows=96, window=16,
    decode_batch=2, decode_heads=4, decode_kv_heads=2, decode_keys=128,
)  # fmt: skip


def test_ratios_and_goals() -> None:
    peers: dict[str, float | str] = {"slow": 50.0, "fast": 200.0, "absent": "no kernel"}
    goals = {"ours": 120.0, "slow": 1.5, "fast": 0.75, "absent": 2.0}
    measured = Measurement("forward", "TFLOP/s", 100.0, peers, peak=400.0, goals=goals)
    assert measured.ratios() == {"slow": 2.0, "fast": 0.5}
    assert measured.missed() == ["100.00 TFLOP/s of 120", "0.50 x fast of 0.75"]
    text = Report({"gpu": "X"}, [run_section(_section(measured), QUICK)]).to_text()
    assert "forward: 100.0 TFLOP/s (25% of peak)" in text
    assert "absent: refused, no kernel" in text
    assert "slow: 50.0, ours is 2.00x" in text
    assert "goal missed: 0.50 x fast of 0.75" in text


def _section(*measurements: Measurement, checks: tuple[Check, ...] = ()) -> Section:
    return Section("one", lambda device: checks, lambda bench: measurements)


def test_report_is_json_with_everything() -> None:
    measured = Measurement("copy", "GB/s", 10.0, {"peer": 5.0}, goals={"peer": 3.0})
    section = _section(measured, checks=(Check("adds", True, "0.5 times one rounding"),))
    report = Report({"gpu": "X"}, [run_section(section, QUICK)])
    document = json.loads(report.to_json())
    assert document["is_passed"] is True
    assert document["device"] == {"gpu": "X"}
    (entry,) = document["sections"][0]["measurements"]
    assert entry["ratios"] == {"peer": 2.0}
    assert entry["missed"] == ["2.00 x peer of 3"]
    assert document["sections"][0]["checks"][0]["detail"] == "0.5 times one rounding"


def test_a_failed_check_fails_the_report_and_stops_the_clock() -> None:
    def measure(bench: Bench) -> Iterator[Measurement]:
        raise AssertionError("a wrong kernel must not be timed")
        yield

    section = Section("one", lambda device: [Check("adds", False, "9 times")], measure)
    report = Report({}, [run_section(section, QUICK)])
    assert not report.is_passed
    assert "FAILED adds: 9 times" in report.to_text()


def test_a_check_that_raises_is_a_failed_check() -> None:
    def check(device: torch.device) -> Iterator[Check]:
        yield Check("first", True, "")
        raise RuntimeError("illegal memory access")

    result = run_section(Section("one", check, lambda bench: []), QUICK)
    assert [c.is_passed for c in result.checks] == [True, False]
    assert "illegal memory access" in result.checks[1].detail


WRITES = """
import os, pathlib, signal, sys
from mcp_kernels.gpu_check.apart import run_apart
from mcp_kernels.gpu_check.report import Check, Measurement, Report, SectionResult
measured = Measurement("copy", "GB/s", 10.0, {"peer": 5.0, "other": "no kernel"}, goals={"peer": 3})
report = Report({}, [SectionResult("one", [Check("adds", True, "fine")], [measured])])
pathlib.Path(sys.argv[1]).write_text(report.to_json())
"""


def test_a_section_in_a_process_of_its_own(tmp_path: Any) -> None:
    """What it found comes back whole; one that dies is a failed check that says how."""
    out = tmp_path / "part.json"
    found = run_apart("one", [sys.executable, "-W", "ignore", "-c", WRITES, str(out)], out)
    assert found.checks == [Check("adds", True, "fine")]
    (measured,) = found.measurements
    assert measured.ratios() == {"peer": 2.0}
    assert measured.missed() == ["2.00 x peer of 3"]
    assert measured.peers["other"] == "no kernel"

    dies = "import os, sys; print('illegal address', file=sys.stderr, flush=True); os.abort()"
    (check,) = run_apart("one", [sys.executable, "-c", dies], out).checks  # the old report is gone
    assert not check.is_passed
    assert check.detail == "its process ended with -6: illegal address"
    hangs = [sys.executable, "-c", "import time; time.sleep(60)"]
    (check,) = run_apart("one", hangs, out, timeout_s=0.2).checks
    assert check.detail == "it must end within 0.2 s, and did not"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to check")
def test_sections_run_apart_and_all_are_reported(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU every child refuses: each section says so, and the report has them all."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cli, "describe", lambda device: {"gpu": "none"})
    out = tmp_path / "gpu_report.json"
    assert cli.main(["--out", str(out)]) == 1
    document = json.loads(out.read_text())
    assert [s["name"] for s in document["sections"]] == [s.name for s in SECTIONS]
    for section in document["sections"]:
        assert "a CUDA device must be usable, got none" in section["checks"][0]["detail"]


def test_a_peer_that_refuses_says_why_and_the_others_are_timed() -> None:
    def refuse() -> None:
        raise RuntimeError("needs an H100\nand more")

    calls = []
    seconds = QUICK.seconds({"ours": lambda: calls.append(1), "peer": refuse})
    assert seconds["peer"] == "needs an H100"
    assert isinstance(seconds["ours"], float)
    assert len(calls) == QUICK.warmup + QUICK.rounds


def test_attention_checks_hold_on_the_cpu() -> None:
    shapes = ((1, 33, 40, 2, 1, 16, 16), (1, 1, 50, 2, 2, 8, 12))
    checks = [
        *attention_checks.check_grid(CPU, shapes),
        *attention_checks.check_known_bugs(CPU, scale=8),
        *attention_checks.check_properties(CPU),
    ]
    assert [(c.name, c.detail) for c in checks if not c.is_passed] == []
    assert sum("196678" in c.name for c in checks) == 4
    assert sum("1072" in c.name for c in checks) == 2


@pytest.mark.parametrize("fault", ["one_element", "scaled", "nan", "keys_lost"])
def test_attention_checks_see_a_wrong_kernel(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_checks.flash_attn_func

    def wrong(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        if q.dtype == torch.float64:
            return right(q, k, v, *args, **kwargs)
        if fault == "keys_lost":
            k, v = (torch.cat([t[:, :1], t[:, 1:] * 0], 1) for t in (k, v))
            return right(q, k, v, *args, **kwargs)
        out, lse = right(q, k, v, *args, **kwargs)
        if fault == "scaled":
            return out * 1.01, lse
        change = torch.zeros_like(out)
        change[0, 5, 0, 0] = float("nan") if fault == "nan" else 1.0
        return out + change, lse

    monkeypatch.setattr(attention_checks, "flash_attn_func", wrong)
    checks = list(attention_checks.check_grid(CPU, ((1, 33, 40, 2, 1, 16, 16),)))
    assert not any(check.is_passed for check in checks)


def test_attention_is_measured_beside_its_peers() -> None:
    measured = {m.name: m for m in attention_speed.measure(QUICK, TINY)}
    assert set(measured) == {
        "forward full, 64 rows",
        "backward full, 64 rows",
        "forward causal, 64 rows",
        "backward causal, 64 rows",
        "backward causal, deterministic",
        "window 16 of 96 rows, forward and backward",
        "decode, 2 sequences of 128 keys",
        "forward causal with sink",
        "forward causal with softcap",
        "forward causal with ALiBi",
    }
    assert all(m.ours > 0 for m in measured.values())
    forward = measured["forward causal, 64 rows"]
    assert isinstance(forward.peers["SDPA flash"], float)
    assert isinstance(forward.peers["SDPA cuDNN"], str)  # not on a CPU, and it says so
    assert measured["decode, 2 sequences of 128 keys"].unit == "GB/s"


@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) enc:RuntimeWarning")
def test_onebit_section_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = list(onebit.check(CPU, sizes=(1, 1000)))
    assert all(check.is_passed for check in checks)
    assert {check.name for check in checks} >= {"op of 1", "op of 1000"}
    measured = list(onebit.measure(QUICK, numel=4096))
    assert all(m.ours > 0 and "device copy" in m.peers for m in measured)

    right = onebit.onebit_compress

    def wrong(x: torch.Tensor, error: torch.Tensor, block_size: int) -> Any:
        bits, scales = right(x, error, block_size)
        return bits ^ 1, scales

    monkeypatch.setattr(onebit, "bodies", lambda: {"op": wrong})
    (check,) = onebit.check(CPU, sizes=(1000,))
    assert not check.is_passed
    assert "elements differ" in check.detail


def test_every_section_has_a_name_of_its_own() -> None:
    names = [section.name for section in SECTIONS]
    assert {"flash_attention", "onebit_compress"} <= set(names)
    assert len(set(names)) == len(names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to check")
def test_without_a_gpu_it_says_so(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gpu_report.json"
    assert cli.main(["--out", str(out)]) == 2
    assert "a CUDA device must be usable, got none" in capsys.readouterr().err
    assert not out.exists()
