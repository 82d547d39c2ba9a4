"""Small requests with an `Idempotency-Key` in every dialect, and their stored responses."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import ClientResponse

from tests.unit.gateway.gateway_fixture import GatewayFixture

MESSAGES = [{"role": "user", "content": "hello"}]
CONTENTS = {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}
CHAT = "/v1/chat/completions"
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES, "max_tokens": 8}),
    "completions": ("/v1/completions", {"prompt": "hello", "max_tokens": 8}),
    "responses": ("/v1/responses", {"input": "hello", "max_output_tokens": 8}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 8}),
}
GEMINI = "/v1beta/models/{}:{}"


def request_for(
    gateway: GatewayFixture, dialect: str, is_stream: bool
) -> tuple[str, dict[str, Any]]:
    """Return (path, body) of a small request."""
    if dialect == "gemini":
        action = "streamGenerateContent?alt=sse" if is_stream else "generateContent"
        return GEMINI.format(gateway.model, action), CONTENTS
    path, body = DIALECTS[dialect]
    return path, {"model": gateway.model, "stream": is_stream, **body}


async def send(
    gateway: GatewayFixture,
    name: str | None,
    body: object,
    path: str = CHAT,
    who: str = "ada",
    **headers: str,
) -> tuple[int, bytes, ClientResponse]:
    """Send a request with a key; return (status, bytes, response)."""
    sent = {**gateway.headers(who), "Content-Type": "application/json", **headers}
    if name is not None:
        sent["Idempotency-Key"] = name
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with gateway.session.post(gateway.url + path, data=data, headers=sent) as response:
        return response.status, await response.read(), response


def stored(gateway: GatewayFixture) -> list[tuple[str, bool, bool]]:
    """Return (key, whether it has ended, whether it has a body) of all stored responses."""
    return [
        (row[0], bool(row[1]), bool(row[2]))
        for row in gateway.store.query(
            "select name, until_ms is not null, body is not null from named_requests order by name"
        )
    ]


def endings(gateway: GatewayFixture) -> list[str]:
    return [entry[0] for entry in gateway.entries()]


def code_of(answer: bytes) -> str:
    """Return the error code of an OpenAI response."""
    return str(json.loads(answer)["error"]["code"])
