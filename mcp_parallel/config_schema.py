"""Plain values to dataclass fields: types, choices and unknown keys, every problem told.

No torch.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from mcp_parallel.config_text import parse_yaml, plain_scalar
from mcp_parallel.errors import ConfigError, joined, shown

# What other trainers call these; a near spelling would not find them.
_FOREIGN_NAMES = {
    "learning_rate": "train.lr",
    "batch_size": "train.global_batch_size",
    "max_steps": "train.steps",
    "train_iters": "train.steps",
    "gradient_clipping": "train.clip_norm",
    "grad_clip": "train.clip_norm",
    "dtype": "train.precision",
    "mixed_precision": "amp.dtype",
    "loss_scale": "amp.grad_scaler.init_scale",
    "initial_scale_power": "amp.grad_scaler.init_scale",
    "loss_scale_window": "amp.grad_scaler.growth_interval",
    "n_layers": "model.num_layers",
    "n_heads": "model.num_heads",
    "dim": "model.hidden_size",
    "intermediate_size": "model.ffn_size",
    "gradient_checkpointing": "memory.activation_checkpointing",
    "num_stages": "parallel.pp",
    "dataset": "data.path",
}

_FOREIGN_VALUES = {
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "adam": "adamw",
}


class FieldType(NamedTuple):
    """What a key takes."""

    kind: type
    choices: tuple[str, ...]
    optional: bool

    @property
    def is_table(self) -> bool:
        """Whether the key is a table of its own."""
        return is_dataclass(self.kind)


@cache
def field_types(table_class: type) -> dict[str, FieldType]:
    """The type of each key of a table; the key of attribute ``async_`` is ``async``."""
    hints = get_type_hints(table_class)
    return {field.name.rstrip("_"): _field_type(hints[field.name]) for field in fields(table_class)}


def _field_type(hint: Any) -> FieldType:
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
        optional = True
    if get_origin(hint) is Literal:
        return FieldType(str, get_args(hint), optional)
    return FieldType(hint, (), optional)


def all_tables(tables: Mapping[str, type]) -> dict[str, type]:
    """``tables`` and the tables in them, by their names with dots."""
    found: dict[str, type] = {}
    for name, table in tables.items():
        found[name] = table
        inner = {key: kind.kind for key, kind in field_types(table).items() if kind.is_table}
        found |= {f"{name}.{key}": kind for key, kind in all_tables(inner).items()}
    return found


_RULES = {
    bool: "true or false",
    int: "an integer",
    float: "a finite number",
    str: "a string",
}


def _converted(key: str, value: Any, kind: FieldType) -> Any:
    """``value`` as the field's type, or ValueError with the problem in words."""
    if value is None and kind.optional:
        return None
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    if kind.choices:
        if isinstance(value, str) and value in kind.choices:
            return value
        word = value.lower() if isinstance(value, str) else ""
        near = nearest(_FOREIGN_VALUES.get(word, word), kind.choices)
        use = f"; use {near}" if near else f"; use {kind.choices[0]}"
        raise ValueError(f"config: {key} must be {joined(kind.choices)}, got {shown(value)}{use}")
    if kind.kind is float and number is not None:
        try:
            result = float(number)
        except OverflowError:
            result = math.inf
        if math.isfinite(result):
            return result
    elif isinstance(value, kind.kind) and (number is not None or kind.kind is not int):
        return value
    rule = _RULES[kind.kind] + (" or null" if kind.optional else "")
    raise ValueError(f"config: {key} must be {rule}, got {shown(value)}; {_way_out(kind, value)}")


