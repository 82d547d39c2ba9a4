"""Strict decoding for every dialect: errors that name the field, the limit and what came.

It knows no dialect's fields; each brings its own types.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from gateway.errors import Kind, Refusal

T = TypeVar("T")


def find_duplicate_key(body: bytes) -> str | None:
    """A key that stands twice in one object of a JSON text; None if there is none. For texts that
    somebody writes by hand and that are worth a second reading. O(bytes). Raises RecursionError,
    and ValueError for what is no JSON."""
    twice: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                twice.append(name)
            seen.add(name)

    json.loads(body, object_pairs_hook=look)
    return twice[0] if twice else None


def convert(value: Any, kind: type[T], above: str) -> T:
    """`msgspec.convert` whose error is a Refusal naming the path below `above`."""
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        message, _, steps = str(error).partition(" - at `$")
        steps = steps.rstrip("`")
        path = steps.replace("[...]", "")
        param = above + path.lstrip("." if not above else "")
        if not path and "missing required field" in message:
            field = message.rpartition("`")[0].rpartition("`")[2]
            param = f"{above}.{field}" if above else field
        code = "missing_required_parameter" if "missing required" in message else "invalid_value"
        where = f"{param}: " if param else ""
        more = _what_came(value, path, message)
        if message.startswith("Invalid "):
            more = _what_can_be(kind, steps)
        elif message.startswith("Expected `null`, "):
            code, message = "unsupported_parameter", "It is not supported here; leave it out"
        text = f"{where}{message[:300]}{more}."
        raise Refusal(Kind.BAD, code, text, param=param[:300] or None) from None
    except (RecursionError, OverflowError):
        raise Refusal(Kind.BAD, "invalid_value", "A value is out of range.") from None


_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")


def _what_came(value: Any, path: str, message: str) -> str:
    """The number that passed a limit, or the length that did: never a text."""
    for key, index in _STEP.findall(path):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and index and int(index) < len(value):
            value = value[int(index)]
        else:
            return ""
    if "of length" in message and isinstance(value, str | list | dict):
        return f" (it has {len(value)})"
    if (">" in message or "<" in message) and isinstance(value, int | float):
        return f" (it is {str(value)[:32]})"
    return ""


def _what_can_be(kind: Any, steps: str) -> str:
    """The values that may stand where another came."""
    found = [_info(kind)]
    for name, _ in _STEP.findall(steps):
        found = [below for one in found for each in _each(one) for below in _below(each, name)]
    values = [
        msgspec.json.encode(value).decode()
        for one in found
        for each in _each(one)
        if isinstance(each, inspect.LiteralType)
        for value in each.values
    ]
    return f"; it can be {', '.join(dict.fromkeys(values))}" if values else ""


_info = cache(inspect.type_info)


def _each(one: inspect.Type) -> Iterator[inspect.Type]:
    """The alternatives of a union; what limits a type set aside."""
    while isinstance(one, inspect.Metadata):
        one = one.type
    if isinstance(one, inspect.UnionType):
        for alternative in one.types:
            yield from _each(alternative)
    else:
        yield one


def _below(one: inspect.Type, name: str) -> Iterator[inspect.Type]:
    """What stands in a field of this name, or, without one, in any place of a list or a table."""
    if isinstance(one, inspect.StructType) and name:
        yield from (field.type for field in one.fields if field.encode_name == name)
        if name == one.tag_field and one.tag is not None:
            yield inspect.LiteralType((one.tag,))
    elif isinstance(one, inspect.DictType) and not name:
        yield one.value_type
    elif isinstance(one, inspect.ListType | inspect.CollectionType) and not name:
        yield one.item_type


def unknown_field(name: str, known: set[str]) -> Refusal:
    """For a field that does not exist, with the one that may have been meant."""
    shown = name[:64]
    close = difflib.get_close_matches(shown, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return Refusal(
        Kind.BAD, "unknown_parameter", f"Unknown parameter: {shown!r}.{hint}", param=shown
    )
