"""`/v1/responses/{id}`: what OpenAI's clients ask about stored responses, of which there are none.

Answers are made at `/v1/responses`, which is one of the inference endpoints.
"""

from __future__ import annotations

from aiohttp import web

from gateway.context import Context
from gateway.dialects.openai.responses import DIALECT, not_found
from gateway.http.middleware import Route


def routes(gateway: Context) -> tuple[Route, ...]:
    """At the root too: a base URL without /v1 is a common slip."""

    async def missing(request: web.Request) -> web.StreamResponse:
        raise not_found(request.match_info["id"])

    return tuple(
        Route(method, base + path, missing, "inference", DIALECT)
        for base in ("/v1/responses", "/responses")
        for method, path in (
            ("GET", "/{id}"),
            ("DELETE", "/{id}"),
            ("POST", "/{id}/cancel"),
            ("GET", "/{id}/input_items"),
        )
    )
