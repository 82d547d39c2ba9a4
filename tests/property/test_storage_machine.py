"""The storage on disk under hypothesis, against the one in memory.

Both get the same commands, with two tokens, two namespaces and short paths; each outcome must be
the same, whatever was stored, renewed, erased or expired before, and however often the one on disk
was opened anew. Record ids differ and are compared by what they lead to.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from engine.moves import ROOT, RecordId
from engine.storage.index.index import RecordIndex, RecordRow
from engine.storage.index.namespace_rows import Scope
from engine.storage.index.remote_rows import RemoteRows
from engine.storage.memory.arena import HostArena
from engine.storage.remote.copies import RemoteCopies
from engine.storage.sealing.master_key import MasterKey
from engine.storage.slabs.slabs import SlabFiles
from tests.fakes import FakeClock
from tests.memory_storage import MemoryStorage
from tests.property.machine_runs import case
from tests.property.planted import check_caught
from tests.unit.engine.storage.local_storage import LocalRig
from tests.unit.engine.storage.remote_faults import FaultyObjects
from tests.unit.engine.storage.storage_rig import (
    LAYOUT,
    RUN,
    SLOT_BYTES,
    A,
    B,
    StorageRig,
    content_of,
)

pytestmark = pytest.mark.slow

NAMESPACES = st.sampled_from([A, B])
PATHS = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=4)
LEASES = st.sampled_from([(), ("one",), ("two",), ("one", "two")])
SECONDS = st.sampled_from([1, 5, 20])


def tokens_of(path: list[int]) -> tuple[int, ...]:
    """Return a path's tokens: one run for each number."""
    return tuple(number for number in path for _ in range(RUN))


