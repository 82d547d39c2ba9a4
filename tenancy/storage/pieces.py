"""Large deletions in small transactions: each holds the write lock briefly and needs little room.

A deleted row is overwritten, so a transaction's log has as many bytes as it deletes. On a disk that
is full there is room for a few of them, and each makes room for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tenancy.storage.interface import Row, Store, Transaction, Value

SWEPT_AT_ONCE = 200
"""Rows that one transaction deletes."""
BYTES_MAX = 2**20
"""Bytes that one transaction deletes, unless a single row has more."""


def first_piece(rows: Sequence[Row]) -> list[Value]:
    """Return the keys of the first of these rows (key, bytes), as many as one transaction may
    delete: at least one, if there are any."""
    keys: list[Value] = []
    size = 0
    for key, row_bytes in rows[:SWEPT_AT_ONCE]:
        size += row_bytes
        if keys and size > BYTES_MAX:
            break
        keys.append(key)
    return keys


def delete_all(store: Store, delete_some: Callable[[Transaction], bool]) -> None:
    """Call `delete_some` in a transaction of its own until it deletes nothing. Raises StoreError;
    what was deleted before stays so."""
    is_more = True
    while is_more:
        with store.change() as db:
            is_more = delete_some(db)
