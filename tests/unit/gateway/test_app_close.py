"""A gateway that ends closes each of its parts, also after one that fails to close."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.unit.gateway.gateway_fixture import GatewayFixture


async def test_a_part_that_fails_to_close_leaves_no_other_open(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They close in their order; each failure is logged, and the first error is raised."""
    context = gateway.gateway.context
    parts = (context.responses, context.promise_store, gateway.gateway.ledger, context.analytics)
    closed: list[str] = []

    def failing(close: Callable[[], Awaitable[None]], name: str) -> Callable[[], Awaitable[None]]:
        async def fail() -> None:
            await close()
            closed.append(name)
            raise OSError(name)

        return fail

    with monkeypatch.context() as patch:
        for part in parts:
            patch.setattr(part, "close", failing(part.close, type(part).__name__))
        with pytest.raises(OSError, match="ResponseWriter"):
            await gateway.gateway.close()

    assert closed == [type(part).__name__ for part in parts]
    assert [line["event"] for line in gateway.lines] == ["close_failed"] * len(parts)
