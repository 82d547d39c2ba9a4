"""Audit of the books: every sum, chain, close, charge, seal, budget and epoch, from the entries up.

It reads in pages and by days, so its memory does not grow with the ledger, and changes nothing. It
may run beside a server. A finding is a sentence that says where a value is wrong and by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from tenancy.accounting.closing import totals_of
from tenancy.ledger.adjustments import ADJUSTMENT_FIELDS, Adjustment, credit_of
from tenancy.ledger.aggregates import ENTRY_SUMS, EPOCH_TOTALS
from tenancy.ledger.entries import ENTRY_FIELDS, entry_of, next_chain
from tenancy.pricing.budgets import list_budgets, sum_window, window_of
from tenancy.pricing.charges import PICO_PER_MICRO, compute_charge, compute_savings
from tenancy.pricing.rate_cards import SELECT_CARDS, RateCards, read_card
from tenancy.storage.hourly_usage import HOUR_SUMS, HOURLY_USAGE
from tenancy.storage.interface import Row, Store, Transaction
from tenancy.types import DAY_MS, HOUR_MS

FINDINGS_MAX = 100
"""The most findings that one audit returns."""
_PAGE = 2_000

Progress = Callable[[int, int], None]
"""A callback that receives how many entries are checked, and of how many."""


def ignore_progress(done: int, total: int) -> None:
    """Do nothing: the default progress callback."""


def check_books(store: Store, progress: Progress = ignore_progress) -> list[str]:
    """Return up to `FINDINGS_MAX` findings; an empty list means that the books are right.

    `progress` is called with counts of entries. O(entries), in one snapshot.
    """
    with store.snapshot() as db:
        return findings_in(db, progress)


def findings_in(db: Transaction, progress: Progress = ignore_progress) -> list[str]:
    """Audit within the caller's transaction; see `check_books`."""
    checks = (
        lambda db: _entries(db, progress),
        _hours,
        _adjustments,
        _closes,
        _seals,
        _budgets,
        _epochs,
        _days,
        _ledger_epochs,
    )
    return list(islice((finding for check in checks for finding in check(db)), FINDINGS_MAX))


def _entries(db: Transaction, progress: Progress) -> Iterator[str]:
    """Check chains, charges, token sums by class and breach credits."""
    cards = RateCards([read_card(row) for row in db.rows(SELECT_CARDS)])
    last = db.rows("select max(entry_id) from ledger")[0][0]
    before, after = b"", 0
    while page := db.rows(
        f"select entry_id, chain, {', '.join(ENTRY_FIELDS)} from ledger where entry_id > ?"
        " order by entry_id limit ?",
        (after, _PAGE),
    ):
        for entry_id, chain, *row in page:
            if next_chain(before, row) != chain:
                yield f"entry {entry_id} does not match its chain"
            before = chain
            entry = entry_of(row)
            card = cards.card(entry.rate_card_id)
            if (compute_charge(card, entry), compute_savings(card, entry)) != (
                entry.charge_pico,
                entry.saved_pico,
            ):
                yield f"entry {entry_id} is not charged by its rate card {entry.rate_card_id}"
            for name, detail, total in (
                ("read", entry.read, entry.cache_read_tokens),
                ("written", entry.write, entry.cache_write_tokens),
            ):
                if detail and sum(detail.values()) != total:
                    yield f"entry {entry_id}: tokens {name} by class do not add up to their sum"
            yield from _breach_credits(db, credit_of(card, entry), entry_id)
        after = page[-1][0]
        progress(after, last)


def _breach_credits(db: Transaction, credit: Adjustment | None, entry_id: int) -> Iterator[str]:
    """Check that a broken promise is credited as the entry's card says."""
    if credit is None:
        return
    found = db.rows(
        "select request_id, amount_pico from adjustments where adjustment_id = ?",
        (credit.adjustment_id,),
    )
    if found != [(credit.request_id, credit.amount_pico)]:
        yield f"the breach of entry {entry_id} is not credited with {-credit.amount_pico}"


def _hours(db: Transaction) -> Iterator[str]:
    """Check hourly sums against entries, day by day, as one day's hours fit into memory."""
    seen = 0
    for (day_ms,) in db.rows(f"select distinct hour_ms / {DAY_MS} * {DAY_MS} from {HOURLY_USAGE}"):
        day = (day_ms, day_ms + DAY_MS)
        expected_sums = {row[:4]: _join_money(row[4:]) for row in db.rows(_OF_ENTRIES, day)}
        seen += sum(sums[0] for sums in expected_sums.values())
        for row in db.rows(_OF_HOURS, day):
            where = "tenant {}, hour {}, key {}, model {}".format(*row[:4])
            expected = expected_sums.pop(row[:4], (0,) * len(_SUMMED))
            for name, actual, entries in zip(_SUMMED, _join_money(row[4:]), expected, strict=True):
                if actual != entries:
                    yield f"{where}: {name} is {actual}; its entries sum to {entries}"
        for tenant_id, hour_ms, _, _ in expected_sums:
            yield f"tenant {tenant_id}, hour {hour_ms}: its entries have no sum"
    if missing := db.rows("select count(*) from ledger")[0][0] - seen:
        yield f"{missing} entries are in days without sums"


