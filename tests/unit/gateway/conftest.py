"""A gateway on a loopback port over the real core and the fake runner, one per test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from tests.unit.gateway.gateway_fixture import card, house, made

__all__ = ["card", "house", "made"]


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> Iterator[BlockBuster]:
    """A blocking call in the event loop fails the test."""
    with blockbuster_ctx() as guard:
        yield guard
