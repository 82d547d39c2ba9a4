"""One connection to a PostgreSQL server: asyncpg, for synchronous callers.

asyncpg handles the protocol, TLS, prepared statements and COPY. This module gives each connection
an event loop, which runs in the caller's thread while a statement runs, and sorts errors into two
kinds: the server refused the statement, or the connection is lost. It knows no tables.
`tenancy.storage.postgres` calls it; no other module imports it or asyncpg, which is an optional
dependency.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

import asyncpg

from tenancy.errors import StoreError
from tenancy.storage.interface import Row, Value, without_nul
from tenancy.storage.postgres_address import PostgresAddress

CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
"""Seconds to connect, and to close."""
STATEMENTS_MAX = 200
"""Prepared statements that asyncpg keeps for a connection; the least recently used is dropped
first."""

_IMPOSSIBLE_VALUE = "22000"
"""SQLSTATE of a value that the server's type cannot hold, for values that asyncpg refuses."""

_PLACEHOLDER = re.compile(r"\?(\d*)")

T = TypeVar("T")


class StatementFailed(Exception):
    """The server refused a statement. `state`: the SQLSTATE, five characters."""

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        self.state = state


class ConnectionLost(Exception):
    """The connection is lost: the running statement may or may not have run."""


class PostgresConnection:
    """An open connection, for one thread at a time. A lost connection stays lost."""

    def __init__(
        self, address: PostgresAddress, settings: Mapping[str, str], timeout_s: float
    ) -> None:
        """Connect. `settings`: of the session. `timeout_s`: the longest time that a statement may
        take.

        Raises StatementFailed if the server refuses the login, ConnectionLost if no server answers,
        StoreError if the root certificate cannot be read.
        """
        encryption = _encryption(address)
        self._loop = _ConnectionLoop()
        try:
            self._driver = self._run(_connect(address, encryption, settings, timeout_s))
        except BaseException as error:
            self._end_loop()
            if isinstance(error, asyncpg.PostgresError) and not _is_disconnect(error):
                raise _refusal(error) from error
            if isinstance(error, _FAILURES):
                raise _loss(error) from error
            raise

    @property
    def is_lost(self) -> bool:
        """True if the connection is closed, or known to be lost."""
        return bool(self._driver.is_closed())

    @property
    def server_pid(self) -> int:
        """Process id that the server sent at login. A pooler sends a number of its own."""
        return int(self._driver.get_server_pid())

    def rows(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Return all rows of one statement. One round trip once it is prepared.

        Raises StatementFailed, after which the connection is still usable, and ConnectionLost.
        """
        typed = _add_casts(sql, tuple(map(type, values)))
        return list(map(tuple, self._exchange(self._driver.fetch, typed, *without_nul(values))))

    def execute(self, sql: str, values: Sequence[Value] = ()) -> int:
        """Run one statement, or several without values. Returns the number of rows that the last
        one changed.

        Raises as `rows`.
        """
        typed = _add_casts(sql, tuple(map(type, values)))
        status: str = self._exchange(self._driver.execute, typed, *without_nul(values))
        count = status.rpartition(" ")[2]
        return int(count) if count.isdigit() else 0

    def execute_many(self, sql: str, rows: Sequence[Sequence[Value]]) -> None:
        """Run one statement for each row, in order, in one round trip. Raises as `rows`."""
        typed = _add_casts(sql, _types_of(rows))
        self._exchange(self._driver.executemany, typed, map(without_nul, rows))

    def copy_rows(
        self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Value]]
    ) -> None:
        """Insert rows by COPY, in two round trips. Raises as `rows`."""
        copy, records = self._driver.copy_records_to_table, map(without_nul, rows)
        self._exchange(copy, table, columns=columns, records=records)

    def commit(self) -> None:
        """Commit the transaction. Raises as `rows`, also if the server rolled it back instead."""
        if self._exchange(self._driver.execute, "commit") != "COMMIT":
            raise StatementFailed("25P02", "a statement had failed before the commit")

    def close(self) -> None:
        """Close the connection. Safe to repeat."""
        if not self._loop.is_closed():
            with suppress(*_FAILURES):
                self._run(self._driver.close(timeout=CLOSE_TIMEOUT_S))
            self._end_loop()

    def _exchange(self, call: Callable[..., Coroutine[Any, Any, T]], *args: Any, **named: Any) -> T:
        """Run one exchange with the server.

        After any error but a refusal the state of the connection is unknown, so it is closed.
        """
        if self.is_lost:
            self._abort()
            raise ConnectionLost("the connection is closed")
        try:
            return self._run(call(*args, **named))
        except BaseException as error:
            if isinstance(error, asyncpg.PostgresError) and not _ends_connection(error):
                raise _refusal(error) from error
            if isinstance(error, ValueError) and not self.is_lost:  # nothing was sent
                raise StatementFailed(_IMPOSSIBLE_VALUE, str(error)) from error
            self._abort()
            if isinstance(error, _FAILURES):
                raise _loss(error) from error
            raise

    def _abort(self) -> None:
        """Close the connection without telling the server."""
        if not self._loop.is_closed():
            self._driver.terminate()
            self._end_loop()

    def _end_loop(self) -> None:
        """Close the sockets and the loop."""
        self._run(self._loop.close_transports())
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end on the connection's loop.

        The loop runs in the caller's thread: a switch to another thread and back costs more than a
        short statement. If the caller's thread already runs a loop, as a test's does, the
        connection's loop runs in a thread made for this call.
        """
        if not _is_loop_running():
            return self._loop.run_until_complete(work)
        with ThreadPoolExecutor(max_workers=1) as pool:
            return pool.submit(self._loop.run_until_complete, work).result()


class _ConnectionLoop(asyncio.SelectorEventLoop):
    """A loop that closes the sockets of its connections before it ends.

    asyncpg closes a TLS transport politely where a login fails: the socket stays open until the
    server says goodbye, or for as long as the loop lives.
    """

    def __init__(self) -> None:
        super().__init__()
        self._opened: list[asyncio.Transport] = []

    async def create_connection(self, *args: Any, **named: Any) -> Any:
        """Connect as asyncio does, and remember the transport."""
        return self._note(await super().create_connection(*args, **named))

    async def create_unix_connection(self, *args: Any, **named: Any) -> Any:
        """Connect as asyncio does, and remember the transport."""
        return self._note(await super().create_unix_connection(*args, **named))

    async def close_transports(self) -> None:
        """Close all sockets without a word to the server."""
        for transport in self._opened:
            transport.abort()
        await asyncio.sleep(0)  # a transport closes its socket in the loop's next turn
        await asyncio.sleep(0)  # and tells the TLS connection above it in the one after

    def _note(
        self, made: tuple[asyncio.Transport, asyncio.BaseProtocol]
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        self._opened.append(made[0])
        return made


def _is_loop_running() -> bool:
    """Return whether the caller's thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


_FAILURES = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
"""All errors that asyncpg raises for a server, a network or a value; a timeout is an OSError."""


async def _connect(
    address: PostgresAddress,
    encryption: ssl.SSLContext | None,
    settings: Mapping[str, str],
    timeout_s: float,
) -> Any:
    """Return asyncpg's connection.

    Every setting that asyncpg would read from the process's environment is given explicitly.
    """
    driver = await asyncpg.connect(
        host=address.folder or address.host,
        port=address.port,
        user=address.user,
        database=address.database,
        password=address.password or "",
        ssl=encryption or False,
        direct_tls=False,
        target_session_attrs="any",
        timeout=CONNECT_TIMEOUT_S,
        command_timeout=timeout_s,
        statement_cache_size=STATEMENTS_MAX,
        max_cached_statement_lifetime=0,
        server_settings={"application_name": "trunkline", **settings},
    )
    try:
        # PostgreSQL sums 64-bit integers into decimals; our sums are integers.
        await driver.set_type_codec(
            "numeric", schema="pg_catalog", encoder=str, decoder=_number, format="text"
        )
    except BaseException:
        driver.terminate()
        raise
    return driver


def _encryption(address: PostgresAddress) -> ssl.SSLContext | None:
    """Return the TLS context that checks the server's certificate. Raises StoreError."""
    if not address.is_encrypted:
        return None
    try:
        return ssl.create_default_context(cafile=address.root_certificate or None)
    except OSError as error:
        why = "has no certificate in it" if isinstance(error, ssl.SSLError) else error.strerror
        message = f"sslrootcert: {address.root_certificate} cannot be read: {why}."
        raise StoreError("bad_address", message) from error


@lru_cache(maxsize=2_000)
def _add_casts(sql: str, types: tuple[type, ...]) -> str:
    """Return a statement with `$1::bigint` for `?`, and `$2::text` for `?2`, by the types of its
    values.

    PostgreSQL would otherwise infer a type from the place of the placeholder. No statement of
    tenancy has a `?` in a literal.
    """
    count = 0

    def placeholder(found: re.Match[str]) -> str:
        nonlocal count
        count += 1
        number = int(found[1] or count)
        return f"${number}{_CASTS[types[number - 1]]}"

    return _PLACEHOLDER.sub(placeholder, sql)


_CASTS: dict[type, str] = {
    type(None): "",
    bool: "::bigint",
    int: "::bigint",
    float: "::double precision",
    str: "::text",
    bytes: "::bytea",
}


def _types_of(rows: Sequence[Sequence[Value]]) -> tuple[type, ...]:
    """Return each column's type: that of its first value that is not null."""
    types = list(map(type, rows[0]))
    for place, kind in enumerate(types):
        if kind is type(None):
            values = (row[place] for row in rows if row[place] is not None)
            types[place] = type(next(values, None))
    return tuple(types)


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def _is_disconnect(error: asyncpg.PostgresError) -> bool:
    """Return whether the connection ended without an error from the server; asyncpg then raises
    these."""
    return isinstance(error, asyncpg.ConnectionDoesNotExistError | asyncpg.ConnectionFailureError)


def _ends_connection(error: asyncpg.PostgresError) -> bool:
    """Return whether the connection has ended, or the server ends it after this error."""
    return _is_disconnect(error) or error.severity_en in ("FATAL", "PANIC")


def _refusal(error: asyncpg.PostgresError) -> StatementFailed:
    return StatementFailed(error.sqlstate or "", error.message or "the server refused")


def _loss(error: BaseException) -> ConnectionLost:
    """Return the error with its reason, and with the setting that would change it."""
    match error:
        case ssl.SSLCertVerificationError():
            why = error.verify_message.rstrip(".")
            hint = "sslrootcert=FILE names an authority of your own"
            return ConnectionLost(f"its certificate is refused: {why} ({hint})")
        case ConnectionError() if "SSL upgrade" in str(error):
            hint = "sslmode=disable allows an unencrypted connection"
            return ConnectionLost(f"the server has no TLS ({hint})")
        case _:
            return ConnectionLost(f"{type(error).__name__}: {error}")
