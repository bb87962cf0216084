"""The Triton body of onebit_compress: its bits in Triton's interpreter, its cubins for each GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from ranks import PATIENCE_S

pytest.importorskip("triton")

import mcp_kernels
from mcp_kernels import onebit_compress, onebit_decompress, reference_only
from mcp_kernels.testing import assert_same_bits, make_gradient, make_hostile
from mcp_kernels.triton import onebit_compress as body

# A GPU where there is one; Triton's interpreter on CPU (conftest.py) elsewhere.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# 1: one element; 9: into a second byte; 33: into a second row; 1000: a short block;
# 20_000 over 8: several programs, the last one not full.
CASES = [(1, 8), (9, 8), (33, 64), (1000, 24), (1000, 1024), (5003, 1024), (20_000, 1 << 40)]


@pytest.mark.parametrize("make", [make_gradient, make_hostile])
@pytest.mark.parametrize("numel, block_size", CASES)
def test_bits_equal_the_reference(numel, block_size, make):
    x, error = make(numel, seed=1).to(DEVICE), make_gradient(numel, seed=2, device=DEVICE)
    expected_error, actual_error = error.clone(), error.clone()
    with reference_only():
        expected = onebit_compress(x, expected_error, block_size)
        rebuilt = onebit_decompress(*expected, numel, block_size)
    actual = body.onebit_compress(x, actual_error, block_size)
    assert_same_bits(actual[0], expected[0], "bits")
    assert_same_bits(actual[1], expected[1], "scales")
    assert_same_bits(actual_error, expected_error, "error")
    assert_same_bits(body.onebit_decompress(*expected, numel, block_size), rebuilt)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_and_strided_inputs(dtype):
    x = make_gradient(3000, seed=3, dtype=dtype, device=DEVICE).view(60, 50).t()
    error = torch.zeros(3000, device=DEVICE)
    expected_error = error.clone()
    with reference_only():
        expected = onebit_compress(x, expected_error, 64)
    actual = body.onebit_compress(x, error, 64)
    assert_same_bits(actual[0], expected[0])
    assert_same_bits(actual[1], expected[1])
    assert_same_bits(error, expected_error)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_block_that_is_not_finite_keeps_its_error(bad):
    x, error = (make_gradient(192, seed=seed, device=DEVICE) for seed in (4, 5))
    x[70] = bad
    new_error = error.clone()
    _, scales = body.onebit_compress(x, new_error, 64)
    assert scales.isnan().tolist() == [False, True, False]
    assert_same_bits(new_error[64:128], error[64:128])


def test_no_elements():
    bits, scales = body.onebit_compress(torch.empty(0), torch.empty(0), 8)
    assert (bits.numel(), scales.numel()) == (0, 0)
    assert body.onebit_decompress(bits, scales, 0, 8).numel() == 0


COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mcp_kernels.triton import onebit_compress as body

def ptx(kernel, signature, constants, arch):
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    assert compiled.asm["cubin"][:4] == b"\\x7fELF"
    return compiled.asm["ptx"]

arch = int(sys.argv[1])
for x_type in ("*fp32", "*bf16", "*fp16"):
    signature = dict(x_ptr=x_type, error_ptr="*fp32", bits_ptr="*u8", scales_ptr="*fp32",
                     numel="i64", block_size="i64", num_blocks="i64", num_rows="i64", P="constexpr")
    text = ptx(body._onebit_compress_kernel, signature, {"P": body.BLOCKS_PER_PROGRAM}, arch)
    # The definition needs the square root and the division rounded as IEEE has it.
    assert "sqrt.rn.f64" in text and "div.rn.f64" in text, text
    assert "approx" not in text and ".ftz" not in text, text
signature = dict(bits_ptr="*u8", scales_ptr="*fp32", x_ptr="*fp32", numel="i64", block_size="i64",
                 BYTES="constexpr")
ptx(body._onebit_decompress_kernel, signature, {"BYTES": body.BYTES_PER_PROGRAM}, arch)
"""


@pytest.mark.parametrize("arch", [80, 90])
def test_compiles_for_gpus_without_one(arch, tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    answer = subprocess.run(
        [sys.executable, "-c", COMPILE, str(arch)],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]


REGISTER = """
import torch
torch.version.cuda = "13.0"  # what a CUDA build says; importing ours must not touch the device
import mcp_kernels, sys
print("triton" in sys.modules, torch.cuda.is_initialized())
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    x, error = torch.empty(64, device="cuda"), torch.empty(64, device="cuda")
    choice = mcp_kernels.which_backend("onebit_compress", x, error)
print(choice.chosen)
print(choice.refused["cpu"])
print(choice.refused["cuda"])
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="pretends to be a CUDA build")
def test_registers_on_a_cuda_build_without_a_cuda_body():
    answer = subprocess.run(
        [sys.executable, "-c", REGISTER], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert answer.returncode == 0, answer.stderr
    touched, chosen, cpu, cuda = answer.stdout.splitlines()
    assert touched == "False False", "Triton and the device wait for the first call"
    assert (chosen, cpu) == ("triton", "inputs are on cuda")
    assert cuda == mcp_kernels.build_info().reasons["cuda"]
