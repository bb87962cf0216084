"""What README, CONTRIBUTING and docs/ name is there: files, keys, flags, targets, commands."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from mcp_parallel import config_reference, config_schema
from mcp_parallel.cli.arguments import read_arguments
from mcp_parallel.cli.main import _parser
from mcp_parallel.config import TABLES
from mcp_parallel.errors import ConfigError

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# The op that CONTRIBUTING makes up, to show which files a new one needs.
EXAMPLE_OP = "scale_add"


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def text(request):
    return request.param.read_text(encoding="utf-8")


@cache
def keys():
    tables = config_schema.all_tables(TABLES)
    return {f"{name}.{key}" for name, table in tables.items() for key in _names(table)} | {*tables}


def _names(table):
    return config_schema.field_types(table)


def unknown_keys(text):
    """Words like ``train.lr`` whose first part is a table; a file's name is none."""
    words = re.findall(rf"(?<![\w/.-])((?:{'|'.join(TABLES)})(?:\.[a-z]\w*)+)", text)
    return [w for w in words if w not in keys() and not re.search(r"\.(md|py|js|yaml|bin)$", w)]


@cache
def options():
    """Command -> its flags, as the parser has them."""
    parser, _ = _parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {
        name: {flag for action in sub._actions for flag in action.option_strings}
        for name, sub in commands.choices.items()
    }


def code_lines(text):
    """Lines of code blocks, fenced or indented, and inline code, each command on one line."""
    text = text.replace("\\\n", " ")
    fenced = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    rest = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    indented = re.findall(r"(?m)^ {4}(\S.*)$", rest)
    inline = re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"(?m)^ {4}.*$", "", rest))
    return [*"\n".join(fenced).splitlines(), *indented, *(" ".join(c.split()) for c in inline)]


def command_faults(text):
    """What is wrong with each ``mcp-parallel ...`` of a page."""
    parser, _ = _parser()
    for line in code_lines(text):
        found = re.match(r"mcp-parallel +([a-z].*?)(?: +#.*| +>.*)?$", line)
        if found is None:
            continue
        words = shlex.split(found[1])
        if words[0] not in options():
            yield f"no command of line {line!r}"
            continue
        flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", found[1]))
        yield from (f"no flag {f} in {line!r}" for f in flags - options()[words[0]])
        if len(words) == 1 or re.search(r"\.\.\.|\[|\b[A-Z]{2,}\b", found[1]):
            continue  # a mention, or a line with places to fill in
        try:
            args = parser.parse_args(words)
            if words[0] in ("train", "check") and not args.config:
                read_arguments(args)
        except (SystemExit, ConfigError) as error:
            yield f"not taken: {line!r}: {error}"


def script_faults(text):
    """What is wrong with each ``python bench/x.py --flag`` and ``python -m module`` of a page."""
    for line in code_lines(text):
        if (found := re.search(r"python (bench/[\w/]+\.py)(.*)", line)) is not None:
            source = (ROOT / found[1]).read_text(encoding="utf-8")
            flags = re.findall(r"--[a-z][\w-]*", found[2].partition("#")[0])
            yield from (f"no flag {f} in {line!r}" for f in flags if f'"{f}"' not in source)
        if (found := re.search(r"python -m (mcp_[\w.]+)", line)) is not None:
            place = ROOT / found[1].replace(".", "/")
            if not place.with_suffix(".py").is_file() and not (place / "__main__.py").is_file():
                yield f"no module of {line!r}"


def dead_links(page, text):
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", text)
    return [link for link in links if "://" not in link and not (page.parent / link).exists()]


def missing_paths(text):
    folders = "mcp_parallel|mcp_kernels|tests|bench|docs|csrc"
    paths = re.findall(rf"(?<![\w/])((?:{folders})/[\w./-]*\w)", text)
    return [path for path in paths if EXAMPLE_OP not in path and not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page):
    text = page.read_text(encoding="utf-8")
    assert not dead_links(page, text)
    assert not missing_paths(text)


def test_keys_and_commands_that_a_page_names_are_there(text):
    assert not unknown_keys(text)
    assert not [*command_faults(text)]
    assert not [*script_faults(text)]


def test_make_targets_that_a_page_names_are_there(text):
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    named = {m[1] for line in code_lines(text) if (m := re.match(r"make ([a-z-]+)", line))}
    assert named <= targets


def test_flags_that_a_page_names_are_in_some_source(text):
    """Flags of torchrun and Slurm too: the jobs that we print have them (`"signal": ...`)."""
    named = set(re.findall(r"`--([a-z][\w-]*)", text))
    assert not {
        flag for flag in named if f"--{flag}" not in _sources() and f'"{flag}"' not in _sources()
    }


@cache
def _sources():
    folders = ("mcp_parallel", "mcp_kernels", "bench", "tests/conftest.py")
    files = [f for folder in folders for f in [ROOT / folder, *(ROOT / folder).rglob("*.py")]]
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


@pytest.mark.parametrize(
    "find, planted",
    [
        (unknown_keys, "set `train.learning` to 3"),
        (unknown_keys, "`amp.grad_scaler.scale`"),
        (missing_paths, "see `mcp_parallel/no_such.py`"),
        (lambda text: dead_links(ROOT / "README.md", text), "[docs](docs/no_such.md)"),
        (command_faults, "```\nmcp-parallel plan --no-such 3\n```"),
        (command_faults, "    mcp-parallel chekc --preset tiny"),
        (command_faults, "`mcp-parallel check --dp two`"),
        (script_faults, "    python bench/planner_cpu.py --no-such 3"),
        (script_faults, "`python -m mcp_parallel.no_such`"),
    ],
)
def test_a_planted_fault_is_found(find, planted):
    assert [*find(planted)]


def test_every_key_has_a_doc_string():
    for name, table in config_schema.all_tables(TABLES).items():
        docs = config_reference.field_docs(table)
        missing = [k for k, kind in _names(table).items() if not kind.is_table and not docs.get(k)]
        assert not missing, f"{name}: {missing}"


def test_the_page_of_all_keys_is_current():
    """``python -m mcp_parallel.config_reference > docs/configuration.md`` makes it so."""
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == config_reference.reference()
    for key in keys() - {*config_schema.all_tables(TABLES)}:
        table, _, name = key.rpartition(".")
        assert f"| `{name}` |" in page.split(f"## `{table}`")[1].split("\n## ")[0], key


def test_the_page_is_made_without_torch():
    code = "import sys, mcp_parallel.config_reference as c; c.reference(); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
