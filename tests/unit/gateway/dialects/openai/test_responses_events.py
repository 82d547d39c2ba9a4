"""OpenAI's responses: stream events and the response that they add up to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response

from gateway.dialects.canonical import (
    Begin,
    Call,
    CallText,
    Cause,
    ChoiceEnd,
    Delta,
    Diagnosis,
    End,
    Reply,
    Text,
    UsageRecord,
)
from gateway.dialects.openai.responses import dialect as openai_responses
from gateway.errors import Kind, Refusal
from tests.golden.transcripts import SCRIPT, check_golden, named_events, streamed
from tests.tables import each_row

DIALECT = openai_responses.DIALECT
REPLY = Reply("resp_1", "m", 1_700_000_000)
USAGE = UsageRecord(30, {"30m": 8}, {"30m": 6, "12h": 4, "1h": 2}, 10, 5, 8)
CLOCK = {"type": "function", "name": "clock", "parameters": {"type": "object"}, "strict": True}
SPOKEN: list[Delta] = [
    Begin(USAGE),
    Text(0, "Let me "),
    Text(0, "see."),
    CallText(0, 0, "call_1", "clock"),
    CallText(0, 0, arguments='{"zone":'),
    CallText(0, 0, arguments='"UTC"}'),
    CallText(0, 1, "call_2", "clock", "{}"),
    ChoiceEnd(0, "tool_calls"),
    End(USAGE),
]


def parse(**fields: Any) -> Call:
    return DIALECT.parse(json.dumps({"model": "m", "input": "hi", **fields}).encode())


def stream(deltas: list[Delta], **fields: Any) -> bytes:
    return streamed(DIALECT.encoder(parse(stream=True, **fields), REPLY), deltas)


def unary(deltas: list[Delta], **fields: Any) -> dict[str, Any]:
    body = DIALECT.encoder(parse(**fields), REPLY).unary(deltas)
    return dict(json.loads(body))


def complete_answer(*deltas: Delta, usage: UsageRecord = USAGE) -> list[Delta]:
    return [Begin(usage), *deltas, End(usage)]


def test_stream_matches_the_golden_transcript() -> None:
    """Clients parse bytes; a changed byte is a changed contract."""
    check_golden("openai_responses_stream.txt", stream(SPOKEN, tools=[CLOCK]))


def test_unary_answer_matches_the_golden_transcript() -> None:
    """The script has logprobs."""
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    body = DIALECT.encoder(parse(**fields), REPLY).unary([d for d in SCRIPT if _of_first(d)])

    check_golden("openai_responses_unary.json", body)


def _of_first(delta: Delta) -> bool:
    return getattr(delta, "index", 0) == 0


def test_last_event_holds_the_unary_answer() -> None:
    """Both must carry the same content."""
    (_, last) = named_events(stream(SPOKEN, tools=[CLOCK]))[-1]

    assert last["response"] == unary(SPOKEN, tools=[CLOCK])


def test_text_after_a_call_is_a_new_message() -> None:
    """A closed item is never opened again."""
    deltas = complete_answer(
        CallText(0, 0, "c", "clock", "{}"), Text(0, "Done."), ChoiceEnd(0, "tool_calls")
    )

    assert [item["type"] for item in unary(deltas)["output"]] == ["function_call", "message"]


def test_truncated_answer_is_incomplete_everywhere() -> None:
    """A client may look at any one of the fields."""
    found = unary(complete_answer(Text(0, "a"), ChoiceEnd(0, "length")))

    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["output"][0]["status"] == "incomplete"
    assert named_events(stream(complete_answer(Text(0, "a"), ChoiceEnd(0, "length"))))[-1][0] == (
        "response.incomplete"
    )


def test_answer_without_text_is_an_empty_message() -> None:
    """The official client's `output_text` is then empty and not missing."""
    (message,) = unary(complete_answer(ChoiceEnd(0, "stop")))["output"]

    assert message["content"] == [
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    ]


def test_prewarm_reports_its_write_and_has_no_output() -> None:
    found = unary(complete_answer(ChoiceEnd(0, "length")), prompt_cache_options={"prewarm": True})

    assert (found["output"], found["status"], found["incomplete_details"]) == (
        [],
        "completed",
        None,
    )
    assert found["usage"]["input_tokens_details"]["cache_write_tokens"] == 12


