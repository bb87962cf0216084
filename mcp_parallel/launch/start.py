"""Where a run starts: its folder, and the checkpoint it goes on from. Before any rank; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mcp_parallel.checkpoint.format import CheckpointError
from mcp_parallel.checkpoint.manifest import FILE_NAME, Manifest, parse_step_name
from mcp_parallel.checkpoint.steps import find_latest, verify
from mcp_parallel.config import Config
from mcp_parallel.errors import ConfigError
from mcp_parallel.monitor.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class RunStart:
    """What ``find_start`` decided."""

    resume_from: Path | None
    """A step folder whose every byte was checked; None for a new run."""
    step: int = 0
    """Steps done before."""


def choose_folder(config: Config, run_dir: Path | None) -> RunFolder:
    """The folder of the run, which may not exist yet; nothing is written.

    Raises:
        ConfigError: the folder holds a run that the config does not resume, or ``auto`` is asked
            to resume from a folder that nobody named.
    """
    resume = config.checkpoint.resume
    if run_dir is None:
        if resume == "auto":
            problem = (
                "train: --resume must come with the folder of the run or with a checkpoint, got "
                "neither; add --run-dir DIR, or use --resume RUN/checkpoints/step_XXXXXXXX"
            )
            raise ConfigError([problem])
        return RunFolder.fresh(config.model.preset or "run")
    folder = RunFolder(run_dir)
    is_own = resume == "auto" or _run_of(resume) == run_dir.expanduser().absolute()
    if folder.holds_run() and not is_own:
        problem = (
            f"train: --run-dir must be a folder without a run, got {str(run_dir)!a}, which holds "
            "one; add --resume to go on with it, or choose another --run-dir"
        )
        raise ConfigError([problem])
    return folder


def find_start(config: Config, folder: RunFolder) -> RunStart:
    """Find and check the checkpoint to go on from; call it with the folder's lock held.

    Raises:
        ConfigError: the checkpoint is damaged, is of another model, or is older than others in
            the same folder, between which a later ``--resume`` would choose wrongly.

    Cost: reads the checkpoint once.
    """
    resume = config.checkpoint.resume
    if resume == "never":
        return RunStart(None)
    if resume == "auto":
        path = find_latest(folder.checkpoints_dir) if folder.checkpoints_dir.is_dir() else None
        if path is None:
            _refuse_if_all_damaged(folder)
            return RunStart(None)
    else:
        path = Path(resume).expanduser()
        _refuse_other_than_step(path)
        _refuse_newer_siblings(path, folder)
    manifest = _verified(path)
    if manifest.fingerprint != config.fingerprint():
        problem = (
            f"train: --resume must take a checkpoint of this model, got {str(path)!a} of another; "
            "leave out --preset, --config and model.* to take the model of that run"
        )
        raise ConfigError([problem])
    return RunStart(path, manifest.step)


def _refuse_if_all_damaged(folder: RunFolder) -> None:
    """Starting anew over a run whose checkpoints are all damaged would lose what is left of it."""
    directory = folder.checkpoints_dir
    if not directory.is_dir():
        return
    damaged = sorted(e.name for e in directory.iterdir() if parse_step_name(e.name) is not None)
    if damaged:
        problem = (
            f"train: --resume must find a whole checkpoint in {str(directory)!a}, got only damaged "
            f"ones ({', '.join(damaged)}); bring back a copy, or start anew in another --run-dir"
        )
        raise ConfigError([problem])


def _run_of(resume: str) -> Path:
    """RUN of ``RUN/checkpoints/step_XXXXXXXX``."""
    return Path(resume).expanduser().absolute().parent.parent


def _verified(path: Path) -> Manifest:
    try:
        return verify(path)
    except CheckpointError as error:
        advice = "use --resume without a path to take the newest one that is whole"
        raise ConfigError([f"train: --resume: {error}; {advice}"]) from error


def _refuse_other_than_step(path: Path) -> None:
    """A run folder is what people name first; it has many checkpoints, and ``--run-dir`` for it."""
    if (path / FILE_NAME).exists():
        return
    got, way = f"{str(path)!a} without {FILE_NAME}", "a path to take the newest one that is whole"
    if RunFolder(path).holds_run():
        got = f"the run folder {str(path)!a}"
        way = f"a path and --run-dir {str(path)!a} to go on with that run"
    problem = (
        "train: --resume must be a checkpoint, as in RUN/checkpoints/step_00000100, got "
        f"{got}; use --resume without {way}"
    )
    raise ConfigError([problem])


def _refuse_newer_siblings(path: Path, folder: RunFolder) -> None:
    step = parse_step_name(path.name)
    if step is None or path.absolute().parent != folder.checkpoints_dir.absolute():
        return
    found = (parse_step_name(entry.name) for entry in folder.checkpoints_dir.iterdir())
    newer = [other for other in found if other is not None and other > step]
    if newer:
        problem = (
            f"train: --resume must take the newest checkpoint of {str(folder.path)!a}, got step "
            f"{step} beside step {max(newer)}; choose another --run-dir, or remove the newer ones"
        )
        raise ConfigError([problem])