_SUMMED = (*HOUR_SUMS[:-4], "charge_pico", "saved_pico")
_OF_ENTRIES, _OF_HOURS = (
    f"select tenant_id, {hour}, key_id, model, {', '.join(sums)} from {table}"
    f" where tenant_id in (select tenant_id from tenants) and {at} >= ? and {at} < ?"
    " group by 1, 2, 3, 4"
    for table, at, hour, sums in (
        ("ledger", "booked_ms", f"booked_ms / {HOUR_MS} * {HOUR_MS}", ENTRY_SUMS),
        (HOURLY_USAGE, "hour_ms", "hour_ms", [f"sum({name})" for name in HOUR_SUMS]),
    )
)


def _join_money(sums: Row) -> tuple[int, ...]:
    """Join the micro-dollar and remainder columns of charge and savings."""
    *counts, charge_micros, charge_rest, saved_micros, saved_rest = sums
    charged = charge_micros * PICO_PER_MICRO + charge_rest
    return (*counts, charged, saved_micros * PICO_PER_MICRO + saved_rest)


def _adjustments(db: Transaction) -> Iterator[str]:
    before, after, total = b"", 0, 0
    names = ", ".join(ADJUSTMENT_FIELDS)
    sql = f"select number, chain, {names} from adjustments where number > ? order by number limit ?"
    while page := db.rows(sql, (after, _PAGE)):
        for number, chain, *row in page:
            if next_chain(before, row) != chain:
                yield f"adjustment {number} does not match its chain"
            before = chain
            total += row[ADJUSTMENT_FIELDS.index("amount_pico")]
        after = page[-1][0]
    whole, rest = db.rows(
        "select coalesce(sum(adjusted_micros), 0), coalesce(sum(adjusted_rest), 0)"
        " from usage_hours",
    )[0]
    if whole * PICO_PER_MICRO + rest != total:
        yield "hourly adjustments do not add up to the adjustments"


def _closes(db: Transaction) -> Iterator[str]:
    before = b""
    for day, digest, *totals in db.rows(
        "select day, digest, entries, prompt_tokens, cache_read_tokens, cache_write_tokens,"
        " output_tokens, charge_pico, adjustments, adjusted_pico, storage_token_seconds"
        " from closes order by day",
    ):
        if totals_of(db, day, before) != (tuple(totals), digest):
            yield f"day {day} does not match its close"
        before = digest


def _seals(db: Transaction) -> Iterator[str]:
    for number, entry_id in db.rows(
        "select number, seals.entry_id from seals left join ledger using (entry_id)"
        " where ledger.chain is distinct from seals.chain",
    ):
        yield f"seal {number} does not match entry {entry_id}"


def _budgets(db: Transaction) -> Iterator[str]:
    """Check the windows of present budgets. Windows of closed days may count late entries."""
    budgets = {(one.tenant_id, one.key_id, one.window): one for one in list_budgets(db)}
    for tenant_id, key_id, window, start_ms, *sums in db.rows("select * from budget_windows"):
        one = budgets.get((tenant_id, key_id, window))
        if one is not None:
            spent = sums[0] * PICO_PER_MICRO + sums[1]
            reserved = sums[2] * PICO_PER_MICRO + sums[3]
            expected_sums = sum_window(db, one, *window_of(one.window, start_ms))
            if (spent, reserved) != expected_sums:
                yield (
                    f"the {window} budget of tenant {tenant_id}, key {key_id}, from {start_ms}:"
                    f" {spent} spent and {reserved} reserved; entries and holds sum to"
                    f" {expected_sums}"
                )


def _epochs(db: Transaction) -> Iterator[str]:
    for epoch, *sums in db.rows(
        f"select * from {EPOCH_TOTALS} except select epoch, count(*), sum(prompt_tokens),"
        " sum(physical_cached_tokens), sum(output_tokens), max(ended_ms) from ledger"
        " where epoch <> '' group by epoch",
    ):
        yield f"the sums of epoch {epoch} are {sums}, which differ from its entries' sums"


def _ledger_epochs(db: Transaction) -> Iterator[str]:
    """Check that each ledger epoch begins after an existing entry."""
    for epoch, entry_id in db.rows(
        "select number, one.entry_id from ledger_epochs as one left join ledger using (entry_id)"
        " where one.entry_id > 0 and ledger.chain is distinct from one.chain",
    ):
        yield f"ledger epoch {epoch} does not match entry {entry_id}"


def _days(db: Transaction) -> Iterator[str]:
    """Check daily sums against hourly sums, which `_hours` compares with entries."""
    names = (*HOUR_SUMS, "adjusted_micros", "adjusted_rest")
    days = f"select tenant_id, day_ms, key_id, model, {', '.join(names)} from usage_days"
    hours = (
        f"select tenant_id, hour_ms / {DAY_MS} * {DAY_MS}, key_id, model,"
        f" {', '.join(f'sum({name})' for name in names)} from usage_hours group by 1, 2, 3, 4"
    )
    for sql in (f"{days} except {hours}", f"select * from ({hours}) as summed except {days}"):
        for tenant_id, day_ms, key_id, model, *_ in db.rows(sql):
            where = f"tenant {tenant_id}, day {day_ms}, key {key_id}, model {model}"
            yield f"{where}: the day's sums differ from those of its hours"
