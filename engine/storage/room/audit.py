"""The checker of an open store: recounts everything that is kept beside the index's rows."""

from __future__ import annotations

from collections import Counter

from engine.errors import InvariantViolation
from engine.moves import ROOT, RecordId
from engine.storage.index.index import RecordIndex
from engine.storage.index.remote_rows import REMOTE
from engine.storage.room.quotas import DiskBooks
from engine.storage.slabs.slabs import Place, SlabFiles


def check_store(index: RecordIndex, books: DiskBooks, slabs: SlabFiles) -> None:
    """Recount books, places and children from the index.

    O(records). Raises InvariantViolation at the first mismatch.
    """
    recount = DiskBooks()
    children: Counter[RecordId] = Counter()
    places: set[Place] = set()
    ids: set[RecordId] = set()
    for row in index.rows():
        recount.add_records(index.names.scope_of(row.scope_id).namespace, 1)
        ids.add(row.record_id)
        children[row.parent] += 1
        if row.slab != REMOTE:
            recount.add_bytes(index.names.payer_name(row.payer_id), row.place_bytes, row.fidelity)
            places.add(row.place)
    if books.sums() != recount.sums():
        raise InvariantViolation(f"books {books.sums()}, recounted: {recount.sums()}")
    if not children.keys() <= ids | {ROOT}:
        raise InvariantViolation(f"parents {children.keys() - ids} have no row")
    if wrong := index.wrong_children():
        raise InvariantViolation(f"records {wrong} have other children than they say")
    slabs.check(places)
