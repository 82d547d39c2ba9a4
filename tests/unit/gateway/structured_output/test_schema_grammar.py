"""Numbers of a schema to the last digit, and keywords as generators write them, tried on the
engine's own matcher."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from engine.errors import RequestRefused
from engine.grammar.grammar import GrammarLimits, Vocabulary, compile_grammar
from gateway.dialects.canonical import OutputFormat, Prompt, Tool, ToolChoice
from gateway.errors import Refusal
from gateway.structured_output.grammars import build_grammar
from gateway.structured_output.tool_styles import HERMES
from tests.examples import examples
from tests.tables import each_row
from tests.unit.gateway.dialects.requests import (
    CHAT,
    COMPLETIONS,
    GEMINI,
    MESSAGES,
    RESPONSES,
    Endpoint,
)

ID = 2512292042121000001
INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
UINT64 = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
DECIMAL = "0.1234567890123456789"
VOCABULARY = Vocabulary(LLTokenizer("byte"), GrammarLimits())

Allows = Callable[[str], bool]


def matcher_of(prompt: Prompt) -> Allows:
    """Return whether a text may be the whole answer."""
    grammar = build_grammar(prompt, HERMES)
    assert grammar is not None
    compiled = compile_grammar(grammar, VOCABULARY)

    def allows(text: str) -> bool:
        matcher = compiled.matcher.fork()
        tokens = VOCABULARY.tokenizer.tokenize_str(text)
        return all(map(matcher.consume, tokens)) and matcher.is_accepting

    return allows


def allowed_by(schema: object, *, strict: bool = True) -> Allows:
    """Return whether a text may be the whole answer under a format. `schema`: or its text."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return matcher_of(Prompt(output_format=OutputFormat("json_schema", text, "f", strict)))


def member(schema: object) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"id": schema},
        "required": ["id"],
        "additionalProperties": False,
    }


@each_row("strict", [True, False])
@each_row(
    "schema",
    [
        {"const": ID},
        {"enum": [ID]},
        {"type": "integer", "enum": [ID, "other"]},
        {"type": "integer", "minimum": ID, "maximum": ID},
        {"type": "integer", "exclusiveMinimum": ID - 1, "exclusiveMaximum": ID + 1},
        {"type": ["integer", "null"], "minimum": ID, "maximum": ID},
        {"anyOf": [{"const": ID}, {"type": "null"}]},
        {"type": "integer", "anyOf": [{"minimum": ID, "maximum": ID}]},
        {"allOf": [{"const": ID}]},
    ],
)
def test_an_integer_beyond_a_double_keeps_its_digits(schema: Any, strict: bool) -> None:
    """Ids of 19 digits are common, and a neighbour names something else."""
    allows = allowed_by(member(schema), strict=strict)

    assert allows(f'{{"id": {ID}}}')
    assert not any(allows(f'{{"id": {other}}}') for other in (ID - 1, ID + 1, int(float(ID))))


@each_row(
    "schema",
    [
        {"type": "array", "items": {"const": ID}, "minItems": 1, "maxItems": 2},
        {"type": "array", "prefixItems": [{"const": ID}], "minItems": 1, "items": False},
        {"$ref": "#/$defs/ids", "$defs": {"ids": {"type": "array", "items": {"enum": [ID]}}}},
        {"enum": [[ID]]},
    ],
)
def test_digits_are_kept_inside_lists_and_definitions(schema: Any) -> None:
    """Wherever a schema may stand."""
    allows = allowed_by(schema)

    assert allows(f"[{ID}]")
    assert not allows(f"[{int(float(ID))}]")


REFERENCES = {
    "of a definition's part": ("#/$defs/Row/properties/id", {"Row": {"properties": {"id": ...}}}),
    "percent-encoded": ("#/$defs/Id%5Bint%5D", {"Id[int]": ...}),
    "anchor": ("#the-id", {"Id": {"$anchor": "the-id", "allOf": [...]}}),
    "behind the schema's identifier": ("https://example.com/row#/$defs/Id", {"Id": ...}),
}


@each_row("strict", [True, False])
@each_row("name", REFERENCES)
def test_digits_are_kept_behind_every_reference(name: str, strict: bool) -> None:
    """Generators name a definition's part, and percent-encode the names of generic classes."""
    reference, definitions = REFERENCES[name]
    text = json.dumps(definitions, default=lambda _: {"const": ID})
    schema = {
        "$id": "https://example.com/row",
        "type": "object",
        "properties": {"id": {"$ref": reference}},
        "required": ["id"],
        "additionalProperties": False,
        "$defs": json.loads(text),
    }
    allows = allowed_by(schema, strict=strict)
    assert allows(f'{{"id": {ID}}}')
    assert not allows(f'{{"id": {ID - 1}}}')


