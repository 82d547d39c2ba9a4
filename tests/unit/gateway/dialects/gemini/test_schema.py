"""Gemini's schemas become JSON Schema that holds an answer to the same values."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.dialects.gemini.schema import DEPTH_MAX, json_schema, lowercase_types
from gateway.errors import Refusal


@pytest.mark.parametrize(
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
        ({"any_of": [{"type": "NULL"}]}, {"anyOf": [{"type": "null"}]}),
        ({"type": "INTEGER", "format": "int64", "minimum": 1}, {"type": "integer", "minimum": 1}),
        ({"type": "NUMBER", "format": "double"}, {"type": "number"}),
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
def test_each_word_says_the_same(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Types in capitals, null, sizes of numbers, counts as texts, either spelling."""
    assert json_schema(theirs) == ours


def test_types_of_a_json_schema_may_be_in_capitals() -> None:
    """The SDK's examples have them; names and values that look like types are left alone."""
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


def test_what_is_far_down_in_a_json_schema_is_left_as_it_is() -> None:
    """Whoever compiles it says what is too deep; here it must only not take long."""
    deep: Any = {"type": "STRING"}
    for _ in range(5_000):
        deep = {"type": "ARRAY", "items": deep}

    found = lowercase_types(deep)
    for _ in range(DEPTH_MAX):
        assert found["type"] == "array"
        found = found["items"]
    assert found["items"]["type"] == "ARRAY"


def test_only_declared_members_are_answered() -> None:
    """Whoever reads an answer into a class has no place for others; one may ask for them."""
    declared = {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}

    assert json_schema(declared)["additionalProperties"] is False
    assert json_schema({**declared, "additionalProperties": True})["additionalProperties"] is True
    assert "additionalProperties" not in json_schema({"type": "OBJECT"})


def test_members_keep_their_names() -> None:
    """A member may be called like a word of the schema's."""
    members = {
        name: {"type": "STRING"} for name in ("title", "nullable", "any_of", "type", "format")
    }

    found = json_schema({"type": "OBJECT", "properties": members, "required": ["title"]})

    assert found["required"] == ["title"]
    assert found["properties"] == {name: {"type": "string"} for name in members}


def test_what_is_nested_too_deeply_is_refused() -> None:
    """Before anything walks it again."""
    schema: dict[str, Any] = {"type": "STRING"}
    for _ in range(DEPTH_MAX + 1):
        schema = {"type": "ARRAY", "items": schema}

    with pytest.raises(Refusal, match="too deeply"):
        json_schema(schema)
