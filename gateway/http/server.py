"""The listener: aiohttp's HTTP parser behind `gateway.http.connection`.

By default aiohttp waits forever for a head, a body or a slow reader, keeps idle connections for an
hour, keeps working for a disconnected client, and quotes unparsable bytes in its error page. The
listener sets a deadline, a bound or a fixed text for each of these. It knows no dialect, no tenant
and no engine, and reads no body (`gateway.http.request_body` does). `gateway.app` opens listeners.

    accept ── caps (all, per address) ── head: deadline ── handler ── response: deadline per write
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from gateway.config import ServerConfig
from gateway.http.connection import CONNECTION, Connection, Connections, NewId

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
"""Handles one request: writes the whole response and returns it."""

_BACKLOG = 4_096
"""Connections that the kernel queues before they are accepted."""

_LINGERING_S = 1.0
"""How long aiohttp reads the rest of a refused body before it closes, in seconds."""

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
        on_unreadable: Callable[[], None] = lambda: None,
        shutdown_timeout_s: float = 60.0,
    ) -> None:
        """Prepare a listener; `open` binds it.

        `on_unreadable` is called for each request that is not valid HTTP. `shutdown_timeout_s`: how
        long `close` waits for running requests before it cancels them.
        """
        self._handler = handler
        self._settings = settings
        self._new_id = new_id
        self._on_unreadable = on_unreadable
        self._shutdown_timeout_s = shutdown_timeout_s
        self._runner: web.ServerRunner | None = None
        self._server: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> tuple[str, int]:
        """Bind, start accepting and return (host, port). Raises OSError if the port is taken."""
        make_protocol = web.Server(
            self._handle,
            handler_cancellation=True,
            keepalive_timeout=self._settings.keep_alive_timeout_s,
            lingering_time=_LINGERING_S,
            logger=_SILENT,
            access_log=None,
            auto_decompress=False,  # `request_body` decompresses, within a bound
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
        """Stop accepting, close idle connections, wait for running requests, cancel the rest."""
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()

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
