"""What a client may know of an error, and what a log may: a kind, a code and a message made for it.

It knows no request and makes no bytes; the middleware and `answer` ask.
"""

from __future__ import annotations

import traceback

import msgspec
from aiohttp import web

from engine.errors import EngineError, EngineUnavailable, RequestRefused
from gateway.engine_refusals import refusal_of as engine_refusal
from gateway.errors import Kind, Refusal
from tenancy.errors import (
    BadName,
    BadPrice,
    BudgetExceeded,
    LedgerUnavailable,
    NameInUse,
    StoreError,
)

_HTTP_KINDS = {
    404: (Kind.NOT_FOUND, "not_found", "There is nothing at this path."),
    405: (Kind.METHOD, "method_not_allowed", "This path does not take that method."),
    413: (Kind.TOO_BIG, "request_too_large", "The body is larger than allowed."),
    417: (Kind.EXPECTATION, "unsupported_expectation", "Only Expect: 100-continue is understood."),
}


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


def refusal_of(error: Exception) -> Refusal | None:
    """What a client may know of an error; None for our own mistakes."""
    match error:
        case Refusal():
            return error
        case web.HTTPException():
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
        case NameInUse():
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


def where(error: BaseException) -> dict[str, object]:
    """Where an unforeseen error rose: types and lines. Its message may quote what a client sent."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    return {
        "error": type(error).__name__,
        "at": [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames],
    }
