"""Stored responses in the database: answers that a client continues or reads by id.

A response is stored with its request's own items and the id of the response that it continues, so a
thread of responses stores each item once. It belongs to a tenant's workspace, and every response of
a thread is kept until the latest one expires. The module knows no dialect; items and responses are
opaque bytes. `gateway.generation.stored_responses` writes and loads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from tenancy.responses.conversations import ItemsChange, append_items_in
from tenancy.responses.stored_sums import (
    Obstacle,
    StorageQuota,
    Sums,
    obstacle_of_owner,
    subtract,
)
from tenancy.storage.interface import (
    Row,
    Store,
    Transaction,
    pad_to_power_of_two,
    placeholders,
)
from tenancy.storage.pieces import SWEPT_AT_ONCE, delete_all, first_piece

RENEWALS_PER_LIFETIME = 24
"""A thread's expiry is renewed this often at most: a renewal writes each of its rows."""


ItemsColumn = Literal["input", "response"]
"""A column of a stored response that holds items."""


class StoredResponse(Struct, frozen=True):
    """A response to store.

    Both are stored or none is.
    """

    response_id: str
    tenant_id: int
    workspace: str
    created_ms: int
    expires_ms: int
    input: bytes
    """The request's own items."""
    response: bytes
    """The response as it was sent."""
    previous_id: str | None = None
    """The response that it continues."""
    is_kept: bool = True
    """Whether the response itself is stored."""
    turn: ItemsChange | None = None
    """The items that are appended to its conversation."""

    @property
    def size(self) -> int:
        """Bytes of the stored response that the quota counts."""
        return len(self.input) + len(self.response) if self.is_kept else 0

    @property
    def total_size(self) -> int:
        """Bytes of all that is stored."""
        return self.size + (0 if self.turn is None else self.turn.size)


class StoredTurn(Struct, frozen=True):
    """One stored response of a thread: its request's own items, and the response."""

    response_id: str
    input: bytes
    response: bytes


def store_responses(
    store: Store, records: Sequence[StoredResponse], quota: StorageQuota, thread_bytes_max: int
) -> list[Obstacle]:
    """Store responses in one transaction; return the obstacle of each that is not stored.

    A response is not stored if its tenant is deleted, if its tenant or workspace was erased since
    the request began, if the response or the conversation that it continues is gone, or if it
    exceeds the quota or makes its thread longer than `thread_bytes_max`. Raises StoreError.
    """
    with store.change() as db:
        sums = Sums(db, quota)
        found = [_store_response(db, sums, record, thread_bytes_max) for record in records]
        sums.finish()
    return found


def find_response(
    store: Store, tenant_id: int, workspace: str, response_id: str, now_ms: int
) -> bytes | None:
    """Return a stored response of the workspace as it was sent, or None."""
    rows = store.query(
        f"select response from stored_responses where {_LIVE}",
        (response_id, tenant_id, workspace, now_ms),
    )
    return bytes(rows[0][0]) if rows else None


def measure_thread(
    store: Store, tenant_id: int, workspace: str, response_id: str, now_ms: int
) -> int | None:
    """Return the bytes of a stored response and of those that it continues, or None. O(1)."""
    rows = store.query(
        f"select thread_bytes from stored_responses where {_LIVE}",
        (response_id, tenant_id, workspace, now_ms),
    )
    return rows[0][0] if rows else None


def load_thread(
    store: Store, tenant_id: int, workspace: str, response_id: str, now_ms: int
) -> list[StoredTurn] | None:
    """Return a stored response and those that it continues, earliest first. O(responses).

    None if it or one of them is missing.
    """
    rows = store.query(
        "with recursive thread (response_id, previous_id, depth) as ("
        "select response_id, previous_id, 0 from stored_responses where response_id = ?1"
        " and tenant_id = ?2 and workspace = ?3 and expires_ms > ?4"
        " union all select earlier.response_id, earlier.previous_id, thread.depth + 1"
        " from stored_responses as earlier join thread on earlier.response_id = thread.previous_id"
        " where earlier.tenant_id = ?2 and earlier.workspace = ?3)"
        " select thread.response_id, thread.previous_id, kept.input, kept.response from thread"
        " join stored_responses as kept on kept.response_id = thread.response_id"
        " order by thread.depth desc",
        (response_id, tenant_id, workspace, now_ms),
    )
    if not rows or rows[0][1] is not None:
        return None
    return [StoredTurn(row[0], bytes(row[2]), bytes(row[3])) for row in rows]


def measure_parts(
    store: Store,
    owner: tuple[int, str],
    part: ItemsColumn,
    response_ids: Sequence[str],
    now_ms: int,
) -> dict[str, int]:
    """Return the bytes of the own items or the response of each stored response that there is.

    `owner`: tenant and workspace. `response_ids`: at least one. O(ids). Raises StoreError.
    """
    return dict(_owned_parts(store, f"length({part})", owner, response_ids, now_ms))


def load_parts(
    store: Store,
    owner: tuple[int, str],
    part: ItemsColumn,
    response_ids: Sequence[str],
    now_ms: int,
) -> dict[str, bytes]:
    """Return the own items or the response of each stored response that there is, by its id.

    See `measure_parts`. Cost: O(ids + bytes). Raises StoreError.
    """
    rows = _owned_parts(store, part, owner, response_ids, now_ms)
    return {response_id: bytes(data) for response_id, data in rows}


