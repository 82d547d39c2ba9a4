"""Anthropic's family: its endpoints, its list of models, and how the server knows its clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gateway.dialects.anthropic import messages, wire
from gateway.dialects.protocol import ApiFamily, Endpoint, ListedModel, page_number
from gateway.dialects.validation import invalid_field
from gateway.retention_classes import CacheProfile


def list_models(models: Sequence[ListedModel], query: Mapping[str, str]) -> dict[str, Any]:
    """Return `limit` models after `after_id` or before `before_id`. Raises Refusal."""
    limit = page_number(query, "limit", 20)
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
        "data": [show_model(model) for model in page],
        "has_more": is_more,
        "first_id": page[0].name if page else None,
        "last_id": page[-1].name if page else None,
    }


def show_model(model: ListedModel) -> dict[str, Any]:
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


FAMILY = ApiFamily(
    name="anthropic",
    errors=messages.DIALECT,
    endpoints=(
        Endpoint(
            *("/v1/messages", messages.DIALECT, "Answer messages.", wire.Body, messages.ID_PREFIX)
        ),
        Endpoint(
            path="/v1/messages/count_tokens",
            dialect=messages.COUNT_DIALECT,
            summary="Count the tokens of a request to /v1/messages.",
            body=wire.Body,
            counts=True,
        ),
    ),
    profile=CacheProfile(lookup="written"),
    list_models=list_models,
    show_model=show_model,
    find_dialect=lambda fields: messages.DIALECT,
    paths=("/v1/messages/", "/v1/complete/"),
    headers=("anthropic-version",),
    key_headers=("X-Api-Key",),
    version_headers=("anthropic-version", "anthropic-beta"),
)
