"""The CUDA all-reduce without a GPU: its source on host threads under ThreadSanitizer, its PTX.

A virtual rank is a GPU: its kernels run one after another, at their own pace, each with all its
blocks and threads at once. Delays are drawn at every protocol point. A rank checks the bits of
every result against a loop of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_host import (
    NVCC,
    RACE,
    ROOT,
    assert_system_scope,
    build,
    needs_compiler,
    plant,
    ptx_kernels,
    run,
)

ONE_SHOT, TWO_SHOT, MULTICAST = range(3)
CALLS = 40  # each size and grid several times, and every slot reused


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "all_reduce", tmp_path_factory.mktemp("host") / "all_reduce")


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
    plant(tmp_path, *BUGS[bug])
    program = build(tmp_path, "all_reduce", tmp_path / "planted")
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


@pytest.mark.skipif(NVCC is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize("arch", [pytest.param("8.0", marks=pytest.mark.slow), "9.0a"])
def test_flags_are_system_scoped_in_the_machine_text(arch: str, tmp_path: Path) -> None:
    kernels = ptx_kernels(INSTANCES, arch, tmp_path)
    assert len(kernels) == 11
    for name, text in kernels.items():
        assert_system_scope(name, text)
        assert ("multimem.ld_reduce.relaxed.sys" in text) == (
            arch == "9.0a" and "AllReduceFormE2E" in name
        ), name
