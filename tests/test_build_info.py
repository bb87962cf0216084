"""build_info tells the truth about this installation, and the environment variables act."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import PATIENCE_S

import mcp_kernels
from mcp_kernels import build_info

PACKAGE = Path(mcp_kernels.__file__).parent
HAS_C = importlib.util.find_spec("mcp_kernels._C") is not None
needs_c = pytest.mark.skipif(not HAS_C, reason="the _C extension was not built")

USE_AN_OP = """
import torch, mcp_kernels
bits, scales = mcp_kernels.onebit_compress(torch.tensor([3.0, -3.0] * 4), torch.zeros(8))
assert bits.tolist() == [0b01010101] and scales.tolist() == [3.0]
"""


# An editable install's finder would answer for files that the copy lacks.
ONLY_THE_COPY = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "")]
"""


def run_python(code, *, folder=None, **env):
    """Standard output, standard error and exit status of a fresh interpreter."""
    if folder is not None:
        code = ONLY_THE_COPY + code
    full = {k: v for k, v in os.environ.items() if not k.startswith(("MCP_", "PYTHON"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder or PACKAGE.parent,
        env={**full, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.fixture(scope="module")
def unbuilt(tmp_path_factory):
    """A copy of the package as a clone has it: no compiled file, no build record."""
    root = tmp_path_factory.mktemp("clone")
    shutil.copytree(
        PACKAGE,
        root / "mcp_kernels",
        ignore=shutil.ignore_patterns("*.so", "_build_record.json", "__pycache__"),
    )
    return root


def test_versions_are_those_of_this_process():
    info = build_info()
    assert info.version == mcp_kernels.__version__
    assert info.torch_running == torch.__version__
    assert info.extensions["_C"] == HAS_C
    assert info.extensions["_shm"] == (importlib.util.find_spec("mcp_kernels._shm") is not None)


def test_each_extension_is_usable_or_has_a_reason():
    info = build_info()
    assert set(info.extensions) == set(info.reasons) == {"_C", "cuda", "_shm"}
    for name, usable in info.extensions.items():
        assert usable != bool(info.reasons[name])
        line = "built" if usable else f"not built ({info.reasons[name]})"
        assert f"  {name}: {line}" in str(info)


@needs_c
def test_instruction_sets_are_in_order_and_the_best_one_runs():
    info = build_info()
    order = ("scalar", "avx2", "avx512", "avx512_bf16")
    assert info.cpu_isas == order[: len(info.cpu_isas)]
    flags = Path("/proc/cpuinfo").read_text().split() if sys.platform == "linux" else []
    for isa, flag in (("avx2", "avx2"), ("avx512", "avx512bw"), ("avx512_bf16", "avx512_bf16")):
        assert (isa in info.cpu_isas) == (flag in flags)
    answer = run_python("import mcp_kernels; print(mcp_kernels.build_info().cpu_isa)")
    is_amd = "AuthenticAMD" in flags
    highest = info.cpu_isas[-1]
    best = "avx512" if highest == "avx512_bf16" and not is_amd else highest
    assert answer.stdout.strip() == info.cpu_isa_default == best
    assert answer.stderr == ""


@needs_c
def test_a_forced_instruction_set_runs():
    code = """
import mcp_kernels, torch
info = mcp_kernels.build_info()
print(info.cpu_isa, info.cpu_isa_forced)
print(mcp_kernels.which_backend("onebit_compress", torch.ones(8), torch.ones(8)).chosen)
"""
    answer = run_python(code + USE_AN_OP, MCP_CPU_ISA="scalar")
    assert answer.stdout.split() == ["scalar", "True", "cpu:scalar"], answer.stderr


@needs_c
def test_an_unknown_instruction_set_is_refused_with_the_legal_ones():
    code = """
import mcp_kernels, torch
for call in (mcp_kernels.build_info,
             lambda: mcp_kernels.onebit_compress(torch.ones(8), torch.ones(8))):
    try:
        call()
    except (ValueError, RuntimeError) as failure:
        print(str(failure).splitlines()[0])
"""
    answer = run_python(code, MCP_CPU_ISA="sse9")
    legal = ", ".join(build_info().cpu_isas)
    expected = f'MCP_CPU_ISA: must be one of {legal} on this CPU, got "sse9"'
    lines = answer.stdout.splitlines()
    assert len(lines) == 2, answer.stderr
    assert all(expected in line for line in lines)


def test_a_source_tree_works_unbuilt_and_says_so_once(unbuilt):
    code = """
import mcp_kernels, importlib
importlib.import_module("mcp_kernels._op")
info = mcp_kernels.build_info()
assert info.extensions == {"_C": False, "cuda": False, "_shm": False} and info.cpu_isa is None
print(info.reasons["_C"])
"""
    answer = run_python(code + USE_AN_OP, folder=unbuilt)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == "this source tree was never built; run: pip install ."
    assert answer.stderr.count("RuntimeWarning") == 1
    assert "mcp_kernels runs on its plain-PyTorch references: this source" in answer.stderr


def test_require_ext_makes_a_missing_extension_an_error(unbuilt):
    answer = run_python("import mcp_kernels", folder=unbuilt, MCP_REQUIRE_EXT="1")
    assert answer.returncode == 1
    last = answer.stderr.splitlines()[-1]
    assert last.startswith("ImportError: mcp_kernels runs on its plain-PyTorch references")
    assert last.endswith("(MCP_REQUIRE_EXT=1 makes this an error)")


def test_a_broken_extension_is_named(unbuilt, tmp_path):
    copy = shutil.copytree(unbuilt, tmp_path / "broken")
    (copy / "mcp_kernels" / "_C.abi3.so").write_bytes(b"not a library")
    code = "import mcp_kernels; print(mcp_kernels.build_info().reasons['_C'])"
    answer = run_python(code, folder=copy)
    assert answer.stdout.startswith("mcp_kernels._C does not load: "), answer.stderr
