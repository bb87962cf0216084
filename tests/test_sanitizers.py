"""`make asan` reports what it is there for: reads past an end, and undefined behaviour.

The faults are calls that lie about their memory, each in a process of its own: what the compiled
code then does is what a wrong bound of its own would do.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import sanitized
from bodies import ISAS
from test_shm_tsan import sources

pytestmark = [
    pytest.mark.slow,  # minutes of compiling
    pytest.mark.skipif(shutil.which(sanitized.compiler()[0]) is None, reason="no GCC"),
    pytest.mark.timeout(3000),
]

# x says that it has as many more elements as two registers of the widest instruction set hold.
TOO_LONG = """
import sys, numpy, torch, mcp_kernels
from mcp_kernels import _C
_C.set_cpu_isa(sys.argv[1])
x = numpy.zeros(1024, dtype=numpy.float32)
x = torch.from_numpy(numpy.lib.stride_tricks.as_strided(x, (1024 + 32,)))
y = torch.empty(1024 + 32)
"""

CALLS = {
    "rms_norm": "torch.ops.mcp_kernels.rms_norm(x, y, 1e-5)",
    "swiglu": "torch.ops.mcp_kernels.swiglu(x, y)",
    "onebit_compress": "torch.ops.mcp_kernels.onebit_compress(x, y, 1024)",
    "flash_attn": "x = x.view(1, 33, 1, 32); mcp_kernels.flash_attn_func(x, x, x)",
}

# A float32 that begins at an odd address, which only the scalar bodies read as one.
MISPLACED = """
import sys, torch, mcp_kernels
from mcp_kernels import _C
_C.set_cpu_isa("scalar")
x = torch.frombuffer(bytearray(4 * 64 + 1), dtype=torch.float32, offset=1, count=64)
torch.ops.mcp_kernels.onebit_compress(x, torch.zeros(64), 64)
"""

# One element more than a ring of bytes holds: the gap behind it is the last page of the segment.
BEYOND_A_RING = """
import torch
from mcp_kernels import _shm
group = _shm.Group(name="own", token="asan", rank=0, world=1, slot_bytes=4096, ring_bytes=4096,
                   crowd=1, timeout_s=5.0)
[line] = [line for line in open("/proc/self/maps") if group.segment_name in line]
ring = int(line.split()[0].split("-")[1], 16) - 2 * 4096
out = torch.zeros(1025)
for n in (1024, 1025):
    print(n, flush=True)
    _shm.reduce([ring], out.data_ptr(), 0, n, _shm.Type.float32, _shm.Reduction.sum, False)
"""


@pytest.fixture(scope="module", autouse=True)
def instrumented() -> None:
    if sanitized.library("libasan.so") == "libasan.so":
        pytest.skip("the compiler has no AddressSanitizer")
    sanitized.build()


def reports_of(capfd: pytest.CaptureFixture[str], program: str, *args: str) -> str:
    status = sanitized.run("-c", program, *args)
    text = capfd.readouterr().err
    assert status != 0, text
    return text


def test_an_honest_call_is_not_reported() -> None:
    assert sanitized.run("-c", TOO_LONG, "scalar") == 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", CALLS)
def test_a_read_past_the_end_is_reported(
    capfd: pytest.CaptureFixture[str], op: str, isa: str
) -> None:
    text = reports_of(capfd, TOO_LONG + CALLS[op], isa)
    assert "heap-buffer-overflow" in text
    assert "csrc/cpu" in text


def test_a_misplaced_load_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    text = reports_of(capfd, MISPLACED)
    assert "misaligned address" in text
    assert "csrc/cpu" in text


def test_a_read_beyond_a_part_of_shared_memory_is_reported(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert sanitized.run("-c", BEYOND_A_RING) != 0
    seen = capfd.readouterr()
    assert seen.out.split() == ["1024", "1025"]
    assert "use-after-poison" in seen.err
    assert "csrc/shm" in seen.err


def test_ranks_as_threads(tmp_path: Path) -> None:
    """Every call on 2 to 8 ranks; the reports are on stderr."""
    flags = ["-std=c++17", "-DMCP_SHM_POINTS", f"-I{sanitized.ROOT / 'csrc'}", "-lpthread"]
    command = [*sanitized.compiler(), *sanitized.FLAGS, *map(str, sources()), *flags]
    program = tmp_path / "ranks"
    subprocess.run([*command, "-o", str(program)], check=True)
    done = subprocess.run([str(program), "1", "60"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("all held") == 7
