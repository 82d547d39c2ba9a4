"""The interface of a database, which a SQLite file and a PostgreSQL server implement.

A `Store` is an open database, a `Transaction` a set of statements that succeed or fail together.
`tenancy.storage.sqlite` has a store in a file, `tenancy.storage.postgres` one on a server;
`tenancy.storage.backends` opens the one that a setting names.

Statements are written once, in the SQL that both databases understand: values are bound to `?`, or
to `?1`, `?2` if one is used twice; a conflict names its columns, and an upsert names the table of
the value it adds to; a value that may be null is cast where it is compared with null. Integers have
64 bits. Text with a NUL character is stored `without_nul` on a server, which cannot store NUL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, Protocol, TypeVar

Value = None | int | float | str | bytes
Row = tuple[Any, ...]
T = TypeVar("T")
RowReader = Callable[[str, Sequence[Value]], list[Row]]
"""`Store.query`, or `Transaction.rows`."""
ALL_ROWS = 2**53
"""The limit of a query that has none."""


class Transaction(Protocol):
    """Statements that succeed or fail together. A failed statement ends the transaction, and
    becomes a StoreError if the transaction was opened."""

    @property
    def as_of(self) -> object:
        """Identify the commit that the transaction sees or, once it has ended, has made.

        An equal value on the same store means that no writer has changed anything since. None if
        unknown.
        """

    def execute(self, sql: str, values: Sequence[Value] = ()) -> int:
        """Run one statement. Returns the number of rows it changed."""

    def execute_many(self, sql: str, rows: Sequence[Sequence[Value]]) -> None:
        """Run one statement for each row, in order, before any later statement."""

    def rows(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Return all rows of one statement."""


class Store(Protocol):
    """An open database. Thread-safe."""

    @property
    def place(self) -> str:
        """Name the database for messages, without a secret."""

    @property
    def is_local(self) -> bool:
        """True if a query costs microseconds, so that an event loop may run one."""

    @property
    def changes(self) -> int:
        """Number of commits of this object: it grows before the caller of a commit continues."""

    def query(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Return the rows of one statement, as of the last commit. Waits for no writer. Raises
        StoreError."""

    def change(self) -> AbstractContextManager[Transaction]:
        """Open a transaction that is isolated from others, and durable once it has ended.

        Raises StoreError: ConstraintBroken, or StoreBusy after five seconds behind other writers,
        with nothing changed; `outcome_unknown` if the commit may have been made. Any other
        exception inside rolls back and propagates.
        """

    def snapshot(self) -> AbstractContextManager[Transaction]:
        """Open a read-only transaction as of one commit. It delays no writer and waits for none,
        however long it takes. Raises StoreError."""

    def registry_version(self) -> int:
        """Return a number that differs after any change of tenants or keys, by any process. Raises
        StoreError."""

    def claim(self, successor_of: int = 0, patience_s: float = 0.0) -> int:
        """Become the writer of holds, until `release_claim` or the end of the process.

        Returns the writer's id.

        `successor_of`: id of a dead writer, whose holds this writer takes over. Raises StoreError,
        also if the database allows one writer and another still writes after `patience_s`.
        """

    def release_claim(self) -> None:
        """Give up the claim on holds. Safe to repeat."""

    def is_writer_gone(self, writer_id: int) -> bool:
        """Return whether the writer of this id has ended. Raises StoreError."""

    def hold_gateway(self, name: str) -> bool:
        """Hold a gateway's name until the store is closed or the process ends. Returns whether it
        does; False while another process holds it.

        Call it again from time to time: a connection that was lost is opened again. A file holds
        none, as `claim` admits one gateway. Raises StoreError.
        """

    def is_gateway_held(self, name: str) -> bool:
        """Return whether any process holds a gateway's name. Raises StoreError."""

    def save_marker(self, marker: bytes) -> None:
        """Keep a marker beside the database and not in it, so that a replaced database has another
        one.

        Does nothing on a server. Raises OSError.
        """

    def load_marker(self) -> bytes | None:
        """Return the last marker; None if none was kept, or on a server."""

    def keep_room(self) -> None:
        """Hold some room on the disk for deletions, if there is so much. Nothing on a server."""

    def make_room(self) -> None:
        """Give the room that was held to a deletion, if the disk has no other. A deletion is
        written to the log before it frees anything. Nothing on a server."""

    def open_another(self) -> Store:
        """Open a second store of the same database. Raises StoreError."""

    def reopen(self) -> None:
        """Close, open and check the database, after an error that was not the statement's own.

        Raises StoreError.
        """

    def close(self) -> None:
        """Close the database. Safe to repeat."""


@lru_cache(maxsize=256)
def placeholders(count: int) -> str:
    """Return `(?, ?, ?)`, for a row or after `in`."""
    return f"({', '.join('?' * count)})"


def pad_to_power_of_two(values: Sequence[T]) -> list[T]:
    """Return the values, the last one repeated up to a power of two: statements then have few
    lengths."""
    if len(values) == 1:
        return list(values)
    missing = (1 << (len(values) - 1).bit_length()) - len(values)
    return [*values, *[values[-1]] * missing]


def without_nul(values: Sequence[Value]) -> Sequence[Value]:
    """Return values with U+FFFD, the replacement character, for each NUL in their text."""
    if any(type(value) is str and "\0" in value for value in values):
        return [v.replace("\0", "\ufffd") if isinstance(v, str) else v for v in values]
    return values
