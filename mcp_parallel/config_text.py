"""Text to plain values: a config file or a ``key=value`` becomes dicts and scalars, safely.

The YAML taken here is the part that means the same to everyone: no tags, no anchors or aliases (so
no object construction and no exponential expansion), no duplicate keys, no ``yes``/``on``/``010``
surprises, and ``3e-4`` is a number. No torch.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from mcp_parallel.errors import ConfigError, shown, shown_path

# The largest config we write is 2 KB. PyYAML parses about 100 KB a second, and a config must be
# refused in well under two.
MAX_CONFIG_BYTES = 64 * 1024
# table -> key -> value, and some room for a good message about one level too many.
_MAX_DEPTH = 8

_SCALARS = (
    ("null", re.compile(r"(?:~|null|Null|NULL|)\Z")),
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")),
    ("int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z")),
    (
        "float",
        re.compile(
            r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
            r"|[0-9][0-9_]*[eE][-+]?[0-9]+)\Z|[-+]?\.?(?:inf|Inf|INF)\Z|\.?(?:nan|NaN|NAN)\Z"
        ),
    ),
)


class _RefusedError(Exception):
    """One thing in the text that is not taken, in words."""


class _PlainComposer(yaml.SafeLoader):
    """Builds nodes, refusing what a config has no use for."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        where = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _RefusedError(
                f"{where}: anchors and aliases (& and *) are not taken; write it out"
            )
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise _RefusedError(
                f"{where}: tags are not taken, got {shown(tag)}; write a plain value"
            )
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _RefusedError(
                f"{where}: nested too deeply; a config is tables of keys, two levels"
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def plain_scalar(text: str) -> Any:
    """The null, bool, int, float or string that unquoted ``text`` stands for.

    Raises:
        ValueError: an integer too long for Python to read.
    """
    for kind, pattern in _SCALARS:
        if not pattern.match(text):
            continue
        digits = text.replace("_", "")
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        return (
            int(digits)
            if kind == "int"
            else float(digits.lower().replace(".inf", "inf").replace(".nan", "nan"))
        )
    return text


def _value(node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        if node.style is not None:
            return node.value
        try:
            return plain_scalar(node.value)
        except ValueError:
            raise _RefusedError(
                f"line {node.start_mark.line + 1}: the number is too long"
            ) from None
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        where = f"line {key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise _RefusedError(f"{where}: a key must be a word, got a list or table")
        key = key_node.value
        if key in mapping:
            raise _RefusedError(f"{where}: key {shown(key)} is given twice; keep one")
        mapping[key] = _value(value_node)
    return mapping


def parse_yaml(text: str) -> Any:
    """``text`` as dicts, lists and scalars; None when it is empty.

    Raises:
        ConfigError: not the YAML described at the top of this file.
    """
    try:
        loader = _PlainComposer(text)
        try:
            node = loader.get_single_node()
            return None if node is None else _value(node)
        finally:
            loader.dispose()
    except _RefusedError as refusal:
        raise ConfigError([f"config: YAML {refusal}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"config: file must be YAML, got {_yaml_words(error)}"]) from None


def _yaml_words(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        words = f"{error.problem} at line {error.problem_mark.line + 1}; mend that line"
    else:
        words = " ".join(str(error).split())
    return words.encode("ascii", "backslashreplace").decode()


class _QuotingDumper(yaml.SafeDumper):
    """Quotes a string that ``plain_scalar`` would take for something else, such as 1e5."""


def _string_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        is_plain = plain_scalar(text) == text
    except ValueError:
        is_plain = False
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else "'")


_QuotingDumper.add_representer(str, _string_node)


def dump_yaml(values: dict[str, Any]) -> str:
    """ASCII text that ``parse_yaml``, and any other YAML reader, turns back into ``values``."""
    return yaml.dump(values, Dumper=_QuotingDumper, sort_keys=False)


def parse_toml(text: str) -> Any:
    """``text`` as dicts, lists and scalars.

    Raises:
        ConfigError: not TOML.
    """
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        return toml.loads(text)
    except (ValueError, RecursionError) as error:
        words = ascii(" ".join(str(error).split()))[1:-1]
        raise ConfigError([f"config: file must be TOML, got {words}; mend that line"]) from None


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The top-level mapping of a ``.yaml``, ``.yml`` or ``.toml`` file.

    Raises:
        ConfigError: no such file, too large, not text, not YAML or TOML, or not a mapping.
    """
    name = shown_path(path)
    suffix = Path(path).suffix.lower()
    if suffix not in (".yaml", ".yml", ".toml"):
        raise ConfigError([f"config: file must end in .yaml, .yml or .toml, got {name}; rename it"])
    data = _file_bytes(Path(path), name)
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(
            [f"config: file must be at most {MAX_CONFIG_BYTES} bytes, got more in {name}; trim it"]
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        problem = f"config: file must be UTF-8 text, got {name}; save it as UTF-8"
        raise ConfigError([problem]) from None
    values = parse_toml(text) if suffix == ".toml" else parse_yaml(text)
    if not isinstance(values, dict):
        kind = {type(None): "nothing", list: "a list"}.get(type(values), "a single value")
        problem = (
            f"config: top level of {name} must be a mapping of tables, got {kind}; "
            "write for example 'train: {steps: 200}'"
        )
        raise ConfigError([problem])
    return values


def _file_bytes(path: Path, name: str) -> bytes:
    """At most one byte more than a config may have; a device or a pipe is not opened."""
    try:
        if path.is_file():
            with path.open("rb") as file:
                return file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        problem = f"config: file must be readable, got {error.strerror} for {name}; check its mode"
        raise ConfigError([problem]) from None
    except ValueError:  # a NUL in the path: no such file
        pass
    raise ConfigError([f"config: file must be an existing file, got {name}; check the path"])
