"""The page: its own files and a document, as one HTML text that asks for nothing else. No torch.

Texts of a run cannot become code: they are JSON in a block that the browser does not run, in which
no ``<`` is left, the script writes them as text only, and the page's policy runs no script but the
one whose hash it names.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

STYLES = ("base.css", "parts.css", "pictures.css")
SCRIPTS = (
    "tools.js",
    "scale.js",
    "state.js",
    "data.js",
    "chart.js",
    "readout.js",
    "lists.js",
    "ranks.js",
    "pipeline.js",
    "tables.js",
    "main.js",
)
"""In this order: a file uses only what is above it."""


def as_html(document: Mapping[str, Any]) -> str:
    """The page of ``document`` (see ``build_document``): ASCII, self-contained."""
    style = "\n".join(_read(name) for name in STYLES)
    body = "\n".join(_read(name) for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{body}\n}})();'
    names = ", ".join(run["name"] for run in document["runs"])
    parts = {
        "title": html.escape(names if len(names) <= 80 else f"{len(document['runs'])} runs"),
        "policy": (
            f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        ),
        "style": style,
        "script": script,
        "data": as_script_data(document),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("page.html"))
    return page.encode("ascii", "xmlcharrefreplace").decode()


def as_script_data(value: Any) -> str:
    """JSON that can stand inside of a ``script`` element, whatever its strings hold.

    Raises:
        ValueError: a number in it is not finite.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _read(name: str) -> str:
    return (files("mcp_parallel.report") / "page" / name).read_text(encoding="ascii").strip()


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
