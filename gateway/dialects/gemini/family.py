"""Gemini's family: its endpoints, its list of models, and how the server knows its clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.dialects.gemini import generate_content, wire
from gateway.dialects.protocol import ApiFamily, Endpoint, ListedModel, page_number
from gateway.retention_classes import CacheProfile


def list_models(models: Sequence[ListedModel], query: Mapping[str, str]) -> dict[str, Any]:
    """Return `pageSize` models; the page token is the index of the next one. Raises Refusal."""
    size = page_number(query, "pageSize" if "pageSize" in query else "page_size", 50)
    start = page_number(query, "pageToken" if "pageToken" in query else "page_token", 0, least=0)
    body: dict[str, Any] = {"models": [show_model(model) for model in models[start : start + size]]}
    if start + size < len(models):
        body["nextPageToken"] = str(start + size)
    return body


def show_model(model: ListedModel) -> dict[str, Any]:
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


FAMILY = ApiFamily(
    name="gemini",
    errors=generate_content.DIALECT,
    endpoints=(
        Endpoint(
            path="/{version:v1|v1beta|v1alpha}/models/{target:.+}",
            dialect=generate_content.DIALECT,
            summary="Answer (`MODEL:generateContent` and its streams).",
            body=wire.GenerateBody,
            without_sse=generate_content.ARRAY_DIALECT,
        ),
    ),
    profile=CacheProfile(),
    list_models=list_models,
    show_model=show_model,
    find_dialect=lambda fields: generate_content.DIALECT,
    paths=("/v1beta/", "/v1alpha/", "/upload/v1beta/"),
    headers=("x-goog-api-key", "x-goog-api-client"),
    key_headers=("X-Goog-Api-Key",),
    key_parameter="key",
    is_camel_case=True,
)
