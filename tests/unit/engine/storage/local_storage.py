"""A `DiskStore` driven by one thread: each command has its outcome before the next one begins."""

from __future__ import annotations

import select
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from engine.moves import (
    EraseStored,
    Fetch,
    Fetched,
    FetchRuns,
    KeepHere,
    Look,
    Recall,
    Renew,
    SetStoredQuotas,
    SharedErased,
    SlotLayout,
    StopFetch,
    StorageCommand,
    StorageOutcome,
    StoreRuns,
)
from engine.storage.memory.arena import HostArena
from engine.storage.messages import failures_of
from engine.storage.plans import PlannedRead
from engine.storage.remote.copies import RemoteCopies
from engine.storage.remote.link import RemoteLink
from engine.storage.remote.objects import RemoteStore
from engine.storage.sealing.key_ring import KeyRing
from engine.storage.sealing.master_key import MasterKey
from engine.storage.sealing.unlocking import SealSettings
from engine.storage.slabs.slabs import DiskCalls
from engine.storage.space.disk_space import StoreSettings
from engine.storage.store import DiskStore
from tests.fakes import FakeClock
from tests.unit.engine.storage.failing_calls import FailingCalls
from tests.unit.engine.storage.storage_rig import RUN, SLOT_BYTES, SLOTS, StorageRig

TIMEOUT_S = 2.0
"""The longest that a call of the remote store may take."""


def run_in_turn(works: list[Callable[[], None]]) -> None:
    """Run works as the I/O threads would."""
    for work in works:
        work()


class FastCalls(FailingCalls):
    """Calls without syncs, for tests in which no power is cut."""

    def sync(self, fd: int) -> None:
        """Do nothing."""
        self._check("sync")


class LocalStorage:
    """Implements `engine.moves.Storage` without a process. Errors of the disk leave `send`."""

    def __init__(self, store: DiskStore, link: RemoteLink | None = None) -> None:
        self.store, self.link = store, link
        self._is_closed = False
        self._told: set[bytes] = set()
        self._outcomes: list[StorageOutcome] = []

    def send(self, command: StorageCommand) -> None:
        """See `Storage`."""
        if self._is_closed:
            self._outcomes += failures_of(command)
            return
        match command:
            case Look() if self.store.shared is not None:
                here = self.store.look(command)
                self.store.shared.reads.look(command, here, self._outcomes.append)
                self.pump()
            case Look():
                self._outcomes.append(self.store.look(command))
            case FetchRuns():
                assert self.store.shared is not None
                self.store.shared.reads.fetch(command)
                self.pump()
            case StopFetch():
                assert self.store.shared is not None
                self.store.shared.reads.stop(command.call_id)
            case Fetch():
                for plan in self.store.plan_fetch(command):
                    if isinstance(plan, Fetched):
                        self._outcomes.append(plan)
                    elif not self.store.fetch_remote(plan, partial(self._fetched, plan)):
                        self.store.reader.read(plan)
                        self._fetched(plan)
                self.pump()
            case StoreRuns():
                batch = self.store.writer.plan([command])
                self.store.writer.write(batch, run_in_turn)
                outcomes = self.store.writer.commit(batch)
                if batch.is_promised:
                    self.store.sync_log()
                self._outcomes += outcomes
            case Renew():
                self._outcomes.append(self.store.renew(command))
            case Recall():
                self._outcomes.append(self.store.recall(command))
            case EraseStored():
                receipt, _ = self.store.erase(command)
                self.wipe()
                if (far := self.store.remote) is not None:
                    told = list[SharedErased | None]()
                    far.settle(
                        command.namespace, lambda: told.append(far.take_erased(command.namespace))
                    )
                    self.pump()
                    receipt = replace(receipt, shared=told[0] if told else None)
                    is_left = far.rows.is_pending(command.namespace)
                    if is_left and not receipt.is_shredded and not far.is_shared:
                        receipt = replace(receipt, code="pending")
                self._outcomes.append(receipt)
            case SetStoredQuotas():
                self.store.quotas.set(command.quotas)
            case KeepHere():
                self.store.keep_here(command.namespaces)

    def _fetched(self, plan: PlannedRead) -> None:
        self._outcomes.append(self.store.finish_read(plan))

    def pump(self) -> None:
        """Carry out what the remote store was asked, to its end."""
        link = self.link
        while link is not None and link.under_way:
            assert select.select([link.wake_fd], [], [], 60.0)[0], "no outcome in 60 s"
            for then in link.take_ended():
                then()

    def turn(self) -> None:
        """Let a second pass as the process does, with all that follows from it."""
        if self.link is not None:
            self.link.tick()
            self.pump()
        if self.store.shared is not None:
            self.store.shared.reads.tick()
        self.store.maintain()
        self.pump()

    def wipe(self) -> None:
        """Wipe what was given back."""
        while places := self.store.slabs.take_dirty():
            self.store.slabs.wipe(places)
            self.store.slabs.put_wiped(places, is_wiped=True)

    def poll(self) -> list[StorageOutcome]:
        """See `Storage`."""
        if not self._is_closed and (shared := self.store.shared) is not None:
            self._outcomes += shared.reads.take_told()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def has_records(self, namespace: bytes) -> bool:
        """See `Storage`."""
        return not self._is_closed and namespace in self.store.usage.namespaces

    def namespaces(self) -> set[bytes]:
        """See `Storage`."""
        return set() if self._is_closed else set(self.store.usage.namespaces)

    def take_changed(self) -> set[bytes]:
        """See `Storage`."""
        before, self._told = self._told, self.namespaces()
        return before ^ self._told

    def close(self) -> None:
        """See `Storage`."""
        self._is_closed = True
        self.pump()
        self.store.close()
        if self.link is not None:
            self.link.close()
            self.link = None


