"""A gateway for SDKs: everything between the socket and the runner is the product. And the default
model as it lies on this disk, with a core over it.
"""

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
    """Skips where the model has not been fetched."""
    return real_card()


@pytest.fixture(scope="module")
def default_core(default_card: ModelCard) -> Iterator[Core]:
    """With the compiler's threads and processes."""
    with real_core(default_card) as core:
        yield core
