"""Clients of a model that thinks, one per dialect: they ask, read the answer and go on with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.unit.gateway.gateway_fixture import GatewayFixture, parse_events

JSON = dict[str, Any]

SCHEMA: JSON = {
    "type": "object",
    "properties": {"a": {"const": 7}},
    "required": ["a"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Thoughtful:
    """An answer as a client reads it; token counts as its usage tells them.

    `thinking_tokens`: None where the dialect does not tell them. `turn`: the answer as the history
    of the next request has it.
    """

    thought: str
    text: str
    calls: tuple[str, ...]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    thinking_tokens: int | None
    turn: Any


@dataclass(frozen=True)
class Client:
    """The client of one dialect.

    `question` makes the user's turn of a text; `body` a request of turns; `effort`, `budget`,
    `schema` and `forced` are fields of a request.
    """

    path: Callable[[str, bool], str]
    body: Callable[[str, list[Any]], JSON]
    question: Callable[[str], Any]
    read: Callable[[JSON], Thoughtful]
    read_stream: Callable[[list[Any]], JSON]
    effort: Callable[[str], JSON]
    budget: Callable[[int], JSON]
    schema: JSON
    forced: JSON

    async def ask(
        self, gateway: GatewayFixture, turns: list[Any], *, streams: bool, **fields: Any
    ) -> Thoughtful:
        """Return the answer to a history."""
        body = {**self.body(gateway.model, turns), **fields}
        if streams and "contents" not in body:
            body["stream"] = True
            if "/chat/" in self.path("", streams):
                body["stream_options"] = {"include_usage": True}
        status, found, _ = await gateway.ask(self.path(gateway.model, streams), body)
        assert status == 200, found
        return self.read(self.read_stream(parse_events(found)) if streams else found)


def as_turns(turn: Any) -> list[Any]:
    """Return an answer's turn as a list: some dialects have several items."""
    return turn if isinstance(turn, list) else [turn]


# --- OpenAI chat -------------------------------------------------------------------------------


def _read_chat(answer: JSON) -> Thoughtful:
    message, usage = answer["choices"][0]["message"], answer["usage"]
    calls = message.get("tool_calls") or ()
    return Thoughtful(
        message.get("reasoning_content") or "",
        message.get("content") or "",
        tuple(call["function"]["arguments"] for call in calls),
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
        usage["completion_tokens_details"]["reasoning_tokens"],
        message,
    )


def _join_chat(chunks: list[Any]) -> JSON:
    message: JSON = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: dict[int, JSON] = {}
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for piece in delta.get("tool_calls", ()):
                call = calls.setdefault(piece["index"], {**piece, "function": {"arguments": ""}})
                function = piece.get("function", {})
                call["function"]["arguments"] += function.get("arguments", "")
                call["function"].setdefault("name", function.get("name"))
    if calls:
        message["tool_calls"] = list(calls.values())
    return {"choices": [{"message": message}], "usage": chunks[-2]["usage"]}


CHAT = Client(
    path=lambda model, streams: "/v1/chat/completions",
    body=lambda model, turns: {"model": model, "messages": turns, "max_tokens": 200},
    question=lambda text: {"role": "user", "content": text},
    read=_read_chat,
    read_stream=_join_chat,
    effort=lambda effort: {"reasoning_effort": effort},
    budget=lambda tokens: {"enable_thinking": True, "thinking_budget": tokens},
    schema={
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "strict": True, "schema": SCHEMA},
        }
    },
    forced={
        "tools": [{"type": "function", "function": {"name": "get", "parameters": SCHEMA}}],
        "tool_choice": "required",
    },
)

# --- OpenAI responses --------------------------------------------------------------------------


def _read_response(answer: JSON) -> Thoughtful:
    items, usage = answer["output"], answer["usage"]
    thoughts = [part for item in items if item["type"] == "reasoning" for part in item["content"]]
    texts = [part for item in items if item["type"] == "message" for part in item["content"]]
    return Thoughtful(
        "".join(part["text"] for part in thoughts),
        "".join(part["text"] for part in texts),
        tuple(item["arguments"] for item in items if item["type"] == "function_call"),
        usage["input_tokens"],
        usage["input_tokens_details"]["cached_tokens"],
        usage["output_tokens"],
        usage["output_tokens_details"]["reasoning_tokens"],
        items,
    )


