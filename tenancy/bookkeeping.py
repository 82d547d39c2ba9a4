"""What a hold, an entry and a storage reading change in the database, within one transaction.

An entry is priced by its hold's rate card, chained to the one before, added to its hour's sums and
to its budgets, and its hold goes: all of it or nothing. It opens no transaction and starts no
thread; `ledger` calls it on the writer's connection, with prices and budgets that it keeps here.

    chain of an entry = SHA-256(chain of the entry before ‖ MessagePack of the row without it)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, structs

from tenancy import budgets
from tenancy.errors import BadPrice, LedgerUnavailable, TenancyError
from tenancy.pricing import FREE_CARD, PICO_PER_MICRO, RateCard, most, price, savings
from tenancy.rate_cards import SELECT, CardBook, read_card
from tenancy.store import Transaction, Value
from tenancy.types import FREE, UsageEntry

DAY_MS = 86_400_000
HOUR_MS = 3_600_000
NO_CHAIN = b""

ENTRY_FIELDS = (
    *("request_id", "tenant_id", "key_id", "model", "ending", "started_ms", "ended_ms"),
    *("prompt_tokens", "cache_read_tokens", "cache_write_tokens", "fresh_tokens"),
    *("output_tokens", "physical_cached_tokens", "reads", "writes", "workspace", "tier"),
    *("dialect", "recomputed_promised_tokens", "ttft_ms", "epoch", "rate_card_id"),
    *("charge_pico", "saved_pico", "booked_ms"),
)
"""Columns of the ledger, but for `entry_id` and `chain`."""


class Hold(Struct, frozen=True):
    """A request that has been admitted and not settled, with the most it can use.

    `input_tokens`: of all its prompts. `output_tokens`: all it may be answered.
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


class StorageReading(Struct, frozen=True):
    """Tokens times seconds that a tenant has held in a class since the reading before."""

    tenant_id: int
    retention: str
    token_seconds: int
    at_ms: int
    model: str = ""
    tier: str = "standard"


class EngineTotals(Struct, frozen=True):
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


Item = Hold | UsageEntry | StorageReading | EngineTotals


