"""Fixtures for tests of CPU runners, and of whole engines over one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from engine.model_store import ModelCard
from engine.models.cpu_decoder import Kernels, load_kernels
from kernels.gpu import tree_attention
from tests.models import prepared, tiny_config


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    """Return a prepared tiny model; modules that need another shape define their own."""
    config = tiny_config(head_dim=32, heads=3, kv_heads=1, context=2048)
    return prepared(tmp_path_factory.mktemp("model"), config)


@pytest.fixture
def many_heads_per_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge several heads per program: one head at a time takes minutes in the interpreter."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(tree_attention, "FEW_ROW_HEADS", 0)


@pytest.fixture(scope="module")
def kernels(card: ModelCard) -> Iterator[Kernels]:
    """Return the C kernels for the module's model; skips the test without a compiler."""
    found = _loaded(card, threads=1)
    yield found
    found.close()


@pytest.fixture(params=["torch", "c"])
def path(request: pytest.FixtureRequest) -> Kernels | None:
    """Return the C kernels, or None: then the model runs in torch."""
    return request.getfixturevalue("kernels") if request.param == "c" else None


@pytest.fixture
def kernels_of(card: ModelCard, request: pytest.FixtureRequest) -> Callable[[int], Kernels]:
    """Return a function that loads the C kernels with so many threads, until the test's end."""

    def made(threads: int) -> Kernels:
        found = _loaded(card, threads)
        request.addfinalizer(found.close)
        return found

    return made


def _loaded(card: ModelCard, threads: int) -> Kernels:
    found = load_kernels(card.config, threads)
    if found is None:
        pytest.skip("no C compiler")
    return found
