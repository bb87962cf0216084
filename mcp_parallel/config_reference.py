"""Every config key as Markdown, from the tables' own fields: ``docs/configuration.md``. No torch.

``python -m mcp_parallel.config_reference > docs/configuration.md`` makes the page anew.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from mcp_parallel import config_schema
from mcp_parallel.config import TABLES

_TOP = """\
# Configuration

Every key of a run. A file holds them as YAML or TOML, a table each (`train: {lr: 3e-4}`); on the
command line any key is `--set train.lr=3e-4`. Unknown keys and values of the wrong type are errors
that name what was meant; `mcp-parallel check` tells whether the values can run together.

Made by `python -m mcp_parallel.config_reference` from `mcp_parallel/config.py`.
"""
_TYPES = {bool: "true or false", int: "integer", float: "number", str: "text"}


def reference() -> str:
    """The whole page: a section for each table, a row for each key."""
    sections = [
        "\n".join(_section(name, table)) for name, table in config_schema.all_tables(TABLES).items()
    ]
    return "\n".join([_TOP, *sections])


def field_docs(table: type) -> dict[str, str]:
    """The string under each field of a table, by key; a field without one is absent."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(table))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for node, after in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            docs[node.target.id.rstrip("_")] = " ".join(str(after.value.value).split())
    return docs


def _section(name: str, table: type) -> Iterator[str]:
    kinds, docs = config_schema.field_types(table), field_docs(table)
    yield f"## `{name}`\n"
    summary = (inspect.getdoc(table) or "").split("\n\n")[0]
    yield f"{_markdown(summary)}\n"
    yield "| key | takes | default | |"
    yield "| --- | --- | --- | --- |"
    for field in fields(table):
        key = field.name.rstrip("_")
        if not kinds[key].is_table:
            default = "" if field.default is MISSING else f"`{_plain(field.default)}`"
            yield f"| `{key}` | {_takes(kinds[key])} | {default} | {_markdown(docs[key])} |"
    yield ""


def _takes(kind: config_schema.FieldType) -> str:
    words = ", ".join(f"`{choice}`" for choice in kind.choices) or _TYPES[kind.kind]
    return words + (" or null" if kind.optional else "")


def _plain(value: Any) -> str:
    """A default as a file spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _markdown(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
