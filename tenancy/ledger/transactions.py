"""What a hold, its progress, an entry and a storage reading change, within one transaction.

An entry is priced by its hold's rate card, chained to the one before, added to its hour's sums and
to its budgets, and its hold goes: all of it or nothing. It opens no transaction and starts no
thread; `ledger` calls it on the writer's connection, with prices and budgets that it keeps here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from tenancy.errors import BadPrice, LedgerUnavailable, TenancyError
from tenancy.ledger.aggregates import max_of
from tenancy.ledger.entries import NO_CHAIN, EntryAppender, hour_of
from tenancy.ledger.holds import Holds
from tenancy.ledger.idempotency import Claim, IdempotencyNames, ReplayRecord
from tenancy.ledger.progress import Progress, ProgressNote, write_progress
from tenancy.pricing.budgets import (
    BudgetDay,
    Budgets,
    BudgetWindows,
    add_spending,
    find_exceeded,
    load_budgets,
)
from tenancy.pricing.charges import FREE_CARD, RateCard, compute_charge, compute_savings, max_charge
from tenancy.pricing.rate_cards import SELECT_CARDS, RateCards, read_card
from tenancy.storage.interface import Transaction
from tenancy.types import DAY_MS, FREE, UsageEntry


class Hold(Struct, frozen=True, tag="hold"):
    """A request that has been admitted and not settled, with the most it can use.

    `input_tokens`: of all its prompts. `output_tokens`: all it may be answered. `claim`: on the
    name that its client gave it; no hold is written for one that somebody else has. `is_running`:
    it was admitted when no budget bound it; one that was set since counts it and cannot refuse it.
    """

    request_id: str
    tenant_id: int
    key_id: int
    model: str
    started_ms: int
    input_tokens: int = 0
    output_tokens: int = 0
    workspace: str = "default"
    tier: str = "standard"
    dialect: str = ""
    epoch: str = ""
    claim: Claim | None = None
    is_running: bool = False


class NamedEntry(Struct, frozen=True, tag="named_entry"):
    """The entry of a request that its client has named. Without a `keeping` its name is free: it
    was not answered, and sending it again is no repetition."""

    entry: UsageEntry
    keeping: ReplayRecord | None = None


class StorageReading(Struct, frozen=True, tag="storage"):
    """Tokens times seconds that a tenant has held in a class since the reading before."""

    tenant_id: int
    retention: str
    token_seconds: int
    at_ms: int
    model: str = ""
    tier: str = "standard"


class EngineTotals(Struct, frozen=True, tag="engine"):
    """What the engine has counted since its life `epoch` began, and what the gateway's metrics
    have since then. `is_ended`: it will count no more, and this is its last word."""

    epoch: str
    at_ms: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    metric_prompt_tokens: int
    metric_cached_tokens: int
    metric_output_tokens: int
    is_ended: bool = False


Item = Hold | UsageEntry | NamedEntry | StorageReading | EngineTotals | ProgressNote


def entry_in(item: Item) -> UsageEntry | None:
    """The entry that an item is, or has."""
    if isinstance(item, UsageEntry):
        return item
    return item.entry if isinstance(item, NamedEntry) else None


class LedgerTransactions:
    """Prices and budgets as the file has them, and how items are written by them."""

    def __init__(self, writer_id: int = 0) -> None:
        """`writer_id`: who keeps its holds. `breached`: entries of the last batch that met a broken
        promise."""
        self.writer_id = writer_id
        self.cards = RateCards([])
        self.budgets: Budgets = {}
        self.breached: list[UsageEntry] = []
        self.open_from_ms = 0
        self.chain, self.sealed_hour_ms = NO_CHAIN, -1
        self._version = -1
        self._as_of: object = None
        self._is_current = False  # what is known here, within the transaction

    def apply(self, db: Transaction, items: Sequence[Item]) -> list[TenancyError | None]:
        """Write items in order. For each its refusal, for which nothing was written, or None.

        What they need to know is read at once, and what they change is written at once. Raises
        StoreError, ConstraintBroken for an impossible item.
        """
        batch = _Batch(db, self, items)
        self.breached = batch.breached
        self._is_current = self._as_of is not None and self._as_of == db.as_of
        self._as_of = None
        if batch.is_progress:
            write_progress(db, batch.reached)
            return [None] * len(items)
        if not self._is_current:
            self._read(db)
        answers = batch.play()
        if batch.reached:
            write_progress(db, batch.reached)  # in holds that may have come with it
        return answers

    def keep(self, db: Transaction) -> None:
        """It has been committed, with whatever else was done in it: what is known here holds until
        somebody else changes something."""
        if self._is_current:
            self._as_of = db.as_of

    def _read(self, db: Transaction) -> None:
        version, open_day, chain, sealed_hour_ms = db.rows(_LEDGER_STATE)[0]
        if version != self._version:
            self.cards = RateCards([read_card(row) for row in db.rows(SELECT_CARDS)])
            self.budgets = load_budgets(db)
            self._version = version
        self.open_from_ms = (open_day or 0) * DAY_MS
        self.chain = bytes(chain or NO_CHAIN)
        self.sealed_hour_ms = -1 if sealed_hour_ms is None else sealed_hour_ms
        self._is_current = True


class _Batch:
    """The items of one transaction, played in memory between what is read and what is written."""

    def __init__(self, db: Transaction, books: LedgerTransactions, items: Sequence[Item]) -> None:
        """Looked through once: an answer alone waits for all of this. `reached`: the last that is
        noted of each request; one that is settled needs none. `is_progress`: there is nothing
        else."""
        self._db = db
        self._books = books
        self._items = items
        self.reached: dict[str, Progress] = {}
        self.breached: list[UsageEntry] = []
        self._ids: list[str] = []
        self._claimed: set[tuple[int, str]] = set()
        self._ended: set[str] = set()
        others = 0
        for item in items:
            if isinstance(item, UsageEntry):
                self._ids.append(item.request_id)
                self.reached.pop(item.request_id, None)
            elif isinstance(item, Hold):
                self._ids.append(item.request_id)
                if item.claim is not None:
                    self._claimed.add((item.tenant_id, item.claim.name))
            elif isinstance(item, NamedEntry):
                self._ids.append(item.entry.request_id)
                self._ended.add(item.entry.request_id)
                self.reached.pop(item.entry.request_id, None)
            elif isinstance(item, ProgressNote):
                self.reached.update(item.reached)
            else:
                others += 1
        self.is_progress = not self._ids and not others

    def play(self) -> list[TenancyError | None]:
        """See `LedgerTransactions.apply`."""
        db, books = self._db, self._books
        self._page = EntryAppender(db, books.chain, books.sealed_hour_ms)
        self._holds = Holds(db, self._ids)
        self._names = IdempotencyNames(db, self._claimed, self._ended)
        self._windows = BudgetWindows(db, books.budgets)
        if books.budgets:
            requests = (one if isinstance(one, Hold) else entry_in(one) for one in self._items)
            self._windows.read([self._whose(one) for one in requests if one is not None])
        answers = [self._play(item) for item in self._items]
        self._holds.finish()
        self._names.finish()
        self._page.finish()
        self._windows.finish()
        books.chain, books.sealed_hour_ms = self._page.chain, self._page.sealed_hour_ms
        return answers

    def _play(self, item: Item) -> TenancyError | None:
        if isinstance(item, UsageEntry):
            self._settle(item)
        elif isinstance(item, Hold):
            return self._hold(item)
        elif isinstance(item, NamedEntry):
            self._settle(item.entry)
            self._names.settle(item.entry.request_id, item.keeping)
        elif isinstance(item, StorageReading):
            self._store_reading(item)
        elif isinstance(item, EngineTotals):
            self._db.execute_many(_WRITE_EPOCH, [structs.astuple(item)])
        return None  # what is noted of progress is written together

    def _hold(self, hold: Hold) -> TenancyError | None:
        card = self._books.cards.in_force(hold.model, hold.tier, hold.started_ms)
        booked_ms = max(hold.started_ms, self._books.open_from_ms)
        try:
            pico = max_charge(card, hold.input_tokens, hold.output_tokens)
        except TenancyError as error:
            return error
        claim = hold.claim
        if claim is not None:
            taken = self._names.refusal(hold.tenant_id, claim, hold.started_ms)
            if taken is not None:
                return taken
        spending = self._windows.of(hold.tenant_id, hold.key_id, booked_ms)
        refused = None if hold.is_running else find_exceeded(spending, pico, booked_ms)
        if refused is not None:
            return refused
        if self._holds.is_used(hold.request_id):
            if hold.is_running:
                return None  # it was sent again
            return LedgerUnavailable("duplicate_request", "This request id was used before.")
        card_id, tokens = card.rate_card_id, hold.input_tokens + hold.output_tokens
        row = (
            *(hold.request_id, hold.tenant_id, hold.key_id, hold.model, hold.started_ms),
            *(hold.workspace, hold.tier, hold.dialect, hold.epoch),
            *(card_id, tokens, pico, booked_ms, self._books.writer_id),
        )
        self._holds.make(hold.request_id, (card_id, pico, booked_ms), row)
        if claim is not None:
            self._names.take(hold.tenant_id, hold.workspace, hold.request_id, claim)
        add_spending(spending, spent=0, reserved=pico)
        return None

    def _settle(self, entry: UsageEntry) -> None:
        if entry.read or entry.write:
            _check_class_sums(entry)
        if entry.recomputed_promised_tokens:
            self.breached.append(entry)
        books = self._books
        held = self._holds.held(entry.request_id)
        if held is not None:
            card_id, reserved, booked_ms = held
            card = books.cards.card(card_id)
        else:
            reserved, booked_ms = 0, entry.started_ms
            card = books.cards.in_force(entry.model, entry.tier, entry.started_ms)
        if booked_ms < books.open_from_ms:
            booked_ms = books.open_from_ms
        if card is not FREE_CARD or entry.rate_card_id != FREE or entry.charge_pico:
            entry = _priced(card, entry)
        spent = 0
        if self._holds.settle(entry.request_id):
            self._page.add(entry, booked_ms)
            spent = entry.charge_pico
        if books.budgets:
            whose = self._windows.of(entry.tenant_id, entry.key_id, booked_ms)
            add_spending(whose, spent=spent, reserved=-reserved)

    def _store_reading(self, reading: StorageReading) -> None:
        booked_ms = max(reading.at_ms, self._books.open_from_ms)
        card = self._books.cards.in_force(reading.model, reading.tier, booked_ms)
        whose = (reading.tenant_id, hour_of(booked_ms), reading.model, reading.retention)
        row = (*whose, card.rate_card_id, reading.token_seconds)
        self._db.execute_many(_ADD_STORAGE, [row])

    def _whose(self, item: Hold | UsageEntry) -> BudgetDay:
        """Whose budgets it moves, and on which day: almost always, and else they are read then."""
        held = self._holds.held(item.request_id)
        booked_ms = max(item.started_ms if held is None else held[2], self._books.open_from_ms)
        return item.tenant_id, item.key_id, booked_ms // DAY_MS


def _priced(card: RateCard, entry: UsageEntry) -> UsageEntry:
    try:
        pico = compute_charge(card, entry)
    except BadPrice as error:
        raise LedgerUnavailable("impossible_entry", error.message) from error
    return structs.replace(
        entry,
        rate_card_id=card.rate_card_id,
        charge_pico=pico,
        saved_pico=compute_savings(card, entry),
    )


def _check_class_sums(entry: UsageEntry) -> None:
    """Where classes are known they make up the sum."""
    fits = _adds_up(entry.read, entry.cache_read_tokens)
    if not fits or not _adds_up(entry.write, entry.cache_write_tokens):
        message = "Tokens by retention class do not make up their sum."
        raise LedgerUnavailable("impossible_entry", message)


def _adds_up(detail: Mapping[str, int], total: int) -> bool:
    return not detail or (sum(detail.values()) == total and min(detail.values()) >= 0)


_LEDGER_STATE = (
    "select (select version from money_version), (select max(day) + 1 from closes),"
    " (select chain from ledger order by entry_id desc limit 1),"
    " (select hour_ms from seals order by number desc limit 1)"
)
_ADD_STORAGE = (
    "insert into storage_hours (tenant_id, hour_ms, model, class, rate_card_id, token_seconds)"
    " values (?, ?, ?, ?, ?, ?) on conflict (tenant_id, hour_ms, model, class, rate_card_id)"
    " do update set token_seconds = storage_hours.token_seconds + excluded.token_seconds"
)
_TOTALS = ("prompt_tokens", "cached_tokens", "output_tokens")
_WRITE_EPOCH = (
    "insert into engine_epochs (epoch, first_seen_ms, last_seen_ms, prompt_tokens, cached_tokens,"
    " output_tokens, metric_prompt_tokens, metric_cached_tokens, metric_output_tokens, is_ended)"
    " values (?1, ?2, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9) on conflict (epoch) do update"
    " set last_seen_ms = excluded.last_seen_ms, "
    + ", ".join(
        f"{name} = {max_of('engine_epochs', name)}"
        for name in ("is_ended", *_TOTALS, *(f"metric_{name}" for name in _TOTALS))
    )
)
