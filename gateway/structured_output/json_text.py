"""JSON that clients send as text: tool schemas, call arguments, output schemas. Bounded, in order.

It knows no tools and no templates; who renders or constrains calls it.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from gateway.errors import Kind, Refusal

SCHEMA_BYTES_MAX = 256 * 1024
DEPTH_MAX = 64

_NOT_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|[^{}\[\]"]+', re.DOTALL)


def schema_of(text: str, path: str) -> dict[str, Any]:
    """A JSON Schema, members in the order they came. Raises Refusal naming `path`. O(text)."""
    if len(text.encode(errors="surrogatepass")) > SCHEMA_BYTES_MAX:
        size = len(text.encode(errors="surrogatepass"))
        message = f"the schema has {size} bytes; at most {SCHEMA_BYTES_MAX} are taken"
        raise _refusal(path, message)
    deep = depth(text)
    if deep > DEPTH_MAX:
        raise _refusal(path, f"the schema is {deep} levels deep; at most {DEPTH_MAX} are taken")
    value = parsed(text)
    if not isinstance(value, dict):
        raise _refusal(path, "the schema is no JSON object")
    return value


def arguments_of(text: str) -> tuple[object, str]:
    """A call's arguments as a template takes them, and as their JSON.

    An object, or the text itself where it is none: models write broken ones, and their clients
    send them back. O(text).
    """
    if not text.strip():
        return {}, "{}"
    value = parsed(text) if depth(text) <= DEPTH_MAX else None
    if not isinstance(value, dict):
        value = text
    return value, json.dumps(value, ensure_ascii=False)


def parsed(text: str) -> Any:
    """The JSON value; None if it is none, or has numbers that are none. Depth is the caller's."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def depth(text: str) -> int:
    """How deep braces and brackets are nested, strings left out. O(text)."""
    deep = deepest = 0
    for sign in _NOT_STRUCTURE.sub("", text):
        if sign in "{[":
            deep += 1
            deepest = max(deepest, deep)
        elif sign in "}]":
            deep -= 1
    return deepest


def strings(value: Any) -> list[str]:
    """Every string and name in a JSON value, in order."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for name, item in value.items() for text in (name, *strings(item))]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return []


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _refusal(path: str, message: str) -> Refusal:
    return Refusal(Kind.BAD, "invalid_value", f"{path}: {message}.", param=path)
