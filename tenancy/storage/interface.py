"""What tenancy asks of a database, whichever it is.

A `Store` is an open database, a `Transaction` what is done in it all at once. `sqlite_store` has
one in a file, `postgres_store` on a server; `backends` opens the one that a setting names.

Statements are written once, in the SQL that both understand: values are bound to `?`, or to `?1`,
`?2` where one stands twice; a conflict names its columns, and what is added to them its table; a
value that may be null is cast where it is asked whether it is. Integers have 64 bits. Text with a
NUL character is stored `without_nul` on a server, which cannot store NUL.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, Protocol, TypeVar

Value = None | int | float | str | bytes
Row = tuple[Any, ...]
T = TypeVar("T")


class Transaction(Protocol):
    """Statements that happen all or not at all. What goes wrong in one ends it, and becomes a
    StoreError where it was opened."""

    @property
    def as_of(self) -> object:
        """Which commit it saw; when it has ended, which it made. An equal value, on the same store,
        says that nobody has changed anything since. None where that is not known."""

    def execute(self, sql: str, values: Sequence[Value] = ()) -> int:
        """Run one statement. Returns how many rows it changed."""

    def execute_many(self, sql: str, rows: Sequence[Sequence[Value]]) -> None:
        """Run one statement for each of these rows, in order, before whatever is asked next."""

    def rows(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """All rows of one statement."""


class Store(Protocol):
    """An open database. Thread-safe."""

    @property
    def place(self) -> str:
        """Which it is, for messages: no secret is in it."""

    @property
    def is_near(self) -> bool:
        """Do questions cost microseconds, so that they may be asked on an event loop?"""

    @property
    def changes(self) -> int:
        """How many this object has committed: it grows before whoever made one is told."""

    def query(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Rows of one statement, as of the last commit. Waits for no writer. Raises StoreError."""

    def change(self) -> AbstractContextManager[Transaction]:
        """A transaction that nobody else's interleaves with, durable when it has ended.

        Raises StoreError: ConstraintBroken, or StoreBusy after five seconds behind others, with
        nothing changed; `outcome_unknown` where it may have been. What else is raised inside rolls
        back and goes on.
        """

    def snapshot(self) -> AbstractContextManager[Transaction]:
        """Reads only, all as of one commit: nobody waits for it, and it for nobody, however long
        it takes. Raises StoreError."""

    def registry_version(self) -> int:
        """Differs after any change of tenants or keys, by whatever process. Raises StoreError."""

    def claim(self, successor_of: int = 0, patience_s: float = 0.0) -> int:
        """Keep holds here, until `disclaim` or the end of the process, however it ends: the number
        to write them with. `successor_of`: the number of one that is dead, whose holds these are
        from now on. Raises StoreError, also where only one may and another still does after
        `patience_s`."""

    def disclaim(self) -> None:
        """Keep none. Safe to call twice."""

    def is_over(self, writer_id: int) -> bool:
        """Has who kept holds by this number gone? Raises StoreError."""

    def remember(self, point: bytes) -> None:
        """Keep this beside the database and not in it: what takes its place has another. Nothing on
        a server. Raises OSError."""

    def recall(self) -> bytes | None:
        """What was kept so last; None where there is nothing, or no place for it."""

    def another(self) -> Store:
        """A second store of the same database. Raises StoreError."""

    def reopen(self) -> None:
        """After an error that was none of the statement's: close, open, and check what can be
        before going on. Raises StoreError."""

    def close(self) -> None:
        """Close it. Safe to call twice."""


@lru_cache(maxsize=256)
def marks(count: int) -> str:
    """`(?, ?, ?)`: for a row, or behind `in`."""
    return f"({', '.join('?' * count)})"


def filled_up(asked: Sequence[T]) -> list[T]:
    """The last repeated up to a power of two, so that lists of marks are of few lengths."""
    if len(asked) == 1:
        return list(asked)
    missing = (1 << (len(asked) - 1).bit_length()) - len(asked)
    return [*asked, *[asked[-1]] * missing]


def without_nul(values: Sequence[Value]) -> Sequence[Value]:
    """Return values with U+FFFD, the replacement character, for each NUL in their text."""
    if any(type(value) is str and "\0" in value for value in values):
        return [v.replace("\0", "\ufffd") if isinstance(v, str) else v for v in values]
    return values
