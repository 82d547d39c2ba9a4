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


@each_row(
    ("fields", "named"),
    [
        ({"defer_loading": True}, ("tools[].defer_loading",)),
        ({"defer_loading": False, "allowed_callers": ["direct"]}, ()),
        ({"allowed_callers": []}, ()),
        ({"allowed_callers": ["direct", "code_execution_20260120"]}, ("tools[].allowed_callers",)),
    ],
)
def test_a_tool_that_is_to_be_loaded_or_called_otherwise_is_an_ordinary_one(
    fields: Any, named: Any
) -> None:
    """Nothing here could load it later, and a model that sees it can do all that was asked."""
    search = {"type": "tool_search_tool_regex_20251119", "name": "search"}
    plain = FUNCTION["messages"]
    call = MESSAGES.parse(tools=[{**plain, **fields}])
    hosted = MESSAGES.parse(tools=[search, {**plain, **fields}])

    assert (call.prompts, call.ignored) == (MESSAGES.parse(tools=[plain]).prompts, named)
    assert hosted.ignored == (*named, "tools.tool_search_tool_regex_20251119")
    if named:
        assert MESSAGES.refused("strict", tools=[{**plain, **fields}]).param == named[0].replace(
            "[]", "[0]"
        )


FOUND = {"type": "tool_reference", "tool_name": "clock"}


def searched(*found: Any) -> list[Any]:
    """Return the messages of a search that its client ran."""
    use = {"type": "tool_use", "id": "t", "name": "search", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": list(found)}
    turns = [("user", "?"), ("assistant", [use]), ("user", [result])]
    return [{"role": role, "content": content} for role, content in turns]


def test_what_a_clients_search_found_is_told_by_name() -> None:
    """The model has the definition before its eyes; a breakpoint stays."""
    deferred = {**FUNCTION["messages"], "defer_loading": True}
    marked = {**FOUND, "cache_control": {"type": "ephemeral"}}
    found = MESSAGES.parse(tools=[deferred], messages=searched(marked)).prompts[0].segments[-1]

    assert (found.role, found.text, found.retention) == ("tool", "clock", "5m?")
    refusal = MESSAGES.refused(tools=[deferred], messages=searched({**FOUND, "tool_name": "x"}))
    assert refusal.param == "messages[2].content[0].content[0].tool_name"
    assert "'x'" in refusal.message
    assert MESSAGES.refused("strict", messages=searched(FOUND)).code == "unsupported_parameter"


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
