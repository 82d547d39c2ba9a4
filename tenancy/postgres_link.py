"""One connection to a PostgreSQL server: statements, prepared once each, and what went wrong.

It knows no tables. `postgres_store` calls it; nothing else imports it, or the driver, which is an
extra.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

from pg8000.core import CoreConnection
from pg8000.exceptions import DatabaseError, Error

from tenancy.errors import StoreError
from tenancy.postgres_address import Address
from tenancy.store import Row, Value

STATEMENTS_MAX = 200
CONNECT_TIMEOUT_S = 10.0
_BIGINT, _BYTES, _FLOAT, _NUMERIC, _TEXT, _UNKNOWN = 20, 17, 701, 1700, 25, 0
_MARK = re.compile(r"\?(\d*)")


class StatementFailed(Exception):
    """The server refused a statement; `state` is SQL's five signs for why."""

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        self.state = state


class LinkLost(Exception):
    """The connection is gone: what was being done may have been done or not."""


class Link:
    """An open connection. Belongs to one thread at a time. One that was lost stays so."""

    def __init__(self, address: Address, settings: Mapping[str, str], timeout_s: float) -> None:
        """Connect. `settings`: of the session. `timeout_s`: the longest silence in an answer.

        Raises StatementFailed where the server refuses, LinkLost where there is none, StoreError.
        """
        self._statements: OrderedDict[tuple[str, tuple[int, ...]], Any] = OrderedDict()
        self.is_lost = False
        encryption = _encryption(address)
        wire = _connected(address, timeout_s)
        try:
            self._core = CoreConnection(
                address.user,
                host=address.host,
                database=address.database,
                # The driver fails strangely where it has none and is asked for one.
                password=address.password or "",
                sock=wire,
                ssl_context=encryption,
                application_name="trunkline",
                startup_params={**settings},
            )
        except BaseException as error:
            wire.close()
            if (refusal := _refusal_in(error)) is not None:
                raise _failed(refusal) from error
            if isinstance(error, (Error, OSError)):
                raise _broken(error) from error
            raise
        self._core.register_in_adapter(_NUMERIC, _whole)

    def run(self, sql: str, values: Sequence[Value] = ()) -> tuple[list[Row], int]:
        """One statement: its rows, and how many rows it changed. Raises StatementFailed, after
        which the connection is as good as before, and LinkLost."""
        types = tuple(map(_type_of, values))
        bound = tuple(map(_as_text, values))
        with self._exchange():
            name, columns, readers = self._prepared(sql, types)
            done = self._core.execute_named(name, bound, columns, readers, sql)
        return [tuple(row) for row in done.rows or ()], max(int(done.row_count), 0)

    def script(self, sql: str) -> int:
        """Several statements without values, in one message: rows chosen and changed, all in all.
        Raises as `run`."""
        with self._exchange():
            return int(self._core.execute_simple(sql).row_count)

    def close(self) -> None:
        """End it. Safe to call twice."""
        if not self.is_lost:
            self.is_lost = True
            with suppress(Error, OSError):
                self._core.close()

    def _prepared(self, sql: str, types: tuple[int, ...]) -> Any:
        key = (sql, types)
        found = self._statements.get(key)
        if found is None:
            if len(self._statements) >= STATEMENTS_MAX:
                _, (name, _, _) = self._statements.popitem(last=False)
                self._core.close_prepared_statement(name)
            found = self._core.prepare_statement(_translated(sql), types)
            self._statements[key] = found
        else:
            self._statements.move_to_end(key)
        return found

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """A refusal ends it in order; after anything else nobody knows where it stands, and the
        connection is of no use any more."""
        if self.is_lost:
            raise LinkLost("the connection is closed")
        try:
            yield
        except DatabaseError as error:
            raise _failed(error) from error
        except (Error, OSError) as error:
            self.close()
            raise _broken(error) from error
        except BaseException:
            self.close()
            raise


@lru_cache(maxsize=1_000)
def _translated(sql: str) -> str:
    """`?` and `?2` as PostgreSQL numbers them. No statement of ours has one in a literal."""
    count = 0

    def mark(found: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return f"${found[1] or count}"

    return _MARK.sub(mark, sql)


def _type_of(value: Value) -> int:
    match value:
        case None:
            return _UNKNOWN
        case int():
            return _BIGINT
        case str():
            return _TEXT
        case float():
            return _FLOAT
        case bytes():
            return _BYTES


def _as_text(value: Value) -> str | None:
    """As the wire has it. No text has a NUL in it there; what asks for one finds nothing."""
    match value:
        case None:
            return None
        case int():
            return str(int(value))
        case str():
            value.encode()  # raises now, and not in the middle of a message
            return value.replace("\0", "�") if "\0" in value else value
        case float():
            return repr(value)
        case bytes():
            return f"\\x{value.hex()}"


def _whole(text: str) -> int | float:
    """Sums of whole numbers come as decimals."""
    return float(text) if "." in text else int(text)


def _encryption(address: Address) -> ssl.SSLContext | bool:
    if not address.is_encrypted:
        return False
    try:
        return ssl.create_default_context(cafile=address.root_certificate or None)
    except OSError as error:
        message = f"sslrootcert: {address.root_certificate} cannot be read: {error.strerror}."
        raise StoreError("bad_address", message) from error


def _failed(error: DatabaseError) -> StatementFailed:
    facts = error.args[0] if error.args and isinstance(error.args[0], dict) else {}
    return StatementFailed(facts.get("C", ""), facts.get("M", "the server refused"))


def _refusal_in(error: BaseException | None) -> DatabaseError | None:
    """The server's own word, where saying goodbye to it failed too."""
    while error is not None and not isinstance(error, DatabaseError):
        error = error.__cause__ or error.__context__
    return error


def _broken(error: BaseException) -> LinkLost:
    why = error.__cause__ or error
    return LinkLost(f"{type(why).__name__}: {why}")


def _connected(address: Address, timeout_s: float) -> socket.socket:
    """Its socket. Raises LinkLost."""
    try:
        if address.folder:
            wire = socket.socket(socket.AF_UNIX)
            wire.settimeout(CONNECT_TIMEOUT_S)
            try:
                wire.connect(f"{address.folder}/.s.PGSQL.{address.port}")
            except OSError:
                wire.close()
                raise
        else:
            wire = socket.create_connection((address.host, address.port), CONNECT_TIMEOUT_S)
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except OSError as error:
        raise _broken(error) from error
    wire.settimeout(timeout_s)
    return wire
