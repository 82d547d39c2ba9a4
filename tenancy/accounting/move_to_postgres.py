"""A ledger moved from a file to a server: every row with its number, its chains and its epochs.

All of it in one transaction of the server's, so that a move that was killed never happened and is
run again. The file's books are checked first, and before it commits every row is read back and
compared, byte by byte: then they are right there too. No more than a page of rows is in memory at
once. The file is read under its own write lock and stays as it was. The command line calls it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from tenancy.accounting.audit import findings_in
from tenancy.errors import StoreError
from tenancy.pricing.charges import PICO_PER_MICRO
from tenancy.storage.copied_rows import copied
from tenancy.storage.hourly_usage import HOURS
from tenancy.storage.interface import Store, Transaction, Value

if TYPE_CHECKING:
    from tenancy.storage.postgres import PostgresStore
    from tenancy.storage.postgres_transaction import PostgresTransaction

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
"""A row of theirs may have megabytes: it is a page."""

_AT_ONCE = 20_000
"""Rows that the server takes in one statement: what it checks at its end takes no second."""

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
                seals = {table: [_seal(page) for page in _pages(here, table)] for table in TABLES}
                with target.snapshot() as there:
                    return _compared(here, there, target.place, seals, back, was_there=True)
            with target.change() as there:
                seals = _fill(here, there, written)
                _count_on(here, there)
                return _compared(here, there, target.place, seals, back)
    finally:
        source.disclaim()


def _has_rows(target: PostgresStore) -> bool:
    tables = (table for table in TABLES if table != "ledger_epochs")  # the first comes with it
    return any(target.query(f"select 1 from {table} limit 1") for table in tables)


def _compared(
    here: Transaction,
    there: PostgresTransaction,
    place: str,
    seals: Mapping[str, Sequence[bytes]],
    stage: _Stage,
    *,
    was_there: bool = False,
) -> MoveResult:
    """Every row as the server has it. Raises StoreError."""
    counts: dict[str, int] = {}
    for table in TABLES:
        back = _ReadBack(_page_of(table), stage)
        there.copy_out(f"select {_listed(_columns(here, table))} {_in_order(table)}", back.take)
        counts[table] = back.rows
        for number, (mine, theirs) in enumerate(zip_longest(seals[table], back.end())):
            if mine != theirs:
                rows = number * back.page + 1, (number + 1) * back.page
                wrong = f"{table} differs among rows {rows[0]} to {rows[1]}"
                if was_there:
                    message = f"{place} is not empty, and is not this ledger: {wrong}."
                    raise StoreError("target_not_empty", message)
                raise StoreError("not_written", f"{place} would not be this ledger: {wrong}.")
    return _totals(there, counts, was_there=was_there)


def _fill(here: Transaction, there: PostgresTransaction, stage: _Stage) -> dict[str, list[bytes]]:
    """Write all rows. Returns the seals of their pages."""
    for table in _FOLLOWED:
        there.execute(f"alter table {table} disable trigger user")
    there.execute("delete from ledger_epochs")
    seals: dict[str, list[bytes]] = {table: [] for table in TABLES}

    def noted(table: str, pages: Iterator[bytes]) -> Iterator[bytes]:
        for page in pages:
            seals[table].append(_seal(page))
            yield page
            stage.add(page.count(b"\n"))

    for table in TABLES:
        pages, columns = _pages(here, table), _columns(here, table)
        for first in pages:
            some = chain([first], islice(pages, _AT_ONCE // _page_of(table) - 1))
            there.copy_in(table, columns, noted(table, some))
    for table in _FOLLOWED:
        there.execute(f"alter table {table} enable trigger user")
    there.execute("update registry_version set version = version + 1")
    return seals


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


class _ReadBack:
    """What the server has: seals of as many lines each as a page has."""

    def __init__(self, page: int, stage: _Stage) -> None:
        self.page = page
        self.rows = 0
        self._stage = stage
        self._seals: list[bytes] = []
        self._seen = hashlib.sha256()

    def take(self, line: bytes) -> None:
        """The next."""
        self._seen.update(line)
        self.rows += 1
        if not self.rows % self.page:
            self._finish(self.page)

    def end(self) -> list[bytes]:
        """All of them."""
        if rest := self.rows % self.page:
            self._finish(rest)
        return self._seals

    def _finish(self, rows: int) -> None:
        self._seals.append(self._seen.digest())
        self._seen = hashlib.sha256()
        self._stage.add(rows)


def _seal(page: bytes) -> bytes:
    return hashlib.sha256(page).digest()


def _pages(here: Transaction, table: str) -> Iterator[bytes]:
    """All rows of a table of the file's, as the server would write them, some at a time."""
    columns, keys = _columns(here, table), _keys(table)
    places = [columns.index(key) for key in keys]
    order = f"{_in_order(table)} limit {_page_of(table)}"
    behind = f"where ({_listed(keys)}) > ({', '.join('?' * len(keys))})"
    sql, values = f"select {_listed(columns)} {order}", list[Value]()
    while page := here.rows(sql, values):
        yield "".join(map(copied, page)).encode()
        values = [page[-1][place] for place in places]
        sql = f"select {_listed(columns)} {_in_order(table, behind)} limit {_page_of(table)}"


def _in_order(table: str, where: str = "") -> str:
    return f"from {table} {where} order by {_listed(_keys(table))}"


def _page_of(table: str) -> int:
    return 1 if table in _LARGE else _PAGE


def _keys(table: str) -> list[str]:
    return [_quoted(name) for name in TABLES[table]]


def _columns(here: Transaction, table: str) -> list[str]:
    """As both databases call them."""
    rows = here.rows("select name from pragma_table_info(?)", (table,))
    return [_quoted(name) for (name,) in rows]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def _quoted(name: str) -> str:
    """One is a word of SQL's."""
    return '"window"' if name == "window" else name


def _totals(there: Transaction, counts: dict[str, int], *, was_there: bool) -> MoveResult:
    micros, rest = there.rows(
        f"select coalesce(sum(charge_micros), 0), coalesce(sum(charge_rest), 0) from {HOURS}"
    )[0]
    last = there.rows("select chain from ledger order by entry_id desc limit 1")
    charged = int(micros) * PICO_PER_MICRO + int(rest)
    return MoveResult(counts, charged, bytes(last[0][0]) if last else b"", was_there)
