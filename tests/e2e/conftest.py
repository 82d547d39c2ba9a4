"""Fixtures: a gateway over a fake runner, and the default model with a core over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.core.core import Core
from engine.model_store import ModelCard
from tests.e2e.real_core import real_card, real_core
from tests.unit.gateway.gateway_fixture import card, gateway, unopened_gateway

__all__ = ["card", "gateway", "unopened_gateway"]


@pytest.fixture(scope="module")
def default_card() -> ModelCard:
    """Return the default model; skips the test if it was not fetched."""
    return real_card()


@pytest.fixture(scope="module")
def default_core(default_card: ModelCard) -> Iterator[Core]:
    """Yield a core with the grammar compiler's threads and processes."""
    with real_core(default_card) as core:
        yield core