def test_a_schema_beside_such_a_number_keeps_its_references() -> None:
    """The parts that stay JSON Schema are cut out of the schema that their pointers begin at."""
    schema = {
        "type": "object",
        "properties": {
            "id": {"const": ID},
            "color": {"enum": ["red"]},
            "all": {"type": "array", "items": {"$ref": "#/properties/color"}, "minItems": 1},
            "more": {"$ref": "#/$defs/More"},
        },
        "required": ["id", "color", "all", "more"],
        "additionalProperties": False,
        "$defs": {
            "More": {
                "type": "object",
                "properties": {"enum": {"$ref": "#/properties/color"}, "$ref": {"const": 4}},
                "required": ["enum", "$ref"],
                "additionalProperties": False,
            }
        },
    }
    allows = allowed_by(schema)
    more = '{"enum":"red","$ref":4}'
    assert allows(f'{{"id":{ID},"color":"red","all":["red"],"more":{more}}}')
    assert not allows(f'{{"id":{ID},"color":"red","all":["blue"],"more":{more}}}')
    assert not allows(f'{{"id":{ID},"color":"red","all":["red"],"more":{more[:-2]}5}}}}')


@pytest.mark.parametrize("draft", ["http://json-schema.org/draft-04/schema#", "https://x.example"])
def test_a_keyword_counts_under_every_draft(draft: str) -> None:
    """Draft 4 has no `const`; hosted APIs read the same keywords, whichever draft is named."""
    inner = {"$schema": draft, "const": 1}
    schema = {"$schema": draft, "properties": {"$schema": inner}, "required": ["$schema"]}
    allows = allowed_by({**schema, "type": "object"})
    assert allows('{"$schema": 1}')
    assert not allows('{"$schema": 2}')


def test_items_that_need_not_differ_are_strict_too() -> None:
    """The keyword constrains nothing then."""
    assert allowed_by({"type": "array", "items": {"const": 1}, "uniqueItems": False})("[1, 1]")


def test_a_tools_schema_is_refused_in_words_of_the_schema() -> None:
    """The grammar around it is the gateway's: its client wrote none of its lines."""
    schema = {"properties": {"a": {"type": "string", "const": 1}}, "required": ["a"]}
    grammar = build_grammar(tool(schema, strict=True), HERMES)
    assert grammar is not None
    with pytest.raises(RequestRefused, match=r"^The JSON schema cannot be used: [^|%]*$"):
        compile_grammar(grammar, VOCABULARY)


def test_a_decimal_keeps_its_digits() -> None:
    """A double has 17 of them."""
    allows = allowed_by(f'{{"enum": [{DECIMAL}, 2.5]}}')
    least = allowed_by(f'{{"type": "number", "minimum": {DECIMAL}}}')

    assert [allows(text) for text in (DECIMAL, "2.5", DECIMAL[:-1])] == [True, True, False]
    assert least(DECIMAL)
    assert not least(DECIMAL[:-1])


@each_row("strict", [True, False])
@each_row(
    ("schema", "least", "most"),
    [
        (INT64, -(2**63), 2**63 - 1),
        (UINT64, 0, 2**64 - 1),
        ({"type": "integer", "minimum": -(2**63)}, -(2**63), None),
        ({"type": "integer", "minimum": -(2**63) + 1}, -(2**63) + 1, None),
        ({"type": "integer", "maximum": 2**64 - 1}, None, 2**64 - 1),
        ({"type": "integer", "exclusiveMaximum": 2**63}, None, 2**63 - 1),
        ({"type": "integer", "exclusiveMinimum": -(2**63) - 1}, -(2**63), None),
        ({"type": "integer", "minimum": 2**63 - 1, "maximum": 2**63 - 1}, 2**63 - 1, 2**63 - 1),
        ({"type": "integer", "minimum": -(2**60)}, -(2**60), None),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 1e18}, 2**53 + 1, 10**18),
    ],
)
def test_bounds_of_64_bits_are_exact(
    schema: Any, least: int | None, most: int | None, strict: bool
) -> None:
    """Generators write them for each integer, and one bound alone."""
    allows = allowed_by(member(schema), strict=strict)
    inside = [bound for bound in (least, most) if bound is not None]
    outside = [] if least is None else [least - 1, least - 10**21]
    outside += [] if most is None else [most + 1, most + 10**21]

    assert all(allows(f'{{"id": {number}}}') for number in inside)
    assert not any(allows(f'{{"id": {number}}}') for number in outside)


