"""Credits and debits on ledger entries: how a charge is corrected without changing its entry.

Append-only, chained like entries, once per adjustment id for ever. It changes what is billed, not
what a budget's window has seen. The command line calls it, beside a running server too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

from tenancy.errors import BadPrice
from tenancy.ledger.aggregates import HOUR_MS
from tenancy.ledger.entries import ENTRY_FIELDS, NO_CHAIN, entry_of, next_chain, read_open_from_ms
from tenancy.pricing.charges import (
    CHARGE_MAX,
    PICO_PER_MICRO,
    RateCard,
    compute_breach_credit,
    format_dollars,
)
from tenancy.pricing.rate_cards import SELECT_CARDS, RateCards, read_card
from tenancy.storage.interface import Store, Transaction, Value
from tenancy.types import DAY_MS, UsageEntry, WallClock

REASON_CHARS_MAX = 500
BREACH = "breach:"
"""Begins the ids of what the ledger itself credits; nobody else may use it."""

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Adjustment(Struct, frozen=True, forbid_unknown_fields=True):
    """`amount_pico` below zero is a credit to the tenant, above it a debit."""

    adjustment_id: str
    request_id: str
    amount_pico: int
    reason: str


def adjust(store: Store, clock: WallClock, adjustment: Adjustment) -> bool:
    """Book it on the first day that is not closed. False if it was booked before, word for word.

    Raises BadPrice with nothing written: for an id that was used for something else, an entry that
    is not there, or credits that exceed what the entry was charged.
    """
    _check(adjustment)
    with store.change() as db:
        return book(db, clock(), adjustment)


def book(db: Transaction, now_ms: int, adjustment: Adjustment) -> bool:
    """As `adjust`, within the caller's transaction."""
    same = db.rows(
        "select request_id, amount_pico, reason from adjustments where adjustment_id = ?",
        (adjustment.adjustment_id,),
    )
    if same:
        if same[0] != (adjustment.request_id, adjustment.amount_pico, adjustment.reason):
            raise BadPrice(
                "adjustment_id_used", "This adjustment id was used for another adjustment."
            )
        return False
    entry = db.rows(
        "select tenant_id, key_id, model, charge_pico from ledger where request_id = ?",
        (adjustment.request_id,),
    )
    if not entry:
        raise BadPrice("entry_unknown", "There is no ledger entry of this request id.")
    tenant_id, key_id, model, charge = entry[0]
    before = db.rows(
        "select amount_pico from adjustments where request_id = ?",
        (adjustment.request_id,),
    )
    left = charge + sum(row[0] for row in before)
    if left + adjustment.amount_pico < 0:
        raise BadPrice(
            "credit_exceeds_charge",
            f"A credit of {format_dollars(-adjustment.amount_pico)} dollars is more than the"
            f" {format_dollars(left)} that are left of this entry's charge.",
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
"""Columns of `adjustments`, but for `number` and `chain`."""


_SUM_TABLES = (("usage_hours", "hour_ms", HOUR_MS), ("usage_days", "day_ms", DAY_MS))


def _check(adjustment: Adjustment) -> None:
    if not _ID.fullmatch(adjustment.adjustment_id):
        raise BadPrice("bad_adjustment", "An adjustment id is 1 to 128 of A-Z, a-z, 0-9 and ._:-")
    if adjustment.adjustment_id.startswith(BREACH):
        raise BadPrice("bad_adjustment", f"Ids that begin with {BREACH} are the ledger's own.")
    if not 0 < abs(adjustment.amount_pico) <= CHARGE_MAX:
        raise BadPrice(
            "bad_adjustment", "An amount must be above zero and below 9.2 million dollars."
        )
    reason = adjustment.reason
    if not reason.strip() or len(reason) > REASON_CHARS_MAX or not reason.isprintable():
        raise BadPrice("bad_adjustment", f"A reason is 1 to {REASON_CHARS_MAX} printable signs.")


def credit_breaches(db: Transaction, now_ms: int, breached: Iterable[UsageEntry]) -> None:
    """Book what is owed for these entries, which met a broken promise, within the caller's
    transaction, after the entries. Again changes nothing. O(cards + breaches)."""
    cards = RateCards([read_card(row) for row in db.rows(SELECT_CARDS)])
    for one in breached:
        # As it was written, with its card and its charge.
        rows = db.rows(
            f"select {', '.join(ENTRY_FIELDS)} from ledger where request_id = ?",
            (one.request_id,),
        )
        entry = entry_of(rows[0])
        owed = credit_of(cards.card(entry.rate_card_id), entry)
        if owed is not None:
            book(db, now_ms, owed)


def credit_of(card: RateCard, entry: UsageEntry) -> Adjustment | None:
    """The adjustment that this entry's breach asks for; None where nothing is owed."""
    pico = compute_breach_credit(card, entry)
    if not pico:
        return None
    lost = entry.recomputed_promised_tokens
    reason = f"{lost} promised tokens were lost and computed again ({card.breach_credit})"
    return Adjustment(f"{BREACH}{entry.request_id}", entry.request_id, -pico, reason)
