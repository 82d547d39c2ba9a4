"""Requests and connections of tests with Anthropic's SDK."""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic
from anthropic.types import TextBlockParam

from tests.unit.gateway.gateway_fixture import GatewayFixture

MORE = {"ignore_eos": True, "seed": 7}
"""The fake model draws end tokens as readily as others; these tests want whole answers."""

SYSTEM = "You are a librarian who knows every book there is, and where it stands. " * 2


def connected(gateway: GatewayFixture, *, max_retries: int = 0) -> AsyncAnthropic:
    """Return a client of a gateway."""
    return AsyncAnthropic(
        base_url=gateway.url, api_key=gateway.keys["ada"], max_retries=max_retries, timeout=60
    )


def hello(gateway: GatewayFixture, **more: Any) -> dict[str, Any]:
    """Return a small request; `more` replaces and adds fields."""
    return {
        "model": gateway.model,
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "hello"}],
        "extra_body": MORE,
        **more,
    }


def marked(text: str, ttl: str | None = None) -> TextBlockParam:
    """Return a text block with a breakpoint after it."""
    control: Any = {"type": "ephemeral"} if ttl is None else {"type": "ephemeral", "ttl": ttl}
    return {"type": "text", "text": text, "cache_control": control}
