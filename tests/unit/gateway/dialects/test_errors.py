"""Errors of every dialect: status, type and shape, and the words that clients look for."""

from __future__ import annotations

import json
from typing import Any

from gateway.errors import TOO_LONG, Kind, Refusal
from tests.tables import each_row
from tests.unit.gateway.dialects.requests import CHAT, ENDPOINTS, GEMINI, MESSAGES, Endpoint

Shown = tuple[int, str]
"""Status and type of an error."""
KINDS: list[tuple[Kind, Shown, Shown, Shown]] = [
    (
        Kind.BAD,
        (400, "invalid_request_error"),
        (400, "invalid_request_error"),
        (400, "INVALID_ARGUMENT"),
    ),
    (
        Kind.AUTH,
        (401, "authentication_error"),
        (401, "authentication_error"),
        (401, "UNAUTHENTICATED"),
    ),
    (
        Kind.PERMISSION,
        (403, "permission_error"),
        (403, "permission_error"),
        (403, "PERMISSION_DENIED"),
    ),
    (Kind.NOT_FOUND, (404, "invalid_request_error"), (404, "not_found_error"), (404, "NOT_FOUND")),
    (
        Kind.METHOD,
        (405, "invalid_request_error"),
        (405, "invalid_request_error"),
        (404, "NOT_FOUND"),
    ),
    (
        Kind.TIMEOUT,
        (408, "invalid_request_error"),
        (408, "timeout_error"),
        (400, "INVALID_ARGUMENT"),
    ),
    (Kind.CONFLICT, (409, "invalid_request_error"), (409, "conflict_error"), (409, "ABORTED")),
    (
        Kind.TOO_BIG,
        (413, "invalid_request_error"),
        (413, "request_too_large"),
        (413, "INVALID_ARGUMENT"),
    ),
    (Kind.RATE, (429, "rate_limit_error"), (429, "rate_limit_error"), (429, "RESOURCE_EXHAUSTED")),
    (Kind.QUOTA, (429, "insufficient_quota"), (402, "billing_error"), (429, "RESOURCE_EXHAUSTED")),
    (Kind.INTERNAL, (500, "server_error"), (500, "api_error"), (500, "INTERNAL")),
    (Kind.BUSY, (503, "server_error"), (529, "overloaded_error"), (503, "UNAVAILABLE")),
    (Kind.DEADLINE, (504, "server_error"), (504, "timeout_error"), (504, "DEADLINE_EXCEEDED")),
]


def error_of(endpoint: Endpoint, refusal: Refusal) -> tuple[int, Any]:
    """Return the status and the body of an error."""
    status, body = endpoint.dialect.error_body(refusal, "r1")
    return status, json.loads(body)


@each_row(("kind", "openai", "anthropic", "gemini"), KINDS)
def test_status_type_and_shape_of_each_kind(
    kind: Kind, openai: Shown, anthropic: Shown, gemini: Shown
) -> None:
    """Clients retry by status, and operators search by type."""
    refusal = Refusal(kind, "c", "m", param="p")
    status, theirs = gemini

    assert error_of(CHAT, refusal) == (
        openai[0],
        {"error": {"message": "m", "type": openai[1], "param": "p", "code": "c"}},
    )
    details = {"error_code": "c", "param": "p"}
    assert error_of(MESSAGES, refusal) == (
        anthropic[0],
        {
            "type": "error",
            "error": {"type": anthropic[1], "message": "m", "details": details},
            "request_id": "req_r1",
        },
    )
    found, body = error_of(GEMINI, refusal)
    assert (found, body["error"]["code"], body["error"]["status"]) == (status, status, theirs)


def test_a_retry_is_a_detail_of_geminis_errors() -> None:
    """Where Google's own endpoint tells the delay and the field."""
    _, body = error_of(
        GEMINI, Refusal(Kind.BUSY, "overloaded", "Busy.", param="p", retry_after_s=3)
    )

    reason, violation, retry = body["error"]["details"]
    assert reason["reason"] == "OVERLOADED"
    assert violation["fieldViolations"] == [{"field": "p", "description": "Busy."}]
    assert retry["retryDelay"] == "3s"


# --- words ---------------------------------------------------------------------------------------

DETAIL = "This model's maximum context length is 64 tokens, and so on."
OPENAI = "Input tokens exceed the configured limit of 64 tokens"
WORDS = {
    "chat": OPENAI,
    "completions": OPENAI,
    "responses": OPENAI,
    "messages": "prompt is too long: 65 tokens > 64 maximum",
    "gemini": "input token count (65) exceeds the maximum number of tokens allowed (64)",
}


def message(name: str, refusal: Refusal) -> str:
    """Return the message of an error body."""
    return str(error_of(ENDPOINTS[name], refusal)[1]["error"]["message"])


@each_row("name", WORDS)
def test_a_too_long_request_says_what_clients_look_for(name: str) -> None:
    """Fallbacks to larger models, trimming and summaries start by these words."""
    found = message(name, Refusal(Kind.BAD, TOO_LONG, DETAIL, size=(65, 64)))

    assert WORDS[name] in found
    assert found.endswith(DETAIL)


@each_row("name", WORDS)
def test_the_words_stay_without_a_known_size(name: str) -> None:
    """The engine's own refusal has no counts."""
    start = WORDS[name].split("(")[0].split(":")[0].removesuffix(" of 64 tokens")

    assert start.strip() in message(name, Refusal(Kind.BAD, TOO_LONG, DETAIL))


def test_other_errors_keep_their_words() -> None:
    """Only a request that is too long has words of its dialect."""
    refusal = Refusal(Kind.BAD, "invalid_value", "temperature: too high.")

    assert {message(name, refusal) for name in WORDS} == {"temperature: too high."}
