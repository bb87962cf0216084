"""Helpers of the codecs' Triton tests: bodies on the interpreter or a GPU, cubins without one."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from mcp_kernels.testing import assert_same_bits

# A GPU where there is one; Triton's interpreter on CPU (conftest.py) elsewhere.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(*tensors):
    """Copies there, so that a body may change them; None stays None."""
    return [None if t is None else t.to(DEVICE, copy=True) for t in tensors]


def assert_equal(actual, expected):
    for number, (got, want) in enumerate(zip(actual, expected, strict=True)):
        dense = torch.empty(got.shape, dtype=got.dtype).copy_(got)  # on CPU, whatever its strides
        assert_same_bits(dense, want, f"output {number}")


COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def ptx(kernel, pointers, constants=None, floats=(), int4=()):
    constants = constants or {}
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = pointers[name]
        else:
            signature[name] = "fp32" if name in floats else "i64"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    compiled = triton.compile(source, target=target, options={"enable_fp_fusion": False})
    assert compiled.asm["cubin"][:4] == b"\\x7fELF"
    text = compiled.asm["ptx"]
    # Every rounding is the definition's: none fused, none approximate, no denormal flushed.
    for word in ("fma.rn.f32", "approx", ".ftz", "div.full"):
        assert word not in text, (word, text)
    return text
"""


def compile_for(arch, code, tmp_path):
    """Run ``code`` after ``COMPILE``, in a process of its own: this one has the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    answer = subprocess.run(
        [sys.executable, "-c", COMPILE + code, str(arch)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
