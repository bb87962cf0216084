"""The CUDA kernels' protocol without a GPU: the same source, 32 coroutines a warp, equal bits."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from native import find_compiler

from mcp_kernels import onebit_compress, onebit_decompress, reference_only
from mcp_kernels.testing import assert_same_bits, make_gradient, make_hostile

ROOT = Path(__file__).resolve().parent.parent
COMPILER, NO_COMPILER = find_compiler()
pytestmark = pytest.mark.skipif(COMPILER is None, reason=NO_COMPILER or "no compiler")

FLOAT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# 9: into a second byte; 33: into a second row; 24: blocks that start inside a word;
# 40: blocks that start inside a word and have whole rows;
# 1500 in one block: more rows than stay in registers; 9000 over 8: several thread groups.
CASES = [
    (1, 8),
    (9, 8),
    (33, 64),
    (1000, 24),
    (90, 40),
    (1000, 1024),
    (3000, 1024),
    (1500, 1 << 40),
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The host build of the CUDA kernels."""
    library = tmp_path_factory.mktemp("host") / "kernels.so"
    source = ROOT / "tests" / "cuda_on_host" / "onebit_compress.cpp"
    flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-Wno-unknown-pragmas"]
    # A GPU faults on a store that a host CPU forgives.
    flags += ["-fsanitize=alignment,bounds,shift"]
    command = [*COMPILER, *flags, f"-I{ROOT / 'csrc'}", str(source), "-o", str(library)]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return ctypes.CDLL(str(library))


@pytest.fixture(autouse=True)
def no_undefined_behaviour(capfd):
    yield
    assert "runtime error" not in capfd.readouterr().err


def compress(kernels, x, error, block_size):
    numel = x.numel()
    bits = torch.full((-(-numel // 8),), 0xAA, dtype=torch.uint8)
    scales = torch.full((-(-numel // block_size),), float("nan"))
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (error, bits, scales))
    kernels.onebit_compress(
        ctypes.c_void_p(x.data_ptr()),
        FLOAT_TYPES[x.dtype],
        *pointers,
        ctypes.c_int64(numel),
        ctypes.c_int64(block_size),
    )
    return bits, scales


def assert_equals_reference(kernels, x, error, block_size):
    expected_error, actual_error = error.clone(), error.clone()
    with reference_only():
        expected = onebit_compress(x, expected_error, block_size)
    actual = compress(kernels, x, actual_error, block_size)
    assert_same_bits(actual[0], expected[0], "bits")
    assert_same_bits(actual[1], expected[1], "scales")
    assert_same_bits(actual_error, expected_error, "error")
    return expected


@pytest.mark.parametrize("make", [make_gradient, make_hostile])
@pytest.mark.parametrize("numel, block_size", CASES)
def test_compress_gives_the_reference_s_bits(kernels, numel, block_size, make):
    x, error = make(numel, seed=1), make_gradient(numel, seed=2)
    assert_equals_reference(kernels, x, error, block_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs(kernels, dtype):
    x, error = make_gradient(1100, seed=3, dtype=dtype), make_gradient(1100, seed=4)
    assert_equals_reference(kernels, x, error, 512)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("block_size", [64, 2048])
def test_a_block_that_is_not_finite_keeps_its_error(kernels, bad, block_size):
    x, error = make_gradient(3 * block_size, seed=5), make_gradient(3 * block_size, seed=6)
    x[block_size + 7] = bad
    _, scales = assert_equals_reference(kernels, x, error, block_size)
    assert scales.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("numel, block_size", [*CASES, (9000, 8)])
def test_decompress_gives_the_reference_s_bits(kernels, numel, block_size):
    bits = torch.randint(0, 256, (-(-numel // 8),), dtype=torch.uint8)
    scales = torch.rand(-(-numel // block_size))
    x = torch.full((numel,), float("nan"))
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (bits, scales, x))
    kernels.onebit_decompress(*pointers, ctypes.c_int64(numel), ctypes.c_int64(block_size))
    with reference_only():
        assert_same_bits(x, onebit_decompress(bits, scales, numel, block_size))
