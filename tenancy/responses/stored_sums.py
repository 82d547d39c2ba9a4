"""Sums of what each tenant stores, within its quota: responses, conversations and their items.

A request is admitted by its tenant's sums and counts no rows. Each change of stored rows changes
the sums in the same transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from tenancy.pseudonyms import is_pseudonym
from tenancy.storage import tenant_sums
from tenancy.storage.interface import Row, Transaction

Obstacle = Literal[
    "", "tenant_deleted", "erased", "previous_missing", "quota", "conversation_missing"
]
"""Why an answer is not stored; empty if it is."""


class StorageQuota(Struct, frozen=True):
    """Bounds on one tenant's stored responses."""

    responses_max: int = 100_000
    bytes_max: int = 256 * 2**20


NO_QUOTA = StorageQuota()
"""For changes that store nothing."""


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


def obstacle_of_owner(
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


def subtract(db: Transaction, deleted: Sequence[Row]) -> None:
    """Count deleted rows (tenant id, bytes), in their transaction."""
    tenant_sums.subtract(db, "stored_sums", "responses", deleted)
