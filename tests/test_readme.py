"""What README shows a new user works as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import PATIENCE_S

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.split("\n")[0])
def test_examples_run(code, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::RuntimeWarning:mcp_kernels", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr


def test_there_is_an_example_of_each_package():
    assert any("import mcp_kernels" in code for code in EXAMPLES)
    assert any("from mcp_parallel" in code for code in EXAMPLES)


def test_it_is_short_and_its_map_is_true():
    assert len(README.splitlines()) < 200
    table = README.split("## Map")[1]
    paths = [
        path
        for row in table.splitlines()
        if row.startswith("| `")
        for path in re.findall(r"`([^`]+)`", row.split("|")[1])
    ]
    assert len(paths) > 10
    parents = {"mcp_parallel/", "mcp_kernels/", ""}
    for path in paths:
        assert any((ROOT / parent / path).exists() for parent in parents), path
