"""The symmetric-memory kernels compile for A100 and H100: flags at system scope, no spills."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# In a process of its own: this one has Triton's interpreter.
COMPILE = """
import sys
from mcp_kernels.triton import symmetric_resources as resources

arch, kernels, rmw = int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3] == "rmw"
if rmw:  # what Triton before 3.9 compiles
    import triton.language as tl
    from mcp_kernels.triton import symmetric_flags
    symmetric_flags.HAS_POLL = tl.constexpr(False)
for label, used, ptx in resources.rows((arch,), kernels):
    print(label, used)
    assert used.spill_bytes == 0, label
    assert used.shared_bytes <= {80: 166912, 90: 232448}[arch], label
    # Every flag between GPUs: released and acquired at system scope.
    if rmw:
        assert "atom.global.sys.release.exch.b64" in ptx or "atom.sys.global.release" in ptx or \\
            "release.sys.global.exch" in ptx, ptx
        assert ".acquire.sys" in ptx or "sys.acquire" in ptx, ptx
    else:
        # sm_80 has one fence for both directions.
        release, acquire = ("release", "acquire") if arch >= 90 else ("acq_rel", "acq_rel")
        if "pull" not in label:  # it raises no flag
            assert f"fence.{release}.sys" in ptx and "st.relaxed.sys.global.b64" in ptx, label
        if "offer" not in label:  # it waits for nobody
            assert f"fence.{acquire}.sys" in ptx and "ld.relaxed.sys.global.b64" in ptx, label
            assert "globaltimer" in ptx, label
    for weak in ("release.cta", "acquire.cta", "release.gpu", "acquire.gpu"):
        assert weak not in ptx.replace("acq_rel", ""), (label, weak)
    assert ("multimem.ld_reduce" in ptx) == ("multicast" in label), label
"""


def compile_all(tmp_path: Path, arch: int, kernels: str, how: str = "poll") -> list[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, str(arch), kernels, how]
    answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert answer.returncode == 0, answer.stdout + answer.stderr[-6000:]
    return answer.stdout.splitlines()


def test_the_all_reduce_compiles_for_hopper(tmp_path: Path) -> None:
    (line,) = compile_all(tmp_path, 90, "two_shot")
    assert "has_wgmma=True" in line


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_every_kernel_compiles(arch: int, tmp_path: Path) -> None:
    lines = compile_all(tmp_path, arch, "all")
    names = {line.split(":")[0] for line in lines}
    forms = {"one_shot", "two_shot", "scatter", "all_gather", "small", "float32", "offer", "pull"}
    assert names == {
        f"sm_{arch} {form}" for form in forms | ({"multicast"} if arch == 90 else set())
    }


@pytest.mark.slow
def test_kernels_of_older_triton_compile(tmp_path: Path) -> None:
    assert len(compile_all(tmp_path, 90, "two_shot,all_gather", "rmw")) == 2
