"""Receipts of erasures: who had which part of the cache forgotten, when, and how much it was.

A receipt is written when the engine has said that it is done, and kept for ever. It names no
namespace, only their digest: enough to compare, nothing to read. It knows no engine; the admin API
and tenants' own calls write and list them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from msgspec import Struct, structs

from tenancy.errors import BadName
from tenancy.storage.interface import Store

RECEIPTS_MAX = 1_000


class ErasureReceipt(Struct, frozen=True):
    """What was erased. `key_id` asked for it: the tenant's own or an administrator's. `what`:
    `all`, `workspace NAME` or `lease ID`; `blocks`: how many left the cache for it."""

    receipt_id: str
    tenant_id: int
    key_id: int
    at_ms: int
    what: str
    namespaces: int
    namespace_digest: str
    blocks: int


def digest_namespaces(namespaces: Sequence[bytes]) -> str:
    """One digest for a set of namespaces, in whatever order; each stands behind its length."""
    digest = hashlib.sha256()
    for namespace in sorted(namespaces):
        digest.update(len(namespace).to_bytes(8, "big") + namespace)
    return digest.hexdigest()


def write_receipt(store: Store, receipt: ErasureReceipt) -> None:
    """Keep a receipt; durable when it returns. Raises StoreError."""
    values = structs.astuple(receipt)
    with store.change() as db:
        db.execute("insert into erasures values (?, ?, ?, ?, ?, ?, ?, ?)", values)


def list_receipts(store: Store, tenant_id: int, limit: int = 100) -> list[ErasureReceipt]:
    """A tenant's receipts, newest first. Raises BadName for a limit that cannot be."""
    if not 1 <= limit <= RECEIPTS_MAX:
        raise BadName("bad_setting", f"limit: {limit} is not between 1 and {RECEIPTS_MAX}")
    rows = store.query(
        "select receipt_id, tenant_id, key_id, at_ms, what, namespaces, namespace_digest, blocks"
        " from erasures where tenant_id = ? order by at_ms desc, receipt_id limit ?",
        (tenant_id, limit),
    )
    return [ErasureReceipt(*row) for row in rows]
