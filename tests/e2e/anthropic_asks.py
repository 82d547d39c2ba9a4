"""What tests ask by Anthropic's own SDK, and how they connect."""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic
from anthropic.types import TextBlockParam

from tests.unit.gateway.gateway_fixture import GatewayFixture

MORE = {"ignore_eos": True, "seed": 7}
"""The fake model draws end tokens as readily as others; these tests want whole answers."""

SYSTEM = "You are a librarian who knows every book there is, and where it stands. " * 2


def connected(gateway: GatewayFixture, *, max_retries: int = 0) -> AsyncAnthropic:
    """A client of a gateway's."""
    return AsyncAnthropic(
        base_url=gateway.url, api_key=gateway.keys["ada"], max_retries=max_retries, timeout=60
    )


def hello(gateway: GatewayFixture, **more: Any) -> dict[str, Any]:
    """A small request; `more` replaces and adds."""
    return {
        "model": gateway.model,
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "hello"}],
        "extra_body": MORE,
        **more,
    }


def marked(text: str, ttl: str | None = None) -> TextBlockParam:
    """A text with a breakpoint behind it."""
    control: Any = {"type": "ephemeral"} if ttl is None else {"type": "ephemeral", "ttl": ttl}
    return {"type": "text", "text": text, "cache_control": control}
