"""Anthropic's Messages: answers, usage, diagnostics and errors, compared byte for byte."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from gateway.dialects.anthropic.messages import DIALECT
from gateway.dialects.canonical import (
    Begin,
    Call,
    CallText,
    Cause,
    ChoiceEnd,
    Delta,
    Diagnosis,
    End,
    GenerationParameters,
    Prompt,
    Reply,
    Text,
    UsageRecord,
)
from gateway.errors import Kind, Refusal
from tests.golden.transcripts import check_golden, named_events, streamed
from tests.tables import each_row

CALL = Call("m", (Prompt(),), GenerationParameters())
REPLY = Reply("msg_1", "smollm2", 1_700_000_000)
USAGE = UsageRecord(28, {"5m": 16}, {"5m": 3, "1h": 5}, 4, 5, 16)
BEGIN = UsageRecord(28, {"5m": 16}, {"5m": 3, "1h": 5}, 4, 0, 16)
SCRIPT: list[Delta] = [
    Begin(BEGIN, Diagnosis("miss", "system", 20, 8, "system[0]")),
    Text(0, "Let me "),
    Text(0, "see 🙂"),
    CallText(0, 0, "call_1", "weather"),
    CallText(0, 0, arguments='{"city": "Os'),
    CallText(0, 0, arguments='lo"}'),
    CallText(0, 1, "call_2", "time"),
    Text(0, "Done."),
    ChoiceEnd(0, "tool_calls"),
    End(USAGE),
]


def stream(deltas: list[Delta]) -> bytes:
    """Return the complete stream."""
    return streamed(DIALECT.encoder(CALL, REPLY), deltas)


def unary(deltas: list[Delta]) -> dict[str, Any]:
    """Return the complete message."""
    found = json.loads(DIALECT.encoder(CALL, REPLY).unary(deltas))
    assert isinstance(found, dict)
    return found


def message_with_end(end: ChoiceEnd, *before: Delta) -> list[Delta]:
    return [Begin(BEGIN), *before, end, End(USAGE)]


def test_stream_matches_the_golden_transcript() -> None:
    """Clients parse bytes; a changed byte is a changed contract."""
    check_golden("anthropic_stream.txt", stream(SCRIPT))


def test_unary_answer_matches_the_golden_transcript() -> None:
    check_golden("anthropic_unary.json", DIALECT.encoder(CALL, REPLY).unary(SCRIPT))


def test_message_start_has_the_cache_usage() -> None:
    """A client that disconnects early knows the charge of its prompt."""
    (_, start), *_, (_, last), _ = named_events(stream(SCRIPT))

    assert start["message"]["usage"]["cache_read_input_tokens"] == 16
    assert start["message"]["usage"]["output_tokens"] == 0
    assert last["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 8,
        "cache_read_input_tokens": 16,
        "output_tokens": 5,
    }


@each_row(
    ("end", "reason", "sequence"),
    [
        (ChoiceEnd(0, "stop"), "end_turn", None),
        (ChoiceEnd(0, "stop", "END"), "stop_sequence", "END"),
        (ChoiceEnd(0, "length"), "max_tokens", None),
        (ChoiceEnd(0, "tool_calls"), "tool_use", None),
    ],
)
def test_stop_reason_of_each_end(end: ChoiceEnd, reason: str, sequence: str | None) -> None:
    deltas = message_with_end(end, Text(0, "x"))
    last = named_events(stream(deltas))[-2][1]["delta"]

    assert (last["stop_reason"], last["stop_sequence"]) == (reason, sequence)
    assert unary(deltas)["stop_reason"] == reason
    assert unary(deltas)["stop_sequence"] == sequence


def test_an_answer_that_fills_the_context_has_its_own_stop_reason() -> None:
    """A client that asked for more than there is room for must not take it for its own limit."""
    deltas = message_with_end(ChoiceEnd(0, "length"), Text(0, "x"))
    more = msgspec.structs.replace(CALL.generation, max_tokens=USAGE.out + 1)
    call = msgspec.structs.replace(CALL, generation=more)
    message = json.loads(DIALECT.encoder(call, REPLY).unary(deltas))

    assert message["stop_reason"] == "model_context_window_exceeded"


def test_answer_without_text_has_no_blocks() -> None:
    """A prewarm generates nothing, and a model may too."""
    deltas = message_with_end(ChoiceEnd(0, "length"), Text(0, ""))

    assert unary(deltas)["content"] == []
    assert [name for name, _ in named_events(stream(deltas))] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]


@each_row("arguments", ['{"city": "Os', "[1]", "", "nul", "[" * 5_000])
def test_truncated_tool_input_becomes_an_empty_object(arguments: str) -> None:
    """A client that reads a message expects an object."""
    deltas = message_with_end(
        ChoiceEnd(0, "length"), CallText(0, 0, "c", "t"), CallText(0, 0, arguments=arguments)
    )

    assert unary(deltas)["content"][0]["input"] == {}


def test_tool_input_keeps_key_order_and_numbers() -> None:
    deltas = message_with_end(
        ChoiceEnd(0, "tool_calls"),
        CallText(0, 0, "c", "t", '{"b":1.50,"a":12345678901234567890123}'),
    )
    data = DIALECT.encoder(CALL, REPLY).unary(deltas)

    assert b'{"b":1.50,"a":12345678901234567890123}' in data


LOST: tuple[Cause, ...] = (
    *("expired", "evicted_pressure", "restarted", "below_minimum", "window_gone"),
    *("template", "other_namespace", "partition"),
)
"""Causes that are no difference between two requests, for which Anthropic has no reason."""


@each_row(
    ("found", "expected"),
    [
        (None, None),
        (Diagnosis("hit"), None),
        (Diagnosis("unknown"), {"type": "previous_message_not_found"}),
        (Diagnosis("unavailable", "settings", setting="thinking"), {"type": "unavailable"}),
        *((Diagnosis("miss", cause, 7), {"type": "unavailable"}) for cause in LOST),
        *(
            (
                Diagnosis("miss", cause, 7),
                {"type": f"{cause}_changed", "cache_missed_input_tokens": 7},
            )
            for cause in ("model", "tools", "system", "messages")
        ),
        (
            Diagnosis("miss", "system", 7, path="messages[0].content"),
            {"type": "system_changed", "cache_missed_input_tokens": 7},
        ),
        (
            Diagnosis("miss", "system", 7, path="messages[3].content"),
            {"type": "messages_changed", "cache_missed_input_tokens": 7},
        ),
    ],
)
def test_diagnosis_uses_anthropics_reasons(
    found: Diagnosis | None, expected: dict[str, Any] | None
) -> None:
    """Stream and message carry the same diagnosis."""
    deltas: list[Delta] = [Begin(BEGIN, found), ChoiceEnd(0, "stop"), End(USAGE)]
    reason = expected and {"cache_miss_reason": expected}

    assert unary(deltas)["diagnostics"] == reason
    assert named_events(stream(deltas))[0][1]["message"]["diagnostics"] == reason


# --- errors ------------------------------------------------------------------------------------


def test_stream_error_has_the_request_id() -> None:
    """Support finds the request by the id of the header."""
    refusal = Refusal(Kind.BUSY, "engine_restarting", "The engine stopped.")
    ((name, event),) = named_events(DIALECT.encoder(CALL, REPLY).error_event(refusal))

    assert name == event["type"] == "error"
    assert event["error"]["type"] == "overloaded_error"
    assert event["request_id"] == DIALECT.headers("1")["request-id"] == "req_1"


def test_keep_alive_is_a_ping_event() -> None:
    assert DIALECT.keep_alive() == b'event: ping\ndata: {"type":"ping"}\n\n'
