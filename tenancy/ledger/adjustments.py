"""Adjustments: credits and debits that correct a ledger entry's charge without changing the entry.

Adjustments are append-only, chained like entries, and unique by id forever. They change what is
billed, not what a budget's window has counted. The command line books them, also beside a running
server; `ledger.writer` books the credits of broken promises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

from tenancy.errors import BadPrice
from tenancy.ledger.entries import ENTRY_FIELDS, NO_CHAIN, entry_of, next_chain, read_open_from_ms
from tenancy.pricing.charges import (
    CHARGE_MAX,
    PICO_PER_MICRO,
    RateCard,
    compute_breach_credit,
    format_dollars,
)
from tenancy.pricing.rate_cards import SELECT_CARDS, RateCards, read_card
from tenancy.storage.audit_log import Actor, record
from tenancy.storage.interface import Store, Transaction, Value
from tenancy.types import DAY_MS, HOUR_MS, UsageEntry, WallClock

REASON_CHARS_MAX = 500
"""The most characters of a reason."""
BREACH = "breach:"
"""The prefix of the ids of credits that the ledger itself books; reserved."""

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Adjustment(Struct, frozen=True, forbid_unknown_fields=True):
    """A correction of one entry. `amount_pico` below zero is a credit to the tenant, above zero a
    debit."""

    adjustment_id: str
    request_id: str
    amount_pico: int
    reason: str


def adjust(store: Store, clock: WallClock, adjustment: Adjustment, by: Actor) -> bool:
    """Book an adjustment on the first open day. Returns False if the same one was booked before.

    Raises BadPrice with nothing written: the id was used for another adjustment, the entry does not
    exist, or credits would exceed the entry's charge.
    """
    _check(adjustment)
    with store.change() as db:
        is_new = book(db, clock(), adjustment)
        if is_new:
            which = (adjustment.request_id,)
            sql = "select tenant_id from ledger where request_id = ?"
            tenant_id = int(db.rows(sql, which)[0][0])
            target = f"request:{adjustment.request_id}"
            record(db, by, "ledger.adjust", target, tenant_id=tenant_id, after=adjustment)
        return is_new


def book(db: Transaction, now_ms: int, adjustment: Adjustment) -> bool:
    """Book an adjustment within the caller's transaction; see `adjust`."""
    existing = db.rows(
        "select request_id, amount_pico, reason from adjustments where adjustment_id = ?",
        (adjustment.adjustment_id,),
    )
    if existing:
        if existing[0] != (adjustment.request_id, adjustment.amount_pico, adjustment.reason):
            raise BadPrice("adjustment_id_used", "Adjustment id was used for another adjustment.")
        return False
    entry = db.rows(
        "select tenant_id, key_id, model, charge_pico from ledger where request_id = ?",
        (adjustment.request_id,),
    )
    if not entry:
        raise BadPrice("entry_unknown", "Unknown request id: it has no ledger entry.")
    tenant_id, key_id, model, charge = entry[0]
    earlier = db.rows(
        "select amount_pico from adjustments where request_id = ?",
        (adjustment.request_id,),
    )
    left = charge + sum(row[0] for row in earlier)
    if left + adjustment.amount_pico < 0:
        raise BadPrice(
            "credit_exceeds_charge",
            f"Credit exceeds the charge: {format_dollars(-adjustment.amount_pico)} dollars;"
            f" expected at most {format_dollars(left)}.",
        )
    booked_ms = max(now_ms, read_open_from_ms(db))
    row: tuple[Value, ...] = (
        *(adjustment.adjustment_id, adjustment.request_id, tenant_id),
        *(adjustment.amount_pico, adjustment.reason, now_ms, booked_ms),
    )
    last = db.rows("select chain from adjustments order by number desc limit 1")
    chain = next_chain(last[0][0] if last else NO_CHAIN, row)
    db.execute(
        f"insert into adjustments ({', '.join(ADJUSTMENT_FIELDS)}, chain)"
        " values (?, ?, ?, ?, ?, ?, ?, ?)",
        (*row, chain),
    )
    for table, since, length_ms in _SUM_TABLES:
        db.execute(
            f"insert into {table} (tenant_id, {since}, key_id, model, adjusted_micros,"
            " adjusted_rest) values (?, ?, ?, ?, ?, ?)"
            f" on conflict (tenant_id, {since}, key_id, model) do update"
            f" set adjusted_micros = {table}.adjusted_micros + excluded.adjusted_micros,"
            f" adjusted_rest = {table}.adjusted_rest + excluded.adjusted_rest",
            (
                *(tenant_id, booked_ms // length_ms * length_ms, key_id, model),
                *divmod(adjustment.amount_pico, PICO_PER_MICRO),
            ),
        )
    return True


ADJUSTMENT_FIELDS = (
    *("adjustment_id", "request_id", "tenant_id", "amount_pico", "reason", "made_ms", "booked_ms"),
)
"""Columns of `adjustments` except `number` and `chain`."""


_SUM_TABLES = (("usage_hours", "hour_ms", HOUR_MS), ("usage_days", "day_ms", DAY_MS))


def _check(adjustment: Adjustment) -> None:
    if not _ID.fullmatch(adjustment.adjustment_id):
        raise BadPrice(
            "bad_adjustment",
            f"Invalid adjustment id: {adjustment.adjustment_id[:80]!r}; expected 1 to 128 of A-Z,"
            " a-z, 0-9 and ._:-",
        )
    if adjustment.adjustment_id.startswith(BREACH):
        raise BadPrice("bad_adjustment", f"Ids that begin with {BREACH} are reserved.")
    if not 0 < abs(adjustment.amount_pico) <= CHARGE_MAX:
        raise BadPrice(
            "bad_adjustment",
            f"Amount out of range: {format_dollars(adjustment.amount_pico)} dollars; expected above"
            " 0 and below 9.2 million dollars.",
        )
    reason = adjustment.reason
    if not reason.strip() or len(reason) > REASON_CHARS_MAX or not reason.isprintable():
        raise BadPrice(
            "bad_adjustment",
            f"Invalid reason: {reason[:80]!r}; expected 1 to {REASON_CHARS_MAX} printable"
            " characters.",
        )


def credit_breaches(db: Transaction, now_ms: int, breached: Iterable[UsageEntry]) -> None:
    """Book the credits for entries with broken promises, within the caller's transaction.

    The entries must be written already. A repeated call changes nothing. O(cards + breaches).
    """
    cards = RateCards([read_card(row) for row in db.rows(SELECT_CARDS)])
    for one in breached:
        # The stored entry has its rate card and its charge.
        rows = db.rows(
            f"select {', '.join(ENTRY_FIELDS)} from ledger where request_id = ?",
            (one.request_id,),
        )
        entry = entry_of(rows[0])
        owed = credit_of(cards.card(entry.rate_card_id), entry)
        if owed is not None:
            book(db, now_ms, owed)


def credit_of(card: RateCard, entry: UsageEntry) -> Adjustment | None:
    """Return the credit that an entry's broken promises require, or None."""
    pico = compute_breach_credit(card, entry)
    if not pico:
        return None
    lost = entry.recomputed_promised_tokens
    reason = f"{lost} promised tokens were lost and computed again ({card.breach_credit})"
    return Adjustment(f"{BREACH}{entry.request_id}", entry.request_id, -pico, reason)
