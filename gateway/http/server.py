"""The listener: aiohttp's HTTP parser behind `gateway.http.connection`.

By default aiohttp waits forever for a head, a body or a slow reader, keeps idle connections for an
hour, keeps working for a disconnected client, and quotes unparsable bytes in its error page. The
listener sets a deadline, a bound or a fixed text for each of these. It knows no dialect, no tenant
and no engine, and reads no body (`gateway.http.request_body` does). `gateway.app` opens listeners.

    accept ── places (all, per address, strangers) ── head: deadline ── earlier answers are read
           ── handler ── response: deadline per write ── close: the client's rest is dropped
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from aiohttp import web

from gateway.config import ServerConfig
from gateway.http.connection import CONNECTION, Connection, Connections, NewId

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
"""Handles one request: writes the whole response and returns it."""

_BACKLOG = 1_024
"""Connections that the kernel queues before they are accepted; it may have a smaller bound."""

_ACCEPTED_AT_ONCE = 64
"""Connections accepted in one turn of the event loop, so that a flood of them does not stop it."""

_QUIET_S = 0.25
"""Without a request for this long, a draining listener closes what is still open, in seconds: a
client that was answered just now asks again at once, and should learn why it is refused."""
_QUIET_WAIT_S = 2.0
_SHUTDOWN_TIMEOUT_S = 5.0
"""Seconds for which `close` waits for running requests before it cancels them."""

_NO_RESOURCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of a process or a system that cannot accept a connection now."""

_SILENT = logging.getLogger("trunkline.aiohttp")
_SILENT.setLevel(logging.CRITICAL + 1)
"""A muted logger: aiohttp logs unparsable requests, which may hold keys."""


class Listener:
    """One listening address and its handler."""

    def __init__(
        self,
        handler: Handler,
        settings: ServerConfig,
        new_id: NewId,
        *,
        on_unreadable: Callable[[], None],
    ) -> None:
        """Prepare a listener; `open` binds it. `on_unreadable` is called for each request that is
        not valid HTTP."""
        self._handler = handler
        self._settings = settings
        self._new_id = new_id
        self._on_unreadable = on_unreadable
        self._runner: web.ServerRunner | None = None
        self._server: asyncio.Server | None = None
        self._connections: Connections | None = None

    async def open(self, host: str, port: int, *, is_shared: bool = False) -> tuple[str, int]:
        """Bind, start accepting and return (host, port). `is_shared`: with other processes of this
        user. Raises OSError if the port is taken."""
        make_protocol = web.Server(
            self._handle,
            handler_cancellation=True,
            keepalive_timeout=self._settings.keep_alive_timeout_s,
            lingering_time=0,  # `Connection.close` drops the rest of a refused body
            logger=_SILENT,
            access_log=None,
            auto_decompress=False,  # `request_body` decompresses, within a bound
        )
        self._runner = web.ServerRunner(make_protocol, shutdown_timeout=_SHUTDOWN_TIMEOUT_S)
        await self._runner.setup()
        self._connections = Connections(
            make_protocol, self._settings, self._new_id, self._on_unreadable
        )
        self._server = await asyncio.get_running_loop().create_server(
            *(self._connections, host, port),
            backlog=_ACCEPTED_AT_ONCE,
            reuse_address=True,
            reuse_port=is_shared or None,
        )
        self._set_backlog(_BACKLOG)  # asyncio's own is also the number that it accepts at once
        bound = self._server.sockets[-1].getsockname()
        return str(bound[0]), int(bound[1])

    @property
    def open_connections(self) -> int:
        """The number of connections that are not lost yet."""
        return 0 if self._connections is None else len(self._connections.opened)

    def begin_drain(self) -> None:
        """Answer each request from now on with `Connection: close`; go on accepting."""
        if self._connections is not None:
            self._connections.is_draining = True

    async def end_drain(self) -> None:
        """Stop accepting, and answer those that still ask, until they have been quiet for
        `_QUIET_S`; at most `_QUIET_WAIT_S`."""
        if self._server is None or self._connections is None:
            return
        # Closing a listening socket resets the connections that it has queued: accept them first.
        self._set_backlog(0)
        for _ in range(_BACKLOG // _ACCEPTED_AT_ONCE):
            await asyncio.sleep(0)
        last = self._accept_last()
        self._server.close()
        connections, loop = self._connections, asyncio.get_running_loop()
        for accepted in last:
            with suppress(OSError):
                await loop.connect_accepted_socket(connections, accepted)
        until_s = loop.time() + _QUIET_WAIT_S
        while connections.opened and loop.time() < until_s:
            quiet_at_s = min(until_s, connections.asked_at_s + _QUIET_S)
            if loop.time() >= quiet_at_s:
                return
            await asyncio.sleep(quiet_at_s - loop.time())

    async def close(self) -> None:
        """Stop accepting, close idle connections, wait for running requests, cancel the rest."""
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._connections is not None:
            for connection in tuple(self._connections.opened):
                connection.abort()  # those that wait for their client's end
            await asyncio.sleep(0)

    def _accept_last(self) -> list[socket.socket]:
        """Accept what is queued; nothing runs between this and the close of the sockets."""
        assert self._server is not None, "the listener is not open"
        accepted: list[socket.socket] = []
        for listening in self._server.sockets:
            with socket.socket(fileno=os.dup(listening.fileno())) as same, suppress(OSError):
                same.setblocking(False)
                while True:
                    connection, _ = same.accept()
                    connection.setblocking(False)
                    accepted.append(connection)
        return accepted

    def _set_backlog(self, backlog: int) -> None:
        assert self._server is not None, "the listener is not open"
        for listening in self._server.sockets:
            with socket.socket(fileno=os.dup(listening.fileno())) as same:
                same.listen(backlog)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Run the handler, and tell the connection where the response begins and ends."""
        connection = request.transport
        if not isinstance(connection, Connection):
            raise ConnectionResetError(
                "the client closed the connection before its request was handled"
            )
        request[CONNECTION] = connection
        may_follow = False
        connection.begin_request()
        try:
            if not connection.writable.is_set():
                await connection.drain()  # the client has not read its earlier answers
            response = await self._handler(request)
            may_follow = bool(response.keep_alive)
        except ConnectionError:
            connection.abort()
            raise
        except Exception:
            connection.fail()
            raise
        else:
            return response
        finally:
            connection.end_request(may_follow=may_follow)


def log_accept_errors(
    loop: asyncio.AbstractEventLoop, log: Callable[[str, dict[str, object]], None]
) -> None:
    """Log at most one line a second when connections cannot be accepted.

    asyncio reports each failed accept of a round and tries again after a second. Other errors of
    the loop go to its default handler.
    """
    last_s = float("-inf")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last_s
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _NO_RESOURCE:
            loop.default_exception_handler(context)
        elif loop.time() - last_s >= 1.0:
            last_s = loop.time()
            log("accept_failed", {"error": errno.errorcode[error.errno]})

    loop.set_exception_handler(handle)
