"""Fixtures: a gateway over a fake runner, a client of it, a browser, and the default model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from engine.core.core import Core
from engine.model_store import ModelCard
from tests.e2e.browser import open_browser
from tests.e2e.real_core import real_card, real_core
from tests.unit.gateway.gateway_fixture import (
    GatewayFixture,
    card,
    gateway,
    room_for_tools,
    room_for_turns,
    unopened_gateway,
)

__all__ = ["card", "gateway", "room_for_tools", "room_for_turns", "unopened_gateway"]


@pytest.fixture
async def client(gateway: GatewayFixture) -> AsyncIterator[AsyncOpenAI]:
    """Yield OpenAI's SDK as ada uses it; tests of other SDKs override it."""
    async with AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=gateway.keys["ada"], max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture
def one_at_once(unopened_gateway: GatewayFixture) -> None:
    """Limit a tenant, before the gateway opens, to one request at once."""
    unopened_gateway.set_limits(requests_per_tenant_max=1)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a browser with an empty profile."""
    driver = open_browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def default_card() -> ModelCard:
    """Return the default model; skips the test if it was not fetched."""
    return real_card()


@pytest.fixture(scope="module")
def default_core(default_card: ModelCard) -> Iterator[Core]:
    """Yield a core with the grammar compiler's threads and processes."""
    with real_core(default_card) as core:
        yield core
