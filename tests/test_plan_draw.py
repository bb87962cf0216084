"""``mcp-parallel plan --draw``: what the picture shows, and what is refused."""

from __future__ import annotations

import json
import struct
import zlib

import pytest

from mcp_parallel.cli.main import main
from mcp_parallel.schedules.build import build_plan
from mcp_parallel.schedules.draw import as_png, as_text
from mcp_parallel.schedules.png import Canvas
from mcp_parallel.schedules.simulate import Costs, simulate

RUN = ["plan", "--pp", "2", "--batch-size", "4", "--micro-batch-size", "1"]


def read_png(data):
    """(width, height, rows of RGB bytes), every checksum checked."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    parts, at = {}, 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        (checksum,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        assert checksum == zlib.crc32(name + body)
        parts[name] = body
        at += 12 + length
    width, height, depth, color, *rest = struct.unpack(">IIBBBBB", parts[b"IHDR"])
    assert (depth, color, rest) == (8, 2, [0, 0, 0])
    pixels = zlib.decompress(parts[b"IDAT"])
    assert len(pixels) == height * (1 + 3 * width)
    lines = [pixels[y * (1 + 3 * width) : (y + 1) * (1 + 3 * width)] for y in range(height)]
    assert all(line[0] == 0 for line in lines)
    return width, height, [line[1:] for line in lines]


def test_text_shows_who_does_what_when():
    lines = as_text(simulate(build_plan("zero_bubble", 2, 2))).splitlines()
    assert lines[0] == (
        "zero_bubble: 2 ranks of 1 stages, 2 micro-batches, makespan 7, bubble 14.3%"
    )
    assert lines[1] == "rank 0   F0  F1  ....I0  W0  I1  W1     14.3% idle"
    assert lines[2] == "rank 1   ....F0  I0  F1  I1  W0  W1     14.3% idle"


def test_odd_chunks_are_small_letters():
    row = as_text(simulate(build_plan("zbv", 2, 4, 2))).splitlines()[1]
    assert row.startswith("rank 0   F0  F1  F2  f0  i0  w0  f1  i1  w1  F3  I0  W0  ")


def test_picture_has_a_box_for_each_action_and_shows_the_bubble():
    timeline = simulate(build_plan("1f1b", 4, 8), Costs(1, 1, 1))
    width, height, rows = read_png(as_png(timeline))
    # Along the top edge of a rank's boxes, where no label is, count the pixels of the bubble.
    scale = 34
    assert width == 2 * 44 + round(timeline.makespan * scale)
    for rank in range(4):
        line = rows[22 + rank * 30 + 2]
        pixels = [line[3 * x : 3 * x + 3] for x in range(44, width - 44)]
        idle = sum(pixel == bytes((238, 238, 238)) for pixel in pixels)
        # One pixel at the right of each box is its edge and shows the idle colour.
        assert idle == round(timeline.bubble(rank) * timeline.makespan * scale) + 16
        forward = sum(pixel == bytes((126, 170, 226)) for pixel in pixels)
        assert forward == 8 * (scale - 1)
    assert height == 4 * 30 + 44


def test_canvas_cuts_what_lies_outside_and_writes_digits():
    canvas = Canvas(20, 12, (0, 0, 0))
    canvas.fill(-5, -5, 2, 2, (9, 9, 9))
    canvas.fill(15, 10, 40, 40, (7, 7, 7))
    canvas.write("1", 10, 6, (255, 255, 255))
    _, _, rows = read_png(canvas.png())
    assert rows[0][:6] == bytes([9] * 6)
    assert rows[0][6] == 0
    assert rows[11][3 * 14 : 3 * 16] == bytes([0, 0, 0, 7, 7, 7])
    # The glyph of 1: one dot, two dots, one, one, three; a dot is 2 x 2 pixels.
    assert [rows[y].count(255) // 3 for y in range(1, 11)] == [2, 2, 4, 4, 2, 2, 2, 2, 6, 6]


def test_long_timelines_still_fit_a_viewer():
    width, _, _ = read_png(as_png(simulate(build_plan("1f1b", 2, 600))))
    assert width <= 16_000


def test_the_command_prints_and_writes(tmp_path, capsys):
    picture = tmp_path / "p.png"
    assert main([*RUN, "--schedule", "zbv", "--draw", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "rank 1" in out
    assert str(picture) in out
    timeline = simulate(build_plan("zbv", 2, 4, 2), Costs(0.5, 0.5, 0.5))
    assert picture.read_bytes() == as_png(timeline)
    assert (
        main([*RUN, "--schedule", "1f1b", "--draw", str(picture), "--json", "--costs=1,2,3,1"]) == 0
    )
    result = json.loads(capsys.readouterr().out)
    timeline = simulate(build_plan("1f1b", 2, 4), Costs(1, 2, 3, 1))
    assert result["makespan"] == timeline.makespan
    assert result["bubble"] == [timeline.bubble(0), timeline.bubble(1)]
    assert result["ranks"][0][0] == ["F", 0, 0, 0, 0.0, 1.0]
    assert [len(rank) for rank in result["ranks"]] == [8, 8]


@pytest.mark.parametrize(
    "words, message",
    [
        (RUN, "--draw must be given"),
        (["plan", "--draw"], "parallel.pp must be 2 or more"),
        ([*RUN, "--draw", "no-such-folder/x.png"], "must name a file that can be written"),
        ([*RUN, "--draw", "--costs", "1,2"], "--costs must be four numbers"),
        ([*RUN, "--draw", "--costs", "1,1,0,0"], "--costs must be four numbers"),
        ([*RUN, "--draw", "--costs", "1,1,nan,0"], "--costs must be four numbers"),
        ([*RUN[:3], "--schedule", "dualpipev", "--draw", "--batch-size=12"], "2 * pp = 4"),
        ([*RUN[:3], "--draw", "--batch-size=16000000", "--micro-batch-size=1"], "to draw"),
    ],
)
def test_what_cannot_be_drawn_is_refused(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
