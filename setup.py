"""Builds csrc/ where a compiler is at hand; without one the install is pure Python and says so.

Environment: CXX, MAX_JOBS, MCP_REQUIRE_EXT=1 (a missing extension is an error), MCP_WERROR=1,
MCP_CXX_FLAGS (after ours; with -g symbols are kept), MCP_TORCH_DIR, MCP_CUDA=0|1|auto,
TORCH_CUDA_ARCH_LIST, CUDA_HOME.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "_backend"))

from extensions import NativeBuild  # noqa: E402

RECORD = "_build_record.json"


def install(staged: Path, target: Path) -> None:
    """Put ``staged`` in place at once, so that who imports meanwhile finds the old or the new one.

    Where the build failed, what an earlier build left goes: it is not what the sources say.
    """
    if not staged.exists():
        target.unlink(missing_ok=True)
        return
    beside = target.with_name(f"{target.name}.new")
    shutil.copy2(staged, beside)
    beside.replace(target)


class BuildExt(build_ext):
    """Replaces setuptools' serial compilation by ours, and writes down what came of it."""

    def run(self) -> None:
        in_place = self.inplace or getattr(self, "editable_mode", False)
        package = (ROOT if in_place else Path(self.build_lib)) / "mcp_kernels"
        package.mkdir(parents=True, exist_ok=True)
        build = NativeBuild(ROOT, Path(self.build_temp).resolve())
        for extension in self.extensions:
            target = package / Path(self.get_ext_filename(extension.name)).name
            staged = build.build_dir / target.name
            staged.unlink(missing_ok=True)
            build.build(extension.name, staged)
            install(staged, target)
        record = json.dumps(build.record(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        # A compiler's message names files of this tree by their full path; the record does not.
        (package / RECORD).write_text(record.replace(f"{ROOT}{os.sep}", ""), encoding="utf-8")
        if os.environ.get("MCP_REQUIRE_EXT", "0") == "1":
            build.require_all()
        build.report()

    def get_outputs(self) -> list[str]:
        package = Path(self.build_lib) / "mcp_kernels"
        return [str(path) for path in (*package.glob("_*.so"), package / RECORD) if path.exists()]


# A free-threaded Python has no stable ABI.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        # The sources are found by extensions.py; setuptools only needs the names.
        Extension("mcp_kernels._C", sources=[], py_limited_api=LIMITED_API),
        Extension("mcp_kernels._shm", sources=[]),
    ],
    cmdclass={"build_ext": BuildExt},
)
