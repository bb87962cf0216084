"""Who may import whom, what every op must have, and how long a file may be."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from mcp_kernels import _op

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("mcp_kernels", "mcp_parallel")
MAX_LINES = 400

# Path of the importing file -> modules that it must not import, themselves or anything in them.
FORBIDDEN = {
    "mcp_kernels/": ["mcp_parallel", "tests", "bench", "pickle", "dill", "cloudpickle"],
    "mcp_kernels/ops/": ["mcp_kernels.nn", "mcp_kernels.optim"],
    "mcp_kernels/_op.py": [
        *("mcp_kernels.ops", "mcp_kernels.nn", "mcp_kernels.optim"),
        *("mcp_kernels.shm", "mcp_kernels.symmetric", "mcp_kernels.triton"),
    ],
    "mcp_kernels/_transforms.py": ["mcp_kernels"],
    "mcp_parallel/": ["tests", "bench", "pickle", "dill", "cloudpickle"],
    # What a command checks before any process starts must answer in under a second.
    "mcp_parallel/config.py": ["torch", "numpy"],
    "mcp_parallel/layout.py": ["torch", "numpy"],
    "mcp_parallel/check.py": ["torch", "numpy"],
    "mcp_parallel/schedules/": ["torch", "numpy"],
    "mcp_parallel/report/": ["torch", "numpy"],
    "mcp_parallel/presets.py": ["torch", "numpy"],
    "mcp_parallel/memory/block.py": ["torch", "numpy"],
    "mcp_parallel/memory/ends.py": ["torch", "numpy"],
    "mcp_parallel/memory/estimate.py": ["torch", "numpy"],
    "mcp_parallel/memory/kept.py": ["torch", "numpy"],
    "mcp_parallel/memory/ledger.py": ["torch", "numpy"],
    "mcp_parallel/memory/pipeline.py": ["torch", "numpy"],
    "mcp_parallel/memory/replay.py": ["torch", "numpy"],
    "mcp_parallel/memory/sharded.py": ["torch", "numpy"],
    "mcp_parallel/memory/sizes.py": ["torch", "numpy"],
    "mcp_parallel/memory/weights.py": ["torch", "numpy"],
    "mcp_parallel/checkpoint/manifest.py": ["torch", "numpy"],
    "mcp_parallel/cli/main.py": ["torch", "numpy"],
}
# Folder -> modules that are imported there and nowhere else in the packages.
ONLY_IN = {"mcp_kernels/triton/": ["triton"]}
# Calls that run code from a file, or wake the GPU when a module is imported.
FORBIDDEN_CALLS = ["torch.load", "yaml.load", "yaml.unsafe_load", "eval", "exec"]


def python_files():
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def relative(path):
    return path.relative_to(ROOT).as_posix()


def is_inside(module, parent):
    return module == parent or module.startswith(f"{parent}.")


def imports(tree, path):
    """(line, full module name) of every import of a file, those inside functions included."""
    package = relative(path).removesuffix("/__init__.py").removesuffix(".py").split("/")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def calls(tree):
    """(line, dotted name) of every call by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def import_time_nodes(tree):
    """Every node that runs when the module is imported: functions' bodies do not."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        yield node
        waiting.extend(ast.iter_child_nodes(node))


def import_faults(path, tree):
    name = relative(path)
    for line, module in imports(tree, path):
        for prefix, forbidden in FORBIDDEN.items():
            if name.startswith(prefix) and any(is_inside(module, f) for f in forbidden):
                yield f"{name}:{line} imports {module}"
        for folder, modules in ONLY_IN.items():
            if not name.startswith(folder) and any(is_inside(module, m) for m in modules):
                yield f"{name}:{line} imports {module}, which belongs in {folder}"


def call_faults(path, tree):
    name = relative(path)
    for line, called in calls(tree):
        if called in FORBIDDEN_CALLS:
            yield f"{name}:{line} calls {called}"
    for node in import_time_nodes(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.cuda."):
            yield f"{name}:{node.lineno} calls {ast.unparse(node.func)} when it is imported"


@pytest.mark.parametrize("find_faults", [import_faults, call_faults])
def test_no_file_breaks_the_rules(find_faults):
    faults = []
    for path in python_files():
        faults += find_faults(path, parsed(path))
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "name, code, fault",
    [
        ("mcp_kernels/ops/x.py", "import mcp_parallel.trainer", "imports mcp_parallel.trainer"),
        ("mcp_kernels/ops/x.py", "def f():\n    from mcp_kernels import nn", "mcp_kernels.nn"),
        ("mcp_kernels/ops/x.py", "from .. import nn", "imports mcp_kernels.nn"),
        ("mcp_kernels/nn/x.py", "import triton.language as tl", "belongs in mcp_kernels/triton/"),
        ("mcp_parallel/layout.py", "from torch import Tensor", "imports torch"),
        ("mcp_parallel/x.py", "from pickle import loads", "imports pickle.loads"),
        ("mcp_parallel/x.py", "torch.load(path)", "calls torch.load"),
        ("mcp_parallel/x.py", "N = torch.cuda.device_count()", "when it is imported"),
    ],
)
def test_a_planted_fault_is_found(name, code, fault):
    path, tree = ROOT / name, ast.parse(code)
    found = [*import_faults(path, tree), *call_faults(path, tree)]
    assert any(fault in line for line in found), found


@pytest.mark.parametrize(
    "name, code",
    [
        ("mcp_kernels/triton/x.py", "import triton"),
        ("mcp_kernels/ops/x.py", "import mcp_kernels._op, mcp_kernels.triton"),
        ("mcp_parallel/x.py", "def f():\n    torch.cuda.synchronize()"),
    ],
)
def test_what_is_allowed_is_no_fault(name, code):
    path, tree = ROOT / name, ast.parse(code)
    assert not [*import_faults(path, tree), *call_faults(path, tree)]


def test_every_op_has_a_test_and_a_bench():
    op_files = {
        Path(definition.source_file)
        for definition in _op.definitions.values()
        if Path(definition.source_file).parent == ROOT / "mcp_kernels" / "ops"
    }
    assert ROOT / "mcp_kernels" / "ops" / "onebit_compress.py" in op_files
    missing = [
        wanted
        for path in sorted(op_files)
        for wanted in (f"tests/test_{path.stem}.py", f"bench/bench_{path.stem}.py")
        if not (ROOT / wanted).is_file()
    ]
    assert not missing, f"missing: {', '.join(missing)}"


def test_every_triton_body_has_an_op_and_a_test():
    from mcp_kernels.triton import BODIES

    assert set(BODIES) <= set(_op.definitions)
    for body in BODIES.values():
        module = body.split(":")[0]
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
        assert (ROOT / "tests" / f"test_triton_{module.rpartition('.')[2]}.py").is_file()


def test_no_file_is_too_long():
    files = python_files()
    for folder, patterns in {
        "csrc": ("*.h", "*.cpp", "*.cu", "*.cuh"),
        "tests": ("*.py",),
        "bench": ("*.py",),
        "_backend": ("*.py",),
        "mcp_parallel/report/page": ("*.js", "*.css", "*.html"),
    }.items():
        files += [path for pattern in patterns for path in (ROOT / folder).rglob(pattern)]
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    long = {name: length for name, length in lengths.items() if length > MAX_LINES}
    assert not long, f"over {MAX_LINES} lines, split by idea: {long}"
