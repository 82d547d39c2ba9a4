"""What a client, and what a log, may know of an error."""

from __future__ import annotations

import json

import msgspec
import pytest
from aiohttp import web

from engine.errors import EngineError, EngineUnavailable, RequestRefused
from gateway.errors import Kind, Refusal
from gateway.refusals import refusal_of, where
from tenancy.errors import LedgerUnavailable


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Refusal(Kind.QUOTA, "q", "m"), Kind.QUOTA),
        (msgspec.ValidationError("x"), Kind.BAD),
        (msgspec.DecodeError("x"), Kind.BAD),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "x"), Kind.BAD),
        (RecursionError(), Kind.BAD),
        (MemoryError(), Kind.BUSY),
        (EngineUnavailable("not_ready", "m", 2.0), Kind.BUSY),
        (RequestRefused("context_exceeded", "m"), Kind.BAD),
        (RequestRefused("poison_request", "m"), Kind.INTERNAL),
        (LedgerUnavailable("not_durable", "m"), Kind.BUSY),
        (web.HTTPNotFound(), Kind.NOT_FOUND),
        (web.HTTPMethodNotAllowed("GET", ["POST"]), Kind.METHOD),
        (web.HTTPRequestEntityTooLarge(1, 2), Kind.TOO_BIG),
    ],
)
def test_known_errors_have_a_kind(error: Exception, kind: Kind) -> None:
    """RecursionError and UnicodeDecodeError are no msgspec errors: unmapped they are a 500."""
    refusal = refusal_of(error)

    assert refusal is not None
    assert refusal.kind is kind


@pytest.mark.parametrize("error", [ValueError("secret"), EngineError("invariant", "secret")])
def test_our_own_mistakes_say_nothing_to_clients(error: Exception) -> None:
    """Messages of unforeseen errors quote what clients sent, or how we are built."""
    assert refusal_of(error) is None


def test_where_names_lines_and_never_the_message() -> None:
    """A traceback's text repeats what was sent."""
    try:
        raise ValueError("the planted prompt")
    except ValueError as error:
        facts = where(error)

    assert facts["error"] == "ValueError"
    assert "planted" not in json.dumps(facts)
