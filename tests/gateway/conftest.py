"""A gateway on a loopback port over the real core and the fake runner, one per test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from engine.model_store import ModelCard
from tests.gateway.house import House
from tests.models import prepared


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> Iterator[BlockBuster]:
    """A blocking call in the event loop fails the test."""
    with blockbuster_ctx() as guard:
        yield guard


@pytest.fixture(scope="session")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    """A tiny model with a byte-level tokenizer and a chat template."""
    return prepared(tmp_path_factory.mktemp("model"))


@pytest.fixture
def made(card: ModelCard, tmp_path: Path) -> Iterator[House]:
    """A gateway that has not been opened yet."""
    house = House(card, tmp_path)
    yield house
    house.discard()


@pytest.fixture
async def house(made: House) -> AsyncIterator[House]:
    """A gateway that listens, with settings as they come."""
    await made.open()
    yield made
    await made.close()
