"""What an operator does to a store while no server uses it: begin anew, rebuild, verify, rewrap.

Each holds the folder's lock, so a running server makes it fail with `FolderInUse`. The command line
calls this module; it knows no engine and no process. A sealed store is rebuilt and verified with
its keys (`engine.storage.sealing.unlocking`), and emptied without: that destroys them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from msgspec import Struct

from engine.api import FIDELITIES
from engine.moves import ROOT, RecordId
from engine.storage.folder import FolderLock, FolderRefused, check_folder
from engine.storage.index.index import RecordIndex, RecordRow
from engine.storage.index.index_file import INDEX_NAME
from engine.storage.index.remote_rows import PADDING_BYTES_MAX, REMOTE, RemoteRows
from engine.storage.reader import payload_of
from engine.storage.remote.address import RemoteSettings, open_remote
from engine.storage.remote.objects import ObjectMissing, RemoteFailed, RemoteStore
from engine.storage.sealing.seals import KEYS_NAME, SealRefused, Seals
from engine.storage.sealing.unlocking import SealSettings, store_name_of, unlock
from engine.storage.slabs.record import (
    HEADER_BYTES,
    DamagedRecord,
    RecordHeader,
    decode_header,
    place_bytes_of,
)
from engine.storage.slabs.slabs import DiskCalls, Place, SlabFiles, sync_folder

REBUILT_NAME = f"{INDEX_NAME}.rebuilt"
"""A new index while it is made."""
REBUILD_BATCH = 1_024
DELETED_AT_ONCE = 256
Progress = Callable[[int, int], None]
"""Told how many places of how many are done."""


class RebuiltIndex(Struct, frozen=True):
    """The outcome of a rebuild."""

    records: int
    left_out: int
    """Headers whose record is past its limit, older than another of the same run, or without its
    parent."""


class VerifiedStore(Struct, frozen=True):
    """The outcome of a verification: records read, and those that were damaged and are gone."""

    records: int
    damaged: int


class EmptiedRemote(Struct, frozen=True):
    """What was deleted in the remote store; `problem`: why that is not all."""

    objects: int
    problem: str = ""


def clear_folder(folder: Path) -> int:
    """Delete a store, so that the next start begins with an empty one. Returns the bytes freed.

    The keys of a sealed store go first. Other files of the folder stay. Raises FolderRefused,
    FolderInUse, OSError.
    """
    with _owned(folder):
        freed = 0
        keys = sorted(folder.glob(f"{KEYS_NAME}*"))
        for path in [*keys, *_index_files(folder), *folder.glob("*.slab")]:
            with suppress(FileNotFoundError):
                freed += path.stat().st_size
                path.unlink()
        sync_folder(folder)
        return freed


def rebuild_index(
    folder: Path,
    now_ms: int,
    progress: Progress = lambda done, total: None,
    seal: SealSettings | None = None,
    environment: Mapping[str, str] | None = None,
) -> RebuiltIndex:
    """Make a new index from the headers of all slabs, which takes the old one's place when it is
    whole. Leases are gone.

    Reads 4,096 bytes a place. `now_ms`: the wall clock; what is past its limit stays out. `seal`:
    where the master key of a sealed store is. Raises FolderRefused, FolderInUse, MasterKeyRefused,
    SealRefused, OSError, apsw.Error.
    """
    with _owned(folder), _unlocked(folder, seal, environment) as seals:
        slabs = SlabFiles(folder, HEADER_BYTES, DiskCalls())
        with closing(slabs):
            found = list(_headers(slabs, progress, seals))
            chosen = _choose(found, now_ms)
            new = folder / REBUILT_NAME
            for path in folder.glob(f"{REBUILT_NAME}*"):
                path.unlink()  # of a rebuild that was killed
            index = RecordIndex(new, may_make=True, seals=seals)
            with closing(index):
                _fill(index, chosen, [header for _, header in found])
                index.file.empty_log()
            for path in _index_files(folder):
                if path != new:
                    path.unlink()
            sync_folder(folder)  # a log of the old one would be taken for the new one's
            new.rename(folder / INDEX_NAME)
            sync_folder(folder)
        return RebuiltIndex(len(chosen), len(found) - len(chosen))


def verify_store(
    folder: Path,
    progress: Progress = lambda done, total: None,
    seal: SealSettings | None = None,
    environment: Mapping[str, str] | None = None,
    remote: RemoteSettings | None = None,
) -> VerifiedStore:
    """Read every record, and delete those whose bytes are damaged, with everything under them.

    `seal`: where the master key of a sealed store is. `remote`: its remote store; without one, and
    if it fails, what lies only there is left as it is. Raises FolderRefused, FolderInUse,
    IndexUnusable, MasterKeyRefused, SealRefused, OSError, apsw.Error.
    """
    with _owned(folder), _unlocked(folder, seal, environment) as seals:
        slabs = SlabFiles(folder, HEADER_BYTES, DiskCalls())
        with closing(slabs):
            index = RecordIndex(folder / INDEX_NAME, may_make=False, seals=seals)
            with closing(index):
                rows, damaged = list(index.rows()), []
                objects = None if remote is None else open_remote(remote.url, remote.timeout_s)
                for number, row in enumerate(rows):
                    if not _is_sound(slabs, objects, index, row):
                        damaged.append(row.record_id)
                    progress(number + 1, len(rows))
                with index.file.change():
                    gone = index.delete_under(damaged)
                index.file.empty_log()
        return VerifiedStore(len(rows), len(gone))


def rewrap_keys(folder: Path, seal: SealSettings, environment: Mapping[str, str]) -> int:
    """Wrap the data keys of a sealed store by its new master key. Returns how many; 0 if they were.

    No record is read or written. Raises FolderRefused, FolderInUse, MasterKeyRefused, SealRefused,
    OSError, apsw.Error.
    """
    with _owned(folder), _unlocked(folder, seal, environment) as seals:
        return 0 if seals is None else seals.rewrapped


def empty_remote(folder: Path, remote: RemoteSettings | None) -> EmptiedRemote | None:
    """Delete all objects of a store; None if it has no remote one.

    A rebuilt index does not know which of them were to be deleted, and a cleared folder none, so
    neither keeps any. Raises FolderRefused, FolderInUse, RemoteRefused, apsw.Error.
    """
    with _owned(folder):
        name = store_name_of(folder)
        if remote is None or not name:
            return None
        deleted, before = 0, list[str]()
        try:
            objects = open_remote(remote.url, remote.timeout_s)
            while names := objects.names(f"{name}/", DELETED_AT_ONCE):
                if names == before:
                    return EmptiedRemote(
                        deleted, "the store confirms deletions and keeps the objects"
                    )
                objects.delete(names)
                deleted, before = deleted + len(names), names
        except RemoteFailed as error:
            return EmptiedRemote(deleted, str(error))
        return EmptiedRemote(deleted)


def _owned(folder: Path) -> closing[FolderLock]:
    if problem := check_folder(folder):
        raise FolderRefused(problem)
    if not folder.exists():
        raise FolderRefused(f"{folder} does not exist; expected the folder of a store.")
    return closing(FolderLock(folder))


@contextmanager
def _unlocked(
    folder: Path, seal: SealSettings | None, environment: Mapping[str, str] | None
) -> Iterator[Seals | None]:
    """Open the keys of a sealed store; None for a plain one. Raises SealRefused."""
    if seal is None:
        if (folder / KEYS_NAME).exists():
            raise SealRefused(
                f"the copies in {folder} are sealed; expected engine.levels.seal = true, and the"
                " key. They were not changed."
            )
        yield None
        return
    with closing(unlock(folder, seal, environment or {})) as seals:
        yield seals


def _index_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{INDEX_NAME}*"))


def _headers(
    slabs: SlabFiles, progress: Progress, seals: Seals | None
) -> Iterator[tuple[Place, RecordHeader]]:
    """Yield each place that begins with a sound header that fits it."""
    buffer = memoryview(bytearray(HEADER_BYTES))
    places = list(slabs.all_places())
    for number, (place, place_bytes) in enumerate(places):
        progress(number + 1, len(places))
        if slabs.read(place, buffer) < HEADER_BYTES:
            continue
        with suppress(DamagedRecord):
            header = decode_header(buffer if seals is None else seals.open_header(buffer))
            if place_bytes_of(header.payload_bytes) == place_bytes:
                yield place, header


def _choose(
    found: list[tuple[Place, RecordHeader]], now_ms: int
) -> list[tuple[Place, RecordHeader]]:
    """Return the records to keep, parents before children: of one store, of each run the latest,
    below a record that is kept."""
    stores = Counter(header.store_id for _, header in found)
    store_id = max(stores, key=lambda one: stores[one], default=b"")
    latest: dict[tuple[bytes, RecordId, bytes], tuple[Place, RecordHeader]] = {}
    for place, header in sorted(found, key=lambda one: one[1].record_id):
        if header.store_id == store_id and header.limit_ms > now_ms:
            latest[header.namespace, header.parent, header.run] = place, header
    kept = {ROOT}
    chosen = []
    for place, header in sorted(latest.values(), key=lambda one: one[1].record_id):
        if header.parent in kept and header.record_id not in kept:
            kept.add(header.record_id)
            chosen.append((place, header))
    return chosen


def _fill(
    index: RecordIndex, chosen: list[tuple[Place, RecordHeader]], found: list[RecordHeader]
) -> None:
    with index.file.change():
        if chosen:
            index.file.set_meta("store_id", chosen[0][1].store_id)
        index.file.set_meta("next_id", max((one.record_id for one in found), default=ROOT) + 1)
        index.file.set_meta("last_ms", max((one.written_ms for one in found), default=0))
    for at in range(0, len(chosen), REBUILD_BATCH):
        with index.file.change():
            for place, header in chosen[at : at + REBUILD_BATCH]:
                scope = index.names.scope_for(header.namespace)
                row = RecordRow(
                    header.record_id,
                    scope.scope_id,
                    header.parent,
                    header.run,
                    index.names.payer_id(header.payer),
                    place.slab,
                    place.position,
                    header.payload_bytes,
                    place_bytes_of(header.payload_bytes),
                    header.check,
                    FIDELITIES.index(header.fidelity),
                    header.limit_ms,
                    header.promise_ms,
                )
                index.insert(row, scope, header.written_ms)


def _is_sound(
    slabs: SlabFiles, objects: RemoteStore | None, index: RecordIndex, row: RecordRow
) -> bool:
    """Return whether a record is what its row says; True if the remote store does not tell."""
    scope = index.names.scope_of(row.scope_id)
    try:
        if row.slab != REMOTE:
            record = _bytes_on_disk(slabs, row)
        elif objects is None:
            return True
        else:
            name = RemoteRows(index.file).name_of(row.record_id)
            record = objects.get(name, HEADER_BYTES + row.payload_bytes + PADDING_BYTES_MAX)
        payload_of(record, row, index.file.store_id, scope.namespace, scope.seal)
    except (DamagedRecord, ObjectMissing, OSError):
        return False
    except RemoteFailed:
        return True
    return True


def _bytes_on_disk(slabs: SlabFiles, row: RecordRow) -> memoryview:
    """Return the bytes of a record's place. Raises DamagedRecord if it is not there, OSError."""
    buffer = memoryview(bytearray(row.place_bytes))
    if not slabs.has(row.place, row.place_bytes) or slabs.read(row.place, buffer) < len(buffer):
        raise DamagedRecord("no slab has the place")
    return buffer
