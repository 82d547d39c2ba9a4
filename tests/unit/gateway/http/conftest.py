"""A gateway whose settings of [server] are each test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.unit.gateway.gateway_fixture import GatewayFixture

OpenGateway = Callable[..., Awaitable[GatewayFixture]]
"""Opens a gateway with these settings of [server]."""


@pytest.fixture
async def open_gateway(unopened_gateway: GatewayFixture) -> AsyncIterator[OpenGateway]:
    """Yield a function that opens the gateway, which is closed after the test: before the loop's
    clock is set back, if a test asks for `forward` first."""

    async def open_gateway(**settings: object) -> GatewayFixture:
        unopened_gateway.set_server(**settings)
        await unopened_gateway.open()
        return unopened_gateway

    yield open_gateway
    await unopened_gateway.close()
