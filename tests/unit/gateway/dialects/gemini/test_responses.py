"""Gemini's dialect: what goes out, whole and in pieces, and how errors are said."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

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
    """(chunks of the stream, the unary answer) of the same deltas."""
    call = Call("m", (Prompt(),), GenerationParameters(**settings))
    reply = Reply("id", "m", 7)
    streamed, folded = DIALECT.encoder(call, reply), DIALECT.encoder(call, reply)
    data = b"".join(map(streamed.stream, deltas)) + streamed.close()
    lines = [line for line in data.split(b"\n") if line]
    assert all(line.startswith(b"data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines], json.loads(folded.unary(deltas))


def test_an_error_is_googles_with_its_details() -> None:
    """`error` is the first key, its code a number, and when to try again a detail."""
    status, body = DIALECT.error_body(
        Refusal(Kind.BUSY, "overloaded", "Busy.", retry_after_s=3), "id"
    )
    error = json.loads(body)["error"]

    assert (status, error["code"], error["status"]) == (503, 503, "UNAVAILABLE")
    assert error["details"][-1]["retryDelay"] == "3s"


TEXT: list[Delta] = [
    Begin(USAGE),
    Text(0, "Hel"),
    Text(0, "lo"),
    ChoiceEnd(0, "stop"),
    End(USAGE),
]


def test_text_comes_in_pieces_and_the_last_chunk_says_why_it_ends() -> None:
    """Usage is in every chunk; the last is the truth."""
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


def test_calls_come_whole_in_order_and_finish_with_stop() -> None:
    """Pieces of arguments are nothing to this client."""
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


def test_only_an_answer_that_says_nothing_has_a_chunk_without_parts() -> None:
    """The SDK's chats take a turn with such a chunk for invalid, and forget it."""
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


def test_a_broken_call_is_said_to_be_one() -> None:
    """Arguments that were cut are never handed on as if they were whole."""
    deltas: list[Delta] = [
        Begin(USAGE),
        CallText(0, 0, "c0", "weather", '{"city":'),
        ChoiceEnd(0, "length"),
        End(USAGE),
    ]

    chunks, _ = encode(deltas)

    assert chunks[-1]["candidates"][0]["finishReason"] == "MALFORMED_FUNCTION_CALL"


def test_logprobs_come_with_the_end() -> None:
    """Chosen tokens with their alternatives, and the mean."""
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


def test_without_sse_a_stream_is_one_array() -> None:
    """What REST clients read that did not ask for events."""
    encoder = ARRAY_DIALECT.encoder(
        Call("m", (Prompt(),), GenerationParameters()), Reply("id", "m", 7)
    )
    data = b"".join(map(encoder.stream, TEXT)) + encoder.close()

    assert len(json.loads(data)) == 3


def test_an_answer_that_breaks_off_is_an_error_chunk() -> None:
    """Within a stream, and within an array, which stays one."""
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
"""The script of every dialect, with a call."""


@pytest.mark.parametrize(
    ("name", "dialect"),
    [("gemini_stream.txt", DIALECT), ("gemini_array.json", ARRAY_DIALECT)],
)
def test_a_stream_is_the_transcript_to_the_byte(name: str, dialect: GeminiDialect) -> None:
    """What goes over the wire is a contract; a change of it is seen here."""
    settings = GenerationParameters(choices=2, samples=2, sampling=Sampling(logprobs=1))
    encoder = dialect.encoder(Call("smollm2", (Prompt(),), settings), REPLY)

    check_golden(name, b"".join(map(encoder.stream, WHOLE)) + encoder.close())


def test_a_unary_answer_is_the_transcript_to_the_byte() -> None:
    """The same deltas, gathered."""
    settings = GenerationParameters(choices=2, samples=2, sampling=Sampling(logprobs=1))
    encoder = DIALECT.encoder(Call("smollm2", (Prompt(),), settings), REPLY)

    check_golden("gemini_unary.json", encoder.unary(WHOLE))


PIECES = st.lists(st.text("ab{}\n\u00e4", min_size=1, max_size=5), max_size=6)


@given(PIECES, st.sampled_from(["stop", "length"]))
def test_the_unary_answer_is_the_fold_of_the_stream(pieces: list[str], reason: Any) -> None:
    """And both are what the SDK's own types read."""
    deltas: list[Delta] = [Begin(USAGE), *(Text(0, piece) for piece in pieces)]
    deltas += [ChoiceEnd(0, reason), End(USAGE)]

    chunks, whole = encode(deltas)

    read = [types.GenerateContentResponse.model_validate(chunk) for chunk in chunks]
    text = "".join(
        part.text or ""
        for chunk in read
        for candidate in chunk.candidates or []
        for part in (candidate.content and candidate.content.parts) or []
    )
    folded = types.GenerateContentResponse.model_validate(whole)
    assert text == "".join(pieces) == (folded.text or "")
    assert whole["usageMetadata"] == chunks[-1]["usageMetadata"]
