"""The build as users meet it: from an sdist, isolated, without a compiler, in a new place."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from native import find_compiler

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ["_backend", "csrc", "mcp_kernels", "mcp_parallel", "setup.py", "pyproject.toml"]
needs_compiler = pytest.mark.skipif(find_compiler()[0] is None, reason="no C++ compiler")

USE_IT = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "")]
import json, torch, mcp_kernels
from dataclasses import asdict
bits, scales = mcp_kernels.onebit_compress(torch.tensor([3.0, -3.0] * 4), torch.zeros(8))
assert bits.tolist() == [0b01010101] and scales.tolist() == [3.0]
print(json.dumps({**asdict(mcp_kernels.build_info()), "file": mcp_kernels.__file__}))
"""


# Two minutes of a core; where ten others share it, one build takes longer than most tests may.
BUILD_S = 1500


def run(*command, cwd, env=None, python_path=""):
    """A command in a clean environment: none of our variables, nothing else importable."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MCP_", "PYTHON", "CXX"))}
    clean |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(env or {})}
    if python_path:
        clean["PYTHONPATH"] = str(python_path)
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True, timeout=BUILD_S
    )


def wheel_of(project, out, *options, env=None):
    """Let pip build the wheel of ``project``; its answer and the wheel."""
    command = (sys.executable, "-m", "pip", "wheel", "--no-deps", "-v", *options, "-w", out)
    answer = run(*command, project, cwd=out.parent, env=env)
    if re.search(r"No matching distribution found for (setuptools|ninja|pybind11)", answer.stderr):
        pytest.skip("no package index to take setuptools from")
    return answer, next(out.glob("*.whl"), None)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """An sdist of a copy of this tree, so that the tree stays as it is."""
    copy = tmp_path_factory.mktemp("source") / "with space \u00e9"
    copy.mkdir()
    for name in [*SOURCES, "MANIFEST.in", "README.md"]:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("*.so", "__pycache__", "_build_record.json")
            shutil.copytree(source, copy / name, ignore=ignore)
        elif source.exists():
            shutil.copy(source, copy / name)
    answer = run(sys.executable, "-m", "build", "--sdist", "--no-isolation", copy, cwd=copy)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    yield next((copy / "dist").glob("*.tar.gz"))
    shutil.rmtree(copy.parent)


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    yield next(folder.iterdir())
    shutil.rmtree(folder)


def test_the_sdist_holds_all_that_a_build_needs(sdist):
    with tarfile.open(sdist) as archive:  # other tests build in the folder it is unpacked to
        held = {member.name.partition("/")[2] for member in archive if member.isfile()}
    for folder in ("_backend", "csrc"):
        wanted = [p for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix != ".pyc"]
        assert wanted
        assert {str(p.relative_to(ROOT)) for p in wanted} <= held
    assert not [name for name in held if name.endswith((".so", "_build_record.json"))]


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """What ``pip install`` of the sdist would install, built in isolation.

    Unoptimized, which takes less than half of the time: what the optimizer makes of the sources is
    in the extensions that every other test runs on.
    """
    out = tmp_path_factory.mktemp("wheel") / "out"
    answer, built = wheel_of(sdist, out, env={"MCP_CXX_FLAGS": "-O0"})
    assert built, answer.stdout[-3000:] + answer.stderr[-3000:]
    return answer, built


@needs_compiler
def test_an_isolated_build_uses_the_installed_torch(wheel, tmp_path):
    answer, built = wheel
    assert not re.search(r"(Collecting|Downloading) torch", answer.stdout)
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    assert {"mcp_kernels/_C.abi3.so", f"mcp_kernels/_shm{suffix}"} <= set(names)
    assert {"mcp_kernels/py.typed", "mcp_parallel/py.typed"} <= set(names)
    assert "mcp_parallel/report/page/page.html" in names
    assert not [name for name in names if name.startswith(("tests/", "bench/", "_backend/"))]

    used = run(sys.executable, "-c", USE_IT, cwd=tmp_path, python_path=tmp_path)
    info = json.loads(used.stdout)
    assert info["file"].startswith(str(tmp_path))
    assert info["extensions"]["_C"]
    assert info["extensions"]["_shm"]
    assert info["torch_built_against"] == torch.__version__
    assert used.stderr == ""


@needs_compiler
@pytest.mark.skipif(shutil.which("nm") is None, reason="nm lists the symbols")
def test_the_op_module_uses_only_the_stable_abi(wheel, tmp_path):
    with zipfile.ZipFile(wheel[1]) as archive:
        archive.extract("mcp_kernels/_C.abi3.so", tmp_path)
    listed = run("nm", "-D", "--undefined-only", "mcp_kernels/_C.abi3.so", cwd=tmp_path)
    symbols = [line.split()[-1].split("@")[0] for line in listed.stdout.splitlines()]
    torch_symbols = [s for s in symbols if "torch" in s or "c10" in s or s.startswith("_ZN2at")]
    assert "torch_library_impl" in torch_symbols
    unstable = [s for s in torch_symbols if not s.startswith(("aoti_torch_", "torch_"))]
    assert not unstable, "these change from torch to torch"


def test_without_a_compiler_it_installs_and_says_why(unpacked, tmp_path):
    answer, built = wheel_of(
        unpacked, tmp_path / "out", "--no-build-isolation", env={"CXX": "/nonexistent"}
    )
    assert built, answer.stdout[-3000:] + answer.stderr[-3000:]
    with zipfile.ZipFile(built) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(tmp_path / "site")
    used = run(sys.executable, "-c", USE_IT, cwd=tmp_path, python_path=tmp_path / "site")
    info = json.loads(used.stdout)
    reason = "no C++ compiler: CXX=/nonexistent is not a program"
    assert info["extensions"] == {"_C": False, "cuda": False, "_shm": False}
    assert info["reasons"]["_C"] == info["reasons"]["_shm"] == reason
    assert used.stderr.count("RuntimeWarning") == 1
    assert reason in used.stderr


def test_require_ext_makes_that_an_error(unpacked, tmp_path):
    env = {"CXX": "/nonexistent", "MCP_REQUIRE_EXT": "1"}
    answer, built = wheel_of(unpacked, tmp_path / "out", "--no-build-isolation", env=env)
    assert built is None
    assert answer.returncode != 0
    assert (
        "MCP_REQUIRE_EXT=1 and extensions are missing: _C: no C++ compiler: CXX=/nonexistent "
        "is not a program" in answer.stdout + answer.stderr
    )


@pytest.fixture
def new_environment(tmp_path):
    """A virtual environment that sees this one's packages through a path file, without ours."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = Path(run(python, "-c", where, cwd=tmp_path).stdout.strip())
    (site_packages / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(BUILD_S + 100)
@pytest.mark.parametrize("options", [[], ["--editable"]], ids=["plain", "editable"])
def test_pip_install_into_a_new_environment(unpacked, new_environment, tmp_path, options):
    project = shutil.copytree(unpacked, tmp_path / "project")
    command = (new_environment, "-m", "pip", "install", "--no-deps", *options, project)
    answer = run(*command, cwd=tmp_path)
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    # The finder of the environment below answers last; ours is found first.
    use_it = USE_IT.split("\n", 3)[3]
    used = run(new_environment, "-c", use_it, cwd=tmp_path)
    info = json.loads(used.stdout)
    home = project if options else tmp_path / "env"
    assert info["file"].startswith(str(home)), used.stderr
    assert info["extensions"]["_C"]
    assert info["extensions"]["_shm"]
