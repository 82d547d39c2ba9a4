"""Translation of Messages to a prompt: its segments, their order, and breakpoints."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gateway.dialects.anthropic.prompt import BILLING_HEADER, REFUSED_BLOCKS
from gateway.dialects.canonical import Prompt, Segment, Tool, ToolCall, ToolChoice
from gateway.errors import Refusal
from tests.golden.transcripts import DOCUMENT, refusal_of
from tests.tables import each_row
from tests.unit.gateway.dialects.requests import HI, MESSAGES

SHORT: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
WEATHER = {"name": "weather", "description": "Of a city", "input_schema": {"type": "object"}}


def prompt(version: str = "", **fields: Any) -> Prompt:
    """Return the prompt of the smallest request with more fields."""
    (found,) = structs.replace(MESSAGES, version=version).parse(**fields).prompts
    return found


def refused(version: str = "", **fields: Any) -> Refusal:
    """Return the refusal of a valid request with more fields."""
    return refusal_of(prompt, version, **fields)


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def use(call_id: str = "t1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "weather", "input": {}, **more}


def result(call_id: str = "t1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **more}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def segments_of(found: Prompt) -> list[tuple[str, str, int]]:
    """Return (role, text, message) of each segment."""
    return [(s.role, s.text, s.message) for s in found.segments]


# --- system and messages -------------------------------------------------------------------------


def test_system_precedes_messages() -> None:
    """The cache uses API order."""
    found = prompt(
        system="Be brief.", messages=[HI, assistant(text("hello")), user(text("a"), text("b"))]
    )

    assert found.segments == (
        Segment("system", "Be brief.", "system", None, 0),
        Segment("user", "hi", "messages[0].content", None, 1),
        Segment("assistant", "hello", "messages[1].content[0]", None, 2),
        Segment("user", "a", "messages[2].content[0]", None, 3),
        Segment("user", "b", "messages[2].content[1]", None, 3),
    )


def test_merges_neighbouring_turns_of_one_role() -> None:
    """Anthropic merges them too."""
    assert segments_of(prompt(messages=[HI, HI, assistant(text("x")), HI])) == [
        ("user", "hi", 0),
        ("user", "hi", 0),
        ("assistant", "x", 1),
        ("user", "hi", 2),
    ]


def test_accepts_system_message_after_a_user_turn() -> None:
    """It changes the behaviour and leaves the prefix unchanged."""
    found = prompt(messages=[HI, {"role": "system", "content": "Now in French."}])

    assert segments_of(found) == [("user", "hi", 0), ("system", "Now in French.", 1)]
    assert found.add_generation_prompt


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "system", "content": "x"}], "messages[0].role"),
        ([HI, assistant(text("x")), {"role": "system", "content": "x"}], "messages[2].role"),
        ([HI, {"role": "system", "content": "x"}, HI], "messages[2].role"),
    ],
)
def test_refuses_system_message_elsewhere(messages: list[Any], param: str) -> None:
    """A first one would be the system prompt, and one before a user turn has no defined meaning."""
    assert refused(messages=messages).param == param


def test_last_assistant_turn_is_a_prefill() -> None:
    """The answer continues its text."""
    found = prompt(messages=[HI, {"role": "assistant", "content": "The answer is ("}])

    assert (found.continues, found.add_generation_prompt) == (True, False)


@pytest.mark.parametrize("content", ["", [], [{"type": "thinking", "thinking": "hm"}]])
def test_empty_last_assistant_turn_is_no_prefill(content: Any) -> None:
    """It holds no text to continue."""
    found = prompt(messages=[HI, {"role": "assistant", "content": content}])

    assert found == prompt()


def test_thinking_stays_before_its_answer_and_keeps_its_turn() -> None:
    """The template decides what the model sees of it; redacted thinking has no text."""
    found = prompt(
        messages=[
            HI,
            assistant({"type": "thinking", "thinking": "hm", "signature": "s"}, text("a")),
            HI,
            assistant({"type": "redacted_thinking", "data": "x", "cache_control": None}),
            HI,
        ]
    )

    assert segments_of(found) == [
        ("user", "hi", 0),
        ("assistant", "hm", 1),
        ("assistant", "a", 1),
        ("user", "hi", 2),
        ("assistant", "", 3),
        ("user", "hi", 4),
    ]


def test_drops_a_coding_agents_billing_header() -> None:
    """The line differs in every request and precedes every prefix that could be shared."""
    line = text(f"{BILLING_HEADER} cc_version=2.1.5; cch=0a1b2;")
    other = text(f"{BILLING_HEADER} cc_version=2.1.5; cch=ffff0;")
    rest = text("You are an agent.", **SHORT)

    first, second = prompt(system=[line, rest]), prompt(system=[other, rest])
    assert first == second
    assert segments_of(first)[0] == ("system", "You are an agent.", 0)
    assert segments_of(prompt(system=[rest, line]))[1][1].startswith(BILLING_HEADER)


# --- tools ---------------------------------------------------------------------------------------


def test_tool_schema_keeps_its_key_order() -> None:
    """Sorted keys would change the client's prompt."""
    schema = {"type": "object", "properties": {"b": {}, "a": {"type": "number", "maximum": 1.5}}}
    found = prompt(tools=[{**WEATHER, "input_schema": schema, "strict": True, "type": "custom"}])

    assert found.tools == (
        Tool(
            "weather",
            "Of a city",
            '{"type":"object","properties":{"b":{},"a":{"type":"number","maximum":1.5}}}',
            "tools[0]",
            True,
            schema_field="input_schema",
        ),
    )
    assert found.tool_choice == ToolChoice("auto")


