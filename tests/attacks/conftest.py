"""Fixtures: servers under attack, and a gateway over a fake runner for attacks on one seam."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.model_store import DEFAULT_MODEL
from tests.attacks.attacked_server import AttackedServer
from tests.e2e.real_core import real_card
from tests.models import write_folder
from tests.unit.gateway.gateway_fixture import card, gateway, unopened_gateway

__all__ = ["card", "gateway", "unopened_gateway"]

StartServer = Callable[..., AttackedServer]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a tiny model's folder, and return its path."""
    return str(write_folder(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def start_server(
    tiny_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartServer]:
    """Return a function that starts a server of the tiny model with settings as TOML."""
    servers: list[AttackedServer] = []

    def make(settings: str = "", *, descriptors: int = 0) -> AttackedServer:
        folder = tmp_path_factory.mktemp("server")
        server = AttackedServer(folder, tiny_model, settings, descriptors=descriptors)
        server.start()
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServer]:
    """Yield a server of the tiny model with default settings, shared by a file's tests."""
    yield from _running(AttackedServer(tmp_path_factory.mktemp("server"), tiny_model))


@pytest.fixture(scope="module")
def default_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServer]:
    """Yield a server of the default model; skips the test if the model was not fetched."""
    real_card()
    data = Path(os.environ.get("TRUNKLINE_DATA_DIR", "data"))
    folder = tmp_path_factory.mktemp("server")
    yield from _running(AttackedServer(folder, DEFAULT_MODEL, "[engine]\n", data=data))


def _running(server: AttackedServer) -> Iterator[AttackedServer]:
    server.start()
    try:
        yield server
    finally:
        server.stop()
