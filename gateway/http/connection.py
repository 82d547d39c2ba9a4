"""One client's connection: deadlines, bounds and fixed error pages between a socket and aiohttp.

A `Connection` is a protocol to the event loop and a transport to aiohttp's protocol. Every byte
passes through it in both directions. It uses only asyncio's public interfaces, so its guarantees do
not depend on aiohttp's internals. It knows no route and parses no HTTP. `gateway.http.server`
passes `Connections` to the event loop as its protocol factory.

    event loop ── Connection ── aiohttp's protocol ── handler
                  caps, head and write deadlines, bounded send buffer, fixed pages
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from aiohttp import web

from gateway.config import ServerConfig

NewId = Callable[[], str]
Data = bytes | bytearray | memoryview

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def fixed_page(status: HTTPStatus, kind: str, code: str, message: str, request_id: str) -> bytes:
    """Return a complete error response in OpenAI's error shape, as bytes.

    It serves errors that occur before the dialect is known. It never echoes received bytes.
    """
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
    socket's send buffer is full. Between requests aiohttp writes only to report bytes that it could
    not parse. Its page quotes these bytes, so the client gets a fixed page instead.
    """

    def __init__(self, owner: Connections) -> None:
        super().__init__()
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._protocol: asyncio.Protocol | None = None
        self._stream: asyncio.Transport | None = None
        self._address: str | None = None
        self._head_began_s: float | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._is_responding = False
        self._is_ending = False
        self._response_begins_at = 0
        self.bytes_written = 0
        """Bytes of responses handed to the socket's transport since the connection began."""

    # -- requests on the connection -------------------------------------------------------------

    def begin_request(self) -> None:
        """Note that a handler has the next request; aiohttp now writes its response."""
        self._is_responding = True
        self._head_began_s = None
        self._response_begins_at = self.bytes_written

    def end_request(self, *, may_follow: bool) -> None:
        """Note that the response is complete. `may_follow`: the connection stays open."""
        self._is_responding = False
        self._is_ending |= not may_follow

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
        await self._writable.wait()
        if self.is_closing():
            raise ConnectionResetError(
                "the client closed the connection before the response was complete"
            )

    def fail(self) -> None:
        """Send a fixed 500 page and close; abort if part of a response was written."""
        if self.has_response_begun:
            self.abort()
        else:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            self._end_with(status, "server_error", "internal_error", "Internal server error.")

    # -- protocol side: the event loop ----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Bound the kernel's and asyncio's send buffers; admit the connection or send a 503."""
        assert isinstance(transport, asyncio.Transport)
        self._stream = transport
        settings = self._owner.settings
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, settings.send_buffer_bytes)
        transport.set_write_buffer_limits(high=settings.send_buffer_bytes)
        self._address = self._owner.admit(transport)
        if self._address is None:
            message = "Connection limit reached. Try again later."
            status = HTTPStatus.SERVICE_UNAVAILABLE
            self._end_with(status, "server_error", "too_many_connections", message)
            return
        self._start_head_timer()
        self._protocol = self._owner.make_protocol()
        self._protocol.connection_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection's place in the count. aiohttp then cancels the handler."""
        self._is_ending = True
        self._cancel_timers()
        self._writable.set()
        if self._address is not None:
            self._owner.release(self._address)
            self._address = None
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass bytes to aiohttp; the first bytes after a response start a head deadline."""
        if not self._is_responding and self._head_began_s is None and not self._is_ending:
            self._start_head_timer()
        if self._protocol is not None:
            self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        """Tell aiohttp that the client sends no more bytes."""
        return None if self._protocol is None else self._protocol.eof_received()

    def pause_writing(self) -> None:
        """Start the write deadline: the client reads too slowly."""
        self._writable.clear()
        self._start_write_timer()
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Cancel the write deadline: the send buffer has room again."""
        self._writable.set()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if self.is_closing():
            self._start_write_timer()
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
        """Close once the send buffer is empty, or at the write deadline."""
        self._is_ending = True
        if self._stream is not None:
            self._stream.close()
            if self._stream.get_write_buffer_size():
                self._start_write_timer()

    def abort(self) -> None:
        """Reset the connection and drop unsent bytes; the client sees an incomplete response."""
        self._is_ending = True
        if self._stream is not None:
            self._stream.abort()

    def is_closing(self) -> bool:
        """Whether the connection is closing or closed."""
        return self._stream is None or self._stream.is_closing()

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
        if self._stream is not None:
            self._stream.pause_reading()

    def resume_reading(self) -> None:
        """Receive again."""
        if self._stream is not None:
            self._stream.resume_reading()

    def can_write_eof(self) -> bool:
        """Return False: a response ends by its length or when the connection closes."""
        return False

    # -- deadlines and fixed pages --------------------------------------------------------------

    def _start_head_timer(self) -> None:
        """Record when a head began. One timer serves many requests: it reads this time."""
        self._head_began_s = self._loop.time()
        if self._head_timer is None:
            self._schedule_head_check(self._owner.settings.header_timeout_s)

    def _schedule_head_check(self, seconds: float) -> None:
        self._head_timer = self._loop.call_later(seconds, self._check_head_deadline)

    def _check_head_deadline(self) -> None:
        self._head_timer = None
        if self._head_began_s is None or self._is_ending:
            return
        due_s = self._head_began_s + self._owner.settings.header_timeout_s
        left_s = due_s - self._loop.time()
        if left_s > 0:
            self._schedule_head_check(left_s)
            return
        message = (
            f"Request headers not received within {self._owner.settings.header_timeout_s:g} s."
        )
        status = HTTPStatus.REQUEST_TIMEOUT
        self._end_with(status, "invalid_request_error", "request_timeout", message)

    def _start_write_timer(self) -> None:
        if self._write_timer is None:
            seconds = self._owner.settings.write_timeout_s
            self._write_timer = self._loop.call_later(seconds, self.abort)

    def _cancel_timers(self) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    def _refuse_unreadable(self) -> None:
        if self._is_ending:
            return
        self._owner.on_unreadable()
        message = "Not a valid HTTP/1.1 request."
        status = HTTPStatus.BAD_REQUEST
        self._end_with(status, "invalid_request_error", "bad_http", message)

    def _end_with(self, status: HTTPStatus, kind: str, code: str, message: str) -> None:
        """Send a fixed page and close."""
        if self._stream is not None and not self._stream.is_closing():
            page = fixed_page(status, kind, code, message, self._owner.new_id())
            self._stream.write(page)
        self.close()


CONNECTION = web.RequestKey("connection", Connection)
"""A request's connection; `request.transport` is None once the connection is lost."""


class Connections:
    """Creates and counts connections: a protocol factory for `loop.create_server`."""

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
        self._open = 0
        self._open_by_address: Counter[str] = Counter()

    def __call__(self) -> Connection:
        return Connection(self)

    def admit(self, transport: asyncio.Transport) -> str | None:
        """Count a new connection and return its address; None above a connection limit. O(1)."""
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if isinstance(peer, tuple) and peer else "local"
        cap = self.settings.connections_per_address_max
        is_crowded = cap and self._open_by_address[address] >= cap
        if self._open >= self.settings.connections_max or is_crowded:
            return None
        self._open += 1
        self._open_by_address[address] += 1
        return address

    def release(self, address: str) -> None:
        """Remove a closed connection from the counts. O(1)."""
        self._open -= 1
        self._open_by_address[address] -= 1
        if not self._open_by_address[address]:
            del self._open_by_address[address]
