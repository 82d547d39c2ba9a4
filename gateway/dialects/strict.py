"""Strict decoding for every dialect: errors that name the field, the limit and what came.

It knows no dialect's fields; each brings its own types.
"""

from __future__ import annotations

import difflib
import json
import re
from typing import Any, TypeVar

import msgspec

from gateway.errors import Kind, Refusal

T = TypeVar("T")


def field_given_twice(body: bytes) -> str | None:
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
        message, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`").replace("[...]", "")
        param = above + path.lstrip("." if not above else "")
        if not path and "missing required field" in message:
            field = message.rpartition("`")[0].rpartition("`")[2]
            param = f"{above}.{field}" if above else field
        code = "missing_required_parameter" if "missing required" in message else "invalid_value"
        where = f"{param}: " if param else ""
        text = f"{where}{message[:300]}{_what_came(value, path, message)}."
        raise Refusal(Kind.BAD, code, text, param=param[:300] or None) from None
    except (RecursionError, OverflowError):
        raise Refusal(Kind.BAD, "invalid_value", "A value is out of range.") from None


_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


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


def unknown_field(name: str, known: set[str]) -> Refusal:
    """For a field that does not exist, with the one that may have been meant."""
    shown = name[:64]
    close = difflib.get_close_matches(shown, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return Refusal(
        Kind.BAD, "unknown_parameter", f"Unknown parameter: {shown!r}.{hint}", param=shown
    )
