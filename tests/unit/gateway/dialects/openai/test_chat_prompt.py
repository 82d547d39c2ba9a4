"""Translation of chat messages and functions to a prompt: roles, calls and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.dialects.canonical import (
    OutputFormat,
    Prompt,
    Segment,
    Tool,
    ToolCall,
    ToolChoice,
)
from gateway.errors import Refusal
from tests.tables import each_row
from tests.unit.gateway.dialects.requests import CHAT, HI

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {"unit": {"enum": ["C", "F"]}, "city": {"type": "string"}},
        },
        "strict": True,
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def prompt(messages: Sequence[dict[str, Any]] = (HI,), **fields: Any) -> Prompt:
    return CHAT.parse(messages=messages, **fields).prompts[0]


def refused(messages: Sequence[dict[str, Any]] = (HI,), **fields: Any) -> Refusal:
    return CHAT.refused(messages=messages, **fields)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_refuses_unsupported_part_by_name(kind: str) -> None:
    """The request is valid; the model cannot read the part."""
    part = {"type": kind, kind: {"url": "http://localhost/"}, "cache_control": None}
    refusal = refused([{"role": "user", "content": [{"type": "text", "text": "look"}, part]}])

    assert (refusal.code, refusal.param) == ("unsupported_parameter", "messages[0].content[1]")
    assert f"{kind}: the model reads only text" in refusal.message


def made(call_id: str, name: str = "weather", arguments: str = '{"city":"Ulm"}') -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def calling(*calls: dict[str, Any], content: object = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(call_id: str, text: object = "rain") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def test_calls_and_results_become_segments() -> None:
    """Text, then calls, then each result with its function's name, in the order of the calls."""
    found = prompt(
        [
            HI,
            calling(made("a"), made("b", "clock", ""), content="Let me see."),
            result("b"),
            result("a"),
        ]
    ).segments

    assert found[1:] == (
        Segment("assistant", "Let me see.", "messages[1].content", None, 1),
        Segment(
            "assistant",
            "",
            "messages[1].tool_calls[0]",
            None,
            1,
            call=ToolCall("a", "weather", '{"city":"Ulm"}'),
        ),
        Segment(
            "assistant", "", "messages[1].tool_calls[1]", None, 1, call=ToolCall("b", "clock", "{}")
        ),
        Segment("tool", "rain", "messages[3].content", "weather", 3, answers="a"),
        Segment("tool", "rain", "messages[2].content", "clock", 2, answers="b"),
    )


def test_result_follows_its_call_at_any_distance() -> None:
    """A template would refuse it elsewhere, or the model would read it as another call's."""
    between = [HI, {"role": "assistant", "content": "Wait."}, calling(made("b")), HI]
    found = prompt([calling(made("a")), *between, result("b", "two"), result("a", "one")]).segments

    assert [(s.role, s.text) for s in found] == [
        ("assistant", ""),
        ("tool", "one"),
        ("user", "hi"),
        ("assistant", "Wait."),
        ("assistant", ""),
        ("tool", "two"),
        ("user", "hi"),
    ]


@pytest.mark.parametrize("content", [None, "", []])
def test_assistant_with_only_calls_has_no_text(content: object) -> None:
    """Clients write the missing text in several ways."""
    found = prompt([HI, calling(made("a"), content=content), result("a")]).segments

    assert [(s.role, s.call is not None) for s in found[1:]] == [
        ("assistant", True),
        ("tool", False),
    ]


def test_arguments_keep_key_order_and_lose_spaces() -> None:
    """One call must give the same tokens from every client."""
    spaced = '{ "z": 1,\n "a": {"y": [2.5, null], "b": "\\u00e4"} }'
    (_, call, _) = prompt([HI, calling(made("a", arguments=spaced)), result("a")]).segments

    assert call.call is not None
    assert call.call.arguments == '{"z":1,"a":{"y":[2.5,null],"b":"ä"}}'


@each_row("arguments", ["[1]", '{"x":', "[" * 10_000, "  "])
def test_arguments_that_are_no_object_stay_as_they_are(arguments: str) -> None:
    """A model wrote them, or was cut off; its client sends them back with what went wrong."""
    (_, call, _) = prompt([HI, calling(made("a", arguments=arguments)), result("a")]).segments

    assert call.call is not None
    assert call.call.arguments == arguments


def test_answered_call_id_may_be_reused() -> None:
    """Some clients count from call_0 in every turn."""
    messages = [HI, calling(made("a")), result("a"), calling(made("a", "clock")), result("a")]

    assert [s.name for s in prompt(messages).segments if s.role == "tool"] == ["weather", "clock"]


