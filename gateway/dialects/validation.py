"""Strict decoding for every dialect, with errors that name the field, the limit and the value.

It knows no dialect's fields: each dialect passes its own types. `gateway.http.json_api` and the
admin API decode with it too.
"""

from __future__ import annotations

import difflib
import json
import math
import operator
import re
import sys
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from decimal import Decimal
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from gateway.errors import Kind, Refusal

T = TypeVar("T")

FIELDS_SHOWN = 8
"""Most known fields that the refusal of an unknown one lists."""
SHORT_CHARS = 16
"""A decimal of so many characters, without an exponent, is what a double says it is."""


def exact_number(text: str) -> float | Decimal:
    """Return a JSON number with a point or an exponent: a Decimal if a double loses its digits.

    O(characters). Raises ValueError beyond the range of a double.
    """
    number = float(text)
    if len(text) <= SHORT_CHARS and "e" not in text and "E" not in text:
        return number
    if not math.isfinite(number):
        raise ValueError("number out of range")
    exact = Decimal(text)
    return number if exact == Decimal(repr(number)) else exact


decode_json = msgspec.json.Decoder(float_hook=exact_number).decode
"""Decode untyped JSON to the last digit."""

encode_json = msgspec.json.Encoder(decimal_format="number").encode
"""Encode what `decode_json` returned, to the last digit."""


def find_duplicate_key(body: bytes) -> str | None:
    """Return a key that occurs twice in one object of a JSON text; None if no key does.

    It parses the text a second time, so use it for texts written by hand. Cost: O(bytes).
    Raises RecursionError for deep nesting, and ValueError for invalid JSON.
    """
    duplicates: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                duplicates.append(name)
            seen.add(name)

    json.loads(body, object_pairs_hook=collect)
    return duplicates[0] if duplicates else None


def decode_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request body. O(bytes). Raises Refusal."""
    try:
        tree = decode_json(body)
    except UnicodeDecodeError:
        message = "The body is not UTF-8; expected JSON in UTF-8."
        raise Refusal(Kind.BAD, "invalid_json", message) from None
    except msgspec.DecodeError as error:
        if "out of range" in str(error) and (found := _number_out_of_range(body)) is not None:
            raise invalid_field(*found) from None
        problem = "the body is empty" if not body.strip() else str(error)
        if body.startswith(BOM_UTF8):
            problem = "it begins with a byte order mark"
        elif _has_half_character(body):
            problem = (
                "a text has one half of a UTF-16 surrogate pair, as a cut emoji has;"
                " expected whole characters"
            )
        message = f"The body is not valid JSON: {problem}."
        raise Refusal(Kind.BAD, "invalid_json", message) from None
    except RecursionError:
        raise Refusal(Kind.BAD, "invalid_json", "The body is nested too deeply.") from None
    if not isinstance(tree, dict):
        message = f"The body is a JSON {json_type(tree)}; expected a JSON object."
        raise Refusal(Kind.BAD, "invalid_json", message)
    return tree


def _has_half_character(body: bytes) -> bool:
    """Return whether a text of a JSON text has a surrogate without its other half. O(bytes)."""
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


class _OutOfRange(str):
    """A number's text, in the place of a number that is out of range."""


def _number_out_of_range(body: bytes) -> tuple[str, str] | None:
    """Return the path of the first number that `decode_json` does not take, and the problem."""

    def read(text: str) -> float | _OutOfRange:
        is_long = text.lstrip("-").isdigit() and len(text) > sys.get_int_max_str_digits()
        is_huge = not text.lstrip("-").isdigit() and math.isinf(float(text))
        return _OutOfRange(text) if is_long or is_huge else 0.0

    try:
        waiting = [("", json.loads(body, parse_float=read, parse_int=read))]
    except (ValueError, RecursionError):
        return None
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, _OutOfRange):
            digits = sys.get_int_max_str_digits()
            most = f"{digits} digits" if value.lstrip("-").isdigit() else "1.8e308"
            shown = value if len(value) <= 40 else f"{value[:20]}… ({len(value)} characters)"
            return path, f"{shown} is out of range; expected at most {most}."
        if isinstance(value, dict):
            below = [(f"{path}.{name}".lstrip("."), one) for name, one in value.items()]
        else:
            items = value if isinstance(value, list) else ()
            below = [(f"{path}[{at}]", one) for at, one in enumerate(items)]
        waiting += reversed(below)
    return None


