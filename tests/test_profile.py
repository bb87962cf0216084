"""Traces of steps: files that parse, spans by name and nested, shares of communication."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from contexts import rank_context

from mcp_kernels import matmul_all_reduce, spans
from mcp_kernels.spans import communicates, communication, metering, recording, span
from mcp_parallel.cli.arguments import add_run_arguments, resolve_arguments
from mcp_parallel.config import Config
from mcp_parallel.errors import ConfigError
from mcp_parallel.layout import Layout
from mcp_parallel.monitor.profile import traced_steps
from mcp_parallel.trainer import Trainer

CONFIG = Config.from_mapping(
    {
        "model": {
            "preset": None,
            "num_layers": 2,
            "hidden_size": 16,
            "num_heads": 2,
            "num_kv_heads": 2,
            "ffn_size": 16,
            "vocab_size": 256,
            "seq_len": 16,
        },
        "train": {"steps": 5, "global_batch_size": 4, "micro_batch_size": 1},
        "checkpoint": {"every": 0},
        "monitor": {"tensorboard": False},
    }
)


def test_spans_cost_nothing_when_nothing_is_recorded():
    assert span("a") is span("b") is communication("c")
    with torch.profiler.profile() as profiler, span("a"), communication("b"):
        torch.ones(1)
    assert not {"a", "b"} & {event.name for event in profiler.events() or ()}


def test_communication_inside_communication_counts_once():
    @communicates("outer")
    def outer():
        with communication("inner"):
            time.sleep(0.02)
        with span("work"):
            time.sleep(0.01)

    with recording() as recorder:
        start = time.perf_counter()
        outer()
        longest = time.perf_counter() - start
        with span("work"):
            time.sleep(0.05)
        # sleep never returns early: all that was slept inside counts, and nothing twice.
        assert 0.03 <= recorder.take_communication_s() <= longest
        assert recorder.take_communication_s() == 0.0
    outer()  # after the block nothing is added, and nothing fails
    assert spans._recorder is None


def test_waits_that_something_else_counts_are_communication_outside_of_spans():
    waited = 0.0
    with metering(lambda: waited) as meter:
        waited += 1.0
        with communication("a"):
            waited += 10.0  # is part of the span's own time
        waited += 2.0
        taken = meter.take_communication_s()
        assert 3.0 <= taken < 4.0
        with recording() as recorder, communication("b"):
            time.sleep(0.01)
        assert meter.take_communication_s() >= 0.01 <= recorder.take_communication_s()
    assert spans._meter is None


SLEEP_S = 0.2


def wait_for_a_peer(rank, world):
    """(seconds of a fused op, those that count as communication), some times over."""
    import mcp_kernels.shm  # noqa: F401 (registers the backend)
    from mcp_kernels import _shm

    group = dist.new_group(list(range(world)), backend="shm")
    x, weight = torch.ones(8, 16), torch.ones(4, 16)
    matmul_all_reduce(x, weight, group=group)
    times = []
    with metering(_shm.waited_s) as meter:
        for _ in range(3):
            dist.barrier()
            if rank == 1:
                time.sleep(SLEEP_S)
            start = time.perf_counter()
            matmul_all_reduce(x, weight, group=group)
            times.append((time.perf_counter() - start, meter.take_communication_s()))
    return times


def test_waits_inside_of_a_fused_op_are_communication_of_the_rank_that_waits(ranks):
    pytest.importorskip("mcp_kernels._shm")
    waiting, sleeping = ranks.run(wait_for_a_peer, ranks=2)
    assert all(waited_s <= elapsed_s + 1e-3 for elapsed_s, waited_s in waiting + sleeping)
    # Rank 0 has next to nothing to do but to wait for the sleeper, or less where it came late
    # itself; a busy machine may stop either between two lines, but not each time.
    assert min(elapsed_s - waited_s for elapsed_s, waited_s in waiting) < SLEEP_S / 3
    assert max(waited_s for _, waited_s in waiting) > SLEEP_S / 3
    assert min(waited_s for _, waited_s in sleeping) < SLEEP_S  # its sleep is no waiting for others


def test_an_error_ends_a_span_of_communication():
    with recording() as recorder:
        with pytest.raises(ZeroDivisionError), communication("broken"):
            raise ZeroDivisionError
        with communication("next"):
            time.sleep(0.01)
        assert recorder.take_communication_s() >= 0.01


@pytest.mark.parametrize(
    "first, last, count, expected",
    [
        (0, 100, 3, range(2, 5)),
        (10, 100, 1, range(12, 13)),
        (0, 4, 3, range(1, 4)),  # too short for the whole warm-up
        (0, 2, 3, range(2)),
        (7, 7, 3, range(7, 7)),
        (0, 100, 0, range(2, 2)),
    ],
)
def test_which_steps_are_traced(first, last, count, expected):
    assert list(traced_steps(first, last, count)) == list(expected)


def parse(*flags):
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    return resolve_arguments(parser.parse_args(["--preset", "tiny", *flags]))[1].profile_steps


def test_the_flag():
    assert parse() == 0
    assert parse("--profile") == 3
    assert parse("--profile", "12", "--steps", "20") == 12
    for wrong in ("-1", "2.5", "all", ""):
        with pytest.raises(ConfigError, match="--profile must be a number of steps, 0 for none"):
            parse(f"--profile={wrong}")


def train(rank, world, folder, layout, steps):
    config = replace(
        CONFIG,
        parallel=replace(
            CONFIG.parallel, dp=layout.dp, tp=layout.tp, pp=layout.pp, zero=layout.zero
        ),
    )
    context = rank_context(rank, world)
    return Trainer(config, context, run_dir=folder, profile_steps=steps).fit()


def spans_of(file):
    """(name, thread, begin, end) of every span of ours and torch's, microseconds."""
    events = json.loads(file.read_text())["traceEvents"]
    return [
        (e["name"], e["tid"], e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("ph") == "X" and e.get("cat") in ("user_annotation", "cpu_op")
    ]


def inside(found, inner, outer):
    """Whether every span ``inner`` lies in a span ``outer`` of its thread."""
    places = [(t, a, b) for name, t, a, b in found if name == outer]
    mine = [(t, a, b) for name, t, a, b in found if name == inner]
    assert mine, inner
    return all(any(t == u and c <= a and b <= d for u, c, d in places) for t, a, b in mine)


CASES = {
    Layout(dp=2): {
        "data": "step 2",
        "forward": "step 2",
        "backward": "step 2",
        "sum of a gradient bucket": "backward",
        "sum of the totals": "totals",
        "optimizer": "step 2",
        "aten::_fused_adamw_": "optimizer",
    },
    Layout(pp=2): {"loss": "step 2", "sum of the totals": "totals", "optimizer": "step 2"},
}


@pytest.mark.parametrize("layout", CASES, ids=["dp2", "pp2"])
def test_a_rank_writes_its_trace(ranks, tmp_path, layout):
    assert ranks.run(train, tmp_path, layout, 1, ranks=2) == [0, 0]
    files = sorted((tmp_path / "profile").iterdir())
    assert [file.name for file in files] == ["rank_00000.json", "rank_00001.json"]
    traces = [spans_of(file) for file in files]
    last = traces[-1]  # the last pipeline rank has the loss
    for inner, outer in CASES[layout].items():
        assert inside(last, inner, outer), (inner, outer)
    if layout.pp > 1:
        for rank, found in enumerate(traces):
            for name in (f"{kind}{m} of stage {rank}" for kind in "FB" for m in range(4)):
                assert inside(found, name, "step 2"), name
    ours = {"data", "forward", "backward", "loss", "totals", "optimizer", "step 2"}
    for found in traces:
        by_thread = {}
        for name, thread, begin, end in found:
            if name in ours or " of stage " in name:
                by_thread.setdefault(thread, []).append((begin, -end))
        for places in by_thread.values():
            open_until = []
            for begin, minus_end in sorted(places):
                while open_until and open_until[-1] <= begin:
                    open_until.pop()
                # A span that began inside another one ends inside it.
                assert not open_until or -minus_end <= open_until[-1]
                open_until.append(-minus_end)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    # Measured in each step, beside the profiler too.
    assert all(0 < row["communication_share"] < 1 for row in rows)


def test_without_profile_there_is_no_trace(ranks, tmp_path):
    assert ranks.run(train, tmp_path, Layout(dp=2), 0, ranks=2) == [0, 0]
    assert not (tmp_path / "profile").exists()
