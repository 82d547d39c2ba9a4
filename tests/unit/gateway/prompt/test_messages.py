"""Messages as templates take them, and parts in API order."""

from __future__ import annotations

from typing import Any

from gateway.dialects.canonical import Prompt, Segment, Tool, ToolCall
from gateway.prompt.messages import build_template_input
from gateway.structured_output.json_text import parse_arguments
from gateway.structured_output.tool_styles import FALLBACK, HERMES, MISTRAL, ToolStyle

CALL = ToolCall("call_1", "get", '{"z":1}')


def check(prompt: Prompt, style: ToolStyle = HERMES) -> list[dict[str, Any]]:
    """Return the template's input."""
    arranged = build_template_input(prompt, style)
    texts = [part.text or "" for part in arranged.parts]
    return arranged.for_template(
        style, texts.__getitem__, lambda _, call: parse_arguments(call.arguments)[0]
    )


def test_joins_parts_of_one_message() -> None:
    """In order; the developer role becomes system."""
    segments = (
        Segment("developer", "Be ", "a", None, 0),
        Segment("developer", "brief", "b", None, 0),
        Segment("user", "Hi", "c", "ann", 1),
        Segment("user", "Ho", "d", None, 2),
    )

    assert check(Prompt(segments=segments)) == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi", "name": "ann"},
        {"role": "user", "content": "Ho"},
    ]


def test_calls_are_members_of_their_message_with_object_arguments() -> None:
    """Each result has its call's id and name."""
    segments = (
        Segment("assistant", "Hm", "a", None, 0),
        Segment("assistant", "", "b", None, 0, call=CALL),
        Segment("tool", "one ", "c", None, 1, answers="call_1"),
        Segment("tool", "two", "d", None, 1, answers="call_1"),
    )
    asked, answered = check(Prompt(segments=segments))

    assert asked["content"] == "Hm"
    assert asked["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": {"z": 1}}}
    ]
    assert answered == {
        "role": "tool",
        "content": "one two",
        "name": "get",
        "tool_call_id": "call_1",
    }


def test_call_ids_have_the_family_format() -> None:
    """Equal for a call and its result."""
    segments = (
        Segment("assistant", "", "b", None, 0, call=CALL),
        Segment("tool", "one", "c", None, 1, answers="call_1"),
    )
    asked, answered = check(Prompt(segments=segments), MISTRAL)

    assert asked["tool_calls"][0]["id"] == answered["tool_call_id"] == MISTRAL.call_id("call_1")


def test_splits_user_text_and_results() -> None:
    """Templates have a role for each."""
    segments = (
        Segment("tool", "one", "a", None, 0, answers="call_1"),
        Segment("user", "So?", "b", None, 0),
    )

    assert [message["role"] for message in check(Prompt(segments=segments))] == ["tool", "user"]


def test_without_tool_support_all_messages_are_plain() -> None:
    """System, user and assistant alternate, with or without calls."""
    segments = (
        Segment("user", "Hi", "a", None, 0),
        Segment("assistant", "", "b", None, 1, call=CALL),
        Segment("assistant", "Hm\n", "b", None, 1),
        Segment("assistant", "", "b", None, 1, call=CALL),
        Segment("tool", "one", "c", None, 2, answers="call_1"),
        Segment("tool", "two", "c", None, 3, answers="call_1"),
        Segment("user", "So?", "d", None, 4),
        Segment("assistant", "So", "e", None, 5),
        Segment("user", "Ah", "f", None, 6),
    )
    call = '<tool_call>\n{"name": "get", "arguments": {"z": 1}}\n</tool_call>'
    messages = check(Prompt(segments=segments, tools=(Tool("get"),)), FALLBACK)

    assert [sorted(message) for message in messages] == [["content", "role"]] * 6
    assert [message["role"] for message in messages] == [
        "system", "user", "assistant", "user", "assistant", "user",
    ]  # fmt: skip
    assert messages[2]["content"] == f"{call}Hm\n{call}"
    assert messages[3]["content"] == (
        "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>\nSo?"
    )
