"""Paths of the endpoints that generate, and the dialect of each.

This module knows no engine; `gateway.api.generate` makes routes of the table.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from gateway.dialects.anthropic import messages as anthropic
from gateway.dialects.canonical import RequestMetadata
from gateway.dialects.gemini import generate_content as gemini
from gateway.dialects.openai import chat as openai_chat
from gateway.dialects.openai import completions as openai_completions
from gateway.dialects.openai import responses as openai_responses
from gateway.dialects.protocol import Dialect, ErrorShape
from gateway.http.request_context import PLAIN
from gateway.http.route_table import pattern_of, tidy


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path that generates. `id_prefix`: prefix of its response ids.

    `without_sse`: the dialect for requests without `alt=sse`; None, if there is only one.
    """

    path: str
    dialect: Dialect
    id_prefix: str
    without_sse: Dialect | None = None


ENDPOINTS = (
    Endpoint("/v1/messages", anthropic.DIALECT, anthropic.ID_PREFIX),
    Endpoint("/v1/messages/count_tokens", anthropic.COUNT_DIALECT, ""),
    Endpoint("/v1/chat/completions", openai_chat.DIALECT, "chatcmpl-"),
    Endpoint("/chat/completions", openai_chat.DIALECT, "chatcmpl-"),
    Endpoint("/v1/completions", openai_completions.DIALECT, "cmpl-"),
    Endpoint("/completions", openai_completions.DIALECT, "cmpl-"),
    Endpoint("/v1/responses", openai_responses.DIALECT, openai_responses.ID_PREFIX),
    Endpoint("/responses", openai_responses.DIALECT, openai_responses.ID_PREFIX),
    Endpoint("/v1/responses/input_tokens", openai_responses.COUNT_DIALECT, ""),
    Endpoint("/responses/input_tokens", openai_responses.COUNT_DIALECT, ""),
    Endpoint("/{version:v1|v1beta}/models/{target:.+}", gemini.DIALECT, "", gemini.ARRAY_DIALECT),
)
"""OpenAI's paths also exist without /v1: clients often omit it from the base URL."""

_SHAPES_BY_PATH: tuple[tuple[str, ErrorShape], ...] = (
    ("/v1beta/", gemini.DIALECT),
    ("/upload/v1beta/", gemini.DIALECT),
    ("/v1/messages/", anthropic.DIALECT),
    ("/v1/complete/", anthropic.DIALECT),
)
_SHAPES_BY_HEADER: tuple[tuple[str, ErrorShape], ...] = (
    ("x-goog-api-key", gemini.DIALECT),
    ("x-goog-api-client", gemini.DIALECT),
    ("anthropic-version", anthropic.DIALECT),
)


def error_shape(request: web.BaseRequest) -> ErrorShape:
    """Return the error format of a request whose route has none: by its path, then its headers."""
    path = tidy(request.path) + "/"
    for prefix, shape in _SHAPES_BY_PATH:
        if path.startswith(prefix):
            return shape
    return next((shape for name, shape in _SHAPES_BY_HEADER if name in request.headers), PLAIN)


def find_endpoint(path: str) -> tuple[Endpoint, RequestMetadata] | None:
    """Return the endpoint of a client's path, and the model and action that the path names."""
    for endpoint in ENDPOINTS:
        match = pattern_of(endpoint.path).fullmatch(path)
        if match is not None:
            model, _, action = (match.groupdict().get("target") or "").rpartition(":")
            return endpoint, RequestMetadata(model=model, action=action)
    return None