def delete_response(
    store: Store, tenant_id: int, workspace: str, response_id: str, now_ms: int
) -> bool:
    """Delete a stored response of the workspace. Returns False if there is none. Raises
    StoreError."""
    with store.change() as db:
        deleted = db.rows(
            f"delete from stored_responses where {_LIVE} returning tenant_id, bytes",
            (response_id, tenant_id, workspace, now_ms),
        )
        subtract(db, deleted)
    return bool(deleted)


def forget_stored(
    db: Transaction, tenant_id: int, workspace: str | None = None, until_ms: int | None = None
) -> None:
    """Delete the responses of a tenant, or of one workspace. O(rows).

    `until_ms`: only those of requests that began until then.
    """
    deleted = db.rows(
        f"delete from stored_responses where {_OF_OWNER} returning tenant_id, bytes",
        (tenant_id, workspace, until_ms),
    )
    subtract(db, deleted)


def erase_stored(
    store: Store, tenant_id: int, workspace: str | None, until_ms: int | None = None
) -> None:
    """Delete what `forget_stored` does, in small transactions. Raises StoreError."""
    delete_all(store, lambda db: _delete_some(db, _OF_OWNER, (tenant_id, workspace, until_ms)))


def sweep_stored(store: Store, now_ms: int) -> bool:
    """Delete some expired responses in one small transaction. Returns whether there may be more.
    Raises StoreError."""
    with store.change() as db:
        return _delete_some(db, "expires_ms <= ?1", (now_ms,))


def _delete_some(db: Transaction, where: str, values: Row) -> bool:
    """Delete as many responses as one transaction may; return whether there may be more."""
    found = db.rows(
        f"select response_id, bytes from stored_responses where {where}"
        f" order by expires_ms limit {SWEPT_AT_ONCE + 1:d}",
        values,
    )
    ids = first_piece(found)
    if ids:
        deleted = db.rows(
            f"delete from stored_responses where response_id in {placeholders(len(ids))}"
            " returning tenant_id, bytes",
            ids,
        )
        subtract(db, deleted)
    return len(found) > len(ids)


_OF_OWNER = (
    "tenant_id = ?1 and (cast(?2 as text) is null or workspace = ?2)"
    " and (cast(?3 as bigint) is null or created_ms <= ?3)"
)


def _owned_parts(
    store: Store, selected: str, owner: tuple[int, str], response_ids: Sequence[str], now_ms: int
) -> list[Row]:
    ids = pad_to_power_of_two(response_ids)
    return store.query(
        f"select response_id, {selected} from stored_responses"
        f" where response_id in {placeholders(len(ids))}"
        " and tenant_id = ? and workspace = ? and expires_ms > ?",
        [*ids, *owner, now_ms],
    )


_LIVE = "response_id = ? and tenant_id = ? and workspace = ? and expires_ms > ?"


def _store_response(
    db: Transaction, sums: Sums, record: StoredResponse, thread_bytes_max: int
) -> Obstacle:
    tenant_id, size = record.tenant_id, record.size
    obstacle: Obstacle = obstacle_of_owner(db, tenant_id, record.workspace, record.created_ms)
    if obstacle:
        return obstacle
    thread_id, thread_bytes = record.response_id, size
    if record.previous_id is not None:
        rows = db.rows(
            "select thread_id, thread_bytes from stored_responses where response_id = ?"
            " and tenant_id = ? and workspace = ?",
            (record.previous_id, tenant_id, record.workspace),
        )
        if not rows:
            return "previous_missing"
        thread_id, thread_bytes = rows[0][0], rows[0][1] + size
    room = int(record.is_kept), record.total_size
    if thread_bytes > thread_bytes_max or not sums.has_room(tenant_id, *room):
        return "quota"
    if record.turn is not None:
        obstacle = append_items_in(db, sums, record.turn, thread_bytes_max)
    if obstacle or not record.is_kept:
        return obstacle
    sums.add(tenant_id, 1, size)
    db.execute(
        "insert into stored_responses (response_id, tenant_id, workspace, thread_id, previous_id,"
        " created_ms, expires_ms, bytes, thread_bytes, input, response)"
        " values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            record.response_id,
            tenant_id,
            record.workspace,
            thread_id,
            record.previous_id,
            record.created_ms,
            record.expires_ms,
            size,
            thread_bytes,
            record.input,
            record.response,
        ),
    )
    if record.previous_id is not None:
        _renew(db, thread_id, record)
    return ""


def _renew(db: Transaction, thread_id: str, record: StoredResponse) -> None:
    """Keep the earlier responses of a thread as long as the new one, and some of that longer, so
    that the next turns need not renew them."""
    slack_ms = (record.expires_ms - record.created_ms) // RENEWALS_PER_LIFETIME
    db.execute(
        "update stored_responses set expires_ms = ?1 where thread_id = ?2 and expires_ms < ?3"
        " and response_id <> ?4",
        (record.expires_ms + slack_ms, thread_id, record.expires_ms, record.response_id),
    )
