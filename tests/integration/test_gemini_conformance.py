"""Gemini's generateContent and both of its streams under the conformance suite of all dialects."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, ClassVar

from google.genai.types import GenerateContentResponse
from msgspec import structs

from gateway.dialects.gemini.generate_content import ARRAY_DIALECT
from tests.integration.dialect_conformance import Adapter, Answer, DialectConformance, StreamFailed
from tests.unit.gateway.dialects.requests import GEMINI


def read_unary(data: bytes) -> Answer:
    """Read an answer."""
    return answer_of([json.loads(data)])


def answer_of(chunks: list[dict[str, Any]]) -> Answer:
    """Return the answer that a client, with the official types, makes of chunks: joined parts, and
    the last usage."""
    parts: list[dict[str, Any]] = []
    reason = ""
    for chunk in chunks:
        if "error" in chunk:
            raise StreamFailed(chunk["error"]["message"])
        GenerateContentResponse.model_validate(chunk)
        for candidate in chunk["candidates"]:
            parts += candidate["content"]["parts"]
            reason = candidate.get("finishReason", reason)
    usage = chunks[-1]["usageMetadata"]
    return Answer(
        text="".join(part.get("text", "") for part in parts),
        calls=tuple(
            (part["functionCall"]["name"], part["functionCall"]["args"])
            for part in parts
            if "functionCall" in part
        ),
        reason=reason,
        usage=(
            usage["promptTokenCount"],
            usage.get("cachedContentTokenCount", 0),
            usage["candidatesTokenCount"],
        ),
    )


def read_events(data: bytes) -> Answer:
    """Read a stream; the SDK raises on any line that is neither empty nor data."""
    lines = [line for line in data.decode().split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return answer_of([json.loads(line[6:]) for line in lines])


def read_array(data: bytes) -> Answer:
    """Read a stream that is one JSON array."""
    return answer_of(json.loads(data))


def read_error(body: bytes) -> str:
    """Return the message of an error body."""
    error = json.loads(body)["error"]
    assert {"code", "message", "status"} <= set(error)
    return str(error["message"])


def declared(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"functionDeclarations": [{"name": name, "parametersJsonSchema": schema}]}]}


def with_schema(schema: dict[str, Any]) -> dict[str, Any]:
    metadata = {"responseMimeType": "application/json", "responseJsonSchema": schema}
    return {"generationConfig": metadata}


ADAPTER = Adapter(
    GEMINI,
    streaming_action="streamGenerateContent",
    read_unary=read_unary,
    read_stream=read_events,
    read_error=read_error,
    tool=declared,
    with_schema=with_schema,
)


class TestGeminiEvents(DialectConformance):
    """Streams with `?alt=sse`."""

    adapter: ClassVar[Adapter] = ADAPTER


class TestGeminiArray(DialectConformance):
    """Streams without `?alt=sse`."""

    adapter: ClassVar[Adapter] = replace(
        ADAPTER, endpoint=structs.replace(GEMINI, dialect=ARRAY_DIALECT), read_stream=read_array
    )
