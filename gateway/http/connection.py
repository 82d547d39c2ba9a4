"""One client's connection: deadlines, bounds and fixed error pages between a socket and aiohttp.

A `Connection` is a protocol to the event loop and a transport to aiohttp's protocol. Every byte
passes through it in both directions. It uses only asyncio's public interfaces, so its guarantees do
not depend on aiohttp's internals. It knows no route and parses no HTTP. `gateway.http.server`
passes `Connections` to the event loop as its protocol factory.

    event loop ── Connection ── aiohttp's protocol ── handler
                  head and write deadlines, bounded send buffer, fixed pages, a close that is read

`gateway.http.connection_places` decides which connections may stay.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Hashable, Iterable
from http import HTTPStatus
from typing import Any

from aiohttp import web

from gateway.config import ServerConfig
from gateway.http.connection_places import ConnectionPlaces

NewId = Callable[[], str]
Data = bytes | bytearray | memoryview

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

REFUSED_LINGERING_MAX = 64
"""Connections beyond the limit that may wait until their clients have read the refusal."""

LINGER_S = 5.0
"""How long a closed connection drops what its client still sends, in seconds: a socket that is
closed with unread bytes is reset, and the client loses the answer. The bytes are bounded too, by
`server.body_bytes_max`."""


LINE_BYTES_MAX = 8_190
FIELDS_MAX = 128
"""The longest line of a head that aiohttp reads, and its most header fields."""
HEAD_BYTES_KEPT = 32 * 1024
"""So much of an unreadable head is looked at."""


def fixed_page(status: HTTPStatus, code: str, message: str, request_id: str) -> bytes:
    """Return a complete error response in the shape that most clients read, as bytes.

    It serves errors that occur before the dialect is known. It never echoes received bytes.
    """
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    retry = "" if status == HTTPStatus.BAD_REQUEST else "retry-after: 1\r\n"
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\nconnection: close\r\n"
        f"{retry}\r\n"
    )
    return head.encode() + body


class Connection(asyncio.Protocol, asyncio.Transport):
    """One client's connection.

    The head deadline starts when the connection opens, and again at the first byte that arrives
    while no request is in progress; `begin_request` ends it. The write deadline runs while the
    socket's send buffer is full; nothing is received meanwhile, so a client that pipelines requests
    has to read its answers. Between requests aiohttp writes only to report bytes that it could not
    parse. Its page quotes these bytes, so the client gets a fixed page instead.

    `payer`: the tenant whose key the client has shown; None for a stranger. `has_place`: it counts
    against the limits of `Connections`.
    """

    def __init__(self, owner: Connections) -> None:
        super().__init__()
        self.owner = owner
        self.payer: Hashable = None
        self.address = ""
        self.has_place = False
        self._loop = asyncio.get_running_loop()
        self._protocol: asyncio.Protocol | None = None
        self._stream: asyncio.Transport | None = None
        self._head_began_s: float | None = None
        self._head = b""
        """The beginning of what came since the last request began."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._lingering_bytes = 0
        self._wants_reading = True
        self._is_responding = False
        self._is_ending = False
        self._response_begins_at = 0
        self.writable = asyncio.Event()
        """Set while the send buffer has room."""
        self.writable.set()
        self.bytes_written = 0
        """Bytes of responses handed to the socket's transport since the connection began."""

    # -- requests on the connection -------------------------------------------------------------

    def begin_request(self) -> None:
        """Note that a handler has the next request; aiohttp now writes its response."""
        self._is_responding = True
        self._head_began_s = None
        self._head = b""
        self._response_begins_at = self.bytes_written
        self.owner.asked_at_s = self._loop.time()
        self.owner.places.set_busy(self)

    def end_request(self, *, may_follow: bool) -> None:
        """Note that the response is complete. `may_follow`: the connection stays open."""
        self._is_responding = False
        self._is_ending |= not may_follow
        self.owner.asked_at_s = self._loop.time()
        if self.has_place:
            self.owner.places.set_idle(self)

    def identify(self, payer: Hashable) -> None:
        """Note the tenant whose valid key came with the current request."""
        self.owner.places.move(self, payer)

    @property
    def has_response_begun(self) -> bool:
        """Whether part of the current request's response has been sent."""
        return self.bytes_written > self._response_begins_at

    def send_continue(self) -> None:
        """Send `100 Continue`, the reply to `Expect: 100-continue`.

        The interim reply does not count as part of the response.
        """
        if self._stream is not None:
            self._stream.write(CONTINUE)

    async def drain(self) -> None:
        """Wait until the send buffer has room.

        Raises ConnectionError if the connection is lost; the write deadline bounds the wait.
        """
        await self.writable.wait()
        if self.is_closing():
            raise ConnectionResetError(
                "the client closed the connection before the response was complete"
            )

    def fail(self) -> None:
        """Send a fixed 500 page and close; abort if part of a response was written."""
        if self.has_response_begun:
            self.abort()
        else:
            self._end_with(
                HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", "Internal server error."
            )

    # -- protocol side: the event loop ----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Bound the kernel's and asyncio's send buffers; admit the connection or send a 503."""
        assert isinstance(transport, asyncio.Transport)
        self._stream = transport
        settings = self.owner.settings
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, settings.send_buffer_bytes)
        transport.set_write_buffer_limits(high=settings.send_buffer_bytes)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if isinstance(peer, tuple) and peer else "local"
        self.owner.opened.add(self)
        self.has_place = self.owner.places.admit(self)
        if not self.has_place:
            message = "Connection limit reached. Try again later."
            self._end_with(HTTPStatus.SERVICE_UNAVAILABLE, "too_many_connections", message)
            return
        self._start_head_timer()
        self._protocol = self.owner.make_protocol()
        self._protocol.connection_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection's place in the count. aiohttp then cancels the handler."""
        self._is_ending = True
        self._cancel_timers()
        self.writable.set()
        self.owner.opened.discard(self)
        if self.has_place:
            self.has_place = False
            self.owner.places.release(self)
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass bytes to aiohttp; the first bytes after a response start a head deadline. A closed
        connection drops them."""
        if self._linger_timer is not None:
            self._lingering_bytes += len(data)
            if self._lingering_bytes > self.owner.settings.body_bytes_max:
                self.abort()
            return
        if not self._is_responding and self._head_began_s is None and not self._is_ending:
            self._start_head_timer()
        if not self._is_responding and len(self._head) < HEAD_BYTES_KEPT:
            self._head += data[:HEAD_BYTES_KEPT]
        if self._protocol is not None:
            self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        """Tell aiohttp that the client sends no more bytes; a closed connection ends then."""
        if self._protocol is None or self._linger_timer is not None:
            return None
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        """Start the write deadline, and receive nothing: the client reads too slowly."""
        self.writable.clear()
        if self._stream is not None:
            self._stream.pause_reading()
        self._start_write_timer()
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Cancel the write deadline: the send buffer has room again."""
        self.writable.set()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if self.is_closing():
            self._start_write_timer()
        if self._stream is not None and self._wants_reading:
            self._stream.resume_reading()
        if self._protocol is not None:
            self._protocol.resume_writing()

    # -- transport side: aiohttp ----------------------------------------------------------------

    def write(self, data: Data) -> None:
        """Send part of a response.

        Outside a response aiohttp writes only parse errors: send the fixed 400 page instead.
        """
        if not self._is_responding:
            self._refuse_unreadable()
        elif self._stream is not None:
            self.bytes_written += len(data)
            self._stream.write(data)

    def writelines(self, list_of_data: Iterable[Data]) -> None:
        """Send several pieces, as `write` does."""
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        """Send what is left and the end of the connection; then wait for the client's end.

        What it sends meanwhile is dropped, for `LINGER_S` and `server.body_bytes_max` at most. The
        write deadline bounds the sending.
        """
        self._is_ending = True
        stream = self._stream
        if stream is None or self.is_closing():
            return
        if stream.can_write_eof() and self.owner.may_linger(self):
            self._linger_timer = self._loop.call_later(LINGER_S, self._end_lingering)
            stream.write_eof()
            stream.resume_reading()
        else:
            stream.close()
        if stream.get_write_buffer_size():
            self._start_write_timer()

    def abort(self) -> None:
        """Reset the connection and drop unsent bytes; the client sees an incomplete response."""
        self._is_ending = True
        if self._stream is not None:
            self._stream.abort()

    def is_closing(self) -> bool:
        """Whether the connection is closing or closed."""
        stream = self._stream
        return stream is None or self._linger_timer is not None or stream.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the socket transport's extra info `name`."""
        return default if self._stream is None else self._stream.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes not yet passed to the kernel."""
        return 0 if self._stream is None else self._stream.get_write_buffer_size()

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return aiohttp's protocol."""
        assert self._protocol is not None, "the connection is closed; expected an open one"
        return self._protocol

    def is_reading(self) -> bool:
        """Whether the socket transport is receiving."""
        return self._stream is not None and self._stream.is_reading()

    def pause_reading(self) -> None:
        """Stop receiving until `resume_reading`."""
        self._wants_reading = False
        if self._stream is not None:
            self._stream.pause_reading()

    def resume_reading(self) -> None:
        """Receive again, once the send buffer has room."""
        self._wants_reading = True
        if self._stream is not None and self.writable.is_set():
            self._stream.resume_reading()

    def can_write_eof(self) -> bool:
        """Return False: a response ends by its length or when the connection closes."""
        return False

    # -- deadlines and fixed pages --------------------------------------------------------------

    def _start_head_timer(self) -> None:
        """Record when a head began. One timer serves many requests: it reads this time."""
        self._head_began_s = self._loop.time()
        if self._head_timer is None:
            self._schedule_head_check(self.owner.settings.header_timeout_s)

    def _schedule_head_check(self, seconds: float) -> None:
        self._head_timer = self._loop.call_later(seconds, self._check_head_deadline)

    def _check_head_deadline(self) -> None:
        self._head_timer = None
        if self._head_began_s is None or self._is_ending:
            return
        due_s = self._head_began_s + self.owner.settings.header_timeout_s
        left_s = due_s - self._loop.time()
        if left_s > 0:
            self._schedule_head_check(left_s)
            return
        message = f"Request headers not received within {self.owner.settings.header_timeout_s:g} s."
        self._end_with(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", message)

    def _start_write_timer(self) -> None:
        if self._write_timer is None:
            seconds = self.owner.settings.write_timeout_s
            self._write_timer = self._loop.call_later(seconds, self.abort)

    def _cancel_timers(self) -> None:
        for timer in (self._head_timer, self._write_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()

    def _end_lingering(self) -> None:
        """Close, unless the client still reads its answer: then the write deadline closes."""
        assert self._stream is not None, "a connection that is lost has no timers"
        if self._stream.get_write_buffer_size():
            self._linger_timer = self._loop.call_later(LINGER_S, self._end_lingering)
        else:
            self._stream.abort()

    def _refuse_unreadable(self) -> None:
        if self._is_ending:
            return
        self.owner.on_unreadable()
        self._end_with(*_fault_of(self._head))

    def _end_with(self, status: HTTPStatus, code: str, message: str) -> None:
        """Send a fixed page and close."""
        if self._stream is not None and not self.is_closing():
            self._stream.write(fixed_page(status, code, message, self.owner.new_id()))
        self.close()


def _fault_of(head: bytes) -> tuple[HTTPStatus, str, str]:
    """Return the answer to a head that aiohttp does not read: it may be too large. O(bytes)."""
    first, *fields = head.partition(b"\r\n\r\n")[0].split(b"\r\n")
    if len(first) > LINE_BYTES_MAX:
        message = f"The URL is too long; expected at most {LINE_BYTES_MAX} bytes."
        return HTTPStatus.REQUEST_URI_TOO_LONG, "url_too_long", message
    longest = max(map(len, fields), default=0)
    if longest > LINE_BYTES_MAX or len(fields) > FIELDS_MAX:
        message = (
            f"The request headers are too large; expected at most {FIELDS_MAX} of at most"
            f" {LINE_BYTES_MAX} bytes each."
        )
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", message
    return HTTPStatus.BAD_REQUEST, "bad_http", "Not a valid HTTP/1.1 request."


CONNECTION = web.RequestKey("connection", Connection)
"""A request's connection; `request.transport` is None once the connection is lost."""


class Connections:
    """Creates and keeps connections: a protocol factory for `loop.create_server`.

    `opened`: all that are not lost yet. `asked_at_s`: when a request last began or ended, by the
    loop's clock. `is_draining`: each answer is its connection's last.
    """

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        settings: ServerConfig,
        new_id: NewId,
        on_unreadable: Callable[[], None],
    ) -> None:
        """Start with no connections.

        `make_protocol` returns aiohttp's protocol for a connection. `on_unreadable` is called for
        each request that is not valid HTTP.
        """
        self.make_protocol = make_protocol
        self.settings = settings
        self.new_id = new_id
        self.on_unreadable = on_unreadable
        self.is_draining = False
        self.asked_at_s = 0.0
        self.opened: set[Connection] = set()
        self.places: ConnectionPlaces[Connection] = ConnectionPlaces(
            settings.connections_max, settings.connections_per_address_max
        )

    def __call__(self) -> Connection:
        return Connection(self)

    def may_linger(self, connection: Connection) -> bool:
        """Return whether a closed connection may wait for its client's end. O(1).

        One that was refused for want of a place has a descriptor all the same; only
        `REFUSED_LINGERING_MAX` of those may.
        """
        return connection.has_place or len(self.opened) - self.places.taken <= REFUSED_LINGERING_MAX
