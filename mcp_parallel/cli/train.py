"""``mcp-parallel train``: start the ranks of a run here, or be one of them under torchrun."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcp_parallel.cli.arguments import (
    RunOptions,
    add_run_arguments,
    planned,
    resolve_arguments,
)
from mcp_parallel.config import Config
from mcp_parallel.data.sources import anchored
from mcp_parallel.errors import BAD_CONFIG, DIVERGED, OK, STOPPED, ConfigError
from mcp_parallel.launch.start import RunStart, choose_folder, find_start
from mcp_parallel.launch.variables import own_cuts, under_torchrun, wanted_timeout_s
from mcp_parallel.layout import Layout
from mcp_parallel.model.traits import traits_of
from mcp_parallel.monitor.divergence import find_recovery
from mcp_parallel.monitor.run_folder import RunFolder
from mcp_parallel.rules.hosts import host_notes

if TYPE_CHECKING:
    from mcp_parallel.data.source import Data
    from mcp_parallel.launch.context import RankContext

# How long other ranks of a host keep a refused config to themselves: torchrun ends all ranks when
# the first one ends, and the host's first rank is the one that says why.
_LET_RANK_0_SPEAK_S = 2.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``train`` command."""
    parser = subparsers.add_parser(
        "train",
        help="train a model on this machine, or as a rank of torchrun",
        description="Train a model. Starts all ranks of the layout on this machine; under "
        "torchrun this process is one of them.",
    )
    add_run_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked, then train; returns an exit status."""
    return _run_under_torchrun(args) if under_torchrun() else _run_here(args)


def _run_here(args: argparse.Namespace) -> int:
    config, options = resolve_arguments(args)
    with _opened_run(config, options) as (folder, start):
        if _is_finished(config, start):
            return _report(folder, start, OK, options)
        data = _open_data(config)

        from mcp_parallel.launch.local import launch_local

        status = launch_local(
            _rank_body(config, data, folder.path, start.resume_from, options),
            Layout.from_config(config.parallel).world_size,
            timeout_s=wanted_timeout_s(),
            preload=("mcp_parallel.trainer",),
        )
        return _report(folder, start, status, options)


def _run_under_torchrun(args: argparse.Namespace) -> int:
    try:
        world_size = int(os.environ["WORLD_SIZE"])
        config, options = resolve_arguments(args, world_size, own_cuts(), is_planned_later=True)
    except ConfigError:
        if os.environ.get("LOCAL_RANK", os.environ["RANK"]) == "0":  # once on each host
            raise
        time.sleep(_LET_RANK_0_SPEAK_S)
        return BAD_CONFIG

    from mcp_parallel.launch.env import run_from_env

    return run_from_env(
        lambda context: _be_a_rank(config, options, context), timeout_s=wanted_timeout_s()
    )


def _be_a_rank(config: Config, options: RunOptions, context: RankContext) -> int:
    """Rank 0 chooses folder and checkpoint and tells the others, or tells them that it refused."""
    if context.rank != 0:
        return _follow(options, context, json.loads(context.store.get("start")))
    job_store = context.job_store
    if job_store is not None and job_store.check(["run_dir"]):
        # torchrun restarted a job that had opened this folder: go on there, whatever was asked for.
        options = replace(options, run_dir=Path(job_store.get("run_dir").decode()))
        config = config.with_overrides(["checkpoint.resume=auto"])
    try:
        if config.parallel.auto:
            config, options = planned(config, options, context.world_size, own_cuts())
        with _opened_run(config, options) as (folder, start):
            if job_store is not None:
                job_store.set("run_dir", str(folder.path))
            decision = {
                "run_dir": str(folder.path),
                "resume_from": start.resume_from and str(start.resume_from),
                "status": OK if _is_finished(config, start) else None,
                "config": config.to_mapping(),
            }
            context.store.set("start", json.dumps(decision))
            status = _follow(options, context, decision)
            return _report(folder, start, status, options)
    except ConfigError:
        context.store.set("start", json.dumps({"status": BAD_CONFIG}))
        raise


def _follow(options: RunOptions, context: RankContext, decision: dict[str, Any]) -> int:
    """Do what rank 0 decided; a status there means that no training is to be done."""
    if decision["status"] is not None:
        return decision["status"]
    resume_from = decision["resume_from"] and Path(decision["resume_from"])
    config = Config.from_mapping(decision["config"])  # rank 0 may have planned it
    body = _rank_body(config, _open_data(config), Path(decision["run_dir"]), resume_from, options)
    return body(context)


@contextmanager
def _opened_run(config: Config, options: RunOptions) -> Iterator[tuple[RunFolder, RunStart]]:
    """The run's folder, locked and with its ``config.yaml``, and where to start."""
    folder = choose_folder(config, options.run_dir)
    folder.create()
    with folder.lock():
        start = find_start(config, folder)
        folder.write_config(_anchored(config).to_yaml())
        for note in host_notes(config, own_cuts()):
            sys.stderr.write(f"slow on these hosts: {note}\n")
        if not options.as_json:
            if options.note:
                sys.stdout.write(f"{options.note}\n")
            sys.stdout.write(_headline(config, folder, start))
            sys.stdout.flush()
        try:
            yield folder, start
        except ConfigError:
            folder.forget_start()
            raise
        except KeyboardInterrupt:  # before ranks are there, who would end their step first
            _forget_unless_stepped(folder)
            raise


