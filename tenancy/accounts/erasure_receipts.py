"""Receipts of cache erasures: which key erased which part of a cache, when, and how many blocks.

The gateway writes a receipt after the engine has confirmed the erasure; receipts are kept forever.
A receipt contains a digest of the erased namespaces and not their names. The module knows no
engine; `gateway.background.erasure`, the admin API and self-service call it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from msgspec import Struct, structs

from tenancy.errors import BadName
from tenancy.storage.interface import Store

RECEIPTS_MAX = 1_000
"""The most receipts that one query may return."""


class ErasureReceipt(Struct, frozen=True):
    """The receipt of one erasure.

    `key_id`: the tenant's or administrator's key that requested it. `what`: `all`, `workspace NAME`
    or `lease ID`. `blocks`: how many blocks left the cache.
    """

    receipt_id: str
    tenant_id: int
    key_id: int
    at_ms: int
    what: str
    namespaces: int
    namespace_digest: str
    blocks: int


def digest_namespaces(namespaces: Sequence[bytes]) -> str:
    """Return one digest for a set of namespaces, independent of their order.

    Each namespace is prefixed with its length, so different sets never hash the same bytes.
    """
    digest = hashlib.sha256()
    for namespace in sorted(namespaces):
        digest.update(len(namespace).to_bytes(8, "big") + namespace)
    return digest.hexdigest()


def write_receipt(store: Store, receipt: ErasureReceipt) -> None:
    """Store a receipt; it is durable when this returns. Raises StoreError."""
    values = structs.astuple(receipt)
    with store.change() as db:
        db.execute("insert into erasures values (?, ?, ?, ?, ?, ?, ?, ?)", values)


def list_receipts(store: Store, tenant_id: int, limit: int = 100) -> list[ErasureReceipt]:
    """Return a tenant's receipts, newest first. Raises BadName if `limit` is out of range."""
    if not 1 <= limit <= RECEIPTS_MAX:
        raise BadName("bad_setting", f"limit out of range: {limit}; expected 1 to {RECEIPTS_MAX}")
    rows = store.query(
        "select receipt_id, tenant_id, key_id, at_ms, what, namespaces, namespace_digest, blocks"
        " from erasures where tenant_id = ? order by at_ms desc, receipt_id limit ?",
        (tenant_id, limit),
    )
    return [ErasureReceipt(*row) for row in rows]
