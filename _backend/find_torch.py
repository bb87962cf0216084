"""Finds the torch whose headers a build uses, without importing it.

pip runs the build with the target's own interpreter, so ``sysconfig`` still knows the target's
site-packages though ``sys.path`` hides them. uv does not: set MCP_TORCH_DIR there.
"""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OLDEST_TORCH = (2, 10)  # first stable ABI with parallel_for
TORCH_REQUIREMENT = "torch>=2.10,<2.14"  # bounded: the newest ones come with GBs of CUDA
STABLE_HEADER = Path("include/torch/csrc/stable/library.h")


@dataclass(frozen=True)
class FoundTorch:
    """A torch package on disk."""

    path: Path
    version: str
    cuda: str | None
    """CUDA version it was built with; None for a CPU build."""

    @property
    def include_dir(self) -> Path:
        """Where its headers are."""
        return self.path / "include"

    @property
    def lib_dir(self) -> Path:
        """Where its libraries are."""
        return self.path / "lib"


def find_torch() -> FoundTorch | None:
    """The torch of MCP_TORCH_DIR, of the target environment, or of this process, in that order.

    Raises:
        ValueError: MCP_TORCH_DIR is set and holds no usable torch.
    """
    forced = os.environ.get("MCP_TORCH_DIR")
    if forced:
        found = read_torch(Path(forced))
        if found is None:
            raise ValueError(
                f"MCP_TORCH_DIR: must be a torch >= 2.10 package folder (the one that holds "
                f"version.py and include/), got {forced}"
            )
        return found
    for folder in _site_folders():
        found = read_torch(folder / "torch")
        if found is not None:
            return found
    return None


def read_torch(path: Path) -> FoundTorch | None:
    """What ``path`` holds, or None where it is no torch, too old, or has no stable headers."""
    try:
        text = (path / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    numbers = re.match(r"(\d+)\.(\d+)", version.group(1)) if version else None
    if not version or not numbers or not (path / STABLE_HEADER).is_file():
        return None
    if (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        return None
    return FoundTorch(path.resolve(), version.group(1), cuda.group(1) if cuda else None)


def _site_folders() -> Iterator[Path]:
    """Folders that the target environment imports from, then those of this process."""
    roots = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    if _sees_base_packages():
        base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
        roots += [Path(sysconfig.get_path("purelib", vars=base))]
        roots += [Path(site.getusersitepackages())]
    seen: set[Path] = set()
    for root in roots:
        for folder in (root, *_pth_folders(root)):
            if folder not in seen:
                seen.add(folder)
                yield folder
    yield from (Path(entry) for entry in sys.path if entry)


def _sees_base_packages() -> bool:
    """Whether the target also imports from the Python that its virtual environment came from."""
    if sys.prefix == sys.base_prefix:
        return True
    try:
        settings = (Path(sys.prefix) / "pyvenv.cfg").read_text(encoding="utf-8")
    except OSError:
        return False
    return bool(re.search(r"^include-system-site-packages\s*=\s*true", settings, re.M | re.I))


def _pth_folders(root: Path) -> Iterator[Path]:
    """Folders that path files in ``root`` add."""
    for path_file in sorted(root.glob("*.pth")):
        for line in path_file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.strip() and not line.startswith(("#", "import ", "import\t")):
                folder = root / line.strip()
                if folder.is_dir():
                    yield folder
