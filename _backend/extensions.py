"""Our two compiled modules: what they are made of, and what became of each."""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
from pathlib import Path
from typing import Any

from cuda import choose_cuda, nvcc_flags
from find_torch import find_torch
from native import (
    GB_PER_CXX_JOB,
    GB_PER_NVCC_JOB,
    CompileError,
    Step,
    compiler_version,
    find_compiler,
    num_jobs,
    python_headers,
    run_steps,
)

CXX_FLAGS = [
    *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
    # gcc 12 takes _mm512_undefined_ps, which is undefined on purpose, for a mistake; clang does not
    # know the second flag.
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"),
    # A fused multiply-add rounds once instead of twice; results must not depend on where it fits.
    "-ffp-contract=off",
]
# Oldest torch and Python that the stable-ABI module loads into.
STABLE_DEFINES = ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
LIMITED_API_DEFINE = "-DPy_LIMITED_API=0x030a0000"


def extra_flags() -> list[str]:
    """The flags of MCP_CXX_FLAGS, which come after ours."""
    return shlex.split(os.environ.get("MCP_CXX_FLAGS", ""))


class NativeBuild:
    """One build of the compiled modules; a module that cannot be built has a reason instead."""

    def __init__(self, root: Path, build_dir: Path) -> None:
        self.csrc = root / "csrc"
        self.build_dir = build_dir
        self.torch = find_torch()
        self.compiler, self.no_compiler = find_compiler()
        self.cuda, no_cuda = choose_cuda(self.torch)
        self.headers, self.no_headers = python_headers()
        self.reasons = {"cuda": no_cuda}
        self.built: list[str] = []

    def build(self, name: str, target: Path) -> None:
        """Build module ``name`` into file ``target``, or note why not.

        Raises:
            ValueError: an environment variable of the build is wrong.
        """
        short = name.rpartition(".")[2]
        plan = self._plan_c if short == "_C" else self._plan_shm
        reason = self.no_compiler or self.no_headers
        if not reason:
            steps = plan(target)
            reason = steps if isinstance(steps, str) else self._run(short, steps)
        if reason:
            self.reasons[short] = reason
            if short == "_C":
                self.reasons["cuda"] = self.reasons["cuda"] or reason
        else:
            self.built.append(short)

    def record(self) -> dict[str, Any]:
        """What ``build_info`` reads at run time; holds nothing about when or where."""
        return {
            "built": self.built,
            "compiler": compiler_version(self.compiler) if self.compiler else None,
            "cuda_archs": list(self.cuda.archs) if self.cuda else [],
            "reasons": {name: reason for name, reason in self.reasons.items() if reason},
            "torch": self.torch.version if self.torch else None,
        }

    def require_all(self) -> None:
        """Stop the build when a module is missing.

        Raises:
            SystemExit: names each and its reason.
        """
        missing = {name: why for name, why in self.reasons.items() if name != "cuda" and why}
        if missing:
            listed = "; ".join(f"{name}: {why}" for name, why in missing.items())
            raise SystemExit(f"error: MCP_REQUIRE_EXT=1 and extensions are missing: {listed}")

    def report(self) -> None:
        """Say what was built, and what was not and why."""
        print(f"mcp-kernels: built {', '.join(self.built) or 'no extension'}", file=sys.stderr)
        for name, reason in self.reasons.items():
            if reason:
                print(f"mcp-kernels: {name} was not built: {reason}", file=sys.stderr)

    def _run(self, name: str, steps: list[Step]) -> str:
        jobs = num_jobs(GB_PER_NVCC_JOB if self.cuda else GB_PER_CXX_JOB)
        try:
            run_steps(steps, self.build_dir / name, jobs)
        except CompileError as failure:
            return f"the compiler failed: {failure}"
        return ""

    def _plan_c(self, target: Path) -> list[Step] | str:
        if self.torch is None:
            return (
                "no torch >= 2.10 with headers was found at build time "
                "(set MCP_TORCH_DIR to the folder of the torch package)"
            )
        includes = [self.torch.include_dir, *self.headers]
        flags = list(STABLE_DEFINES)
        if not sysconfig.get_config_var("Py_GIL_DISABLED"):
            flags.append(LIMITED_API_DEFINE)
        libraries = [f"-L{self.torch.lib_dir}", "-ltorch_cpu"]
        steps = []
        if self.cuda:
            flags.append("-DMCP_WITH_CUDA")
            libraries += ["-ltorch_cuda"]
            steps += [self._nvcc(source, includes) for source in self._sources("cuda/*.cu")]
        sources = self._sources("module.cpp", "common/*.cpp", "cpu/*.cpp")
        steps += [self._cxx(source, "_C", flags, includes) for source in sources]
        # No run path: torch is imported before us, and its library is found by name.
        return [*steps, self._link(steps, target, libraries)]

    def _plan_shm(self, target: Path) -> list[Step] | str:
        try:
            import pybind11
        except ImportError:
            return "pybind11 is not installed in the build environment"
        includes = [Path(pybind11.get_include()), *self.headers]
        sources = self._sources("common/isa.cpp", "shm/*.cpp")
        steps = [self._cxx(source, "_shm", [], includes) for source in sources]
        return [*steps, self._link(steps, target, [])]

    def _sources(self, *patterns: str) -> list[Path]:
        return sorted(path for pattern in patterns for path in self.csrc.glob(pattern))

    def _object(self, source: Path, module: str) -> Path:
        name = "-".join(source.relative_to(self.csrc).parts)
        return self.build_dir / module / f"{name}.o"

    def _cxx(self, source: Path, module: str, flags: list[str], includes: list[Path]) -> Step:
        output = self._object(source, module)
        depfile = output.with_suffix(".d")
        werror = ["-Werror"] if os.environ.get("MCP_WERROR") == "1" else []
        command = [
            *(self.compiler or []),
            *CXX_FLAGS,
            *extra_flags(),
            *werror,
            *flags,
            f"-I{self.csrc}",
            *(word for folder in includes for word in ("-isystem", str(folder))),
            *("-MMD", "-MF", str(depfile), "-c", str(source), "-o", str(output)),
        ]
        return Step(tuple(command), (source,), output, depfile)

    def _nvcc(self, source: Path, includes: list[Path]) -> Step:
        assert self.cuda is not None
        output = self._object(source, "_C")
        depfile = output.with_suffix(".d")
        command = [
            str(self.cuda.nvcc),
            *nvcc_flags(self.cuda.archs),
            *STABLE_DEFINES,
            f"-I{self.csrc}",
            *(word for folder in includes for word in ("-isystem", str(folder))),
            *("-MD", "-MF", str(depfile), "-c", str(source), "-o", str(output)),
        ]
        return Step(tuple(command), (source,), output, depfile)

    def _link(self, steps: list[Step], target: Path, libraries: list[str]) -> Step:
        objects = tuple(step.output for step in steps)
        target = target.resolve()
        if self.cuda and "-ltorch_cuda" in libraries:
            # nvcc knows where its runtime is; shared, so that torch's copy is used.
            linker = [str(self.cuda.nvcc), "-cudart=shared", "-shared"]
            strip = "-Xlinker=-s"
        else:
            linker = [*(self.compiler or []), "-shared"]
            strip = "-s"
        if not any(flag.startswith("-g") for flag in extra_flags()):  # else symbols are wanted
            linker.append(strip)
        command = [*linker, *map(str, objects), "-o", str(target), *libraries]
        return Step(tuple(command), objects, target)
