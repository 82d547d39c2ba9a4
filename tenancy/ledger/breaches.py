"""Credits for promises that were not kept: an adjustment beside each entry that met a broken one.

A breach is a request that read by contract what had to be computed again; its id is the request's,
so it is credited once, in the transaction that writes the entry. How much is the rate card's to
say. `ledger` calls it; `audit` knows what it must have done.
"""

from __future__ import annotations

from collections.abc import Iterable

from tenancy.ledger.adjustments import BREACH, Adjustment, book
from tenancy.ledger.entries import ENTRY_FIELDS, entry_of
from tenancy.pricing.charges import RateCard, breach_credit
from tenancy.pricing.rate_cards import SELECT, CardBook, read_card
from tenancy.storage.interface import Transaction
from tenancy.types import UsageEntry


def credit_breaches(db: Transaction, now_ms: int, breached: Iterable[UsageEntry]) -> None:
    """Book what is owed for these entries, which met a broken promise, within the caller's
    transaction, after the entries. Again changes nothing. O(cards + breaches)."""
    cards = CardBook([read_card(row) for row in db.rows(SELECT)])
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
    pico = breach_credit(card, entry)
    if not pico:
        return None
    lost = entry.recomputed_promised_tokens
    reason = f"{lost} promised tokens were lost and computed again ({card.breach_credit})"
    return Adjustment(f"{BREACH}{entry.request_id}", entry.request_id, -pico, reason)
