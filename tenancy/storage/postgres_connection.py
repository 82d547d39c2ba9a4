"""One connection to a PostgreSQL server: statements, prepared once each, and what went wrong.

It knows no tables. `postgres_store` calls it; nothing else imports it, or the driver, which is an
extra.
"""

from __future__ import annotations

import re
import socket
import ssl
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

from pg8000.core import Context, CoreConnection
from pg8000.exceptions import DatabaseError, Error

from tenancy.errors import StoreError
from tenancy.storage.copied_rows import NO_SIGN
from tenancy.storage.interface import Row, Value
from tenancy.storage.postgres_address import Address

STATEMENTS_MAX = 200
AT_ONCE = 500
"""Statements whose answers fit between us and the server while nobody reads them."""

CONNECT_TIMEOUT_S = 10.0
_BIGINT, _BYTES, _FLOAT, _NUMERIC, _TEXT, _UNKNOWN = 20, 17, 701, 1700, 25, 0
_SHORT, _LONG = struct.Struct("!H").pack, struct.Struct("!i").pack
_NULL, _NO_FORMATS = _LONG(-1), _SHORT(0)
_EXECUTE = b"E" + _LONG(9) + bytes(5)
_SYNC = b"S" + _LONG(4)
_ASK_TLS = _LONG(8) + _LONG(80_877_103)
_MARK = re.compile(r"\?(\d*)")


Statement = tuple[str, Sequence[Value]]


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
        wire = _connected(address, encryption, timeout_s)
        try:
            self._core = CoreConnection(
                address.user,
                host=address.host,
                database=address.database,
                # The driver fails strangely where it has none and is asked for one.
                password=address.password or "",
                sock=wire,
                ssl_context=False,  # it is encrypted by now
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

    @property
    def server_pid(self) -> int:
        """The process behind it, as it said when it was asked in: a pooler says a number of its
        own."""
        (pid,) = struct.unpack_from("!i", self._core._backend_key_data)
        return int(pid)

    def run(self, sql: str, values: Sequence[Value] = ()) -> tuple[list[Row], int]:
        """One statement: its rows, and how many rows it changed. Raises StatementFailed, after
        which the connection is as good as before, and LinkLost."""
        return self._send([(sql, values)], "")

    def run_all(self, statements: Sequence[Statement], *, ending: str = "") -> list[Row]:
        """Statements in order, sent together: the rows of the last, which alone may have any. Where
        one fails those behind it are not run, nor is the `ending`, which has no values. A round
        trip for each 500. Raises as `run`."""
        last = max(len(statements) - 1, 0) // AT_ONCE * AT_ONCE
        for first in range(0, last, AT_ONCE):
            self._send(statements[first : first + AT_ONCE], "")
        return self._send(statements[last:], ending)[0]

    def _send(self, statements: Sequence[Statement], ending: str) -> tuple[list[Row], int]:
        message: list[bytes] = []
        columns, readers = None, None
        # Whatever cannot be sent raises before anything is.
        bound = [(sql, tuple(map(_type_of, values)), _bound(values)) for sql, values in statements]
        with self._exchange():
            for sql, types, bind in bound:
                name, columns, readers = self._prepared(sql, types)
                _add(message, b"B", b"\0" + name + bind)
                message.append(_EXECUTE)
            if ending:
                _add(message, b"P", b"\0%b\0\0\0" % ending.encode())
                _add(message, b"B", bytes(8))
                message.append(_EXECUTE)
            message.append(_SYNC)
            done = Context(sql if statements else ending, columns=columns, input_funcs=readers)
            self._core._sock.write(b"".join(message))
            self._core._sock.flush()
            self._core.handle_messages(done)
        return [tuple(row) for row in done.rows or ()], max(int(done.row_count), 0)

    def script(self, sql: str) -> int:
        """Several statements without values, in one message: rows chosen and changed, all in all.
        Raises as `run`."""
        with self._exchange():
            return int(self._core.execute_simple(sql).row_count)

    def copy_in(self, sql: str, lines: Iterable[bytes]) -> None:
        """A `copy … from stdin` of these lines, some in each piece, taken as they are sent. Raises
        as `run`; what `lines` raises ends the connection too."""
        with self._exchange():
            self._core.execute_unnamed(sql, stream=lines)

    def copy_out(self, sql: str, take: Callable[[bytes], None]) -> None:
        """A `copy … to stdout`, line by line. Raises as `copy_in`."""
        with self._exchange():
            self._core.execute_unnamed(sql, stream=_Taken(take))

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


class _Taken:
    """As the driver writes to it."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self.write = take


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


def _bound(values: Sequence[Value]) -> bytes:
    """Values as a message to bind them has them: as text, and what is chosen is to come so too."""
    parts = [_NO_FORMATS, _SHORT(len(values))]
    for value in values:
        if value is None:
            parts.append(_NULL)
        else:
            text = _as_text(value)
            parts += (_LONG(len(text)), text)
    parts.append(_NO_FORMATS)
    return b"".join(parts)


def _as_text(value: int | float | str | bytes) -> bytes:
    """As the wire has it. No text has a NUL in it there; what asks for one finds nothing."""
    match value:
        case str():
            text = value.encode()
            return text.replace(b"\0", NO_SIGN.encode()) if b"\0" in text else text
        case int():
            return b"%d" % value
        case float():
            return repr(value).encode()
        case bytes():
            return b"\\x" + value.hex().encode()


def _add(message: list[bytes], kind: bytes, body: bytes) -> None:
    message += (kind, _LONG(len(body) + 4), body)


def _whole(text: str) -> int | float:
    """Sums of whole numbers come as decimals."""
    return float(text) if "." in text else int(text)


def _encryption(address: Address) -> ssl.SSLContext | None:
    """As whom the server has to show itself. Raises StoreError."""
    if not address.is_encrypted:
        return None
    try:
        return ssl.create_default_context(cafile=address.root_certificate or None)
    except OSError as error:
        why = "has no certificate in it" if isinstance(error, ssl.SSLError) else error.strerror
        message = f"sslrootcert: {address.root_certificate} cannot be read: {why}."
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


def _connected(
    address: Address, encryption: ssl.SSLContext | None, timeout_s: float
) -> socket.socket:
    """Its socket. Raises LinkLost."""
    wire: socket.socket | None = None
    try:
        if address.folder:
            wire = socket.socket(socket.AF_UNIX)
            wire.settimeout(CONNECT_TIMEOUT_S)
            wire.connect(f"{address.folder}/.s.PGSQL.{address.port}")
        else:
            wire = socket.create_connection((address.host, address.port), CONNECT_TIMEOUT_S)
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if encryption is not None:
            wire = _encrypted(wire, encryption, address.host)
    except BaseException as error:
        if wire is not None:
            wire.close()
        if isinstance(error, OSError):
            raise _broken(error) from error
        raise
    wire.settimeout(timeout_s)
    return wire


def _encrypted(wire: socket.socket, encryption: ssl.SSLContext, host: str) -> ssl.SSLSocket:
    """The same, once the server has shown that it is this host. Raises LinkLost."""
    wire.sendall(_ASK_TLS)
    if (answer := wire.recv(1)) != b"S":
        what = "has no TLS" if answer else "hung up when it was asked for TLS"
        hint = "sslmode=disable would say that everybody on the way may read"
        raise LinkLost(f"the server {what} ({hint})")
    try:
        return encryption.wrap_socket(wire, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        hint = "sslrootcert=FILE names an authority of your own"
        why = error.verify_message.rstrip(".")
        raise LinkLost(f"its certificate is refused: {why} ({hint})") from error
