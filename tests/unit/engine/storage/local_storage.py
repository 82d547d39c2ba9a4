"""A `DiskStore` driven by one thread: each command has its outcome before the next one begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.moves import (
    EraseStored,
    Fetch,
    Fetched,
    Look,
    Renew,
    SetStoredQuotas,
    StorageCommand,
    StorageOutcome,
    StoreRuns,
)
from engine.storage.arena import HostArena
from engine.storage.client import failures_of
from engine.storage.plans import StoreSettings
from engine.storage.slabs import DiskCalls
from engine.storage.store import DiskStore
from tests.fakes import FakeClock
from tests.unit.engine.storage.storage_rig import RUN, SLOT_BYTES, SLOTS, StorageRig


def run_in_turn(works: list[Callable[[], None]]) -> None:
    """Run works as the I/O threads would."""
    for work in works:
        work()


class FastCalls(DiskCalls):
    """Calls without syncs, for tests in which no power is cut."""

    def sync(self, fd: int) -> None:
        """Do nothing."""


class LocalStorage:
    """Implements `engine.moves.Storage` without a process. Errors of the disk leave `send`."""

    def __init__(self, store: DiskStore) -> None:
        self.store = store
        self._is_closed = False
        self._told: set[bytes] = set()
        self._outcomes: list[StorageOutcome] = []

    def send(self, command: StorageCommand) -> None:
        """See `Storage`."""
        if self._is_closed:
            self._outcomes += failures_of(command)
            return
        match command:
            case Look():
                self._outcomes.append(self.store.look(command))
            case Fetch():
                for plan in self.store.plan_fetch(command):
                    if isinstance(plan, Fetched):
                        self._outcomes.append(plan)
                    else:
                        self.store.read(plan)
                        self._outcomes.append(self.store.finish_read(plan))
            case StoreRuns():
                batch = self.store.plan([command])
                self.store.write(batch, run_in_turn)
                outcomes = self.store.commit(batch)
                if batch.is_promised:
                    self.store.sync_log()
                self._outcomes += outcomes
            case Renew():
                self._outcomes.append(self.store.renew(command))
            case EraseStored():
                receipt = self.store.erase(command)
                self.wipe()
                self._outcomes.append(receipt)
            case SetStoredQuotas():
                self.store.set_quotas(command.quotas)

    def wipe(self) -> None:
        """Wipe what was given back."""
        while places := self.store.take_dirty():
            self.store.wipe(places)
            self.store.put_wiped(places, is_wiped=True)

    def poll(self) -> list[StorageOutcome]:
        """See `Storage`."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def has_records(self, namespace: bytes) -> bool:
        """See `Storage`."""
        return not self._is_closed and namespace in self.store.namespaces

    def namespaces(self) -> set[bytes]:
        """See `Storage`."""
        return set() if self._is_closed else set(self.store.namespaces)

    def take_changed(self) -> set[bytes]:
        """See `Storage`."""
        before, self._told = self._told, self.namespaces()
        return before ^ self._told

    def close(self) -> None:
        """See `Storage`."""
        self._is_closed = True
        self.store.close()


class LocalRig(StorageRig):
    """A `DiskStore` over a folder, which `reopen` closes and opens."""

    def __init__(
        self,
        folder: Path,
        *,
        clock: FakeClock | None = None,
        calls: DiskCalls | None = None,
        disk_bytes: int = 64 * 2**20,
        slab_bytes: int = 2**18,
        write_bytes_per_day: int = 0,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.folder, self.calls = folder, calls or FastCalls()
        self.settings = StoreSettings(
            folder,
            disk_bytes=disk_bytes,
            slot_bytes=slot_bytes,
            slab_bytes=slab_bytes,
            write_bytes_per_day=write_bytes_per_day,
            run_tokens=RUN,
            spare_bytes=0,
        )
        arena = HostArena.create(SLOTS, slot_bytes)
        self.clock = clock or FakeClock(10_000.0)
        self.wall_offset_s = 0.0
        self.local = self.open(arena)
        super().__init__(self.local, arena, self.clock, self.local.poll)

    def open(self, arena: HostArena) -> LocalStorage:
        """Open the store."""
        return LocalStorage(
            DiskStore(
                self.settings,
                arena.view,
                lambda: int((self.clock() + self.wall_offset_s) * 1_000),
                self.clock,
                self.calls,
            )
        )

    @property
    def disk(self) -> DiskStore:
        """The store."""
        return self.local.store

    def reopen(self) -> None:
        """Close the store and open it again."""
        self.local.close()
        self.start()

    def start(self) -> None:
        """Open the store after it was closed."""
        self.local = self.storage = self.open(self.arena)
        self._settle = self.local.poll

    def close(self) -> None:
        """Close the store and the arena."""
        self.local.close()
        self.arena.close()