class Books:
    """Prices and budgets as the file has them, and how items are written by them."""

    def __init__(self, writer_id: int = 0) -> None:
        """`writer_id`: who keeps its holds."""
        self._writer_id = writer_id
        self._version = -1
        self._cards = CardBook([])
        self._budgets: budgets.Budgets = {}

    def apply(self, db: Transaction, items: Sequence[Item]) -> list[TenancyError | None]:
        """Write items in order. For each its refusal, for which nothing was written, or None.

        Raises StoreError, ConstraintBroken for an impossible item.
        """
        version = number(db, "select version from money_version")
        if version != self._version:
            self._cards = CardBook([read_card(row) for row in db.rows(SELECT)])
            self._budgets = budgets.load_budgets(db)
            self._version = version
        page, windows = _Page(db), budgets.BudgetWindows(db)
        answers: list[TenancyError | None] = []
        for item in items:
            match item:
                case Hold():
                    answers.append(self._hold(db, item, page, windows))
                case UsageEntry():
                    self._settle(db, item, page, windows)
                    answers.append(None)
                case StorageReading():
                    self._store_reading(db, item, page)
                    answers.append(None)
                case EngineTotals():
                    db.execute(_EPOCH, structs.astuple(item))
                    answers.append(None)
        page.finish()
        windows.finish()
        return answers

    def _mine(self, tenant_id: int, key_id: int) -> tuple[budgets.Budget, ...]:
        own = self._budgets.get((tenant_id, key_id), ()) if key_id else ()
        return (*self._budgets.get((tenant_id, 0), ()), *own)

    def _hold(
        self, db: Transaction, hold: Hold, page: _Page, windows: budgets.BudgetWindows
    ) -> TenancyError | None:
        card = self._cards.in_force(hold.model, hold.tier, hold.started_ms)
        booked_ms = max(hold.started_ms, page.open_from_ms)
        try:
            pico = most(card, hold.input_tokens, hold.output_tokens)
        except TenancyError as error:
            return error
        spending = windows.of(self._mine(hold.tenant_id, hold.key_id), booked_ms)
        refused = budgets.refusal(spending, pico)
        if refused is not None:
            return refused
        tokens = hold.input_tokens + hold.output_tokens
        row = (
            *(hold.request_id, hold.tenant_id, hold.key_id, hold.model, hold.started_ms),
            *(hold.workspace, hold.tier, hold.dialect, hold.epoch),
            *(card.rate_card_id, tokens, pico, booked_ms, self._writer_id),
        )
        if db.execute(_HOLD, row) != 1:
            return LedgerUnavailable("duplicate_request", "This request id was used before.")
        budgets.move(spending, spent=0, reserved=pico)
        return None

    def _settle(
        self, db: Transaction, entry: UsageEntry, page: _Page, windows: budgets.BudgetWindows
    ) -> None:
        mine = self._mine(entry.tenant_id, entry.key_id)
        held = db.rows(_HELD if mine else _RELEASE, (entry.request_id,))
        if held:
            card_id, reserved, booked_ms = held[0]
            card = self._cards.card(card_id)
        else:
            reserved, booked_ms = 0, entry.started_ms
            card = self._cards.in_force(entry.model, entry.tier, entry.started_ms)
        booked_ms = max(booked_ms, page.open_from_ms)
        _check_detail(entry)
        if card is not FREE_CARD or entry.rate_card_id != FREE or entry.charge_pico:
            entry = structs.replace(
                entry,
                rate_card_id=card.rate_card_id,
                charge_pico=_charge(card, entry),
                saved_pico=savings(card, entry),
            )
        spending = windows.of(mine, booked_ms)
        if mine:  # only now: its reservation is in the sums
            db.execute("delete from holds where request_id = ?", (entry.request_id,))
        is_new = page.add(entry, booked_ms)
        budgets.move(spending, spent=entry.charge_pico if is_new else 0, reserved=-reserved)

    def _store_reading(self, db: Transaction, reading: StorageReading, page: _Page) -> None:
        booked_ms = max(reading.at_ms, page.open_from_ms)
        card = self._cards.in_force(reading.model, reading.tier, booked_ms)
        db.execute(
            "insert into storage_hours (tenant_id, hour_ms, model, class, rate_card_id,"
            " token_seconds) values (?, ?, ?, ?, ?, ?)"
            " on conflict (tenant_id, hour_ms, model, class, rate_card_id) do update"
            " set token_seconds = storage_hours.token_seconds + excluded.token_seconds",
            (
                *(reading.tenant_id, _hour(booked_ms), reading.model, reading.retention),
                *(card.rate_card_id, reading.token_seconds),
            ),
        )


class _Page:
    """The entries that one transaction adds: their chain, and their hours' sums in few writes."""

    def __init__(self, db: Transaction) -> None:
        self._db = db
        self.open_from_ms = open_from_ms(db)
        self._chain: bytes | None = None
        self._last_booked_ms = 0
        self._hours: dict[tuple[int, int, int, str], list[list[int]]] = {}
        self._epochs: dict[str, list[int]] = {}

    def add(self, entry: UsageEntry, booked_ms: int) -> bool:
        """False for a request id that has its entry already."""
        row = entry_row(entry, booked_ms)
        if self._chain is None:
            self._chain = last_chain(self._db)
        chain = chained(self._chain, row)
        if self._db.execute(_SETTLE, (*row, chain)) != 1:
            return False
        self._chain = chain
        self._last_booked_ms = max(self._last_booked_ms, booked_ms)
        hour = (entry.tenant_id, _hour(booked_ms), entry.key_id, entry.model)
        self._hours.setdefault(hour, []).append(sums_of(entry))
        if entry.epoch:
            self._add_to_epoch(entry)
        return True

    def _add_to_epoch(self, entry: UsageEntry) -> None:
        sums = self._epochs.setdefault(entry.epoch, [0, 0, 0, 0, 0])
        sums[0] += 1
        sums[1] += entry.prompt_tokens
        sums[2] += entry.physical_cached_tokens
        sums[3] += entry.output_tokens
        sums[4] = max(sums[4], entry.ended_ms)

    def finish(self) -> None:
        """Write the sums, and seal the chain once an hour."""
        for hour, rows in self._hours.items():
            sums = tuple(map(sum, zip(*rows, strict=True)))
            tenant_id, hour_ms, key_id, model = hour
            day_ms = hour_ms // DAY_MS * DAY_MS
            self._db.execute(_ADD_HOUR, (*hour, *sums))
            self._db.execute(_ADD_DAY, (tenant_id, day_ms, key_id, model, *sums))
        for epoch, counts in self._epochs.items():
            self._db.execute(_ADD_EPOCH, (epoch, *counts))
        if self._hours and self._chain is not None:
            self._db.execute(_SEAL, (_hour(self._last_booked_ms), self._chain))


