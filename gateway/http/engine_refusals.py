"""The engine's refusals and failures, as a client hears them.

It knows the engine's stable codes and nothing of requests; `stream` and `refusals` call it.
"""

from __future__ import annotations

from gateway.errors import Kind, Refusal

_REFUSALS: dict[str, tuple[Kind, str]] = {
    "prompt_empty": (Kind.BAD, "invalid_value"),
    "token_out_of_range": (Kind.BAD, "invalid_value"),
    "context_exceeded": (Kind.BAD, "context_length_exceeded"),
    "kv_exceeded": (Kind.BAD, "context_length_exceeded"),
    "kv_promised": (Kind.BUSY, "cache_memory_promised"),
    "duplicate_request": (Kind.CONFLICT, "duplicate_request"),
    "poison_request": (Kind.INTERNAL, "poison_request"),
    "queue_full": (Kind.BUSY, "overloaded"),
    "timeout": (Kind.BUSY, "queue_timeout"),
    "draining": (Kind.BUSY, "shutting_down"),
    "engine_died": (Kind.BUSY, "engine_restarting"),
    "not_ready": (Kind.BUSY, "engine_starting"),
    "step_failed": (Kind.INTERNAL, "internal_error"),
    "nan_logits": (Kind.INTERNAL, "internal_error"),
    "grammar_invalid": (Kind.BAD, "invalid_json_schema"),
    "grammar_too_big": (Kind.BAD, "json_schema_too_complex"),
    "grammar_unsupported": (Kind.BAD, "unsupported_value"),
    "grammar_dead_end": (Kind.BAD, "invalid_json_schema"),
}
"""The engine's stable codes in the gateway's terms."""

_OF_A_SCHEMA = frozenset(code for code in _REFUSALS if code.startswith("grammar_"))


def refusal_of(
    code: str,
    message: str,
    retry_after_s: float | None = None,
    *,
    schema_field: str | None = None,
) -> Refusal:
    """An engine's refusal or failure, as the client hears it. `schema_field`: where what its answer
    is held to stands in the request, for what the engine finds wrong with that."""
    kind, name = _REFUSALS.get(code, (Kind.INTERNAL, "internal_error"))
    if kind is Kind.BUSY and retry_after_s is None:
        retry_after_s = 1.0
    param = schema_field if code in _OF_A_SCHEMA else None
    return Refusal(kind, name, message, param=param, retry_after_s=retry_after_s)
