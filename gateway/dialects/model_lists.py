"""Lists of served models in the shape of each API family.

Functions are pure; `gateway.api.models` chooses the family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from gateway.dialects.validation import invalid_field, parse_int

PAGE_MAX = 1_000
"""Most models in one page."""


class ListedModel(Struct, frozen=True):
    """A served model. `context_tokens` is 0 until the engine has reported it."""

    name: str
    created_s: int
    context_tokens: int
    output_tokens: int


# --- OpenAI --------------------------------------------------------------------------------------


def openai_list(models: Sequence[ListedModel], query: Mapping[str, str]) -> dict[str, Any]:
    """Return all models; OpenAI's list has no pages."""
    return {"object": "list", "data": [openai_model(model) for model in models]}


def openai_model(model: ListedModel) -> dict[str, Any]:
    """Return one model in OpenAI's shape, with its context under vLLM's name once it is known."""
    found: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "trunkline",
    }
    if model.context_tokens:
        found["max_model_len"] = model.context_tokens
    return found


# --- Anthropic -----------------------------------------------------------------------------------


def anthropic_list(models: Sequence[ListedModel], query: Mapping[str, str]) -> dict[str, Any]:
    """Return `limit` models after `after_id` or before `before_id`. Raises Refusal."""
    limit = _query_int(query, "limit", 20)
    names = [model.name for model in models]
    start, end = 0, len(models)
    for key in ("after_id", "before_id"):
        if (name := query.get(key)) is not None and name not in names:
            problem = f"no model has the id {name[:64]!r}; expected an id of this list."
            raise invalid_field(key, problem)
    if "after_id" in query:
        start = names.index(query["after_id"]) + 1
    if "before_id" in query:
        end = names.index(query["before_id"])
        start = max(start, end - limit)
    page = list(models[start:end])[:limit]
    is_more = len(page) < end - start if "before_id" not in query else start > 0
    return {
        "data": [anthropic_model(model) for model in page],
        "has_more": is_more,
        "first_id": page[0].name if page else None,
        "last_id": page[-1].name if page else None,
    }


def anthropic_model(model: ListedModel) -> dict[str, Any]:
    """Return one model in Anthropic's shape."""
    at = datetime.fromtimestamp(model.created_s, UTC)
    return {
        "id": model.name,
        "type": "model",
        "display_name": model.name,
        "created_at": at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.context_tokens,
        "max_tokens": model.output_tokens,
    }


# --- Gemini --------------------------------------------------------------------------------------


def gemini_list(models: Sequence[ListedModel], query: Mapping[str, str]) -> dict[str, Any]:
    """Return `pageSize` models; the page token is the index of the next one. Raises Refusal."""
    size = _query_int(query, "pageSize" if "pageSize" in query else "page_size", 50)
    start = _query_int(query, "pageToken" if "pageToken" in query else "page_token", 0, least=0)
    body: dict[str, Any] = {
        "models": [gemini_model(model) for model in models[start : start + size]]
    }
    if start + size < len(models):
        body["nextPageToken"] = str(start + size)
    return body


def gemini_model(model: ListedModel) -> dict[str, Any]:
    """Return one model in Gemini's shape."""
    return {
        "name": f"models/{model.name}",
        "baseModelId": model.name,
        "version": "1",
        "displayName": model.name,
        "description": "Served by Trunkline.",
        "inputTokenLimit": model.context_tokens,
        "outputTokenLimit": model.output_tokens,
        "supportedGenerationMethods": ["generateContent", "countTokens", "createCachedContent"],
    }


def _query_int(query: Mapping[str, str], name: str, default: int, least: int = 1) -> int:
    text = query.get(name, "")
    return min(parse_int(text, name, least), PAGE_MAX) if text else default