HOUR_SUMS = (
    *("requests", "prompt_tokens", "cache_read_tokens", "cache_write_tokens", "fresh_tokens"),
    *("output_tokens", "physical_cached_tokens", "recomputed_promised_tokens", "hits"),
    *("ttft_hits", "ttft_hit_ms", "ttft_misses", "ttft_miss_ms"),
    *("charge_micros", "charge_rest", "saved_micros", "saved_rest"),
)
"""Columns of `usage_hours` and `usage_days` that an entry adds to."""


def sums_of(entry: UsageEntry) -> list[int]:
    """What an entry adds to its hour, in the order of `HOUR_SUMS`."""
    is_hit = entry.cache_read_tokens > 0
    has_time, ttft_ms = entry.ttft_ms is not None, entry.ttft_ms or 0
    return [
        *(1, entry.prompt_tokens, entry.cache_read_tokens, entry.cache_write_tokens),
        *(entry.fresh_tokens, entry.output_tokens, entry.physical_cached_tokens),
        *(entry.recomputed_promised_tokens, int(is_hit)),
        *(int(is_hit and has_time), ttft_ms if is_hit else 0),
        *(int(not is_hit and has_time), 0 if is_hit else ttft_ms),
        *divmod(entry.charge_pico, PICO_PER_MICRO),
        *divmod(entry.saved_pico, PICO_PER_MICRO),
    ]


def entry_row(entry: UsageEntry, booked_ms: int) -> tuple[Value, ...]:
    """Its columns, in the order of `ENTRY_FIELDS`."""
    return (
        *(entry.request_id, entry.tenant_id, entry.key_id, entry.model, entry.ending),
        *(entry.started_ms, entry.ended_ms, entry.prompt_tokens, entry.cache_read_tokens),
        *(entry.cache_write_tokens, entry.fresh_tokens, entry.output_tokens),
        *(entry.physical_cached_tokens, _counts(entry.read), _counts(entry.write)),
        *(entry.workspace, entry.tier, entry.dialect, entry.recomputed_promised_tokens),
        *(entry.ttft_ms, entry.epoch, entry.rate_card_id, entry.charge_pico),
        *(entry.saved_pico, booked_ms),
    )


def entry_of(row: Sequence[Any]) -> UsageEntry:
    """The entry of a row of `ENTRY_FIELDS`."""
    facts = dict(zip(ENTRY_FIELDS, row, strict=True))
    del facts["booked_ms"]
    for column, name in (("reads", "read"), ("writes", "write")):
        facts[name] = msgspec.json.decode(str(facts.pop(column)), type=dict[str, int])
    return msgspec.convert(facts, UsageEntry)


def chained(before: bytes, row: Sequence[object]) -> bytes:
    """The chain of a row behind another."""
    return hashlib.sha256(before + msgspec.msgpack.encode(list(row))).digest()


def last_chain(db: Transaction) -> bytes:
    """Where the next entry is chained to. O(log entries)."""
    rows = db.rows("select chain from ledger order by entry_id desc limit 1")
    return bytes(rows[0][0]) if rows else NO_CHAIN


def open_from_ms(db: Transaction) -> int:
    """The first instant of a day that is not closed."""
    return number(db, "select coalesce(max(day) + 1, 0) from closes") * DAY_MS


