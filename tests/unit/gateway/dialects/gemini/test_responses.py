"""Gemini's dialect: answers, streams and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.api import Sampling
from gateway.dialects.canonical import (
    Begin,
    Call,
    CallText,
    ChoiceEnd,
    Delta,
    End,
    GenerationParameters,
    Prompt,
    Reply,
    Text,
    TokenText,
    UsageRecord,
)
from gateway.dialects.gemini.generate_content import ARRAY_DIALECT, DIALECT, GeminiDialect
from gateway.errors import Kind, Refusal
from tests.golden.transcripts import REPLY, SCRIPT, check_golden

USAGE = UsageRecord(20, {"resource": 8}, {}, 12, 5, 8)


def encode(deltas: list[Delta], **settings: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return (chunks of the stream, the unary answer) of the same deltas."""
    call = Call("m", (Prompt(),), GenerationParameters(**settings))
    reply = Reply("id", "m", 7)
    streamed, folded = DIALECT.encoder(call, reply), DIALECT.encoder(call, reply)
    data = b"".join(map(streamed.stream, deltas)) + streamed.close()
    lines = [line for line in data.split(b"\n") if line]
    assert all(line.startswith(b"data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines], json.loads(folded.unary(deltas))


TEXT: list[Delta] = [
    Begin(USAGE),
    Text(0, "Hel"),
    Text(0, "lo"),
    ChoiceEnd(0, "stop"),
    End(USAGE),
]


def test_streams_text_and_ends_with_a_finish_reason() -> None:
    """Every chunk has usage; the last is final."""
    chunks, whole = encode(TEXT)

    assert [c["candidates"][0]["content"]["parts"] for c in chunks] == [
        [{"text": "Hel"}],
        [{"text": "lo"}],
        [{"text": ""}],
    ]
    assert [c["candidates"][0].get("finishReason") for c in chunks] == [None, None, "STOP"]
    assert whole["candidates"][0]["content"]["parts"] == [{"text": "Hello"}]
    assert whole["usageMetadata"] == {
        "promptTokenCount": 20,
        "cachedContentTokenCount": 8,
        "candidatesTokenCount": 5,
        "totalTokenCount": 25,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 20}],
        "cacheTokensDetails": [{"modality": "TEXT", "tokenCount": 8}],
    }


def test_function_calls_are_sent_complete_and_finish_with_stop() -> None:
    """Gemini's clients cannot join pieces of arguments."""
    deltas: list[Delta] = [
        Begin(USAGE),
        CallText(0, 0, "c0", "weather", '{"city":'),
        CallText(0, 0, arguments='"Bern"}'),
        CallText(0, 1, "c1", "weather", "{}"),
        ChoiceEnd(0, "tool_calls"),
        End(USAGE),
    ]

    chunks, whole = encode(deltas)

    parts = [part for c in chunks for part in c["candidates"][0]["content"]["parts"]]
    assert parts == [
        {"functionCall": {"id": "c0", "name": "weather", "args": {"city": "Bern"}}},
        {"functionCall": {"id": "c1", "name": "weather", "args": {}}},
    ]
    assert whole["candidates"][0]["content"]["parts"] == parts
    assert chunks[-1]["candidates"][0]["finishReason"] == "STOP"


def test_only_an_empty_answer_has_a_chunk_without_parts() -> None:
    """The SDK's chats drop a turn with such a chunk as invalid."""
    calls: list[Delta] = [
        Begin(USAGE),
        Text(0, "Well."),
        CallText(0, 0, "c0", "weather", "{}"),
        ChoiceEnd(0, "tool_calls"),
        End(USAGE),
    ]
    cut: list[Delta] = [
        *calls[:3],
        CallText(0, 1, "c1", "weather", '{"city":'),
        ChoiceEnd(0, "length"),
        End(USAGE),
    ]

    silent = encode([Begin(USAGE), ChoiceEnd(0, "stop"), End(USAGE)])
    found = [encode(deltas) for deltas in (TEXT, calls, cut)]

    assert [_parts_of(chunk) for chunk in silent[0]] == [[]]
    assert all(_parts_of(chunk) for chunks, _ in found for chunk in chunks)
    assert _parts_of(found[1][0][-1])[0]["functionCall"]["id"] == "c0"
    assert [list(part) for part in _parts_of(found[2][1])] == [["text"], ["functionCall"]]


