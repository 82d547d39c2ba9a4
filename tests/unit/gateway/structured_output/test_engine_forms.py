"""Unions, references and bounds as generators write them, tried on the engine's own matcher."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import Refusal
from gateway.structured_output.output_check import SchemaCheck
from gateway.structured_output.schemas.engine_forms import unite_disjoint
from gateway.structured_output.schemas.keywords import prepared_schema
from tests.examples import examples
from tests.tables import each_row
from tests.unit.gateway.structured_output.test_schema_grammar import allowed_by, member

CLOSED = {"additionalProperties": False}


def tagged(tag: object, **members: object) -> dict[str, Any]:
    """Return an object's schema with a tag, as Pydantic and Zod write one of a union."""
    inner = {"kind": {"const": tag, "title": "Kind"}, **members}
    return {"type": "object", "properties": inner, "required": list(inner)}


def union(one: object, other: object) -> dict[str, Any]:
    """Return the schema of an object with a member of one of two definitions."""
    either = {
        "oneOf": [{"$ref": "#/$defs/One"}, {"$ref": "#/$defs/Other"}],
        "discriminator": {"propertyName": "kind"},
    }
    return {**member(either), "$defs": {"One": one, "Other": other}}


@each_row(
    ("one", "other", "value"),
    [
        (tagged("cat"), tagged("dog"), {"kind": "dog"}),
        (tagged(1), tagged(2), {"kind": 2}),
        (tagged(True), tagged(1), {"kind": 1}),
        ({"allOf": [tagged("cat")]}, tagged("dog"), {"kind": "dog"}),
        (tagged("c", in_=tagged("a")), tagged("c", in_=tagged("b")),
         {"kind": "c", "in_": {"kind": "b"}}),
        ({**tagged("a"), "properties": {"kind": {"enum": ["a", "b"]}}}, tagged("c"), {"kind": "c"}),
        ({**member({}), **CLOSED}, tagged("c"), {"kind": "c"}),
        ({"type": ["string", "null"]}, tagged("c"), None),
    ],
)  # fmt: skip
def test_a_strict_union_of_definitions_that_exclude_each_other_is_taken(
    one: object, other: object, value: object
) -> None:
    """Pydantic's discriminated unions: the engine looks behind no reference."""
    allows = allowed_by(union(one, other))

    assert allows(json.dumps({"id": value}))
    assert not allows(json.dumps({"id": 5}))


@each_row(
    ("one", "other"),
    [
        (tagged("cat"), tagged("cat")),
        ({**tagged("cat"), "required": []}, tagged("dog")),
        ({**tagged("cat"), "type": "string"}, {**tagged("dog"), "type": ["string", "object"]}),
        ({"type": "integer"}, {"type": "number"}),
        ({**member({}), **CLOSED, "patternProperties": {"^k": {}}}, tagged("c")),
    ],
)
def test_alternatives_that_may_overlap_stay_as_they_are(one: object, other: object) -> None:
    """A strict answer would satisfy both."""
    schema = union(one, other)

    assert "oneOf" in prepared_schema(schema, "f", strict=True)["properties"]["id"]


def test_a_union_of_too_many_alternatives_is_not_compared() -> None:
    """Each is compared with each."""
    schema = {"oneOf": [{"const": number} for number in range(1_000)]}

    assert prepared_schema(schema, "f", strict=True) == schema