@pytest.mark.parametrize("strict", [True, False])
def test_bounds_of_a_double_are_taken(strict: bool) -> None:
    """What no number in an answer reaches must not refuse the request."""
    largest = 1.7976931348623157e308
    allows = allowed_by({"type": "number", "minimum": -largest, "maximum": largest}, strict=strict)

    assert all(map(allows, ("0", "-1.5", "12345678901234567890.25")))


def tool(parameters: object, *, strict: bool) -> Prompt:
    declared = Tool("f", "", json.dumps(parameters), "tools[0].function", strict)
    return Prompt(tools=(declared,), tool_choice=ToolChoice("required"))


@pytest.mark.parametrize("strict", [True, False])
def test_arguments_of_calls_keep_digits(strict: bool) -> None:
    """Strict tools and forced calls are held to the same schemas as formats."""
    allows = matcher_of(tool(member({"enum": [ID]}), strict=strict))
    text = '<tool_call>\n{"name": "f", "arguments": {"id": %d}}\n</tool_call>'

    assert allows(text % ID)
    assert not allows(text % int(float(ID)))


@each_row("strict", [True, False])
@each_row(
    "schema",
    [
        {"type": "object", "properties": None},
        {"type": "object", "properties": {}, "required": None, "additionalProperties": None},
        {"type": "object", "properties": {"a": {"type": "object", "required": None}}},
        {"properties": {"a": {"enum": None, "minimum": None, "pattern": None, "anyOf": None}}},
        {"type": "object", "properties": {"a": None}},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"items": None}}},
        {"type": None, "description": None, "$defs": None, "format": None, "$ref": None},
        {"type": "object", "additionalProperties": {"properties": None, "allOf": None}},
    ],
)
def test_a_keyword_that_is_null_is_absent(schema: Any, strict: bool) -> None:
    """Go writes an empty map or list so."""
    assert allowed_by(schema, strict=strict)('{"a": {"b": 1}}')
    assert matcher_of(tool(schema, strict=strict))(
        '<tool_call>\n{"name": "f", "arguments": {"a": {"b": 1}}}\n</tool_call>'
    )


def test_null_stays_a_value() -> None:
    """As a constant, and in a list of values."""
    assert allowed_by({"const": None})("null")
    assert not allowed_by({"const": None})("1")
    assert allowed_by({"enum": [None, ID]})("null")


@pytest.mark.parametrize("name", ["maxLength", "maxItems", "maxProperties"])
def test_a_count_of_64_bits_is_no_bound(name: str) -> None:
    """No answer is so long."""
    allows = allowed_by({name: 2**64 - 1})

    assert all(map(allows, ('"text"', "[1]", '{"a": 1}')))


@each_row(
    ("schema", "path"),
    [
        ({"minimum": "5"}, "minimum"),
        ({"minimum": 5, "maximum": 3}, "minimum"),
        ({"properties": []}, "properties"),
        ({"required": True}, "required"),
        ({"type": "text"}, "type"),
        ({"enum": "a"}, "enum"),
        ({"items": 3}, "items"),
        ({"anyOf": {}}, "anyOf"),
        ({"minLength": 1.5}, "minLength"),
        ({"not": {"type": "null"}}, "not"),
        ({"multipleOf": 3, "minimum": ID}, "multipleOf"),
        ({"const": ID, "type": "string"}, "const"),
        ({"oneOf": [{"const": ID}, {"type": "number"}]}, "oneOf"),
        ({"$ref": "#/$defs/none"}, "$ref"),
        ({"$ref": "#none"}, "$ref"),
        ({"$ref": "https://example.com/row.json"}, "$ref"),
        ({"type": "string", "format": "color"}, "format"),
        ({"$ref": "#/properties/id"}, "$ref"),
    ],
)
def test_an_error_names_the_clients_keyword(schema: Any, path: str) -> None:
    """Its whole path, and no word of the grammar behind it."""
    with pytest.raises(Refusal) as caught:
        matcher_of(tool(member(schema), strict=True))

    whole = f"tools[0].function.parameters.properties.id.{path}"
    assert caught.value.param == whole
    assert caught.value.message.startswith(f"{whole}: ")


def test_a_long_list_of_ids_is_one_choice() -> None:
    """Each value is a place where the text may be, unless all are one terminal."""
    allows = allowed_by({"type": "integer", "enum": [ID + 2 * number for number in range(2_000)]})

    assert allows(str(ID + 2_000))
    assert not allows(str(ID + 2_001))


