"""Run folder, metrics and progress: what is on disk and on the screen after runs and resumes."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from mcp_parallel.config import Config
from mcp_parallel.errors import DIVERGED, OK, STOPPED, ConfigError
from mcp_parallel.monitor import progress
from mcp_parallel.monitor.monitor import Monitor
from mcp_parallel.monitor.probe import Health
from mcp_parallel.monitor.progress import Progress, describe, eta_text
from mcp_parallel.monitor.run_folder import RunFolder

REPOSITORY = Path(__file__).parent.parent


@dataclass(frozen=True)
class Result:
    """The part of a step's result that the monitor reads."""

    loss: float
    grad_norm: float = 1.0
    num_tokens: int = 64
    is_finite: bool = True
    wire_bytes: int | None = None
    uncompressed_bytes: int | None = None
    bubbles: tuple[float, ...] | None = None
    loss_scale: float | None = None
    skipped: bool = False
    own_s: tuple[float, ...] | None = None
    health: Health | None = None


def config(*overrides: str) -> Config:
    return Config().with_overrides(["monitor.tensorboard=false", *overrides])


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train(folder: Path, run: Config, steps: range, status: int = OK) -> None:
    """Steps whose loss is 10 / step and which take half a second each."""
    monitor = Monitor(run, folder, start_step=steps.start, is_main=True)
    for step in steps:
        monitor.record(step, Result(loss=10 / (step + 1)), lr=0.1, step_time_s=0.5)
    monitor.close(status)


def test_the_bubble_of_a_pipeline_is_recorded(tmp_path):
    monitor = Monitor(config("train.steps=2"), tmp_path, start_step=0, is_main=True)
    monitor.record(0, Result(loss=1.0, bubbles=(0.25, 0.5)), lr=0.1, step_time_s=0.5)
    monitor.record(1, Result(loss=1.0), lr=0.1, step_time_s=0.5)
    monitor.close(OK)
    first, second = rows(tmp_path)
    assert (first["bubble"], first["bubble_by_rank"]) == (0.375, [0.25, 0.5])
    assert not {"bubble", "bubble_by_rank"} & set(second)


# ---------------------------------------------------------------- run folder


