"""Receipts of cache erasures: which key erased which part of a cache, when, and how many blocks.

The gateway writes a receipt after the engines that are there have confirmed the erasure. It names
those elsewhere that were away, until they have carried it out too; `erased_until` says until when
an engine has carried out all of them. A tenant's newest `RECEIPTS_MAX` receipts are kept, so a
client that erases all day cannot fill the disk. A receipt contains a digest of the erased
namespaces and not their names. The module knows no engine; `gateway.background` (`erasure`,
`missed_erasures`), the admin API and self-service call it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct, structs

from tenancy.errors import BadName
from tenancy.storage.audit_log import Actor, record
from tenancy.storage.interface import ALL_ROWS, Row, Store, placeholders

ErasedState = Literal["gone", "shredded", "pending"]
RECEIPTS_MAX = 1_000
"""The most receipts of a tenant that are kept, and that one query may return."""
STATES: tuple[ErasedState, ...] = ("shredded", "gone", "pending")
"""States of an erased level, from the one that promises most to the one that promises least."""
OVERLAP_MS = 120_000
"""Clocks of gateways differ, and a receipt is written some time after its `at_ms`: so much before
the time until which an engine has carried out all erasures, they are carried out again."""


class ErasedLevel(Struct, frozen=True, forbid_unknown_fields=True):
    """What an erasure took from one level of the cache."""

    blocks: int
    bytes: int
    state: ErasedState = "gone"
    """`gone`, no later start finds it; `shredded`, that, and the key with which it was sealed is
    destroyed, so that no backup of it opens; `pending`, the level could not confirm it yet."""
    why: str = ""
    """Of `pending`: what the level said."""


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
    pending_at: tuple[str, ...] = ()
    """The engines elsewhere, by name, that were away and have not carried it out yet."""
    completed_ms: int | None = None
    """When all engines and levels had confirmed it; None until then."""
    forgotten_at: tuple[str, ...] = ()
    """The engines elsewhere, by name, that an administrator has forgotten before they had carried
    it out: see `forget_replica`."""


class MissedErasure(Struct, frozen=True):
    """An erasure that an engine may not have carried out. `receipt_id`: of the receipt that waits
    for the engine, or None."""

    tenant_id: int
    what: str
    receipt_id: str | None


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
    row = {
        **structs.asdict(receipt),
        "levels": _encode(receipt.levels),
        "pending_at": _encode(receipt.pending_at),
        "forgotten_at": _encode(receipt.forgotten_at),
    }
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


def list_uncompleted(store: Store) -> list[ErasureReceipt]:
    """Return the receipts of erasures that a level or an engine has not confirmed, oldest first.
    O(these)."""
    rows = store.query(
        f"select {_COLUMNS} from erasures where completed_ms is null order by at_ms, receipt_id"
    )
    return [_receipt(row) for row in rows]


def confirm_levels(store: Store, receipt_id: str, more: Mapping[str, ErasedLevel], now: int) -> int:
    """Add what levels have confirmed to a receipt; they are pending no more. `now`: ms. Returns
    the number of receipts that are completed by it. Raises StoreError."""
    return _confirm(store, receipt_id, more, now, is_final=True)


def confirm_replica(
    store: Store, receipt_id: str, replica: str, more: Mapping[str, ErasedLevel], now: int
) -> int:
    """Add what an engine that was away has erased to a receipt; it is pending there no more. `now`:
    ms. Returns the number of receipts that are completed by it. Raises StoreError."""
    return _confirm(store, receipt_id, more, now, replica, is_final=False)


def _confirm(
    store: Store,
    receipt_id: str,
    more: Mapping[str, ErasedLevel],
    now: int,
    replica: str = "",
    *,
    is_final: bool,
) -> int:
    with store.change() as db:
        found = db.rows(f"select {_COLUMNS} from erasures where receipt_id = ?", (receipt_id,))
        if not found:
            return 0  # newer ones have taken its place
        receipt = _receipt(found[0])
        levels = add_levels(receipt.levels, more, is_final=is_final)
        pending_at = [name for name in receipt.pending_at if name != replica]
        is_completed = _is_completed(levels, pending_at)
        device = more.get("device", ErasedLevel(0, 0))
        db.execute(
            "update erasures set blocks = blocks + ?, levels = ?, pending_at = ?, completed_ms = ?"
            " where receipt_id = ?",
            (
                device.blocks,
                _encode(levels),
                _encode(pending_at),
                now if is_completed else None,
                receipt_id,
            ),
        )
    return int(is_completed)


def forget_replica(store: Store, replica: str, by: Actor) -> tuple[int, int]:
    """Note that an engine elsewhere will never come back: no receipt waits for it any more, and
    those that did say so. Returns how many these were, and how many are completed by it. An engine
    of the same name that comes counts as never seen. Raises StoreError."""
    with store.change() as db:
        rows = db.rows(f"select {_COLUMNS} from erasures where completed_ms is null", ())
        found = [one for one in map(_receipt, rows) if replica in one.pending_at]
        completed = 0
        for receipt in found:
            pending_at = [name for name in receipt.pending_at if name != replica]
            is_completed = _is_completed(receipt.levels, pending_at)
            completed += is_completed
            db.execute(
                "update erasures set pending_at = ?, forgotten_at = ?, completed_ms = ?"
                " where receipt_id = ?",
                (
                    _encode(pending_at),
                    _encode([*receipt.forgotten_at, replica]),
                    by.at_ms if is_completed else None,
                    receipt.receipt_id,
                ),
            )
        db.execute("delete from erased_until where replica = ?", (replica,))
        record(db, by, "fleet.forget", f"engine:{replica}", after={"receipts": len(found)})
    return len(found), completed


def _is_completed(levels: _Levels, pending_at: Sequence[str]) -> bool:
    return not pending_at and all(one.state != "pending" for one in levels.values())


def add_levels(
    before: Mapping[str, ErasedLevel], more: Mapping[str, ErasedLevel], *, is_final: bool = False
) -> _Levels:
    """Return the sums by level, each in the state that promises least; `is_final`: what was pending
    before is in the later state, `gone` without one."""
    sums = {}
    for name in {**before, **more}:
        each = [one[name] for one in (before, more) if name in one]
        states: list[ErasedState] = [one.state for one in each]
        if is_final:
            states = [more[name].state if name in more else "gone"]
        state = max(states, key=STATES.index)
        whys = [one.why for one in reversed(each) if one.why] if state == "pending" else []
        sizes = sum(one.blocks for one in each), sum(one.bytes for one in each)
        sums[name] = ErasedLevel(*sizes, state, whys[0] if whys else "")
    return sums


def list_missed(store: Store, replica: str) -> list[MissedErasure]:
    """Return the erasures that an engine elsewhere may not have carried out, oldest first: those
    whose receipts wait for it, and those since it had carried out all, or ever. O(these)."""
    marks = store.query("select until_ms from erased_until where replica = ?", (replica,))
    since = marks[0][0] - OVERLAP_MS if marks else 0
    rows = store.query(
        "select at_ms, tenant_id, what, receipt_id, pending_at from erasures"
        " where at_ms >= ? or completed_ms is null order by at_ms, receipt_id",
        (since,),
    )
    return [
        MissedErasure(tenant_id, what, receipt_id if replica in _names(pending_at) else None)
        for at_ms, tenant_id, what, receipt_id, pending_at in rows
        if at_ms >= since or replica in _names(pending_at)
    ]


def note_erased_until(store: Store, replicas: Sequence[str], until_ms: int) -> None:
    """Note that engines elsewhere have carried out all erasures up to a time. Raises StoreError."""
    with store.change() as db:
        for replica in replicas:
            db.execute(
                "insert into erased_until (replica, until_ms) values (?, ?)"
                " on conflict (replica) do update set until_ms = excluded.until_ms",
                (replica, until_ms),
            )


def _receipt(row: Row) -> ErasureReceipt:
    *facts, levels, embeddings, pending_at, completed_ms, forgotten_at = row
    told = msgspec.json.decode(levels, type=_Levels)
    return ErasureReceipt(
        *(*facts, told, embeddings, _names(pending_at), completed_ms, _names(forgotten_at))
    )


def _names(encoded: str) -> tuple[str, ...]:
    return msgspec.json.decode(encoded, type=tuple[str, ...])


def _encode(value: _Levels | Sequence[str]) -> str:
    return msgspec.json.encode(value).decode()
