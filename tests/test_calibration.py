"""Figures of a machine are those that explain what was timed, and are kept under its facts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from ranks import PATIENCE_S

from mcp_parallel.cli.main import main
from mcp_parallel.planner import calibrate as measuring
from mcp_parallel.planner import calibration, links, roofline
from mcp_parallel.planner.calibration import (
    MIDDLE,
    MIDDLE_ROWS,
    SMALL,
    SMALL_ROWS,
    Samples,
    block_seconds,
    fit_attention,
    fit_link,
    fit_matmuls,
)
from mcp_parallel.planner.machine import cpu_hardware, machine_here
from mcp_parallel.planner.runtime import OURS
from mcp_parallel.planner.topology import Group

RANKS = 2
BASE = cpu_hardware(RANKS)
# A machine whose half side is on the grid of what is tried.
PLANTED = replace(
    BASE,
    peak_flops={"fp32": 90e9, "fp64": 40e9, "bf16": 180e9},
    half_efficiency_side=2**4.5,
    matmul_efficiency=0.7,
    memory_bytes_per_s=20e9,
    domain_bytes_per_s=3e9,
    domain_latency_s=7e-6,
    op_overhead_s=12e-6,
)
SHAPES = [(512, 32, 32), (512, 128, 128), (512, 512, 512), (64, 256, 256), (2048, 256, 256)]


def times_of(hardware, peak=1.0):
    """Products alone: their memory and overhead are timed apart."""
    bare = replace(hardware, matmul_efficiency=peak, memory_bytes_per_s=math.inf, op_overhead_s=0.0)
    return [(m, n, k, roofline.matmul_seconds(bare, m, n, k, "fp32")) for m, n, k in SHAPES]


def samples_of(hardware):
    """What a machine with such figures would show."""
    group, length = Group(RANKS, RANKS), 256
    flops = 2.0 * length * length * 256
    attention = [
        flops * work / (hardware.peak("fp32") * part) * (length + roofline.ATTENTION_HALF_LENGTH)
        for work, part in zip((1, 2.5), OURS.attention, strict=True)
    ]
    return Samples(
        ranks=RANKS,
        matmuls=times_of(hardware),
        formats={"fp64": 40 / 90, "bf16": 2.0},
        stream=(1e6, roofline.memory_seconds(hardware, 1e6)),
        attention=(attention[0] / length, attention[1] / length, length, flops),
        all_reduces=[
            (size, links.all_reduce_seconds(size, group, hardware)) for size in (4, 1 << 20)
        ],
        gather_and_back_s=2 * links.all_gather_seconds(0, group, hardware),
        small_block_s=block_seconds(SMALL, SMALL_ROWS, hardware),
        middle_block_s=block_seconds(MIDDLE, MIDDLE_ROWS, hardware),
        step_overhead_s=1e-3,
    )


def test_products_give_peak_and_half_side():
    peak, half = fit_matmuls(times_of(PLANTED), BASE)
    assert peak == pytest.approx(90e9, rel=1e-9)
    assert half == PLANTED.half_efficiency_side


def test_noisy_products_are_explained_as_well_as_by_the_truth():
    noise = math.log(1.1)
    noisy = [
        (m, n, k, seconds * math.exp(noise if index % 2 else -noise))
        for index, (m, n, k, seconds) in enumerate(times_of(PLANTED))
    ]
    peak, half = fit_matmuls(noisy, BASE)
    fitted = times_of(replace(BASE, peak_flops={"fp32": peak}, half_efficiency_side=half))
    errors = [math.log(row[3] / seen[3]) for row, seen in zip(fitted, noisy, strict=True)]
    # The truth is among what is tried, and is off by the noise at each.
    assert sum(error**2 for error in errors) <= len(SHAPES) * noise**2 * (1 + 1e-9)


def test_collectives_give_latency_and_rate():
    link = fit_link(samples_of(PLANTED), BASE)
    assert link["domain_latency_s"] == pytest.approx(7e-6, rel=1e-6)
    # The smallest message has four bytes' time in it beside the latency.
    assert link["domain_bytes_per_s"] == pytest.approx(3e9, rel=1e-5)
    assert fit_link(replace(samples_of(PLANTED), ranks=1), BASE) == {}


def test_attention_gives_the_rates_of_long_sequences():
    forward, backward, length, flops = samples_of(PLANTED).attention
    found = fit_attention((forward, backward, length, flops), 90e9)
    assert found == pytest.approx(OURS.attention, rel=1e-9)


def test_a_machine_is_found_again_from_what_it_shows():
    hardware = calibration.calibrate(samples_of(PLANTED), BASE)
    assert hardware.peak("bf16") == pytest.approx(180e9)
    assert hardware.memory_bytes_per_s == pytest.approx(20e9)
    assert hardware.attention == pytest.approx(OURS.attention)
    # Before the efficiency is known a small block's work is taken for a little less than it is.
    assert hardware.op_overhead_s == pytest.approx(12e-6, rel=0.05)
    middle = block_seconds(MIDDLE, MIDDLE_ROWS, hardware)
    assert middle == pytest.approx(samples_of(PLANTED).middle_block_s, rel=1e-6)
    assert hardware.step_overhead_s == 1e-3
    assert (hardware.memory_bytes, hardware.domain_ranks) == (BASE.memory_bytes, RANKS)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_samples_are_kept_under_the_facts_of_their_machine(cache):
    facts, samples = {"cpu": "x", "ranks": 2}, samples_of(PLANTED)
    assert calibration.load(facts) is None
    file = calibration.save(facts, samples)
    assert cache in file.parents
    assert calibration.load(facts) == samples
    assert calibration.load({**facts, "ranks": 4}) is None
    file.write_text(file.read_text()[:-40])
    assert calibration.load(facts) is None


def test_a_machine_is_measured_once(cache, monkeypatch, capsys):
    monkeypatch.setenv("MCP_DEVICE", "cpu")
    measured = []

    def measure(ranks):
        measured.append(ranks)
        return samples_of(PLANTED)

    monkeypatch.setattr(measuring, "measure", measure)
    first = measuring.calibrated(2)
    assert measuring.calibrated(2) == first
    assert measured == [2]
    # The planner of a run takes what was measured, and rough figures where nothing was.
    assert machine_here(2, "cpu").hardware == first
    assert machine_here(3, "cpu").hardware == cpu_hardware(3)
    assert measuring.hardware_here(2, "cpu") == first
    assert measured == [2]
    measuring.calibrated(2, anew=True)
    measuring.calibrated(1)
    assert measured == [2, 2, 1]
    assert main(["plan", "--preset", "tiny", "--gpus", "2", "--gpu", "here", "--json"]) == 0
    job = json.loads(capsys.readouterr().out)["job"]
    assert (job["hardware"], job["precision"]) == (first.name, "fp32")
    assert measured == [2, 2, 1]


SCRIPT = """
import dataclasses, json, sys
from mcp_parallel.planner import calibrate
calibrate._BUDGET_S = 0.002
with open(sys.argv[1], "w") as file:
    json.dump(dataclasses.asdict(calibrate.measure(2)), file)
"""


def test_two_ranks_of_this_machine_are_measured(tmp_path):
    file = tmp_path / "samples"
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    samples = Samples.from_mapping(json.loads(file.read_text()))
    assert asdict(samples) == {**asdict(samples), "ranks": 2}
    hardware = calibration.calibrate(samples, BASE)
    # Any core that runs this at all, from a slow one under load to the fastest.
    assert 1e8 < hardware.peak("fp32") < 1e13
    assert 1e7 < hardware.memory_bytes_per_s < 1e13
    assert 0 < hardware.domain_latency_s < 1
    assert 0 < hardware.op_overhead_s < 1
