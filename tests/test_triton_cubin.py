"""The Triton attention kernels compile for A100 and H100 without a GPU, and nothing spills.

No feature of the 64 and 128 wide bfloat16 kernels does; wider ones and float32 have to fit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Minutes of a core for some; where others share it, longer than most tests may take.
COMPILE_S = 1500
pytestmark = pytest.mark.timeout(COMPILE_S + 100)

# In a process of its own: this one has Triton's interpreter.
COMPILE = """
import sys
from mcp_kernels.triton import flash_attn_resources as resources

arch, head_dim, variants = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")
for label, launch, used in resources.rows((head_dim,), variants, (arch,)):
    name, chip = label.split()[-1], resources.CHIPS[arch]
    print(label, used)
    assert used.spill_bytes == 0, label
    assert used.shared_bytes <= chip.shared_bytes, label
    assert used.registers <= 255, label
    # Products of 64 rows and more run on Hopper's warp-group instructions; decode has 16.
    assert used.has_wgmma == (arch == 90 and name != "decode"), label
"""


def _compile(tmp_path: Path, *args: object) -> str:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, *map(str, args)]
    answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=COMPILE_S)
    assert answer.returncode == 0, answer.stdout + answer.stderr[-3000:]
    return answer.stdout


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_causal_kernels_do_not_spill(head_dim: int, arch: int, tmp_path: Path) -> None:
    lines = _compile(tmp_path, arch, head_dim, "causal").splitlines()
    names = [line.split(" Resources")[0].split()[-1] for line in lines]
    passes = ["dk_dv"] if head_dim == 64 else ["dv", "dk"]
    assert names == ["forward", "delta", *passes, "dq", "decode"]


# Every feature that has kernels of its own; what has a score to itself takes the most registers.
VARIANTS = ("full", "window_softcap", "alibi_sink", "varlen", "dropout", "mask", "bias")


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_other_kernels_do_not_spill(head_dim: int, arch: int, tmp_path: Path) -> None:
    lines = _compile(tmp_path, arch, head_dim, ",".join(VARIANTS)).splitlines()
    compiled = {line.split()[2] for line in lines}
    assert compiled == set(VARIANTS)
    assert sum("dbias" in line for line in lines) == 1


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_the_widest_heads_compile(arch: int, tmp_path: Path) -> None:
    """256 columns may spill; they have to fit the shared memory."""
    source = COMPILE.replace("assert used.spill_bytes == 0, label\n", "pass\n")
    assert "spill_bytes ==" not in source
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", source, str(arch), "256", "causal"]
    answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=COMPILE_S)
    assert answer.returncode == 0, answer.stdout + answer.stderr[-3000:]


FEATURES = """
import sys, torch
from mcp_kernels.triton import flash_attn_resources as resources
from mcp_kernels.triton.cubin import compile_launch

arch = int(sys.argv[1])
for dtype in (torch.bfloat16, torch.float32):
    for name, launch in resources.feature_launches(dtype, arch).items():
        used = compile_launch(launch, arch)
        assert used.shared_bytes <= resources.CHIPS[arch].shared_bytes, (name, used)
        print(name)
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_every_feature_compiles(arch: int, tmp_path: Path) -> None:
    """What the interpreter takes and the compiler would not: bias, dropout, varlen, caches."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", FEATURES, str(arch)]
    answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=COMPILE_S)
    assert answer.returncode == 0, answer.stdout + answer.stderr[-3000:]
    assert {"dbias", "float bias delta", "varlen dq", "decode pages 0"} <= set(
        answer.stdout.splitlines()
    )
