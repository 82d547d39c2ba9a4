"""Maps errors to refusals: a kind, a stable code and a message for the client.

Exceptions of the engine, tenancy and aiohttp, and the engine's codes, become `Refusal`s. It knows
no request and makes no bytes. `gateway.http.middleware` and `gateway.generation` call it.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from engine.errors import EngineError, EngineUnavailable, RequestRefused
from gateway.errors import Kind, Refusal
from gateway.http.route_table import PathNotFound
from tenancy.errors import (
    BadName,
    BadPrice,
    BudgetExceeded,
    IdempotencyConflict,
    LedgerUnavailable,
    StoreError,
)

_PATH_CHARS_MAX = 100
"""Most characters of a path that a message quotes."""

_HTTP_KINDS = {
    404: (Kind.NOT_FOUND, "not_found", "Path not found."),
    413: (Kind.TOO_BIG, "request_too_large", "Request body too large."),
    417: (
        Kind.EXPECTATION,
        "unsupported_expectation",
        "Unsupported Expect header; expected 100-continue.",
    ),
}

_VERSIONS = ("", "v1", "v1beta", "v1alpha", "upload")
"""What stands before an endpoint in a path of a hosted API."""
_TOKENIZES = "The tokenizer is at /tokenize, /detokenize and /tokenizer_info, without /v1."
_STORES = "Chat completions are not stored, so none can be read; POST /v1/responses stores answers."
_GENERATES = "{} is not supported; this server generates text."
_NOT_SERVED = {
    "admin": "Administration is on the admin listener (`admin.listen`).",
    "metrics": "Metrics are on the admin listener (`admin.listen`), as GET /metrics.",
    "embeddings": "Embeddings are made by POST /v1/embeddings, and not stored.",
    "rerank": _GENERATES.format("Ranking"),
    "score": _GENERATES.format("Scoring"),
    "classify": _GENERATES.format("Classification"),
    "pooling": _GENERATES.format("Pooling"),
    "tokenize": _TOKENIZES,
    "detokenize": _TOKENIZES,
    "tokenizer_info": _TOKENIZES,
    "generate": "This path is not supported; use /v1/completions.",
    "api": "Ollama's API is not supported; use /v1/chat/completions.",
    "images": "Generating images is not supported; this server generates text.",
    "videos": "Generating videos is not supported; this server generates text.",
    "audio": "Generating audio is not supported; this server generates text.",
    "realtime": "Realtime sessions are not supported; use streaming.",
    "moderations": "Moderation is not supported.",
    "complete": "Legacy completions are not supported; use /v1/messages.",
    "batches": "Batches are not supported; send the requests one by one.",
    "messages/batches": "Batches are not supported; send the requests one by one.",
    "files": "Uploading files is not supported; send their text.",
    "uploads": "Uploading files is not supported; send their text.",
    "containers": "Uploading files is not supported; send their text.",
    "fileSearchStores": "Uploading files is not supported; send their text.",
    "corpora": "Uploading files is not supported; send their text.",
    "vector_stores": "Uploading files is not supported; send their text.",
    "fine_tuning": "Training models is not supported.",
    "tunedModels": "Training models is not supported.",
    "assistants": "Assistants are not supported; use /v1/responses or /v1/chat/completions.",
    "threads": "Assistants are not supported; use /v1/responses or /v1/chat/completions.",
    "interactions": "Interactions are not supported; use generateContent.",
    "evals": "Evaluations are not supported.",
    "skills": "Skills are not supported; send their text.",
    "chat/completions": _STORES,
    "responses/compact": "Compacting responses is not supported; send the items to keep.",
}
"""Endpoints of hosted APIs and other engines that this server lacks, by the path behind the
version: the message. Only paths that have no such method on this server are found here."""

_NOT_SERVED_METHODS = {
    ("POST", "responses/compact"): _NOT_SERVED["responses/compact"],
    ("DELETE", "models"): "Training models is not supported, so there is none to delete.",
}
"""Endpoints that this server lacks at paths where it has another method."""


def _not_served(status: int, method: str, path: str) -> Refusal | None:
    """Return the refusal of another API's endpoint that this server lacks, else None.

    `status`: 404 for a path that this server does not have, 405 for a method that it lacks there.
    """
    steps = [step for step in path.split("/")[:5] if step not in _VERSIONS]
    message = None
    for key in ("/".join(steps[:2]), "".join(steps[:1])):
        found = _NOT_SERVED.get(key) if status == 404 else _NOT_SERVED_METHODS.get((method, key))
        message = message or found
    return None if message is None else Refusal(Kind.NOT_FOUND, "not_served", message)


_ADMIN_KINDS = {
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
"""Kinds of the admin API's refusal codes; any other code is an invalid value (400)."""

