"""Schema keywords that no grammar supports, in each dialect: strict schemas are refused by name;
other schemas ignore them during decoding and are checked afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tables import each_row
from tests.unit.gateway.gateway_fixture import GatewayFixture

pytestmark = pytest.mark.usefixtures("room_for_tools")

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GEMINI = "/v1beta/models/{model}:generateContent"
USER: Any = [{"role": "user", "content": "hello"}]

TWICE: Any = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
    "required": ["a"],
    "additionalProperties": False,
}
SAID = '{"a": [1, 1]}'
CALLED = f'<tool_call>\n{{"name": "f", "arguments": {SAID}}}\n</tool_call>'


def chat(**more: object) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": USER, "max_tokens": 200, **more}


def chat_format(strict: bool | None, schema: Any = TWICE) -> tuple[str, dict[str, Any]]:
    form = {"name": "n", "schema": schema, "strict": strict}
    return chat(response_format={"type": "json_schema", "json_schema": form})


def chat_call(strict: bool | None, schema: Any = TWICE) -> tuple[str, dict[str, Any]]:
    function = {"name": "f", "parameters": schema, "strict": strict}
    tools = [{"type": "function", "function": function}]
    return chat(tools=tools, tool_choice="required")


def responses_format(strict: bool | None, schema: Any = TWICE) -> tuple[str, dict[str, Any]]:
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": strict}
    return RESPONSES, {"input": "hello", "max_output_tokens": 200, "text": {"format": form}}


def messages(**more: object) -> tuple[str, dict[str, Any]]:
    return MESSAGES, {"messages": USER, "max_tokens": 200, **more}


def messages_call(strict: bool, schema: Any = TWICE) -> tuple[str, dict[str, Any]]:
    tool = {"name": "f", "input_schema": schema, "strict": strict}
    return messages(tools=[tool], tool_choice={"type": "any"})


def gemini(**config: object) -> tuple[str, dict[str, Any]]:
    settings = {"maxOutputTokens": 200, "responseMimeType": "application/json", **config}
    return GEMINI, {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": settings}


STRICT = {
    "response_format.json_schema.schema": chat_format(True),
    "tools[0]": chat_call(True),
    "text.format.schema": responses_format(True),
    "output_config.format.schema": messages(
        output_config={"format": {"type": "json_schema", "schema": TWICE}}
    ),
    "tools[0] (Anthropic)": messages_call(True),
    "generationConfig.responseSchema": gemini(responseSchema=TWICE),
}


@pytest.mark.parametrize("field", STRICT)
async def test_strict_schema_is_refused_if_unsupported(gateway: GatewayFixture, field: str) -> None:
    """As hosted APIs do: with the keyword and the field; nothing is computed or charged."""
    path, body = STRICT[field]
    path = path.format(model=gateway.model)

    status, said, _ = await gateway.ask(path, {"model": gateway.model, **body})

    assert status == 400, said
    assert "uniqueItems" in said["error"]["message"]
    assert field.split()[0] in str(said)
    assert all(output == 0 for *_, output in gateway.entries())
    await gateway.check_quiet()


def member(schema: Any, *names: str) -> dict[str, Any]:
    """Return a schema of an object that requires one member, of such objects in turn."""
    for name in reversed(names):
        schema = {"type": "object", "properties": {name: schema}, "required": [name]}
    return dict(schema)


FAULTS: dict[str, tuple[Any, str, str]] = {
    "a pattern": (
        member({"type": "string", "pattern": "(["}, "a", "b"),
        "properties.a.properties.b.pattern",
        "invalid pattern '([': unclosed character class",
    ),
    "the later of two patterns": (
        {
            "properties": {"a": {"pattern": "x"}, "b": {"type": "string", "pattern": "a{3,1}"}},
            "type": "object",
        },
        "properties.b.pattern",
        "invalid repetition count range",
    ),
    "a name's pattern": (
        {"type": "object", "patternProperties": {"x(": {"type": "string"}}},
        "patternProperties",
        "unclosed group",
    ),
    "lookaround": (
        member({"type": "string", "pattern": "(?<=a)b"}, "a", "b"),
        "properties.a.properties.b.pattern",
        "lookaround",
    ),
    "values of another type": (
        member({"type": "string", "enum": [1, 2]}, "a", "b"),
        "properties.a.properties.b.enum",
        "no value of it satisfies the keywords beside it",
    ),
    "fewer items than required": (
        member({"type": "array", "items": {}, "minItems": 3, "maxItems": 1}, "a"),
        "properties.a.minItems",
        "invalid value 3; expected at most maxItems, 1",
    ),
    "a member that may not be": (member(False, "a"), "properties.a", "one is required"),
    "items of a reference": (
        member({"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/one"}}, "a")
        | {"$defs": {"one": {"type": "integer", "const": "x"}}},
        "$defs.one.const",
        "no value of it satisfies",
    ),
    "no alternative": (member({"anyOf": []}, "a"), "properties.a.anyOf", "the list is empty"),
    "alternatives without a value": (
        member({"anyOf": [{"type": "string", "enum": [1]}, False]}, "a"),
        "properties.a.anyOf.0.enum",
        "no value of it satisfies",
    ),
    "alternatives that overlap": (
        member({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "a"),
        "properties.a.oneOf",
        "write anyOf",
    ),
    "a required name that is no property": (
        {"type": "object", "properties": {}, "required": ["b"], "additionalProperties": False},
        "required",
        "'b' is no property",
    ),
    "what only a grammar shows": (
        member({"type": "string", "pattern": "^a{10}$", "maxLength": 3}, "a"),
        "properties.a",
        "no value satisfies all keywords",
    ),
}
PLACES = {
    "chat": ("response_format.json_schema.schema", chat_format),
    "chat call": ("tools[0].function.parameters", chat_call),
    "responses": ("text.format.schema", responses_format),
    "messages call": ("tools[0].input_schema", messages_call),
}


@each_row("place", PLACES)
@each_row(("schema", "steps", "problem"), FAULTS.values())
async def test_a_refused_schema_names_the_keyword_inside(
    gateway: GatewayFixture, place: str, schema: Any, steps: str, problem: str
) -> None:
    """A generated schema has hundreds of them; the engine's words have no path."""
    field, make = PLACES[place]
    path, body = make(True, schema)

    status, said, _ = await gateway.ask(path, {"model": gateway.model, **body})

    told = said["error"]["message"]
    assert (status, told.startswith(f"{field}.{steps}: ")) == (400, True), told
    assert problem in told
    assert said["error"].get("param") in (None, f"{field}.{steps}")
    await gateway.check_quiet()


@pytest.mark.parametrize(
    ("asked", "spoken"),
    [
        (chat_format(None), SAID),
        (chat_format(False), SAID),
        (chat_call(None), CALLED),
        (responses_format(None), SAID),
        (messages_call(False), CALLED),
        (gemini(responseJsonSchema=TWICE), SAID),
    ],
    ids=["chat", "chat false", "chat call", "responses", "messages call", "gemini"],
)
async def test_lenient_schema_enforces_the_supported_rest(
    gateway: GatewayFixture, asked: tuple[str, dict[str, Any]], spoken: str
) -> None:
    """The answer is sent unchanged; violations of a format are counted."""
    path, body = asked
    gateway.say(spoken)

    status, said, _ = await gateway.ask(
        path.format(model=gateway.model), {"model": gateway.model, **body}
    )

    assert status == 200, said
    assert "1, 1" in str(said)
    metrics = gateway.gateway.context.metrics.exposition().decode()
    assert ("output_format_violations_total 1.0" in metrics) == (spoken == SAID)
    await gateway.check_quiet()
