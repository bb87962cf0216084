"""The training run: data, step, record, checkpoint, until it is done or asked to stop."""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mcp_kernels.spans import span
from mcp_parallel.check import check
from mcp_parallel.checkpoint.format import CheckpointError
from mcp_parallel.config import Config
from mcp_parallel.data.ahead import Ahead
from mcp_parallel.data.source import Data, open_data, source_of
from mcp_parallel.errors import BAD_CONFIG, DIVERGED, FAILED, OK, STOPPED
from mcp_parallel.evaluate import Evaluator
from mcp_parallel.launch.context import RankContext
from mcp_parallel.launch.variables import own_cuts
from mcp_parallel.layout import Layout
from mcp_parallel.monitor.monitor import Monitor
from mcp_parallel.monitor.nonfinite import explain
from mcp_parallel.monitor.peak import peak_tflops
from mcp_parallel.monitor.profile import Profile, traced_steps
from mcp_parallel.monitor.run_folder import RunFolder
from mcp_parallel.monitor.texts import gather_texts
from mcp_parallel.optim.schedule import learning_rate
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.settle import settle
from mcp_parallel.snapshot import load_step, save_step
from mcp_parallel.step import StepResult, TrainingStep
from mcp_parallel.unread import UNREADABLE, end_unread, padding_batch


