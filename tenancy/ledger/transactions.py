"""What holds, progress notes, entries and storage readings change, within one transaction.

An entry is priced by its hold's rate card, chained to the entry before, and added to its hour's
sums and to its budgets, and its hold is deleted: all or nothing. The module opens no transaction
and starts no thread. `writer` calls it on its connection, with the prices and budgets cached here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from tenancy.errors import BadPrice, LedgerUnavailable, TenancyError
from tenancy.ledger.aggregates import max_of
from tenancy.ledger.engine_counts import (
    INTERRUPTED,
    Counts,
    EngineTotals,
    EpochCorrections,
    GatewayDeath,
    settle_death,
    write_totals,
)
from tenancy.ledger.entries import NO_CHAIN, EntryAppender, hour_of
from tenancy.ledger.holds import Holds, ProgressNote, write_progress
from tenancy.ledger.idempotency import Claim, IdempotencyNames, ReplayRecord
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
from tenancy.storage.interface import Store, Transaction, pad_to_power_of_two, placeholders
from tenancy.types import DAY_MS, FREE, TokenCounts, UsageEntry

METER_KEPT_MS = 30 * DAY_MS
"""How long the last readings of an engine are kept that is heard no longer."""


class Hold(Struct, frozen=True, tag="hold"):
    """An admitted request that is not settled yet, with the maximum usage it may have."""

    request_id: str
    tenant_id: int
    key_id: int
    model: str
    started_ms: int
    input_tokens: int = 0
    """The tokens of all its prompts."""
    output_tokens: int = 0
    """The maximum output."""
    workspace: str = "default"
    tier: str = "standard"
    dialect: str = ""
    epoch: str = ""
    claim: Claim | None = None
    """The claim on its idempotency key; a hold is refused if its key is taken."""
    is_running: bool = False
    """The request was admitted while no budget applied to it; a budget set since then counts it and
    does not refuse it."""


class NamedEntry(Struct, frozen=True, tag="named_entry"):
    """An entry with what belongs to it.

    For a request with an idempotency key: without a `replay` the key is free again. There is no
    response then, so a retry is a new request.
    """

    entry: UsageEntry
    replay: ReplayRecord | None = None
    uncounted: dict[str, Counts] = {}
    """By the epoch of an engine: what it has more of tokens than that one counted; below 0 for
    less. It is no part of the entry: `engine_counts` keeps the sums."""


class StorageReading(Struct, frozen=True):
    """Tokens times seconds that a tenant has held in a class since its engine's start."""

    tenant_id: int
    retention: str
    token_seconds: int
    model: str = ""
    tier: str = "standard"


class StorageReadings(Struct, frozen=True, tag="storage"):
    """Readings of one engine, written together or not at all.

    Each adds what it has more than the last one that was written. So readings that come twice, late
    or from several gateways count once, and what was never written is part of the next.
    """

    epoch: str
    """The engine's life."""
    at_ms: int
    readings: tuple[StorageReading, ...]
    """One or more, at most one of each tenant, model and class."""


Item = Hold | UsageEntry | NamedEntry | StorageReadings | EngineTotals | GatewayDeath | ProgressNote
"""Anything that the ledger writes."""


def entry_in(item: Item) -> UsageEntry | None:
    """Return the entry that an item is or contains, or None."""
    if isinstance(item, UsageEntry):
        return item
    return item.entry if isinstance(item, NamedEntry) else None


