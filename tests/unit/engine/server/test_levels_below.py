"""The service with levels below its core: late answers to erasures, drains that store, copies for
the next engine, levels that are off.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.api import (
    CacheGrant,
    Drain,
    EngineInfo,
    Erase,
    Erased,
    Finished,
    GetStats,
    LeaseRequest,
    Request,
    Retention,
    Sampling,
    Submit,
)
from engine.cache import PrefixCache
from engine.config import EngineConfig, LevelsConfig, RemoteConfig
from engine.core.core import Core
from engine.errors import InvariantViolation
from engine.kv.format import KvFormat, KvGroup
from engine.kv.move_queue import DamagedSlotError
from engine.kv.storage import KvStorage
from engine.levels.levels import Levels
from engine.moves import Move
from engine.protocol import Messages
from engine.server.levels_below import FailedMoveLog, build_levels, layout_of
from engine.server.service import EngineService
from engine.statistics import LevelStats
from tests.fake_levels import FakeKeptSlots, FakeStorage, FakeTransferEngine, Weather
from tests.fakes import FakeRunner
from tests.tables import each_row
from tests.unit.engine.server.fake_engine_process import VOCAB, fake_core
from tests.unit.engine.server.test_service import DEADLINE_S, RecordingSink

CONFIG = EngineConfig(heartbeat_s=0.05)
LEASE = LeaseRequest(48, Retention("hour", 3600, 7200), "lease")
PROMPT = tuple(number % VOCAB for number in range(49))


class LeveledService:
    """A service over the token oracle with slow moves below it."""

    def __init__(self) -> None:
        self.service = EngineService(self.make_core, CONFIG)
        self.sink = RecordingSink()

    def make_core(self) -> tuple[Core, EngineInfo]:
        """Return the fake core with a host level and a disk."""
        plain, info = fake_core(CONFIG)
        runner = plain.runner
        assert isinstance(runner, FakeRunner)
        chance = random.Random(1)
        memory = FakeTransferEngine(lambda: runner, 32, chance, Weather(20))
        self.disk = FakeStorage(memory, chance, Weather(20))
        config = LevelsConfig(disk_gib=1.0)
        self.levels = Levels(plain.cache, config, memory, self.disk)
        core = Core(
            plain.cache,
            runner,
            CONFIG,
            plain.clock,
            vocab_size=plain.vocab_size,
            context_tokens=plain.context_tokens,
            levels=self.levels,
        )
        return core, info

    def ask(self, name: str) -> None:
        """Run a leased request."""
        grant = CacheGrant(b"n", leases=(LEASE,))
        self.service.post(
            self.sink, Submit(Request(name, PROMPT, 1, grant, Sampling(temperature=0)))
        )
        self.sink.until(Finished, request_id=name)


@pytest.fixture
def leveled() -> Iterator[LeveledService]:
    """Return a running service."""
    leveled = LeveledService()
    leveled.service.start()
    assert leveled.service.ready.wait(DEADLINE_S)
    leveled.service.join(leveled.sink)
    yield leveled
    leveled.service.stop()


def test_an_erasure_is_answered_when_the_disk_has_confirmed(leveled: LeveledService) -> None:
    """The engine's thread goes on meanwhile."""
    leveled.ask("first")
    leveled.service.post(leveled.sink, Erase(7, b"n"))
    answer = leveled.sink.until(Erased)

    assert answer.call_id == 7
    assert [level.level for level in answer.levels] == ["host", "disk"]
    assert not leveled.disk.records


def test_a_drained_engine_stays_to_store_promises(leveled: LeveledService) -> None:
    """A third of the drain's time at most; its levels are closed with it."""
    leveled.ask("first")
    leveled.service.post(leveled.sink, Drain(30.0))

    assert leveled.service.stopped.wait(DEADLINE_S)
    assert len(leveled.disk.records) == 3
    assert leveled.disk.is_closed


class RaisingSink:
    """A sink that fails, in the engine's thread."""

    def __init__(self, failure: Exception) -> None:
        self._failure = failure

    def send(self, step: int, messages: Messages) -> None:
        raise self._failure


@pytest.mark.parametrize(
    ("failure", "is_handed_on"), [(InvariantViolation("wrong"), False), (OSError("gone"), True)]
)
def test_only_a_sound_engine_hands_its_copies_on(failure: Exception, *, is_handed_on: bool) -> None:
    """Where it has found its own structures wrong, copies may not be what they are noted as; any
    other death leaves them right."""
    slots, shape = 8, b"sixteen bytes it"
    kept = FakeKeptSlots(slots, lambda: 5.0)
    kept.table.begin(shape)

    def make_core() -> tuple[Core, EngineInfo]:
        plain, info = fake_core(CONFIG)
        runner = plain.runner
        assert isinstance(runner, FakeRunner)
        memory = FakeTransferEngine(lambda: runner, slots, random.Random(1), Weather())
        kept.start(memory, None)
        plain.levels = Levels(plain.cache, LevelsConfig(host_mib=1), memory, kept=kept)
        return plain, info

    service = EngineService(make_core, CONFIG)
    service.start()
    assert service.ready.wait(DEADLINE_S)
    service.post(RaisingSink(failure), GetStats(1))

    assert service.stopped.wait(DEADLINE_S)
    assert service.failure is failure
    assert kept.table.is_of(shape) == is_handed_on


