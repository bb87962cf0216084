"""What to do after a divergence: the newest checkpoint that is good, and the way on. No torch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp_parallel.checkpoint.manifest import parse_step_name
from mcp_parallel.checkpoint.steps import find_latest


@dataclass(frozen=True, slots=True)
class Recovery:
    """Where a run that diverged can be taken up again."""

    run_dir: Path
    path: Path | None
    """The newest checkpoint that is whole and good; None when there is none."""
    is_newest: bool
    """It is what ``--resume`` without a path takes."""

    @property
    def step(self) -> int | None:
        """Steps that the checkpoint holds."""
        return None if self.path is None else parse_step_name(self.path.name)

    def lines(self, lr: float) -> list[str]:
        """Which checkpoint, and a command that goes on from it with a tenth of ``lr``."""
        folder, lower = shlex.quote(str(self.run_dir)), f"--set train.lr={lr / 10:g}"
        if self.path is None:
            return [
                "last good checkpoint: none was written",
                f"next: mcp-parallel train --config {folder}/config.yaml --run-dir NEW {lower}",
            ]
        path = shlex.quote(str(self.path))
        again = f"--resume --run-dir {folder}"
        if not self.is_newest:  # a run does not go on from an older one beside newer ones
            again = f"--resume {path} --run-dir NEW"
        return [
            f"last good checkpoint: step {self.step}, {path}",
            f"next: mcp-parallel train {again} {lower}",
        ]

    def to_mapping(self) -> dict[str, Any] | None:
        """``step`` and ``path`` for programs, None without a checkpoint."""
        return None if self.path is None else {"step": self.step, "path": str(self.path)}


def find_recovery(run_dir: Path, failed_step: int, resumed_from: Path | None = None) -> Recovery:
    """The newest checkpoint that is good after the step from ``failed_step`` on was not finite.

    A checkpoint is good when a finite loss and gradient were computed from it: the one that holds
    ``failed_step`` steps, if it was written, gives the same infinity again.

    Args:
        run_dir: folder of the run.
        failed_step: steps done when the loss or a gradient was not finite.
        resumed_from: what the run began with, possibly in another folder.

    Cost: reads the checkpoint once.
    """
    checkpoints = run_dir / "checkpoints"
    found = find_latest(checkpoints, before=failed_step) if checkpoints.is_dir() else None
    if found is None and resumed_from is not None:
        step = parse_step_name(resumed_from.name)
        found = resumed_from if step is not None and step < failed_step else None
    if found is None or found.absolute().parent != checkpoints.absolute():
        return Recovery(run_dir, found, is_newest=False)
    return Recovery(run_dir, found, is_newest=find_latest(checkpoints) == found)
