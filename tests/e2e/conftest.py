"""A gateway for SDKs: everything between the socket and the runner is the product."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from engine.model_store import ModelCard
from tests.gateway.house import House
from tests.models import prepared


@pytest.fixture(scope="session")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    """A tiny model with a byte-level tokenizer and a chat template that knows no tools."""
    return prepared(tmp_path_factory.mktemp("model"))


@pytest.fixture
def made(card: ModelCard, tmp_path: Path) -> Iterator[House]:
    """A gateway that has not been opened yet: a file says here what is another way in its own."""
    house = House(card, tmp_path)
    yield house
    house.discard()


@pytest.fixture
async def house(made: House) -> AsyncIterator[House]:
    """A gateway that listens."""
    await made.open()
    yield made
    await made.close()
