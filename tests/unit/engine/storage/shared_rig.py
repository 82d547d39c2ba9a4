"""Owners of one shared store: each a store on a disk of its own, and a reader of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import xxhash

from engine.moves import (
    FetchedRun,
    FetchRuns,
    Look,
    Looked,
    RemoteStats,
    SharedErased,
    SlotFormat,
)
from engine.storage.remote.address import RemoteSettings, open_remote
from engine.storage.remote.objects import RemoteStore
from engine.storage.remote.shared_objects import manifest_path, object_path, open_manifest
from engine.storage.sealing.master_key import MasterKey
from engine.storage.sealing.seals import SharedNamespace
from tests.fakes import FakeClock
from tests.unit.engine.storage.local_storage import LocalRig, write_key
from tests.unit.engine.storage.remote_faults import FaultyObjects
from tests.unit.engine.storage.storage_rig import (
    LONG,
    RUN,
    SLOT_BYTES,
    SLOTS,
    A,
    DiskRig,
    content_of,
)

MASTER = MasterKey(bytes(range(32)))
MODEL = "model-fp32-4"
OWN = SlotFormat("", SLOT_BYTES)


class Owner(LocalRig):
    """A store on disk whose records other owners may read."""

    def settle(self, seconds: int = 12) -> None:
        """Let seconds pass: enough for what is wanted to be put and listed."""
        for _ in range(seconds):
            self.clock.advance(1.0)
            self.local.turn()

    def shared(self, namespace: bytes = A) -> SharedNamespace:
        """Return what all owners derive for a namespace."""
        assert self.seals is not None
        return self.seals.shared(self.settings.shared_model, namespace)

    def listed(self, objects: FaultyObjects, namespace: bytes = A) -> list[str]:
        """Return where the runs lie that this owner's manifest lists."""
        shared = self.shared(namespace)
        assert self.seals is not None
        owner = self.seals.store_name
        sealed = objects.objects.get(manifest_path(shared.folder, owner))
        if sealed is None:
            return []
        return [
            object_path(shared.folder, name)
            for name in open_manifest(shared, owner, memoryview(sealed))
        ]

    def offered(self, tokens: Sequence[int], namespace: bytes = A, form: SlotFormat = OWN) -> int:
        """Return how many runs of a prefix a look finds in the shared store, behind those here."""
        command = Look(self.call_id(), namespace, tuple(tokens), form, 1.0)
        return self.ask(command, Looked).shared_runs

    def fetch_runs(
        self,
        tokens: Sequence[int],
        first: int = 0,
        namespace: bytes = A,
        form: SlotFormat = OWN,
        timeout_s: float = 60.0,
    ) -> list[FetchedRun]:
        """Fetch all runs of a prefix from run `first` on; what came is what was stored."""
        count = len(tokens) // RUN - first
        slots = tuple(range(SLOTS - count, SLOTS))
        what = namespace, tuple(tokens), first, slots, form, timeout_s
        command = FetchRuns(self.call_id(), None, *what)
        self.storage.send(command)
        found = [one for one in self.answers(command.call_id, count) if isinstance(one, FetchedRun)]
        for number, one in enumerate(found):
            if not one.why:
                came = bytes(self.arena.view(slots[number], form.slot_bytes))
                end = (first + number + 1) * RUN
                assert came == content_of(namespace, tokens[:end], form.slot_bytes)
                assert one.check == xxhash.xxh3_128_digest(came)
        return found

    def whys(self, tokens: Sequence[int], first: int = 0, namespace: bytes = A) -> list[str]:
        """Return why each run was not fetched; "" for one that was."""
        return [one.why for one in self.fetch_runs(tokens, first, namespace)]

    def erased_shared(
        self,
        namespace: bytes = A,
        lease_id: str | None = None,
        tokens: Sequence[int] | None = None,
    ) -> SharedErased:
        """Erase, and return what the shared store has deleted."""
        receipt = self.erase(namespace, lease_id, tokens)
        assert receipt.shared is not None
        return receipt.shared


@contextmanager
def owners_of(
    folder: Path,
    remote: RemoteStore,
    count: int = 2,
    *,
    master: MasterKey = MASTER,
    model: str = MODEL,
    remote_bytes: int = 0,
    clock: FakeClock | None = None,
) -> Iterator[list[Owner]]:
    """Open so many owners of a store, each with a folder of its own and one clock for all."""
    clock, owners = clock or FakeClock(10_000.0), list[Owner]()
    folder.mkdir(exist_ok=True)
    try:
        for number in range(count):
            owners.append(
                Owner(
                    folder / f"{model}{number}",
                    clock=clock,
                    master=master,
                    remote=remote,
                    remote_bytes=remote_bytes,
                    shared_model=model,
                    other_bytes=(SLOT_BYTES // 2,),
                )
            )
            owners[-1].local.turn()  # the store is asked whether it is there
            owners[-1].local.turn()
        yield owners
    finally:
        for one in owners:
            one.close()


def await_remote(rig: DiskRig, is_so: Callable[[RemoteStats], bool]) -> RemoteStats:
    """Wait for a heartbeat that says so of the remote store."""
    while (stats := rig.await_stats()).remote is None or not is_so(stats.remote):
        pass
    return stats.remote


def check_processes(folder: Path, url: str, *, is_real: bool = False) -> None:
    """Share a store between two storage processes: one stores, the other one fetches, both erase.
    `is_real`: as for `DiskRig`."""
    key, rigs = write_key(folder / "key", MASTER), list[DiskRig]()
    remote, runs = RemoteSettings(url, timeout_s=60.0, is_shared=True), len(LONG) // RUN
    store = open_remote(url, 60.0)
    try:
        for name in ("one", "other"):
            rig = DiskRig(
                folder / name,
                FakeClock(1_000.0),
                seal=key,
                remote=remote,
                is_real=is_real,
                model_digest=MODEL,
            )
            rigs.append(rig)
            await_remote(rig, lambda stats: stats.state == "open")
        one, other = rigs
        one.store(A, LONG)
        while not [name for name in store.names("", 99) if "/m/" in name]:
            one.clock.advance(1.0)
            one.await_stats()
        look = Look(other.call_id(), A, LONG, OWN, 60.0)
        assert other.ask(look, Looked).shared_runs == runs
        slots = tuple(range(runs))
        fetch = FetchRuns(other.call_id(), None, A, LONG, 0, slots, OWN, 60.0)
        other.storage.send(fetch)
        found = other.answers(fetch.call_id, runs)
        assert [one.why for one in found if isinstance(one, FetchedRun)] == [""] * runs
        for number in slots:
            assert other.arena.view(number, SLOT_BYTES) == content_of(A, LONG[: (number + 1) * RUN])
        told = [rig.erase(A).shared for rig in rigs]
        assert [one and one.code for one in told] == ["", ""]
        assert told[0] is not None
        assert told[0].objects == runs + 1
        assert store.names("", 99) == ["proof"]
    finally:
        for rig in rigs:
            rig.close()
