"""What a hold, an entry and a storage reading change in the database, within one transaction.

An entry is priced by its hold's rate card, chained to the one before, added to its hour's sums and
to its budgets, and its hold goes: all of it or nothing. It opens no transaction and starts no
thread; `ledger` calls it on the writer's connection, with prices and budgets that it keeps here.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from tenancy import budgets
from tenancy.entries import Page, hour_of, larger, number
from tenancy.errors import BadPrice, LedgerUnavailable, TenancyError
from tenancy.pricing import FREE_CARD, RateCard, most, price, savings
from tenancy.rate_cards import SELECT, CardBook, read_card
from tenancy.store import Transaction
from tenancy.types import FREE, UsageEntry


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
        page, windows = Page(db), budgets.BudgetWindows(db)
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
        self, db: Transaction, hold: Hold, page: Page, windows: budgets.BudgetWindows
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
        self, db: Transaction, entry: UsageEntry, page: Page, windows: budgets.BudgetWindows
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

    def _store_reading(self, db: Transaction, reading: StorageReading, page: Page) -> None:
        booked_ms = max(reading.at_ms, page.open_from_ms)
        card = self._cards.in_force(reading.model, reading.tier, booked_ms)
        db.execute(
            "insert into storage_hours (tenant_id, hour_ms, model, class, rate_card_id,"
            " token_seconds) values (?, ?, ?, ?, ?, ?)"
            " on conflict (tenant_id, hour_ms, model, class, rate_card_id) do update"
            " set token_seconds = storage_hours.token_seconds + excluded.token_seconds",
            (
                *(reading.tenant_id, hour_of(booked_ms), reading.model, reading.retention),
                *(card.rate_card_id, reading.token_seconds),
            ),
        )


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
_TOTALS = ("prompt_tokens", "cached_tokens", "output_tokens")
_EPOCH = (
    "insert into engine_epochs (epoch, first_seen_ms, last_seen_ms, prompt_tokens, cached_tokens,"
    " output_tokens, metric_prompt_tokens, metric_cached_tokens, metric_output_tokens, is_ended)"
    " values (?1, ?2, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9) on conflict (epoch) do update"
    " set last_seen_ms = excluded.last_seen_ms, "
    + ", ".join(
        f"{name} = {larger('engine_epochs', name)}"
        for name in ("is_ended", *_TOTALS, *(f"metric_{name}" for name in _TOTALS))
    )
)
