"""Parse JSON that clients send as text: tool schemas, call arguments, output schemas.

Size and depth are bounded; members keep their order. The module knows no tools and no templates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NoReturn

from gateway.dialects.validation import exact_number
from gateway.errors import Kind, Refusal

SCHEMA_BYTES_MAX = 256 * 1024
SCHEMA_VALUES_MAX = 50_000
"""Maximum number of values in a schema, as `count_values` counts them."""
ARGUMENTS_VALUES_MAX = 50_000
"""Arguments with more values than this are passed on as text."""
DEPTH_MAX = 64

WINDOW_BYTES = 65_536
"""Bytes that are searched before another thread may run."""

_OPENING, _CLOSING = b"{[", b"}]"
_NOT_BRACKETS = bytes(set(range(256)) - set(_OPENING + _CLOSING))


def parse_schema(text: str, path: str, *, exact: bool = False) -> dict[str, Any]:
    """Parse a JSON Schema, members in their order. Raises Refusal naming `path`. O(text).

    `exact`: decimals that a double does not hold are Decimals.
    """
    data = text.encode(errors="surrogatepass")
    if len(data) > SCHEMA_BYTES_MAX:
        message = f"schema too large: {len(data)} bytes; expected at most {SCHEMA_BYTES_MAX}"
        raise _refusal(path, message)
    values = count_values(data, SCHEMA_VALUES_MAX)
    if values > SCHEMA_VALUES_MAX and nesting_depth(text) <= DEPTH_MAX:
        message = f"schema too large: {values} values; expected at most {SCHEMA_VALUES_MAX}"
        raise _refusal(path, message)
    deep = nesting_depth(text)
    if deep > DEPTH_MAX:
        raise _refusal(path, f"schema too deep: {deep} levels; expected at most {DEPTH_MAX}")
    value = parse_json(text, exact=exact)
    if not isinstance(value, dict):
        raise _refusal(path, "invalid schema: expected a JSON object")
    return value


def parse_arguments(text: str) -> tuple[object, str]:
    """Return a call's arguments as a template takes them, and as JSON.

    The value is an object, or the text itself if it is not an object: models write broken JSON, and
    their clients send it back. O(text).
    """
    if not text.strip():
        return {}, "{}"
    data = text.encode(errors="surrogatepass")
    is_small = count_values(data, ARGUMENTS_VALUES_MAX) <= ARGUMENTS_VALUES_MAX
    value = parse_json(text) if is_small and nesting_depth(text) <= DEPTH_MAX else None
    if not isinstance(value, dict):
        value = text
    return value, json.dumps(value, ensure_ascii=False)


def parse_json(text: str, *, exact: bool = False) -> Any:
    """Return the JSON value; None if invalid, NaN or infinite. The caller checks the depth.

    `exact`: decimals that a double does not hold are Decimals.
    """
    try:
        number = exact_number if exact else _finite
        return json.loads(text, parse_constant=_refuse, parse_float=number)
    except (ValueError, RecursionError):
        return None


def nesting_depth(text: str) -> int:
    """Return how deep braces and brackets are nested outside strings. O(text)."""
    deep = deepest = 0
    for piece in _outside_strings(_without_escapes(text.encode(errors="surrogatepass"))):
        for char in piece.translate(None, _NOT_BRACKETS):
            if char in _OPENING:
                deep += 1
                deepest = max(deepest, deep)
            else:
                deep -= 1
    return deepest


def count_values(data: bytes, enough: int) -> int:
    """Return an upper bound of the number of values in a JSON text, before it is decoded.

    Each brace, bracket and comma outside strings begins at most one value. Characters in strings
    are left out only if the count with them exceeds `enough`. O(bytes), about 1 ns each, 5 ns where
    strings are left out; no object per value is made.
    """
    count = 1 + sum(map(_count_beginnings, _windows(data)))
    if count <= enough:
        return count
    return 1 + sum(map(_count_beginnings, _outside_strings(_without_escapes(data))))


def _windows(data: bytes) -> Iterator[bytes]:
    """Cut a text, so that other threads run in between."""
    return (data[at : at + WINDOW_BYTES] for at in range(0, len(data), WINDOW_BYTES))


def _count_beginnings(data: bytes) -> int:
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def _without_escapes(data: bytes) -> bytes:
    """Remove escaped backslashes and quotes, so that every quote left bounds a string."""
    return data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data


def _outside_strings(data: bytes) -> Iterator[bytes]:
    """Yield the text outside strings. `data`: a text without escapes."""
    is_inside = 0
    for window in _windows(data):
        pieces = window.split(b'"')
        yield b"".join(pieces[is_inside::2])
        is_inside ^= (len(pieces) - 1) & 1


def collect_strings(value: Any) -> list[str]:
    """Return every string and member name in a JSON value, in order."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for name, item in value.items() for text in (name, *collect_strings(item))]
    if isinstance(value, list):
        return [text for item in value for text in collect_strings(item)]
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
