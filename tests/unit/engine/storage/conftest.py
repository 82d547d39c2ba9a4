"""Stores that are closed at the end of a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.storage.local_storage import LocalRig, MakeRig


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRig]:
    """Return a function that opens stores in a folder of this name."""
    rigs: list[LocalRig] = []

    def open_rig(name: str = "levels", **settings: Any) -> LocalRig:
        rigs.append(LocalRig(tmp_path / name, **settings))
        return rigs[-1]

    yield open_rig
    for rig in rigs:
        rig.close()