def test_a_folder_is_one_runs_until_that_run_ends(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    with (
        folder.lock(),
        pytest.raises(ConfigError, match="must be a folder that no other run is using"),
        folder.lock(),
    ):
        pass
    with folder.lock():  # the first has let go of it
        pass


def test_a_lock_dies_with_its_process(tmp_path):
    folder = RunFolder(tmp_path)
    code = (
        "import sys, time; from pathlib import Path\n"
        "from mcp_parallel.monitor.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).lock():\n"
        "    print('locked', flush=True); time.sleep(3600)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(ConfigError, match="no other run"), folder.lock():
            pass
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    with folder.lock():
        pass


def test_fresh_folders_never_meet_and_say_what_they_hold(tmp_path):
    folders = [RunFolder.fresh("tiny", tmp_path) for _ in range(8)]
    assert len({folder.path for folder in folders}) == 8
    assert all(folder.path.name.startswith("tiny-") for folder in folders)
    assert not folders[0].holds_run()
    folders[0].create()
    assert not folders[0].holds_run()
    folders[0].write_config("a: 1\n")
    assert folders[0].holds_run()
    assert [path.name for path in folders[0].path.iterdir()] == ["config.yaml"]


def test_a_folder_that_cannot_be_made_is_refused_in_words(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--run-dir must be a folder that can be written to"):
        RunFolder(tmp_path / "file" / "run").create()


# ---------------------------------------------------------------- metrics


def test_resumed_runs_have_each_step_once_and_count_on(tmp_path):
    run = config("train.steps=8")
    train(tmp_path, run, range(6))
    # A crash cut the last line short; the checkpoint was at step 4.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    train(tmp_path, run, range(4, 8))
    recorded = rows(tmp_path)
    assert [row["step"] for row in recorded] == list(range(1, 9))
    assert [row["tokens"] for row in recorded] == [64 * step for step in range(1, 9)]
    flops = recorded[6].pop("model_tflops_per_rank")
    # The tiny preset's products: 4 blocks and a head, 6 a weight and token, causal attention.
    weights = 4 * (2 * 128**2 + 2 * 128 * 64 + 3 * 128 * 352) + 128 * 256
    a_token = 6 * weights + 4 * 3 * 4 * 64 * 128
    assert flops == pytest.approx(16 * 128 * a_token / 0.5 / 1e12)
    assert recorded[6] == {
        "step": 7,
        "loss": 10 / 7,
        "grad_norm": 1.0,
        "grad_norm_clipped": 1.0,
        "clipped_share": 0.0,
        "lr": 0.1,
        "tokens": 64 * 7,
        "tokens_per_s": 128.0,
        "step_time_s": 0.5,
    }


def test_every_third_step_is_recorded_and_the_last(tmp_path):
    monitor = Monitor(
        config("train.steps=7", "monitor.every=3"), tmp_path, start_step=0, is_main=True
    )
    for step in range(7):
        monitor.record(step, Result(loss=1.0), lr=0.1, step_time_s=1.0 + step)
    monitor.close(OK)
    recorded = rows(tmp_path)
    assert [row["step"] for row in recorded] == [3, 6, 7]
    # Time and rate are over the steps since the record before, not of one step alone.
    assert [row["step_time_s"] for row in recorded] == [2.0, 5.0, 7.0]
    assert [row["tokens_per_s"] for row in recorded] == [64 / 2, 64 / 5, 64 / 7]


def test_numbers_that_are_not_finite_are_null(tmp_path):
    monitor = Monitor(
        config("train.steps=9", "monitor.every=5"), tmp_path, start_step=0, is_main=True
    )
    monitor.record(0, Result(math.nan, math.inf, is_finite=False), lr=0.1, step_time_s=0.5)
    monitor.close(DIVERGED)
    text = (tmp_path / "metrics.jsonl").read_text()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"not JSON: {word}"))
    assert rows(tmp_path)[0]["loss"] is None
    assert rows(tmp_path)[0]["grad_norm"] is None


def test_a_skipped_step_is_written_with_its_loss_scale(tmp_path):
    run = config("train.steps=9", "monitor.every=5")
    monitor = Monitor(run, tmp_path, start_step=0, is_main=True)
    skipped = Result(5.0, math.inf, is_finite=False, loss_scale=2.0**17, skipped=True)
    monitor.record(0, skipped, lr=0.1, step_time_s=0.5)
    for step in range(1, 5):
        monitor.record(step, Result(4.0, loss_scale=2.0**16), lr=0.1, step_time_s=0.5)
    monitor.close(OK)
    assert [(row["step"], row["loss_scale"], row["skipped"]) for row in rows(tmp_path)] == [
        (1, 2.0**17, True),
        (5, 2.0**16, False),
    ]


def test_a_skipped_step_says_so_in_the_line_of_progress():
    row = {"loss": 5.0, "grad_norm": math.inf, "tokens_per_s": 9.0, "loss_scale": 2048.0}
    assert describe({**row, "skipped": True}, "tokens") == (
        "loss 5.0000  skipped (overflow at loss scale 2048)  9 tokens/s"
    )
    assert "grad norm inf" in describe({**row, "skipped": False}, "tokens")


def test_an_exhausted_loss_scale_is_named(tmp_path, capfd):
    run = config("train.steps=9", "train.precision=fp16")
    monitor = Monitor(run, tmp_path, start_step=0, is_main=True)
    last = Result(5.0, math.inf, is_finite=False, loss_scale=1.0)
    monitor.record(0, last, lr=0.1, step_time_s=0.5)
    monitor.close(DIVERGED)
    text = "".join(capfd.readouterr())
    assert "diverged (loss or gradient is not finite at loss scale 1, the lowest)" in text
    assert "--set train.lr=0.0003, or --set train.precision=bf16" in text


def test_ranks_that_are_not_main_touch_nothing(tmp_path, capfd):
    monitor = Monitor(config(), tmp_path / "run", start_step=0, is_main=False)
    monitor.record(0, Result(1.0), lr=0.1, step_time_s=0.5)
    monitor.close(OK)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._encoding

    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO, steps: range, total: int) -> str:
    display = Progress(total, steps.start, stream)
    for step in steps:
        display.update(
            {
                "step": step + 1,
                "loss": 2.5,
                "grad_norm": 0.25,
                "lr": 1e-3,
                "tokens_per_s": 12345.6,
            }
        )
    display.close()
    return stream.getvalue()