class Trainer:
    """One rank of a training run.

    Every rank of the layout makes one with the same arguments (its own ``context`` apart) and
    calls ``fit``.

    Args:
        config: the run; checked again here (``mcp_parallel.check``).
        context: this rank, its process group joined; None is a run of this process alone.
        data: what to train on; None opens ``config.data``.
        run_dir: where metrics and checkpoints go.
        resume_from: a step directory that verified, of any layout, or None for a new run.
        profile_steps: how many steps to trace (see ``mcp_parallel.monitor.profile``).

    Raises:
        ConfigError: the configuration is not legal, or not for this number of ranks.
        CheckpointError: ``resume_from`` is damaged or of another model.
    """

    def __init__(
        self,
        config: Config,
        context: RankContext | None = None,
        data: Data | None = None,
        run_dir: Path | str = "runs/latest",
        resume_from: Path | str | None = None,
        profile_steps: int = 0,
    ) -> None:
        resume_from = None if resume_from is None else Path(resume_from)
        self.context = context or _lone_rank()
        check(config, self.context.world_size, own_cuts())
        mesh = build_mesh(Layout.from_config(config.parallel), self.context.device)
        assert mesh is not None
        self.config = config = settle(config, mesh, Path(run_dir))
        self.train_step = TrainingStep(config, mesh, Path(run_dir) / "scratch")
        self.data = source_of(data or open_data(config), config)
        self.batches = Ahead(self.data, config)
        self.evaluate = Evaluator(self.train_step, self.data)
        self.run_dir = Path(run_dir)
        self.step = load_step(resume_from, self.train_step) if resume_from else 0
        self.monitor = Monitor(
            config,
            self.run_dir,
            start_step=self.step,
            is_main=self.context.rank == 0,
            resumed_from=resume_from,
            hosts=gather_texts(platform.node(), mesh),
            peak_tflops=peak_tflops(config, mesh.device) if self.context.rank == 0 else None,
        )
        self._first_step = self.step
        self._unread: Exception | None = None
        traced = traced_steps(self.step, config.train.steps, profile_steps)
        self.profile = Profile(RunFolder(self.run_dir).profile_dir, self.context.rank, traced)
        self._ended_with: int | None = None

    def fit(self) -> int:
        """Train to ``train.steps``; returns an exit status (see ``mcp_parallel.errors``).

        A stop that any rank was asked for ends the step in flight, writes a checkpoint and returns
        ``STOPPED``. A loss or gradient that is not finite returns ``DIVERGED``: the step is not
        applied, nothing is saved, and the last good checkpoint is named with the way on from it.
        Where loss scaling can go lower, such a step is skipped instead and training goes on. Data
        that cannot be read any more ends the run after a checkpoint (see ``unread.end_unread``), a
        checkpoint that the system refuses to write returns ``FAILED``; both are told on stderr.

        After an exception (Ctrl-C in a notebook) another call goes on with the step that it ended.
        After the last step it does nothing.

        Raises:
            RuntimeError: called again after another status than ``OK``.
        """
        if self._ended_with == OK:
            return OK
        if self._ended_with is not None:
            raise RuntimeError(
                "Trainer: fit must be called on a new Trainer once a run has ended early, got one "
                f"that ended with status {self._ended_with} after step {self.step}; pass "
                "resume_from=CHECKPOINT to a new one"
            )
        with self.train_step.work.running():
            self._ended_with = self._fit()
        return self._ended_with

    def _fit(self) -> int:
        status = OK
        while self.step < self.config.train.steps:
            result = self._train_one_step()
            if result.is_unread:
                status = end_unread(self._unread, self.train_step.mesh)
                break
            if not (result.is_finite or result.skipped):
                status = DIVERGED
                break
            self.step += 1
            if result.stop_requested:
                status = STOPPED
                break
            if self._is_checkpoint_due() and not self._save():
                status = FAILED
                break
            if self.evaluate.is_unread:
                status = end_unread(self.evaluate.unread, self.train_step.mesh)
                break
        self.profile.close()
        self.batches.close()
        is_new = self.step > self._first_step and not self._is_checkpoint_due()
        is_left = status == STOPPED or (status in (BAD_CONFIG, FAILED) and is_new)
        if is_left and not self._save():
            status = FAILED
        self.monitor.close(status)
        return status

    def _train_one_step(self) -> StepResult:
        start = time.perf_counter()
        self.train_step.work.start()
        lr = learning_rate(self.step, self.config.train)
        with self.profile.step(self.step):
            with span("data"):
                inputs, targets, documents = self._batch()
            result = self.train_step(
                inputs,
                targets,
                lr,
                documents=documents,
                step=self.step,
                stop=self.context.stop_requested(),
                unread=self._unread is not None,
            )
        if result.is_unread:
            return result
        step_time_s = time.perf_counter() - start
        communication_share = self.train_step.work.communication_share()
        validation = None
        if self._is_due(self.config.monitor.validate_every) and result.is_finite:
            with span("validation"):
                validation = self.evaluate()
        self.monitor.record(
            self.step,
            result,
            lr,
            step_time_s,
            communication_share=communication_share,
            validation=validation,
            data_wait_s=self.batches.waited_s,
        )
        if not (result.is_finite or result.skipped):
            with span("search for what is not finite"):
                finding = explain(self.train_step, inputs, targets, documents, done=self.step)
            self.monitor.tell([finding])
        return result

    def _batch(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """This rank's part of the step's batch: inputs, targets, documents."""
        device = self.context.device
        rows = self.train_step.rows()
        self._unread = None
        try:
            batch = self.batches.take(self.step, rows)
        except UNREADABLE as error:
            self._unread = error
            batch = padding_batch(self.config, len(rows))
        return (
            torch.from_numpy(batch.inputs).to(device),
            torch.from_numpy(batch.targets).to(device),
            None if batch.documents is None else torch.from_numpy(batch.documents),
        )

    def _is_due(self, every: int) -> bool:
        """Whether the step in flight is the last one, or one of each ``every``."""
        done = self.step + 1
        return done == self.config.train.steps or (every > 0 and done % every == 0)

    def _is_checkpoint_due(self) -> bool:
        every = self.config.checkpoint.every
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    def _save(self) -> bool:
        """Whether a checkpoint was written; where the system refused, one rank has said so."""
        try:
            save_step(self.run_dir, self.step, self.train_step)
        except CheckpointError as error:
            if not error.is_refused:
                raise
            if self.context.rank == 0:
                sys.stderr.write(
                    f"{error}; step {self.step} is lost, older checkpoints in "
                    f"{str(self.run_dir / 'checkpoints')!a} are whole: free some space or mend "
                    "what the message names, and go on with --resume\n"
                )
                sys.stderr.flush()
            return False
        return True


def _lone_rank() -> RankContext:
    return RankContext(
        rank=0, world_size=1, local_rank=0, device=torch.device("cpu"), store=dist.HashStore()
    )
