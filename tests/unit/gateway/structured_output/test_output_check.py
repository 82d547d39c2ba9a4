"""The check of finished JSON finds schema violations and is bounded in time."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.canonical import OutputFormat
from gateway.structured_output.output_check import OutOfSteps, SchemaCheck, satisfies
from tests.tables import each_row

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"age": {"type": ["integer", "null"], "minimum": 0, "exclusiveMaximum": 200}},
}


def holds(text: str, schema: Any) -> bool:
    """Return whether the text satisfies a schema."""
    return satisfies(text, OutputFormat("json_schema", json.dumps(schema)))


@each_row(
    ("text", "holds_"),
    [
        ('{"name": "Ann"}', True),
        ('{"name": "Ann", "age": null}', True),
        ('{"name": "Ann", "age": 3.0}', True),
        ('{"name": "Ann", "age": 3.5}', False),
        ('{"name": "Ann", "age": true}', False),
        ('{"name": "Ann", "age": -1}', False),
        ('{"name": "Ann", "age": 200}', False),
        ('{"name": ""}', False),
        ('{"name": 7}', False),
        ('{"age": 7}', False),
        ('{"name": "Ann", "other": 1}', False),
        ('{"name": "Ann"', False),
        ("Ann", False),
    ],
)
def test_checks_types_bounds_members_references(text: str, holds_: bool) -> None:
    assert holds(text, PERSON) is holds_


@each_row(
    ("value", "schema", "holds_"),
    [
        ([1, "a"], {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, True),
        ([1, 2], {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, False),
        ([1], {"minItems": 2}, False),
        ({}, {"minProperties": 1}, False),
        (1, {"enum": [1.0, "a"]}, True),
        (True, {"enum": [1]}, False),
        ("b", {"const": "a"}, False),
        (5, {"anyOf": [{"type": "string"}, {"minimum": 6}]}, False),
        (5, {"oneOf": [{"type": "string"}, {"minimum": 5}]}, True),
        (5, {"allOf": [{"type": "integer"}, {"maximum": 4}]}, False),
        ({"a": 1}, {"additionalProperties": {"type": "string"}}, False),
        ({"a": 1}, {"patternProperties": {"a": {}}, "additionalProperties": False}, True),
        (1, False, False),
        (1, True, True),
        ([1, 2, "1", True, [1], {"a": 1}], {"uniqueItems": True}, True),
        ([{"a": 1, "b": 2}, {"b": 2, "a": 1}], {"uniqueItems": True}, False),
        ([1, 1], {"uniqueItems": False}, True),
        ([1, 1], {"items": {"uniqueItems": True}}, True),
        ("a", {"not": {"type": "string"}}, False),
        (1, {"not": {"type": "string"}}, True),
        ({"a": 1}, {"not": {"required": ["a"]}}, False),
        ({"a": 1}, {"not": {"properties": {"a": {"const": 1}}}}, False),
        ("a", {"not": {"pattern": "b"}}, True),
        ("a", {"not": {"properties": {"a": {"format": "b"}}}}, True),
        ("a", {"not": {"$ref": "#/nowhere"}}, True),
        ("a", {"not": 7}, True),
        ([1], {"not": {"const": [True]}}, True),
        (1, {"not": {"enum": 7}}, True),
        (5, {"oneOf": [{"type": "integer"}, {"type": "number"}]}, False),
        (5.5, {"oneOf": [{"type": "integer"}, {"type": "number"}]}, True),
        ("a", {"oneOf": [{"pattern": "a"}, {"type": "string"}]}, True),
        ([1, "a"], {"contains": {"type": "string"}}, True),
        ([1], {"contains": {"type": "string"}}, False),
        ([1], {"contains": {"type": "string"}, "minContains": 0}, True),
        ({"a": 1}, {"propertyNames": {"minLength": 2}}, False),
        ({"a": 1}, {"propertyNames": {"maxLength": 2}}, True),
        ({"a": 1}, {"dependentRequired": {"a": ["b"]}}, False),
        ({"c": 1}, {"dependentRequired": {"a": ["b"]}}, True),
        (1, {"if": {"type": "integer"}, "then": {"minimum": 2}}, False),
        ("a", {"if": {"type": "integer"}, "then": {"minimum": 2}}, True),
        ("a", {"if": {"type": "integer"}, "else": {"minLength": 2}}, False),
        (1, {"if": {"format": "x"}, "then": {"minimum": 2}}, True),
        ("a", {"if": {}, "then": 7, "dependentRequired": 7, "contains": 7}, True),
        ({}, {"dependentRequired": {"a": 7}, "uniqueItems": "x"}, True),
        ({"a": 1}, {"dependentRequired": {"a": [["x"], 7]}}, True),
        ({"a": 1}, {"dependentRequired": {"a": [["x"], "b"]}}, False),
        ({"a": 1}, {"required": [["x"], {}]}, True),
        ({"a": 1}, {"not": {"required": [["x"]]}}, True),
        ({"a": 1}, {"not": {"dependentRequired": {"a": [["x"]]}}}, True),
        ({"a": 1}, {"not": {"minProperties": "1"}}, True),
        ({"a": 1}, {"oneOf": [{"type": ["strange"]}, {"uniqueItems": 1}]}, True),
        (1, {"type": "strange", "items": 7, "required": "x", "minimum": "y", "enum": 0}, True),
        (1, {"$ref": "https://example.com/schema"}, True),
        (1, {"$ref": "#/nowhere"}, True),
        ("a/b", {"$defs": {"a/b": {"const": "a/b"}}, "$ref": "#/$defs/a~1b"}, True),
    ],
)
def test_each_keyword_of_a_schema_is_checked(value: object, schema: object, holds_: bool) -> None:
    """Unknown and invalid keywords are ignored."""
    assert holds(json.dumps(value), schema) is holds_


@pytest.mark.parametrize("reference", ["#/$defs/Id%5Bint%5D", "#the-id", "https://x/y#the-id"])
def test_every_reference_is_followed(reference: str) -> None:
    """Generators percent-encode the names of generic classes; an anchor is not the root."""
    definitions = {"Id[int]": {"$anchor": "the-id", "type": "integer"}}
    schema = {"$id": "https://x/y", "items": {"$ref": reference}, "$defs": definitions}

    assert holds("[1]", schema)
    assert not holds('["1"]', schema)


def test_json_object_mode_requires_an_object() -> None:
    assert satisfies('{"a": 1}', OutputFormat("json_object"))
    assert not satisfies("[1]", OutputFormat("json_object"))
    assert not satisfies("{", OutputFormat("json_object"))
    assert satisfies("anything", OutputFormat())


@each_row(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}, "$ref": "#/$defs/a"},
        {"allOf": [{"allOf": [{"allOf": [{"allOf": [{}] * 20}] * 20}] * 20}] * 20},
        {"not": {"properties": {str(n): {} for n in range(30_000)}}},
        {"$defs": {"a": {"if": {}, "then": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
    ],
)
def test_gives_up_on_hostile_schema(schema: object) -> None:
    """The check reports no violation, quickly."""
    assert holds("1", schema)


LISTED = ["null"] * 5_000


@each_row(
    ("value", "schema"),
    [
        ([None] * 1_000, {"items": {"type": LISTED}}),
        ([0] * 1_000, {"items": {"enum": [1] * 5_000 + [0]}}),
        ([{"null": 1}] * 1_000, {"items": {"required": LISTED}}),
        ([{"null": 1}] * 1_000, {"items": {"dependentRequired": {"null": LISTED}}}),
        (list(range(100)), {"allOf": [{"uniqueItems": True}] * 1_000}),
    ],
)
def test_every_keyword_is_charged_its_cost(value: object, schema: object) -> None:
    """A long list in a schema, for every member of a long answer, or a list that is compared."""
    with pytest.raises(OutOfSteps):
        SchemaCheck(schema).holds(value, schema)
    assert holds(json.dumps(value), schema)


def test_deep_answer_is_not_a_violation() -> None:
    assert holds('{"a":' * 5_000 + "1" + "}" * 5_000, {"additionalProperties": {"$ref": "#"}})


KEYWORDS = (
    *("type", "enum", "const", "required", "dependentRequired", "uniqueItems", "properties"),
    *("minimum", "maximum", "exclusiveMinimum", "minLength", "maxItems", "minProperties", "items"),
    *("prefixItems", "contains", "minContains", "propertyNames", "additionalProperties", "not"),
    *("if", "then", "else", "allOf", "anyOf", "oneOf", "$ref", "$defs", "patternProperties"),
)
NAMES = st.sampled_from(("a", "b", "#", "#/$defs/a", "string", "object", "integer"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | NAMES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(NAMES, inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4)
    ),
    max_leaves=16,
)


@given(VALUES, st.dictionaries(st.sampled_from(KEYWORDS), VALUES, max_size=5))
def test_no_schema_raises(value: object, schema: dict[str, object]) -> None:
    """Clients write schemas; a keyword may have any value."""
    check = SchemaCheck(schema)

    with suppress(RecursionError, OutOfSteps):  # `satisfies` counts them as satisfied
        assert check.holds(value, schema) in (True, False)


@each_row("schema", ["", "{", "null", "[]", '"a"', "1" * 5_000])
def test_a_schema_that_is_none_is_satisfied(schema: str) -> None:
    assert satisfies("1", OutputFormat("json_schema", schema))


def test_a_number_that_python_refuses_is_no_violation() -> None:
    """It is valid JSON."""
    assert satisfies("1" * 5_000, OutputFormat("json_schema", "{}"))