_IDEMPOTENCY_RETRIES = {
    "idempotency_in_flight": (Kind.CONFLICT, 1.0),
    "idempotency_room_full": (Kind.RATE, 60.0),
}
"""Idempotency errors after which a retry may succeed: (kind, retry delay in seconds)."""


def no_path(path: str, expected: str, hint: str = "") -> Refusal:
    """Return that a path is not found; `expected`: what the client may have meant, or ""."""
    told = repr(expected[:_PATH_CHARS_MAX]) if expected else "one of GET /openapi.json"
    message = f"Path not found: {path[:_PATH_CHARS_MAX]!r}; expected {told}.{hint}"
    return Refusal(Kind.NOT_FOUND, "not_found", message)


def refusal_of(error: Exception, method: str = "", path: str = "") -> Refusal | None:
    """Return the refusal that a client sees for a request's error; None for internal errors."""
    match error:
        case Refusal():
            return error
        case PathNotFound(similar=similar) if similar:
            return no_path(path, similar, " Check the client's base URL.")
        case web.HTTPException():
            missing = _not_served(error.status, method, path)
            if missing is not None:
                return missing
            if isinstance(error, PathNotFound):
                return no_path(path, error.close)
            if isinstance(error, web.HTTPMethodNotAllowed):
                allowed = " or ".join(sorted(error.allowed_methods))
                message = (
                    f"Method {method[:16]!r} is not allowed for this path; expected {allowed}."
                )
                return Refusal(Kind.METHOD, "method_not_allowed", message)
            kind, code, message = _HTTP_KINDS.get(
                error.status, (Kind.BAD, "bad_http", "Invalid HTTP request.")
            )
            return Refusal(kind, code, message)
        case EngineUnavailable():
            return engine_refusal(error.code, error.message, error.retry_after_s)
        case RequestRefused():
            return engine_refusal(error.code, error.message)
        case EngineError():
            return None
        case BadName():
            return Refusal(_ADMIN_KINDS.get(error.code, Kind.BAD), error.code, error.message)
        case StoreError():
            message = "Database unavailable. Try again later."
            return Refusal(Kind.BUSY, "database_unavailable", message, retry_after_s=5.0)
        case BudgetExceeded():
            after_s = error.retry_after_s
            # Clients of hosted APIs tell a spent budget from a rate limit by these words.
            message = f"You exceeded your current quota: {error.message}"
            return Refusal(Kind.QUOTA, error.code, message, retry_after_s=after_s)
        case IdempotencyConflict():
            kind, retry_s = _IDEMPOTENCY_RETRIES.get(error.code, (Kind.CONFLICT, None))
            return Refusal(kind, error.code, error.message, retry_after_s=retry_s)
        case BadPrice():
            return Refusal(Kind.BAD, error.code, error.message)
        case LedgerUnavailable():
            message = "Usage cannot be recorded, so no request is served. Try again later."
            return Refusal(Kind.BUSY, "ledger_unavailable", message, retry_after_s=5.0)
        case msgspec.MsgspecError() | UnicodeDecodeError():
            return Refusal(Kind.BAD, "invalid_json", "Invalid JSON in the request body.")
        case RecursionError():
            return Refusal(Kind.BAD, "invalid_json", "Invalid JSON: nested too deeply.")
        case MemoryError():
            message = "Out of memory. Try again later."
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
    "engine_unavailable": (Kind.BUSY, "engine_unavailable"),
    "engine_died": (Kind.BUSY, "engine_restarting"),
    "not_ready": (Kind.BUSY, "engine_starting"),
    "step_failed": (Kind.INTERNAL, "internal_error"),
    "nan_logits": (Kind.INTERNAL, "internal_error"),
    "grammar_invalid": (Kind.BAD, "invalid_json_schema"),
    "grammar_too_big": (Kind.BAD, "json_schema_too_complex"),
    "grammar_unsupported": (Kind.BAD, "unsupported_value"),
    "grammar_dead_end": (Kind.BAD, "invalid_json_schema"),
}
"""The engine's stable codes: (kind, code that clients see)."""

_SCHEMA_CODES = frozenset(code for code in _ENGINE_CODES if code.startswith("grammar_"))


def engine_refusal(
    code: str,
    message: str,
    retry_after_s: float | None = None,
    *,
    schema_field: str | None = None,
    is_schema: bool = True,
) -> Refusal:
    """Return the refusal for an engine code. O(1).

    `schema_field`: the request field that holds the response schema; it becomes `param` if the
    engine rejects that schema. `is_schema`: False for a pattern or a grammar, whose codes are the
    engine's.
    """
    kind, name = _ENGINE_CODES.get(code, (Kind.INTERNAL, "internal_error"))
    if not is_schema and code in _SCHEMA_CODES:
        name = code
    if kind is Kind.BUSY and retry_after_s is None:
        retry_after_s = 1.0
    param = schema_field if code in _SCHEMA_CODES else None
    return Refusal(kind, name, message, param=param, retry_after_s=retry_after_s)
