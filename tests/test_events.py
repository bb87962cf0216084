"""Event files: what TensorBoard reads of them, and when they are on disk."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from mcp_parallel.monitor import events
from mcp_parallel.monitor.events import EventWriter
from mcp_parallel.monitor.metrics import MetricsWriter
from mcp_parallel.monitor.run_folder import RunFolder


def read(folder: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return found


def test_tensorboard_reads_curves_and_texts(tmp_path):
    writer = EventWriter(tmp_path, 1)
    for step in (1, 200, 2**40):  # numbers of one, two and six bytes
        writer.scalars(step, [("train/loss", step / 8), ("grad/blocks.0", -1.5), ("big", 1e300)])
    writer.text(200, "verdicts", "two lines\nand \u00fc")
    writer.scalars(2**40 + 1, [("train/loss", math.pi), ("a" * 300, 1)])  # a long tag
    writer.close()
    found = read(tmp_path)
    assert set(found.Tags()["scalars"]) == {"train/loss", "grad/blocks.0", "big", "a" * 300}
    curve = [(event.step, event.value) for event in found.Scalars("train/loss")]
    rounded = struct.unpack("<f", struct.pack("<f", math.pi))[0]
    assert curve == [(1, 0.125), (200, 25.0), (2**40, 2.0**37), (2**40 + 1, rounded)]
    assert [event.value for event in found.Scalars("big")] == [math.inf] * 3
    assert [tag for tag in found.Tags()["tensors"] if tag.startswith("verdicts")] == [
        "verdicts/text_summary"
    ]
    [text] = found.Tensors("verdicts/text_summary")
    assert text.step == 200
    assert list(text.tensor_proto.string_val) == ["two lines\nand \u00fc".encode()]
    assert found.summary_metadata["verdicts/text_summary"].plugin_data.plugin_name == "text"


@pytest.mark.parametrize("is_on", [False, True])
def test_events_are_written_where_they_are_asked_for(tmp_path, is_on):
    folder = RunFolder(tmp_path)
    writer = MetricsWriter(folder, tensorboard=is_on)
    writer.log({"step": 1, "loss": 1.0})
    writer.close()
    assert folder.tensorboard_dir.exists() == is_on
    assert json.loads(folder.metrics_file.read_text()) == {"step": 1, "loss": 1.0}


def test_tensorboard_holds_the_same_curve_without_steps_that_were_done_again(tmp_path):
    folder = RunFolder(tmp_path)
    for start, stop in ((0, 6), (4, 8)):
        writer = MetricsWriter(folder, tensorboard=True, start_step=start)
        for step in range(start + 1, stop + 1):
            writer.log({"step": step, "loss": float(start + step), "grad_norm": math.nan})
        writer.close()
    found = read(folder.tensorboard_dir)
    assert found.Tags()["scalars"] == ["train/loss"]
    curve = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert curve == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 9), (6, 10), (7, 11), (8, 12)]


def test_a_text_and_what_came_before_it_are_on_disk_at_once(tmp_path):
    writer = EventWriter(tmp_path, 1)
    writer.scalars(8, [("loss", 8.0)])
    writer.text(8, "verdicts", "what happened")  # may be the last that is heard of the run
    found = read(tmp_path)
    assert [event.step for event in found.Scalars("loss")] == [8]
    assert [event.step for event in found.Tensors("verdicts/text_summary")] == [8]
    writer.close()


def test_points_of_a_step_are_one_event(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    writer = EventWriter(tmp_path, 1)
    for step in (1, 2):
        writer.scalars(step, [("loss", 1.0), ("lr", 0.1)])
    writer.close()
    [path] = tmp_path.iterdir()
    events = list(loader.RawEventFileLoader(str(path)).Load())
    assert len(events) == 4  # the file's version, the session's start, two steps


def test_without_tensorboard_one_line_says_how_to_get_it(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(events.importlib.util, "find_spec", lambda name: None)
    folder = RunFolder(tmp_path)
    writer = MetricsWriter(folder, tensorboard=True)
    writer.log({"step": 1, "loss": 1.0})
    writer.close()
    assert "pip install tensorboard" in capfd.readouterr().err
    assert json.loads(folder.metrics_file.read_text()) == {"step": 1, "loss": 1.0}


def test_a_killed_process_has_left_every_record(tmp_path):
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from mcp_parallel.monitor.metrics import MetricsWriter\n"
        "from mcp_parallel.monitor.run_folder import RunFolder\n"
        "writer = MetricsWriter(RunFolder(Path(sys.argv[1])), tensorboard=True)\n"
        "for step in range(1, 4):\n"
        "    writer.log({'step': step, 'loss': 1.0 / step})\n"
        "assert 'torch' not in sys.modules\n"
        "os.kill(os.getpid(), 9)\n"
    )
    repository = str(Path(__file__).parent.parent)
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": repository},
        check=False,
    )
    assert ended.returncode == -9
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [line[:10] for line in lines] == [f'{{"step": {step}' for step in (1, 2, 3)]
    assert lines[2].endswith("}")
