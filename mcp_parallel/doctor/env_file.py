"""``doctor --fix``: a file of shell lines, each with its reason, to be sourced before a job.

No torch. Only what is safe for every job of this user is in it: names that are wrong here go,
deprecated ones get their new name, limits rise to what the user may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mcp_parallel.doctor.finding import Finding, ShellLine, export
from mcp_parallel.errors import ConfigError

DEFAULT_FILE = "mcp_env.sh"

# Wanted by every job, whatever this shell has.
_ALWAYS = (
    export(
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
        "1",
        "a restart by torchrun meets on a fresh store, not on the one of the dead attempt",
    ),
    export(
        "TORCH_FR_BUFFER_SIZE",
        "${TORCH_FR_BUFFER_SIZE:-2000}",
        "the flight recorder then knows the last 2,000 collectives when a job hangs",
    ),
)


def shell_lines(findings: Sequence[Finding]) -> list[ShellLine]:
    """The lines of ``findings`` after those that every job wants, each text once."""
    found = [*_ALWAYS, *(finding.fix for finding in findings if finding.fix is not None)]
    return list({line.text: line for line in found}.values())


def env_file_text(findings: Sequence[Finding]) -> str:
    """The file: POSIX shell, ASCII."""
    head = "# Written by `mcp-parallel doctor --fix`. Read it, then: . ./FILE\n"
    blocks = [f"\n# {line.reason}\n{line.text}\n" for line in shell_lines(findings)]
    text = head + "".join(blocks)
    return text.encode("ascii", "backslashreplace").decode("ascii")


def write_env_file(findings: Sequence[Finding], path: Path, *, overwrite: bool = False) -> None:
    """Write ``env_file_text`` to ``path``.

    Raises:
        ConfigError: the file is there and ``overwrite`` is not said, or it cannot be written.
    """
    try:
        with path.open("w" if overwrite else "x", encoding="ascii") as file:
            file.write(env_file_text(findings))
    except FileExistsError:
        problem = (
            f"doctor: --fix must name a file that is not there, got {str(path)!a}; choose another, "
            "or add --force to replace it"
        )
        raise ConfigError([problem]) from None
    except OSError as error:
        problem = f"doctor: --fix must name a file that can be written, got {str(path)!a}: "
        raise ConfigError([f"{problem}{error.strerror}; choose another folder"]) from error