@each_row(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ToolChoice("auto")),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "tool", "name": "weather"}, ToolChoice("required", ("weather",))),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto", (), False)),
    ],
)
def test_tool_choice_reaches_the_prompt(choice: dict[str, Any], expected: ToolChoice) -> None:
    assert prompt(tools=[WEATHER], tool_choice=choice).tool_choice == expected


def test_calls_and_results_are_separate_segments() -> None:
    """A result names its call by id; text after results begins a new message."""
    found = prompt(
        tools=[WEATHER],
        messages=[
            HI,
            assistant(text("Let me see."), use("t1", input={"b": 1, "a": [1.0]}), use("t2")),
            user(
                result("t2", content=[text("wet"), text("cold")]),
                result("t1", content="dry", is_error=True),
                text("So?"),
            ),
        ],
    )

    assert found.segments[1:] == (
        Segment("assistant", "Let me see.", "messages[1].content[0]", None, 1),
        Segment(
            "assistant",
            "",
            "messages[1].content[1]",
            None,
            1,
            call=ToolCall("t1", "weather", '{"b":1,"a":[1.0]}'),
        ),
        Segment(
            "assistant",
            "",
            "messages[1].content[2]",
            None,
            1,
            call=ToolCall("t2", "weather", "{}"),
        ),
        Segment("tool", "wet", "messages[2].content[0].content[0]", "weather", 2, answers="t2"),
        Segment("tool", "cold", "messages[2].content[0].content[1]", "weather", 2, answers="t2"),
        Segment("tool", "Error: dry", "messages[2].content[1]", "weather", 3, answers="t1"),
        Segment("user", "So?", "messages[2].content[2]", None, 4),
    )


def test_result_without_content_is_empty() -> None:
    found = prompt(messages=[HI, assistant(use()), user(result())])

    assert found.segments[-1] == Segment(
        "tool", "", "messages[2].content[0]", "weather", 2, answers="t1"
    )


@each_row(
    ("messages", "param", "says"),
    [
        ([HI, assistant(use())], "messages[1]", "`tool_use` ids were found without"),
        ([HI, assistant(use()), HI], "messages[2].content", "t1"),
        ([HI, assistant(use()), user(text("x"), result())], "messages[2].content[0]", "t1"),
        ([HI, assistant(use()), assistant(text("x"))], "messages[2]", "t1"),
        ([user(result())], "messages[0].content[0].tool_use_id", "unexpected `tool_use_id`"),
        (
            [HI, assistant(use()), user(result(), result())],
            "messages[2].content[1].tool_use_id",
            "t1",
        ),
        ([HI, assistant(use(), use()), user(result())], "messages[1].content[1].id", "unique"),
        (
            [HI, assistant(use()), user(result(content=[{"type": "image"}]))],
            "messages[2].content[0].content[0]",
            "image",
        ),
    ],
)
def test_refuses_unmatched_calls_and_results(messages: list[Any], param: str, says: str) -> None:
    """A model that sees a call without a result invents one."""
    refusal = refused(messages=messages)

    assert refusal.param == param
    assert says in refusal.message


