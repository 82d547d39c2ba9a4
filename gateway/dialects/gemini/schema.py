"""Gemini's schemas as JSON Schema: a subset of OpenAPI with types in capitals, `nullable`, sizes of
numbers, and counts that may be texts, in either spelling.

It knows no request; `gemini` and `gemini_prompt` hand it what a caller declared.
"""

from __future__ import annotations

from typing import Any, Final

from gateway.errors import Kind, Refusal

DEPTH_MAX: Final = 64

_SPELLINGS: Final[dict[str, str]] = {
    "any_of": "anyOf",
    "additional_properties": "additionalProperties",
    "prefix_items": "prefixItems",
    "ref": "$ref",
    "min_items": "minItems",
    "max_items": "maxItems",
    "min_length": "minLength",
    "max_length": "maxLength",
    "min_properties": "minProperties",
    "max_properties": "maxProperties",
}
_COUNTS: Final = frozenset(name for name in _SPELLINGS.values() if name.startswith(("min", "max")))
_SAYS_NOTHING: Final = frozenset(
    {"nullable", "propertyOrdering", "property_ordering", "example", "title"}
)
"""Of what a value may be; `nullable` is told otherwise."""

_SIZES: Final = frozenset({"enum", "int32", "int64", "float", "double"})
"""Formats that name what the type or the list says already."""


def json_schema(schema: Any, depth: int = 0) -> Any:
    """The same in JSON Schema. O(nodes). Raises Refusal where it is nested too deeply."""
    if depth > DEPTH_MAX:
        raise Refusal(Kind.BAD, "invalid_value", "A schema is nested too deeply.", param="schema")
    if isinstance(schema, list):
        return [json_schema(item, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        name = str(_SPELLINGS.get(key, key))
        if name in _SAYS_NOTHING or (name == "format" and value in _SIZES):
            continue
        if name == "type" and isinstance(value, str):
            if value != "TYPE_UNSPECIFIED":
                found[name] = value.lower()
        elif name in ("properties", "defs", "$defs") and isinstance(value, dict):
            found[name] = {member: json_schema(one, depth + 1) for member, one in value.items()}
        elif name in ("anyOf", "items", "prefixItems", "additionalProperties"):
            found[name] = json_schema(value, depth + 1)
        elif name in _COUNTS and isinstance(value, str) and value.isascii() and value.isdigit():
            found[name] = int(value[:20])
        else:
            found[name] = value
    if found.get("properties") and "additionalProperties" not in found:
        # What is not declared is never answered there, as this word has come to the schemas late.
        found["additionalProperties"] = False
    if schema.get("nullable") is True:
        _let_be_null(found)
    return found


def lowercase_types(schema: Any, depth: int = 0) -> Any:
    """A JSON Schema whose types may be in capitals, as the SDK's own examples have them. O(nodes).
    Below `DEPTH_MAX` nothing is changed: that is for whoever compiles it to refuse."""
    if depth > DEPTH_MAX:
        return schema
    if isinstance(schema, list):
        return [lowercase_types(item, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "type" and isinstance(value, str | list):
            found[name] = _small(value)
        elif name in _MAPS and isinstance(value, dict):
            found[name] = {one: lowercase_types(below, depth + 1) for one, below in value.items()}
        else:
            found[name] = value if name in _DATA else lowercase_types(value, depth + 1)
    return found


_TYPES: Final = frozenset({"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"})
_MAPS: Final = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
)
"""Words whose values are schemas by names, which are the caller's own."""
_DATA: Final = frozenset({"enum", "const", "default", "examples", "required", "dependentRequired"})
"""Words whose values are no schemas."""


def _small(kind: Any) -> Any:
    if isinstance(kind, list):
        return [_small(one) for one in kind]
    return kind.lower() if isinstance(kind, str) and kind in _TYPES else kind


def _let_be_null(schema: dict[str, Any]) -> None:
    """Wherever it says what a value may be, null is one of them."""
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    if isinstance(schema.get("enum"), list):
        schema["enum"] = [*schema["enum"], None]
    if isinstance(schema.get("anyOf"), list):
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