@pytest.mark.parametrize("strict", [True, False])
def test_many_members_of_64_bits_fit(strict: bool) -> None:
    """Generators write the same bounds for every field."""
    members = {f"field_{number}": INT64 for number in range(100)}
    schema = {"type": "object", "properties": members, "required": list(members)}

    assert allowed_by(schema, strict=strict)(json.dumps(dict.fromkeys(members, -(2**63))))


CHAIN: dict[str, Any] = {
    f"d{number}": {"properties": {"a": {"$ref": f"#/$defs/d{number + 1}"}}}
    for number in range(3_000)
}


@each_row("strict", [True, False])
@each_row(
    "schema",
    [
        {"$ref": "#/$defs/d0", "$defs": {**CHAIN, "d3000": {"const": ID}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}, "b": {"const": ID}}},
        {"const": ID, "$ref": "#"},
        {"enum": [ID], "anyOf": [{"$ref": "#/anyOf/0"}]},
        {"enum": [ID] * 20_000, "contains": 3},
    ],
)
def test_a_hostile_schema_is_answered_or_refused(schema: Any, strict: bool) -> None:
    """Nothing but a refusal may come out: any other error would be the server's."""
    with contextlib.suppress(Refusal, RequestRefused):
        allowed_by(schema, strict=strict)("1")


def test_a_loose_schema_drops_a_number_that_no_grammar_holds() -> None:
    """A request that did not ask for strictness is answered."""
    schema = {"type": "integer", "multipleOf": 3, "minimum": ID, "title": "t"}

    assert allowed_by(member(schema), strict=False)('{"id": 9}')


