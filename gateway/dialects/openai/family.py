"""OpenAI's family: its endpoints, its list of models, and how the server knows its clients."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from gateway.dialects.openai import chat, completions, wire
from gateway.dialects.openai.responses import dialect as responses
from gateway.dialects.protocol import ApiFamily, Dialect, Endpoint, ListedModel
from gateway.retention_classes import CacheProfile

PLAIN = wire.OpenAIErrors("")
"""The error shape for paths outside all dialects."""


def _endpoints() -> Iterator[Endpoint]:
    """Yield each endpoint with and without /v1: clients often omit it from the base URL."""
    for base in ("/v1", ""):
        path, dialect = f"{base}/chat/completions", chat.DIALECT
        yield Endpoint(path, dialect, "Answer a chat.", chat.ChatBody, "chatcmpl-")
        path, text = f"{base}/completions", completions.DIALECT
        yield Endpoint(path, text, "Complete a text.", completions.CompletionBody, "cmpl-")
        path, body = f"{base}/responses", responses.ResponsesBody
        summary = "Answer, and store the response."
        yield Endpoint(path, responses.DIALECT, summary, body, responses.ID_PREFIX)
        path, summary = f"{path}/input_tokens", "Count the tokens of a request to /responses."
        yield Endpoint(path, responses.COUNT_DIALECT, summary, body, counts=True)


def list_models(models: Sequence[ListedModel], query: Mapping[str, str]) -> dict[str, Any]:
    """Return all models; OpenAI's list has no pages."""
    return {"object": "list", "data": [show_model(model) for model in models]}


def show_model(model: ListedModel) -> dict[str, Any]:
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


def _find_dialect(fields: Collection[str]) -> Dialect:
    """Return the dialect of a body: it has `input`, `prompt` or `messages`."""
    if "input" in fields:
        return responses.DIALECT
    return chat.DIALECT if "prompt" not in fields or "messages" in fields else completions.DIALECT


FAMILY = ApiFamily(
    name="openai",
    errors=PLAIN,
    endpoints=tuple(_endpoints()),
    profile=CacheProfile(),
    list_models=list_models,
    show_model=show_model,
    find_dialect=_find_dialect,
    lists_embeddings=True,
)
