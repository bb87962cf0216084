"""Compiles and links in parallel: by ninja where there is one, by a pool of threads elsewhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# Memory that one compiler process may need: torch's stable headers take 0.4 GB under g++, nvcc
# runs several passes for each architecture.
GB_PER_CXX_JOB = 1
GB_PER_NVCC_JOB = 4

# As g++, clang++, nvcc and ld begin what is wrong; a path may hold the word too.
ERROR = re.compile(r"\berror: |undefined reference|cannot find -l")


class CompileError(RuntimeError):
    """A compiler or linker refused; the message holds its first error."""


@dataclass(frozen=True)
class Step:
    """One command that makes one file from others."""

    command: tuple[str, ...]
    inputs: tuple[Path, ...]
    output: Path
    depfile: Path | None = None


def find_compiler() -> tuple[list[str] | None, str]:
    """The C++ compiler (CXX may hold a launcher: "ccache g++"), or None and the reason."""
    wanted = os.environ.get("CXX")
    if wanted:
        command = shlex.split(wanted)
        if command and shutil.which(command[0]):
            return command, ""
        return None, f"no C++ compiler: CXX={wanted} is not a program"
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name], ""
    return None, "no C++ compiler: none of c++, g++, clang++ is on PATH"


def compiler_version(command: Sequence[str]) -> str:
    """First line of what the compiler says about itself."""
    answer = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return (answer.stdout or answer.stderr).strip().split("\n")[0]


def python_headers() -> tuple[list[Path], str]:
    """Folders of Python.h, or none and the reason."""
    folders = sorted({sysconfig.get_path("include"), sysconfig.get_path("platinclude")})
    if any((Path(folder) / "Python.h").is_file() for folder in folders):
        return [Path(folder) for folder in folders], ""
    return [], f"Python.h is not in {folders[0]} (a package like python3-dev holds it)"


def num_jobs(gb_per_job: int) -> int:
    """MAX_JOBS, else as many as cores and free memory allow.

    Raises:
        ValueError: MAX_JOBS is no positive number.
    """
    wanted = os.environ.get("MAX_JOBS")
    if wanted:
        if not wanted.isdecimal() or int(wanted) == 0:
            raise ValueError(f"MAX_JOBS: must be a positive whole number, got {wanted}")
        return int(wanted)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, _free_gb() // gb_per_job))


def _free_gb() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) >> 20
    except OSError:
        pass
    return 1 << 20  # unknown: the cores decide


def find_ninja() -> str | None:
    """Ninja on PATH or from its Python package."""
    on_path = shutil.which("ninja")
    if on_path:
        return on_path
    try:
        import ninja
    except ImportError:
        return None
    return shutil.which("ninja", path=ninja.BIN_DIR)


def run_steps(steps: Sequence[Step], build_dir: Path, jobs: int) -> None:
    """Run every step whose inputs changed (all of them without ninja), compilations in parallel.

    Args:
        steps: compilations first, then the links that need them.
        build_dir: where ninja keeps what it knows.
        jobs: processes at a time.

    Raises:
        CompileError: a step failed.
    """
    build_dir.mkdir(parents=True, exist_ok=True)
    for step in steps:
        step.output.parent.mkdir(parents=True, exist_ok=True)
    ninja = find_ninja()
    if ninja is None:
        _run_by_threads(steps, jobs)
        return
    (build_dir / "build.ninja").write_text(ninja_text(steps), encoding="utf-8")
    _run([ninja, "-C", str(build_dir), "-j", str(jobs)])


def ninja_text(steps: Sequence[Step]) -> str:
    """The ninja file of ``steps``: a rule each, since no two commands are alike."""
    lines = ["ninja_required_version = 1.5"]
    for number, step in enumerate(steps):
        command = shlex.join(step.command).replace("$", "$$")
        lines += [f"rule step{number}", f"  command = {command}"]
        if step.depfile:
            lines += [f"  depfile = {_escape(step.depfile)}", "  deps = gcc"]
        inputs = " ".join(_escape(path) for path in step.inputs)
        lines += [f"build {_escape(step.output)}: step{number} {inputs}"]
    return "\n".join(lines) + "\n"


def _escape(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _run_by_threads(steps: Sequence[Step], jobs: int) -> None:
    outputs = {step.output for step in steps}
    compilations = [step for step in steps if not outputs.intersection(step.inputs)]
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        list(pool.map(lambda step: _run(step.command), compilations))
    for step in steps:
        if step not in compilations:
            _run(step.command)


def _run(command: Sequence[str]) -> None:
    answer = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if answer.returncode:
        print(answer.stdout)
        errors = [line for line in answer.stdout.splitlines() if ERROR.search(line)]
        raise CompileError((errors or answer.stdout.splitlines() or ["no output"])[0].strip())