big = st.one_of(
    st.integers(-(2**66), 2**66),
    st.sampled_from([0, 1, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, ID]),
)
number = st.one_of(
    st.builds(lambda value: {"const": value}, big),
    st.builds(lambda values: {"enum": values}, st.lists(big, min_size=1, max_size=3)),
    st.builds(
        lambda low, width: {"type": "integer", "minimum": low, "maximum": low + width},
        big,
        st.integers(0, 2**40),
    ),
    st.builds(lambda low: {"type": "integer", "exclusiveMinimum": low}, big),
    st.builds(lambda high: {"type": "number", "maximum": high}, big),
    st.just({"type": "boolean"}),
)
schemas = st.recursive(
    number,
    lambda inner: st.one_of(
        st.builds(
            lambda members, required, others: {
                "type": "object",
                "properties": members,
                "required": [name for name in members if name in required],
                "additionalProperties": others,
            },
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.sets(st.sampled_from("abc")),
            st.one_of(st.booleans(), inner),
        ),
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=5,
)


def near(schema: Any, rng: random.Random) -> Any:
    """Return a value that satisfies the schema, or nearly does."""
    if not isinstance(schema, dict):
        return rng.choice([1, True, "x"])
    if "anyOf" in schema:
        return near(rng.choice(schema["anyOf"]), rng)
    kind = schema.get("type")
    if kind == "object":
        known = {name: near(one, rng) for name, one in schema["properties"].items()}
        names = [name for name in known if name in schema["required"] or rng.random() < 0.5]
        value = {name: known[name] for name in names}
        if rng.random() < 0.3:
            value["z"] = near(schema["additionalProperties"], rng)
        return value
    if kind == "array":
        return [near(schema["items"], rng) for _ in range(rng.randrange(4))]
    if kind == "boolean":
        return rng.choice([True, False, 0])
    bounds = [value for value in schema.values() if isinstance(value, int)]
    return rng.choice([*bounds, *schema.get("enum", ())]) + rng.choice([0, 0, 1, -1, 2**30])


@settings(max_examples=examples(200), deadline=None)
@given(schema=schemas, seed=st.integers(0, 10_000))
def test_a_grammar_allows_what_the_schema_allows(schema: Any, seed: int) -> None:
    """Random schemas with large numbers, against a validator that counts in whole numbers."""
    rng = random.Random(seed)
    validator = jsonschema.Draft202012Validator(schema)
    allows = allowed_by(schema)

    for _ in range(4):
        value = near(schema, rng)
        assert allows(json.dumps(value)) == validator.is_valid(value), (schema, value)


@settings(max_examples=examples(200), deadline=None)
@given(
    bound=st.decimals(-(10**20), 10**20, places=12),
    name=st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
    shift=st.sampled_from(["0", "1", "-1", "1e-12", "-1e-12", "1e-7", "-1e19"]),
)
def test_bounds_with_many_digits_are_exact(bound: Decimal, name: str, shift: str) -> None:
    """The text on each side of a bound, and the bound itself."""
    value = bound + Decimal(shift)
    holds = {
        "minimum": value >= bound,
        "exclusiveMinimum": value > bound,
        "maximum": value <= bound,
        "exclusiveMaximum": value < bound,
    }[name]
    schema = f'{{"type": "number", "{name}": {bound:f}}}'

    assert allowed_by(schema)(f"{value.normalize():f}") == holds


def formats(schema: str) -> dict[str, tuple[Endpoint, str]]:
    """Return for each dialect the JSON text of fields that ask for a schema."""
    gemini = '"generationConfig": {"responseMimeType": "application/json", "%s": ' + schema + "}"
    strict = f'{{"name": "x", "strict": true, "schema": {schema}}}'
    return {
        "chat": (CHAT, f'"response_format": {{"type": "json_schema", "json_schema": {strict}}}'),
        "guided_json": (CHAT, f'"guided_json": {schema}'),
        "completions": (COMPLETIONS, f'"guided_json": {json.dumps(schema)}'),
        "responses": (
            RESPONSES,
            f'"text": {{"format": {{"type": "json_schema", "name": "x", "schema": {schema}}}}}',
        ),
        "messages": (
            MESSAGES,
            f'"output_config": {{"format": {{"type": "json_schema", "schema": {schema}}}}}',
        ),
        "gemini": (GEMINI, gemini % "responseJsonSchema"),
        "gemini schema": (GEMINI, gemini % "responseSchema"),
    }


def calls(schema: str) -> dict[str, tuple[Endpoint, str]]:
    """Return for each dialect the JSON text of fields that force a call of a tool with a schema."""
    function = f'{{"name": "f", "parameters": {schema}}}'
    mode = '"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}'
    return {
        "chat": (
            CHAT,
            f'"tools": [{{"type": "function", "function": {function}}}], "tool_choice": "required"',
        ),
        "responses": (
            RESPONSES,
            f'"tools": [{{"type": "function", "name": "f", "parameters": {schema}}}],'
            ' "tool_choice": {"type": "function", "name": "f"}',
        ),
        "messages": (
            MESSAGES,
            f'"tools": [{{"name": "f", "strict": true, "input_schema": {schema}}}],'
            ' "tool_choice": {"type": "any"}',
        ),
        "gemini": (GEMINI, f'"tools": [{{"functionDeclarations": [{function}]}}], {mode}'),
    }


def asked(endpoint: Endpoint, fields: str) -> Prompt:
    """Return the prompt of the smallest request with more fields, as the client wrote them."""
    smallest = json.dumps(endpoint.smallest)
    return endpoint.parse_body(f"{smallest[:-1]}, {fields}}}".encode()).prompts[0]


@each_row("digits", [str(ID), DECIMAL, str(2**64 - 1), str(10**25 + 1)])
@each_row("name", [*formats("{}")])
def test_digits_of_a_format_survive_from_the_body_to_the_grammar(name: str, digits: str) -> None:
    """In every dialect: reading JSON as doubles on the way would lose them."""
    schema = f'{{"type": "object", "properties": {{"id": {{"enum": [{digits}]}}}},'
    allows = matcher_of(asked(*formats(f'{schema} "required": ["id"]}}')[name]))

    assert allows(f'{{"id": {digits}}}')
    assert not allows(f'{{"id": {digits[:-1]}}}')
    assert not allows(f'{{"id": {json.dumps(float(digits))}}}')


@each_row("digits", [str(ID), DECIMAL])
@each_row("name", [*calls("{}")])
def test_digits_of_a_tool_survive_from_the_body_to_the_grammar(name: str, digits: str) -> None:
    """As those of a format."""
    schema = f'{{"type": "object", "properties": {{"id": {{"enum": [{digits}]}}}},'
    allows = matcher_of(asked(*calls(f'{schema} "required": ["id"]}}')[name]))
    text = '<tool_call>\n{"name": "f", "arguments": {"id": %s}}\n</tool_call>'

    assert allows(text % digits)
    assert not allows(text % json.dumps(float(digits)))


@each_row(
    ("name", "path"),
    [
        ("chat", "tools[0].function.parameters"),
        ("responses", "tools[0].parameters"),
        ("messages", "tools[0].input_schema"),
        ("gemini", "tools[0].functionDeclarations[0].parameters"),
    ],
)
def test_an_error_has_the_dialects_own_path(name: str, path: str) -> None:
    """The client looks for the field in its own request."""
    schema = '{"type": "object", "properties": {"x": {"type": "integer", "minimum": "low"}}}'
    with pytest.raises(Refusal) as caught:
        matcher_of(asked(*calls(schema)[name]))

    assert caught.value.param == f"{path}.properties.x.minimum"
