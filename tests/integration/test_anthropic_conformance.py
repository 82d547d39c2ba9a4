"""Anthropic's Messages under the conformance suite of all dialects."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from anthropic.types import Message

from tests.golden.transcripts import named_events
from tests.integration.dialect_conformance import Adapter, Answer, DialectConformance, StreamFailed
from tests.unit.gateway.dialects.requests import MESSAGES


def read_message(data: bytes) -> Answer:
    """Read a message with the official client's types."""
    message = Message.model_validate(json.loads(data))
    return answer_of(json.loads(data), message.usage.to_dict())


def answer_of(message: dict[str, Any], usage: dict[str, Any]) -> Answer:
    """Return the answer that a client makes of a message."""
    blocks = message["content"]
    return Answer(
        text="".join(block["text"] for block in blocks if block["type"] == "text"),
        calls=tuple((b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"),
        reason=message["stop_reason"],
        usage=(
            usage["input_tokens"]
            + usage["cache_creation_input_tokens"]
            + usage["cache_read_input_tokens"],
            usage["cache_read_input_tokens"],
            usage["output_tokens"],
        ),
    )


def read_events(data: bytes) -> Answer:
    """Read a stream strictly: named_events events, one block after the other, each closed."""
    message: dict[str, Any] = {}
    open_block: int | None = None
    arguments = ""
    for name, event in named_events(data):
        assert event["type"] == name
        match name:
            case "ping":
                continue
            case "error":
                raise StreamFailed(event["error"]["message"])
            case "message_start":
                assert not message
                message = event["message"]
                assert message["content"] == []
            case "content_block_start":
                assert (open_block, event["index"]) == (None, len(message["content"]))
                open_block, arguments = event["index"], ""
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_block
                block, delta = message["content"][-1], event["delta"]
                if delta["type"] == "text_delta":
                    assert block["type"] == "text"
                    block["text"] += delta["text"]
                else:
                    assert (block["type"], delta["type"]) == ("tool_use", "input_json_delta")
                    arguments += delta["partial_json"]
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(arguments or "{}")
            case "message_delta":
                assert open_block is None
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case _:
                assert name == "message_stop"
    assert name == "message_stop"
    return answer_of(message, message["usage"])


def read_error(body: bytes) -> str:
    """Return the message of an error body."""
    error = json.loads(body)
    assert error["type"] == "error"
    assert error["request_id"].startswith("req_")
    return str(error["error"]["message"])


class TestAnthropicMessages(DialectConformance):
    """`/v1/messages`."""

    adapter: ClassVar[Adapter] = Adapter(
        MESSAGES,
        streaming={"stream": True},
        read_unary=read_message,
        read_stream=read_events,
        read_error=read_error,
        tool=lambda name, schema: {"tools": [{"name": name, "input_schema": schema}]},
        with_schema=lambda schema: {
            "output_config": {"format": {"type": "json_schema", "schema": schema}}
        },
    )
