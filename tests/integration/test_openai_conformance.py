"""OpenAI's three endpoints under the conformance suite of all dialects."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from gateway.dialects.canonical import Call
from tests.golden.transcripts import events, named_events
from tests.integration.dialect_conformance import Adapter, Answer, DialectConformance, StreamFailed
from tests.published_schema import violations
from tests.unit.gateway.dialects.requests import CHAT, COMPLETIONS, RESPONSES


def data_of(data: bytes) -> list[Any]:
    """Return the data of each event; an error raises as in a client."""
    found = events(data)
    for event in found:
        if isinstance(event, dict) and event.get("error"):
            raise StreamFailed(event["error"]["message"])
    return found


def check_schema(value: object, name: str) -> None:
    """Assert that a body satisfies OpenAI's published schema."""
    assert violations(value, name) == []


def usage_of(usage: dict[str, Any]) -> tuple[int, int, int]:
    """Return (prompt tokens, tokens read, output tokens); assert that the sums hold."""
    details = usage["prompt_tokens_details"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert details["cached_tokens"] + details["cache_write_tokens"] <= usage["prompt_tokens"]
    return usage["prompt_tokens"], details["cached_tokens"], usage["completion_tokens"]


def read_error(body: bytes) -> str:
    """Return the message of an error body."""
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    check_schema(json.loads(body), "ErrorResponse")
    return str(error["message"])


# --- chat ----------------------------------------------------------------------------------------


def read_chat(data: bytes) -> Answer:
    """Read a completion."""
    answer = json.loads(data)
    ChatCompletion.model_validate(answer, strict=True)
    check_schema(answer, "CreateChatCompletionResponse")
    (choice,) = answer["choices"]
    message = choice["message"]
    return Answer(
        text=message["content"] or "",
        calls=tuple(
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls", ())
        ),
        reason=choice["finish_reason"],
        usage=usage_of(answer["usage"]),
    )


def read_chat_stream(data: bytes) -> Answer:
    """Join chunks as clients do; usage precedes the end."""
    *chunks, done = data_of(data)
    assert done == "[DONE]"
    text, calls, reason = "", list[dict[str, str]](), ""
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        check_schema(chunk, "CreateChatCompletionStreamResponse")
        for choice in chunk["choices"]:
            assert not reason, "something behind the end"
            delta = choice["delta"]
            text += delta.get("content") or ""
            for piece in delta.get("tool_calls", ()):
                if "id" in piece:
                    assert piece["index"] == len(calls)
                    calls.append({"name": piece["function"]["name"], "arguments": ""})
                calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    assert chunks[-1]["choices"] == []
    return Answer(
        text,
        tuple((call["name"], json.loads(call["arguments"])) for call in calls),
        reason,
        usage_of(chunks[-1]["usage"]),
    )


STREAMING = {"stream": True, "stream_options": {"include_usage": True}}


class TestOpenAIChat(DialectConformance):
    """`/v1/chat/completions`."""

    adapter: ClassVar[Adapter] = Adapter(
        CHAT,
        streaming=STREAMING,
        read_unary=read_chat,
        read_stream=read_chat_stream,
        read_error=read_error,
        tool=lambda name, schema: {
            "tools": [{"type": "function", "function": {"name": name, "parameters": schema}}]
        },
        with_schema=lambda schema: {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": schema},
            }
        },
    )


# --- legacy completions --------------------------------------------------------------------------


def read_completion(data: bytes) -> Answer:
    """Read a legacy completion."""
    answer = json.loads(data)
    Completion.model_validate(answer, strict=True)
    check_schema(answer, "CreateCompletionResponse")
    (choice,) = answer["choices"]
    return Answer(choice["text"], (), choice["finish_reason"], usage_of(answer["usage"]))


def read_completion_stream(data: bytes) -> Answer:
    """Join chunks, which have the shape of a completion."""
    *chunks, done = data_of(data)
    assert done == "[DONE]"
    for chunk in chunks:
        check_schema(chunk, "CreateCompletionResponse")
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    (reason,) = {choice["finish_reason"] for choice in choices} - {None}
    text = "".join(choice["text"] for choice in choices)
    return Answer(text, (), reason, usage_of(chunks[-1]["usage"]))


class TestOpenAICompletions(DialectConformance):
    """`/v1/completions`: raw text without roles and calls."""

    adapter: ClassVar[Adapter] = Adapter(
        COMPLETIONS,
        streaming=STREAMING,
        read_unary=read_completion,
        read_stream=read_completion_stream,
        read_error=read_error,
        has_calls=False,
    )

    def test_minimal_request_gives_the_same_call(self) -> None:
        """The prompt is raw text, and no template renders it."""
        call: Call = self.adapter.parse()

        (prompt,) = call.prompts
        assert (call.model, prompt.text, prompt.segments) == ("m", "hi", ())
        assert (call.operation, call.stream, call.generation.stop) == ("generate", False, ())


# --- responses -----------------------------------------------------------------------------------


def read_response(data: bytes) -> Answer:
    """Read a response with the official client's types."""
    return answer_of(json.loads(data))


def answer_of(response: dict[str, Any]) -> Answer:
    """Return the answer that a client makes of a response."""
    Response.model_validate(response)
    check_schema(response, "Response")
    items, usage = response["output"], response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    return Answer(
        text="".join(
            part["text"] for item in items if item["type"] == "message" for part in item["content"]
        ),
        calls=tuple(
            (item["name"], json.loads(item["arguments"]))
            for item in items
            if item["type"] == "function_call"
        ),
        reason=response["status"],
        usage=(
            usage["input_tokens"],
            usage["input_tokens_details"]["cached_tokens"],
            usage["output_tokens"],
        ),
    )


def read_response_stream(data: bytes) -> Answer:
    """Read numbered, named_events events; their items must add up to the final response."""
    built: list[dict[str, Any]] = []
    found = named_events(data)
    for number, (name, event) in enumerate(found):
        assert (event["type"], event["sequence_number"]) == (name, number)
        check_schema(event, "ResponseStreamEvent")
        index = event.get("output_index", -1)
        match name.removeprefix("response."):
            case "output_item.added":
                assert index == len(built)
                built.append({"item": event["item"], "text": ""})
            case "output_text.delta" | "function_call_arguments.delta":
                assert index == len(built) - 1
                assert event["item_id"] == built[index]["item"]["id"]
                built[index]["text"] += event["delta"]
            case "output_text.done":
                assert event["text"] == built[index]["text"]
            case "function_call_arguments.done":
                assert event["arguments"] == built[index]["text"]
            case "output_item.done":
                assert event["item"]["id"] == built[index]["item"]["id"]
                built[index]["item"] = event["item"]
            case "failed":
                raise StreamFailed(event["response"]["error"]["message"])
            case _:
                pass
    assert [name for name, _ in found[:2]] == ["response.created", "response.in_progress"]
    name, last = found[-1]
    assert name in ("response.completed", "response.incomplete")
    assert last["response"]["output"] == [one["item"] for one in built]
    return answer_of(last["response"])


class TestOpenAIResponses(DialectConformance):
    """`/v1/responses`."""

    adapter: ClassVar[Adapter] = Adapter(
        RESPONSES,
        streaming={"stream": True},
        read_unary=read_response,
        read_stream=read_response_stream,
        read_error=read_error,
        tool=lambda name, schema: {
            "tools": [{"type": "function", "name": name, "parameters": schema}]
        },
        with_schema=lambda schema: {
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}
        },
    )