class StorageMachine(RuleBasedStateMachine):
    """Two storages, one clock."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="storage-machine-"))
        self.clock = FakeClock(1_000.0)
        self.disk = self.make_disk()
        arena = HostArena.create(LAYOUT)
        self.memory = MemoryStorage(arena, self.clock, run_tokens=RUN)
        self.model = StorageRig(self.memory, arena, self.clock, self.memory.poll)
        self.twin: dict[RecordId, RecordId] = {ROOT: ROOT}  # on disk, by the id in memory

    def make_disk(self) -> LocalRig:
        """Return the storage on disk."""
        other_bytes = (SLOT_BYTES // 2,)
        return LocalRig(self.folder / "levels", clock=self.clock, other_bytes=other_bytes)

    def teardown(self) -> None:
        self.disk.close()
        self.model.arena.close()
        shutil.rmtree(self.folder)

    def known(self, namespace: bytes, path: list[int]) -> list[RecordId]:
        """Compare what both find; return the ids in memory."""
        tokens = tokens_of(path)
        ours, theirs = self.disk.look(namespace, tokens), self.model.look(namespace, tokens)
        expected = [self.twin[run.record_id] for run in theirs]
        assert [run.record_id for run in ours] == expected, (namespace, path)
        for one, other in zip(ours, theirs, strict=True):
            assert (one.limit_s, one.promise_s) == (other.limit_s, other.promise_s)
            assert (one.fidelity, one.slot_bytes) == (other.fidelity, other.slot_bytes)
        return [run.record_id for run in theirs]

    @rule(
        namespace=NAMESPACES,
        path=PATHS,
        limit_s=st.none() | SECONDS,
        promise_s=st.just(0) | SECONDS,
        lease_ids=LEASES,
        is_packed=st.sampled_from([False, False, True]),
    )
    def store(
        self,
        namespace: bytes,
        path: list[int],
        limit_s: int | None,
        promise_s: int,
        lease_ids: tuple[str, ...],
        is_packed: bool,
    ) -> None:
        """Store a path below what is known of it, in either format."""
        above = self.known(namespace, path)
        whole = tokens_of(path)
        at = max(0, len(above) - 1) * RUN  # the last known run is stored once more
        parent = above[-2] if len(above) > 1 else ROOT
        outcomes = [
            rig.send_store(
                rig.store_command(
                    namespace,
                    whole[at:],
                    parent=self.twin[parent] if rig is self.disk else parent,
                    above=whole[:at],
                    limit_s=limit_s,
                    promise_s=promise_s,
                    lease_ids=lease_ids,
                    fidelity="near" if is_packed else "exact",
                    slot_bytes=SLOT_BYTES // (1 + is_packed),
                )
            )
            for rig in (self.disk, self.model)
        ]

        assert outcomes[0].code == outcomes[1].code == ""
        pairs = zip(outcomes[1].record_ids, outcomes[0].record_ids, strict=True)
        for in_memory, on_disk in pairs:
            assert self.twin.setdefault(in_memory, on_disk) == on_disk

    @rule(namespace=NAMESPACES, path=PATHS)
    def look_and_fetch(self, namespace: bytes, path: list[int]) -> None:
        """What is found has its own bytes."""
        self.known(namespace, path)
        tokens = tokens_of(path)

        for number, run in enumerate(self.disk.look(namespace, tokens)):
            data = self.disk.fetch(namespace, [run.record_id], run.slot_bytes)
            until = (number + 1) * RUN
            assert data == [content_of(namespace, tokens[:until], run.slot_bytes)]

    @rule(namespace=NAMESPACES, data=st.data(), seconds=st.none() | SECONDS, lease_ids=LEASES)
    def renew(
        self,
        namespace: bytes,
        data: st.DataObject,
        seconds: int | None,
        lease_ids: tuple[str, ...],
    ) -> None:
        """Renew any record, whether it is there or of this namespace or not."""
        one = data.draw(st.sampled_from(sorted(self.twin)))
        gone = self.disk.renew(namespace, [self.twin[one]], seconds, seconds or 0, lease_ids)
        expected = self.model.renew(namespace, [one], seconds, seconds or 0, lease_ids)
        assert bool(gone) == bool(expected)

    @rule(
        namespace=NAMESPACES,
        lease_id=st.none() | st.sampled_from(["one", "two", "three"]),
        path=st.none() | PATHS,
        more=st.integers(0, 2),
    )
    def erase(
        self, namespace: bytes, lease_id: str | None, path: list[int] | None, more: int
    ) -> None:
        """Erase a namespace, a lease or a prefix that may end inside a run."""
        tokens = None
        if lease_id is None and path is not None:
            tokens = (*tokens_of(path), *([path[-1]] * more))
        ours = self.disk.erase(namespace, lease_id, tokens)
        theirs = self.model.erase(namespace, lease_id, tokens)

        assert ours.records == theirs.records
        self.check_code(ours.code)

    def check_code(self, code: str) -> None:
        """An erasure on disk never fails."""
        assert code == ""

    @rule(seconds=SECONDS)
    def advance(self, seconds: int) -> None:
        """Time passes, and what has expired goes."""
        self.clock.advance(seconds)
        self.memory.expire()
        self.disk.disk.maintain()

    @rule()
    def reopen(self) -> None:
        """The storage process ends, and the next one begins."""
        self.disk.reopen()

    @invariant()
    def books_agree(self) -> None:
        """The store's sums equal a recount, and the model's."""
        self.disk.disk.check()
        ours, theirs = self.disk.disk.stats(), self.memory.stats()
        assert ours.records == theirs.records
        assert ours.namespaces == theirs.namespaces
        for namespace in (A, B):
            held = self.disk.storage.has_records(namespace)
            assert held == self.memory.has_records(namespace)


TestStorageMachine = case(StorageMachine, 30)


class FarStorageMachine(StorageMachine):
    """The same over a sealed disk with a remote store, to which any record may go at any time."""

    def make_disk(self) -> LocalRig:
        """Return a sealed storage with a remote one."""
        self.objects = FaultyObjects()
        rig = LocalRig(
            self.folder / "levels",
            clock=self.clock,
            other_bytes=(SLOT_BYTES // 2,),
            master=MasterKey(bytes(32)),
            remote=self.objects,
        )
        rig.local.turn()
        return rig

    @property
    def far(self) -> RemoteCopies:
        """The remote part of the store."""
        assert self.disk.disk.remote is not None
        return self.disk.disk.remote

    def check_code(self, code: str) -> None:
        """It is pending only while objects cannot be deleted."""
        assert code in (("", "pending") if self.objects.fails else ("",))

    @initialize()
    def begin_with_objects(self) -> None:
        """Both namespaces have something in the remote store."""
        for namespace in (A, B):
            ours, theirs = (
                rig.send_store(rig.store_command(namespace, tokens_of([0, 1]), promise_s=20))
                for rig in (self.disk, self.model)
            )
            self.twin.update(zip(theirs.record_ids, ours.record_ids, strict=True))
        self.disk.local.turn()

    @rule(data=st.data(), goes=st.booleans())
    def put(self, data: st.DataObject, goes: bool) -> None:
        """Put all records, whether they are there or not; and give up one's place."""
        one = self.twin[data.draw(st.sampled_from(sorted(self.twin)))]
        self.far.want(self.twin.values())
        self.disk.local.turn()
        if goes:
            self.far.demote(one)

    @rule(call=st.sampled_from(["delete", "delete", "put"]))
    def break_store(self, call: str) -> None:
        """From now on the remote store deletes, or takes, nothing."""
        self.objects.fails[call] = "503"

    @rule()
    def mend_store(self) -> None:
        """It is well again, and has been asked."""
        self.objects.fails.clear()
        self.reopen()

    @rule()
    def reopen(self) -> None:
        """The storage process ends, and the next one begins and asks the remote store."""
        super().reopen()
        self.disk.local.turn()

    def known(self, namespace: bytes, path: list[int]) -> list[RecordId]:
        """Compare what both find, where the remote store has not been given up, for all or for the
        payer whose objects it did not take."""
        if self.far.stats().reason:
            self.mend_store()
        return super().known(namespace, path)

    @invariant()
    def objects_are_known(self) -> None:
        """Each object has a row or a tombstone, and each row that says so has its object."""
        self.disk.local.pump()
        rows = self.far.rows
        put = {name for name in self.objects.objects if rows.is_known(name)}
        left = set(self.objects.objects) - put
        assert left <= set(rows.tombstones((), 10_000))
        assert rows.sums().records == len(put)