def _way_out(kind: FieldType, value: Any) -> str:
    if kind.kind is bool:
        return "write true or false without quotes"
    if kind.kind is str:
        return "put it in quotes" if not isinstance(value, (dict, list)) else "give one value"
    if kind.kind is int and isinstance(value, float) and math.isfinite(value):
        below = math.floor(value)
        return f"use {below}" if below == value else f"use {below} or {below + 1}"
    return "write a number like 3" if kind.kind is int else "write a number like 0.003"


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The known word closest to ``word``, or None when none is near."""
    matches = difflib.get_close_matches(word, known, n=1)
    return matches[0] if matches else None


def unknown_key(table: str, key: str, tables: Mapping[str, type]) -> str:
    """The problem of a key no table has, naming the nearest one that is known."""
    every_table = all_tables(tables)
    every = [f"{name}.{known}" for name, kind in every_table.items() for known in field_types(kind)]
    full = f"{table}.{key}" if table else key
    same_key = [name for name in every if name.rpartition(".")[2] == key]
    own = list(field_types(every_table[table])) if table in every_table else []
    near_own = nearest(key, own)
    near = (
        _FOREIGN_NAMES.get(key)
        or (same_key[0] if same_key else None)
        or (None if table else nearest(key, list(tables)))
        or (f"{table}.{near_own}" if near_own else None)
        or nearest(full, every)
    )
    keys = (
        f"the keys of {table} are {joined(own, 'and')}"
        if own
        else (f"the tables are {joined(tables, 'and')}")
    )
    return f"config: {shown(full)[1:-1]} must be a known key, got no such key; " + (
        f"did you mean {near}?" if near else keys
    )


def build(
    table: str, table_class: type[Any], values: Mapping[str, Any], tables: Mapping[str, type]
) -> tuple[Any, list[str]]:
    """One table from plain values.

    Args:
        table: its name in messages.
        table_class: the dataclass to build; keys that ``values`` lacks keep their defaults.
        values: keys as written by the user.
        tables: all tables by name, to find the nearest known key.

    Returns:
        The table and no problems, or None and every problem.
    """
    known = field_types(table_class)
    attributes = {field.name.rstrip("_"): field.name for field in fields(table_class)}
    converted: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in values.items():
        if key not in known:
            problems.append(unknown_key(table, str(key), tables))
            continue
        if known[key].is_table:
            inner, found = _build_inner(f"{table}.{key}", value, known[key], tables)
            converted[attributes[key]] = inner
            problems += found
            continue
        try:
            converted[attributes[key]] = _converted(f"{table}.{key}", value, known[key])
        except ValueError as problem:
            problems.append(str(problem))
    return (None if problems else table_class(**converted)), problems


def _build_inner(
    table: str, values: Any, kind: FieldType, tables: Mapping[str, type]
) -> tuple[Any, list[str]]:
    """``build`` of a table in a table; null is one whose keys are all commented out."""
    if values is None or isinstance(values, Mapping):
        return build(table, kind.kind, values or {}, tables)
    return None, [not_a_table(table, kind.kind, values)]


def not_a_table(table: str, table_class: type, value: Any) -> str:
    """The problem of a single value where a table is wanted."""
    example = next(iter(field_types(table_class)))
    return (
        f"config: {table} must be a table, got {shown(value)}; "
        f"write for example '{table.rpartition('.')[2]}: {{{example}: value}}'"
    )


def parse_overrides(
    overrides: Sequence[str], tables: Mapping[str, type]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """``["train.lr=3e-4"]`` as ``{"train": {"lr": 0.0003}}``, with every problem found.

    A value is read as a plain YAML scalar, or kept as it stands where the key takes a string
    (``data.path=123`` is a path). A later override of the same key wins.
    """
    values: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    known = all_tables(tables)
    for override in overrides:
        name, equals, text = override.partition("=")
        table, _, key = name.strip().rpartition(".")
        if not table or name.strip() in known:
            table, key = name.strip().lstrip("."), ""
        if not equals:
            problems.append(
                f"config: override must be table.key=value, got {shown(override)}; "
                "write for example train.lr=3e-4"
            )
        elif (table, key, text.strip()) == ("parallel", "", "auto"):
            values.setdefault("parallel", {})["auto"] = True
        elif table in known and not key:
            problems.append(
                f"config: override must name a key of {table}, got {shown(override)}; write for "
                f"example {table}.{next(iter(field_types(known[table])))}=value"
            )
        elif table not in known or key not in field_types(known[table]):
            problems.append(unknown_key(table if key else "", key or table, tables))
        else:
            try:
                value = _override_value(text.strip(), field_types(known[table])[key])
            except ConfigError as error:
                advice = "write one plain value, as in train.lr=3e-4"
                problems += [f"{p} in {shown(override)}; {advice}" for p in error.problems]
                continue
            target = values
            for part in table.split("."):
                target = target.setdefault(part, {})
            target[key] = value
    return values, problems


def merged(old: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``old`` with ``changes`` on top, tables key by key."""
    result = dict(old)
    for key, value in changes.items():
        inner = old.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            value = merged(inner, value)
        result[key] = value
    return result


def _override_value(text: str, kind: FieldType) -> Any:
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
    if quoted:
        return parse_yaml(text)
    if kind.kind is str:
        return None if kind.optional and text in ("", "~", "null") else text
    try:
        return plain_scalar(text)
    except ValueError:
        raise ConfigError(["config: the number is too long"]) from None


def plain(table: Any) -> dict[str, Any]:
    """A table as plain values, the tables in it too."""
    return {
        key: plain(value) if is_dataclass(value) else value for key, value in table_items(table)
    }


def table_items(table: Any) -> Iterator[tuple[str, Any]]:
    """``(key, value)`` of each field, in order, with keys as a file spells them."""
    for field in fields(table):
        yield field.name.rstrip("_"), getattr(table, field.name)
