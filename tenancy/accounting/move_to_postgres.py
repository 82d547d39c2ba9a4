"""Move a ledger from a file to a server: every row with its number, its chains and its epochs.

The server gets all rows in one transaction, so a move that was killed never happened and can be run
again. The file's books are checked first, and before the commit every row is read back from the
server and compared with the file's. At most a page of rows of each is in memory at once. The file
is read under its own write lock and stays as it was. The command line calls `move`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from tenancy.accounting.audit import findings_in
from tenancy.errors import StoreError
from tenancy.pricing.charges import PICO_PER_MICRO
from tenancy.storage.hourly_usage import HOURS
from tenancy.storage.interface import Row, Store, Transaction, Value, marks, without_nul

if TYPE_CHECKING:
    from tenancy.storage.postgres import PostgresStore, PostgresTransaction

TABLES: dict[str, tuple[str, ...]] = {
    "tenants": ("tenant_id",),
    "keys": ("key_id",),
    "shared_scopes": ("scope_id",),
    "scope_members": ("tenant_id", "workspace"),
    "erasures": ("receipt_id",),
    "cached_contents": ("resource_id",),
    "rate_cards": ("name", "version"),
    "budgets": ("tenant_id", "key_id", "window"),
    "budget_windows": ("tenant_id", "key_id", "window", "starts_ms"),
    "holds": ("request_id",),
    "named_requests": ("tenant_id", "name"),
    "named_sums": ("tenant_id",),
    "ledger": ("entry_id",),
    "adjustments": ("number",),
    "closes": ("day",),
    "seals": ("number",),
    "usage_hours": ("tenant_id", "hour_ms", "key_id", "model"),
    "usage_days": ("tenant_id", "day_ms", "key_id", "model"),
    "storage_hours": ("tenant_id", "hour_ms", "model", "class", "rate_card_id"),
    "engine_epochs": ("epoch",),
    "epoch_sums": ("epoch",),
    "recent_sums": ("tenant_id", "hour_ms", "key_id", "model", "epoch"),
    "ledger_epochs": ("number",),
    "engine_pool": ("one",),
}
"""What is moved, by what names a row, in an order in which nothing refers to what is not there yet;
days are closed when their entries are there."""

COUNTED = ("registry_version", "registry_changes", "money_version", "trunkline_schema", "writers")
"""What each database counts for itself."""

_NUMBERED = {
    "tenants": "tenant_id",
    "keys": "key_id",
    "shared_scopes": "scope_id",
    "ledger": "entry_id",
    "adjustments": "number",
    "seals": "number",
}
_FOLLOWED = ("tenants", "keys", "scope_members", "ledger", "ledger_epochs")
"""The first three would note each row as a change, and each note cost as much as all before it. The
ledger would ask for each entry what is closed, and nothing is. The first epoch is the file's."""

_PAGE = 2_000
_LARGE = ("cached_contents", "named_requests")
"""A row of these tables may have megabytes, so it is a page of its own."""

Stage = Literal["checked", "written", "read back"]
Progress = Callable[[Stage, int, int], None]
"""Told of how many rows how many are: the ledger's are checked, then all are written, and read."""


def unseen(stage: Stage, done: int, total: int) -> None:
    """Nobody asks how far it is."""


class MoveResult(Struct, frozen=True):
    """The server's control totals after it. `was_there`: an earlier run had moved it already."""

    rows: dict[str, int]
    charge_pico: int
    chain: bytes
    was_there: bool = False


def move(source: Store, target: PostgresStore, progress: Progress = unseen) -> MoveResult:
    """Copy what is in `source`, a file, to `target`, a server's empty database. O(rows).

    Raises StoreError with nothing changed: where a server keeps the file, where its books are not
    right, and where there is something else in the target. One that an earlier run has filled with
    the same, and nobody has used since, is left as it is.
    """
    source.claim()
    try:
        with source.change() as here:
            findings = findings_in(here, partial(progress, "checked"))
            if findings:
                raise StoreError("damaged", f"{source.place} is not moved: {findings[0]}.")
            rows = sum(here.rows(f"select count(*) from {table}")[0][0] for table in TABLES)
            written, back = (_Stage(progress, name, rows) for name in ("written", "read back"))
            if _has_rows(target):
                with target.snapshot() as there:
                    return _compared(here, there, target.place, back, was_there=True)
            with target.change() as there:
                _fill(here, there, written)
                _count_on(here, there)
                return _compared(here, there, target.place, back)
    finally:
        source.disclaim()