# -- what is built ----------------------------------------------------------------------------


def built(levels: LevelsConfig, groups: int = 1) -> tuple[bool, tuple[LevelStats, ...]]:
    """Return whether levels were built for a tiny model of so many KV groups, and what is off."""
    windows = tuple(KvGroup(8, (index,)) for index in range(1, groups))
    dealt = (KvGroup(0, (0,)), *windows) if groups > 1 else ()
    form = KvFormat(1, 1, 8, 16, torch.float32, groups=dealt)
    storage = KvStorage(form, 4, torch.device("cpu"))
    cache = PrefixCache(blocks=4, block_size=16, windows=form.windows)
    below, off = build_levels(cache, EngineConfig(levels=levels), storage)
    if below is not None:
        below.close()
    return below is not None, off


@each_row(("blocks", "slabs"), [(728, (45, 91)), (130, (8, 17)), (51, (8, 26)), (8, (4, 4))])
def test_memory_is_cut_into_slabs_that_waste_little(blocks: int, slabs: tuple[int, int]) -> None:
    """Of each format as much as fits, in slabs enough for several formats at once."""
    sizes = [368_640, 198_720, 120_960]
    layout = layout_of(blocks * sizes[0], sizes)

    assert slabs[0] <= layout.slabs <= slabs[1]
    assert layout.capacity(sizes[0]) == blocks
    for size in sizes[1:]:
        assert layout.capacity(size) * size > 0.8 * layout.memory_bytes
        if blocks > 100:
            assert layout.capacity(size) * size > 0.97 * layout.memory_bytes


def test_levels_are_built_where_they_are_asked_for() -> None:
    """Without a size there are none, and nothing is told of them."""
    assert built(LevelsConfig()) == (False, ())
    assert built(LevelsConfig(host_mib=1)) == (True, ())
    assert built(LevelsConfig(host_mib=1), groups=2) == (True, ())


def test_levels_that_cannot_be_had_are_off_with_a_reason() -> None:
    """The engine runs on without them: here memory holds too few copies of all groups."""
    is_on, off = built(LevelsConfig(host_mib=1), groups=200)

    assert not is_on
    assert off[0].reason == "1024 slots of 1024 bytes; expected at least 1600"


def test_a_shared_store_of_a_model_with_windows_is_off_by_name(tmp_path: Path) -> None:
    """Its copies differ from run to run; the disk serves."""
    far = RemoteConfig(f"file://{tmp_path}/far", shared=True)
    wanted = LevelsConfig(host_mib=1, disk_gib=0.1, dir=str(tmp_path / "disk"), remote=far)
    is_on, off = built(wanted, groups=2)

    assert is_on
    assert [(one.name, one.state) for one in off] == [("remote", "off")]
    assert "attention windows" in off[0].reason


def test_failed_moves_are_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """A device that fails every move must not fill the log; damaged copies are told elsewhere."""
    now_s = 0.0
    failures = FailedMoveLog(lambda: now_s)
    move = Move(1, "load", block=7, slot=3)
    with caplog.at_level("WARNING", "trunkline.engine"):
        for _ in range(3):
            failures.note(move, RuntimeError("the device is lost"))
        failures.note(move, DamagedSlotError("slot 3"))
        now_s = 11.0
        failures.note(move, RuntimeError("the device is lost"))
        failures.note_unpinned(64 * 2**20, RuntimeError("out of memory"))

    assert [record.getMessage() for record in caplog.records] == [
        "kv_move_failed: load of block 7, slot 3: the device is lost; 1 such moves",
        "kv_move_failed: load of block 7, slot 3: the device is lost; 3 such moves",
        "kv_memory_not_pinned: 64 MiB of host memory: out of memory",
    ]


@each_row("groups", [2, 3, 7, 18, 25])
def test_slabs_hold_a_number_of_whole_copies(groups: int) -> None:
    """For any number of KV groups: both kinds of copies fill them."""
    size = 64 * 40
    layout = layout_of(400 * size, [size, groups * size], groups)

    assert layout.slots_in(0, size) % groups == 0
    assert layout.slots_in(0, groups * size) == layout.slots_in(0, size) // groups


@pytest.mark.parametrize(
    ("remote", "configured"),
    [
        (RemoteConfig(), ["host", "disk"]),
        (RemoteConfig("s3://bucket"), ["host", "disk", "remote"]),
    ],
    ids=["disk", "remote"],
)
def test_each_configured_level_is_off_by_name(remote: RemoteConfig, configured: list[str]) -> None:
    """Also the disk, whose promises would not survive the engine."""
    wanted = LevelsConfig(host_mib=1, disk_gib=1.0, remote=remote)
    is_on, off = built(wanted, groups=200)

    assert not is_on
    assert [(one.name, one.state) for one in off] == [(name, "off") for name in configured]
    assert len({one.reason for one in off}) == 1
