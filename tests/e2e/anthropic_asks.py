"""Requests and connections of tests with Anthropic's SDK."""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic
from anthropic.types import TextBlockParam

from tests.e2e.sdks import HELLO, MORE
from tests.unit.gateway.gateway_fixture import GatewayFixture


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
        "messages": [HELLO],
        "extra_body": MORE,
        **more,
    }


def marked(text: str, ttl: str | None = None) -> TextBlockParam:
    """Return a text block with a breakpoint after it."""
    control: Any = {"type": "ephemeral"} if ttl is None else {"type": "ephemeral", "ttl": ttl}
    return {"type": "text", "text": text, "cache_control": control}
