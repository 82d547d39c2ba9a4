"""Sums that a table keeps by tenant: how many rows another table has, and their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from tenancy.storage.interface import Row, Transaction


def subtract(
    db: Transaction,
    sums: Literal["named_sums", "stored_sums"],
    counted: Literal["names", "responses"],
    deleted: Sequence[Row],
) -> None:
    """Count deleted rows (tenant id, bytes) in a table of sums, in their transaction. `counted`:
    its column of how many there are."""
    counts: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    for tenant_id, size in deleted:
        counts[tenant_id] += 1
        sizes[tenant_id] += size
    db.execute_many(
        f"update {sums} set {counted} = {counted} - ?, bytes = bytes - ? where tenant_id = ?",
        [(count, sizes[tenant_id], tenant_id) for tenant_id, count in sorted(counts.items())],
    )
