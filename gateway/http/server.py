"""The listener: aiohttp's HTTP parser behind connections of our own.

Bare aiohttp waits without end for a head, a body or a reader, keeps idle connections for an hour,
goes on working for a client that left, and quotes what it could not parse in its error page. Here
each of these has a deadline, a bound or a fixed text. It knows no dialect, no tenant and no engine,
and reads no body (`bodies`). `app` opens listeners.

    accept ── caps (all, per address) ── head: deadline ── handler ── answer: deadline per write
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from gateway.config import ServerConfig
from gateway.http.connection import CONNECTION, Connection, Connections, NewId

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
"""Answers one request: writes the whole response and returns it."""

_BACKLOG = 4_096
_LINGERING_S = 1.0

_SILENT = logging.getLogger("trunkline.aiohttp")
_SILENT.setLevel(logging.CRITICAL + 1)
"""aiohttp logs what it could not parse, keys included."""


class Listener:
    """One listening address, and what answers there."""

    def __init__(
        self,
        handler: Handler,
        settings: ServerConfig,
        new_id: NewId,
        *,
        on_unreadable: Callable[[], None] = lambda: None,
        shutdown_timeout_s: float = 60.0,
    ) -> None:
        """`on_unreadable`: called for each request that is not HTTP. `shutdown_timeout_s`: how long
        `close` waits for running requests before it cancels them."""
        self._handler = handler
        self._settings = settings
        self._new_id = new_id
        self._on_unreadable = on_unreadable
        self._shutdown_timeout_s = shutdown_timeout_s
        self._runner: web.ServerRunner | None = None
        self._server: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> tuple[str, int]:
        """Bind and accept; returns the address bound. Raises OSError if the port is taken."""
        make_protocol = web.Server(
            self._answer,
            handler_cancellation=True,
            keepalive_timeout=self._settings.keep_alive_timeout_s,
            lingering_time=_LINGERING_S,
            logger=_SILENT,
            access_log=None,
            auto_decompress=False,  # `bodies` decompresses, within a bound
        )
        self._runner = web.ServerRunner(make_protocol, shutdown_timeout=self._shutdown_timeout_s)
        await self._runner.setup()
        connections = Connections(make_protocol, self._settings, self._new_id, self._on_unreadable)
        self._server = await asyncio.get_running_loop().create_server(
            connections, host, port, backlog=_BACKLOG, reuse_address=True
        )
        bound = self._server.sockets[-1].getsockname()
        return str(bound[0]), int(bound[1])

    async def close(self) -> None:
        """Accept no more, close idle connections, wait for running requests, cancel the rest."""
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.transport
        if not isinstance(connection, Connection):
            raise ConnectionResetError("the client left before its request was handled")
        request[CONNECTION] = connection
        may_follow = False
        connection.begin_request()
        try:
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
