"""What is done in a file all at once, from the lock on its writer to the commit.

Written out, without generators: each answer waits for one of these, and two context managers made
of generators were a tenth of all that Python does for it. It knows no file and no tables;
`sqlite_store` says which connection writes, and what its errors are called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import apsw

from tenancy.errors import StoreError
from tenancy.storage.interface import Row, Value


class SqliteTransaction:
    """Between a `begin` that has been made and its end."""

    __slots__ = ("_connection", "as_of")

    def __init__(self, connection: apsw.Connection) -> None:
        """`as_of`: a connection's pager counts all commits that it has seen, its own and those of
        others; another connection's begins anew."""
        self._connection = connection
        self.as_of: object = (connection, connection.data_version())

    def commit(self) -> None:
        """Raises apsw.Error, with all of it undone."""
        try:
            self._connection.execute("commit")
        except BaseException:
            self.roll_back()
            raise
        self.as_of = (self._connection, self._connection.data_version())

    def roll_back(self) -> None:
        """Some errors have done it."""
        if self._connection.in_transaction:
            self._connection.execute("rollback")

    def execute(self, sql: str, values: Sequence[Value] = ()) -> int:
        """See `Transaction`."""
        self._connection.execute(sql, tuple(values)).fetchall()
        return int(self._connection.changes())

    def execute_many(self, sql: str, rows: Sequence[Sequence[Value]]) -> None:
        """See `Transaction`."""
        if rows:
            self._connection.executemany(sql, rows)

    def rows(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """See `Transaction`."""
        return list(self._connection.execute(sql, tuple(values)))


class Change:
    """A transaction with its lock, for one `with`."""

    __slots__ = ("_count", "_db", "_lock", "_named", "_writer")

    def __init__(
        self,
        lock: AbstractContextManager[object],
        writer: Callable[[], apsw.Connection],
        named: Callable[[apsw.Error], StoreError],
        count: Callable[[], None],
    ) -> None:
        """`writer`: asked for under the lock. `named`: what an error is called outside. `count`:
        told of the commit, under the lock."""
        self._lock, self._writer, self._named, self._count = lock, writer, named, count

    def __enter__(self) -> SqliteTransaction:
        self._lock.__enter__()
        try:
            writer = self._writer()
            writer.execute("begin immediate")
            self._db = SqliteTransaction(writer)
        except BaseException as error:
            self._lock.__exit__(None, None, None)
            if isinstance(error, apsw.Error):
                raise self._named(error) from error
            raise
        return self._db

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._db.commit()
                self._count()
            else:
                self._db.roll_back()
                if isinstance(error, apsw.Error):
                    raise error
        except apsw.Error as failure:
            raise self._named(failure) from failure
        finally:
            self._lock.__exit__(None, None, None)
