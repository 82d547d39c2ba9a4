"""What is done on a server all at once, in few round trips.

Statements that nobody waits for are sent with what comes next, the last of them with the commit.
Each may fail: then those behind it are not run, the commit neither. It knows no locks and no
tables; `postgres_store` begins, commits and rolls back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import msgspec

from tenancy.storage.copied_rows import NO_SIGN
from tenancy.storage.interface import Row, Value
from tenancy.storage.postgres_connection import Link, Statement

_INSERT = re.compile(r"insert into (\w+) \(([\w, ]+)\) values \(\?(?:, \?)*\)")
"""Plain ones: what conflicts, or is put together, is run row by row."""

_CHANGE = re.compile(r"(?:update (\w+) set (\w+) = \?|delete from (\w+)) where (\w+) = \?")
"""Of what one column names: a value for another, or nothing more."""


class PostgresTransaction:
    """Between a `begin` that has been made and `finish`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: list[Statement] = []

    @property
    def as_of(self) -> None:
        """See `Transaction`: others write, too."""

    def execute(self, sql: str, values: Sequence[Value] = ()) -> int:
        """See `Transaction`."""
        if self._waiting:
            self._link.run_all(self._taken())
        return self._link.run(sql, values)[1]

    def execute_many(self, sql: str, rows: Sequence[Sequence[Value]]) -> None:
        """See `Transaction`: no round trip."""
        if len(rows) > 1 and (plain := _INSERT.fullmatch(sql)):
            self._waiting.append(_inserted(plain[1], plain[2].split(", "), rows))
        elif len(rows) > 1 and (change := _CHANGE.fullmatch(sql)):
            self._waiting.append(_changed(change, rows))
        else:
            self._waiting += [(sql, values) for values in rows]

    def rows(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """See `Transaction`."""
        return self._link.run_all([*self._taken(), (sql, values)])

    def copy_in(self, table: str, columns: Sequence[str], lines: Iterable[bytes]) -> None:
        """Many rows, as `copied` writes them: a third of the time of inserts."""
        self.rows("select 1")  # what was to come before
        self._link.copy_in(f"copy {table} ({', '.join(columns)}) from stdin", lines)

    def copy_out(self, query: str, take: Callable[[bytes], None]) -> None:
        """The rows of a query as `copied` would write them, each a line, none of them kept."""
        self._link.copy_out(f"copy ({query}) to stdout", take)

    def finish(self) -> None:
        """Commit, unless something that waited fails."""
        self._link.run_all(self._taken(), ending="commit")

    def _taken(self) -> list[Statement]:
        taken, self._waiting = self._waiting, []
        return taken


def _inserted(table: str, columns: Sequence[str], rows: Sequence[Sequence[Value]]) -> Statement:
    """One insert for many rows: half the server's time and a third of ours, against a statement
    for each."""
    names = ", ".join(columns)
    given, value = _given(table, columns, rows)
    return f"insert into {table} ({names}) select {names} from {given}", (value,)


def _changed(change: re.Match[str], rows: Sequence[Sequence[Value]]) -> Statement:
    """One statement for many rows that are named: a third of the time. Where one is named twice its
    last row holds, as if each were run."""
    updated, column, deleted, key = change.groups()
    table, columns = updated or deleted, (column, key) if updated else (key,)
    last = {row[-1]: row for row in rows}
    given, value = _given(table, columns, list(last.values()))
    if updated:
        what = f"update {table} set {column} = given.{column} from {given}"
    else:
        what = f"delete from {table} using {given}"
    return f"{what} where {table}.{key} = given.{key}", (value,)


def _given(
    table: str, columns: Sequence[str], rows: Sequence[Sequence[Value]]
) -> tuple[str, Value]:
    """Rows as a table called `given`: they go as one value, and the table whose rows they are knows
    what kinds its columns are."""
    objects = [dict(zip(columns, map(_in_json, row), strict=True)) for row in rows]
    text = msgspec.json.encode(objects).decode()
    return f"json_populate_recordset(null::{table}, ?::json) as given", text


def _in_json(value: Value) -> Value:
    """As it is read from there. No text has a NUL in it, as elsewhere on a server."""
    match value:
        case str():
            return value.replace("\0", NO_SIGN) if "\0" in value else value
        case bytes():
            return f"\\x{value.hex()}"
        case _:
            return value
