"""Conversion of Gemini's schemas to JSON Schema.

Gemini's schemas are a subset of OpenAPI: types in capitals, `nullable`, number formats, counts that
may be strings, and keywords in camelCase or snake_case. This module knows no request;
`gemini.generate_content` and `gemini.prompt` pass it the schemas that a client declared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from gateway.dialects.gemini.proto_json import (
    TYPES,
    read_bool,
    read_enum,
    read_float,
    read_int,
    read_list,
)
from gateway.errors import Kind, Refusal

DEPTH_MAX: Final = 64
"""Most levels of nesting in a schema."""

_ORDERINGS: Final = ("propertyOrdering", "property_ordering")

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
_LISTS: Final = frozenset({"anyOf", "prefixItems", "enum", "required"})
_ANNOTATIONS: Final = frozenset({"nullable", "example", "title", *_ORDERINGS})
"""Keywords that do not constrain a value, `nullable`, which becomes the type "null", and the order
of properties."""

_FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Formats that an answer is held to. Others repeat what `type` or `enum` says (`int64`, `enum`), or
are notes for the model: Gemini takes any text here, such as `password`."""

_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "integer": read_int,
    "number": lambda value: read_float(read_int(value)),
    "boolean": read_bool,
}


def json_schema(schema: Any, depth: int = 0) -> Any:
    """Convert a schema to JSON Schema. Cost: O(nodes). Raises Refusal below `DEPTH_MAX` levels."""
    if depth > DEPTH_MAX:
        message = f"A schema is nested too deeply; expected at most {DEPTH_MAX} levels."
        raise Refusal(Kind.BAD, "invalid_value", message, param="schema")
    if isinstance(schema, list):
        return [json_schema(item, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        name = str(_SPELLINGS.get(key, key))
        if value is None or name in _ANNOTATIONS:
            continue
        if name == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        value = read_list(value) if name in _LISTS else value
        if name == "type" and isinstance(value := read_enum(value, TYPES), str):
            if value != "TYPE_UNSPECIFIED":
                found[name] = value.lower()
        elif name in ("properties", "defs", "$defs") and isinstance(value, dict):
            found[name] = {key: json_schema(inner, depth + 1) for key, inner in value.items()}
        elif name in ("anyOf", "items", "prefixItems", "additionalProperties"):
            found[name] = json_schema(value, depth + 1)
        elif name in _COUNTS:
            found[name] = read_int(value)
        elif name in ("minimum", "maximum"):
            found[name] = read_float(read_int(value))
        else:
            found[name] = value
    _read_values(found)
    _order(found, schema)
    if found.get("properties") and "additionalProperties" not in found:
        # Gemini's models never answer undeclared properties; the keyword came to its schemas late.
        found["additionalProperties"] = False
    if read_bool(schema.get("nullable")) is True:
        _allow_null(found)
    return found


def _read_values(found: dict[str, Any]) -> None:
    """Read the values of an enum as its type says: Gemini's schemas write all of them as texts."""
    read = _READERS.get(str(found.get("type")))
    if read is not None and isinstance(values := found.get("enum"), list):
        found["enum"] = [read(value) for value in values]


def _order(found: dict[str, Any], schema: dict[str, Any]) -> None:
    """Put properties in the order that a schema asks for: an answer's members follow it. Those that
    the order does not name come last."""
    wanted: Any = next((schema[name] for name in _ORDERINGS if schema.get(name)), [])
    properties = found.get("properties")
    if isinstance(properties, dict) and isinstance(wanted, list):
        names = [name for name in wanted if isinstance(name, str) and name in properties]
        found["properties"] = {name: properties[name] for name in (*names, *properties)}


def lowercase_types(schema: Any, depth: int = 0) -> Any:
    """Lower the case of the types in a JSON Schema: the SDK's examples write them in capitals. Put
    its properties in the order that it asks for.

    Cost: O(nodes). Levels below `DEPTH_MAX` stay as they are; the grammar compiler refuses them.
    """
    if depth > DEPTH_MAX:
        return schema
    if isinstance(schema, list):
        return [lowercase_types(item, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "type" and isinstance(value, str | list):
            found[name] = _lowercase_type(value)
        elif name in _SCHEMA_MAPS and isinstance(value, dict):
            found[name] = {key: lowercase_types(inner, depth + 1) for key, inner in value.items()}
        elif name in _NON_SCHEMAS:
            found[name] = value
        else:
            found[name] = lowercase_types(value, depth + 1)
    _order(found, schema)
    for name in _ORDERINGS:
        found.pop(name, None)
    return found


_TYPES: Final = frozenset({"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"})
_SCHEMA_MAPS: Final = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
)
"""Keywords with values that map the client's names to schemas."""
_NON_SCHEMAS: Final = frozenset(
    {"enum", "const", "default", "examples", "required", "dependentRequired"}
)
"""Keywords with values that are not schemas."""


def _lowercase_type(kind: Any) -> Any:
    if isinstance(kind, list):
        return [_lowercase_type(member) for member in kind]
    return kind.lower() if isinstance(kind, str) and kind in _TYPES else kind


def _allow_null(schema: dict[str, Any]) -> None:
    """Add null to the schema's `type`, `enum` and `anyOf`, or to what it refers to."""
    if "$ref" in schema and "anyOf" not in schema:
        schema["anyOf"] = [{"$ref": schema.pop("$ref")}]
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    if isinstance(schema.get("enum"), list):
        schema["enum"] = [*schema["enum"], None]
    if isinstance(schema.get("anyOf"), list):
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
