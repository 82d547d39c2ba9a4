"""One client's connection: deadlines, bounds and fixed error pages between a socket and aiohttp.

A `Connection` is a protocol to the event loop and a transport to aiohttp's protocol. Every byte
passes through it in both directions, by asyncio's public interfaces alone, so what it guarantees
does not depend on how aiohttp works inside. It knows no route and parses no HTTP. `server` makes
listeners of `Connections`.

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
    """A whole error response in the shape that most clients read, made of constants only.

    For errors where no dialect is known yet. Bytes that are not HTTP are never shown back.
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

    The head deadline runs from the first byte that arrives while no request is answered, and from
    the connection's begin; `begin_request` ends it. The write deadline runs while the socket's
    send buffer is full. aiohttp writes while a request is answered, or else to say that it could
    not parse one: then the client gets a fixed page in the place of aiohttp's, which quotes it.
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
        self._is_answering = False
        self._is_ending = False
        self._answer_begins_at = 0
        self.bytes_written = 0
        """Bytes of responses handed to the socket's transport since the connection began."""

    # -- the requests of a connection -----------------------------------------------------------

    def begin_request(self) -> None:
        """A handler has the next request: what aiohttp writes from now on is its response."""
        self._is_answering = True
        self._head_began_s = None
        self._answer_begins_at = self.bytes_written

    def end_request(self, *, may_follow: bool) -> None:
        """The response has been written. `may_follow`: the connection stays open for another."""
        self._is_answering = False
        self._is_ending |= not may_follow

    @property
    def has_answer_begun(self) -> bool:
        """Has the client been sent a part of the present request's response?"""
        return self.bytes_written > self._answer_begins_at

    def invite_body(self) -> None:
        """Answer `Expect: 100-continue`. It is no part of the response."""
        if self._stream is not None:
            self._stream.write(CONTINUE)

    async def drain(self) -> None:
        """Wait until the client has read enough of what was written.

        Raises ConnectionError if the connection is lost, which the write deadline sees to.
        """
        await self._writable.wait()
        if self.is_closing():
            raise ConnectionResetError("the client left before it had read its response")

    def fail(self) -> None:
        """Answer with a fixed 500 and close; abort if a part of a response was written."""
        if self.has_answer_begun:
            self.abort()
        else:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            self._end_with(status, "server_error", "internal_error", "Something failed here.")

    # -- a protocol to the event loop -----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Bound what the kernel and asyncio buffer; count the connection or turn it away."""
        assert isinstance(transport, asyncio.Transport)
        self._stream = transport
        settings = self._owner.settings
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, settings.send_buffer_bytes)
        transport.set_write_buffer_limits(high=settings.send_buffer_bytes)
        self._address = self._owner.enter(transport)
        if self._address is None:
            message = "Too many connections are open. Try again."
            status = HTTPStatus.SERVICE_UNAVAILABLE
            self._end_with(status, "server_error", "too_many_connections", message)
            return
        self._start_head_timer()
        self._protocol = self._owner.make_protocol()
        self._protocol.connection_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the connection's place back. aiohttp cancels the handler."""
        self._is_ending = True
        self._cancel_timers()
        self._writable.set()
        if self._address is not None:
            self._owner.leave(self._address)
            self._address = None
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass bytes on; the first ones after a response begin a head."""
        if not self._is_answering and self._head_began_s is None and not self._is_ending:
            self._start_head_timer()
        if self._protocol is not None:
            self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass on that the client sends no more."""
        return None if self._protocol is None else self._protocol.eof_received()

    def pause_writing(self) -> None:
        """Start the write deadline: the client reads too slowly."""
        self._writable.clear()
        self._start_write_timer()
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """End the write deadline: the client has caught up."""
        self._writable.set()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if self.is_closing():
            self._start_write_timer()
        if self._protocol is not None:
            self._protocol.resume_writing()

    # -- a transport to aiohttp -----------------------------------------------------------------

    def write(self, data: Data) -> None:
        """Send a part of a response. Anything else is replaced by the page for bad HTTP."""
        if not self._is_answering:
            self._refuse_unreadable()
        elif self._stream is not None:
            self.bytes_written += len(data)
            self._stream.write(data)

    def writelines(self, list_of_data: Iterable[Data]) -> None:
        """As `write`, of several pieces."""
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        """Close once what was written has left, or the write deadline is over."""
        self._is_ending = True
        if self._stream is not None:
            self._stream.close()
            if self._stream.get_write_buffer_size():
                self._start_write_timer()

    def abort(self) -> None:
        """Close at once, dropping what was not read: a reset tells the client it is incomplete."""
        self._is_ending = True
        if self._stream is not None:
            self._stream.abort()

    def is_closing(self) -> bool:
        """Is the connection closing or closed?"""
        return self._stream is None or self._stream.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """The socket transport's."""
        return default if self._stream is None else self._stream.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        """Bytes that the socket has not taken yet."""
        return 0 if self._stream is None else self._stream.get_write_buffer_size()

    def get_protocol(self) -> asyncio.BaseProtocol:
        """aiohttp's."""
        assert self._protocol is not None, "the connection is open"
        return self._protocol

    def is_reading(self) -> bool:
        """Are bytes being received?"""
        return self._stream is not None and self._stream.is_reading()

    def pause_reading(self) -> None:
        """Receive no bytes until `resume_reading`."""
        if self._stream is not None:
            self._stream.pause_reading()

    def resume_reading(self) -> None:
        """Receive bytes again."""
        if self._stream is not None:
            self._stream.resume_reading()

    def can_write_eof(self) -> bool:
        """Never: a response ends by its length, or with its connection."""
        return False

    # -- deadlines and fixed pages --------------------------------------------------------------

    def _start_head_timer(self) -> None:
        """Note when a head began. One timer serves many requests: it looks at the note."""
        self._head_began_s = self._loop.time()
        if self._head_timer is None:
            self._look_at_head_in(self._owner.settings.header_timeout_s)

    def _look_at_head_in(self, seconds: float) -> None:
        self._head_timer = self._loop.call_later(seconds, self._look_at_head)

    def _look_at_head(self) -> None:
        self._head_timer = None
        if self._head_began_s is None or self._is_ending:
            return
        due_s = self._head_began_s + self._owner.settings.header_timeout_s
        left_s = due_s - self._loop.time()
        if left_s > 0:
            self._look_at_head_in(left_s)
            return
        message = "The request's head did not arrive in time."
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
        message = "The bytes received are not a valid HTTP/1.1 request."
        status = HTTPStatus.BAD_REQUEST
        self._end_with(status, "invalid_request_error", "bad_http", message)

    def _end_with(self, status: HTTPStatus, kind: str, code: str, message: str) -> None:
        """Send a fixed page and close."""
        if self._stream is not None and not self._stream.is_closing():
            page = fixed_page(status, kind, code, message, self._owner.new_id())
            self._stream.write(page)
        self.close()


