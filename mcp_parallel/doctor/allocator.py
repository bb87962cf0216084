"""The host's memory allocator: what is preloaded, and how glibc's own is set. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from mcp_parallel.doctor.finding import Finding, note, unset
from mcp_parallel.doctor.host import ROOT

_LIBRARIES = ("libjemalloc", "libtcmalloc")
_FOLDERS = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/local/lib")
# glibc makes up to eight arenas a core, each of which keeps freed memory to itself.
_MANY_CORES = 64


def host_allocator_findings(
    environ: Mapping[str, str], cores: int, root: Path = ROOT
) -> Iterator[Finding]:
    """Judge ``LD_PRELOAD`` and ``MALLOC_ARENA_MAX`` for ranks on ``cores`` cores."""
    preloaded = environ.get("LD_PRELOAD", "").replace(":", " ").split()
    missing = [path for path in preloaded if "/" in path and not _exists(root, path)]
    if missing:
        yield note(
            "LD_PRELOAD",
            ", ".join(missing),
            wanted="files that are there",
            why="every process starts with an error of the loader, and without the library",
            how="correct the path, or unset LD_PRELOAD",
            fix=unset("LD_PRELOAD", "it names a file that is not there"),
        )
    chosen = [Path(path).name for path in preloaded if Path(path).name.startswith(_LIBRARIES)]
    if chosen and not missing:
        yield Finding("host allocator", "ok", f"{', '.join(chosen)}, preloaded")
        return
    arenas = environ.get("MALLOC_ARENA_MAX", "")
    if arenas:
        yield Finding("host allocator", "ok", f"glibc, at most {arenas} arenas")
        return
    here = sorted(
        str(file.relative_to(root)) for folder in _FOLDERS for file in _allocators(root / folder)
    )
    if cores < _MANY_CORES:
        yield Finding("host allocator", "ok", "glibc" + (f"; there is /{here[0]}" if here else ""))
        return
    yield note(
        "host allocator",
        f"glibc, up to {8 * cores} arenas",
        wanted="jemalloc or tcmalloc, or fewer arenas",
        why="data workers and checkpoints leave freed memory behind in each arena: ranks grow",
        how=f"LD_PRELOAD=/{here[0]} for the ranks, or MALLOC_ARENA_MAX=8"
        if here
        else "set MALLOC_ARENA_MAX=8, or install and preload jemalloc",
    )


def _allocators(folder: Path) -> list[Path]:
    return [file for name in _LIBRARIES for file in folder.glob(f"{name}*.so.*")]


def _exists(root: Path, path: str) -> bool:
    return (root / path.lstrip("/")).exists()