def test_plain_lines_are_first_last_and_each_tenth():
    lines = show(io.StringIO(), range(100), 100).splitlines()
    assert [line.split()[1] for line in lines] == [
        f"{step}/100" for step in (1, *range(10, 101, 10))
    ]
    assert "loss 2.5000  grad norm 0.250  12,346 tokens/s  ETA 0:00:0" in lines[0]
    assert "\x1b" not in "".join(lines)


def test_plain_lines_show_where_a_run_was_stopped():
    lines = show(io.StringIO(), range(50, 54), 100).splitlines()
    assert [line.split()[1] for line in lines] == ["51/100", "54/100"]


def test_plain_lines_come_in_time_when_steps_are_slow(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    display = Progress(1000, 0, stream)
    for step in range(1, 9):
        clock[0] = 4.0 * step
        display.update({"step": step, "loss": 1.0, "grad_norm": 1.0, "tokens_per_s": 1.0})
    steps = [line.split()[1] for line in stream.getvalue().splitlines()]
    assert steps == ["1/1000", "4/1000", "7/1000"]  # at 4, 16 and 28 s: ten seconds have passed
    assert stream.getvalue().splitlines()[1].endswith("ETA 1:06:24")  # 996 steps of 4 s


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_the_bar_shows_the_numbers_and_only_what_the_terminal_can_show(monkeypatch, encoding):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = show(Terminal(encoding), range(3), 3)
    text.encode(encoding)
    assert "3/3" in text
    assert "loss 2.5000" in text
    assert "12,346 tokens/s" in text
    assert "\x1b[38;" in text or "\x1b[32m" in text  # coloured
    assert text.isascii() == (encoding == "ascii")


def test_the_bar_is_drawn_once_a_second_and_at_the_end(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    stream = Terminal("utf-8")
    display = Progress(8, 0, stream)
    for step in range(1, 9):
        clock[0] = 0.3 * step
        display.update({"step": step, "loss": step / 8, "grad_norm": 1.0, "tokens_per_s": 1.0})
    drawn = [step for step in range(1, 9) if f"loss {step / 8:.4f}" in stream.getvalue()]
    assert drawn == [1, 5]  # at 0.3 and 1.5 s
    assert "8/8" not in stream.getvalue()
    display.close()
    assert "8/8" in stream.getvalue()


def test_no_color_is_honoured(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    text = show(Terminal("utf-8"), range(3), 3)
    assert "3/3" in text
    assert "\x1b[38;" not in text
    assert "\x1b[3" not in text


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in show(Terminal("utf-8"), range(3), 3)


def test_training_goes_on_when_nobody_can_read_any_more(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        train(tmp_path, config("train.steps=3"), range(3))
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            nobody.close()
    assert len(rows(tmp_path)) == 3


@pytest.mark.parametrize(
    "seconds, text", [(0, "0:00:00"), (59.6, "0:01:00"), (3661, "1:01:01"), (360000, "100:00:00")]
)
def test_eta_reads_like_a_clock(seconds, text):
    assert eta_text(seconds) == text


@pytest.mark.parametrize(
    "status, what, advice",
    [
        (OK, "done: 3 of 3 steps", "next: mcp-parallel generate"),
        (STOPPED, "stopped, checkpoint written: 3 of 3", "next: mcp-parallel train --resume"),
        (DIVERGED, "diverged", "--set train.lr=0.0003"),
    ],
)
def test_the_closing_lines_say_what_happened_and_what_comes_next(
    tmp_path, capfd, status, what, advice
):
    folder = tmp_path / "a run"
    train(folder, config("train.steps=3"), range(3), status)
    lines = capfd.readouterr().out.splitlines()[-4 if status == DIVERGED else -3 :]
    if status == DIVERGED:
        assert lines.pop(2) == "last good checkpoint: none was written"
    assert lines[0].startswith(what)
    assert "loss 3.3333" in lines[0]
    assert lines[1] == f"run folder: '{folder}'"
    assert lines[2].startswith("next: ")
    assert advice in lines[2]
    assert f"'{folder}'" in lines[2]