@pytest.mark.parametrize(
    ("record", "split"),
    [
        (UsageRecord(20, {"30m": 16}, {}, 4, 5, 16), None),
        (UsageRecord(20, {}, {"30m": 12}, 20, 5, 0), {"ttl_30m_tokens": 12, "ttl_12h_tokens": 0}),
        (UsageRecord(20, {}, {"12h": 12}, 20, 5, 0), {"ttl_30m_tokens": 0, "ttl_12h_tokens": 12}),
    ],
)
def test_written_tokens_are_split_only_if_there_are_any(
    record: UsageRecord, split: dict[str, int] | None
) -> None:
    """OpenAI's agents in JS read the details as a record of numbers: an object in each of them
    ended every streamed run."""
    details = unary(complete_answer(ChoiceEnd(0, "stop"), usage=record))["usage"][
        "input_tokens_details"
    ]

    assert details.get("cache_write_tokens_details") == split
    assert ("cache_write_tokens_details" in details) == (split is not None)


def test_answer_repeats_the_requests_settings() -> None:
    """Applications read settings from the answer; defaults are filled in."""
    fields: dict[str, Any] = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "tools": [{**CLOCK, "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "function", "name": "clock"},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        "prompt_cache_key": "k",
        "prompt_cache_options": {"ttl": "12h", "comparison_response_id": "resp_0"},
        "user": "u",
    }
    found = unary(complete_answer(ChoiceEnd(0, "stop")), **fields)

    for name in ("instructions", "metadata", "tool_choice", "temperature", "prompt_cache_key"):
        assert found[name] == fields[name]
    assert found["tools"] == [{**CLOCK, "description": None}]
    assert (found["parallel_tool_calls"], found["store"], found["top_p"]) == (False, False, 1.0)
    assert found["text"]["format"]["schema"] == {"type": "object"}
    assert found["prompt_cache_options"] == {
        "mode": "implicit",
        "ttl": "12h",
        "comparison_response_id": "resp_0",
    }
    Response.model_validate(found)


CAUSES: list[tuple[Cause, str]] = [
    ("model", "model_changed"),
    ("partition", "prompt_cache_key_changed"),
    ("tools", "tools_changed"),
    ("system", "input_changed"),
    ("messages", "input_changed"),
]
READ = UsageRecord(10, {"30m": 6}, {}, 4)
COLD = UsageRecord(10, {}, {}, 10)


@each_row(
    ("diagnosis", "record", "expected"),
    [
        (None, READ, None),
        (Diagnosis("hit"), READ, {"type": "cache_hit"}),
        (Diagnosis("hit"), COLD, {"type": "unavailable"}),
        (Diagnosis("unknown"), COLD, {"type": "comparison_response_not_found"}),
        (Diagnosis("unavailable", "settings", setting="text.format"), READ, {"type": "cache_hit"}),
        (
            Diagnosis("unavailable", "settings", 0, 7, setting="text.format"),
            COLD,
            {
                "type": "cache_miss",
                "reason": "text_format_changed",
                "cache_missed_tokens": 10,
                "comparison_reusable_tokens": 7,
            },
        ),
        (Diagnosis("miss", "template", 3, 0), COLD, {"type": "unavailable"}),
        (Diagnosis("miss", "expired", 3, 7), COLD, {"type": "unavailable"}),
        *(
            (
                Diagnosis("miss", cause, 3, 7),
                READ,
                {
                    "type": "cache_miss",
                    "reason": reason,
                    "cache_missed_tokens": 3,
                    "comparison_reusable_tokens": 7,
                },
            )
            for cause, reason in CAUSES
        ),
    ],
)
def test_diagnosis_uses_openais_reasons(
    diagnosis: Diagnosis | None, record: UsageRecord, expected: object
) -> None:
    """Tokens that the engine lost are no difference between two requests."""
    deltas: list[Delta] = [Begin(record, diagnosis), ChoiceEnd(0, "stop"), End(record)]
    found = unary(deltas)

    assert found.get("prompt_cache_diagnostics") == expected
    assert ("prompt_cache_diagnostics" in found) == (expected is not None)
    Response.model_validate(found)


def test_error_before_the_first_event_opens_the_response() -> None:
    """Keep-alives may have been sent; the client's helper expects response.created first."""
    encoder = DIALECT.encoder(parse(stream=True), REPLY)
    refusal = Refusal(Kind.RATE, "x", "Too much.")
    events = named_events(encoder.error_event(refusal))

    assert [name for name, _ in events] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]
    failed = events[-1][1]["response"]
    assert failed["error"] == {"code": "rate_limit_exceeded", "message": "Too much."}
    assert failed["status"] == "failed"
    Response.model_validate(failed)
