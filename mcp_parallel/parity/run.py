"""The whole matrix in one worker set: rank 0 keeps the references, judges and prints."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from mcp_parallel.config import Config
from mcp_parallel.data.source import Data
from mcp_parallel.errors import FAILED, OK
from mcp_parallel.launch.context import RankContext
from mcp_parallel.parity.cases import Case, Variation
from mcp_parallel.parity.measure import Measurement, Meshes, measure
from mcp_parallel.parity.verdict import Row, judge

_COLUMNS = f"{'layout':34} {'':5} {'loss diff':>10} {'norm diff':>10} {'update diff':>11}"

# A key of the store for each call: all ranks make the same calls.
_folders = count()


def run_matrix(
    base: Config,
    data: Data,
    context: RankContext,
    cases: Sequence[Case],
    precisions: Sequence[str],
    *,
    as_json: bool,
) -> int:
    """Measure and judge each case in its own ones of ``precisions``; collective.

    Checkpoints of cases that go on at another layout are written to a folder of the system's for
    temporary ones and removed at the end.

    Returns:
        ``OK``, or ``FAILED`` on rank 0 when a case fell out of its tolerance (the other ranks
        have no verdict and return ``OK``).
    """
    folder = _shared_folder(context)
    try:
        return _run(base, data, context, cases, precisions, folder, as_json=as_json)
    finally:
        if context.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _shared_folder(context: RankContext) -> Path:
    """A new folder, the same on all ranks, which are on this machine."""
    key = f"parity-folder-{next(_folders)}"
    if context.rank == 0:
        context.store.set(key, tempfile.mkdtemp(prefix="parity-"))
    return Path(context.store.get(key).decode())


def _run(
    base: Config,
    data: Data,
    context: RankContext,
    cases: Sequence[Case],
    precisions: Sequence[str],
    folder: Path,
    *,
    as_json: bool,
) -> int:
    meshes = Meshes(context.device)
    references: dict[tuple[Variation, str], Measurement] = {}
    rows: list[Row] = []
    if context.rank == 0 and not as_json:
        print(_COLUMNS, flush=True)  # noqa: T201
    for precision in precisions:
        for case in cases:
            if precision not in case.precisions:
                continue
            key = (case.reference().variation, precision)
            if context.rank == 0 and key not in references:
                alone = measure(case.reference(), base, data, meshes, precision, folder)
                assert alone is not None
                references[key] = alone
            got = measure(case, base, data, meshes, precision, folder)
            if context.rank == 0:
                assert got is not None
                rows.append(judge(case.name, precision, got, references[key]))
                if not as_json:
                    print(format_row(rows[-1]), flush=True)  # noqa: T201
    return _report(rows, as_json=as_json) if context.rank == 0 else OK


def format_row(row: Row) -> str:
    """One line of the table; a failed case names the parameter that differs most."""
    where = f"largest in {row.worst_parameter}" if row.same_loss_scales else "loss scales differ"
    verdict = "ok" if row.passed else f"FAILED ({where})"
    return (
        f"{row.case:34} {row.precision:5} {row.loss_diff:10.1e} {row.grad_norm_diff:10.1e} "
        f"{row.update_diff:11.1e}  {verdict}"
    )


def _report(rows: Sequence[Row], *, as_json: bool) -> int:
    failed = [row for row in rows if not row.passed]
    if as_json:
        json.dump({"ok": not failed, "rows": [row.to_mapping() for row in rows]}, sys.stdout)
        print(flush=True)  # noqa: T201
    else:
        names = ", ".join(f"{row.case} ({row.precision})" for row in failed)
        verdict = f"{len(failed)} of {len(rows)} differ: {names}" if failed else "all equal"
        print(f"{len(rows)} runs, {verdict}", flush=True)  # noqa: T201
    return FAILED if failed else OK
