"""The CUDA collectives without a GPU: built for host threads, bugs planted, their PTX read.

A virtual rank is a GPU: its kernels run one after another, at their own pace, each with all its
blocks and threads at once. Delays are drawn at every protocol point.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cuda import find_nvcc, gencode_flags
from native import find_compiler

ROOT = Path(__file__).resolve().parent.parent
COMPILER, NO_COMPILER = find_compiler()
NVCC = find_nvcc()
RACE = 66  # ThreadSanitizer's exit status

needs_compiler = pytest.mark.skipif(COMPILER is None, reason=NO_COMPILER or "no compiler")


def build(root: Path, name: str, program: Path) -> Path:
    """``tests/cuda_on_host/<name>.cpp`` of the tree at ``root``, under ThreadSanitizer."""
    # Unoptimized: gcc's ThreadSanitizer does not see a store that becomes a call's return slot.
    flags = ["-std=c++20", "-O0", "-fsanitize=thread", "-Wno-unknown-pragmas", "-pthread"]
    host = root / "tests" / "cuda_on_host"
    sources = [f"-I{root / 'csrc'}", f"-I{host}", str(host / f"{name}.cpp")]
    answer = subprocess.run(
        [*(COMPILER or []), *flags, *sources, "-o", str(program)], capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    return program


def run(program: Path, *args: object) -> subprocess.CompletedProcess[str]:
    # ThreadSanitizer needs its shadow memory where it expects it: no address randomization.
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    env = {**os.environ, "TSAN_OPTIONS": f"halt_on_error=1 exitcode={RACE}"}
    command = [*fixed, str(program), *map(str, args)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)


def plant(folder: Path, name: str, right: str, wrong: str) -> None:
    """The sources copied to ``folder``, with ``wrong`` in place of ``right`` in file ``name``."""
    for part in ("csrc/cuda", "tests/cuda_on_host"):
        shutil.copytree(ROOT / part, folder / part)
    source = folder / name
    text = source.read_text(encoding="utf-8")
    assert right in text
    source.write_text(text.replace(right, wrong), encoding="utf-8")


def ptx_kernels(instances: str, arch: str, folder: Path) -> dict[str, str]:
    """PTX of every kernel of the source text ``instances``, by its mangled name."""
    source, target = folder / "instances.cu", folder / "instances.ptx"
    source.write_text(instances, encoding="utf-8")
    number = gencode_flags((arch,))[0].split("code=sm_")[1]
    command = [str(NVCC), "-std=c++17", "-O3", f"-arch=compute_{number}", "--fmad=false", "-ptx"]
    command += ["-diag-suppress=20012", f"-I{ROOT / 'csrc'}", str(source), "-o", str(target)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    parts = target.read_text(encoding="utf-8").split(".entry ")[1:]
    return {part.split("(", 1)[0]: part for part in parts}


def assert_system_scope(name: str, text: str) -> None:
    """Flags are released and acquired for other GPUs, and sums are never contracted."""
    assert "st.release.sys.global.u64" in text, name
    assert "ld.acquire.sys.global.u64" in text, name
    assert "atom.add.acq_rel.gpu.global.u64" in text, name
    # Nothing that other GPUs see is released or acquired at a lesser scope.
    assert "release.gpu" not in text.replace("acq_rel.gpu", ""), name
    assert "acquire.gpu" not in text, name
    assert "fma.rn" not in text, name
