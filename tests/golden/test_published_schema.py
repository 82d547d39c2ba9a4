"""Recorded answers satisfy the published schemas: a null only where a schema has one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden.transcripts import GOLDEN
from tests.published_schema import violations

SCHEMAS = {
    "openai_chat": ("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse"),
    "openai_completions": ("CreateCompletionResponse", "CreateCompletionResponse"),
    "openai_responses": ("Response", "ResponseStreamEvent"),
}
"""By dialect: the schema of an answer, and of a chunk or event."""

_PAGE = re.compile(r"^=== (.*)$", re.MULTILINE)


def pages(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each page of a recorded exchange with its title."""
    _, *parts = _PAGE.split(path.read_text())
    yield from zip(parts[::2], parts[1::2], strict=True)


def chunks(text: str) -> list[Any]:
    """Return the JSON of each event of a stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("dialect", sorted(SCHEMAS))
def test_recorded_answers_satisfy_the_published_schema(dialect: str) -> None:
    """Strict clients refuse a null that the schema does not have."""
    unary, chunk = SCHEMAS[dialect]
    checked, found = 0, []
    answers = [("unary", (GOLDEN / f"{dialect}_unary.json").read_text())]
    answers += [("streamed", (GOLDEN / f"{dialect}_stream.txt").read_text())]
    answers += list(pages(GOLDEN / f"{dialect}_exchange.txt"))
    for title, text in answers:
        if title.endswith("unary"):
            found += violations(json.loads(text), unary)
            checked += 1
        elif title.endswith("streamed"):
            for event in chunks(text):
                found += violations(event, chunk)
                checked += 1
        elif title == "refused":
            found += violations(
                json.loads(text.partition("\n")[2].partition("\n")[2]), "ErrorResponse"
            )
            checked += 1

    assert sorted(set(found)) == []
    assert checked > 5


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
    answers = [json.loads((GOLDEN / "anthropic_unary.json").read_text())]
    for title, text in pages(GOLDEN / "anthropic_exchange.txt"):
        if title.endswith(("unary", "streamed")):
            answers += chunks(text) if title.endswith("streamed") else [json.loads(text)]

    assert null_fields(answers) <= NULLS_OF_MESSAGES


def test_gemini_has_no_nulls() -> None:
    """JSON of protocol buffers leaves absent fields out."""
    assert "null" not in (GOLDEN / "gemini_exchange.txt").read_text()
