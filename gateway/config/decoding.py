"""How tables become values: by strict types, with errors that name the key and what is expected."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Struct


class ConfigError(Exception):
    """A setting has a wrong value; the message names the setting, its value and what is
    expected."""


def check_names(tree: dict[str, Any], kind: Any, where: str, above: str) -> None:
    """Raise ConfigError for an unknown key, and suggest the key that was probably meant."""
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    for name, value in tree.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = (
                f"did you mean {above}{close[0]}?"
                if close
                else f"expected one of {', '.join(known)}"
            )
            raise ConfigError(f"{where}: unknown setting {above}{name}; {hint}")
        inner = known[name].type
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, Struct):
            check_names(value, inner, where, f"{above}{name}.")


def check_tables(tables: object, kind: Any, where: str, path: str) -> None:
    """Check each table of a list; an error names its index."""
    for number, table in enumerate(tables if isinstance(tables, list) else ()):
        at = f"{path}[{number}]"
        if isinstance(table, dict):
            check_names(table, kind, where, f"{at}.")
        try:
            msgspec.convert(table, kind)
        except msgspec.ValidationError as error:
            message, _, inner = str(error).partition(" - at `$")
            inner = inner.rstrip("`")
            raise ConfigError(f"{where}: {at}{inner}: {explained(message, kind, inner)}") from error


def explained(message: str, kind: Any, path: str) -> str:
    """Return a decoder's message, with the allowed values of a setting that is one of a few, or a
    number or one of a few. `path`: the setting's place in a value of `kind`."""
    for name in re.findall(r"[^.\[\]]+", path):
        if name.isdigit():  # an element of a list
            kind = next(iter(get_args(kind)), None)
            continue
        fields = msgspec.structs.fields(kind) if isinstance(kind, type) else ()
        kind = {field.name: field.type for field in fields}.get(name)
    if get_origin(kind) is Literal:
        return f"Expected one of {', '.join(map(repr, get_args(kind)))}"
    words = [
        one for part in get_args(kind) if get_origin(part) is Literal for one in get_args(part)
    ]
    if words and message.startswith(("Invalid enum value", "Expected `int | str`")):
        return f"Expected a whole number, or {' or '.join(map(repr, words))}"
    return message


def overlaid(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `below` with those of `above` in their place, table by table."""
    found = dict(below)
    for name, value in above.items():
        inner = found.get(name)
        is_table = isinstance(inner, dict) and isinstance(value, Mapping)
        found[name] = overlaid(inner, value) if is_table and inner is not None else value
    return found


def key_paths(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found.update(key_paths(value, f"{above}{name}."))
        else:
            found[f"{above}{name}"] = value
    return found


def set_path(tree: dict[str, Any], path: str, value: object) -> None:
    *sections, name = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = value


def get_path(tree: Mapping[str, Any], path: str) -> object:
    value: Any = tree
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
