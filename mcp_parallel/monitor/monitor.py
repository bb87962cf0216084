"""The trainer's one window to the outside: each step goes to disk and to the screen from here."""

from __future__ import annotations

import platform
import shlex
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcp_parallel.errors import BAD_CONFIG, DIVERGED, FAILED, OK, STOPPED
from mcp_parallel.layout import Layout
from mcp_parallel.model.traits import traits_of
from mcp_parallel.monitor.divergence import find_recovery
from mcp_parallel.monitor.metrics import MetricsWriter
from mcp_parallel.monitor.progress import Progress, eta_text
from mcp_parallel.monitor.run_folder import RunFolder
from mcp_parallel.monitor.throughput import flops_per_step
from mcp_parallel.monitor.verdicts import Finding, Verdicts
from mcp_parallel.monitor.watch import Watch, kinds_looked_for

if TYPE_CHECKING:
    from mcp_parallel.config import Config
    from mcp_parallel.evaluate import Validation
    from mcp_parallel.step import StepResult


# A thousand ranks' times in each step's line would be gigabytes in a long run.
_MOST_RANKS = 64


class Monitor:
    """Records the steps of a run; does nothing on ranks that are not ``is_main``.

    A record holds ``step`` (steps done, this one included), ``tokens`` (trained on so far, earlier
    sessions in this folder included), and what ``fields.FIELDS`` says; ``tokens_per_s``,
    ``step_time_s``, ``data_wait_share`` (part of it in which rank 0 waited for its batch),
    ``model_tflops_per_rank`` and ``mfu`` are over the steps since the record before, all else is of
    the step alone. What is out of its healthy range goes to ``verdicts.jsonl`` and, in one line, to
    the screen. With 1-bit Adam also ``wire_bytes`` (sent by rank 0 over dp in the step) and
    ``compression_ratio`` (what float32 takes, over that). With a pipeline also ``bubble`` (idle
    fraction of the step's
    forward and backward, mean over pipeline ranks) and ``bubble_by_rank`` (of each; see
    ``mcp_parallel.parallel.clock.bubbles``), both of that step alone. With loss scaling also
    ``loss_scale`` and ``skipped`` (the gradients overflowed, nothing was updated) of the step; a
    skipped step is always written. Where the data's validation part was measured after a step,
    which is then written, also ``val_loss`` and, of images, ``val_accuracy`` (0 to 1). Of a model
    that reads images, ``tokens`` are images.

    Args:
        config: the run.
        run_dir: its folder.
        start_step: steps done before this session.
        is_main: whether this rank speaks for the job.
        resumed_from: the checkpoint that it went on from.
        hosts: name of each rank's host; empty means this one alone.
        peak_tflops: of a rank's hardware; None: not known, and no MFU.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        start_step: int,
        is_main: bool,
        resumed_from: Path | None = None,
        hosts: Sequence[str] = (),
        peak_tflops: float | None = None,
    ) -> None:
        self._is_main = is_main
        self._lr, self._resumed_from = config.train.lr, resumed_from
        if not is_main:
            return
        self._every = config.monitor.every
        self._total_steps = config.train.steps
        self._precision, self._has_amp = config.train.precision, config.amp.enabled
        self._traits = traits_of(config.model)
        self._run_dir = run_dir
        self._metrics = MetricsWriter(RunFolder(run_dir), config.monitor.tensorboard, start_step)
        self._verdicts = Verdicts(RunFolder(run_dir).verdicts_file, start_step)
        world_size = Layout.from_config(config.parallel).world_size
        self._watch = Watch(config, hosts or [platform.node()] * world_size)
        self._peak_tflops = peak_tflops
        self._tflops_per_rank_and_step = flops_per_step(config) / world_size / 1e12
        self._progress = Progress(config.train.steps, start_step, unit=self._traits.unit)
        self._tokens_before = self._tokens = (self._metrics.last_kept or {}).get("tokens") or 0
        self._start_step = self._step = start_step
        self._start_s = time.monotonic()
        self._last: dict[str, Any] | None = None
        self._validation: Validation | None = None
        self._window_tokens = self._window_steps = 0
        self._window_s = self._window_wait_s = 0.0

    def record(
        self,
        step: int,
        result: StepResult,
        lr: float,
        step_time_s: float,
        *,
        communication_share: float | None = None,
        validation: Validation | None = None,
        data_wait_s: float | None = None,
    ) -> None:
        """Take in the step after ``step`` steps; it is written when ``monitor.every`` says so."""
        if not self._is_main:
            return
        self._step = step + 1
        self._tokens += result.num_tokens
        self._window_tokens += result.num_tokens
        self._window_s += step_time_s
        self._window_wait_s += data_wait_s or 0.0
        self._window_steps += 1
        self._last = {
            "step": self._step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens": self._tokens,
            "tokens_per_s": self._window_tokens / self._window_s,
            "step_time_s": self._window_s / self._window_steps,
        }
        if data_wait_s is not None:
            self._last["data_wait_share"] = self._window_wait_s / self._window_s
        tflops = self._tflops_per_rank_and_step * self._window_steps / self._window_s
        self._last["model_tflops_per_rank"] = tflops
        if self._peak_tflops:
            self._last["mfu"] = tflops / self._peak_tflops
        self._last |= _fields_of(result)
        if communication_share is not None:
            self._last["communication_share"] = communication_share
        if validation is not None:
            self._validation = validation
            self._last["val_loss"] = validation.loss
            if validation.accuracy is not None:
                self._last["val_accuracy"] = validation.accuracy
        fields, findings = self._watch.look(self._step, result, lr)
        self._last |= fields
        self._progress.update(self._last)
        self.tell(findings, kinds_looked_for(result))
        is_due = self._step % self._every == 0 or not result.is_finite
        if is_due or validation is not None or result.health is not None:
            self._write()

    def tell(self, findings: Sequence[Finding], kinds: Iterable[str] = ()) -> None:
        """Say and write down what is new of ``findings`` (see ``Verdicts.judge``)."""
        if not self._is_main:
            return
        for finding in self._verdicts.judge(self._step, kinds, findings):
            self._progress.say(f"step {self._step}: {finding.text}")
            self._metrics.note(self._step, finding.text)

    def close(self, status: int) -> None:
        """Write what is left, end the display and print what a person wants to know next."""
        if not self._is_main:
            return
        if self._window_steps:
            self._write()
        self._metrics.close()
        self._progress.close(self._summary(status))

    def _write(self) -> None:
        if self._last is not None:
            self._metrics.log(self._last)
        self._window_tokens = self._window_steps = 0
        self._window_s = self._window_wait_s = 0.0

    def _summary(self, status: int) -> str:
        elapsed_s = time.monotonic() - self._start_s
        folder = shlex.quote(str(self._run_dir))
        resume = f"mcp-parallel train --resume --run-dir {folder}"
        what, advice = {
            OK: ("done", self._after_training(folder, resume)),
            STOPPED: ("stopped, checkpoint written", resume),
            BAD_CONFIG: ("ended: the data is not what was written", resume),
            FAILED: ("ended: a file could not be read or written", resume),
            DIVERGED: (f"diverged (loss or gradient is not finite{self._at_loss_scale()})", ""),
        }.get(status, (f"ended with status {status}", resume))
        way_on = [f"next: {advice}"]
        if status == DIVERGED:
            recovery = find_recovery(self._run_dir, self._step - 1, self._resumed_from)
            *way_on, command = recovery.lines(self._lr)
            way_on.append(command + self._or_bf16())
        lines = [f"{what}: {self._step} of {self._total_steps} steps in {eta_text(elapsed_s)}"]
        if self._last is not None:
            rate = (self._tokens - self._tokens_before) / max(elapsed_s, 1e-9)
            lines[0] += f", loss {self._last['loss']:.4f}, {rate:,.0f} {self._traits.unit}/s"
        if self._validation is not None:
            accuracy = self._validation.accuracy
            share = "" if accuracy is None else f"accuracy {accuracy:.2%}, "
            lines.append(f"validation: {share}loss {self._validation.loss:.4f}")
        return "\n".join([*lines, f"run folder: {folder}", *way_on])

    def _after_training(self, folder: str, resume: str) -> str:
        if self._traits.continues_text:
            return f"mcp-parallel generate {folder} --prompt 'def '"
        return f"{resume} --steps {2 * self._total_steps}"

    def _at_loss_scale(self) -> str:
        scale = (self._last or {}).get("loss_scale")
        return "" if scale is None else f" at loss scale {scale:g}, the lowest"

    def _or_bf16(self) -> str:
        if self._precision != "fp16":
            return ""
        return f", or --set {'amp.dtype' if self._has_amp else 'train.precision'}=bf16"


def _fields_of(result: StepResult) -> dict[str, Any]:
    """What only some runs or steps have."""
    found: dict[str, Any] = {}
    if result.wire_bytes is not None:
        found["wire_bytes"] = result.wire_bytes
        if result.wire_bytes and result.uncompressed_bytes:
            found["compression_ratio"] = result.uncompressed_bytes / result.wire_bytes
    if result.loss_scale is not None:
        found |= {"loss_scale": result.loss_scale, "skipped": result.skipped}
    if result.bubbles is not None:
        found["bubble"] = sum(result.bubbles) / len(result.bubbles)
        found["bubble_by_rank"] = list(result.bubbles)
    if result.own_s is not None and (len(result.own_s) <= _MOST_RANKS or result.health is not None):
        found["compute_s_by_rank"] = list(result.own_s)
    if result.health is not None:
        found |= result.health.fields()
    return found
