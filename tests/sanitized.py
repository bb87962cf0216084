"""Tests on extensions built with AddressSanitizer and UndefinedBehaviorSanitizer.

    python tests/sanitized.py                   what reaches C++, all of it
    python tests/sanitized.py tests/test_rms_norm.py -k wide     or what pytest is told

Builds into a copy of the project, build/sanitized, where an ordinary import finds the instrumented
modules; the working tree's own are left alone. A report of a sanitizer is a failure, whichever
process wrote it and whatever the tests made of its end.
"""

from __future__ import annotations

import filecmp
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "sanitized"
REPORTS = TREE / "build" / "reports"
FOLDERS = ("_backend", "csrc", "mcp_kernels", "mcp_parallel", "tests")
FILES = ("setup.py", "pyproject.toml", "README.md")

# The runtime of undefined behaviour is linked into each module and bound there: as a library of its
# own it would set the file of its reports in that of addresses, by a name that both have.
SANITIZERS = ("-fsanitize=address,undefined", "-static-libubsan", "-Wl,-Bsymbolic")
# -O1 keeps the accesses that the sources make; float-cast-overflow is not part of "undefined".
FLAGS = (
    *("-O1", "-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"),
    "-fsanitize=float-cast-overflow",
)

# Files whose tests run C++ on CPU, of ours alone. The rest of the suite calls the same ops on
# shapes that lie among these.
TESTS = (
    *("attention", "attention_autograd", "attention_cases", "attention_cases_more"),
    *("attention_dropout", "attention_edges", "attention_fuzz", "attention_grid"),
    *("attention_kvcache", "attention_parts", "attention_varlen"),
    *("collectives", "flash_attn_bf16", "flash_attn_cpu", "flash_attn_kvcache_cpu"),
    *("flash_attn_rows_cpu", "fp8_compress", "int4_compress", "int8_compress"),
    *("all_gather_matmul", "matmul_all_reduce", "matmul_on_shm", "matmul_reduce_scatter"),
    *("onebit_adam", "onebit_adam_update", "onebit_all_reduce", "onebit_compress"),
    *("onebit_compress_momentum", "onebit_reduce", "packing", "philox", "rms_norm", "rotary"),
    *("native_borders", "second_gradients", "shm_backend", "shm_group", "shm_segment"),
    *("shm_torch", "swiglu"),
)


def compiler() -> list[str]:
    """GCC, and what makes it instrument and link with the sanitizers."""
    return [*shlex.split(os.environ.get("CXX", "g++")), *SANITIZERS]


def library(name: str) -> str:
    """Where the compiler keeps a library; ``name`` itself where it has none."""
    command = [*compiler(), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def files_of(folder: Path) -> set[Path]:
    """What is kept of a folder, relative to it: no build's or interpreter's own files."""
    ignored = {".so", ".pyc", ".new"}
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in ignored)
    return {path.relative_to(folder) for path in files if path.name != "_build_record.json"}


def copy_tree() -> None:
    """The sources as they are now. What is the same already stays, and what was compiled from it.

    A file that differs is new from now on: with its own time it could be older than what an earlier
    build, of another state of it, left there.
    """
    TREE.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(ROOT / name, TREE / name)
    for name in FOLDERS:
        source, target = ROOT / name, TREE / name
        wanted = files_of(source)
        for path in files_of(target) - wanted:
            (target / path).unlink()
        for path in wanted:
            place = target / path
            if not place.exists() or not filecmp.cmp(source / path, place, shallow=False):
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / path, place)


def build() -> None:
    """Compile what changed.

    Raises:
        subprocess.CalledProcessError: it does not compile.
    """
    copy_tree()
    environment = {
        **os.environ,
        "CXX": shlex.join(compiler()),
        "MCP_CXX_FLAGS": shlex.join(FLAGS),
        "MCP_CUDA": "0",
        "MCP_REQUIRE_EXT": "1",
    }
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    subprocess.run(command, cwd=TREE, env=environment, check=True)


def environment() -> dict[str, str]:
    """What a Python needs to load instrumented modules, whose runtime must come first of all.

    libstdc++ comes with it: the runtime looks for the C++ exceptions that it watches when it
    starts, and Python itself does not link them.
    """
    preloaded = [library("libasan.so"), library("libstdc++.so.6")]
    # Python never frees all that it has. A tensor too large for memory is an error of torch's.
    options = "detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=1"
    log = f"log_path={REPORTS / 'report'}"
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(preloaded),
        "ASAN_OPTIONS": f"{options}:{log}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:{log}",
        "OMP_NUM_THREADS": "1",
        "HYPOTHESIS_PROFILE": "explore",
        "PYTHONPATH": str(TREE),
    }


def run(*command: str) -> int:
    """Python with ``command`` on the instrumented modules; its status, 1 where there are reports.

    The reports are printed.
    """
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir(parents=True)
    done = subprocess.run([sys.executable, *command], cwd=TREE, env=environment(), check=False)
    reports = sorted(REPORTS.iterdir())
    for report in reports:
        sys.stderr.write(report.read_text(encoding="utf-8", errors="replace"))
    return done.returncode or int(bool(reports))


def main() -> int:
    """Build, then test."""
    build()
    chosen = sys.argv[1:] or [f"tests/test_{name}.py" for name in TESTS]
    return run("-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen)


if __name__ == "__main__":
    sys.exit(main())