class LedgerTransactions:
    """Cached prices and budgets, and the writing of items by them."""

    def __init__(self, writer_id: int = 0, gateway: str = "") -> None:
        """Write holds under `writer_id`, for this start of a gateway.

        `breached`: the entries of the last batch with broken promises.
        """
        self.writer_id, self.gateway = writer_id, gateway
        self.cards = RateCards([])
        self.budgets: Budgets = {}
        self.breached: list[UsageEntry] = []
        self.open_from_ms = 0
        self.chain, self.sealed_hour_ms = NO_CHAIN, -1
        self._version = -1
        self._committed_as_of: object = None
        self._is_current = False  # whether the caches match this transaction

    def apply(self, db: Transaction, items: Sequence[Item]) -> list[TenancyError | None]:
        """Write items in order. Returns, for each, its refusal (nothing was written) or None.

        Reads everything that the items need at once, and writes all changes at once. Raises
        StoreError, and ConstraintBroken for an impossible item.
        """
        batch = _Batch(db, self, items)
        self.breached = batch.breached
        self._is_current = self._committed_as_of is not None and self._committed_as_of == db.as_of
        self._committed_as_of = None
        if batch.is_only_progress:
            write_progress(db, batch.reached)
            return [None] * len(items)
        if not self._is_current:
            self._read(db)
        answers = batch.apply()
        if batch.reached:
            write_progress(db, batch.reached)  # after the holds of the same batch
        return answers

    def mark_committed(self, db: Transaction) -> None:
        """Mark the transaction as committed, so the caches stay valid until another writer
        commits."""
        if self._is_current:
            self._committed_as_of = db.as_of

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
    """The items of one transaction, applied in memory between reading and writing."""

    def __init__(self, db: Transaction, state: LedgerTransactions, items: Sequence[Item]) -> None:
        """Look through the items once; a single response waits for all of this.

        `reached`: the last progress noted of each request that is not settled in the batch.
        `is_only_progress`: the batch contains only progress notes.
        """
        self._db = db
        self._state = state
        self._items = items
        self.reached: dict[str, TokenCounts] = {}
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
        self.is_only_progress = not self._ids and not others

    def apply(self) -> list[TenancyError | None]:
        """Apply the items; see `LedgerTransactions.apply`."""
        db, state = self._db, self._state
        self._entries = EntryAppender(db, state.chain, state.sealed_hour_ms)
        self._holds = Holds(db, self._ids)
        self._names = IdempotencyNames(db, self._claimed, self._ended)
        self._windows = BudgetWindows(db, state.budgets)
        self._corrections = EpochCorrections()
        if state.budgets:
            requests = (one if isinstance(one, Hold) else entry_in(one) for one in self._items)
            self._windows.read([self._budget_day(one) for one in requests if one is not None])
        answers = [self._apply_item(item) for item in self._items]
        self._holds.finish()
        self._names.finish()
        self._entries.finish()
        self._corrections.write(db)
        self._windows.finish()
        state.chain, state.sealed_hour_ms = self._entries.chain, self._entries.sealed_hour_ms
        return answers

    def _apply_item(self, item: Item) -> TenancyError | None:
        if isinstance(item, UsageEntry):
            self._settle(item)
        elif isinstance(item, Hold):
            return self._hold(item)
        elif isinstance(item, NamedEntry):
            entry = item.entry
            if self._settle(entry):
                gateway = INTERRUPTED if entry.ending == INTERRUPTED else self._state.gateway
                for epoch, more in item.uncounted.items():
                    self._corrections.add(epoch, gateway, more)
            self._names.settle(item.entry.request_id, item.replay)
        elif isinstance(item, StorageReadings):
            self._store_readings(item)
        elif isinstance(item, EngineTotals):
            write_totals(self._db, item)
        elif isinstance(item, GatewayDeath):
            settle_death(self._db, item)
        return None  # progress notes are written together by `apply`

    def _hold(self, hold: Hold) -> TenancyError | None:
        card = self._state.cards.in_force(hold.model, hold.tier, hold.started_ms)
        booked_ms = max(hold.started_ms, self._state.open_from_ms)
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
                return None  # a repeated hold
            return LedgerUnavailable("duplicate_request", "Duplicate request id.")
        card_id, tokens = card.rate_card_id, hold.input_tokens + hold.output_tokens
        row = (
            *(hold.request_id, hold.tenant_id, hold.key_id, hold.model, hold.started_ms),
            *(hold.workspace, hold.tier, hold.dialect, hold.epoch),
            *(card_id, tokens, pico, booked_ms, self._state.writer_id),
        )
        self._holds.add(hold.request_id, (card_id, pico, booked_ms), row)
        if claim is not None:
            self._names.take(hold.tenant_id, hold.workspace, hold.request_id, claim)
        add_spending(spending, spent=0, reserved=pico)
        return None

    def _settle(self, entry: UsageEntry) -> bool:
        """Write an entry, and return True; False if there is one already."""
        if entry.read or entry.write:
            _check_class_sums(entry)
        if entry.recomputed_promised_tokens:
            self.breached.append(entry)
        state = self._state
        held = self._holds.find(entry.request_id)
        if held is not None:
            card_id, reserved, booked_ms = held
            card = state.cards.card(card_id)
        else:
            reserved, booked_ms = 0, entry.started_ms
            card = state.cards.in_force(entry.model, entry.tier, entry.started_ms)
        if booked_ms < state.open_from_ms:
            booked_ms = state.open_from_ms
        has_money = entry.rate_card_id != FREE or entry.charge_pico or entry.saved_pico
        if card is not FREE_CARD or has_money:
            entry = _priced(card, entry)
        spent, is_new = 0, self._holds.settle(entry.request_id)
        if is_new:
            self._entries.add(entry, booked_ms)
            spent = entry.charge_pico
        if state.budgets:
            whose = self._windows.of(entry.tenant_id, entry.key_id, booked_ms)
            add_spending(whose, spent=spent, reserved=-reserved)
        return is_new

    def _store_readings(self, item: StorageReadings) -> None:
        """Add to their hours what readings have more than the last ones of their engine, without
        those of tenants that were deleted since and left no rows.

        The meter's row stays locked until the commit, so a transaction whose connection was lost
        cannot count them beside this one. If a life's readings were forgotten, its next ones count
        from there: what it has held by then is charged to nobody.
        """
        db, booked_ms = self._db, max(item.at_ms, self._state.open_from_ms)
        ((was_forgotten,),) = db.rows(_LOCK_METER, (item.epoch, item.at_ms))
        asked = pad_to_power_of_two([one.tenant_id for one in item.readings])
        some = placeholders(len(asked))
        there = {row[0] for row in db.rows(_TENANTS.format(some), asked)}
        before = {row[:3]: row[3] for row in db.rows(_READINGS.format(some), (item.epoch, *asked))}
        read, added = [], []
        for one in item.readings:
            whose = one.tenant_id, one.model, one.retention
            last = before.get(whose, one.token_seconds if was_forgotten else 0)
            if one.tenant_id not in there or one.token_seconds < last:
                continue
            read.append((item.epoch, *whose, one.token_seconds))
            if one.token_seconds > last:
                card = self._state.cards.in_force(one.model, one.tier, booked_ms)
                hour = one.tenant_id, hour_of(booked_ms), one.model, one.retention
                added.append((*hour, card.rate_card_id, one.token_seconds - last))
        db.execute_many(_READ, read)
        db.execute_many(_ADD_STORAGE, added)

    def _budget_day(self, item: Hold | UsageEntry) -> BudgetDay:
        """Return the tenant, key and day of the budgets that the item will most likely change.

        If the guess is wrong, those windows are read when they are needed.
        """
        held = self._holds.find(item.request_id)
        booked_ms = max(item.started_ms if held is None else held[2], self._state.open_from_ms)
        return item.tenant_id, item.key_id, booked_ms // DAY_MS


