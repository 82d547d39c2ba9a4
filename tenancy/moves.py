"""A ledger moved from a file to a server: every row with its number, its chains and its epochs.

All of it in one transaction of the server's, so that a move that was killed never happened and is
run again. Every row is read back and compared, and the books are checked, before it commits. The
file is read under its own write lock and stays as it was. The command line calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from msgspec import Struct

from tenancy.audit import findings_in
from tenancy.errors import StoreError
from tenancy.store import Row, Store, Transaction, Value

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
_FOLLOWED = ("tenants", "keys", "scope_members")
"""Each of their rows would be noted as a change, and each note cost as much as all before it."""

_PAGE = 2_000


class Moved(Struct, frozen=True):
    """The server's control totals after it. `was_there`: an earlier run had moved it already."""

    rows: dict[str, int]
    charge_pico: int
    chain: bytes
    was_there: bool = False


def move(source: Store, target: Store) -> Moved:
    """Copy what is in `source`, a file, to `target`, a server's empty database. O(rows).

    Raises StoreError with nothing changed: where a server keeps the file, where its books are not
    right, and where there is something else in the target. One that an earlier run has filled with
    the same, and nobody has used since, is left as it is.
    """
    source.claim()
    try:
        with source.change() as here:
            findings = findings_in(here)
            if findings:
                raise StoreError("damaged", f"{source.place} is not moved: {findings[0]}.")
            with target.change() as there:
                return _filled(here, there, target.place)
    finally:
        source.disclaim()


def _filled(here: Transaction, there: Transaction, place: str) -> Moved:
    tables = (table for table in TABLES if table != "ledger_epochs")  # the first comes with it
    if any(there.rows(f"select 1 from {table} limit 1") for table in tables):
        wrong = _difference(here, there)
        if wrong is None:
            return _totals(there, was_there=True)
        message = f"{place} is not empty, and is not this ledger: {wrong}."
        raise StoreError("target_not_empty", message)
    _fill(here, there)
    _count_on(here, there)
    wrong = _difference(here, there) or next(iter(findings_in(there)), None)
    if wrong is not None:
        raise StoreError("not_written", f"{place} would not be this ledger: {wrong}.")
    return _totals(there)


def _fill(here: Transaction, there: Transaction) -> None:
    for table in _FOLLOWED:
        there.execute(f"alter table {table} disable trigger user")
    for table in TABLES:
        columns = _columns(here, table)
        where = "where number > 1" if table == "ledger_epochs" else ""
        given = "overriding system value " if table == "shared_scopes" else ""
        marks = ", ".join("?" * len(columns))
        sql = f"insert into {table} ({', '.join(columns)}) {given}values ({marks})"
        for page in _pages(here, table, columns, where):
            there.execute_many(sql, page)
            there.rows("select 1")  # it is sent, page by page
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


def _difference(here: Transaction, there: Transaction) -> str | None:
    """Where two databases differ first; None if nowhere."""
    for table in TABLES:
        columns = _columns(here, table)
        pages = _pages(here, table, columns), _pages(there, table, columns)
        for number, (mine, theirs) in enumerate(zip_longest(*pages)):
            if mine != theirs:
                return f"{table} differs among rows {number * _PAGE + 1} to {(number + 1) * _PAGE}"
    return None


def _pages(
    db: Transaction, table: str, columns: Sequence[str], where: str = ""
) -> Iterator[list[Row]]:
    """All rows of a table in the order of what names them, some at a time."""
    keys = [_quoted(name) for name in TABLES[table]]
    order, places = ", ".join(keys), [columns.index(key) for key in keys]
    values: Sequence[Value] = ()
    while page := db.rows(
        f"select {', '.join(columns)} from {table} {where} order by {order} limit {_PAGE}", values
    ):
        yield page
        values = [page[-1][place] for place in places]
        where = f"where ({order}) > ({', '.join('?' * len(keys))})"


def _columns(here: Transaction, table: str) -> list[str]:
    """As both databases call them."""
    rows = here.rows("select name from pragma_table_info(?)", (table,))
    return [_quoted(name) for (name,) in rows]


def _quoted(name: str) -> str:
    """One is a word of SQL's."""
    return '"window"' if name == "window" else name


def _totals(there: Transaction, *, was_there: bool = False) -> Moved:
    counts = {table: int(there.rows(f"select count(*) from {table}")[0][0]) for table in TABLES}
    charged = there.rows("select coalesce(sum(charge_pico), 0) from ledger")[0][0]
    last = there.rows("select chain from ledger order by entry_id desc limit 1")
    return Moved(counts, int(charged), bytes(last[0][0]) if last else b"", was_there)