def number(db: Transaction, sql: str) -> int:
    """The only value of the only row."""
    return int(db.rows(sql)[0][0])


def _charge(card: RateCard, entry: UsageEntry) -> int:
    try:
        return price(card, entry).pico
    except BadPrice as error:
        raise LedgerUnavailable("impossible_entry", error.message) from error


def _check_detail(entry: UsageEntry) -> None:
    """Where classes are known they make up the sum."""
    for detail, total in (
        (entry.read, entry.cache_read_tokens),
        (entry.write, entry.cache_write_tokens),
    ):
        counts = detail.values()
        if detail and (sum(counts) != total or min(counts) < 0):
            message = "Tokens by retention class do not make up their sum."
            raise LedgerUnavailable("impossible_entry", message)


def _counts(detail: Mapping[str, int]) -> str:
    return msgspec.json.encode(detail, order="sorted").decode()


def _hour(at_ms: int) -> int:
    return at_ms // HOUR_MS * HOUR_MS


def _marks(names: Sequence[str]) -> str:
    return ", ".join("?" * len(names))


def _larger(table: str, name: str) -> str:
    """Of the row's value and the one that would have been inserted."""
    mine, new = f"{table}.{name}", f"excluded.{name}"
    return f"case when {mine} >= {new} then {mine} else {new} end"


_HOLD_FIELDS = (
    *("request_id", "tenant_id", "key_id", "model", "started_ms", "workspace", "tier", "dialect"),
    *("epoch", "rate_card_id", "reserved_tokens", "reserved_pico", "booked_ms", "writer_id"),
)
_HOLD = (
    f"insert into holds ({', '.join(_HOLD_FIELDS)})"
    " select ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14"
    " where not exists (select 1 from ledger where request_id = ?1)"
    " on conflict (request_id) do nothing"
)
_FACTS = "rate_card_id, reserved_pico, booked_ms"
_HELD = f"select {_FACTS} from holds where request_id = ?"
_RELEASE = f"delete from holds where request_id = ? returning {_FACTS}"
_SETTLE = (
    f"insert into ledger ({', '.join(ENTRY_FIELDS)}, chain) values ({_marks(ENTRY_FIELDS)}, ?)"
    " on conflict (request_id) do nothing"
)
_ADD_HOUR, _ADD_DAY = (
    f"insert into {table} (tenant_id, {since}, key_id, model, {', '.join(HOUR_SUMS)})"
    f" values (?, ?, ?, ?, {_marks(HOUR_SUMS)})"
    f" on conflict (tenant_id, {since}, key_id, model) do update set "
    + ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in HOUR_SUMS)
    for table, since in (("usage_hours", "hour_ms"), ("usage_days", "day_ms"))
)
_ADD_EPOCH = (
    "insert into epoch_sums values (?, ?, ?, ?, ?, ?) on conflict (epoch) do update set "
    + ", ".join(
        f"{name} = epoch_sums.{name} + excluded.{name}"
        for name in ("entries", "prompt_tokens", "physical_cached_tokens", "output_tokens")
    )
    + f", last_ended_ms = {_larger('epoch_sums', 'last_ended_ms')}"
)
_SEAL = (
    "insert into seals (hour_ms, entry_id, chain)"
    " select ?1, (select max(entry_id) from ledger), ?2 where ?1 is distinct from"
    " (select hour_ms from seals order by number desc limit 1)"
)
_TOTALS = ("prompt_tokens", "cached_tokens", "output_tokens")
_EPOCH = (
    "insert into engine_epochs (epoch, first_seen_ms, last_seen_ms, prompt_tokens, cached_tokens,"
    " output_tokens, metric_prompt_tokens, metric_cached_tokens, metric_output_tokens, is_ended)"
    " values (?1, ?2, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9) on conflict (epoch) do update"
    " set last_seen_ms = excluded.last_seen_ms, "
    + ", ".join(
        f"{name} = {_larger('engine_epochs', name)}"
        for name in ("is_ended", *_TOTALS, *(f"metric_{name}" for name in _TOTALS))
    )
)