def _has_rows(target: PostgresStore) -> bool:
    tables = (table for table in TABLES if table != "ledger_epochs")  # the first comes with it
    return any(target.query(f"select 1 from {table} limit 1") for table in tables)


def _compared(
    here: Transaction,
    there: PostgresTransaction,
    place: str,
    stage: _Stage,
    *,
    was_there: bool = False,
) -> MoveResult:
    """Compare every row of the server with the file's. Raises StoreError."""
    counts = dict.fromkeys(TABLES, 0)
    for table in TABLES:
        columns = _columns(here, table)
        pages = zip_longest(_pages(here, table, columns), _pages(there, table, columns))
        for mine, theirs in pages:
            if [tuple(without_nul(row)) for row in mine or ()] != theirs:
                rows = counts[table] + 1, counts[table] + _page_of(table)
                wrong = f"{table} differs among rows {rows[0]} to {rows[1]}"
                if was_there:
                    message = f"{place} is not empty, and is not this ledger: {wrong}."
                    raise StoreError("target_not_empty", message)
                raise StoreError("not_written", f"{place} would not be this ledger: {wrong}.")
            counts[table] += len(theirs)
            stage.add(len(theirs))
    return _totals(there, counts, was_there=was_there)


def _fill(here: Transaction, there: PostgresTransaction, stage: _Stage) -> None:
    """Write all rows."""
    for table in _FOLLOWED:
        there.execute(f"alter table {table} disable trigger user")
    there.execute("delete from ledger_epochs")
    for table in TABLES:
        columns = _columns(here, table)
        for page in _pages(here, table, columns):
            there.copy_rows(table, columns, page)
            stage.add(len(page))
    for table in _FOLLOWED:
        there.execute(f"alter table {table} enable trigger user")
    there.execute("update registry_version set version = version + 1")


def _count_on(here: Transaction, there: Transaction) -> None:
    """What is numbered goes on behind the last number that was ever given."""
    for table, column in _NUMBERED.items():
        last = here.rows(
            f"select max(coalesce((select max({column}) from {table}), 0),"
            " coalesce((select seq from sqlite_sequence where name = ?), 0))",
            (table,),
        )[0][0]
        if last:  # or else the first one given is the first
            there.rows(f"select setval(pg_get_serial_sequence('{table}', '{column}'), {int(last)})")


class _Stage:
    """How far it is."""

    def __init__(self, progress: Progress, name: Stage, total: int) -> None:
        self._told = partial(progress, name)
        self._done, self._total = 0, total

    def add(self, rows: int) -> None:
        """So many more."""
        self._done += rows
        self._told(self._done, self._total)


def _pages(db: Transaction, table: str, columns: Sequence[str]) -> Iterator[list[Row]]:
    """All rows of a table in the order of its key, some at a time."""
    keys, selected = TABLES[table], f"select {_listed(columns)} from {table}"
    places = [columns.index(key) for key in keys]
    in_order = f"order by {_listed(keys)} limit {_page_of(table)}"
    sql, values = f"{selected} {in_order}", list[Value]()
    while page := db.rows(sql, values):
        yield page
        values = [page[-1][place] for place in places]
        sql = f"{selected} where ({_listed(keys)}) > {marks(len(keys))} {in_order}"


def _page_of(table: str) -> int:
    return 1 if table in _LARGE else _PAGE


def _columns(here: Transaction, table: str) -> list[str]:
    """The columns' names, which are the same in both databases."""
    return [name for (name,) in here.rows("select name from pragma_table_info(?)", (table,))]


def _listed(names: Sequence[str]) -> str:
    return ", ".join('"window"' if name == "window" else name for name in names)  # a word of SQL


def _totals(there: Transaction, counts: dict[str, int], *, was_there: bool) -> MoveResult:
    micros, rest = there.rows(
        f"select coalesce(sum(charge_micros), 0), coalesce(sum(charge_rest), 0) from {HOURS}"
    )[0]
    last = there.rows("select chain from ledger order by entry_id desc limit 1")
    charged = int(micros) * PICO_PER_MICRO + int(rest)
    return MoveResult(counts, charged, bytes(last[0][0]) if last else b"", was_there)
