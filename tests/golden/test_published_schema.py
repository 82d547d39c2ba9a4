"""Recorded answers satisfy the published schemas, and the official clients read them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from google.genai.types import GenerateContentResponse
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.golden.transcripts import GOLDEN
from tests.published_schema import violations

SCHEMAS = {
    "openai_chat": ("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse"),
    "openai_completions": ("CreateCompletionResponse", "CreateCompletionResponse"),
    "openai_responses": ("Response", "ResponseStreamEvent"),
}
"""By dialect: the schema of an answer, and of a chunk or event."""

_PAGE = re.compile(r"^=== (.*)$", re.MULTILINE)


def pages(dialect: str) -> Iterator[tuple[str, str]]:
    """Yield each recorded answer, and each page of a recorded exchange, with its title."""
    yield "unary", (GOLDEN / f"{dialect}_unary.json").read_text()
    yield "streamed", (GOLDEN / f"{dialect}_stream.txt").read_text()
    _, *parts = _PAGE.split((GOLDEN / f"{dialect}_exchange.txt").read_text())
    yield from zip(parts[::2], parts[1::2], strict=True)


def answers(dialect: str) -> Iterator[tuple[str, Any]]:
    """Yield each recorded answer, chunk or event, and whether it is "unary" or "streamed"."""
    for title, text in pages(dialect):
        if title.endswith("unary"):
            yield "unary", json.loads(text)
        elif title.endswith("streamed"):
            lines = text.splitlines()
            data = [line.removeprefix("data: ") for line in lines if line.startswith("data:")]
            yield from (("streamed", json.loads(one)) for one in data if one != "[DONE]")


@pytest.mark.parametrize("dialect", SCHEMAS)
def test_recorded_answers_satisfy_the_published_schema(dialect: str) -> None:
    """Strict clients refuse a null that the schema does not have."""
    schemas = dict(zip(("unary", "streamed"), SCHEMAS[dialect], strict=True))
    refused = dict(pages(dialect))["refused"].split("\n", 2)[2]
    found = [violations(answer, schemas[kind]) for kind, answer in answers(dialect)]

    assert {problem for problems in found for problem in problems} == set()
    assert violations(json.loads(refused), "ErrorResponse") == []
    assert len(found) > 5


TYPES: dict[str, tuple[Any, Any]] = {
    "openai_chat": (ChatCompletion, ChatCompletionChunk),
    # The finish reason of a stream is null until its end; the client skips validation there.
    "openai_completions": (Completion, Any),
    "openai_responses": (Response, ResponseStreamEvent),
    "anthropic": (Message, RawMessageStreamEvent),
    "gemini": (GenerateContentResponse, GenerateContentResponse),
}
"""By dialect: the official client's type of an answer, and of a chunk or event."""


@pytest.mark.parametrize("dialect", TYPES)
def test_official_clients_read_every_recorded_answer(dialect: str) -> None:
    """Most callers use their types."""
    readers = dict(zip(("unary", "streamed"), map(TypeAdapter, TYPES[dialect]), strict=True))
    read = [readers[kind].validate_python(answer) for kind, answer in answers(dialect)]

    assert len(read) > 5


NULLS_OF_MESSAGES = frozenset(
    {"stop_reason", "stop_sequence", "stop_details", "container", "diagnostics"}
)
"""Fields of a message that Anthropic's published types require and that may be null."""


def null_fields(value: Any) -> set[str]:
    """Return the names of all fields that are null, at any depth."""
    if isinstance(value, list):
        return {name for item in value for name in null_fields(item)}
    if not isinstance(value, dict):
        return set()
    own = {name for name, item in value.items() if item is None}
    return own.union(*map(null_fields, value.values()))


def test_messages_have_only_the_nulls_of_the_published_types() -> None:
    """A strict client of Messages refuses a text block whose citations are null."""
    assert null_fields([answer for _, answer in answers("anthropic")]) <= NULLS_OF_MESSAGES


def test_gemini_has_no_nulls() -> None:
    """JSON of protocol buffers leaves absent fields out."""
    assert "null" not in (GOLDEN / "gemini_exchange.txt").read_text()