def test_refusal_is_assistant_text() -> None:
    """Clients send answers back in every shape they came in."""
    parts = [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": " Sorry."}]
    listed = prompt([HI, {"role": "assistant", "content": parts}, HI]).segments
    segments = prompt([HI, {"role": "assistant", "content": None, "refusal": "No."}, HI]).segments

    assert [s.text for s in listed[1:3]] == ["No.", " Sorry."]
    assert segments[1].text == "No."


@each_row(
    ("messages", "param", "says"),
    [
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id", "id of the call"),
        ([HI, result("a")], "messages[1].tool_call_id", "unknown call id 'a'"),
        ([HI, calling(made("a")), result("b")], "messages[2].tool_call_id", "'b'"),
        ([HI, calling(made("a")), HI], "messages[2]", "'a'"),
        ([HI, calling(made("a")), HI, result("b")], "messages[2]", "'a'"),
        ([HI, result("a"), calling(made("a"))], "messages[1].tool_call_id", "'a'"),
        ([HI, calling(made("a"))], "messages[1]", "'a'"),
        ([HI, calling(made("a"), made("b")), result("a"), HI], "messages[3]", "'b'"),
        (
            [HI, calling(made("a"), made("a")), result("a")],
            "messages[1].tool_calls[1].id",
            "already pending",
        ),
        (
            [HI, calling(made("a", "{{ x }}")), result("a")],
            "messages[1].tool_calls[0].function.name",
            "a-zA-Z0-9_-",
        ),
        ([{**HI, "tool_calls": [made("a")]}], "messages[0].tool_calls", "no tool calls"),
        (
            [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}],
            "messages[0].content[0].type",
            "holds no refusal",
        ),
        ([{"role": "function", "name": "f", "content": "x"}], "messages[0].role", "function"),
    ],
)
def test_refuses_inconsistent_history(
    messages: list[dict[str, Any]], param: str, says: str
) -> None:
    """A template would render it, and the model would read nonsense."""
    refusal = refused(messages)

    assert refusal.param == param
    assert says in refusal.message


def test_function_schema_keeps_its_key_order() -> None:
    """Moved keys are other tokens and miss the cache."""
    found = prompt(tools=[WEATHER, CLOCK]).tools

    assert found == (
        Tool(
            "weather",
            "Of a city",
            '{"type":"object","required":["city"],"properties":{"unit":{"enum":["C","F"]},'
            '"city":{"type":"string"}}}',
            "tools[0].function",
            True,
        ),
        Tool("clock", "", '{"type":"object","properties":{}}', "tools[1].function", False),
    )


@each_row(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        (
            {"type": "function", "function": {"name": "clock"}},
            ToolChoice("required", ("clock",)),
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "clock"}}],
                },
            },
            ToolChoice("auto", ("clock",)),
        ),
    ],
)
def test_tool_choice_reaches_the_prompt(choice: object, expected: ToolChoice) -> None:
    """Five forms on the wire, one canonical form."""
    assert prompt(tools=[WEATHER, CLOCK], tool_choice=choice).tool_choice == expected


def test_parallel_calls_are_the_default() -> None:
    """OpenAI has the same default."""
    assert prompt(tools=[CLOCK]).tool_choice.parallel
    assert not prompt(tools=[CLOCK], parallel_tool_calls=False).tool_choice.parallel


@each_row(
    ("fields", "param", "says"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is required"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function", "declared twice"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "a-zA-Z0-9_-",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "x" * 65}}]},
            "tools[0].function.name",
            "<= 64; received length 65",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}]},
            "tools[0].function.parameters",
            "object",
        ),
        ({"tools": [CLOCK] * 129}, "tools", "<= 128; received length 129"),
        ({"tool_choice": "required"}, "tool_choice", "declares none in tools"),
        ({"tool_choice": "any"}, "tool_choice", "any"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "'x'",
        ),
        ({"tools": [CLOCK], "tool_choice": {"type": "custom"}}, "tool_choice", "allowed_tools"),
        (
            {
                "tools": [CLOCK],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "mcp"}]},
                },
            },
            "tool_choice.allowed_tools.tools[0]",
            "function",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "tools"),
        ({"function_call": "auto"}, "function_call", "tools"),
    ],
)
def test_refuses_invalid_tool_with_path(fields: dict[str, Any], param: str, says: str) -> None:
    """The message has the expected value."""
    refusal = refused(**fields)

    assert refusal.param == param
    assert says in refusal.message


def test_response_format_reaches_the_prompt() -> None:
    """The schema keeps its key order, and the answer's keys follow it."""
    schema = {"type": "object", "properties": {"z": {}, "a": {}}, "required": ["z"]}
    named = {"name": "point", "schema": schema, "strict": True}

    assert prompt().output_format == OutputFormat()
    assert prompt(response_format={"type": "text"}).output_format == OutputFormat()
    assert (
        prompt(response_format={"type": "text", "json_schema": None}).output_format.kind == "text"
    )
    assert prompt(response_format={"type": "json_object"}).output_format.kind == "json_object"
    assert prompt(
        response_format={"type": "json_object", "schema": schema, "json_schema": None}
    ).output_format == OutputFormat(
        "json_schema",
        '{"type":"object","properties":{"z":{},"a":{}},"required":["z"]}',
        "response_format.schema",
        strict=False,
    )
    assert prompt(
        response_format={"type": "json_schema", "json_schema": named}
    ).output_format == OutputFormat(
        "json_schema",
        '{"type":"object","properties":{"z":{},"a":{}},"required":["z"]}',
        "response_format.json_schema.schema",
    )


@each_row(
    ("form", "param"),
    [
        ({"type": "json_schema"}, "response_format"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema"),
        (
            {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}},
            "response_format.json_schema.name",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": []}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_refuses_invalid_response_format_with_path(form: dict[str, Any], param: str) -> None:
    """The message names a missing field."""
    assert (refused(response_format=form).param or "").startswith(param)
