"""Receipts of cache erasures: which key erased which part of a cache, when, and how many blocks.

The gateway writes a receipt after the engine has confirmed the erasure. A tenant's newest
`RECEIPTS_MAX` receipts are kept, so a client that erases all day cannot fill the disk. A receipt
contains a digest of the erased namespaces and not their names. The module knows no engine;
`gateway.background.erasure`, the admin API and self-service call it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct, structs

from tenancy.errors import BadName
from tenancy.storage.audit_log import Actor, record
from tenancy.storage.interface import ALL_ROWS, Row, Store, placeholders

ErasedState = Literal["gone", "shredded", "pending"]
RECEIPTS_MAX = 1_000
"""The most receipts of a tenant that are kept, and that one query may return."""


class ErasedLevel(Struct, frozen=True, forbid_unknown_fields=True):
    """What an erasure took from one level of the cache."""

    blocks: int
    bytes: int
    state: ErasedState = "gone"
    """`gone`, no later start finds it; `shredded`, that, and the key with which it was sealed is
    destroyed, so that no backup of it opens; `pending`, the level could not confirm it yet."""


_Levels = dict[str, ErasedLevel]


class ErasureReceipt(Struct, frozen=True):
    """The receipt of one erasure."""

    receipt_id: str
    tenant_id: int
    key_id: int
    """The tenant's or administrator's key that requested it."""
    at_ms: int
    what: str
    """`all`, `workspace NAME` or `lease ID`."""
    namespaces: int
    namespace_digest: str
    blocks: int
    """How many blocks left the cache."""
    levels: _Levels = {}
    """The same by level."""
    embeddings: int = 0
    """How many vectors left their cache."""


_COLUMNS = ", ".join(ErasureReceipt.__struct_fields__)


def digest_namespaces(namespaces: Sequence[bytes]) -> str:
    """Return one digest for a set of namespaces, independent of their order.

    Each namespace is prefixed with its length, so different sets never hash the same bytes.
    """
    digest = hashlib.sha256()
    for namespace in sorted(namespaces):
        digest.update(len(namespace).to_bytes(8, "big") + namespace)
    return digest.hexdigest()


def write_receipt(store: Store, receipt: ErasureReceipt, by: Actor | None = None) -> None:
    """Store a receipt; it is durable when this returns. Drops the tenant's oldest ones beyond
    `RECEIPTS_MAX`. `by`: the administrator that asked, for the audit log. O(RECEIPTS_MAX) steps of
    an index. Raises StoreError."""
    row = {**structs.asdict(receipt), "levels": _encode(receipt.levels)}
    beyond = receipt.tenant_id, ALL_ROWS, RECEIPTS_MAX
    with store.change() as db:
        db.execute(
            f"insert into erasures ({_COLUMNS}) values {placeholders(len(row))}",
            tuple(row.values()),
        )
        db.execute(
            "delete from erasures where receipt_id in (select receipt_id from erasures"
            " where tenant_id = ? order by at_ms desc, receipt_id desc limit ? offset ?)",
            beyond,
        )
        target, erased = f"tenant:{receipt.tenant_id}", {"receipt_id": receipt.receipt_id}
        what = {"what": receipt.what.split()[0], "blocks": receipt.blocks}
        record(
            db,
            by,
            "cache.erase",
            target,
            tenant_id=receipt.tenant_id,
            after={**erased, **what},
        )


def list_receipts(store: Store, tenant_id: int, limit: int = 100) -> list[ErasureReceipt]:
    """Return a tenant's receipts, newest first. Raises BadName if `limit` is out of range."""
    if not 1 <= limit <= RECEIPTS_MAX:
        raise BadName("bad_setting", f"limit out of range: {limit}; expected 1 to {RECEIPTS_MAX}")
    rows = store.query(
        f"select {_COLUMNS} from erasures where tenant_id = ?"
        " order by at_ms desc, receipt_id desc limit ?",
        (tenant_id, limit),
    )
    return [_receipt(row) for row in rows]


def list_pending(store: Store) -> list[ErasureReceipt]:
    """Return the receipts of erasures that a level has not confirmed, oldest first. O(receipts)."""
    rows = store.query(
        f"select {_COLUMNS} from erasures where levels like '%\"pending\"%' order by at_ms"
    )
    return [_receipt(row) for row in rows]


def confirm_receipt(store: Store, receipt_id: str, levels: _Levels) -> None:
    """Replace what a receipt says of the levels, once they have confirmed. Raises StoreError."""
    with store.change() as db:
        db.execute(
            "update erasures set levels = ? where receipt_id = ?",
            (_encode(levels), receipt_id),
        )


def _receipt(row: Row) -> ErasureReceipt:
    *facts, levels, embeddings = row
    return ErasureReceipt(*(*facts, msgspec.json.decode(levels, type=_Levels), embeddings))


def _encode(levels: _Levels) -> str:
    return msgspec.json.encode(levels).decode()
