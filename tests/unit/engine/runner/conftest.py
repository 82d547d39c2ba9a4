"""Fixtures for tests of whole engines over a CPU runner."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.model_store import ModelCard
from engine.models.cpu_decoder import Kernels, load_kernels


@pytest.fixture(scope="module")
def kernels(card: ModelCard) -> Iterator[Kernels]:
    """Return the C kernels for the module's model; skips the test without a compiler."""
    found = load_kernels(card.config, threads=1)
    if found is None:
        pytest.skip("no C compiler")
    yield found
    found.close()
