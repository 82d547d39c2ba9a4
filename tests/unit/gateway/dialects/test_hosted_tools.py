"""Tools that a hosted API's server runs: left out and named, or refused, in every dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects.gemini.cached_contents import parse_create
from gateway.errors import Refusal
from tests.tables import each_row
from tests.unit.gateway.dialects.requests import (
    CHAT,
    ENDPOINTS,
    MESSAGES,
    RESPONSES,
)

SCHEMA = {"type": "object", "properties": {}}
FUNCTION: dict[str, dict[str, Any]] = {
    "chat": {"type": "function", "function": {"name": "clock", "parameters": SCHEMA}},
    "responses": {"type": "function", "name": "clock", "parameters": SCHEMA},
    "messages": {"name": "clock", "input_schema": SCHEMA},
    "gemini": {"functionDeclarations": [{"name": "clock"}]},
}
FORCED: dict[str, dict[str, Any]] = {
    "chat": {"tool_choice": "required"},
    "responses": {"tool_choice": "required"},
    "messages": {"tool_choice": {"type": "any"}},
    "gemini": {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
}
AUTO: dict[str, dict[str, Any]] = {
    "chat": {"tool_choice": "auto"},
    "responses": {"tool_choice": "none"},
    "messages": {"tool_choice": {"type": "auto"}},
    "gemini": {"toolConfig": {"functionCallingConfig": {"mode": "VALIDATED"}}},
}
HOSTED = [
    ("chat", {"type": "web_search", "search_context_size": "low"}, "tools.web_search"),
    ("chat", {"type": "openrouter:datetime", "parameters": {"x": 1}}, "tools.openrouter_datetime"),
    *(
        ("responses", {"type": kind, "any_field": {"x": 1}}, f"tools.{kind}")
        for kind in (
            *("web_search", "web_search_preview", "file_search", "code_interpreter", "mcp"),
            *("image_generation", "computer_use_preview", "local_shell", "tool_search", "new_one"),
        )
    ),
    (
        "messages",
        {"type": "web_search_20250305", "name": "web_search"},
        "tools.web_search_20250305",
    ),
    ("messages", {"type": "bash_20250124", "name": "bash"}, "tools.bash_20250124"),
    ("gemini", {"googleSearch": {}}, "tools.googleSearch"),
    ("gemini", {"enterprise_web_search": {}}, "tools.enterpriseWebSearch"),
]


@each_row(("name", "tool", "ignored"), HOSTED)
def test_hosted_tool_beside_a_function_is_left_out_and_named(
    name: str, tool: dict[str, Any], ignored: str
) -> None:
    """Agents declare them for every model, and a model cannot call a tool that it does not see."""
    endpoint, function = ENDPOINTS[name], FUNCTION[name]
    plain = endpoint.parse(tools=[function])
    for more in ({}, AUTO[name]):
        call = endpoint.parse(tools=[function, tool], **more)

        assert call.ignored == (ignored,)
        assert [found.name for found in call.prompts[0].tools] == ["clock"]
    assert endpoint.parse(tools=[function, tool]).prompts == plain.prompts


@each_row(("name", "tool", "ignored"), HOSTED)
def test_hosted_tool_that_the_answer_needs_is_refused(
    name: str, tool: dict[str, Any], ignored: str
) -> None:
    """Where it is the only tool, or a call is forced, another answer would be given."""
    endpoint, function = ENDPOINTS[name], FUNCTION[name]
    alone = endpoint.refused(tools=[tool])
    forced = endpoint.refused(tools=[function, tool], **FORCED[name])
    strict = endpoint.refused("strict", tools=[function, tool])

    for refusal, at in ((alone, 0), (forced, 1)):
        assert refusal.code == "unsupported_parameter"
        assert (refusal.param or "").startswith(f"tools[{at}].")
        assert "runs no tools" in refusal.message
    assert (strict.param or "").startswith("tools[1]")
    assert endpoint.parse("lenient", tools=[tool]).ignored == (ignored,)


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES])
def test_custom_tool_stays_a_refusal_that_names_the_way_out(endpoint: Any) -> None:
    """Its client runs it and depends on its calls."""
    custom = {"type": "custom", "name": "apply_patch", "format": {"type": "text"}}
    tool = {"type": "custom", "custom": {"name": "x"}} if endpoint is CHAT else custom
    function = FUNCTION["chat" if endpoint is CHAT else "responses"]
    refusal = endpoint.refused(tools=[function, tool])

    assert (refusal.code, refusal.param) == ("unsupported_parameter", "tools[1].type")
    assert "'custom'" in refusal.message
    assert "lenient" in refusal.message
    assert endpoint.parse("lenient", tools=[function, tool]).ignored == ("tools.custom",)


def test_deferred_tool_stays_a_refusal_that_names_the_way_out() -> None:
    """A search that its client runs would find tools that the prompt already holds."""
    refusal = MESSAGES.refused(tools=[{**FUNCTION["messages"], "defer_loading": True}])

    assert refusal.param == "tools[0].defer_loading"
    assert "ENABLE_TOOL_SEARCH" in refusal.message


def test_breakpoint_behind_a_tool_that_is_left_out_stays() -> None:
    """Clients mark the last tool, whichever it is."""
    hosted = {"type": "web_search_20250305", "cache_control": {"type": "ephemeral"}}
    marked = {**FUNCTION["messages"], "cache_control": {"type": "ephemeral"}}
    call = MESSAGES.parse(tools=[FUNCTION["messages"], hosted])

    assert call.prompts == MESSAGES.parse(tools=[marked]).prompts


def test_cached_content_with_a_hosted_tool_is_refused() -> None:
    """Nothing would tell its creator that the tool is missing in all answers that read it."""
    tools = [FUNCTION["gemini"], {"googleSearch": {}}]
    body = json.dumps({"model": "models/m", "contents": [], "tools": tools}).encode()

    with pytest.raises(Refusal) as refused:
        parse_create(body, 0)
    assert refused.value.param == "tools[1].googleSearch"
