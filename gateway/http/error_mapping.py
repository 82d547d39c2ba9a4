"""What a client may know of an error, and what a log may: a kind, a code and a message made for it.

It knows no request and makes no bytes; the middleware and `answer` ask.
"""

from __future__ import annotations

import traceback

import msgspec
from aiohttp import web

from engine.errors import EngineError, EngineUnavailable, RequestRefused
from gateway.errors import Kind, Refusal
from gateway.http.engine_refusals import refusal_of as engine_refusal
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
