"""Fixtures: servers under attack, and a gateway over a fake runner for attacks on one seam."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.model_store import DEFAULT_MODEL
from tests.attacks.house import House
from tests.e2e.real_core import real_card
from tests.models import write_folder
from tests.unit.gateway.gateway_fixture import card, gateway, unopened_gateway

__all__ = ["card", "gateway", "unopened_gateway"]

MakeHouse = Callable[..., House]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a tiny model's folder, and return its path."""
    return str(write_folder(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def make_house(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeHouse]:
    """Return a function that starts a server of the tiny model with settings as TOML."""
    houses: list[House] = []

    def make(settings: str = "", *, descriptors: int = 0) -> House:
        folder = tmp_path_factory.mktemp("house")
        house = House(folder, tiny_model, settings, descriptors=descriptors)
        house.start()
        houses.append(house)
        return house

    yield make
    for house in houses:
        house.stop()


@pytest.fixture(scope="module")
def house(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Yield a server of the tiny model with default settings, shared by a file's tests."""
    yield from _running(House(tmp_path_factory.mktemp("house"), tiny_model))


@pytest.fixture(scope="module")
def default_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Yield a server of the default model; skips the test if the model was not fetched."""
    real_card()
    data = Path(os.environ.get("TRUNKLINE_DATA_DIR", "data"))
    folder = tmp_path_factory.mktemp("house")
    yield from _running(House(folder, DEFAULT_MODEL, "[engine]\n", data=data))


def _running(house: House) -> Iterator[House]:
    house.start()
    try:
        yield house
    finally:
        house.stop()
