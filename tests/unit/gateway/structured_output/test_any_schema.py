"""Any JSON as a schema, in every dialect: a request with it is answered, or refused by its path."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestRefused
from engine.grammar.grammar import compile_grammar
from gateway.dialects.canonical import Prompt
from gateway.errors import Refusal
from gateway.structured_output.grammars import build_grammar, locate_fault
from gateway.structured_output.harmony_grammar import harmony_grammar
from gateway.structured_output.output_check import satisfies
from gateway.structured_output.tool_styles import HERMES
from tests.examples import examples
from tests.tables import each_row
from tests.unit.gateway.structured_output.test_schema_grammar import (
    ID,
    VOCABULARY,
    allowed_by,
    asked,
    calls,
    formats,
    member,
    tool,
)

KINDS = ("object", "array", "string", "number", "integer", "boolean", "null")
SCHEMAS = (
    *("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
NUMBERS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
)
WORDS = ("$id", "id", "$anchor", "$schema", "$dynamicRef", "$dynamicAnchor", "title", "nullable")
OTHERS = ("uniqueItems", "dependentRequired", "minContains", "default", "examples", "x-guidance")
NAMES = ("a", "b", "", "$ref", "type", "a/b", "~0", "%25", "é", "required")
REFERENCES = (
    *("#", "#/", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/definitions/a%2Fb", "#/enum/0"),
    *("#/const", "#/required/0", "#/type", "#/anyOf/0", "#/items", "#/title", "#/x/a", "#a", "a#b"),
    *("#/$defs/~01", "#/%ff", "https://x.example/y#/$defs/a"),
)

number = st.one_of(
    st.integers(-2, 4),
    st.sampled_from([0.1, 1.5, -0.0, 1e300, 1e-300, 0.123456, 2**31, 2**53 + 1, 2**64, -(10**30)]),
    st.just(10**400),
)
word = st.sampled_from([*NAMES, *REFERENCES, *KINDS, "date", "^a$", "(?=a)", "[", "a$b", r"\1"])
plain = st.one_of(st.none(), st.booleans(), number, word)
anything = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=4,
)


def schema_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return schemas of keywords that mostly have a value of their form."""
    listed = st.lists(inner, max_size=3)
    named = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    forms = {
        "type": st.one_of(st.sampled_from(KINDS), st.lists(st.sampled_from(KINDS), max_size=3)),
        "enum": st.lists(anything, max_size=3),
        "const": anything,
        "required": st.lists(st.sampled_from(NAMES), max_size=2),
        "$ref": st.sampled_from(REFERENCES),
        "pattern": word,
        "format": word,
        "x": named,
        **dict.fromkeys(SCHEMAS, inner),
        **dict.fromkeys(MAPS, named),
        **dict.fromkeys(NUMBERS, number),
        **dict.fromkeys(WORDS, word),
        **dict.fromkeys(OTHERS, anything),
    }
    items = st.one_of(listed, inner)
    forms |= {name: items if name == "items" else listed for name in LISTS}
    keyword = st.sampled_from([*forms]).flatmap(
        lambda name: st.tuples(
            st.just(name), st.one_of(forms[name], forms[name], forms[name], anything)
        )
    )
    return st.lists(keyword, max_size=4).map(dict)


schemas = st.recursive(st.one_of(st.booleans(), anything), schema_of, max_leaves=6)
PATHS = {
    "format": {
        "chat": "response_format",
        "guided_json": "guided_json",
        "completions": "guided_json",
        "responses": "text.format",
        "messages": "output_config.format",
        "gemini": "generationConfig.responseJsonSchema",
        "gemini schema": "generationConfig.responseSchema",
    },
    "call": {
        "chat": "tools[0]",
        "responses": "tools[0]",
        "messages": "tools[0]",
        "gemini": "tools[0]",
    },
}


def refusal(ask: Callable[[], Prompt]) -> tuple[str | None, str] | None:
    """Return the field and the message of a prompt's refusal; None if it is answered."""
    prompt = None
    try:
        prompt = ask()
        harmony_grammar(prompt, {}, None)
        grammar = build_grammar(prompt, HERMES)
        if grammar is not None:
            compile_grammar(grammar, VOCABULARY)
    except RequestRefused as error:
        assert prompt is not None
        return locate_fault(prompt, error.code, error.message)
    except Refusal as error:
        return error.param, f"{error.kind.name} {error.message}".removeprefix("BAD ")
    satisfies('{"a": [1, {"b": null}]}', prompt.output_format)
    return None


@settings(max_examples=examples(160), deadline=None)
@given(schema=schemas)
def test_any_json_is_taken_as_a_schema_or_refused_by_its_path(schema: Any) -> None:
    """A server's error, an endless compilation or words about a grammar would be ours."""
    text = json.dumps(schema)
    asks = {
        "format": formats(text.replace("%", "%%")),
        "call": calls(text),
    }
    for kind, endpoints in asks.items():
        for name, (endpoint, fields) in endpoints.items():
            found = refusal(partial(asked, endpoint, fields))
            if found is not None:
                field, message = found
                assert str(field).startswith(PATHS[kind][name]), (name, found, text)
                assert not any(word in message for word in ("%json", "start:", "INTERNAL"))


