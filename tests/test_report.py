"""The data side of the report: what is read from a run folder, and that a page can hold it."""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import webbrowser

import pytest
from report_runs import config_of, record, two_runs, write_run

from mcp_parallel.cli.main import main
from mcp_parallel.config import Config
from mcp_parallel.layout import Coordinate, Layout
from mcp_parallel.monitor.fields import FIELDS
from mcp_parallel.report.document import build_document
from mcp_parallel.report.facts import facts_of
from mcp_parallel.report.fields import KNOWN, shown_fields
from mcp_parallel.report.render import as_html, as_script_data
from mcp_parallel.report.runs import read_run
from mcp_parallel.report.series import MAX_BUCKETS, coarsened, read_series
from mcp_parallel.schedules.build import build_plan
from mcp_parallel.schedules.simulate import Costs, simulate


def series_of(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_series(path)


def data_of(page):
    """The document in a page, as its script reads it."""
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1]
    )


def test_a_short_file_is_kept_as_it_is(tmp_path):
    rows = [{"step": s, "loss": 1 / s, "tokens": 10 * s, "step_time_s": 0.5} for s in (1, 2, 4, 8)]
    series = series_of(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    assert series.step == [1, 2, 4, 8]
    assert series.tokens == [10, 20, 40, 80]
    assert series.time_s == [0.5, 1.0, 2.0, 4.0]  # a row stands for the steps since the one before
    assert series.columns["loss"].mean == [1, 1 / 2, 1 / 4, 1 / 8]
    assert series.columns["loss"].low == series.columns["loss"].high == [1, 1 / 2, 1 / 4, 1 / 8]


def long_rows(count, peak_at):
    noise = random.Random(5)
    for step in range(1, count + 1):
        loss = 3.0 + noise.random() + (90.0 if step == peak_at else 0.0)
        yield f'{{"step":{step},"loss":{loss!r},"tokens":{step * 64},"step_time_s":0.25}}'


@pytest.mark.parametrize(
    "count", [40_000, pytest.param(1_000_000, marks=pytest.mark.slow)], ids=["40k", "1M"]
)
def test_a_long_run_keeps_its_peaks_in_a_small_page(tmp_path, count):
    peak = count * 2 // 3
    lines = list(long_rows(count, peak))
    write_run(tmp_path / "long", rows=lines, config=config_of())
    run = read_run(tmp_path / "long")
    loss = run.metrics.columns["loss"]
    values = [json.loads(line)["loss"] for line in lines]
    each = -(-(count + 1) // MAX_BUCKETS)
    assert run.metrics.rows_a_bucket == each
    assert loss.high == [max(values[i : i + each]) for i in range(0, count, each)]
    assert loss.low == [min(values[i : i + each]) for i in range(0, count, each)]
    means = [statistics.fmean(values[i : i + each]) for i in range(0, count, each)]
    assert loss.mean == pytest.approx(means, rel=1e-12)  # sums of at most 667 float64
    assert max(loss.high) == values[peak - 1]
    assert run.metrics.step[-1] == count
    assert run.metrics.time_s[-1] == count / 4
    page = as_html(build_document([run] * 32))
    assert len(page) < 5_000_000
    column = data_of(page)["runs"][31]["columns"]["loss"]
    assert max(column["high"]) == float(f"{values[peak - 1]:.6g}")


def test_merging_buckets_is_exact(tmp_path):
    lines = list(long_rows(5000, 1234))
    series = series_of(tmp_path, "\n".join(lines))
    short = coarsened(series, 100)
    fine, coarse = series.columns["loss"], short.columns["loss"]
    assert len(short.step) == len(coarse.mean) <= 100
    assert sum(coarse.count) == 5000
    by = -(-len(fine.mean) // 100)
    for i, (low, high) in enumerate(zip(coarse.low, coarse.high, strict=True)):
        assert low == min(fine.low[i * by : (i + 1) * by])
        assert high == max(fine.high[i * by : (i + 1) * by])
    whole = statistics.fmean(json.loads(line)["loss"] for line in lines)
    weighted = sum(m * c for m, c in zip(coarse.mean, coarse.count, strict=True)) / 5000
    assert weighted == pytest.approx(whole, rel=1e-12)
    assert coarsened(series, len(series.step)) is series


def test_what_is_broken_is_left_out_and_counted(tmp_path):
    text = (
        b'{"step": 1, "loss": 2.5}\n'
        b"\xff\xfe not text\n"
        b"[1, 2]\n"
        b'{"loss": 3}\n'
        b'{"step": true, "loss": 3}\n'
        b'{"step": 1e3, "loss": 3}\n'
        b"\n" + b"[" * 100_000 + b"\n"
        b'{"step": 2, "loss": NaN, "grad_norm": 1e999, "lr": null, "word": "x", "mixed": "y"}\n'
        b'{"step": 3, "loss": 2.0, "lr": ' + b"9" * 400 + b', "skipped": true, "mixed": 4}\n'
        b'{"step": 4, "lo'
    )
    series = series_of(tmp_path, text)
    assert series.step == [1, 2, 3]
    assert series.unreadable == 6
    assert series.is_torn
    loss = series.columns["loss"]
    assert (loss.at, loss.mean, loss.not_finite) == ([0, 2], [2.5, 2.0], [1])
    assert series.columns["grad_norm"].not_finite == [1]
    assert series.columns["lr"].mean == []
    assert series.columns["skipped"].mean == [1.0]
    assert series.columns["mixed"].mean == [4]
    assert "word" not in series.columns
    assert series.tokens == [None] * 3
    assert series.time_s == [None] * 3


def test_later_rows_of_a_step_win(tmp_path):
    rows = [{"step": s, "loss": float(s), "step_time_s": 1.0} for s in (1, 2, 3, 4)]
    rows += [{"step": s, "loss": -float(s), "step_time_s": 1.0} for s in (3, 4, 5)]
    series = series_of(tmp_path, "\n".join(map(json.dumps, rows)))
    assert series.step == [1, 2, 3, 4, 5]
    assert series.columns["loss"].mean == [1, 2, -3, -4, -5]
    assert series.time_s == [1, 2, 3, 4, 5]
    assert series.repeated == 2


def test_lists_and_tables_by_name(tmp_path):
    rows = [
        {"step": 1, "by_rank": [1, 2.0], "by_layer": {"a": 1.0, "b": None}, "words": ["x"]},
        {"step": 2, "by_rank": [3, 4.0, 5], "by_layer": {"c": 7, "a": 2.0}, "words": {"x": "y"}},
    ]
    lists = series_of(tmp_path, "\n".join(map(json.dumps, rows))).lists
    assert set(lists) == {"by_rank", "by_layer"}
    assert lists["by_rank"].labels == ["0", "1", "2"]
    assert lists["by_rank"].rows == [[1, 2], [3, 4, 5]]
    assert lists["by_layer"].labels == ["a", "b", "c"]
    assert lists["by_layer"].rows == [[1, None], [2, None, 7]]


def test_the_document_is_valid_json_whatever_is_in_a_run(tmp_path):
    config = config_of(pp=2).to_yaml() + "\nextra:\n  a: .nan\n  b: .inf\n  c: 1" + "0" * 30
    row = {**record(1), "loss": None, "</script>": 3.0, "\u2028": 1.0}
    folder = write_run(tmp_path / "a<b&c\u00e9", rows=[row], config=config)
    page = as_html(build_document([read_run(folder)]))
    data = data_of(page)
    assert page.isascii()
    assert data["runs"][0]["name"] == "a<b&c\u00e9"
    assert data["runs"][0]["config"]["extra"] == {"a": "nan", "b": "inf", "c": "1" + "0" * 30}
    assert {"</script>", "\u2028"} <= set(data["fields"])
    assert "a&lt;b&amp;c&#233;" in page.split("</title>")[0]
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_script_data(float("nan"))


def test_every_field_of_the_monitors_is_explained():
    for name, shown in shown_fields(FIELDS).items():
        assert shown["doc"], name
        assert (shown["group"] == "More") == (name not in KNOWN)
    shown = shown_fields(["zzz_bytes", "lr", "loss", "aaa"])
    assert list(shown) == ["loss", "lr", "aaa", "zzz_bytes"]
    assert shown["loss"]["doc"] == FIELDS["loss"].doc
    assert shown["zzz_bytes"]["group"] == "More"
    assert shown["zzz_bytes"]["format"] == "bytes"


@pytest.mark.parametrize("order", ["dp-pp-cp-tp", "pp-dp-cp-tp"])
def test_every_rank_is_in_the_picture_once_and_in_its_place(order):
    config = config_of(dp=2, pp=2, tp=2, rank_order=order)
    picture = facts_of(config, [])["layout"]
    layout = Layout.from_config(config.parallel)
    found = {}
    for pp, replicas in zip(picture["shown"]["pp"], picture["ranks"], strict=True):
        for dp, ranks in zip(picture["shown"]["dp"], replicas, strict=True):
            for index, rank in enumerate(ranks):
                cp, tp = divmod(index, picture["tp"])
                found[rank] = Coordinate(pp=pp, dp=dp, cp=cp, tp=tp)
    assert found == {rank: layout.coordinate(rank) for rank in range(8)}
    assert picture["layers"] == [[[0, 2]], [[2, 4]]]


def test_a_run_of_before_the_order_of_ranks_is_shown_as_it_was(tmp_path):
    text = config_of(dp=2, pp=2).to_yaml().replace("  rank_order: dp-pp-cp-tp\n", "")
    run = read_run(write_run(tmp_path / "old", rows=[record(1)], config=text))
    assert facts_of(run.config, [])["layout"]["ranks"] == [[[0], [1]], [[2], [3]]]


def test_unequal_shares_and_parts_of_the_work():
    values = {"model": {"preset": "tiny"}, "train": {"global_batch_size": 32}}
    values["parallel"] = {"dp": 2, "pp": 2, "dp_shares": "3,1", "stage_split": "3,1"}
    facts = facts_of(Config.from_mapping(values), [])
    assert facts["layout"]["shares"] == [6, 2]  # of 32 / 4 micro-batches
    assert facts["microbatches"] == 6
    assert facts["layout"]["layers"] == [[[0, 3]], [[3, 4]]]
    assert sum(facts["stage_costs"]) == pytest.approx(1)
    notes = []
    facts_of(config_of(pp=2, stage_split="measured"), notes)
    assert any("the run measures them" in note for note in notes)


def test_what_a_run_measured_is_what_is_shown(tmp_path):
    config = config_of(pp=2, stage_split="measured")
    folder = write_run(tmp_path / "run", rows=[record(1)], config=config)
    (folder / "balance.json").write_text('{"stage_split": [1, 3], "dp_shares": null}')
    notes = []
    facts = facts_of(read_run(folder).config, notes)
    assert facts["layout"]["layers"] == [[[0, 1]], [[1, 4]]]
    assert not notes
    for broken in ("", "[]", '{"stage_split": "x"}', '{"stage_split": [1, "a"]}'):
        (folder / "balance.json").write_text(broken)
        build_document([read_run(folder)])


def test_of_many_ranks_the_ends_are_shown():
    values = {
        "model": {"preset": "405b"},
        "parallel": {"dp": 128, "tp": 8, "pp": 16, "virtual_stages": 7, "schedule": "interleaved"},
        "train": {"global_batch_size": 2048, "micro_batch_size": 1},
    }
    values["model"] |= {"num_layers": 112}
    notes = []
    facts = facts_of(Config.from_mapping(values), notes)
    assert facts["world_size"] == 16384
    picture = facts["layout"]
    assert picture["shown"]["pp"] == list(range(16))
    assert picture["shown"]["dp"] == [0, 1, 2, 127]
    assert sum(len(ranks) for row in picture["ranks"] for ranks in row) == 512
    assert sum(map(len, facts["pipeline"]["ranks"])) == 2 * 112 * 16  # F and B of 16
    assert len(json.dumps(facts)) < 400_000


def test_the_pipeline_is_the_plan_of_the_run():
    picture = facts_of(config_of(pp=2, schedule="zbv"), [])["pipeline"]
    timeline = simulate(build_plan("zbv", 2, 4, 2), Costs(0.5, 0.5, 0.5))
    assert picture["microbatches"] == picture["shown"] == 4
    assert picture["bubble"] == [round(timeline.bubble(rank), 6) for rank in range(2)]
    drawn = [
        ["FBIW"[kind], microbatch, end - start]
        for kind, _, microbatch, start, end in picture["ranks"][1]
    ]
    planned = [[s.action.kind, s.action.microbatch, s.end - s.start] for s in timeline.ranks[1]]
    assert drawn == planned
    assert facts_of(config_of(dp=2), [])["pipeline"] is None


def test_figures_of_a_run(tmp_path):
    first, second = (read_run(folder) for folder in two_runs(tmp_path))
    documents = build_document([first, second])
    one, other = (run["summary"] for run in documents["runs"])
    assert (one["state"], other["state"]) == ("done", "diverged")
    assert (one["steps"], one["total_steps"], one["tokens"]) == (60, 60, 60 * 2048)
    late = [record(step)["mfu"] for step in range(31, 61)]
    assert one["mfu"] == pytest.approx(statistics.median(late), rel=1e-5)
    six_digits = {"rel": 5e-6}
    assert one["memory_bytes"] == pytest.approx(327 * 2**20, **six_digits)
    assert documents["runs"][0]["memory_by_pp"] == pytest.approx([327 * 2**20], **six_digits)
    assert documents["runs"][1]["memory_by_pp"] == pytest.approx(
        [300 * 2**20, 309 * 2**20], **six_digits
    )
    assert other["verdicts"] == 2
    assert other["loss"] == pytest.approx(record(57, pp=2, ranks=2, seed=1)["loss"], rel=1e-5)
    assert documents["runs"][1]["columns"]["loss"]["bad"] == [57]


def test_an_unknown_key_or_value_hides_no_curve(tmp_path):
    text = config_of(dp=2).to_yaml().replace("zero: 0", "zero: 9\n  warp: 3")
    run = read_run(write_run(tmp_path / "new", rows=[record(1)], config=text + "\nlater: {a: 1}\n"))
    document = build_document([run])["runs"][0]
    assert document["columns"]["loss"]["mean"]
    assert document["facts"] is None
    notes = "\n".join(document["notes"])
    assert "keys of another version, shown as they stand: parallel.warp, later" in notes
    assert "parallel.zero must be" in notes
    assert document["config"]["later"] == {"a": 1}


def test_other_files_with_steps_have_their_own_axis(tmp_path):
    folder = write_run(tmp_path / "run", rows=[record(1), record(2)], config=config_of())
    (folder / "probe.jsonl").write_text('{"step": 2, "heat": 40}\n{"no": "step"}\n')
    document = build_document([read_run(folder)])
    run = document["runs"][0]
    column = run["columns"]["probe/heat"]
    assert run["axes"][column["axis"]]["step"] == [2]
    assert document["fields"]["probe/heat"]["group"] == "More"


@pytest.mark.parametrize(
    "make, words, message",
    [
        (
            None,
            [],
            "RUN must be the folder of a run (config.yaml, metrics.jsonl), got no folder at",
        ),
        ("folder", [], "got a folder without a run at"),
        ("file", [], "got no folder at"),
        ("run", ["--out", "run/config.yaml/r.html"], "--out must name a file that can be written"),
        (
            "run",
            ["--out", "."],
            "--out must name a file that can be written, got '.' (it is a folder)",
        ),
        ("run", ["--out", "run/config.yaml"], "(it is a file, and no page that could be replaced)"),
        ("run", ["--out", "run/pipe"], "(it is a device, socket or pipe)"),
        ("metrics is a folder", [], "got Is a directory for 'run/metrics.jsonl'; fix that"),
        ("run", ["run"] * 32, "RUN must be given at most 32 times, got 33"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, capsys, make, words, message):
    monkeypatch.chdir(tmp_path)
    if make == "folder":
        (tmp_path / "run").mkdir()
    elif make == "file":
        (tmp_path / "run").write_text("x")
    elif make == "run":
        write_run(tmp_path / "run", rows=[], config=config_of())
        os.mkfifo(tmp_path / "run" / "pipe")
    elif make is not None:
        (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    before = times_of(tmp_path)
    assert main(["report", "run", *words]) == 2
    assert times_of(tmp_path) == before
    err = capsys.readouterr().err
    assert err.startswith("report: ")
    assert message in err
    assert not list(tmp_path.glob("*.html"))
    assert not list(tmp_path.glob(".*tmp"))


def times_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_the_command_prints_a_table_or_json(tmp_path, capsys):
    folders = [str(folder) for folder in two_runs(tmp_path)]
    out = tmp_path / "page.html"
    assert main(["report", *folders, "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["run", "layout", "steps", "state"]
    assert "dp 2, tp 2" in lines[1]
    assert re.search(r"58/60 +diverged ", lines[2])
    assert lines[-1] == f"report: {out}"
    assert main(["report", *folders, "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bytes"] == out.stat().st_size
    assert [run["state"] for run in result["runs"]] == ["done", "diverged"]


@pytest.mark.parametrize("is_there", [True, False])
def test_the_page_is_shown_in_the_browser_when_asked(tmp_path, monkeypatch, capsys, is_there):
    asked = []
    monkeypatch.setattr(webbrowser, "open", lambda url: asked.append(url) or is_there)
    write_run(tmp_path / "run", rows=[record(1)], config=config_of())
    out = tmp_path / "a page.html"
    words = ["report", str(tmp_path / "run"), "--out", str(out)]
    assert main(words) == 0
    assert asked == []
    assert main([*words, "--open"]) == 0
    assert asked == [out.as_uri()]
    assert ("no browser was found" in capsys.readouterr().err) is not is_there