def forget_readings(store: Store, now_ms: int) -> None:
    """Forget the readings of engines that were not heard for `METER_KEPT_MS`; a row of each life
    stays. Raises StoreError."""
    which, before = "seen_ms < ? and was_forgotten = 0", (now_ms - METER_KEPT_MS,)
    stale = f"select epoch from storage_meters where {which}"
    if store.query(f"{stale} limit 1", before):
        with store.change() as db:
            db.execute(f"delete from storage_readings where epoch in ({stale})", before)
            db.execute(f"update storage_meters set was_forgotten = 1 where {which}", before)


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
    """Raise LedgerUnavailable if tokens by class do not add up to their sum."""
    fits = _adds_up(entry.read, entry.cache_read_tokens)
    if not fits or not _adds_up(entry.write, entry.cache_write_tokens):
        message = "Tokens by retention class do not add up to their sum."
        raise LedgerUnavailable("impossible_entry", message)


def _adds_up(detail: Mapping[str, int], total: int) -> bool:
    return not detail or (sum(detail.values()) == total and min(detail.values()) >= 0)


_LEDGER_STATE = (
    "select (select version from money_version), (select max(day) + 1 from closes),"
    " (select chain from ledger order by entry_id desc limit 1),"
    " (select hour_ms from seals order by number desc limit 1)"
)
_TENANTS = "select tenant_id from tenants where tenant_id in {}"
_LOCK_METER = (
    "insert into storage_meters (epoch, seen_ms, was_forgotten) values (?, ?, 0)"
    f" on conflict (epoch) do update set seen_ms = {max_of('storage_meters', 'seen_ms')}"
    " returning was_forgotten"
)
_READINGS = (
    "select tenant_id, model, class, token_seconds from storage_readings"
    " where epoch = ? and tenant_id in {}"
)
_READ = (
    "insert into storage_readings (epoch, tenant_id, model, class, token_seconds)"
    " values (?, ?, ?, ?, ?) on conflict (epoch, tenant_id, model, class)"
    " do update set token_seconds = excluded.token_seconds"
)
_ADD_STORAGE = (
    "insert into storage_hours (tenant_id, hour_ms, model, class, rate_card_id, token_seconds)"
    " values (?, ?, ?, ?, ?, ?) on conflict (tenant_id, hour_ms, model, class, rate_card_id)"
    " do update set token_seconds = storage_hours.token_seconds + excluded.token_seconds"
)
