"""The real storage process under load, killed again and again: one outcome for each command, no
record id used twice, no wrong byte in a slot, and nothing lost that was said to be stored."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from engine.config import LevelsConfig
from engine.moves import (
    EraseStored,
    Fetch,
    Fetched,
    Look,
    Looked,
    StorageOutcome,
    StorageStats,
    Stored,
    StoredErased,
    StoreRuns,
)
from engine.storage.client import StorageClient, disk_settings
from engine.storage.memory.arena import HostArena
from tests.fakes import FakeClock
from tests.unit.engine.storage.storage_rig import (
    LAYOUT,
    RUN,
    SLOT_BYTES,
    SLOTS,
    StorageRig,
    content_of,
)

KILLS = 60 if os.environ.get("CRASH") == "long" else 6
BURST = 40
Path_ = tuple[bytes, tuple[int, ...]]

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(1_200)]


class Load:
    """What was asked of a storage, and what it said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rng = random.Random(11)
        self.arena = HostArena.create(LAYOUT)
        config = LevelsConfig(disk_gib=0.1, dir=str(folder), slab_mib=4)
        settings = disk_settings(config, self.arena, (SLOT_BYTES,), RUN)
        self.client = StorageClient(settings, silence_s=60.0, deaths_max=10_000)
        self.rig = StorageRig(self.client, self.arena, FakeClock(), self.next_outcomes)
        self.open: dict[int, StoreRuns | Look | Fetch | EraseStored] = {}
        self.left: dict[int, list[int]] = {}
        self.stored: dict[Path_, int] = {}
        self.owner: dict[int, Path_] = {}
        self.erased_at: dict[bytes, int] = {}  # the call after which its namespace was last erased
        self.fetched = self.failed = 0

    def next_outcomes(self) -> list[StorageOutcome]:
        """Wait for outcomes."""
        assert self.client.wait(60.0), f"no outcome in 60 s; open: {self.open}"
        return self.client.poll()

    def await_open(self) -> None:
        """Wait until a process serves."""
        while not any(
            isinstance(one, StorageStats) and one.state == "open" for one in self.next_outcomes()
        ):
            pass

    def send_one(self, number: int) -> None:
        """Send a random command; slots of stores and fetches are apart."""
        namespace = b"namespace-%d" % self.rng.randrange(6)
        kind = self.rng.random()
        command: StoreRuns | Look | Fetch | EraseStored
        if kind < 0.5:
            command = self.rig.store_command(namespace, (number, 1, 2, 3))
        elif kind < 0.7:
            command = Look(self.rig.call_id(), namespace, (number, 1, 2, 3))
        elif kind < 0.95 and self.owner:
            record_id = self.rng.choice(sorted(self.owner))
            slots = (self.rng.randrange(16, SLOTS),)
            if any(isinstance(one, Fetch) and one.slots == slots for one in self.open.values()):
                return
            command = Fetch(
                self.rig.call_id(), self.owner[record_id][0], (record_id,), slots, SLOT_BYTES
            )
        else:
            command = EraseStored(self.rig.call_id(), namespace)
            self.erased_at[namespace] = command.call_id
            self.stored = {key: one for key, one in self.stored.items() if key[0] != namespace}
        self.open[command.call_id] = command
        self.client.send(command)

    def take(self, outcome: StorageOutcome) -> None:
        """Check an outcome."""
        if isinstance(outcome, StorageStats):
            return
        command = self.open.pop(outcome.call_id, None)
        assert command is not None, f"a second outcome: {outcome}"
        match outcome, command:
            case Stored(), StoreRuns():
                for record_id, run in zip(outcome.record_ids, command.runs, strict=False):
                    path = command.namespace, run.tokens
                    assert self.owner.setdefault(record_id, path) == path, "an id was used twice"
                    if self.erased_at.get(command.namespace, 0) < command.call_id:
                        self.stored[path] = record_id
            case Fetched(), Fetch():
                self.fetched += outcome.is_done
                self.failed += not outcome.is_done
                if outcome.is_done:
                    expected = content_of(*self.owner[outcome.record_id])
                    assert bytes(self.arena.view(command.slots[0], SLOT_BYTES)) == expected
            case (Looked(), Look()) | (StoredErased(), EraseStored()):
                pass
            case _:
                raise AssertionError(f"{outcome} for {command}")

    def burst(self, first: int) -> None:
        """Send commands while outcomes come, and kill the process somewhere among them."""
        kill_at = self.rng.randrange(BURST)
        for number in range(BURST):
            while any(isinstance(one, StoreRuns) for one in self.open.values()):
                for outcome in self.next_outcomes():  # slot 0 belongs to one store at a time
                    self.take(outcome)
            self.send_one(first + number)
            if number == kill_at:
                with suppress(ValueError, ProcessLookupError):
                    os.kill(int((self.folder / "lock").read_text()), signal.SIGKILL)
        while self.open:
            for outcome in self.next_outcomes():
                self.take(outcome)

    def close(self) -> None:
        """End the process."""
        self.client.close()
        self.arena.close()


def test_a_process_killed_under_load_answers_everything_once(tmp_path: Path) -> None:
    """And the next one has all that was said."""
    load = Load(tmp_path / "levels")
    try:
        for life in range(KILLS):
            load.await_open()
            load.burst(1_000 * life)
        load.await_open()
        for (namespace, tokens), record_id in load.stored.items():
            assert load.rig.found(namespace, tokens) == [record_id], (namespace, tokens)
            assert load.rig.fetch(namespace, [record_id]) == [content_of(namespace, tokens)]
    finally:
        load.close()

    assert load.fetched > 0
    assert load.failed > 0, "the control: kills were noticed"
    assert len(load.owner) > KILLS
