"""A checkpoint that the system refuses to write: one line, one status, older ones left whole."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource

import pytest
from contexts import rank_context
from test_divergence import run_config

from mcp_parallel.checkpoint import find_latest, verify
from mcp_parallel.errors import FAILED, OK
from mcp_parallel.trainer import Trainer


def fit_with_little_space(rank, world, run_dir, limited_rank):
    """(status, stderr) of a run whose second checkpoint finds one rank's files limited in size."""
    config = run_config(world, steps=6, every=2, lr=1e-3)
    trainer = Trainer(config, context=rank_context(rank, world), run_dir=run_dir)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    save = trainer._save

    def limited():
        if trainer.step == 4 and rank == limited_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        return save()

    trainer._save = limited
    words = io.StringIO()
    try:
        with contextlib.redirect_stderr(words), contextlib.redirect_stdout(io.StringIO()):
            status = trainer.fit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return status, words.getvalue()


@pytest.mark.parametrize("limited_rank", [0, 1])
def test_a_full_disk_ends_all_ranks_with_one_line(tmp_path, ranks, limited_rank):
    ended = ranks.run(fit_with_little_space, tmp_path, limited_rank, ranks=2)
    assert [status for status, _ in ended] == [FAILED, FAILED]
    first, second = (words for _, words in ended)
    assert first.startswith("save: ")
    assert os.strerror(errno.EFBIG) in first
    assert f"(rank {limited_rank} of 2)" in first
    assert "step 4 is lost" in first
    assert "--resume" in first
    assert first.count("\n") == 1
    assert second == ""
    latest = find_latest(tmp_path / "checkpoints")
    assert latest is not None
    assert latest.name == "step_00000002"
    verify(latest)


def test_the_run_goes_on_once_there_is_space(tmp_path, ranks):
    [(status, _), _] = ranks.run(fit_with_little_space, tmp_path, 1, ranks=2)
    assert status == FAILED
    latest = find_latest(tmp_path / "checkpoints")
    trainer = Trainer(
        run_config(1, steps=6, every=2, lr=1e-3), run_dir=tmp_path, resume_from=latest
    )
    assert trainer.fit() == OK
    assert trainer.step == 6
