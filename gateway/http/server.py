"""The listener: aiohttp with every unsafe default closed.

Bare aiohttp waits for ever for a header, a body or a reader, keeps idle connections for an hour,
goes on working for a client that left, and prints what it could not parse into its own error page.
Here each of these has a deadline, a bound or a fixed text. It knows nothing of dialects, tenants
or the engine, and reads no body (`bodies`). `app` makes listeners of it; `middleware` and `answer`
write answers through it.

    accept ── caps (all, per address) ── head: deadline ── handler ── answer: deadline per write
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

from aiohttp import web
from aiohttp.http_writer import StreamWriter

from gateway.config import ServerConfig
from gateway.http.connection import Connection, Listener, NewId
from gateway.http.response import Whole

_WRITE_PIECE_BYTES = 65_536
_BACKLOG = 4_096

Entrance = Callable[[web.Request], Awaitable[web.StreamResponse]]
ENTRANCE: web.AppKey[Entrance] = web.AppKey("entrance")
"""Who answers an application's requests in its place."""

Naming = Callable[[dict[str, str]], dict[str, str]]
NAMING: web.RequestKey[Naming] = web.RequestKey("naming")
"""Adds to a head what all answers to this request say."""


class ClientGone(Exception):
    """Nobody reads the answer any more; the connection is closed and the work is given up."""


class ListenerRunner(web.AppRunner):
    """An `AppRunner` whose server is a `Listener`."""

    __slots__ = ("_new_id", "_on_unreadable", "_settings")

    def __init__(
        self,
        app: web.Application,
        settings: ServerConfig,
        new_id: NewId,
        *,
        on_unreadable: Callable[[], None] = lambda: None,
        shutdown_timeout_s: float = 60.0,
    ) -> None:
        super().__init__(app, shutdown_timeout=shutdown_timeout_s)
        self._settings = settings
        self._new_id = new_id
        self._on_unreadable = on_unreadable

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        return Listener(
            cast(Any, self.app.get(ENTRANCE, plain.request_handler)),
            settings=self._settings,
            new_id=self._new_id,
            on_unreadable=self._on_unreadable,
            request_factory=plain.request_factory,
            auto_decompress=False,  # `bodies` does, for codings it takes, and refuses the others
            loop=asyncio.get_running_loop(),
        )

    @property
    def listener(self) -> Listener:
        """The running listener; only after `setup`."""
        assert isinstance(self._server, Listener)
        return self._server

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Bind and accept; returns the address bound. Raises OSError if the port is taken."""
        site = web.TCPSite(self, host, port, backlog=_BACKLOG, reuse_address=True)
        await site.start()
        bound = self.addresses[-1]
        return str(bound[0]), int(bound[1])


# --- answers out ---------------------------------------------------------------------------------


async def begin(request: web.Request, response: web.StreamResponse) -> None:
    """Prepare an answer. Raises ClientGone if nobody is there any more."""
    try:
        await response.prepare(request)
    except ConnectionError:
        cut(request)
        raise ClientGone from None


async def write(request: web.Request, data: bytes) -> None:
    """Write `data` of a prepared answer, and wait for the client to read if it is far behind.

    Raises ClientGone, having closed the connection, if it does not (see `Connection`).
    """
    writer = cast(StreamWriter, request.writer)
    try:
        await writer.write(data, drain=False)
        if request.protocol.writing_paused:
            await writer.drain()
    except ConnectionError:
        cut(request)
        raise ClientGone from None


def whole(request: web.Request, status: int, body: bytes, headers: dict[str, str]) -> Whole:
    """A complete answer, all but sent."""
    return Whole(request, status, body, request[NAMING](headers))


async def send(request: web.Request, answer: Whole) -> web.StreamResponse:
    """Write it; a long one in pieces, so that a slow reader has a deadline per piece. Raises
    ClientGone from the middle of one."""
    data = answer.data
    if len(data) <= _WRITE_PIECE_BYTES:
        with suppress(ConnectionError):  # whoever asks for it next is told
            answer.leave()
        return answer
    for start in range(0, len(data), _WRITE_PIECE_BYTES):
        await write(request, data[start : start + _WRITE_PIECE_BYTES])
    answer.has_left = True
    return answer


def cut(request: web.Request) -> None:
    """Drop the connection so that the client's transport sees a broken answer, not a short one."""
    protocol = request.protocol
    if isinstance(protocol, Connection):
        protocol.abort()
