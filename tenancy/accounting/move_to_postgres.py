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
from tenancy.storage.hourly_usage import HOURLY_USAGE
from tenancy.storage.interface import Row, Store, Transaction, Value, placeholders, without_nul

if TYPE_CHECKING:
    from tenancy.storage.postgres import PostgresStore, PostgresTransaction

TABLES: dict[str, tuple[str, ...]] = {
    "tenants": ("tenant_id",),
    "keys": ("key_id",),
    "shared_scopes": ("scope_id",),
    "scope_members": ("tenant_id", "workspace"),
    "erasures": ("receipt_id",),
    "erased_until": ("replica",),
    "cached_contents": ("resource_id",),
    "stored_responses": ("response_id",),
    "conversations": ("conversation_id",),
    "conversation_items": ("conversation_id", "position"),
    "stored_sums": ("tenant_id",),
    "written_prefixes": ("gateway", "namespace", "digest", "class"),
    "findings": ("tenant_id", "hour_ms", "model", "cause", "place"),
    "prompt_origins": ("gateway", "tenant_id"),
    "request_causes": ("request_id",),
    "audit_log": ("audit_id",),
    "request_users": ("request_id",),
    "webhook_deliveries": ("event_id", "endpoint"),
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
    "storage_meters": ("epoch",),
    "storage_readings": ("epoch", "tenant_id", "model", "class"),
    "engine_epochs": ("epoch", "gateway"),
    "epoch_corrections": ("epoch", "gateway"),
    "epoch_sums": ("epoch",),
    "recent_sums": ("tenant_id", "hour_ms", "key_id", "model", "epoch"),
    "ledger_epochs": ("number",),
    "engine_pool": ("one",),
    "history_samples": ("tenant_id", "span_ms", "at_ms", "gateway"),
    "request_records": ("request_id",),
}
"""The moved tables with their primary keys, in an order in which references already exist.

`closes` follows `ledger` and `adjustments`, because closed days refuse rows.
"""

COUNTED = ("registry_version", "registry_changes", "money_version", "trunkline_version", "writers")
"""Tables that each database keeps for itself and that are not moved."""

_NUMBERED = {
    "tenants": "tenant_id",
    "keys": "key_id",
    "shared_scopes": "scope_id",
    "ledger": "entry_id",
    "adjustments": "number",
    "seals": "number",
    "audit_log": "audit_id",
}
"""Tables with generated ids, and the columns of these ids."""
_WITH_TRIGGERS = ("tenants", "keys", "scope_members", "ledger", "ledger_epochs")
"""Tables that have their triggers disabled during the move.

The first three would record each row as a change, at a cost that grows with every row. The ledger's
would look up closed days for each entry, and there are none yet. `ledger_epochs` begins with the
file's first epoch.
"""

_PAGE = 2_000
"""Rows of one page."""
_LARGE_ROW_TABLES = (
    "cached_contents",
    "named_requests",
    "stored_responses",
    "conversation_items",
)
"""Tables with rows of up to megabytes, so a page has one row."""

Stage = Literal["checked", "written", "read back"]
Progress = Callable[[Stage, int, int], None]
"""A callback that receives the stage, the rows done and the total of rows.

The stages are: entries checked, all rows written, all rows read back.
"""


def ignore_stage_progress(stage: Stage, done: int, total: int) -> None:
    """Do nothing: the default progress callback."""


class MoveResult(Struct, frozen=True):
    """The server's control totals after the move."""

    rows: dict[str, int]
    charge_pico: int
    chain: bytes
    was_there: bool
    """An earlier run had moved everything."""


def move(
    source: Store, target: PostgresStore, progress: Progress = ignore_stage_progress
) -> MoveResult:
    """Copy a ledger file to an empty PostgreSQL database. O(rows).

    A target that an earlier run filled and that is still equal is left unchanged. Raises StoreError
    with nothing changed: if a server uses the file, its books are wrong, or the target has other
    rows.
    """
    source.claim()
    try:
        with source.change() as source_db:
            findings = findings_in(source_db, partial(progress, "checked"))
            if findings:
                raise StoreError("damaged", f"Ledger is damaged: {source.place}: {findings[0]}.")
            rows = sum(source_db.rows(f"select count(*) from {table}")[0][0] for table in TABLES)
            written, back = (_Stage(progress, name, rows) for name in ("written", "read back"))
            if _has_rows(target):
                with target.snapshot() as target_db:
                    return _compare(source_db, target_db, target.place, back, was_there=True)
            with target.change() as target_db:
                _fill(source_db, target_db, written)
                _set_sequences(source_db, target_db)
                return _compare(source_db, target_db, target.place, back)
    finally:
        source.release_claim()


