"""The folder of one run: its paths, its name, and the lock that keeps a second run out. No torch.

config.yaml         the resolved configuration, layout included
metrics.jsonl       one object a step (fields.py)
verdicts.jsonl      one object for each thing that left its healthy range
tensorboard/        the same as TensorBoard events
checkpoints/        step_XXXXXXXX folders
profile/            traces of --profile, one a rank
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mcp_parallel.errors import ConfigError

DEFAULT_ROOT = Path("runs")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where the parts of a run are; making one touches no disk."""

    path: Path

    @classmethod
    def fresh(cls, name: str, root: Path = DEFAULT_ROOT) -> RunFolder:
        """A folder that does not exist yet: ``<root>/<name>-<date>-<time>-<4 random digits>``."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return cls(root / f"{name}-{stamp}-{secrets.token_hex(2)}")

    @property
    def config_file(self) -> Path:
        """The resolved configuration, YAML."""
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        """One JSON object a line and step."""
        return self.path / "metrics.jsonl"

    @property
    def verdicts_file(self) -> Path:
        """One JSON object a line and verdict."""
        return self.path / "verdicts.jsonl"

    @property
    def tensorboard_dir(self) -> Path:
        """TensorBoard event files."""
        return self.path / "tensorboard"

    @property
    def checkpoints_dir(self) -> Path:
        """Step folders."""
        return self.path / "checkpoints"

    @property
    def profile_dir(self) -> Path:
        """Traces of ``--profile``, one a rank."""
        return self.path / "profile"

    def holds_run(self) -> bool:
        """Whether a run was started here before."""
        return any(
            path.exists() for path in (self.config_file, self.metrics_file, self.checkpoints_dir)
        )

    def holds_steps(self) -> bool:
        """Whether a run that was started here did a step."""
        has_rows = self.metrics_file.exists() and self.metrics_file.stat().st_size > 0
        return has_rows or self.checkpoints_dir.exists()

    def forget_start(self) -> None:
        """Take back a run that did no step, so that the folder does not refuse the next one."""
        if not self.holds_steps():
            self.config_file.unlink(missing_ok=True)
            self.metrics_file.unlink(missing_ok=True)

    def create(self) -> None:
        """Make the folder and those above it.

        Raises:
            ConfigError: it cannot be made or written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            writable = os.access(self.path, os.W_OK | os.X_OK)
        except OSError as error:
            raise ConfigError([f"{_must_be_writable(self.path)}: {error.strerror}"]) from error
        if not writable:
            raise ConfigError([_must_be_writable(self.path)])

    def write_config(self, text: str) -> None:
        """Replace ``config.yaml`` as a whole, so that a reader never meets half of it."""
        temporary = self.path / f".config.{os.getpid()}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.config_file)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold this folder for one run; the system lets go of it however the run ends.

        Processes forked inside hold it too, until the last of them has ended.

        Raises:
            ConfigError: another run holds it.
        """
        # Opened for reading and writing: network file systems lock nothing else.
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, self.path)
            yield
        finally:
            os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        problem = (
            f"train: --run-dir must be a folder that no other run is using, got {str(path)!a}; "
            "wait for that run, stop it, or choose another --run-dir"
        )
        raise ConfigError([problem]) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        # A file system without locks is no reason not to train.


def _must_be_writable(path: Path) -> str:
    return f"train: --run-dir must be a folder that can be written to, got {str(path)!a}"
