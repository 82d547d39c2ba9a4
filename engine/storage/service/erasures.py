"""Erasures on their way: what is wiped, who waits for it, and what is owed to a disk that is away.

An erasure is answered when its rows are gone durably, no byte of it is read, written or left in a
place, and its objects in a remote store are deleted, or could not be in time (rule 6). The main
thread uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from engine.api import Namespace
from engine.moves import EraseStored, StoredErased
from engine.storage.io_threads import IoThreads
from engine.storage.remote.copies import RemoteCopies
from engine.storage.slabs.slabs import Place
from engine.storage.store import DiskError, DiskStore


class StoredErasures:
    """The erasures of one service, over one store after another."""

    def __init__(self, io: IoThreads, send: Callable[[StoredErased], None]) -> None:
        self._io, self._send = io, send
        self._store: DiskStore | None = None
        self._is_wiping = False
        self._unwiped: list[tuple[EraseStored, StoredErased, set[Place]]] = []
        self._owed: dict[tuple[object, ...], EraseStored] = {}

    def opened(self, store: DiskStore) -> None:
        """Make up for what is owed to a store that has just opened, and wipe what is free there.
        Raises what `DiskStore.erase` does."""
        for command in self._owed.values():
            store.erase(command)
        self._owed.clear()
        self._store = store
        self.wipe()

    def lost(self) -> None:
        """Answer what waits: the rows are gone, and the bytes are wiped when the disk is back."""
        self._store = None
        waiting, self._unwiped = self._unwiped, []
        for _, receipt, _ in waiting:
            self._send(receipt if receipt.is_shredded else replace(receipt, code="closed"))

    def owe(self, command: EraseStored, code: str) -> None:
        """Answer that an erasure has failed, and carry it out as soon as the disk is back."""
        self._owed[command.namespace, command.lease_id, command.tokens] = command
        self._send(StoredErased(command.call_id, code=code))

    def begin(self, store: DiskStore, command: EraseStored) -> None:
        """Erase, and answer later."""
        try:
            receipt, places = store.erase(command)
        except DiskError:
            self.owe(command, "write_failed")
            raise
        self._unwiped.append((command, receipt, places))

    def turn(self) -> None:
        """Wipe what erasures wait for, and answer those that wait for nothing more."""
        if self._unwiped:
            self.wipe()
            if not self._is_wiping:
                self.answer()

    def answer(self) -> None:
        """Answer erasures that have no byte left. O(places that they wait for)."""
        store, waiting = self._store, self._unwiped
        if store is None:
            return
        self._unwiped = []
        for command, receipt, places in waiting:
            if left := store.unwiped(places):
                self._unwiped.append((command, receipt, left))
            else:
                self._settle(store, command, receipt)

    def wipe(self) -> None:
        """Wipe what was given back, one work after another until there is no more."""
        store = self._store
        if store is None or self._is_wiping or not (places := store.slabs.take_dirty()):
            return
        failures: list[OSError] = []

        def wipe() -> None:
            try:
                store.slabs.wipe(places)
            except OSError as error:
                failures.append(error)

        self._is_wiping = True
        self._io.read(wipe, partial(self._end_wipe, store, places, failures))

    def _end_wipe(self, store: DiskStore, places: list[Place], failures: list[OSError]) -> None:
        self._is_wiping = False
        store.slabs.put_wiped(places, is_wiped=not failures)
        if store is not self._store:
            return
        if failures:
            raise failures[0]
        self.wipe()
        if not self._is_wiping:
            self.answer()

    def _settle(self, store: DiskStore, command: EraseStored, receipt: StoredErased) -> None:
        """Answer an erasure, after objects of it were deleted, or could not be in time."""
        remote, namespace = store.remote, command.namespace
        has_own_key = remote is None or not remote.is_shared
        is_owed = remote is not None and _has_objects(remote, namespace)
        is_owed = is_owed and not (receipt.is_shredded and has_own_key)
        if not is_owed:
            self._send(receipt)
        if remote is None:
            return

        def then() -> None:
            if not is_owed:
                return
            told, is_left = remote.take_erased(namespace), _has_objects(remote, namespace)
            if told is not None:
                code = told.code or "pending" if is_left else ""
                self._send(replace(receipt, shared=replace(told, code=code)))
            else:
                self._send(replace(receipt, code="pending") if is_left else receipt)

        try:
            remote.settle(namespace, then)  # those of a destroyed key go unawaited
        except DiskError:  # which others will notice
            then()


def _has_objects(remote: RemoteCopies, namespace: Namespace) -> bool:
    """Return whether objects of a namespace are to be deleted still, or that is not known."""
    try:
        return remote.rows.is_pending(namespace)
    except DiskError:
        return True