class LocalRig(StorageRig):
    """A `DiskStore` over a folder, which `reopen` closes and opens.

    `faults`: of its disk, unless it has other `calls`. `other_bytes`: the sizes of copies beside
    `slot_bytes`, all smaller.
    """

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
        other_bytes: tuple[int, ...] = (),
        master: MasterKey | None = None,
        remote: RemoteStore | None = None,
        remote_bytes: int = 0,
        shared_model: str = "",
    ) -> None:
        """`master`: the master key of a sealed store; `remote`: its remote store; `shared_model`:
        the model whose replicas share it."""
        self.master, self.remote = master, remote
        folder.mkdir(mode=0o700, exist_ok=True)
        self.faults = FastCalls()
        self.folder, self.calls = folder, calls or self.faults
        self.settings = StoreSettings(
            folder,
            disk_bytes=disk_bytes,
            slot_sizes=(slot_bytes, *other_bytes),
            slab_bytes=slab_bytes,
            write_bytes_per_day=write_bytes_per_day,
            run_tokens=RUN,
            spare_bytes=0,
            remote_bytes=remote_bytes,
            shared_model=shared_model,
        )
        arena = HostArena.create(SlotLayout.uniform(SLOTS, slot_bytes))
        self.clock = clock or FakeClock(10_000.0)
        self.wall_offset_s = 0.0
        self.seals: KeyRing | None = None
        self.local = self.open(arena)
        super().__init__(self.local, arena, self.clock, self.local.poll)

    def open(self, arena: HostArena) -> LocalStorage:
        """Open the store."""
        seals = None
        if self.master is not None:
            may_make = not any(self.folder.glob("index.db"))
            seals = self.seals = KeyRing(self.folder, self.master, may_make=may_make)
        link, remote = None, self.remote
        if remote is not None:
            link = RemoteLink(lambda: remote, self.clock, TIMEOUT_S)
        try:
            store = DiskStore(
                self.settings,
                arena.view,
                lambda: int((self.clock() + self.wall_offset_s) * 1_000),
                self.clock,
                self.calls,
                seals=seals,
                link=link,
            )
        except BaseException:
            if seals is not None:
                seals.close()
            if link is not None:
                link.close()
            raise
        return LocalStorage(store, link)

    @property
    def disk(self) -> DiskStore:
        """The store."""
        return self.local.store

    @property
    def far(self) -> RemoteCopies:
        """The remote part of the store, which it has."""
        assert self.disk.remote is not None
        return self.disk.remote

    @property
    def link(self) -> RemoteLink:
        """The way to the remote store, which it has."""
        assert self.local.link is not None
        return self.local.link

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


MakeRig = Callable[..., LocalRig]
"""Opens a store with these settings."""


def write_key(path: Path, master: MasterKey) -> SealSettings:
    """Write a master key to a file; return the settings that name it."""
    path.touch()
    path.chmod(0o600)
    path.write_text(master.secret.hex())
    path.chmod(0o400)
    return SealSettings(str(path))
