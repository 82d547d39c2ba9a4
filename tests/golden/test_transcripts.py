"""Complete exchanges, compared byte for byte, for each dialect.

A transcript has a rich request (instructions, a tool, a call with its result, breakpoints), its
canonical call, and every kind of answer: unary, streamed, refused and failed.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import structs

from gateway.dialects.anthropic import messages as anthropic
from gateway.dialects.canonical import (
    NO_METADATA,
    Begin,
    CallText,
    ChoiceEnd,
    Delta,
    End,
    Reply,
    RequestMetadata,
    Text,
    UsageRecord,
)
from gateway.dialects.gemini import generate_content as gemini
from gateway.dialects.openai import chat as openai_chat
from gateway.dialects.openai import completions as openai_completions
from gateway.dialects.openai.responses import dialect as openai_responses
from gateway.dialects.protocol import Dialect
from gateway.errors import Kind, Refusal
from tests.golden.transcripts import check_golden, streamed

REPLY = Reply("id-1", "m", 1_700_000_000)
USAGE = UsageRecord(60, {"5m": 16, "1h": 8}, {"5m": 12}, 24, 9, 24)
SPOKEN: list[Delta] = [
    Begin(USAGE),
    Text(0, "Good "),
    Text(0, "grüß 🙂"),
    ChoiceEnd(0, "length"),
    End(USAGE),
]
CALLED: list[Delta] = [
    Begin(USAGE),
    Text(0, "Let me see."),
    CallText(0, 0, "call_a", "weather"),
    CallText(0, 0, arguments='{"city":'),
    CallText(0, 0, arguments='"Bern"}'),
    CallText(0, 1, "call_b", "weather", '{"city":"Rome"}'),
    ChoiceEnd(0, "tool_calls"),
    End(USAGE),
]
REFUSED = Refusal(Kind.RATE, "rate_limit_exceeded", "Too much.", param="model", retry_after_s=2.0)
BROKEN = Refusal(Kind.BUSY, "engine_restarting", "The engine stopped.", retry_after_s=1.0)

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Of a city", "parameters": CITY}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}

REQUESTS: dict[str, tuple[Dialect, RequestMetadata, dict[str, Any]]] = {
    "openai_chat": (
        openai_chat.DIALECT,
        NO_METADATA,
        {
            "model": "m",
            "messages": [
                {
                    "role": "system",
                    "content": [{"type": "text", "text": "Be brief.", **BREAKPOINT}],
                },
                {"role": "user", "content": "Weather?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c0",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c0", "content": "dry"},
                {"role": "user", "content": [{"type": "text", "text": "And Bern?", **EPHEMERAL}]},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": CITY},
            },
            "cache_salt": "team",
            "prompt_cache_key": "session",
            "max_completion_tokens": 9,
            "seed": 7,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "openai_completions": (
        openai_completions.DIALECT,
        NO_METADATA,
        {"model": "m", "prompt": "Once", "max_tokens": 9, "stop": ["END"], "stream": True},
    ),
    "openai_responses": (
        openai_responses.DIALECT,
        NO_METADATA,
        {
            "model": "m",
            "instructions": "Be brief.",
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_text", "text": "Weather?", **BREAKPOINT}],
                },
                {
                    "type": "function_call",
                    "call_id": "c0",
                    "name": "weather",
                    "arguments": '{"city":"Oslo"}',
                },
                {"type": "function_call_output", "call_id": "c0", "output": "dry"},
                {"role": "user", "content": "And Bern?"},
            ],
            "tools": [{"type": "function", "strict": True, **FUNCTION}],
            "text": {"format": {"type": "json_schema", "name": "n", "schema": CITY}},
            "prompt_cache_options": {"mode": "explicit", "comparison_response_id": "resp_0"},
            "stream": True,
        },
    ),
    "anthropic": (
        anthropic.DIALECT,
        RequestMetadata(version="2026-10-21"),
        {
            "model": "m",
            "max_tokens": 9,
            "system": [
                {
                    "type": "text",
                    "text": "Be brief.",
                    "cache_control": {"type": "ephemeral", "ttl": "1h"},
                }
            ],
            "messages": [
                {"role": "user", "content": "Weather?"},
                {
                    "role": "assistant",
                    "content": [
                        {
                            "type": "tool_use",
                            "id": "c0",
                            "name": "weather",
                            "input": {"city": "Oslo"},
                        }
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c0", "content": "dry"},
                        {"type": "text", "text": "And Bern?", **EPHEMERAL},
                    ],
                },
            ],
            "tools": [
                {
                    "name": "weather",
                    "description": "Of a city",
                    "input_schema": CITY,
                }
            ],
            "output_config": {"format": {"type": "json_schema", "schema": CITY}},
            "diagnostics": {"previous_message_id": "msg_0"},
            "stream": True,
        },
    ),
    "gemini": (
        gemini.DIALECT,
        RequestMetadata("m", "streamGenerateContent"),
        {
            "systemInstruction": {"parts": [{"text": "Be brief."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "Weather?"}]},
                {
                    "role": "model",
                    "parts": [{"functionCall": {"name": "weather", "args": {"city": "Oslo"}}}],
                },
                {
                    "role": "user",
                    "parts": [
                        {"functionResponse": {"name": "weather", "response": {"result": "dry"}}},
                        {"text": "And Bern?"},
                    ],
                },
            ],
            "tools": [{"function_declarations": [FUNCTION]}],
            "toolConfig": {"functionCallingConfig": {"mode": "VALIDATED"}},
            "generation_config": {
                "maxOutputTokens": 9,
                "response_mime_type": "application/json",
                "responseJsonSchema": CITY,
            },
        },
    ),
}


def non_defaults(value: Any) -> Any:
    """Return a value without the fields that have their default."""
    if isinstance(value, tuple):
        return [non_defaults(one) for one in value]
    if not isinstance(value, msgspec.Struct):
        return value
    found = {field.name: getattr(value, field.name) for field in structs.fields(value)}
    defaults = {field.name: field.default for field in structs.fields(value)}
    return {name: non_defaults(one) for name, one in found.items() if one != defaults[name]}


@pytest.mark.parametrize("name", REQUESTS)
def test_exchange_matches_the_golden_transcript(name: str) -> None:
    """A client-visible change must be deliberate."""
    dialect, metadata, request = REQUESTS[name]
    sent = msgspec.json.encode(request)
    call = dialect.parse(sent, metadata)
    pages = {"request": sent, "call": msgspec.json.format(msgspec.json.encode(non_defaults(call)))}
    answers = {"spoken": SPOKEN} | ({} if name == "openai_completions" else {"called": CALLED})
    for answer, deltas in answers.items():
        pages[f"{answer}, streamed"] = streamed(dialect.encoder(call, REPLY), deltas)
        pages[f"{answer}, unary"] = dialect.encoder(call, REPLY).unary(deltas)
    status, body = dialect.error_body(REFUSED, "r1")
    pages["refused"] = f"{status}\n".encode() + body
    broken = dialect.encoder(call, REPLY)
    begun = b"".join(map(broken.stream, SPOKEN[:2]))
    pages["broken off"] = begun + dialect.keep_alive() + broken.error_event(BROKEN)

    text = b"".join(f"=== {page}\n".encode() + data + b"\n" for page, data in pages.items())
    check_golden(f"{name}_exchange.txt", text)
