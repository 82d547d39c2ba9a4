"""Schemas whose values would never end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import Refusal
from gateway.structured_output.output_check import References
from gateway.structured_output.schemas.endless import find_endless
from gateway.structured_output.schemas.keywords import prepared_schema
from tests.examples import examples
from tests.tables import each_row


def node(**members: Any) -> dict[str, Any]:
    """Return the schema of an object that has all of these members."""
    return {"type": "object", "properties": members, "required": list(members)}


ROOT = {"$ref": "#"}
LINK = {"$ref": "#/$defs/link"}


@each_row(
    ("schema", "path"),
    [
        (ROOT, "$ref"),
        (node(next=ROOT), "properties.next.$ref"),
        (node(a=node(b={"$ref": "#/properties/a"})), "properties.a.properties.b.$ref"),
        ({**node(v={}, first=LINK), "$defs": {"link": node(next=LINK)}},
         "$defs.link.properties.next.$ref"),
        ({**LINK, "$defs": {"link": {"$ref": "#/$defs/b"}, "b": LINK}}, "$defs.b.$ref"),
        (node(kids={"type": "array", "minItems": 1, "items": ROOT}), "properties.kids.items.$ref"),
        (node(pair={"type": "array", "minItems": 2, "prefixItems": [{}, ROOT]}),
         "properties.pair.prefixItems.1.$ref"),
        (node(next={"anyOf": [ROOT, node(deep=ROOT)]}), "properties.next.anyOf.0.$ref"),
        (node(next={"allOf": [{"type": "object"}, ROOT]}), "properties.next.allOf.1.$ref"),
    ],
)  # fmt: skip
@each_row("strict", [True, False])
def test_a_value_that_never_ends_is_refused_by_name(
    schema: dict[str, Any], path: str, strict: bool
) -> None:
    """It is charged to the output limit otherwise, and no answer is the client's JSON."""
    with pytest.raises(Refusal, match="can never be finished") as caught:
        prepared_schema(schema, "text.format.schema", strict=strict)

    assert caught.value.code == "invalid_json_schema"
    assert caught.value.param == f"text.format.schema.{path}"


@each_row(
    "schema",
    [
        node(next={"anyOf": [ROOT, {"type": "null"}]}),
        node(next={"oneOf": [{}, ROOT]}),
        node(kids={"type": "array", "items": ROOT}),
        node(kids={"type": "array", "minItems": 1, "prefixItems": [{}], "items": ROOT}),
        node(next={"type": ["object", "null"], "properties": {"a": ROOT}, "required": ["a"]}),
        {"type": "object", "properties": {"next": ROOT}},
    ],
)
def test_a_recursion_that_ends_is_taken(schema: dict[str, Any]) -> None:
    """Lists and trees are what references to oneself are for."""
    assert prepared_schema(schema, "schema", strict=True) == schema


def test_an_endless_definition_that_nothing_uses_is_left_out() -> None:
    """It constrains no value."""
    used = node(v={"type": "string"})

    assert prepared_schema({**used, "$defs": {"link": node(next=LINK)}}, "s", strict=True) == used


def test_an_endless_part_that_may_be_left_out_is_refused_where_strict() -> None:
    """A model that begins it cannot leave it; a loose schema leaves the choice to the model."""
    schema = {
        **node(v={"type": "string"}), "additionalProperties": LINK,
        "$defs": {"link": node(next=LINK)},
    }  # fmt: skip

    assert prepared_schema(schema, "schema", strict=False) == schema
    with pytest.raises(Refusal, match="can never be finished"):
        prepared_schema(schema, "schema", strict=True)


def ends(schema: Any, root: dict[str, Any], depth: int) -> bool:
    """Return whether a value of at most so many levels exists."""
    if depth == 0 or isinstance(schema, bool):
        return depth > 0
    needed = [schema["properties"][name] for name in schema.get("required", ())]
    needed += schema.get("allOf", [])
    needed += [References(root).target(schema["$ref"])] if "$ref" in schema else []
    needed += [schema["items"]] if schema.get("minItems") else []
    choices = schema.get("anyOf")
    return all(ends(one, root, depth - 1) for one in needed) and (
        choices is None or any(ends(one, root, depth - 1) for one in choices)
    )


references = st.sampled_from([{"$ref": f"#/$defs/{name}"} for name in "abc"])
parts = st.one_of(references, st.booleans())
subschemas = st.one_of(
    st.just({"type": "string"}),
    st.booleans(),
    references,
    st.builds(lambda one, two: {"anyOf": [one, two]}, references, parts),
    st.builds(lambda one, two: node(x=one, y=two), references, parts),
    st.builds(lambda one: {"type": "object", "properties": {"x": one}}, references),
    st.builds(lambda one, least: {"type": "array", "items": one, "minItems": least},
              references, st.integers(0, 1)),
)  # fmt: skip


@settings(max_examples=examples(200), deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys("abc", subschemas)), references)
def test_it_finds_exactly_what_no_finite_value_satisfies(
    definitions: dict[str, Any], start: dict[str, Any]
) -> None:
    """Beside a search for a value of bounded depth."""
    root = {**start, "$defs": definitions}

    assert (find_endless(root, everywhere=False) is None) == ends(root, root, 10)