def _anchored(config: Config) -> Config:
    """``config`` with its data paths absolute, so that the run resumes from any directory."""
    if traits_of(config.model).data_is_named:
        return config
    return replace(config, data=anchored(config.data))


def _rank_body(
    config: Config,
    data: Data,
    run_dir: Path,
    resume_from: Path | None,
    options: RunOptions,
) -> Callable[[RankContext], int]:
    def body(context: RankContext) -> int:
        from mcp_parallel.trainer import Trainer

        # With --json progress is still for people, and stdout holds the one object.
        with redirect_stdout(sys.stderr) if options.as_json else nullcontext():
            trainer = Trainer(
                config,
                context,
                data,
                run_dir,
                resume_from=resume_from,
                profile_steps=options.profile_steps,
            )
            return trainer.fit()

    return body


def _open_data(config: Config) -> Data:
    """The data; opened before ranks are forked, so that they share its pages."""
    from mcp_parallel.data.source import open_data

    try:
        return open_data(config)
    except (OSError, ValueError) as error:
        raise ConfigError([str(error)]) from error


def _is_finished(config: Config, start: RunStart) -> bool:
    return start.resume_from is not None and start.step >= config.train.steps


def _headline(config: Config, folder: RunFolder, start: RunStart) -> str:
    parallel, layout = config.parallel, Layout.from_config(config.parallel)
    cp = f" x cp {parallel.cp}" if parallel.cp > 1 else ""
    degrees = f"dp {parallel.dp} x tp {parallel.tp} x pp {parallel.pp}{cp}, zero {parallel.zero}"
    name = config.model.preset or "own model"
    lines = [
        f"{name}, {config.train.steps} steps on {layout.world_size} ranks: {degrees}",
        f"run folder: {folder.path}",
    ]
    if _is_finished(config, start):
        lines.append(
            f"nothing to do: {start.step} of {config.train.steps} steps are done; "
            "train on with --steps MORE"
        )
    elif start.resume_from is not None:
        lines.append(f"going on after step {start.step}: {start.resume_from}")
    elif config.checkpoint.resume == "auto":
        lines.append("no whole checkpoint to go on from: starting anew")
    return "\n".join(lines) + "\n"


def _forget_unless_stepped(folder: RunFolder) -> None:
    """A run stopped before its first step says that it is none."""
    if not folder.holds_steps():
        folder.forget_start()
        sys.stderr.write("stopped before the first step: nothing was saved, start it again\n")


def _report(folder: RunFolder, start: RunStart, status: int, options: RunOptions) -> int:
    """With ``--json`` print the outcome; returns ``status``.

    ``status``, ``run_dir``, ``last`` record, and after a divergence ``last_good``, the checkpoint
    to go on from (null when there is none).
    """
    if status == STOPPED:
        _forget_unless_stepped(folder)
    if options.as_json:
        rows = folder.metrics_file.read_text().splitlines() if folder.metrics_file.exists() else []
        last = json.loads(rows[-1]) if rows else None
        outcome = {"status": status, "run_dir": str(folder.path), "last": last}
        if status == DIVERGED and last is not None:
            recovery = find_recovery(folder.path, last["step"] - 1, start.resume_from)
            outcome["last_good"] = recovery.to_mapping()
        sys.stdout.write(json.dumps(outcome) + "\n")
    return status
