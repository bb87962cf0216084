"""The parts of the build: finding torch, counting jobs, running compilers in parallel."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import backend
import find_torch
import native
import pytest
import torch
from native import CompileError, Step, find_compiler, num_jobs, run_steps

COMPILER, _ = find_compiler()
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def make_torch(folder, version, cuda="None", header=True):
    """The two files of a torch package that the build looks at."""
    folder.mkdir(parents=True)
    (folder / "version.py").write_text(
        f"from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = {cuda}\n"
    )
    if header:
        path = folder / find_torch.STABLE_HEADER
        path.parent.mkdir(parents=True)
        path.touch()
    return folder


def test_finds_the_torch_that_runs(monkeypatch):
    monkeypatch.delenv("MCP_TORCH_DIR", raising=False)
    found = find_torch.find_torch()
    assert found.path == Path(torch.__file__).parent.resolve()
    assert (found.version, found.cuda) == (torch.__version__, torch.version.cuda)


def test_finding_torch_does_not_import_it():
    code = "import sys, find_torch; find_torch.find_torch(); print('torch' in sys.modules)"
    folder = Path(find_torch.__file__).parent
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "False"


@pytest.mark.parametrize(
    "version, cuda, header, expected",
    [
        ("2.13.0+cpu", "None", True, ("2.13.0+cpu", None)),
        ("2.10.0+cu130", "'13.0'", True, ("2.10.0+cu130", "13.0")),
        ("3.0.0", "None", True, ("3.0.0", None)),
        ("2.9.1", "None", True, None),
        ("2.13.0", "None", False, None),
    ],
)
def test_reads_version_and_cuda_as_text(tmp_path, version, cuda, header, expected):
    found = find_torch.read_torch(make_torch(tmp_path / "torch", version, cuda, header))
    assert (found and (found.version, found.cuda)) == expected


def test_a_forced_folder_is_taken_or_refused(tmp_path, monkeypatch):
    folder = make_torch(tmp_path / "torch", "2.12.0")
    monkeypatch.setenv("MCP_TORCH_DIR", str(folder))
    assert find_torch.find_torch().path == folder
    monkeypatch.setenv("MCP_TORCH_DIR", str(tmp_path))
    with pytest.raises(ValueError, match=r"MCP_TORCH_DIR: must be a torch >= 2.10 package folder"):
        find_torch.find_torch()


def test_path_files_of_the_environment_are_followed(tmp_path, monkeypatch):
    site, elsewhere = tmp_path / "site", tmp_path / "else where"
    site.mkdir()
    make_torch(elsewhere / "torch", "2.11.0")
    (site / "more.pth").write_text(f"# a comment\nimport os\n{elsewhere}\n/missing\n")
    monkeypatch.delenv("MCP_TORCH_DIR", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name, **where: str(site))
    assert find_torch.find_torch().version == "2.11.0"


@pytest.mark.parametrize("hook", ["wheel", "editable"])
def test_torch_is_required_only_where_it_is_missing(monkeypatch, hook):
    name = f"get_requires_for_build_{hook}"
    # setuptools' own hook runs setup.py, which a build does in a process of its own: it changes
    # sys.path, the environment and the root logger. test_build.py has the whole.
    monkeypatch.setattr(backend.build_meta, name, lambda settings: ["ninja"])
    requires = getattr(backend, name)
    monkeypatch.setattr(backend, "find_compiler", lambda: (["c++"], ""))
    assert requires() == ["ninja"]
    monkeypatch.setattr(backend, "find_torch", lambda: None)
    assert requires() == ["ninja", "torch>=2.10,<2.14"]
    monkeypatch.setattr(backend, "find_compiler", lambda: (None, "no C++ compiler"))
    assert requires() == ["ninja"], "headers for nobody"


@pytest.mark.parametrize(
    "cores, free_gb, gb_per_job, expected",
    [(8, 64, 1, 8), (64, 6, 4, 1), (4, 8, 4, 2), (2, 0, 1, 1)],
)
def test_jobs_follow_cores_and_free_memory(monkeypatch, cores, free_gb, gb_per_job, expected):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(native.os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(native, "_free_gb", lambda: free_gb)
    assert num_jobs(gb_per_job) == expected


def test_max_jobs_decides(monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "3")
    assert num_jobs(1) == 3
    for wrong in ("0", "-1", "many"):
        monkeypatch.setenv("MAX_JOBS", wrong)
        with pytest.raises(ValueError, match="MAX_JOBS: must be a positive whole number"):
            num_jobs(1)


def test_a_launcher_before_the_compiler_is_kept(monkeypatch):
    monkeypatch.setenv("CXX", "env c++ -v")
    assert find_compiler() == (["env", "c++", "-v"], "")


def steps_for(folder):
    """Two sources with a shared header, linked into a library."""
    folder.mkdir()
    (folder / "shared.h").write_text("#define VALUE 1\n")
    objects = []
    steps = []
    for name in ("a", "b"):
        source, output = folder / f"{name}.cpp", folder / "out" / f"{name}.o"
        source.write_text(f'#include "shared.h"\nint {name}() {{ return VALUE; }}\n')
        depfile = output.with_suffix(".d")
        command = [*COMPILER, "-fPIC", "-MMD", "-MF", depfile, "-c", source, "-o", output]
        steps.append(Step(tuple(map(str, command)), (source,), output, depfile))
        objects.append(output)
    library = folder / "out" / "both.so"
    link = [*COMPILER, "-shared", *objects, "-o", library]
    return [*steps, Step(tuple(map(str, link)), tuple(objects), library)]


@needs_compiler
@pytest.mark.parametrize("has_ninja", [True, False])
def test_steps_make_a_library_in_a_folder_of_any_name(tmp_path, monkeypatch, has_ninja):
    if not has_ninja:
        monkeypatch.setattr(native, "find_ninja", lambda: None)
    steps = steps_for(tmp_path / "a space, an \u00e9 and a $")
    run_steps(steps, tmp_path / "build dir", jobs=2)
    assert steps[-1].output.read_bytes()[:4] == b"\x7fELF"


@needs_compiler
@pytest.mark.skipif(native.find_ninja() is None, reason="ninja knows what changed")
def test_a_changed_header_compiles_again_and_nothing_else_does(tmp_path):
    steps = steps_for(tmp_path / "source")
    first, second = steps[0].output, tmp_path / "source" / "shared.h"
    run_steps(steps, tmp_path / "build", jobs=2)
    made = first.stat().st_mtime_ns
    run_steps(steps, tmp_path / "build", jobs=2)
    assert first.stat().st_mtime_ns == made
    second.write_text("#define VALUE 22\n")
    run_steps(steps, tmp_path / "build", jobs=2)
    assert first.stat().st_mtime_ns > made


@needs_compiler
@pytest.mark.parametrize("has_ninja", [True, False])
def test_the_first_error_is_the_reason(tmp_path, monkeypatch, has_ninja):
    if not has_ninja:
        monkeypatch.setattr(native, "find_ninja", lambda: None)
    steps = steps_for(tmp_path / "source")
    (tmp_path / "source" / "a.cpp").write_text("int a() { return nothing_here; }\n")
    with pytest.raises(CompileError, match=r"a\.cpp:1:\d+: error: .*nothing_here"):
        run_steps(steps, tmp_path / "build", jobs=1)
