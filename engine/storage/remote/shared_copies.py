"""What one owner has in a store that all replicas of a model share: puts, manifests, erasures.

It puts each record that may leave the machine, once: what another owner lists or has put is left to
that one. Nothing is demoted and no promise rests on it, so that an object goes with its record, or
before. An owner's manifest lists its objects after they are there, and an object is deleted only
when no manifest lists it any more. An erasure deletes all that lies in the namespace's folder, of
every owner: these are extra copies. What is told of rows, room and tombstones in `copies` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from msgspec.structs import replace

from engine.api import Namespace, Payer
from engine.moves import ROOT, RecordId, RemoteStats, SharedErased
from engine.storage.index.index import RecordRow
from engine.storage.plans import PlannedRead, PlannedStore
from engine.storage.remote.copies import (
    DELETES_MAX,
    PUTS_MAX,
    WANTED_MAX,
    LentParts,
    RemoteCopies,
)
from engine.storage.remote.link import Work
from engine.storage.remote.objects import ObjectMissing, RemoteFailed, RemoteStore
from engine.storage.remote.shared_objects import (
    ENTRIES_MAX,
    NAME_BYTES,
    ROOT_NAME,
    SharedEntry,
    encode_run,
    manifest_path,
    object_path,
    seal_manifest,
)
from engine.storage.remote.shared_reads import SharedReads, SharedSpaces
from engine.storage.sealing.seals import SharedNamespace
from engine.storage.slabs.record import DamagedRecord

MANIFESTS: Final[Payer] = b"\0manifests"
"""What manifests, which concern several payers, count as."""
MANIFEST_MS: Final = 3_000
"""Milliseconds between two manifests of a namespace, at least."""
MANIFESTS_MAX: Final = 2
"""Manifests that are written at a time."""
DELETE_AFTER_MS: Final = 15_000
"""Milliseconds after which an object is deleted that its owner does not list: readers may know an
older manifest. Where a put has failed, another owner may have put the same run meanwhile."""
CLEAR_MAX: Final = 1_000
"""Objects that one call of an erasure deletes."""
CLEAR_MS: Final = 10_000
"""Milliseconds for which an erasure waits for the store."""
NAMES_MAX: Final = 65_536
"""Names of runs that are remembered."""
LOOKED_MAX: Final = 512
"""Records that are looked at for puts between two ticks."""
BUSY: Final = "it is still busy with the namespace"


@dataclass(slots=True)
class _Clear:
    """The deletion of a namespace's folder. `waiting`: erasures, with the instants until which they
    wait; `is_running`: a call is under way."""

    waiting: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    is_running: bool = False
    objects: int = 0
    size: int = 0
    failure: str = ""


class SharedCopies(RemoteCopies):
    """The shared store as the owner of one open store on disk sees it. One thread uses it."""

    is_shared = True

    def __init__(
        self,
        lent: LentParts,
        spaces: SharedSpaces,
        reads: SharedReads,
        keep: Callable[[Namespace], None],
        let_go: Callable[[Namespace], None],
    ) -> None:
        """`reads`: what other owners have. `keep` counts a namespace as held until `let_go`: while
        something of it is to be deleted, an erasure has to reach it."""
        self._spaces, self.reads, self._keep, self._let_go = spaces, reads, keep, let_go
        self._names: dict[RecordId, bytes] = {}
        self._blocked: set[Payer] = set()  # whose next record may not be put yet
        self._looks_left = LOOKED_MAX
        self._skipped: set[str] = set()  # puts that have found an object, or no record
        self._dirty: set[Namespace] = set()
        self._listing: set[Namespace] = set()
        self._listed_ms: dict[Namespace, int] = {}
        self._begun_ms: dict[Namespace, int] = {}
        self._clears: dict[Namespace, _Clear] = {}
        self.put_bytes = 0
        super().__init__(lent)
        scopes = map(self._index.names.scope_of, self.rows.scopes_with_objects())
        self._dirty.update(one.namespace for one in scopes)
        for namespace in self.rows.namespaces_to_clear():
            keep(namespace)

    # -- puts -----------------------------------------------------------------------------------

    def _first_wanted(self) -> list[RecordId]:
        return self.rows.stored_without(WANTED_MAX)[::-1]

    def _wanted_of(self, stores: Sequence[PlannedStore]) -> list[RecordId]:
        return [run.record_id for one in stores for run in one.runs]

    def demote(self, record_id: RecordId) -> bool:
        """See `RemoteCopies`: no place is taken away."""
        return False

    def renewed(self, namespace: Namespace) -> None:
        """Note that limits of a namespace's records have moved."""
        scope = self._index.names.scope(namespace)
        if scope is not None and self.rows.has_objects(scope.scope_id):
            self._dirty.add(namespace)

    def stored(self, stores: Sequence[PlannedStore]) -> None:
        """See `RemoteCopies`: limits of runs that were stored before have moved, too."""
        super().stored(stores)
        for one in stores:
            if any(run.place is None for run in one.runs):
                self.renewed(one.command.namespace)

    def _may_put(self, payer: Payer) -> bool:
        return self._looks_left > 0 and payer not in self._blocked and super()._may_put(payer)

    def _name_of(self, row: RecordRow) -> str:
        folder = self._space(row).folder
        return object_path(folder, self._run_name(row.record_id))

    def _space(self, row: RecordRow) -> SharedNamespace:
        return self._spaces.of(self._index.names.scope_of(row.scope_id).namespace)

    def _run_name(self, record_id: RecordId) -> bytes:
        """Return the name of a record's run, which exists. O(its depth) the first time."""
        path, at = list[RecordRow](), record_id
        while at != ROOT and at not in self._names:
            row = self._index.row(at)
            assert row is not None, "a record's parent exists"
            path.append(row)
            at = row.parent
        name = self._names[at] if at != ROOT else ROOT_NAME
        if len(self._names) > NAMES_MAX:
            self._names.clear()
        for row in reversed(path):
            name = self._names[row.record_id] = self._space(row).name(name, row.run)
        return name

    def _may_begin(self, row: RecordRow, name: str) -> bool:
        """Return whether a record is to be put now: not what another owner lists, and nothing while
        that is not known, or something of this name is deleted."""
        self._looks_left -= 1
        namespace = self._index.names.scope_of(row.scope_id).namespace
        is_known = self.reads.entries(namespace) is not None
        if not is_known or self.rows.has_tombstone((name, f"{name.split('/')[0]}/")):
            self._blocked.add(self._payer(row))
            self.want([row.record_id])
            return False
        return not self.reads.is_listed(namespace, self._names[row.record_id])

    def _work_of(self, row: RecordRow, name: str) -> Work:
        scope = self._index.names.scope_of(row.scope_id)
        plan = PlannedRead(0, scope.namespace, row, -1, scope.seal)
        parent = ROOT_NAME if row.parent == ROOT else self._run_name(row.parent)
        header = encode_run(parent, row.run, row.payload_bytes, row.fidelity, row.check)
        self._skipped.discard(name)
        return partial(self._put_new, plan, name, self._space(row), header)

    def _put_new(
        self,
        plan: PlannedRead,
        name: str,
        shared: SharedNamespace,
        header: bytes,
        store: RemoteStore,
    ) -> None:
        """Seal a record anew and put it, unless it is there. For another thread."""
        try:
            payload = self._reader.opened(plan, self._bytes_on_disk(plan.row))
            sealed = memoryview(b"".join(shared.seal.seal(header, payload)))
            if not _put_new(store, name, sealed):
                self._skipped.add(name)
        except DamagedRecord:  # which its next reader strikes
            self._skipped.add(name)
        finally:
            self._writing.discard(name)

    def _put_ended(self, row: RecordRow, name: str, is_cold: bool, failure: str) -> None:
        namespace = self._namespace_of(row)
        if not failure and name in self._skipped:
            self._skipped.discard(name)
            self._putting.discard(name)
            self._slabs.release(row.place)
            self._room.end_put(self._payer(row), row.place_bytes, is_there=False)
            with self._index.file.change():
                self.rows.end_tombstones([name])  # it is another owner's
        else:
            before = self.put_total
            super()._put_ended(row, name, is_cold, failure)
            if self.put_total > before and namespace is not None:
                self._dirty.add(namespace)
                self.put_bytes += row.payload_bytes
        if namespace in self._clears:
            self._begin_clear(namespace)

    def _namespace_of(self, row: RecordRow) -> Namespace | None:
        """Return the namespace of a row that may be erased meanwhile."""
        scopes = self._index.names.scopes
        return next((one.namespace for one in scopes if one.scope_id == row.scope_id), None)

    def _give_up(self, payer: Payer, now_ms: int, *, for_others: bool) -> bool:
        """See `RemoteCopies`: records stay, and lose their objects."""
        payer_id = self._index.names.payer_id(payer)
        coldest = self.rows.duplicates(payer_id, PUTS_MAX)
        for record_id in coldest:
            self.rows.give_up_object(record_id)
        self.dropped_total += len(coldest)
        return bool(coldest)

    # -- manifests ------------------------------------------------------------------------------

    def tick(self, is_full: bool) -> None:
        """See `RemoteCopies`."""
        self._blocked.clear()
        self._looks_left = LOOKED_MAX
        super().tick(is_full=False)
        self.reads.tick()
        now_ms = self._now_ms()
        for namespace, clear in list(self._clears.items()):
            if any(now_ms >= until_ms for until_ms, _ in clear.waiting):
                self._end_clear(namespace, clear.failure or BUSY)
            elif clear.waiting:
                self._begin_clear(namespace)
        if self._link.is_open:
            self._write_manifests(now_ms)

    def _write_manifests(self, now_ms: int) -> None:
        for namespace in list(self._dirty):
            is_early = now_ms - self._begun_ms.get(namespace, 0) < MANIFEST_MS
            if len(self._listing) >= MANIFESTS_MAX:
                return
            shared = self._spaces.of(namespace)
            if is_early or namespace in self._listing or namespace in self._clears:
                continue
            if self.rows.has_tombstone((f"{shared.folder}/",)):
                continue
            scope = self._index.names.scope(namespace)
            rows = [] if scope is None else self.rows.objects_of(scope.scope_id, ENTRIES_MAX)
            entries = [
                (bytes.fromhex(name[-2 * NAME_BYTES :]), SharedEntry(*told)) for name, *told in rows
            ]
            self._dirty.discard(namespace)
            self._listing.add(namespace)
            self._begun_ms[namespace] = now_ms
            work = partial(_write_manifest, shared, self._store_name, now_ms, entries)
            self._link.run(MANIFESTS, work, partial(self._listed, namespace, now_ms))

    def _listed(self, namespace: Namespace, now_ms: int, failure: str) -> None:
        self._listing.discard(namespace)
        if failure:
            self._dirty.add(namespace)
        else:
            self._listed_ms[namespace] = now_ms
        if namespace in self._clears:
            self._begin_clear(namespace)

    # -- deletion -------------------------------------------------------------------------------

    def _delete_some(self) -> None:
        """Delete what no manifest lists any more, and folders that an erasure has left."""
        busy = {*self._putting, *self._writing, *self._deleting}
        names, others, now_ms = list[str](), list[str](), self._now_ms()
        for name, namespace, since_ms in self.rows.oldest_tombstones(DELETES_MAX + len(busy)):
            if name in busy:
                continue
            if name.endswith("/"):
                self._begin_clear(namespace)
            elif not namespace or "/o/" not in name:
                names.append(name)
            elif since_ms >= self._listed_ms.get(namespace, 0):
                self._dirty.add(namespace)
            elif now_ms - since_ms >= DELETE_AFTER_MS and self.reads.entries(namespace) is not None:
                run = bytes.fromhex(name[-2 * NAME_BYTES :])
                (others if self.reads.is_listed(namespace, run) else names).append(name)
        if others:
            with self._index.file.change():
                self.rows.end_tombstones(others)
        if names:
            self._delete(names, lambda: None)

    def erasing(self, namespace: Namespace) -> None:
        """See `RemoteCopies`: all that lies in the namespace's folder is deleted."""
        self.reads.forget(namespace)
        scope = self._index.names.scope(namespace)
        if scope is not None:
            number = scope.scope_id
            if not (self.rows.was_let_leave(number) or self.rows.has_objects(number)):
                return  # no replica has put anything
            self.rows.forget_objects(number)
        folder = f"{self._spaces.of(namespace).folder}/"
        self.rows.begin_put(folder, namespace, self._now_ms())
        self._keep(namespace)
        self._dirty.discard(namespace)
        self._count_at_ms = 0

    def settle(self, namespace: Namespace, then: Callable[[], None]) -> None:
        """See `RemoteCopies`: `then` is called when nothing of the namespace is left."""
        if not self.rows.is_pending(namespace):
            then()
            return
        clear = self._clears.setdefault(namespace, _Clear())
        clear.waiting.append((self._now_ms() + CLEAR_MS, then))
        self._begin_clear(namespace)

    def take_erased(self, namespace: Namespace) -> SharedErased | None:
        """See `RemoteCopies`."""
        clear = self._clears.get(namespace)
        if clear is None:
            return None
        told = SharedErased(clear.objects, clear.size, clear.failure)
        clear.objects = clear.size = 0
        return told

    def _begin_clear(self, namespace: Namespace) -> None:
        """Delete some of a namespace's folder, unless something is written there."""
        clear = self._clears.setdefault(namespace, _Clear())
        folder = f"{self._spaces.of(namespace).folder}/"
        is_written = any(one.startswith(folder) for one in {*self._writing, *self._putting})
        if clear.is_running or is_written or namespace in self._listing:
            return
        clear.is_running, found = True, list[tuple[int, int]]()
        work = partial(_clear, folder, found)
        self._link.run(MANIFESTS, work, partial(self._cleared, namespace, clear, found))

    def _cleared(
        self, namespace: Namespace, clear: _Clear, found: list[tuple[int, int]], failure: str
    ) -> None:
        clear.is_running, clear.failure = False, failure
        if failure:
            self._end_clear(namespace, failure)
            return
        objects, size = found[0]
        clear.objects, clear.size = clear.objects + objects, clear.size + size
        if objects:
            self._begin_clear(namespace)
            return
        folder = f"{self._spaces.of(namespace).folder}/"
        with self._index.file.change():
            self.rows.end_tombstones_below(folder)
        self._count_at_ms = 0
        self._listed_ms.pop(namespace, None)
        self._let_go(namespace)
        self._end_clear(namespace, "")

    def _end_clear(self, namespace: Namespace, failure: str) -> None:
        """Answer what waits for a deletion; one that has failed is tried again."""
        clear = self._clears[namespace]
        clear.failure = failure
        waiting, clear.waiting = clear.waiting, []
        for _, then in waiting:
            then()
        if not clear.waiting and not clear.is_running:
            self._clears.pop(namespace, None)

    def stats(self) -> RemoteStats:
        """See `RemoteCopies`."""
        reads = self.reads
        rate = reads.fetched_bytes / reads.fetched_s if reads.fetched_s else 0.0
        return replace(
            super().stats(),
            fetched_total=reads.fetched_total,
            damaged_total=reads.damaged_total,
            written_bytes_total=self.put_bytes,
            read_bytes_per_s=rate,
        )


def _put_new(store: RemoteStore, name: str, data: memoryview) -> bool:
    """Put what must not be there; return whether it was not."""
    try:
        return store.put_new(name, data)
    except ObjectMissing as error:  # its folder was deleted under it
        raise RemoteFailed("it was deleted meanwhile") from error


def _write_manifest(
    shared: SharedNamespace,
    owner: str,
    now_ms: int,
    entries: list[tuple[bytes, SharedEntry]],
    store: RemoteStore,
) -> None:
    """Write an owner's manifest, or delete it where it would list nothing. For another thread."""
    path = manifest_path(shared.folder, owner)
    if not entries:
        store.delete([path])
        return
    try:
        store.put(path, seal_manifest(shared, owner, now_ms, entries))
    except ObjectMissing as error:
        raise RemoteFailed("it was deleted meanwhile") from error


def _clear(folder: str, found: list[tuple[int, int]], store: RemoteStore) -> None:
    """Delete some of a folder, manifests first. For another thread."""
    manifests, size = store.clear(manifest_path(folder[:-1], ""), CLEAR_MAX)
    objects, more = store.clear(folder, CLEAR_MAX)
    found.append((manifests + objects, size + more))
