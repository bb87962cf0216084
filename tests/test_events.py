"""Event files of our own: what TensorBoard reads of them, and when they are on disk."""

from __future__ import annotations

import json
import math
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from mcp_parallel.monitor import events
from mcp_parallel.monitor.events import EventWriter, crc32c
from mcp_parallel.monitor.metrics import MetricsWriter
from mcp_parallel.monitor.run_folder import RunFolder


def read(folder: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return found


def bit_by_bit(data: bytes) -> int:
    """CRC-32C as it is defined: division by the polynomial, lowest bit first."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def test_the_checksum_is_crc32c():
    assert crc32c(b"123456789") == 0xE3069283  # the check value that catalogues of CRCs give
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    generator = random.Random(0)
    # Around what is taken at once, where four first bytes lie in one chunk, two, or end one.
    for size in (*range(4, 20), *range(252, 262), 511, 512, 513, 1500):
        data = generator.randbytes(size)
        assert crc32c(data) == bit_by_bit(data), size


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


def test_a_damaged_record_is_one_to_tensorboard(tmp_path):
    """The reader does look at the checksums: else the test above would say nothing of them."""
    writer = EventWriter(tmp_path, 1)
    writer.scalars(1, [("loss", 1.0)])
    writer.close()
    [path] = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[-6] ^= 1
    path.write_bytes(data)
    assert read(tmp_path).Tags()["scalars"] == []


def test_points_are_on_disk_five_seconds_later_and_at_once_where_steps_are_slow(
    tmp_path, monkeypatch
):
    clock = [1000.0]
    monkeypatch.setattr(events.time, "time", lambda: clock[0])
    writer = EventWriter(tmp_path, 1)

    def steps_on_disk():
        return [event.step for event in read(tmp_path).Scalars("loss")]

    for step in range(1, 7):
        clock[0] += 1.0
        writer.scalars(step, [("loss", float(step))])
    assert steps_on_disk() == [1, 2, 3, 4, 5]
    clock[0] += 60.0
    writer.scalars(7, [("loss", 7.0)])
    assert steps_on_disk() == [1, 2, 3, 4, 5, 6, 7]
    writer.scalars(8, [("loss", 8.0)])
    writer.text(8, "verdicts", "what happened")  # may be the last that is heard of the run
    assert steps_on_disk()[-1] == 8
    clock[0] -= 3600.0  # set back
    writer.scalars(9, [("loss", 9.0)])
    assert steps_on_disk()[-1] == 9
    writer.scalars(10, [("loss", 10.0)])
    assert steps_on_disk()[-1] == 9
    writer.close()
    assert [event.wall_time for event in read(tmp_path).Scalars("loss")][:2] == [1001.0, 1002.0]


def test_a_killed_process_has_left_every_record(tmp_path):
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from mcp_parallel.monitor.metrics import MetricsWriter\n"
        "from mcp_parallel.monitor.run_folder import RunFolder\n"
        "writer = MetricsWriter(RunFolder(Path(sys.argv[1])), tensorboard=True)\n"
        "for step in range(1, 4):\n"
        "    writer.log({'step': step, 'loss': 1.0 / step})\n"
        "assert not {'torch', 'tensorboard'} & set(sys.modules)\n"
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
