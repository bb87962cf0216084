"""The CUDA reduce-scatter and all-gather without a GPU: on host threads, and their PTX.

As for the all-reduce, whose protocol they share: a rank checks the bits of every result against a
loop of its own, under ThreadSanitizer, with delays at every protocol point.
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

CALLS = 20  # each size, grid and alignment, and every slot reused


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "scatter_gather", tmp_path_factory.mktemp("host") / "scatter_gather")


@needs_compiler
@pytest.mark.parametrize(
    "world, op, dtype",
    [(1, "m", "f"), (2, "s", "f"), (2, "g", "b"), (3, "m", "d"), (4, "m", "h"), (8, "m", "f")],
)
def test_right_bits_and_no_race(program: Path, world: int, op: str, dtype: str) -> None:
    answer = run(program, world, op, dtype, CALLS if world < 8 else CALLS // 2, 20, 1)
    assert answer.returncode == 0, answer.stderr[-3000:]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("op", ["s", "g", "m"])
@pytest.mark.parametrize("world", [2, 3, 6, 8])
def test_many_interleavings(program: Path, world: int, op: str, seed: int) -> None:
    answer = run(program, world, op, "f", 100, 10 * (1 + seed % 5), seed)
    assert answer.returncode == 0, answer.stderr[-3000:]


@needs_compiler
@pytest.mark.parametrize("world, op, absent", [(2, "s", 1), (4, "g", 0)])
def test_a_rank_that_does_not_come_is_named(
    program: Path, world: int, op: str, absent: int
) -> None:
    """The others time out, say whom they missed, give NaN, and do not wait again in later calls."""
    answer = run(program, world, op, "f", 3, 0, 1, absent)
    assert answer.returncode == 0, answer.stderr[-3000:]


SYMMETRIC, ROWS = "csrc/cuda/symmetric.cuh", "csrc/cuda/scatter_gather.cuh"
WAIT = "  if (!call.wait(0)) return false;\n"
BUGS = {
    "no wait": (ROWS, WAIT, "", RACE),
    "one slot": (
        SYMMETRIC,
        "static_cast<int64_t>(epoch % 2) * channel.slot_bytes",
        "0",
        RACE,
    ),
    "flag before the block's stores": (
        SYMMETRIC,
        "    protocol_point();\n    __syncthreads();\n    for",
        "    protocol_point();\n    for",
        RACE,
    ),
    "the next rank's row": (ROWS, "[rank * rows.units + unit]", "[peer * rows.units + unit]", 1),
    "a gathered row at the wrong place": (
        ROWS,
        "rows.write(peer, unit, from[unit])",
        "rows.write((peer + 1) % world, unit, from[unit])",
        1,
    ),
}
QUICK_BUGS = ("no wait", "the next rank's row")


@needs_compiler
@pytest.mark.parametrize(
    "bug", [b if b in QUICK_BUGS else pytest.param(b, marks=pytest.mark.slow) for b in BUGS]
)
def test_a_planted_bug_is_reported(bug: str, tmp_path: Path) -> None:
    *change, status = BUGS[bug]
    plant(tmp_path, *change)
    program = build(tmp_path, "scatter_gather", tmp_path / "planted")
    assert run(program, 3, "m", "f", CALLS, 20, 1).returncode == status


INSTANCES = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "cuda/words.cuh"
#include "cuda/scatter_gather.cuh"
namespace mcp::cuda {
template <class T> void use() {
  reduce_scatter_kernel<T><<<1, 1>>>({}, {});
  all_gather_kernel<T><<<1, 1>>>({}, {});
}
void use_all() { use<float>(); use<__nv_bfloat16>(); use<__half>(); use<double>(); }
}
"""


@pytest.mark.skipif(NVCC is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize("arch", [pytest.param("8.0", marks=pytest.mark.slow), "9.0a"])
def test_flags_are_system_scoped_in_the_machine_text(arch: str, tmp_path: Path) -> None:
    kernels = ptx_kernels(INSTANCES, arch, tmp_path)
    assert len(kernels) == 8
    for name, text in kernels.items():
        assert_system_scope(name, text)