TestFarStorageMachine = case(FarStorageMachine, 30)


def tombstones_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A deletion that failed counts as done."""
    right = RemoteCopies.settle

    def wrong(self: RemoteCopies, namespace: bytes, then: Callable[[], None]) -> None:
        found = self.rows.tombstones_of(namespace, 100)
        right(self, namespace, then)
        self.rows.end_tombstones(found)

    patch.setattr(RemoteCopies, "settle", wrong)


def places_stay_after_they_were_given_up(patch: pytest.MonkeyPatch) -> None:
    """A record that was demoted is still looked for on disk."""
    patch.setattr(RemoteRows, "demote", lambda self, record_id: None)


def limits_lengthen_only_promises(patch: pytest.MonkeyPatch) -> None:
    """A renewal forgets the limit."""
    right = RecordIndex.lengthen

    def wrong(self: RecordIndex, record_id: RecordId, limit_ms: int, promise_ms: int) -> None:
        right(self, record_id, 0, promise_ms)

    patch.setattr(RecordIndex, "lengthen", wrong)


def expiry_leaves_children(patch: pytest.MonkeyPatch) -> None:
    """What hangs on a deleted record stays."""

    def wrong(self: RecordIndex, tops: Iterable[RecordId]) -> list[RecordRow]:
        rows = [row for one in tops if (row := self.row(one)) is not None]
        self._db.executemany(
            "delete from records where rec_id=?", [(row.record_id,) for row in rows]
        )
        return rows

    patch.setattr(RecordIndex, "delete_under", wrong)


def leases_cover_nothing_above(patch: pytest.MonkeyPatch) -> None:
    """An erased lease takes what another lease needs."""

    def wrong(self: RecordIndex, scope: Scope, lease_id: str) -> list[RecordId]:
        sql = "select rec_id from leases where scope_id=? and lease_id=?"
        return self.file.column(sql, scope.scope_id, lease_id)

    patch.setattr(RecordIndex, "leased", wrong)


def bytes_are_not_given_back(patch: pytest.MonkeyPatch) -> None:
    """A place is lost with each record."""
    patch.setattr(SlabFiles, "give_back", lambda self, place: None)


@pytest.mark.parametrize(
    "plant",
    [
        limits_lengthen_only_promises,
        expiry_leaves_children,
        leases_cover_nothing_above,
        bytes_are_not_given_back,
    ],
)
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that finds nothing proves nothing."""
    plant(monkeypatch)
    check_caught(StorageMachine, examples=200)


@pytest.mark.parametrize("plant", [tombstones_are_forgotten, places_stay_after_they_were_given_up])
def test_a_planted_fault_afar_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, of the remote store."""
    plant(monkeypatch)
    check_caught(FarStorageMachine, examples=60)
