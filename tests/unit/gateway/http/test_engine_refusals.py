"""What a client hears of the engine's codes."""

from __future__ import annotations

import pytest

from gateway.errors import Kind
from gateway.http.engine_refusals import refusal_of


@pytest.mark.parametrize(
    ("code", "kind", "name"),
    [
        ("context_exceeded", Kind.BAD, "context_length_exceeded"),
        ("kv_exceeded", Kind.BAD, "context_length_exceeded"),
        ("token_out_of_range", Kind.BAD, "invalid_value"),
        ("queue_full", Kind.BUSY, "overloaded"),
        ("timeout", Kind.BUSY, "queue_timeout"),
        ("draining", Kind.BUSY, "shutting_down"),
        ("nan_logits", Kind.INTERNAL, "internal_error"),
        ("grammar_invalid", Kind.BAD, "invalid_json_schema"),
        ("grammar_too_big", Kind.BAD, "json_schema_too_complex"),
        ("grammar_unsupported", Kind.BAD, "unsupported_value"),
        ("grammar_dead_end", Kind.BAD, "invalid_json_schema"),
        ("kv_promised", Kind.BUSY, "cache_memory_promised"),
        ("a code of the future", Kind.INTERNAL, "internal_error"),
    ],
)
def test_the_engines_codes_have_their_place(code: str, kind: Kind, name: str) -> None:
    """A client's mistake is a 4xx, ours a 5xx, and a busy hour says when to come back."""
    refusal = refusal_of(code, "why")

    assert (refusal.kind, refusal.code) == (kind, name)
    assert (refusal.retry_after_s is not None) == (kind is Kind.BUSY)


@pytest.mark.parametrize(
    "code", ["grammar_invalid", "grammar_too_big", "grammar_unsupported", "grammar_dead_end"]
)
def test_what_is_wrong_with_a_schema_names_its_field(code: str) -> None:
    """Only the engine can tell, and it knows no fields."""
    assert refusal_of(code, "why", schema_field="tools[0]").param == "tools[0]"


def test_what_has_nothing_to_do_with_a_schema_names_none() -> None:
    """A full queue is no fault of the schema that waits in it."""
    assert refusal_of("queue_full", "why", schema_field="tools[0]").param is None
