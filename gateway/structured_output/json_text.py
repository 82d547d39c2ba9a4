"""Parse JSON that clients send as text: tool schemas, call arguments, output schemas.

Size and depth are bounded; members keep their order. The module knows no tools and no templates;
`gateway.prompt` and the grammar modules call it.
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


def parse_schema(text: str, path: str) -> dict[str, Any]:
    """Parse a JSON Schema, members in their order. Raises Refusal naming `path`. O(text)."""
    if len(text.encode(errors="surrogatepass")) > SCHEMA_BYTES_MAX:
        size = len(text.encode(errors="surrogatepass"))
        message = f"schema too large: {size} bytes; expected at most {SCHEMA_BYTES_MAX}"
        raise _refusal(path, message)
    deep = nesting_depth(text)
    if deep > DEPTH_MAX:
        raise _refusal(path, f"schema too deep: {deep} levels; expected at most {DEPTH_MAX}")
    value = parse_json(text)
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
    value = parse_json(text) if nesting_depth(text) <= DEPTH_MAX else None
    if not isinstance(value, dict):
        value = text
    return value, json.dumps(value, ensure_ascii=False)


def parse_json(text: str) -> Any:
    """Return the JSON value; None if invalid, NaN or infinite. The caller checks the depth."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def nesting_depth(text: str) -> int:
    """Return how deep braces and brackets are nested outside strings. O(text)."""
    deep = deepest = 0
    for char in _NOT_STRUCTURE.sub("", text):
        if char in "{[":
            deep += 1
            deepest = max(deepest, deep)
        elif char in "}]":
            deep -= 1
    return deepest


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