def _parts_of(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chunk["candidates"][0]["content"]["parts"]
    return found


@pytest.mark.parametrize("arguments", ['{"city":', "[1]", '{"city":' * 10_000 + "1" + "}" * 10_000])
def test_unreadable_call_is_malformed_function_call(arguments: str) -> None:
    """Truncated arguments must never look complete; a model may nest them without end."""
    deltas: list[Delta] = [
        Begin(USAGE),
        CallText(0, 0, "c0", "weather", arguments),
        ChoiceEnd(0, "length"),
        End(USAGE),
    ]

    chunks, _ = encode(deltas)

    assert chunks[-1]["candidates"][0]["finishReason"] == "MALFORMED_FUNCTION_CALL"


def test_last_chunk_has_the_logprobs() -> None:
    """Chosen tokens, their alternatives and the mean."""
    token = TokenText(5, b"Hi", -0.5, (TokenText(5, b"Hi", -0.5), TokenText(6, b"Ho", -1.5)))
    deltas: list[Delta] = [
        Begin(USAGE),
        Text(0, "Hi", (token,)),
        ChoiceEnd(0, "length"),
        End(USAGE),
    ]

    _, whole = encode(deltas, sampling=Sampling(logprobs=2))

    last = whole["candidates"][0]
    assert last["finishReason"] == "MAX_TOKENS"
    assert last["avgLogprobs"] == -0.5
    assert [t["tokenId"] for t in last["logprobsResult"]["topCandidates"][0]["candidates"]] == [
        5,
        6,
    ]


def test_stream_without_sse_is_a_json_array() -> None:
    """REST clients that request no events read it."""
    encoder = ARRAY_DIALECT.encoder(
        Call("m", (Prompt(),), GenerationParameters()), Reply("id", "m", 7)
    )
    data = b"".join(map(encoder.stream, TEXT)) + encoder.close()

    assert len(json.loads(data)) == 3


def test_failed_stream_ends_with_an_error_chunk() -> None:
    """A failed array is still valid JSON."""
    refusal = Refusal(Kind.INTERNAL, "internal_error", "Broken.")
    call, reply = Call("m", (Prompt(),), GenerationParameters()), Reply("id", "m", 7)
    events = DIALECT.encoder(call, reply).error_event(refusal)
    array = ARRAY_DIALECT.encoder(call, reply)
    data = b"".join(map(array.stream, TEXT[:2])) + array.error_event(refusal)

    assert events.startswith(b'data: {"error":{"code":500')
    assert json.loads(data)[-1]["error"]["status"] == "INTERNAL"


WHOLE: list[Delta] = [
    *SCRIPT[:-3],
    CallText(0, 0, "c0", "weather", '{"city":"B'),
    CallText(0, 0, arguments='ern"}'),
    *SCRIPT[-3:],
]
"""The script of all dialects, with a tool call."""


@pytest.mark.parametrize(
    ("name", "dialect"),
    [("gemini_stream.txt", DIALECT), ("gemini_array.json", ARRAY_DIALECT)],
)
def test_stream_matches_the_golden_transcript(name: str, dialect: GeminiDialect) -> None:
    """Clients parse bytes; a changed byte is a changed contract."""
    settings = GenerationParameters(choices=2, samples=2, sampling=Sampling(logprobs=1))
    encoder = dialect.encoder(Call("smollm2", (Prompt(),), settings), REPLY)

    check_golden(name, b"".join(map(encoder.stream, WHOLE)) + encoder.close())


def test_unary_answer_matches_the_golden_transcript() -> None:
    settings = GenerationParameters(choices=2, samples=2, sampling=Sampling(logprobs=1))
    encoder = DIALECT.encoder(Call("smollm2", (Prompt(),), settings), REPLY)

    check_golden("gemini_unary.json", encoder.unary(WHOLE))
