"""What holds of a store after any death of its process: index, slabs and what was said agree."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path

from engine.storage.index.index import RecordIndex
from engine.storage.index.index_file import INDEX_NAME
from engine.storage.rebuild import verify_store
from engine.storage.sealing.unlocking import SealSettings
from engine.storage.slabs.record import HEADER_BYTES
from engine.storage.slabs.slabs import DiskCalls, SlabFiles
from tests.crash.storage_child import MASTER, expected, tokens_of
from tests.fakes import FakeClock
from tests.unit.engine.storage.local_storage import LocalRig

Stores = dict[bytes, set[int]]
"""The numbers of the paths that were said to be stored, by namespace."""


def check_structure(folder: Path, *, is_sealed: bool = False) -> int:
    """Check index and slabs without a store; return how many records there are."""
    seal = SealSettings(key_env="SEAL") if is_sealed else None
    environment = {"SEAL": MASTER.secret.hex()}
    verified = verify_store(folder, seal=seal, environment=environment)
    assert verified.damaged == 0, verified
    if is_sealed:
        return verified.records  # `check_contents` recounts them
    with (
        closing(RecordIndex(folder / INDEX_NAME, may_make=False)) as index,
        closing(SlabFiles(folder, HEADER_BYTES, DiskCalls())) as slabs,
    ):
        assert index.file.column("pragma quick_check(1)") == ["ok"]
        rows = {row.record_id: row for row in index.rows()}
        children = Counter(row.parent for row in rows.values() if row.parent)
        assert set(children) <= set(rows), "a record without its parent"
        assert len({row.place for row in rows.values()}) == len(rows), "a place of two records"
        assert all(slabs.has(row.place, row.place_bytes) for row in rows.values())
    known = {"index.db", "index.db-wal", "index.db-shm", "lock", "keys.db", "keys.db-journal"}
    others = [path.name for path in folder.iterdir() if path.suffix != ".slab"]
    assert set(others) <= known, others
    return len(rows)


def check_contents(
    folder: Path, stored: Stores, erased: set[bytes], *, is_sealed: bool = False
) -> int:
    """Check that what was said stored is there, and what was said erased is not."""
    rig = LocalRig(folder, clock=FakeClock(1e6 - 1), master=MASTER if is_sealed else None)
    found = 0
    try:
        rig.disk.check()
        for namespace, numbers in stored.items():
            for number in numbers:
                ids = rig.found(namespace, tokens_of(number))
                assert len(ids) == len(tokens_of(number)) // 4, (namespace, number, ids)
                assert rig.fetch(namespace, ids[-1:]) == [expected(namespace, number)]
                found += 1
        data = b"".join(path.read_bytes() for path in folder.iterdir())
        for namespace in erased:
            assert not rig.storage.has_records(namespace), namespace
            assert namespace not in data, f"bytes of {namespace!r}"
    finally:
        rig.close()
    return found


def read_said(lines: list[str], stored: Stores, erased: set[bytes]) -> None:
    """Add what a child has said. What it was storing or erasing when it died may be there."""
    for line in lines:
        word, name, number = line.split()
        namespace = name.encode()
        if word == "storing":
            erased.discard(namespace)
        elif word == "stored":
            stored.setdefault(namespace, set()).add(int(number))
        elif word == "erasing":
            stored.pop(namespace, None)
        elif word == "erased":
            erased.add(namespace)