CONNECTION = web.RequestKey("connection", Connection)
"""The connection that a request came by; `request.transport` is None once it is lost."""


class Connections:
    """Makes connections and counts them: a protocol factory for `loop.create_server`."""

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        settings: ServerConfig,
        new_id: NewId,
        on_unreadable: Callable[[], None],
    ) -> None:
        """`make_protocol`: an HTTP protocol for each connection. `on_unreadable`: called for each
        request that is not HTTP."""
        self.make_protocol = make_protocol
        self.settings = settings
        self.new_id = new_id
        self.on_unreadable = on_unreadable
        self._open = 0
        self._open_by_address: Counter[str] = Counter()

    def __call__(self) -> Connection:
        return Connection(self)

    def enter(self, transport: asyncio.Transport) -> str | None:
        """Count a connection in and return its address; None if there is no room. O(1)."""
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if isinstance(peer, tuple) and peer else "local"
        cap = self.settings.connections_per_address_max
        is_crowded = cap and self._open_by_address[address] >= cap
        if self._open >= self.settings.connections_max or is_crowded:
            return None
        self._open += 1
        self._open_by_address[address] += 1
        return address

    def leave(self, address: str) -> None:
        """Count a connection out. O(1)."""
        self._open -= 1
        self._open_by_address[address] -= 1
        if not self._open_by_address[address]:
            del self._open_by_address[address]
