"""Wire transcripts: one scripted answer through a dialect's encoder, compared byte for byte.

`check_golden` compares with a file in tests/golden. A missing file is written and the test fails
once, so that its author reads the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gateway.dialects.canonical import (
    Begin,
    Call,
    ChoiceEnd,
    Delta,
    End,
    Reply,
    Text,
    TokenText,
    UsageRecord,
)
from gateway.dialects.protocol import Encoder
from gateway.errors import Kind, Refusal

T = TypeVar("T")
DOCUMENT = Path(__file__).parents[2] / "docs" / "dialects.md"
GOLDEN = Path(__file__).parent
USAGE = UsageRecord(total_in=20, read={"best_effort": 16}, fresh=4, out=5, physical_cached=16)
REPLY = Reply("id-1", "smollm2", 1_700_000_000)

SMILE = "🙂".encode()
SCRIPT: list[Delta] = [
    Begin(USAGE),
    Text(1, "Gut", (TokenText(7, b"Gut", -0.5, (TokenText(7, b"Gut", -0.5),)),)),
    Text(0, "Good ", (TokenText(5, b"Good ", -0.25, (TokenText(6, b"Bad ", -1.5),)),)),
    Text(0, "🙂", (TokenText(8, SMILE[:2], -2.0), TokenText(9, SMILE[2:], -0.125))),
    ChoiceEnd(1, "length"),
    ChoiceEnd(0, "stop", "END"),
    End(USAGE),
]
"""Two choices, the second one first; a character of two tokens; both finish reasons."""


def check_golden(name: str, got: bytes) -> None:
    """Assert that `got` equals the golden file of this name."""
    path = GOLDEN / name
    if not path.exists():
        path.write_bytes(got)
        pytest.fail(f"no golden file {path.name}: wrote it; read it and run the test again")
    assert got.decode() == path.read_text()


def outcome(parse: Callable[[T], Call], asked: T) -> Call | Refusal:
    """Return the call or the refusal of what is asked; any other exception fails the test."""
    try:
        return parse(asked)
    except Refusal as refusal:
        return refusal


def refusal_of(parse: Callable[..., object], *asked: Any, **fields: Any) -> Refusal:
    """Return the refusal of what is parsed: the client's mistake."""
    with pytest.raises(Refusal) as raised:
        parse(*asked, **fields)
    assert raised.value.kind is Kind.BAD
    return raised.value


def streamed(encoder: Encoder, deltas: Sequence[Delta]) -> bytes:
    """Return the complete stream of an answer."""
    return b"".join(map(encoder.stream, deltas)) + encoder.close()


def named_events(data: bytes) -> list[tuple[str, Any]]:
    """Return name and data of each event: JSON, or `[DONE]` as text. Keep-alives are left out."""
    found: list[tuple[str, Any]] = []
    for event in data.decode().split("\n\n")[:-1]:
        if event.startswith(":"):
            continue
        *heads, line = event.split("\n")
        assert all(head.startswith("event: ") for head in heads)
        assert line.startswith("data: ")
        text = line.removeprefix("data: ")
        assert text
        name = heads[0].removeprefix("event: ") if heads else ""
        found.append((name, text if text == "[DONE]" else json.loads(text)))
    return found


def events(data: bytes) -> list[Any]:
    """Return the data of each event."""
    return [event for _, event in named_events(data)]
