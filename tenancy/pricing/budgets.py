"""Budgets: how much a tenant or a key may spend in a UTC day or month.

A hold reserves the maximum cost of its request in the same transaction; settlement replaces the
reservation by the charge. So spent + reserved never exceeds a hard budget, however many requests
run concurrently. A soft budget refuses nothing; the API shows when it is exceeded. A request counts
in the window of the instant it is booked at. A key's budget is shared by its line: the keys it was
rotated from and to. The module reads entries only as sums. `ledger.transactions` calls it within
its transactions; the command line and the admin API set and list budgets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from tenancy.errors import BadPrice, BudgetExceeded
from tenancy.pricing.charges import PICO_PER_MICRO
from tenancy.pseudonyms import check_not_deleted
from tenancy.storage.audit_log import Actor, record
from tenancy.storage.hourly_usage import HOURLY_USAGE
from tenancy.storage.interface import Store, Transaction, pad_to_power_of_two, placeholders
from tenancy.types import DAY_MS, LATEST_MS, WallClock

Window = Literal["day", "month"]
MICROS_MAX = 10**18
"""The largest budget, in micro-dollars."""
KEY_ID_MAX = 2**63 - 1
WINDOWS_AT_ONCE = 64
"""Windows that one statement reads."""


class Budget(Struct, frozen=True, forbid_unknown_fields=True):
    """A budget of a tenant (`key_id` 0) or of one of its keys. Amounts are micro-dollars; None is
    no limit."""

    tenant_id: int
    window: Window
    hard_micros: int | None = None
    soft_micros: int | None = None
    key_id: int = 0

    @property
    def scope(self) -> str:
        """The kind of its owner: "key" or "tenant"."""
        return "key" if self.key_id else "tenant"


class BudgetState(Struct, frozen=True):
    """A budget in its present window. Sums are pico-dollars."""

    budget: Budget
    starts_ms: int
    resets_ms: int
    spent_pico: int
    reserved_pico: int
    is_over_soft: bool


Budgets = dict[tuple[int, int], tuple[Budget, ...]]
"""All budgets by tenant id and key id (0 for the tenant's own)."""


def window_of(window: Window, at_ms: int) -> tuple[int, int]:
    """Return the start and end of the window that contains an instant: [start, end), in ms."""
    return _window_of_day(window, min(max(at_ms, 0), LATEST_MS) // DAY_MS)


@lru_cache(maxsize=256)
def _window_of_day(window: Window, number: int) -> tuple[int, int]:
    if window == "day":
        return number * DAY_MS, (number + 1) * DAY_MS
    day = datetime.fromtimestamp(number * DAY_MS / 1000, UTC)
    first = datetime(day.year, day.month, 1, tzinfo=UTC)
    after = datetime(day.year + day.month // 12, day.month % 12 + 1, 1, tzinfo=UTC)
    return int(first.timestamp()) * 1000, int(after.timestamp()) * 1000


def set_budget(
    store: Store, budget: Budget, by: Actor | None = None, keeps: Collection[str] = ()
) -> None:
    """Set, change or remove a budget. Spending earlier in the window counts.

    A budget without limits is removed. `keeps`: limits (`hard_micros`, `soft_micros`) that stay as
    they are. Raises BadPrice for invalid amounts or an unknown owner, and BadName for a deleted
    tenant.
    """
    for name, value in (("hard", budget.hard_micros), ("soft", budget.soft_micros)):
        if value is not None and not 0 <= value <= MICROS_MAX:
            message = (
                f"{name} budget out of range: {value}; expected 0 to {MICROS_MAX} micro-dollars."
            )
            raise BadPrice("bad_budget", message)
    if not 0 <= budget.key_id <= KEY_ID_MAX:
        raise BadPrice("bad_budget", f"Unknown key of this tenant: {budget.key_id}.")
    names, own = ("hard_micros", "soft_micros"), 'where (tenant_id, key_id, "window") = (?, ?, ?)'
    who = (budget.tenant_id, budget.key_id, budget.window)
    with store.change() as db:
        _check_owner(db, budget)
        line = _line_key_ids(db, budget)
        old = [
            dict(zip(names, row, strict=True))
            for key_id in (budget.key_id, *line)
            for row in db.rows(
                f"select hard_micros, soft_micros from budgets {own}",
                (budget.tenant_id, key_id, budget.window),
            )
        ]
        before = old[0] if old else dict.fromkeys(names)
        budget = replace(budget, **{name: before[name] for name in keeps})
        hard, soft = budget.hard_micros, budget.soft_micros
        if hard is not None and soft is not None and soft > hard:
            message = f"soft budget above the hard one: {soft}; expected at most {hard}"
            raise BadPrice("bad_budget", f"{message} micro-dollars.")
        for key_id in line:
            one = (budget.tenant_id, key_id, budget.window)
            # A removed budget may be set again, so its windows are summed anew.
            db.execute(f"delete from budget_windows {own}", one)
            db.execute(f"delete from budgets {own}", one)
        if hard is not None or soft is not None:
            db.execute("insert into budgets values (?, ?, ?, ?, ?)", (*who, hard, soft))
        target = f"budget:{budget.tenant_id}/{budget.key_id}/{budget.window}"
        record(
            db,
            by,
            "budget.set",
            target,
            tenant_id=budget.tenant_id,
            before=before,
            after=dict(zip(names, (hard, soft), strict=True)),
        )


def load_budgets(db: Transaction) -> Budgets:
    """Return the budgets that apply to each tenant and key. O(budgets * keys of a tenant)."""
    found: dict[tuple[int, int], tuple[Budget, ...]] = {}
    for one in list_budgets(db):
        for key_id in _line_key_ids(db, one):
            who = one.tenant_id, key_id
            found[who] = (*found.get(who, ()), one)
    return found


def list_budgets(db: Transaction) -> list[Budget]:
    """Return all budgets."""
    return [
        Budget(tenant_id, window, hard, soft, key_id)
        for tenant_id, key_id, window, hard, soft in db.rows("select * from budgets")
    ]


def budget_states(
    store: Store, clock: WallClock, tenant_ids: Collection[int] | None = None
) -> list[BudgetState]:
    """Return each budget, or those of some tenants, in its present window, as of the last
    commit."""
    now_ms, states = clock(), []
    with store.snapshot() as db:
        for budget in list_budgets(db):
            if tenant_ids is None or budget.tenant_id in tenant_ids:
                start_ms, end_ms = window_of(budget.window, now_ms)
                key = (budget.tenant_id, budget.key_id, budget.window, start_ms)
                kept = _read_windows(db, [key]).get(key)
                spent, reserved = kept or sum_window(db, budget, start_ms, end_ms)
                soft = budget.soft_micros
                over = soft is not None and spent > soft * PICO_PER_MICRO
                states.append(BudgetState(budget, start_ms, end_ms, spent, reserved, over))
    return sorted(states, key=lambda s: (s.budget.tenant_id, s.budget.key_id, s.budget.window))


class Spending(Struct):
    """The sums of one budget's window within a transaction, in pico-dollars."""

    budget: Budget
    starts_ms: int
    spent: int
    reserved: int


_WindowKey = tuple[int, int, Window, int]
"""The key of a window: tenant id, key id and kind of its budget, and its start."""

BudgetDay = tuple[int, int, int]
"""A tenant id, a key id, and the number of the day at which a request is booked."""


class BudgetWindows:
    """The windows that one transaction changes: read together, written together at its end."""

    def __init__(self, db: Transaction, budgets: Budgets) -> None:
        self._db = db
        self._budgets = budgets
        self._windows: dict[_WindowKey, Spending] = {}
        self._of: dict[BudgetDay, list[Spending]] = {}

    def read(self, whose: Iterable[BudgetDay]) -> None:
        """Read the windows of these, before the transaction writes anything that they sum.

        One statement for every 64 windows, and two for each window without a row.
        """
        keys: dict[BudgetDay, list[_WindowKey]] = {}
        new: dict[_WindowKey, Budget] = {}
        for one in set(whose) - self._of.keys():
            tenant_id, key_id, day = one
            own = self._budgets.get((tenant_id, key_id), ()) if key_id else ()
            keys[one] = []
            for budget in (*self._budgets.get((tenant_id, 0), ()), *own):
                start_ms, _ = window_of(budget.window, day * DAY_MS)
                key = (budget.tenant_id, budget.key_id, budget.window, start_ms)
                keys[one].append(key)
                if key not in self._windows:
                    new[key] = budget
        kept = _read_windows(self._db, list(new))
        for key, budget in new.items():
            window = window_of(budget.window, key[3])
            spent, reserved = kept.get(key) or sum_window(self._db, budget, *window)
            self._windows[key] = Spending(budget, key[3], spent, reserved)
        for one, its in keys.items():
            self._of[one] = [self._windows[key] for key in its]

    def of(self, tenant_id: int, key_id: int, at_ms: int) -> Sequence[Spending]:
        """Return the windows that contain this instant."""
        if not self._budgets:
            return ()
        whose = (tenant_id, key_id, at_ms // DAY_MS)
        if whose not in self._of:
            self.read([whose])
        return self._of[whose]

    def finish(self) -> None:
        """Write all windows."""
        if not self._windows:
            return
        rows = [
            (
                *key,
                *divmod(window.spent, PICO_PER_MICRO),
                *divmod(window.reserved, PICO_PER_MICRO),
            )
            for key, window in self._windows.items()
        ]
        self._db.execute_many(_WRITE_WINDOWS, rows)


_SUMS = ("spent_micros", "spent_rest", "reserved_micros", "reserved_rest")
_WRITE_WINDOWS = (
    "insert into budget_windows values (?, ?, ?, ?, ?, ?, ?, ?)"
    ' on conflict (tenant_id, key_id, "window", starts_ms) do update set '
    + ", ".join(f"{name} = excluded.{name}" for name in _SUMS)
)


def find_exceeded(spending: Sequence[Spending], pico: int, at_ms: int) -> BudgetExceeded | None:
    """Return the refusal if reserving `pico` would exceed a hard budget. Reserves nothing."""
    for window in spending:
        budget = window.budget
        if budget.hard_micros is not None:
            hard = budget.hard_micros * PICO_PER_MICRO
            if window.spent + window.reserved + pico > hard:
                resets_ms = window_of(budget.window, window.starts_ms)[1]
                return BudgetExceeded(
                    scope=budget.scope,
                    window=budget.window,
                    hard=hard,
                    spent=window.spent,
                    reserved=window.reserved,
                    resets_ms=resets_ms,
                    retry_after_s=(resets_ms - at_ms) / 1000 if pico <= hard else None,
                )
    return None


def add_spending(spending: Sequence[Spending], *, spent: int, reserved: int) -> None:
    """Add to the sums of these windows; either amount may be negative."""
    for window in spending:
        window.spent += spent
        window.reserved += reserved


def sum_window(db: Transaction, budget: Budget, start_ms: int, end_ms: int) -> tuple[int, int]:
    """Return (spent, reserved) of a window, summed from hourly usage and open holds."""
    line = _line_key_ids(db, budget)
    places = ", ".join(f"?{number}" for number in range(4, 4 + len(line)))
    whose = f"tenant_id = ?1 and key_id in ({places})" if budget.key_id else "tenant_id = ?1"
    values = (budget.tenant_id, start_ms, end_ms, *(line if budget.key_id else ()))
    spent = db.rows(
        "select coalesce(sum(charge_micros), 0), coalesce(sum(charge_rest), 0)"
        f" from {HOURLY_USAGE} where {whose} and hour_ms >= ?2 and hour_ms < ?3",
        values,
    )[0]
    held = db.rows(
        "select coalesce(sum(reserved_pico / 1000000), 0), coalesce(sum(reserved_pico % 1000000),"
        f" 0) from holds where {whose} and booked_ms >= ?2 and booked_ms < ?3",
        values,
    )[0]
    return spent[0] * PICO_PER_MICRO + spent[1], held[0] * PICO_PER_MICRO + held[1]


def _read_windows(db: Transaction, keys: Sequence[_WindowKey]) -> dict[_WindowKey, tuple[int, int]]:
    """Return (spent, reserved) of the windows that have a row."""
    found: dict[_WindowKey, tuple[int, int]] = {}
    for first in range(0, len(keys), WINDOWS_AT_ONCE):
        asked = pad_to_power_of_two(keys[first : first + WINDOWS_AT_ONCE])
        rows = db.rows(
            f'select tenant_id, key_id, "window", starts_ms, {", ".join(_SUMS)} from budget_windows'
            ' where (tenant_id, key_id, "window", starts_ms)'
            f" in (values {', '.join([placeholders(4)] * len(asked))})",
            [value for key in asked for value in key],
        )
        for *key, a, b, c, d in rows:
            pico = (a * PICO_PER_MICRO + b, c * PICO_PER_MICRO + d)
            found[key[0], key[1], key[2], key[3]] = pico
    return found


def _line_key_ids(db: Transaction, budget: Budget) -> list[int]:
    """Return the ids of the keys in the budget's line; [0] for a tenant's budget."""
    if not budget.key_id:
        return [0]
    rows = db.rows(
        "select key_id from keys where tenant_id = ?1 and coalesce(line_id, key_id) ="
        " (select coalesce(line_id, key_id) from keys where key_id = ?2)",
        (budget.tenant_id, budget.key_id),
    )
    return [key_id for (key_id,) in rows]


def _check_owner(db: Transaction, budget: Budget) -> None:
    names = db.rows("select name from tenants where tenant_id = ?", (budget.tenant_id,))
    if not names:
        raise BadPrice("bad_budget", f"Unknown tenant id: {budget.tenant_id}.")
    check_not_deleted(names[0][0])
    if budget.key_id:
        key = (budget.key_id, budget.tenant_id)
        if not db.rows("select 1 from keys where (key_id, tenant_id) = (?, ?)", key):
            raise BadPrice("bad_budget", f"Unknown key of this tenant: {budget.key_id}.")