RESPONSES = Client(
    path=lambda model, streams: "/v1/responses",
    body=lambda model, turns: {"model": model, "input": turns, "max_output_tokens": 200},
    question=lambda text: {"type": "message", "role": "user", "content": text},
    read=_read_response,
    read_stream=lambda events: events[-1]["response"],
    effort=lambda effort: {"reasoning": {"effort": effort}},
    budget=lambda tokens: {"enable_thinking": True, "thinking_budget": tokens},
    schema={
        "text": {"format": {"type": "json_schema", "name": "a", "strict": True, "schema": SCHEMA}}
    },
    forced={
        "tools": [{"type": "function", "name": "get", "parameters": SCHEMA}],
        "tool_choice": "required",
    },
)

# --- Anthropic messages ------------------------------------------------------------------------


def _read_message(answer: JSON) -> Thoughtful:
    blocks, usage = answer["content"], answer["usage"]
    read = usage["cache_read_input_tokens"]
    calls = [block["input"] for block in blocks if block["type"] == "tool_use"]
    return Thoughtful(
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        tuple(json.dumps(call, separators=(",", ":")) for call in calls),
        usage["input_tokens"] + read + usage["cache_creation_input_tokens"],
        read,
        usage["output_tokens"],
        None,
        {"role": "assistant", "content": blocks},
    )


def _join_message(events: list[Any]) -> JSON:
    blocks: list[JSON] = []
    usage: JSON = {}
    for event in events:
        match event["type"]:
            case "message_start":
                usage = event["message"]["usage"]
            case "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                for name, value in event["delta"].items():
                    if name != "type":
                        name = name.removeprefix("partial_")
                        blocks[-1][name] = blocks[-1].get(name, "") + value
            case "message_delta":
                usage = {**usage, **event["usage"]}
            case _:
                pass
    for block in blocks:
        if text := block.pop("json"):
            block["input"] = json.loads(text)
    return {"content": blocks, "usage": usage}


MESSAGES = Client(
    path=lambda model, streams: "/v1/messages",
    body=lambda model, turns: {
        "model": model,
        "messages": turns,
        "max_tokens": 1_500,
        "thinking": {"type": "adaptive"},
        "cache_control": {"type": "ephemeral"},
    },
    question=lambda text: {"role": "user", "content": text},
    read=_read_message,
    read_stream=_join_message,
    effort=lambda effort: (
        {"thinking": {"type": "disabled"}}
        if effort == "none"
        else {"output_config": {"effort": effort}}
    ),
    budget=lambda tokens: {"thinking": {"type": "enabled", "budget_tokens": tokens}},
    schema={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    forced={
        "tools": [{"name": "get", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    },
)

# --- Gemini ------------------------------------------------------------------------------------


def _read_gemini(answer: JSON) -> Thoughtful:
    content, usage = answer["candidates"][0]["content"], answer["usageMetadata"]
    parts = content["parts"]
    calls = [part["functionCall"]["args"] for part in parts if "functionCall" in part]
    thinking = usage.get("thoughtsTokenCount", 0)
    return Thoughtful(
        "".join(part["text"] for part in parts if part.get("thought")),
        "".join(part["text"] for part in parts if "text" in part and not part.get("thought")),
        tuple(json.dumps(call, separators=(",", ":")) for call in calls),
        usage["promptTokenCount"],
        usage.get("cachedContentTokenCount", 0),
        usage["candidatesTokenCount"] + thinking,
        thinking,
        content,
    )


def _join_gemini(chunks: list[Any]) -> JSON:
    parts = [
        part
        for chunk in chunks
        for candidate in chunk["candidates"]
        for part in candidate["content"]["parts"]
    ]
    content = {"role": "model", "parts": parts}
    return {"candidates": [{"content": content}], "usageMetadata": chunks[-1]["usageMetadata"]}


def _gemini_config(**config: Any) -> JSON:
    thinking = {"includeThoughts": True, **config.pop("thinkingConfig", {})}
    return {
        "generationConfig": {"maxOutputTokens": 200, "thinkingConfig": thinking, **config},
    }


GEMINI = Client(
    path=lambda model, streams: (
        f"/v1beta/models/{model}:"
        + ("streamGenerateContent?alt=sse" if streams else "generateContent")
    ),
    body=lambda model, turns: {"contents": turns, **_gemini_config()},
    question=lambda text: {"role": "user", "parts": [{"text": text}]},
    read=_read_gemini,
    read_stream=_join_gemini,
    effort=lambda effort: _gemini_config(
        thinkingConfig={"thinkingBudget": 0}
        if effort == "none"
        else {"thinkingLevel": effort.upper()}
    ),
    budget=lambda tokens: _gemini_config(thinkingConfig={"thinkingBudget": tokens}),
    schema=_gemini_config(responseMimeType="application/json", responseJsonSchema=SCHEMA),
    forced={
        "tools": [{"functionDeclarations": [{"name": "get", "parametersJsonSchema": SCHEMA}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
    },
)

CLIENTS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES, "gemini": GEMINI}
