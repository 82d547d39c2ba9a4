"""Errors as a client hears them: a kind, a stable code and a message made for it.

Exceptions of the engine, of tenancy and of aiohttp, and the engine's own codes, become `Refusal`s.
It knows no request and makes no bytes; `middleware`, `answer` and `stream` call it.
"""

from __future__ import annotations

import traceback

import msgspec
from aiohttp import web

from engine.errors import EngineError, EngineUnavailable, RequestRefused
from gateway.errors import Kind, Refusal
from tenancy.errors import (
    BadName,
    BadPrice,
    BudgetExceeded,
    IdempotencyConflict,
    LedgerUnavailable,
    StoreError,
)

_HTTP_KINDS = {
    404: (Kind.NOT_FOUND, "not_found", "There is nothing at this path."),
    405: (Kind.METHOD, "method_not_allowed", "This path does not take that method."),
    413: (Kind.TOO_BIG, "request_too_large", "The body is larger than allowed."),
    417: (Kind.EXPECTATION, "unsupported_expectation", "Only Expect: 100-continue is understood."),
}


_STORES = "Nothing is stored here, so that there is nothing to get back."
_NOT_SERVED = {
    "embeddings": "There are no embeddings here: this server generates text.",
    "images": "There are no images here: this server generates text.",
    "videos": "There are no videos here: this server generates text.",
    "audio": "There is no audio here: this server generates text.",
    "realtime": "There are no realtime sessions here; answers can be streamed.",
    "moderations": "Nothing is moderated here.",
    "complete": "The older completions are not spoken here; /v1/messages is.",
    "batches": "There are no batches here; send the requests one by one.",
    "messages/batches": "There are no batches here; send the requests one by one.",
    "files": "There are no files here; send their text.",
    "uploads": "There are no files here; send their text.",
    "vector_stores": "There are no files here; send their text.",
    "fine_tuning": "Models are not trained here.",
    "tunedModels": "Models are not trained here.",
    "assistants": "There are no assistants here; /v1/responses and /v1/chat/completions are.",
    "threads": "There are no assistants here; /v1/responses and /v1/chat/completions are.",
    "interactions": "There are no interactions here; generateContent is.",
    "conversations": _STORES,
    "chat/completions": _STORES,
}
"""What clients of hosted APIs ask for, by the path behind the version, and why it is not here."""


def _not_served(path: str) -> Refusal | None:
    steps = [step for step in path.split("/")[:5] if step not in ("", "v1", "v1beta", "upload")]
    message = _NOT_SERVED.get("/".join(steps[:2])) or _NOT_SERVED.get("".join(steps[:1]))
    return None if message is None else Refusal(Kind.NOT_FOUND, "not_served", message)


_NAME_KINDS = {
    "tenant_unknown": Kind.NOT_FOUND,
    "key_unknown": Kind.NOT_FOUND,
    "name_taken": Kind.CONFLICT,
    "tenant_in_use": Kind.CONFLICT,
    "tenant_deleted": Kind.CONFLICT,
    "tenant_declared": Kind.CONFLICT,
    "key_not_live": Kind.CONFLICT,
    "key_declared": Kind.CONFLICT,
    "scope_unknown": Kind.NOT_FOUND,
    "scope_declared": Kind.CONFLICT,
    "scope_overlap": Kind.CONFLICT,
}
"""What administrators' calls are refused for; any other code is a value that cannot be."""

_NAME_RETRIES = {
    "idempotency_in_flight": (Kind.CONFLICT, 1.0),
    "idempotency_room_full": (Kind.RATE, 60.0),
}
"""When a named request may be sent again; at any other code never."""


def refusal_of(error: Exception, path: str = "") -> Refusal | None:
    """What a client may know of an error at a path; None for our own mistakes."""
    match error:
        case Refusal():
            return error
        case web.HTTPException():
            missing = _not_served(path) if error.status == 404 else None
            if missing is not None:
                return missing
            kind, code, message = _HTTP_KINDS.get(
                error.status, (Kind.BAD, "bad_http", "The request could not be understood.")
            )
            return Refusal(kind, code, message)
        case EngineUnavailable():
            return engine_refusal(error.code, error.message, error.retry_after_s)
        case RequestRefused():
            return engine_refusal(error.code, error.message)
        case EngineError():
            return None
        case BadName():
            return Refusal(_NAME_KINDS.get(error.code, Kind.BAD), error.code, error.message)
        case StoreError():
            message = "The database cannot be read or written now. Try again."
            return Refusal(Kind.BUSY, "database_unavailable", message, retry_after_s=5.0)
        case BudgetExceeded():
            after_s = error.retry_after_s
            return Refusal(Kind.QUOTA, error.code, error.message, retry_after_s=after_s)
        case IdempotencyConflict():
            kind, retry_s = _NAME_RETRIES.get(error.code, (Kind.CONFLICT, None))
            return Refusal(kind, error.code, error.message, retry_after_s=retry_s)
        case BadPrice():
            return Refusal(Kind.BAD, error.code, error.message)
        case LedgerUnavailable():
            message = "Usage cannot be recorded now, so nothing is answered. Try again."
            return Refusal(Kind.BUSY, "ledger_unavailable", message, retry_after_s=5.0)
        case msgspec.MsgspecError() | UnicodeDecodeError():
            return Refusal(Kind.BAD, "invalid_json", "The body is not valid JSON.")
        case RecursionError():
            return Refusal(Kind.BAD, "invalid_json", "The body is nested too deeply.")
        case MemoryError():
            message = "Not enough memory for this request now."
            return Refusal(Kind.BUSY, "overloaded", message, retry_after_s=5.0)
        case _:
            return None


_ENGINE_CODES: dict[str, tuple[Kind, str]] = {
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
"""The engine's stable codes: the kind and the code that clients see."""

_OF_A_SCHEMA = frozenset(code for code in _ENGINE_CODES if code.startswith("grammar_"))


def engine_refusal(
    code: str,
    message: str,
    retry_after_s: float | None = None,
    *,
    schema_field: str | None = None,
) -> Refusal:
    """An engine's refusal or failure, by its code. O(1).

    `schema_field`: the request's field with the schema of the answer, for what the engine finds
    wrong with that schema.
    """
    kind, name = _ENGINE_CODES.get(code, (Kind.INTERNAL, "internal_error"))
    if kind is Kind.BUSY and retry_after_s is None:
        retry_after_s = 1.0
    param = schema_field if code in _OF_A_SCHEMA else None
    return Refusal(kind, name, message, param=param, retry_after_s=retry_after_s)


def where(error: BaseException) -> dict[str, object]:
    """Where an unforeseen error rose: types and lines. Its message may quote what a client sent."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    return {
        "error": type(error).__name__,
        "at": [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames],
    }
