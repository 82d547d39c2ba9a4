"""A tiny model for processes that are killed, and the same prepared."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.model_store import ModelCard, prepare
from tests.models import tiny_config, write_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as it is published."""
    return write_folder(tmp_path_factory.mktemp("models") / "tiny", tiny_config(context=1024))


@pytest.fixture(scope="session")
def card(model: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return prepare("tiny", model, tmp_path_factory.mktemp("prepared"))
