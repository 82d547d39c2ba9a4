"""One client's connection, and who counts them: aiohttp's own with its open ends closed.

Deadlines on heads and writes, a bound on how many there are, fixed words for what cannot be parsed,
and one task for all requests of a connection. It knows no application, no route and no answer.
`server` makes a listener of it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_writer import StreamWriter
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import ERROR, RequestHandler, RequestPayloadError, _ErrInfo

from gateway.config import ServerConfig

NewId = Callable[[], str]
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def fixed_error(status: int, kind: str, code: str, message: str, request_id: str) -> web.Response:
    """An error in the shape most clients read, made of constants only; closes the connection.

    Used where no dialect is known yet: what could not be parsed as HTTP is never shown back.
    """
    error = {"message": message, "type": kind, "param": None, "code": code}
    response = web.Response(
        status=status,
        body=json.dumps({"error": error}).encode(),
        content_type="application/json",
        headers={"x-request-id": request_id},
    )
    response.force_close()
    return response


_UNREADABLE = "The bytes received are not a valid HTTP/1.1 request."
_SLOW_HEAD = "The request's head did not arrive in time."
_CROWDED = "Too many connections are open. Try again."


class Connection(RequestHandler):
    """One client's connection: a deadline on the head, on each write, fixed error pages, and its
    requests one after another.

    aiohttp parses heads inside the transport's callback, so the deadline on a head is a timer that
    starts with the first byte that belongs to no message yet, and with the connection itself. A
    write's timer runs only while the transport holds more than it should: hardly one write in a
    thousand has to wait for its reader.
    """

    __slots__ = ("_address", "_head_s", "_head_timer", "_listener", "_payload", "_write_timer")

    def __init__(self, listener: Listener, **kwargs: Any) -> None:
        super().__init__(listener, **kwargs)
        self._listener = listener
        self._head_s: float | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._payload: Any = None
        self._address: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, or turn it away; bound what the kernel and asyncio buffer."""
        super().connection_made(transport)
        stream = cast(asyncio.Transport, transport)
        settings = self._listener.settings
        raw = stream.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, settings.send_buffer_bytes)
        stream.set_write_buffer_limits(high=settings.send_buffer_bytes)
        self._address = self._listener.enter(stream)
        if self._address is None:
            self._reply_and_close(503, "server_error", "too_many_connections", _CROWDED)
            return
        self._start_head_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Give the connection's place back. Cancels the handler."""
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        if self._address is not None:
            self._listener.leave(self._address)
            self._address = None
        super().connection_lost(exc)

    async def start(self) -> None:
        """Answer one request after another, in the connection's own task.

        aiohttp makes a task for each: two turns of the loop more, 6 % of a tiny answer. So whatever
        cancels the connection's task cancels the handler; what a handler sets in its context stays.
        """
        while not self._force_close:
            if not self._messages:
                self._waiter = self._loop.create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            try:
                if not await self._answer(*self._messages.popleft()):
                    break
            except asyncio.CancelledError:
                self.force_close()
                raise
            except Exception as error:
                self.log_exception("Unhandled exception", exc_info=error)
                self.force_close()
        if not self._force_close:
            self._task_handler = None
            if self.transport is not None:
                self.transport.close()

    async def _answer(self, message: Any, payload: StreamReader) -> bool:
        """One request, from its head to its answer. May another follow?"""
        if self._parser is not None:
            self._parser.message_consumed()
        if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
            self._resume_reading_if_drained()
        self._listener.requests_count += 1
        handler, task = self._request_handler, self._task_handler
        if isinstance(message, _ErrInfo):
            handler, message = self._make_error_handler(message), ERROR
        assert handler is not None
        assert task is not None
        assert self._request_factory is not None
        writer = StreamWriter(self, self._loop)
        request = self._request_factory(message, payload, self, writer, task)
        self._request_in_progress = True
        try:
            self._current_request = request
            try:
                answer = await handler(request)
            finally:
                self._current_request = None
            response, is_broken = await self.finish_response(request, answer, None)
        except ConnectionError:
            return False
        finally:
            self._request_in_progress = False
            if self._handler_waiter is not None:
                self._handler_waiter.set_result(None)
        if is_broken:
            return False
        self._keepalive = bool(response.keep_alive)
        if not payload.is_eof():
            await self._linger(payload)
        if not self._keepalive or self._close or self._force_close:
            return False
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if self._keepalive_handle is None:
            self._keepalive_handle = self._loop.call_at(
                self._next_keepalive_close_time, self._process_keepalive
            )
        return True

    async def _linger(self, payload: StreamReader) -> None:
        """Read on for a moment what nobody wants: closing on unread bytes resets the connection,
        and the client may never see its answer."""
        with suppress(TimeoutError, RequestPayloadError, HttpProcessingError):
            async with asyncio.timeout(self._lingering_time):
                while not payload.is_eof():
                    await payload.readany()
        if not payload.is_eof():
            self.close()

    def data_received(self, data: bytes) -> None:
        """Feed the parser; keep the head's deadline running while a head is incomplete. Without
        data it is aiohttp that looks for what it has left, whenever a body has been read."""
        between = self._payload is None or self._payload.is_eof()
        before = self._request_count
        super().data_received(data)
        if self._request_count > before and self._messages:
            self._payload = self._messages[-1][1]
            self._head_s = None
        elif data and between and self._head_s is None and not self._upgraded:
            self._start_head_timer()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Where it was paused. aiohttp asks twice a body and looks through its parser each time."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def pause_writing(self) -> None:
        """The client reads too slowly: from now on it has so long to catch up."""
        super().pause_writing()
        self._write_timer = self._loop.call_later(
            self._listener.settings.write_timeout_s, self.abort
        )

    def resume_writing(self) -> None:
        """It has."""
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().resume_writing()

    def _start_head_timer(self) -> None:
        """A head has begun. The timer outlives it: one for many requests, not one for each."""
        self._head_s = self._loop.time()
        if self._head_timer is None:
            self._look_at_head_in(self._listener.settings.header_timeout_s)

    def _look_at_head_in(self, seconds: float) -> None:
        self._head_timer = self._loop.call_later(seconds, self._look_at_head)

    def _look_at_head(self) -> None:
        self._head_timer = None
        if self.transport is None or self._head_s is None:
            return
        timeout_s = self._listener.settings.header_timeout_s
        left_s = self._head_s + timeout_s - self._loop.time()
        if left_s > 0:
            self._look_at_head_in(left_s)
        elif self._request_in_progress or self._messages:
            self._start_head_timer()  # A pipelined head: the answer before it comes first.
        else:
            self._reply_and_close(408, "invalid_request_error", "request_timeout", _SLOW_HEAD)

    def _reply_and_close(self, status: int, kind: str, code: str, message: str) -> None:
        """Write one fixed answer past the parser. Only for connections without a handler."""
        stream = self.transport
        if stream is None:
            return
        request_id = self._listener.new_id()
        response = fixed_error(status, kind, code, message, request_id)
        body = cast(bytes, response.body)
        head = (
            f"HTTP/1.1 {status} {response.reason}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\nconnection: close\r\n"
            "retry-after: 1\r\n\r\n"
        )
        stream.write(head.encode() + body)
        self.close()
        stream.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what the parser or aiohttp itself refused, in fixed words, logging none of it."""
        if request.writer.output_size > 0:
            raise ConnectionError("part of another answer is already on the wire")
        self._listener.count_unreadable()
        new_id = self._listener.new_id()
        if isinstance(exc, HttpProcessingError) or status == 400:
            return fixed_error(400, "invalid_request_error", "bad_http", _UNREADABLE, new_id)
        return fixed_error(500, "server_error", "internal_error", "Something failed here.", new_id)

    def abort(self) -> None:
        """Close at once, dropping what was not read: a reset tells the client it is incomplete."""
        stream = self.transport
        self.force_close()
        if stream is not None:
            stream.abort()


class Listener(web.Server):
    """Makes connections and counts them."""

    def __init__(
        self,
        handler: Handler,
        *,
        settings: ServerConfig,
        new_id: NewId,
        on_unreadable: Callable[[], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,
            keepalive_timeout=settings.keep_alive_timeout_s,
            lingering_time=1.0,
            access_log=None,
            **kwargs,
        )
        self.settings = settings
        self.new_id = new_id
        self.count_unreadable = on_unreadable
        self._open = 0
        self._open_by_address: Counter[str] = Counter()

    def __call__(self) -> RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)

    def enter(self, transport: asyncio.Transport) -> str | None:
        """Count a connection in and return its address; None if there is no room. O(1)."""
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if isinstance(peer, tuple) and peer else "local"
        cap = self.settings.connections_per_address_max
        crowded = cap and self._open_by_address[address] >= cap
        if self._open >= self.settings.connections_max or crowded:
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

    @property
    def open_connections(self) -> int:
        """How many connections are counted in."""
        return self._open
