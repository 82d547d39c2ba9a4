"""Conversion of Gemini's schemas to JSON Schema."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.dialects.gemini.schema import DEPTH_MAX, json_schema, lowercase_types
from gateway.errors import Refusal
from tests.tables import each_row


@each_row(
    ("theirs", "ours"),
    [
        ({"type": "STRING", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "STRING", "nullable": False}, {"type": "string"}),
        (
            {"type": "STRING", "format": "enum", "enum": ["a", "b"], "nullable": True},
            {"type": ["string", "null"], "enum": ["a", "b", None]},
        ),
        (
            {"anyOf": [{"type": "STRING"}, {"type": "INTEGER"}], "nullable": True},
            {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
        ),
        (
            {"ref": "#/defs/a", "nullable": True},
            {"anyOf": [{"$ref": "#/defs/a"}, {"type": "null"}]},
        ),
        ({"any_of": [{"type": "NULL"}]}, {"anyOf": [{"type": "null"}]}),
        ({"type": "INTEGER", "format": "int64", "minimum": 1}, {"type": "integer", "minimum": 1}),
        ({"type": "NUMBER", "format": "double"}, {"type": "number"}),
        ({"type": "STRING", "format": "password"}, {"type": "string"}),
        (
            {"type": "STRING", "format": "date-time", "minLength": "1", "max_length": 40},
            {"type": "string", "format": "date-time", "minLength": 1, "maxLength": 40},
        ),
        (
            {"type": "ARRAY", "items": {"type": "STRING"}},
            {"type": "array", "items": {"type": "string"}},
        ),
        (
            {"type": "OBJECT", "additional_properties": {"type": "BOOLEAN"}},
            {"type": "object", "additionalProperties": {"type": "boolean"}},
        ),
        (
            {"defs": {"b": {"type": "STRING"}}, "ref": "#/defs/b"},
            {"defs": {"b": {"type": "string"}}, "$ref": "#/defs/b"},
        ),
        ({"type": "TYPE_UNSPECIFIED", "title": "T", "example": 1, "propertyOrdering": []}, {}),
    ],
)
def test_converts_each_keyword(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Types in capitals, null, number formats, counts as strings, both spellings."""
    assert json_schema(theirs) == ours


@each_row(
    ("kind", "texts", "values"),
    [
        ("INTEGER", ["101", "2512292042121000001"], [101, 2512292042121000001]),
        ("NUMBER", ["1.5", "2"], [1.5, 2]),
        ("BOOLEAN", ["true"], [True]),
        ("STRING", ["1", "true"], ["1", "true"]),
        ("INTEGER", [1, "many"], [1, "many"]),
    ],
)
def test_values_of_an_enum_have_its_type(kind: str, texts: object, values: object) -> None:
    """Gemini's schemas write the values as texts, those of numbers too: no answer would match."""
    assert json_schema({"type": kind, "format": "enum", "enum": texts})["enum"] == values


def test_lowercases_types_of_a_json_schema() -> None:
    """The SDK's examples write capitals; names and values that look like types stay unchanged."""
    theirs = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": ["STRING", "NULL"], "enum": ["STRING", None]},
            "default": {"type": "ARRAY", "items": {"anyOf": [{"type": "NUMBER"}, True]}},
        },
        "required": ["type"],
        "additionalProperties": {"const": {"type": "OBJECT"}},
        "$defs": {"enum": {"type": "INTEGER"}, "odd": {"type": "Object"}},
    }

    assert lowercase_types(theirs) == {
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"], "enum": ["STRING", None]},
            "default": {"type": "array", "items": {"anyOf": [{"type": "number"}, True]}},
        },
        "required": ["type"],
        "additionalProperties": {"const": {"type": "OBJECT"}},
        "$defs": {"enum": {"type": "integer"}, "odd": {"type": "Object"}},
    }


def test_leaves_levels_below_the_depth_limit_unchanged() -> None:
    """The grammar compiler refuses deep schemas; the conversion must only be fast."""
    deep: Any = {"type": "STRING"}
    for _ in range(5_000):
        deep = {"type": "ARRAY", "items": deep}

    found = lowercase_types(deep)
    for _ in range(DEPTH_MAX):
        assert found["type"] == "array"
        found = found["items"]
    assert found["items"]["type"] == "ARRAY"


def test_forbids_undeclared_properties_by_default() -> None:
    """Clients that parse answers into classes have no field for others; a schema may allow them."""
    declared = {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}

    assert json_schema(declared)["additionalProperties"] is False
    assert json_schema({**declared, "additionalProperties": True})["additionalProperties"] is True
    assert "additionalProperties" not in json_schema({"type": "OBJECT"})


def test_keeps_property_names() -> None:
    """A property may have the name of a keyword."""
    members = {
        name: {"type": "STRING"} for name in ("title", "nullable", "any_of", "type", "format")
    }

    found = json_schema({"type": "OBJECT", "properties": members, "required": ["title"]})

    assert found["required"] == ["title"]
    assert found["properties"] == {name: {"type": "string"} for name in members}


def test_refuses_deep_nesting() -> None:
    """The check precedes every other walk of the schema."""
    schema: dict[str, Any] = {"type": "STRING"}
    for _ in range(DEPTH_MAX + 1):
        schema = {"type": "ARRAY", "items": schema}

    with pytest.raises(Refusal, match="too deeply"):
        json_schema(schema)