VALUES = st.sampled_from([None, True, 1, "a", "b", {}, {"a": 1}, {"a": "a"}, {"b": 1, "a": "b"}])
PARTS = st.recursive(
    st.sampled_from([{"type": "string"}, {"type": ["number", "null"]}, {"enum": ["a", 1]}, {}]),
    lambda inner: st.fixed_dictionaries(
        {"properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2)},
        optional={
            "type": st.sampled_from(["object", ["object", "string"]]),
            "required": st.lists(st.sampled_from("ab"), max_size=2),
            "additionalProperties": st.just(value=False),
            "allOf": st.lists(inner, max_size=1),
        },
    ),
    max_leaves=4,
)


@settings(max_examples=examples(300))
@given(one=PARTS, other=PARTS, value=VALUES)
def test_no_value_satisfies_two_alternatives_that_exclude_each_other(
    one: dict[str, Any], other: dict[str, Any], value: object
) -> None:
    """An `anyOf` then means what the `oneOf` said."""
    schema: dict[str, Any] = {"oneOf": [one, other]}
    unite_disjoint(schema)

    if "anyOf" in schema:
        check = SchemaCheck(schema)
        assert not (check.holds(value, one) and check.holds(value, other))


def chain(**beside: object) -> dict[str, Any]:
    """Return the schema of a linked list whose reference has keywords beside it."""
    link = {"anyOf": [{"$ref": "#/$defs/Node", **beside}, {"type": "null"}]}
    node = {**member({"type": "integer"}), "$defs": {}}
    node["properties"] = {**node["properties"], "next": link}
    return {"$ref": "#/$defs/Node", "$defs": {"Node": {**node, "required": ["id", "next"]}}}


CHAIN = '{"id": 1, "next": {"id": 2, "next": null}}'


@each_row("strict", [True, False])
@each_row(
    "beside",
    [
        {"type": "object"},
        {"type": ["object", "null"]},
        {"type": "object", "title": "T", "properties": {}, "required": []},
        {"required": ["id"]},
    ],
)
def test_what_says_nothing_beside_a_reference_into_a_cycle_is_left_out(
    beside: dict[str, object], strict: bool
) -> None:
    """Java's and Go's generators repeat the type; the engine takes no keyword there."""
    allows = allowed_by(chain(**beside), strict=strict)

    assert allows(CHAIN)
    assert not allows('{"id": 1, "next": 5}')


def test_what_says_more_beside_a_reference_into_a_cycle_is_ignored_or_refused() -> None:
    """As every keyword that no grammar holds; a strict schema names it."""
    schema = chain(additionalProperties=False)

    assert allowed_by(schema, strict=False)(CHAIN)
    with pytest.raises(Refusal, match="contains itself") as caught:
        allowed_by(schema, strict=True)
    assert caught.value.param == "f.$defs.Node.properties.next.anyOf.0.additionalProperties"


def test_keywords_beside_a_reference_that_ends_are_held() -> None:
    """The engine holds both."""
    schema = {**member({"$ref": "#/$defs/n", "maximum": 4}), "$defs": {"n": {"type": "integer"}}}

    assert [allowed_by(schema)(f'{{"id": {n}}}') for n in (4, 5)] == [True, False]


@each_row(
    ("bounds", "low", "high"),
    [
        ({"minimum": 2, "exclusiveMinimum": True, "maximum": 4, "exclusiveMaximum": False}, 3, 4),
        ({"minimum": 2, "exclusiveMinimum": False, "maximum": 4, "exclusiveMaximum": True}, 2, 3),
    ],
)
def test_a_bound_that_a_boolean_makes_exclusive_is_held(
    bounds: dict[str, Any], low: int, high: int
) -> None:
    """As OpenAPI 3.0 and draft 4 write it, and generators for them."""
    allows = allowed_by({"type": "integer", **bounds})

    assert [n for n in range(7) if allows(str(n))] == list(range(low, high + 1))


@each_row(
    "nothing",
    [
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {}, "unevaluatedProperties": True},
        {"dependentRequired": {}, "dependentSchemas": {}},
    ],
)
def test_a_keyword_that_no_grammar_holds_is_taken_where_it_excludes_nothing(
    nothing: dict[str, Any],
) -> None:
    """Zod's record writes `propertyNames` for texts, strict or not."""
    schema = {"type": "object", "additionalProperties": {"type": "integer"}, **nothing}

    assert [allowed_by(schema)(text) for text in ('{"a": 1}', '{"a": "b"}')] == [True, False]
