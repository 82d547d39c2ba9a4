"""Any JSON value in any place of a request: taken, or refused by its path in words of JSON."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.errors import Kind, Refusal
from tests.tables import each_row
from tests.unit.gateway.dialects.requests import (
    CHAT,
    GEMINI,
    HI,
    MESSAGES,
    RESPONSES,
    Endpoint,
)

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**70, "", "x", [], {}, [None], [True], [[]]),
    *({"type": None}, {"type": True}, {"name": None}, {"a": {"b": [None]}}),
)
OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "name": "n", "schema": OBJECT}
FUNCTION = {"name": "f", "description": "d", "parameters": OBJECT}
REQUESTS: dict[str, tuple[Endpoint, dict[str, Any]]] = {
    "chat": (
        CHAT,
        {
            "messages": [
                HI,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c",
                            "type": "function",
                            "function": {"name": "f", "arguments": "{}"},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": OBJECT},
            },
            "stream_options": None,
            "logit_bias": {"5": 1},
            "metadata": {"a": "b"},
            "stop": ["x"],
            "reasoning_effort": "low",
        },
    ),
    "responses": (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
            "tools": [{"type": "function", **FUNCTION, "strict": False}],
            "tool_choice": "auto",
            "text": {"format": FORMAT, "verbosity": "low"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": [],
            "metadata": {},
        },
    ),
    "messages": (
        MESSAGES,
        {
            "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}],
                },
            ],
            "tools": [{"name": "f", "input_schema": OBJECT, "defer_loading": False}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "disabled"},
            "output_config": {"format": {"type": "json_schema", "schema": OBJECT}},
        },
    ),
    "gemini": (
        GEMINI,
        {
            "contents": [
                {"role": "user", "parts": [{"text": "hi"}]},
                {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]},
                {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {}}}]},
            ],
            "systemInstruction": {"parts": [{"text": "x"}]},
            "tools": [{"functionDeclarations": [FUNCTION]}],
            "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
            "generationConfig": {
                "responseMimeType": "application/json",
                "responseSchema": {"type": "STRING", "enum": ["a"], "format": "enum"},
                "stopSequences": ["x"],
                "thinkingConfig": {"thinkingBudget": 0},
            },
            "safetySettings": [],
        },
    ),
}

Steps = tuple[Any, ...]


def places(value: Any, steps: Steps = ()) -> Iterator[Steps]:
    """Yield the steps to each value inside a value."""
    items = list(value.items()) if isinstance(value, dict) else []
    for step, inner in enumerate(value) if isinstance(value, list) else items:
        yield (*steps, step)
        yield from places(inner, (*steps, step))


def refusal_of(endpoint: Endpoint, fields: dict[str, Any]) -> Refusal | None:
    """Return the refusal of a request; None if it is taken."""
    try:
        endpoint.parse(**fields)
    except Refusal as refusal:
        return refusal
    return None


@each_row("name", REQUESTS)
def test_any_value_in_any_place_is_taken_or_refused_by_its_path(name: str) -> None:
    """Another error would be the server's, and Python's words tell a client nothing."""
    endpoint, fields = REQUESTS[name]
    endpoint.parse(**fields)
    for steps in places(fields):
        for value in VALUES:
            wrong = copy.deepcopy(fields)
            at: Any = wrong
            for step in steps[:-1]:
                at = at[step]
            at[steps[-1]] = value
            if (refusal := refusal_of(endpoint, wrong)) is not None:
                where = steps, value, refusal.message
                assert refusal.kind is Kind.BAD, where
                assert refusal.param, where
                assert not re.search(r"\b(None|NoneType|True|False)\b", refusal.message), where


CLIENTS_OWN = {
    *("schema", "parameters", "input_schema", "responseSchema", "response", "args"),
    *("metadata", "logit_bias", "safetySettings"),
}
"""Objects with names that are the client's, and one that has no effect as a whole."""
NO_TOOLS = {"tools": None, "tool_choice": None}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"response_format": {"type": "json_object", "schema": OBJECT}},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "regex", "pattern": "a"}, **NO_TOOLS},
        {"response_format": {"type": "grammar", "grammar": 'start: "a"'}, **NO_TOOLS},
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            }
        },
    ],
    "responses": [
        {"tool_choice": {"type": "function", "name": "f"}},
        {"text": {"format": {"type": "json_object"}}},
    ],
}


@each_row("name", REQUESTS)
def test_no_field_in_any_place_is_dropped_silently(name: str) -> None:
    """A client that took it for a setting would never know."""
    endpoint, fields = REQUESTS[name]
    for variant in ({}, *VARIANTS.get(name, ())):
        asked = fields | variant
        endpoint.parse(**asked)
        for steps in places(asked):
            wrong = copy.deepcopy(asked)
            at: Any = wrong
            for step in steps:
                at = at[step]
            if not isinstance(at, dict) or not CLIENTS_OWN.isdisjoint(steps):
                continue
            if at.get("type") == "tool_use" or steps[-1] == "input":
                continue
            at["surprise"] = 1
            try:
                told = endpoint.parse(**wrong).ignored
            except Refusal as refusal:
                told = (refusal.message, refusal.param or "")
            assert any("surprise" in words for words in told), steps


@each_row("text", [rb"cut \ud83d", rb"\ud83d\ud83d", rb"\udc00 cut", rb"a\ud800b and more text"])
def test_half_a_character_is_named_as_such(text: bytes) -> None:
    """Clients cut emoji in two; that the body is "truncated" would send them to their network."""
    with pytest.raises(Refusal, match="half of a UTF-16 surrogate pair") as caught:
        CHAT.parse_body(b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % text)

    assert caught.value.code == "invalid_json"