def _has_rows(target: PostgresStore) -> bool:
    tables = (
        table for table in TABLES if table != "ledger_epochs"
    )  # the schema creates the first epoch
    return any(target.query(f"select 1 from {table} limit 1") for table in tables)


def _compare(
    source_db: Transaction,
    target_db: PostgresTransaction,
    place: str,
    stage: _Stage,
    *,
    was_there: bool = False,
) -> MoveResult:
    """Compare every row of the server with the file's. Raises StoreError."""
    counts = dict.fromkeys(TABLES, 0)
    for table in TABLES:
        columns = _columns(source_db, table)
        pages = zip_longest(_pages(source_db, table, columns), _pages(target_db, table, columns))
        for mine, theirs in pages:
            if [tuple(without_nul(row)) for row in mine or ()] != theirs:
                rows = counts[table] + 1, counts[table] + _page_rows(table)
                wrong = f"{table} differs among rows {rows[0]} to {rows[1]}"
                if was_there:
                    message = f"Target is not empty and differs from this ledger: {place}: {wrong}."
                    raise StoreError("target_not_empty", message)
                raise StoreError(
                    "not_written",
                    f"Target differs from this ledger after the move: {place}: {wrong}.",
                )
            counts[table] += len(theirs)
            stage.add(len(theirs))
    return _totals(target_db, counts, was_there=was_there)


def _fill(source_db: Transaction, target_db: PostgresTransaction, stage: _Stage) -> None:
    """Write all rows."""
    for table in _WITH_TRIGGERS:
        target_db.execute(f"alter table {table} disable trigger user")
    target_db.execute("delete from ledger_epochs")
    for table in TABLES:
        columns = _columns(source_db, table)
        for page in _pages(source_db, table, columns):
            target_db.copy_rows(table, columns, page)
            stage.add(len(page))
    for table in _WITH_TRIGGERS:
        target_db.execute(f"alter table {table} enable trigger user")
    target_db.execute("update registry_version set version = version + 1")


def _set_sequences(source_db: Transaction, target_db: Transaction) -> None:
    """Set the server's sequences to the last ids that the file has generated."""
    for table, column in _NUMBERED.items():
        last = source_db.rows(
            f"select max(coalesce((select max({column}) from {table}), 0),"
            " coalesce((select seq from sqlite_sequence where name = ?), 0))",
            (table,),
        )[0][0]
        if last:  # otherwise the sequence starts at 1
            target_db.rows(
                f"select setval(pg_get_serial_sequence('{table}', '{column}'), {int(last)})"
            )


class _Stage:
    """The progress of one stage."""

    def __init__(self, progress: Progress, name: Stage, total: int) -> None:
        self._report = partial(progress, name)
        self._done, self._total = 0, total

    def add(self, rows: int) -> None:
        """Report this many more rows."""
        self._done += rows
        self._report(self._done, self._total)


def _pages(db: Transaction, table: str, columns: Sequence[str]) -> Iterator[list[Row]]:
    """Yield all rows of a table in primary key order, in pages."""
    keys, selected = TABLES[table], f"select {_column_list(columns)} from {table}"
    places = [columns.index(key) for key in keys]
    in_order = f"order by {_column_list(keys)} limit {_page_rows(table)}"
    sql, values = f"{selected} {in_order}", list[Value]()
    while page := db.rows(sql, values):
        yield page
        values = [page[-1][place] for place in places]
        sql = f"{selected} where ({_column_list(keys)}) > {placeholders(len(keys))} {in_order}"


def _page_rows(table: str) -> int:
    return 1 if table in _LARGE_ROW_TABLES else _PAGE


def _columns(source_db: Transaction, table: str) -> list[str]:
    """Return the column names, which are the same in both databases."""
    return [name for (name,) in source_db.rows("select name from pragma_table_info(?)", (table,))]


def _column_list(names: Sequence[str]) -> str:
    return ", ".join('"window"' if name == "window" else name for name in names)  # a word of SQL


def _totals(target_db: Transaction, counts: dict[str, int], *, was_there: bool) -> MoveResult:
    micros, rest = target_db.rows(
        f"select coalesce(sum(charge_micros), 0), coalesce(sum(charge_rest), 0) from {HOURLY_USAGE}"
    )[0]
    last = target_db.rows("select chain from ledger order by entry_id desc limit 1")
    charged = int(micros) * PICO_PER_MICRO + int(rest)
    return MoveResult(counts, charged, bytes(last[0][0]) if last else b"", was_there)
