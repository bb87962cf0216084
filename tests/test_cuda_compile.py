"""Every CUDA source compiles for each GPU we name, against whatever torch is installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from cuda import DEFAULT_ARCHS, choose_cuda, cuda_archs, find_nvcc, gencode_flags, nvcc_flags
from extensions import STABLE_DEFINES
from find_torch import FoundTorch

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))

TORCH = FoundTorch(Path(torch.__file__).parent, str(torch.__version__), torch.version.cuda)
NVCC = find_nvcc()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not on PATH")


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_compiles_for_every_default_gpu(source, tmp_path):
    target = tmp_path / "out.o"
    answer = subprocess.run(
        [
            *(str(NVCC), *nvcc_flags(tuple(DEFAULT_ARCHS.split(";"))), "-Werror", "all-warnings"),
            *(*STABLE_DEFINES, f"-I{ROOT / 'csrc'}", "-isystem", str(TORCH.include_dir)),
            *("-c", str(source), "-o", str(target)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    machine_code = target.read_bytes()
    for arch in ("sm_80", "sm_90a"):
        assert arch.encode() in machine_code


def test_there_is_a_cuda_source():
    assert "onebit_compress" in [source.stem for source in SOURCES]


@pytest.fixture
def clean_env(monkeypatch):
    for name in ("MCP_CUDA", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def fake_nvcc(folder, release):
    """A program that answers --version as nvcc of that release does."""
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "nvcc"
    program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}'\n")
    program.chmod(0o755)
    return str(folder)


def test_a_cpu_torch_means_no_cuda(clean_env):
    cpu_torch = FoundTorch(TORCH.path, "2.13.0+cpu", None)
    cuda, reason = choose_cuda(cpu_torch)
    assert cuda is None
    assert reason == "the torch found at build time, 2.13.0+cpu, is a CPU build"
    clean_env.setenv("MCP_CUDA", "1")
    with pytest.raises(ValueError, match=r"MCP_CUDA=1: .* is a CPU build; install a CUDA build"):
        choose_cuda(cpu_torch)


def test_nvcc_of_the_same_major_version_builds(clean_env, tmp_path):
    clean_env.setenv("CUDA_HOME", fake_nvcc(tmp_path, "13.2"))
    cuda, reason = choose_cuda(FoundTorch(TORCH.path, "2.13.0+cu130", "13.0"))
    assert reason == ""
    assert (cuda.nvcc, cuda.archs) == (tmp_path / "bin" / "nvcc", ("8.0", "9.0a"))


def test_nvcc_of_another_major_version_does_not(clean_env, tmp_path):
    clean_env.setenv("CUDA_HOME", fake_nvcc(tmp_path, "12.8"))
    cuda, reason = choose_cuda(FoundTorch(TORCH.path, "2.13.0+cu130", "13.0"))
    assert (cuda, reason) == (None, "nvcc is CUDA 12.8 but torch was built with CUDA 13.0")


def test_no_nvcc_does_not(clean_env, tmp_path):
    clean_env.setenv("PATH", str(tmp_path))
    cuda, reason = choose_cuda(FoundTorch(TORCH.path, "2.13.0+cu130", "13.0"))
    assert (cuda, reason) == (None, "nvcc was not found on PATH or in CUDA_HOME at build time")


def test_mcp_cuda_0_and_nonsense(clean_env, tmp_path):
    clean_env.setenv("CUDA_HOME", fake_nvcc(tmp_path, "13.0"))
    clean_env.setenv("MCP_CUDA", "0")
    cuda, reason = choose_cuda(FoundTorch(TORCH.path, "2.13.0+cu130", "13.0"))
    assert (cuda, reason) == (None, "MCP_CUDA=0 was set at build time")
    clean_env.setenv("MCP_CUDA", "yes")
    with pytest.raises(ValueError, match="MCP_CUDA: must be 0, 1 or auto, got yes"):
        choose_cuda(None)


def test_the_arch_list_is_torch_s(clean_env):
    clean_env.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a;10.0+PTX")
    assert gencode_flags(cuda_archs()) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_100,code=compute_100",
    ]
    clean_env.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(ValueError, match="TORCH_CUDA_ARCH_LIST: must look like"):
        gencode_flags(cuda_archs())
