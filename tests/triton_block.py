"""Runs our ops on Triton bodies, beneath autograd: on a GPU or the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from block_inputs import DTYPES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton_codecs import DEVICE

# The interpreter cuts bfloat16 instead of rounding.
TYPES = [dtype for dtype in DTYPES if dtype != torch.bfloat16 or DEVICE == "cuda"]


class TritonBodies(TorchDispatchMode):
    """Sends ops to the functions of their names in ``module``; ``ran`` says to which."""

    def __init__(self, module):
        super().__init__()
        self.module, self.ran = module, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::", 1)[1]
        if func.namespace != "mcp_kernels":
            return func(*args, **(kwargs or {}))
        self.ran.add(name)
        there = tree_map_only(torch.Tensor, lambda t: t.to(DEVICE), args)
        return tree_map_only(torch.Tensor, lambda t: t.cpu(), getattr(self.module, name)(*there))


COMPILE = """
import sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def compiled(kernel, element, **constants):
    signature = {}
    for name in kernel.arg_names:
        pointer = "*fp32" if name in ("scale_ptr", "parts_ptr") else f"*{element}"
        kind = pointer if name.endswith("_ptr") else "fp64" if name == "eps" else "i64"
        signature[name] = "constexpr" if name in constants else kind
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    result = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32))
    assert result.asm["cubin"][:4] == b"\\x7fELF"
"""


def compile_for(arch, code, tmp_path):
    """Run ``code`` after ``COMPILE``, in a process of its own: this one has the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", COMPILE + code, str(arch)]
    answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert answer.returncode == 0, answer.stdout + answer.stderr[-3000:]
