"""An engine that has found its own structures wrong hands no copies on to the next one."""

from __future__ import annotations

import random

import pytest

from engine.api import EngineInfo, GetStats
from engine.config import EngineConfig, LevelsConfig
from engine.core.core import Core
from engine.errors import InvariantViolation
from engine.levels.levels import Levels
from engine.protocol import Messages
from engine.server.service import EngineService
from tests.fake_levels import FakeKeptSlots, FakeTransferEngine, Weather
from tests.fakes import FakeRunner
from tests.unit.engine.server.fake_engine_process import fake_core
from tests.unit.engine.server.test_service import DEADLINE_S

SHAPE = b"sixteen bytes it"
SLOTS = 8


@pytest.mark.parametrize(
    ("failure", "is_handed_on"), [(InvariantViolation("wrong"), False), (OSError("gone"), True)]
)
def test_only_a_sound_engine_hands_its_copies_on(failure: Exception, *, is_handed_on: bool) -> None:
    """Copies may not be what they are noted as; any other death leaves them right."""
    kept = FakeKeptSlots(SLOTS, lambda: 5.0)
    kept.table.begin(SHAPE)
    config = EngineConfig()

    def make_core() -> tuple[Core, EngineInfo]:
        plain, info = fake_core(config)
        runner = plain.runner
        assert isinstance(runner, FakeRunner)
        memory = FakeTransferEngine(lambda: runner, SLOTS, random.Random(1), Weather())
        kept.start(memory, None)
        plain.levels = Levels(plain.cache, LevelsConfig(host_mib=1), memory, kept=kept)
        return plain, info

    service = EngineService(make_core, config)
    service.start()
    assert service.ready.wait(DEADLINE_S)
    service.post(RaisingSink(failure), GetStats(1))

    assert service.stopped.wait(DEADLINE_S)
    assert service.failure is failure
    assert kept.table.is_of(SHAPE) == is_handed_on
    service.stop()


class RaisingSink:
    """A sink that fails, in the engine's thread."""

    def __init__(self, failure: Exception) -> None:
        self._failure = failure

    def send(self, step: int, messages: Messages) -> None:
        """Fail."""
        raise self._failure