SAYS_NOTHING: dict[str, Any] = {
    "a bound beyond a double, of an unused part": {"$defs": {"a": {"minimum": 10**400}}},
    "a number beyond a double, as an example": {"examples": [10**400], "title": 10**400},
    "options of the grammar engine": {"x-guidance": {"lenient": True, "x": 1}},
    "an anchor for other drafts": {"$dynamicAnchor": "meta", "$recursiveAnchor": True},
    "items beside no list of items": {"additionalItems": {"type": "nonsense"}},
    "unused definitions": {"definitions": {"a": {"type": "nonsense"}}},
}


@each_row("strict", [True, False])
@each_row("name", SAYS_NOTHING)
def test_what_constrains_no_value_refuses_none(name: str, strict: bool) -> None:
    """Generators add keywords of their own, and definitions that nothing uses."""
    schema = member({"type": "integer", **SAYS_NOTHING[name]}) | SAYS_NOTHING[name]
    allows = allowed_by(schema, strict=strict)
    assert allows('{"id": 1}')
    assert not allows('{"id": "x"}')


UNKNOWN: dict[str, Any] = {
    "components": {"schemas": {"Id/1": {"type": "integer", "title": None}}},
    "parts": [{"type": "integer"}],
    "id": "https://x.example/y",
}


@each_row("strict", [True, False])
@each_row("number", [7, ID])
@each_row(
    "reference",
    ["#/components/schemas/Id~11", "#/parts/0", "https://x.example/y#/parts/0", "#/%70arts/0"],
)
def test_a_reference_into_an_unknown_keyword_counts(
    reference: str, number: int, strict: bool
) -> None:
    """OpenAPI keeps its schemas under `components`; draft 4 spells the identifier `id`."""
    schema = member({"allOf": [{"$ref": reference}]}) | UNKNOWN
    schema["properties"]["other"] = {"enum": [number]}
    schema["required"] = ["id", "other"]
    allows = allowed_by(schema, strict=strict)
    assert allows(f'{{"id": 1, "other": {number}}}')
    assert not allows(f'{{"id": "x", "other": {number}}}')


WRONG: dict[str, tuple[Any, str]] = {
    "what a reference names": (
        {"$ref": "#/x/a", "x": {"a": {"properties": {"b": {"type": "text"}}}}},
        "x.a.properties.b.type",
    ),
    "a reference to no schema": ({"$ref": "#/title", "title": "a"}, "title"),
    "a reference into a list of values": ({"$ref": "#/enum/0", "enum": [{}]}, "$ref"),
    "a reference to a map": ({"$ref": "#/properties", "properties": {"a": True}}, "$ref"),
    "a format of any type": (member({"format": "color"}), "properties.id.format"),
    "too long a text": ({"minLength": 2**40}, "minLength"),
    "an anchor inside a pattern": (member({"pattern": "a$b"}), "properties.id.pattern"),
    "a multiple of many steps": ({"multipleOf": 1_000_003}, "multipleOf"),
    "a multiple of too many digits": ({"multipleOf": 0.1234567891}, "multipleOf"),
    "names that two patterns match": (
        {"patternProperties": {"a": {}, "b": {}}},
        "patternProperties",
    ),
}


@each_row("name", WRONG)
def test_a_fault_is_named_by_its_path(name: str) -> None:
    """Wherever it stands, in the words of the schema."""
    schema, path = WRONG[name]
    found = refusal(lambda: tool({"type": "object", **schema}, strict=True))
    assert found is not None
    assert found[0] == f"tools[0].function.parameters.{path}"
    assert found[1].startswith(f"{found[0]}: ")


@each_row(
    "schema",
    [
        {"type": "number", "multipleOf": 0.1234567891},
        {"type": "integer", "multipleOf": 1_000_003},
        {"type": "string", "pattern": "a$b"},
        {"type": "string", "pattern": "x(?:^a|b)"},
        {"type": "string", "pattern": "(?P<n>a)(^b)"},
    ],
)
def test_a_loose_schema_drops_what_no_grammar_holds(schema: Any) -> None:
    """A request that did not ask for strictness is answered."""
    assert refusal(lambda: tool(member(schema), strict=False)) is None


@each_row(
    "pattern", ["^a$|^b$", "(^a|b)$", "(?:^a$)|(?:^b$)", "(?i)^a", "(?P<n>^a)", r"\$a", "[$^]a"]
)
def test_an_anchor_at_an_end_of_a_pattern_counts(pattern: str) -> None:
    """Alternatives and groups have ends of their own."""
    allows = allowed_by({"type": "string", "pattern": pattern}, strict=False)
    assert allows('"$a"' if "$a" in pattern or "[" in pattern else '"a"')
    assert not allows('"xyz"')


def test_arguments_that_are_no_object_are_refused_in_words_of_the_schema() -> None:
    """A call has an object; the refusal quotes no grammar."""
    found = refusal(lambda: tool({"allOf": [{"type": "string"}]}, strict=False))
    assert found == (
        "tools[0].function",
        "tools[0].function: no value satisfies all keywords of its schema.",
    )


@each_row("most", [0, 1, 2, 3])
@each_row("heads", [0, 1, 2])
def test_lists_of_ids_have_every_length(most: int, heads: int) -> None:
    """A list of at most one id is one too."""
    schema = {"type": "array", "items": {"const": ID}, "maxItems": most}
    if 0 < heads <= most:
        schema["prefixItems"] = [{"const": ID}] * heads
    allows = allowed_by(schema)
    found = [allows(json.dumps([ID] * length)) for length in range(5)]
    assert found == [length <= most for length in range(5)]
