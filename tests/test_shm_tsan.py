"""The shared-memory protocol under ThreadSanitizer: ranks as threads, delays all the way."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CXX = shutil.which("g++") or shutil.which("clang++")
FLAGS = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-DMCP_SHM_POINTS"]

pytestmark = [
    pytest.mark.slow,  # a minute of compiling
    pytest.mark.skipif(CXX is None, reason="no C++ compiler"),
]


def sources() -> list[Path]:
    core = [path for path in (ROOT / "csrc/shm").glob("*.cpp") if "module" not in path.name]
    return [ROOT / "csrc/common/isa.cpp", *sorted(core), ROOT / "tests/shm_threads/shm_threads.cpp"]


def compile_file(source: Path, into: Path) -> Path:
    """The fences of the protocol wake sleepers and order no data; the sanitizer ignores them."""
    target = into / f"{source.name}.o"
    quiet = ["-Wno-tsan"] if CXX and "g++" in Path(CXX).name and "clang" not in CXX else []
    command = [str(CXX), *FLAGS, *quiet, f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return target


def link(objects: list[Path], program: Path) -> Path:
    command = [str(CXX), "-fsanitize=thread", *map(str, objects), "-o", str(program), "-lpthread"]
    subprocess.run(command, check=True, capture_output=True)
    return program


def run(program: Path, *args: int) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, args)]
    if shutil.which("setarch"):  # some kernels place memory where the sanitizer cannot shadow it
        command = ["setarch", "-R", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("tsan")
    probe = folder / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    try:
        program = link([compile_file(probe, folder)], folder / "probe")
    except (AssertionError, subprocess.CalledProcessError):
        pytest.skip(f"{CXX} has no ThreadSanitizer")
    if run(program).returncode != 0:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda source: compile_file(source, folder), sources()))


@pytest.mark.parametrize("seed", [1, 2])
def test_every_call_on_2_to_8_ranks(objects: list[Path], tmp_path: Path, seed: int) -> None:
    done = run(link(objects, tmp_path / "ranks"), seed, 80)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("all held") == 7


@pytest.mark.parametrize(
    ("name", "right", "wrong", "message"),
    [
        ("group.cpp", "store(step_, std::memory_order_release)", "relaxed", "data race"),
        ("group.cpp", "posted.load(std::memory_order_acquire) >= step", "relaxed", "data race"),
        ("workspace.cpp", "store(value, std::memory_order_release)", "relaxed", "data race"),
        ("workspace.cpp", "load(std::memory_order_acquire) < chunk", "relaxed", "data race"),
        ("mailbox.cpp", " && open->tag == envelope.tag", "", "tag 1 is wrong"),
    ],
    ids=["post", "await", "publish", "poll", "tags"],
)
def test_a_planted_fault_is_found(
    objects: list[Path], tmp_path: Path, name: str, right: str, wrong: str, message: str
) -> None:
    text = (ROOT / "csrc/shm" / name).read_text(encoding="utf-8")
    assert right in text
    faulty = wrong
    if wrong:
        faulty = right.replace("release", wrong).replace("acquire", wrong)
    (tmp_path / name).write_text(text.replace(right, faulty), encoding="utf-8")
    planted = compile_file(tmp_path / name, tmp_path)
    kept = [path for path in objects if path.name != planted.name]
    done = run(link([*kept, planted], tmp_path / "ranks"), 1, 60, 4)
    assert done.returncode != 0
    assert message in done.stderr
