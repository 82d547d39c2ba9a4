"""Stored responses in the database: answers that a client continues or reads by id.

A response is stored with its request's own items and the id of the response that it continues, so a
thread of responses stores each item once. It belongs to a tenant's workspace, and every response of
a thread is kept until the latest one expires. The module knows no dialect; items and responses are
opaque bytes. `gateway.generation.stored_responses` writes and loads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from tenancy.pseudonyms import is_pseudonym
from tenancy.storage.interface import Row, Store, Transaction

SWEPT_AT_ONCE = 200
"""Rows that one transaction sweeps, so that other transactions wait only briefly."""
RENEWALS_PER_LIFETIME = 24
"""A thread's expiry is renewed this often at most: a renewal writes each of its rows."""

Obstacle = Literal["", "tenant_deleted", "erased", "previous_missing", "quota"]
"""Why a response is not stored; empty if it is."""


class StorageQuota(Struct, frozen=True):
    """Bounds on one tenant's stored responses."""

    responses_max: int = 100_000
    bytes_max: int = 256 * 2**20


NO_QUOTA = StorageQuota()
"""For changes that store nothing."""


class ResponseRecord(Struct, frozen=True):
    """A response to store.

    `previous_id`: the response that it continues. `input`: the request's own items; `response`: the
    response as it was sent.
    """

    response_id: str
    tenant_id: int
    workspace: str
    created_ms: int
    expires_ms: int
    input: bytes
    response: bytes
    previous_id: str | None = None

    @property
    def size(self) -> int:
        """Bytes that the quota counts."""
        return len(self.input) + len(self.response)


class StoredTurn(Struct, frozen=True):
    """One stored response of a thread: its request's own items, and the response."""

    response_id: str
    input: bytes
    response: bytes


class Sums:
    """What tenants store, within one transaction; read once per tenant and written at the end."""

    def __init__(self, db: Transaction, quota: StorageQuota = NO_QUOTA) -> None:
        self._db = db
        self._quota = quota
        self._sums: dict[int, tuple[int, int]] = {}

    def has_room(self, tenant_id: int, responses: int, size: int) -> bool:
        """Return whether the tenant may store so much more."""
        held, used = self._of(tenant_id)
        return (
            held + responses <= self._quota.responses_max and used + size <= self._quota.bytes_max
        )

    def add(self, tenant_id: int, responses: int, size: int) -> None:
        """Count so many more responses and bytes, or fewer."""
        held, used = self._of(tenant_id)
        self._sums[tenant_id] = held + responses, used + size

    def subtract(self, deleted: Sequence[Row]) -> None:
        """Count deleted rows (tenant id, bytes)."""
        responses: Counter[int] = Counter()
        sizes: Counter[int] = Counter()
        for tenant_id, size in deleted:
            responses[tenant_id] += 1
            sizes[tenant_id] += size
        for tenant_id, count in responses.items():
            self.add(tenant_id, -count, -sizes[tenant_id])

    def finish(self) -> None:
        """Write the sums."""
        self._db.execute_many(
            "insert into stored_sums (tenant_id, responses, bytes) values (?, ?, ?)"
            " on conflict (tenant_id) do update set responses = excluded.responses,"
            " bytes = excluded.bytes",
            [(tenant_id, *sums) for tenant_id, sums in sorted(self._sums.items())],
        )

    def _of(self, tenant_id: int) -> tuple[int, int]:
        if tenant_id not in self._sums:
            rows = self._db.rows(
                "select responses, bytes from stored_sums where tenant_id = ?", (tenant_id,)
            )
            self._sums[tenant_id] = (rows[0][0], rows[0][1]) if rows else (0, 0)
        return self._sums[tenant_id]


def store_responses(
    store: Store, records: Sequence[ResponseRecord], quota: StorageQuota, thread_bytes_max: int
) -> list[Obstacle]:
    """Store responses in one transaction; return the obstacle of each that is not stored.

    A response is not stored if its tenant is deleted, if its tenant or workspace was erased since
    the request began, if the response that it continues is gone, or if it exceeds the quota or
    makes its thread longer than `thread_bytes_max`. Raises StoreError.
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
        _subtract(db, deleted)
    return bool(deleted)


def forget_stored(
    db: Transaction, tenant_id: int, workspace: str | None = None, until_ms: int | None = None
) -> None:
    """Delete the responses of a tenant, or of one workspace. O(rows).

    `until_ms`: only those of requests that began until then.
    """
    deleted = db.rows(
        "delete from stored_responses where tenant_id = ?1 and (cast(?2 as text) is null"
        " or workspace = ?2) and (cast(?3 as bigint) is null or created_ms <= ?3)"
        " returning tenant_id, bytes",
        (tenant_id, workspace, until_ms),
    )
    _subtract(db, deleted)


def erase_stored(
    store: Store, tenant_id: int, workspace: str | None, until_ms: int | None = None
) -> None:
    """Call `forget_stored` in its own transaction. Raises StoreError."""
    with store.change() as db:
        forget_stored(db, tenant_id, workspace, until_ms)


def sweep_stored(store: Store, now_ms: int) -> bool:
    """Delete some expired responses in one small transaction. Returns whether there may be more.
    Raises StoreError."""
    with store.change() as db:
        deleted = db.rows(
            "delete from stored_responses where response_id in (select response_id"
            " from stored_responses where expires_ms <= ? order by expires_ms limit ?)"
            " returning tenant_id, bytes",
            (now_ms, SWEPT_AT_ONCE),
        )
        _subtract(db, deleted)
    return len(deleted) == SWEPT_AT_ONCE


def _obstacle_of_owner(
    db: Transaction, tenant_id: int, workspace: str, since_ms: int
) -> Literal["", "tenant_deleted", "erased"]:
    """Return why nothing may be stored for a request that began at `since_ms`, or an empty text:
    an erasure also covers what a running request was about to store."""
    names = db.rows("select name from tenants where tenant_id = ?", (tenant_id,))
    if not names or is_pseudonym(names[0][0]):
        return "tenant_deleted"
    erased = db.rows(
        "select 1 from erasures where tenant_id = ? and at_ms >= ? and what in ('all', ?) limit 1",
        (tenant_id, since_ms, f"workspace {workspace}"),
    )
    return "erased" if erased else ""


_LIVE = "response_id = ? and tenant_id = ? and workspace = ? and expires_ms > ?"


def _store_response(
    db: Transaction, sums: Sums, record: ResponseRecord, thread_bytes_max: int
) -> Obstacle:
    tenant_id, size = record.tenant_id, record.size
    obstacle = _obstacle_of_owner(db, tenant_id, record.workspace, record.created_ms)
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
    if thread_bytes > thread_bytes_max or not sums.has_room(tenant_id, 1, size):
        return "quota"
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


def _renew(db: Transaction, thread_id: str, record: ResponseRecord) -> None:
    """Keep the earlier responses of a thread as long as the new one, and some of that longer, so
    that the next turns need not renew them."""
    slack_ms = (record.expires_ms - record.created_ms) // RENEWALS_PER_LIFETIME
    db.execute(
        "update stored_responses set expires_ms = ?1 where thread_id = ?2 and expires_ms < ?3"
        " and response_id <> ?4",
        (record.expires_ms + slack_ms, thread_id, record.expires_ms, record.response_id),
    )


def _subtract(db: Transaction, deleted: Sequence[Row]) -> None:
    sums = Sums(db)
    sums.subtract(deleted)
    sums.finish()