def invalid_field(path: str, problem: str, code: str = "invalid_value") -> Refusal:
    """Return a refusal of the field at `path`; its message is the path and the problem."""
    return Refusal(Kind.BAD, code, f"{path}: {problem}", param=path[:300])


def convert(value: Any, kind: type[T], above: str) -> T:
    """Convert `value` to `kind`; a null counts as omitted where `kind` has a default.

    Raises Refusal that names the path below `above`.
    """
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        if "got `null`" in str(error):
            declared: Any = kind
            kept = _without_nulls(value, _type_info(declared))
            if kept is not value:
                return convert(kept, kind, above)
        message, _, steps = (
            str(error).replace(" - at `key` in `$", " - at `$").partition(" - at `$")
        )
        steps = steps.rstrip("`")
        path = steps.replace("[...]", "")
        param = above + path.lstrip("." if not above else "")
        if message.startswith("Object "):  # it lacks a field, or has an unknown one
            field = message.rpartition("`")[0].partition("`")[2]
            param = f"{param}.{field[:64]}".lstrip(".")
            if "unknown field" in message:
                known = _known_fields(kind, steps, _value_at(value, path))
                message = f"unknown field `{field[:64]}`{_meant(field, known)}"
        message = message.replace(r"\\Z'", "$'").replace("`NoneType`", "`null`")
        code = "missing_required_parameter" if "missing required" in message else "invalid_value"
        prefix = f"{param}: " if param else ""
        detail = _received(_value_at(value, path), message)
        if message.startswith("Invalid "):
            detail = _expected_values(kind, steps)
        elif message.startswith(("Expected `null`, ", "Expected `array` of length <= 0")):
            code, detail = "unsupported_parameter", ""
            message = "this field is not supported; omit it"
        text = f"{prefix}{message[:300]}{detail}."
        raise Refusal(Kind.BAD, code, text, param=param[:300] or None) from None
    except (RecursionError, OverflowError):
        message = "A number is out of range, or a value is nested too deeply."
        raise Refusal(Kind.BAD, "invalid_value", message) from None


def _without_nulls(value: Any, found: inspect.Type) -> Any:
    """Return `value` without the nulls of optional fields; the same object if it has none.
    O(values)."""
    if isinstance(value, list):
        items = next(
            (one for one in alternatives(found) if isinstance(one, inspect.ListType)), None
        )
        if items is None:
            return value
        kept = [_without_nulls(one, items.item_type) for one in value]
        return value if all(map(operator.is_, kept, value)) else kept
    if not isinstance(value, dict):
        return value
    for struct in alternatives(found):
        if not isinstance(struct, inspect.StructType):
            continue
        if struct.tag_field is not None and value.get(struct.tag_field) != struct.tag:
            continue
        fields = {field.encode_name: field for field in struct.fields}
        put = {
            name: _without_nulls(one, fields[name].type) if name in fields else one
            for name, one in value.items()
            if one is not None or name not in fields or fields[name].required
        }
        is_same = len(put) == len(value) and all(map(operator.is_, put.values(), value.values()))
        return value if is_same else put
    return value


_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_LENGTH = re.compile(r"`(?P<type>\w+)` of length (?P<sign>[<>]=) (?P<length>\d+)")


def _value_at(value: Any, path: str) -> Any:
    """Return the value at a path; null where there is none."""
    for key, index in _STEP.findall(path):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and index and int(index) < len(value):
            value = value[int(index)]
        else:
            return None
    return value


def _received(value: Any, message: str) -> str:
    """Describe the number or the length that passed a limit; never quote a text."""
    if (bound := _LENGTH.search(message)) is not None and isinstance(value, str | list | dict):
        lengths = [len(value)]
        if isinstance(value, dict) and bound["type"] != "object":  # of a name or a value in it
            inner = (*value, *value.values())
            lengths = [len(one) for one in inner if isinstance(one, str | list | dict)]
        most = int(bound["length"])
        passed = (n for n in lengths if (n > most if bound["sign"] == "<=" else n < most))
        found = next(passed, None)
        return "" if found is None else f"; received length {found}"
    if (">" in message or "<" in message) and isinstance(value, int | float):
        return f"; received {str(value)[:32]}"
    return ""


