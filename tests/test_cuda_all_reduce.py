"""The CUDA all-reduce without a GPU: its source on host threads under ThreadSanitizer, its PTX.

A virtual rank is a GPU: its kernels run one after another, at their own pace, each with all its
blocks and threads at once. Delays are drawn at every protocol point. A rank checks the bits of
every result against a loop of its own.
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
ONE_SHOT, TWO_SHOT, MULTICAST = range(3)
CALLS = 40  # each size and grid several times, and every slot reused

needs_compiler = pytest.mark.skipif(COMPILER is None, reason=NO_COMPILER or "no compiler")


def build(root: Path, program: Path) -> Path:
    # Unoptimized: gcc's ThreadSanitizer does not see a store that becomes a call's return slot.
    flags = ["-std=c++20", "-O0", "-fsanitize=thread", "-Wno-unknown-pragmas", "-pthread"]
    host = root / "tests" / "cuda_on_host"
    sources = [f"-I{root / 'csrc'}", f"-I{host}", str(host / "all_reduce.cpp")]
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


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("host") / "all_reduce")


@needs_compiler
@pytest.mark.parametrize(
    "world, form, dtype",
    [
        *[(world, form, "f") for world in (1, 2, 3) for form in (ONE_SHOT, TWO_SHOT)],
        (4, ONE_SHOT, "b"),
        (5, TWO_SHOT, "b"),
        (3, TWO_SHOT, "d"),
        (4, MULTICAST, "h"),
        (8, ONE_SHOT, "h"),
        (8, TWO_SHOT, "f"),
    ],
)
def test_right_bits_and_no_race(program: Path, world: int, form: int, dtype: str) -> None:
    calls = CALLS if world < 8 else CALLS // 2
    answer = run(program, world, form, dtype, calls, 20, 1)
    assert answer.returncode == 0, answer.stderr[-3000:]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("form", [ONE_SHOT, TWO_SHOT, MULTICAST])
@pytest.mark.parametrize("world", [2, 3, 6, 8])
def test_many_interleavings(program: Path, world: int, form: int, seed: int) -> None:
    answer = run(program, world, form, "f", 100, 10 * (1 + seed % 5), seed)
    assert answer.returncode == 0, answer.stderr[-3000:]


@needs_compiler
@pytest.mark.parametrize("form", [ONE_SHOT, TWO_SHOT])
@pytest.mark.parametrize("world, absent", [(2, 1), (4, 0)])
def test_a_rank_that_does_not_come_is_named(
    program: Path, world: int, absent: int, form: int
) -> None:
    """The others time out, say whom they missed, give NaN, and do not wait again in later calls."""
    answer = run(program, world, form, "f", 3, 0, 1, absent)
    assert answer.returncode == 0, answer.stderr[-3000:]


SYMMETRIC, ALL_REDUCE, WORDS = (
    "csrc/cuda/symmetric.cuh",
    "csrc/cuda/all_reduce.cuh",
    "tests/cuda_on_host/threads.h",
)
BUGS = {
    "flag stored without release": (WORDS, "__ATOMIC_RELEASE", "__ATOMIC_RELAXED"),
    "flag loaded without acquire": (WORDS, "__ATOMIC_ACQUIRE", "__ATOMIC_RELAXED"),
    "flag before the block's stores": (
        SYMMETRIC,
        "    protocol_point();\n    __syncthreads();\n    for",
        "    protocol_point();\n    for",
    ),
    "one slot": (SYMMETRIC, "static_cast<int64_t>(epoch % 2) * channel.slot_bytes", "0"),
    "no wait for the parts": (ALL_REDUCE, "  if (!call.wait(1)) return false;\n", ""),
    "sum begins at the own rank": (
        ALL_REDUCE,
        "slot_of<T>(call, rank)[unit]",
        "slot_of<T>(call, (rank + call.channel.rank) % call.channel.world)[unit]",
    ),
    "every block counts the call": (
        SYMMETRIC,
        "if (add_acq_rel_device(word(kTicketAt), 1) + 1 != gridDim.x) return;",
        "",
    ),
}
QUICK_BUGS = ("flag stored without release",)


@needs_compiler
@pytest.mark.parametrize(
    "bug", [b if b in QUICK_BUGS else pytest.param(b, marks=pytest.mark.slow) for b in BUGS]
)
def test_a_planted_bug_is_reported(bug: str, tmp_path: Path) -> None:
    name, right, wrong = BUGS[bug]
    for folder in ("csrc/cuda", "tests/cuda_on_host"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    source = tmp_path / name
    text = source.read_text(encoding="utf-8")
    assert right in text
    source.write_text(text.replace(right, wrong), encoding="utf-8")
    program = build(tmp_path, tmp_path / "planted")
    answers = [run(program, 3, form, "f", CALLS, 20, 1) for form in (ONE_SHOT, TWO_SHOT)]
    statuses = [answer.returncode for answer in answers]
    if bug == "no wait for the parts":
        assert statuses == [0, RACE]  # one-shot has no parts
    elif bug == "sum begins at the own rank":
        assert statuses == [1, 1]
    else:
        assert statuses == [RACE, RACE]


INSTANCES = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "cuda/words.cuh"
#include "cuda/all_reduce.cuh"
namespace mcp::cuda {
template <class T> void use() {
  all_reduce_kernel<T, AllReduceForm::kOneShot><<<1, 1>>>({}, {});
  all_reduce_kernel<T, AllReduceForm::kTwoShot><<<1, 1>>>({}, {});
  if constexpr (sizeof(T) < 8) all_reduce_kernel<T, AllReduceForm::kMulticast><<<1, 1>>>({}, {});
}
void use_all() { use<float>(); use<__nv_bfloat16>(); use<__half>(); use<double>(); }
}
"""


def kernels_of(ptx: str) -> dict[str, str]:
    """Body of every kernel by its mangled name."""
    parts = ptx.split(".entry ")[1:]
    return {part.split("(", 1)[0]: part for part in parts}


@pytest.mark.skipif(NVCC is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize("arch", [pytest.param("8.0", marks=pytest.mark.slow), "9.0a"])
def test_flags_are_system_scoped_in_the_machine_text(arch: str, tmp_path: Path) -> None:
    source, target = tmp_path / "instances.cu", tmp_path / "instances.ptx"
    source.write_text(INSTANCES, encoding="utf-8")
    number = gencode_flags((arch,))[0].split("code=sm_")[1]
    command = [str(NVCC), "-std=c++17", "-O3", f"-arch=compute_{number}", "--fmad=false", "-ptx"]
    command += ["-diag-suppress=20012", f"-I{ROOT / 'csrc'}", str(source), "-o", str(target)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    kernels = kernels_of(target.read_text(encoding="utf-8"))
    assert len(kernels) == 11
    for name, text in kernels.items():
        assert "st.release.sys.global.u64" in text, name
        assert "ld.acquire.sys.global.u64" in text, name
        assert "atom.add.acq_rel.gpu.global.u64" in text, name
        # Nothing that other GPUs see is released or acquired at a lesser scope.
        assert "release.gpu" not in text.replace("acq_rel.gpu", ""), name
        assert "acquire.gpu" not in text, name
        assert "fma.rn" not in text, name
        assert ("multimem.ld_reduce.relaxed.sys" in text) == (
            arch == "9.0a" and "AllReduceFormE2E" in name
        ), name