def test_examples_of_a_tools_input_are_a_hint() -> None:
    """They help a model to fill in a form, and cannot make a call wrong."""
    tools = [{**WEATHER, "input_examples": [{"city": "Paris"}]}]

    assert MESSAGES.parse(tools=tools).ignored == ("tools[].input_examples",)
    assert MESSAGES.refused("strict", tools=tools).param == "tools[0].input_examples"


# --- blocks that cannot be -----------------------------------------------------------------------


@each_row("kind", sorted(REFUSED_BLOCKS))
def test_refuses_unsupported_block_by_name(kind: str) -> None:
    """A dropped block would change the question."""
    refusal = refused(messages=[user(text("what is this?"), {"type": kind, "source": {}})])

    assert (refusal.code, refusal.param) == ("unsupported_parameter", "messages[0].content[1]")
    assert kind in refusal.message
    assert f"`{kind}`" in DOCUMENT.read_text()


@each_row(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", ">= 1"),
        (
            {"messages": [{"role": "user", "content": ""}]},
            "messages[0].content",
            "content is empty",
        ),
        (
            {"messages": [{"role": "user", "content": []}]},
            "messages[0].content",
            "content is empty",
        ),
        ({"messages": [assistant()]}, "messages", "no message has content"),
        ({"messages": [user(text(""))]}, "messages[0].content[0]", "non-empty"),
        ({"messages": [user({"text": "x"})]}, "messages[0].content[0].type", "type"),
        ({"messages": [user({"type": 7})]}, "messages[0].content[0].type", "type"),
        ({"messages": [user({"type": "poem"})]}, "messages[0].content[0].type", "'poem'"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text", "missing"),
        ({"messages": [user(text("x", y=1))]}, "messages[0].content[0].y", "unknown field `y`"),
        ({"messages": [user(use())]}, "messages[0].content[0].type", "user messages"),
        (
            {"messages": [HI, assistant(result())]},
            "messages[1].content[0].type",
            "assistant messages",
        ),
        ({"system": [use()]}, "system[0].type", "a system prompt"),
        ({"system": [{"type": "image"}]}, "system[0]", "image"),
        (
            {"messages": [HI, assistant(text("The answer: "))]},
            "messages[1].content[0]",
            "trailing whitespace",
        ),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role", "root"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "declares none in tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "requires a name"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name", "'x'"),
        ({"tool_choice": {"type": "auto", "name": "x"}}, "tool_choice.name", "'tool'"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name", "unique"),
        ({"tools": [{}] * 513}, "tools", "length <= 512; received length 513"),
        ({"tools": [{**WEATHER, "name": "{{ x }}"}]}, "tools[0].name", "regex"),
        ({"tools": [{**WEATHER, "name": "x\n"}]}, "tools[0].name", "regex"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema", "missing"),
        ({"tools": [{**WEATHER, "input_schema": {}}]}, "tools[0].input_schema.type", "'object'"),
        ({"tools": [{"type": "web_search_20250305"}]}, "tools[0].type", "web_search_20250305"),
        ({"tools": [{**WEATHER, "defer_loading": 1}]}, "tools[0].defer_loading", "bool"),
        (
            {"tools": [{**WEATHER, "allowed_callers": ["code_execution_20260120"]}]},
            "tools[0].allowed_callers",
            "expected 'direct' among them",
        ),
        ({"tools": [{**WEATHER, "x": 1}]}, "tools[0].x", "unknown field `x`"),
    ],
)
def test_refuses_invalid_prompt_with_path(fields: dict[str, Any], param: str, says: str) -> None:
    """The message has the expected value."""
    refusal = refused(**fields)

    assert refusal.param == param
    assert says in refusal.message


def test_only_the_newer_version_refuses_user_citations() -> None:
    """The older one accepts them, and they have no effect."""
    messages = [user(text("x", citations=[{"type": "char_location"}]))]

    assert refused("2026-10-21", messages=messages).param == "messages[0].content[0].citations"
    assert prompt("2023-06-01", messages=messages).segments[0].text == "x"


# --- breakpoints ---------------------------------------------------------------------------------


def breakpoints_of(found: Prompt) -> list[tuple[str, str]]:
    """Return (path, class) of every tool and segment with a breakpoint."""
    places: list[Tool | Segment] = [*found.tools, *found.segments]
    return [
        (position.path, position.retention) for position in places if position.retention is not None
    ]


def test_breakpoints_follow_tools_system_and_blocks() -> None:
    hour: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    found = prompt(
        tools=[WEATHER, {**WEATHER, "name": "time", **hour}],
        system=[text("Be brief.", **hour), text("Be kind.")],
        messages=[HI, assistant(use(**SHORT)), user(result(content="dry", **SHORT))],
    )

    assert breakpoints_of(found) == [
        ("tools[1]", "1h"),
        ("system[0]", "1h"),
        ("messages[1].content[0]", "5m?"),
        ("messages[2].content[0]", "5m?"),
    ]


def test_result_breakpoints_share_the_last_text() -> None:
    """A result ends where its last text ends."""
    found = prompt(
        messages=[
            HI,
            assistant(use()),
            user(result(content=[text("a", **SHORT), text("b")], **SHORT)),
        ]
    )

    assert breakpoints_of(found) == [
        ("messages[2].content[0].content[0]", "5m?"),
        ("messages[2].content[0].content[1]", "5m?"),
    ]


@each_row(
    ("messages", "path"),
    [
        ([HI], "messages[0].content"),
        ([HI, assistant(text("a"))], "messages[1].content[0]"),
        (
            [HI, assistant(text("a"), {"type": "thinking", "thinking": "x"})],
            "messages[1].content[0]",
        ),
        ([HI, assistant(use()), user(result(content="x"))], "messages[2].content[0]"),
    ],
)
def test_automatic_breakpoint_is_at_the_end(messages: list[Any], path: str) -> None:
    """It moves forward with a growing conversation."""
    found = prompt(messages=messages, cache_control={"type": "ephemeral", "ttl": "1h"})

    assert breakpoints_of(found) == [(path, "1h")]


@each_row(
    ("fields", "param"),
    [
        ({"messages": [user(text("", **SHORT))]}, "messages[0].content[0]"),
        (
            {"messages": [HI, assistant({"type": "thinking", "thinking": "x", **SHORT}), HI]},
            "messages[1].content[0].cache_control",
        ),
        (
            {"messages": [user(text("x", cache_control={"type": "forever"}))]},
            "messages[0].content[0].cache_control.type",
        ),
        (
            {"messages": [HI, assistant(use()), user(result(content=[text("", **SHORT)]))]},
            "messages[2].content[0].content[0]",
        ),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"cache_control": "ephemeral"}, "cache_control"),
        ({"messages": [user(*[text("x", **SHORT)] * 5)]}, "messages[0].content[4]"),
        (
            {
                "system": [text("x", **SHORT)],
                "cache_control": {"type": "ephemeral", "ttl": "1h"},
            },
            "cache_control.ttl",
        ),
    ],
)
def test_refuses_misplaced_breakpoint(fields: dict[str, Any], param: str) -> None:
    """The refusal precedes all computation."""
    assert refused(**fields).param == param


def test_null_is_no_breakpoint_and_scope_has_no_effect() -> None:
    """Clients send both."""
    none: dict[str, Any] = {"cache_control": None}
    wide: dict[str, Any] = {"cache_control": {"type": "ephemeral", "scope": "global", "ttl": None}}

    assert prompt(messages=[user(text("x", **none))], **none) == prompt(messages=[user(text("x"))])
    assert breakpoints_of(prompt(messages=[user(text("x", **wide))])) == [
        ("messages[0].content[0]", "5m?")
    ]


@given(st.lists(st.sampled_from([None, "5m"]), min_size=1, max_size=4), st.booleans())
def test_breakpoints_never_change_the_prompt(ttls: list[str | None], automatic: bool) -> None:
    """Requests with and without breakpoints must share their tokens."""
    bare = user(*[text(f"part {number}") for number in range(len(ttls))])
    marked = user(
        *[
            text(f"part {number}", cache_control=ttl and {"type": "ephemeral", "ttl": ttl})
            for number, ttl in enumerate(ttls)
        ]
    )
    more = SHORT if automatic and ttls.count("5m") < 4 else {}

    assert segments_of(prompt(messages=[marked], **more)) == segments_of(prompt(messages=[bare]))