def _types_at(kind: Any, steps: str) -> list[inspect.Type]:
    """Return the types that `kind` allows at the path `steps`."""
    types = [_type_info(kind)]
    for name, _ in _STEP.findall(steps):
        types = [
            inner
            for outer in types
            for alternative in alternatives(outer)
            for inner in _inner_types(alternative, name)
        ]
    return [alternative for found in types for alternative in alternatives(found)]


def _expected_values(kind: Any, steps: str) -> str:
    """List the literal values that `kind` allows at the path `steps`."""
    values = [
        json_text(value)
        for found in _types_at(kind, steps)
        if isinstance(found, inspect.LiteralType)
        for value in found.values
    ]
    return f"; expected {_any_of(dict.fromkeys(values))}" if values else ""


def _known_fields(kind: Any, steps: str, value: Any) -> list[str]:
    """Return the fields that an object `value` at the path `steps` may have: of the types with its
    tag, where there are tags."""
    tags = value if isinstance(value, dict) else {}
    structs = [
        one
        for one in _types_at(kind, steps)
        if isinstance(one, inspect.StructType)
        and (one.tag_field is None or tags.get(one.tag_field) == one.tag)
    ]
    return list(dict.fromkeys(field.encode_name for one in structs for field in one.fields))


def _meant(field: str, known: list[str]) -> str:
    """Return the field that an unknown one may be meant for, or all that there are if few."""
    close = difflib.get_close_matches(field[:64], known, n=1)
    if close:
        return f"; did you mean `{close[0]}`?"
    return f"; expected {_any_of(known)}" if 0 < len(known) <= FIELDS_SHOWN else "; omit it"


def _any_of(values: Iterable[str]) -> str:
    *others, last = values
    return f"{', '.join(others)} or {last}" if others else last


_type_info = cache(inspect.type_info)


def alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Yield the alternatives of a union, without their constraints: the type itself if none."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        for alternative in kind.types:
            yield from alternatives(alternative)
    else:
        yield kind


def _inner_types(kind: inspect.Type, name: str) -> Iterator[inspect.Type]:
    """Yield the types of the field `name` or, if it is "", of the items of a list or a dict."""
    if isinstance(kind, inspect.StructType) and name:
        yield from (field.type for field in kind.fields if field.encode_name == name)
        if name == kind.tag_field and kind.tag is not None:
            yield inspect.LiteralType((kind.tag,))
    elif isinstance(kind, inspect.DictType) and not name:
        yield kind.value_type
    elif isinstance(kind, inspect.ListType | inspect.CollectionType) and not name:
        yield kind.item_type


def unknown_field(name: str, known: set[str], path: str = "") -> Refusal:
    """Return the refusal of an unknown field, with the closest known name as a hint.

    `path`: the field's place if it is not at the top of the body.
    """
    shown = name[:64]
    close = difflib.get_close_matches(shown, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    message = f"Unknown parameter: {shown!r}.{hint}"
    return Refusal(Kind.BAD, "unknown_parameter", message, param=path or shown)


def parse_int(text: str, field: str, least: int, most: int = 999_999_999) -> int:
    """Return the whole number of a query's field. Raises Refusal for any other text."""
    is_number = text.isascii() and text.isdigit() and len(text) <= 9
    if not is_number or not least <= int(text) <= most:
        problem = f"invalid value {text[:32]!r}; expected an integer from {least} to {most}."
        raise invalid_field(field, problem)
    return int(text)


def json_text(value: object) -> str:
    """Return compact JSON text that keeps the key order."""
    return encode_json(value).decode()


def shown(value: object) -> str:
    """Return a client's value for a message, at most 64 characters of it: a text in quotes, others
    as JSON."""
    return repr(value[:64]) if isinstance(value, str) else json.dumps(value, default=str)[:64]


def json_type(value: object) -> str:
    """Return the JSON type of a decoded value: "null", "boolean", "number" …"""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float() | Decimal():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
