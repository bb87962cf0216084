"""The planner against published runs: a table of predictions, and whether its choices are theirs.

    python bench/planner_validation.py [--json]

Needs no GPU and takes about a minute of one core. Docs: docs/planner.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace

from mcp_parallel.planner.hardware import HARDWARE
from mcp_parallel.planner.layouts import Job
from mcp_parallel.planner.published import llama3
from mcp_parallel.planner.search import search
from mcp_parallel.planner.validate import Judged, Summary, fit, judge, summarize


def main() -> int:
    """Print the table, or with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    constants = fit()
    rows = judge(constants=constants)
    groups = {"all rows": rows, "judged half": [row for row in rows if not row.is_fitted]}
    groups |= {f"table {t}": [row for row in rows if row.run.table == t] for t in "ABC"}
    summaries = {name: summarize(members) for name, members in groups.items()}
    seconds = search_seconds()
    if args.json:
        plain = {name: asdict(summary) for name, summary in summaries.items()}
        lines = [_mapping(row) for row in rows]
        result = {"constants": constants, "rows": lines, "summaries": plain, "search": seconds}
        sys.stdout.write(json.dumps(result) + "\n")
        return 0
    for row in rows:
        sys.stdout.write(_line(row) + "\n")
    sys.stdout.write("\nmatmul_efficiency: ")
    sys.stdout.write(", ".join(f"{name} {value:.3f}" for name, value in constants.items()) + "\n")
    for name, summary in summaries.items():
        sys.stdout.write(_summary(name, summary) + "\n")
    cpu = ", ".join(f"{ranks} GPUs {value:.2f} s" for ranks, value in seconds.items())
    sys.stdout.write(f"search of Llama 3 405B, CPU time: {cpu}\n")
    return 0


def search_seconds() -> dict[str, float]:
    """CPU seconds of a search, the least of three."""
    found = {}
    for ranks in (64, 1024):
        job = Job(
            model=llama3("405b"),
            ranks=ranks,
            hardware=HARDWARE["h100"],
            global_batch_size=1536,
        )
        times = []
        for _ in range(3):
            start = time.process_time()
            search(replace(job))
            times.append(time.process_time() - start)
        found[str(ranks)] = min(times)
    return found


def _mapping(row: Judged) -> dict[str, object]:
    run = row.run
    return {
        "table": run.table,
        "name": run.name,
        "gpu": run.hardware.name,
        "ranks": run.ranks,
        "layout": dict(run.layout),
        "published_tflops": run.tflops,
        "predicted_tflops": row.tflops,
        "error": row.error,
        "place": row.place,
        "place_held": row.place_held,
        "is_open": row.is_open,
        "regret": row.regret,
        "is_fitted": row.is_fitted,
        "memory_gib": row.predicted.memory.total / 2**30,
        "published_memory_gib": run.memory_gib,
    }


def _line(row: Judged) -> str:
    run = row.run
    tp, pp, cp = (run.layout[name] for name in ("tp", "pp", "cp"))
    where = f"{run.table} {run.hardware.name.split()[0]:5} {run.name:24}"
    layout = f"dp {row.run.degrees[0]:3} tp {tp} pp {pp:2} cp {cp}"
    places = f"place {row.place or '-'!s:>3} {row.place_held or '-'!s:>3}"
    half = "fit" if row.is_fitted else "   "
    memory = f"{row.predicted.memory.total / 2**30:5.1f}"
    seen = f" of {run.memory_gib}" if run.memory_gib else ""
    return (
        f"{where} {layout}  {run.tflops:5.0f} {row.tflops:5.0f} {row.error:+6.1%} {half}  "
        f"{places}  {row.regret:+6.1%}  {memory}{seen} GiB"
    )


def _summary(name: str, summary: Summary) -> str:
    return (
        f"{name:12} {summary.rows:3} rows  median error {summary.median_error:.1%}, rank "
        f"correlation {summary.rank_correlation:.3f}, in our top 3: {summary.found} free, "
        f"{summary.found_held} with what the experiment fixed, {summary.found_open} of "
        f"{summary.open_rows} where that leaves a choice; published behind our first by "
        f"{summary.median_regret:.1%} (median); most memory {summary.most_memory:.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
