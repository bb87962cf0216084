"""``mcp-parallel COMMAND``: finds the command, runs it, turns its errors into exit statuses."""

from __future__ import annotations

import argparse
import difflib
import io
import json
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from mcp_parallel.cli import check, data, doctor, generate, launch, parity, plan, report, train
from mcp_parallel.errors import BAD_CONFIG, OK, STOPPED, ConfigError

_COMMANDS = (train, check, parity, plan, data, doctor, generate, report, launch)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the command and its flags; None takes those of the process.

    Returns:
        An exit status of ``mcp_parallel.errors``. A ``ConfigError`` becomes its problems on
        stderr, one a line.
    """
    for stream in (sys.stdout, sys.stderr):
        # An ASCII terminal shows an accent in a path as an escape rather than failing on it.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    parser, names = _parser()
    command = next((word for word in words if not word.startswith("-")), None)
    if command is not None and command not in names:
        sys.stderr.write(f"{_unknown_command(command, names)}\n")
        return BAD_CONFIG
    args = argparse.Namespace()
    try:
        parser.parse_args(words, args)
        if command is None:
            parser.print_help()
            return BAD_CONFIG
        return args.run(args)
    except SystemExit as error:  # argparse: --help, --version, or usage already explained
        return error.code if isinstance(error.code, int) else OK
    except ConfigError as error:
        if getattr(args, "json", False):
            refusal = {"ok": False, "problems": error.problems, "layouts": error.layouts}
            sys.stdout.write(json.dumps(refusal) + "\n")
        else:
            sys.stderr.write("".join(f"{line}\n" for line in error.lines()))
        return BAD_CONFIG
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()  # or the interpreter complains once more when it flushes
        return OK


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    parser = argparse.ArgumentParser(
        prog="mcp-parallel",
        description="Train Transformers in 3D parallel: the same loss in every layout.",
    )
    parser.add_argument("--version", action="version", version=f"mcp-parallel {_version()}")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command")
    for module in _COMMANDS:
        module.add_parser(subparsers)
    return parser, list(subparsers.choices)


def _version() -> str:
    try:
        return version("mcp-kernels")
    except PackageNotFoundError:
        return "(source tree)"


def _unknown_command(command: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(command, names, n=1)
    hint = f"did you mean {near[0]}?" if near else "see mcp-parallel --help"
    return f"mcp-parallel: COMMAND must be one of {', '.join(names)}, got {command!a}; {hint}"
