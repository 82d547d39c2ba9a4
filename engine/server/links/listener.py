"""Accepts gateways over TLS 1.3 on a listening socket that the keeper has opened.

Several gateways may have an engine, up to `GATEWAYS_MAX`; a further one is rejected as
`gateway_busy`. The processes of one gateway have its certificate: they are g0/0, g0/1 and so on.
The same name again replaces its old connection, whose requests are cancelled. A gateway that does
not read for `PATIENCE_S` is closed, so that none stops the engine. A connection
without a certificate of the authority, with another name than its certificate's, or with anything
but a Hello ends alone.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from engine.api import Clock, EngineInfo
from engine.client.tls_files import TlsError, tls_context
from engine.client.tls_wire import TlsWire
from engine.processes import log_line
from engine.protocol import Hello
from engine.server.links.gateway_link import GatewayLink
from engine.server.links.keeper_link import ListenSettings, check_version
from engine.server.links.peer_link import PeerLink, refusal
from engine.server.service import EngineService

HELLO_S = 5.0
"""Longest wait for a connection's Hello, in seconds."""
GATEWAYS_MAX = 16
PEER_S_MAX = 15.0
"""Longest connection of another engine: a share and its last bytes."""
PATIENCE_S = 1.0
"""Seconds that a gateway may be far behind in reading."""


class EngineListener:
    """The connections of gateways to one engine. Belongs to the event loop."""

    def __init__(
        self,
        settings: ListenSettings,
        service: EngineService,
        info: EngineInfo,
        fallen: tuple[str, ...],
        clock: Clock = time.monotonic,
        wall_s: Clock = lambda: time.time_ns() / 1e9,
    ) -> None:
        """`fallen`: ids of the requests in the step in which the life before ended. `wall_s`: the
        machine's clock, for the tickets of peers."""
        self._wall_s = wall_s
        self._clock = clock
        self._name, self._folder = settings.name, settings.tls
        self._service, self._info, self._fallen = service, info, fallen
        self._socket = socket.socket(fileno=settings.fd)
        self._socket.setblocking(False)
        self._context: ssl.SSLContext | None = None
        self._gateways: dict[str, GatewayLink] = {}
        self._peer_keys: dict[GatewayLink, bytes] = {}
        self._is_draining = False
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Accept connections from now on. Raises TlsError."""
        self.read_certificates()
        self._begin(self._accept())

    def read_certificates(self) -> None:
        """Read the certificates, for the connections that come from now on. Raises TlsError."""
        self._context = tls_context(self._folder, is_server=True)

    def begin_drain(self) -> None:
        """Tell the gateways to send nothing more."""
        self._is_draining = True
        for link in self._gateways.values():
            self._reject_draining(link)

    async def close(self) -> None:
        """End all connections, with their last frames sent. The listening socket stays the
        keeper's."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(link.close() for link in self._gateways.values()))
        self._socket.close()

    # -- connections ----------------------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                end, address = await loop.sock_accept(self._socket)
            except OSError as error:  # a lack of descriptors: the connection waits
                log_line("accept_failed", error=type(error).__name__)
                await asyncio.sleep(1.0)
                continue
            self._begin(self._serve(end, str(address[0])))

    async def _serve(self, end: socket.socket, address: str) -> None:
        """Serve one connection until it ends."""
        wire = TlsWire()
        try:
            self.read_certificates()  # anew: those of today expire
            assert self._context is not None
            await wire.accept(end, self._context)
        except (OSError, TlsError) as error:
            if isinstance(error, TlsError):
                log_line("gateway_refused", address=address, reason=error.message)
            end.close()  # without a word for one that has left: a gateway that waited too long
            return
        link = GatewayLink(wire.follow, None, patience_s=PATIENCE_S, clock=self._clock)
        hello = None
        with suppress(TimeoutError):
            async with asyncio.timeout(HELLO_S):
                hello = await link.read_hello()
        if hello is not None and hello.role == "peer" and check_version(link, hello):
            await self._share(link, wire, hello, address)
            return
        if hello is None or not self._admits(link, hello, wire.peer, address):
            await link.close()
            return
        name = hello.name
        before, self._gateways[name] = self._gateways.get(name), link
        if before is not None:
            before.reject("replaced", f"Another connection of gateway/{name} has taken the place.")
            await before.close()
        if hello.peer_key:
            self._peer_keys[link] = hello.peer_key
        link.welcome(self._service, self._info, self._fallen, hello.start, moves=True)
        if self._is_draining:
            self._reject_draining(link)
        link.keep_awake()
        log_line("gateway_joined", gateway=name, address=address)
        await link.ended.wait()
        self._peer_keys.pop(link, None)
        if self._gateways.get(name) is link:
            del self._gateways[name]
        reason = f"unread for {PATIENCE_S:g} s" if link.was_given_up else wire.reason
        log_line("gateway_left", gateway=name, reason=reason)

    async def _share(self, link: GatewayLink, wire: TlsWire, hello: Hello, address: str) -> None:
        """Serve another engine that fetches a prefix, until it leaves."""
        reason = refusal(hello, wire.peer, self._info, self._peer_keys.values(), self._wall_s())
        if reason:
            link.reject("unauthorized", reason)
            log_line("peer_refused", address=address, reason=reason)
            await link.close()
            return
        peer = PeerLink(wire, self._service)
        try:
            peer.begin(hello)
            async with asyncio.timeout(PEER_S_MAX):
                await peer.ended.wait()
        except TimeoutError:
            log_line("peer_left", peer=hello.name, reason=f"not done in {PEER_S_MAX:g} s")
        finally:
            wire.close()
            peer.close()

    def _reject_draining(self, link: GatewayLink) -> None:
        link.reject("draining", f"The engine {self._name} drains.")

    def _admits(self, link: GatewayLink, hello: Hello, holder: str, address: str) -> bool:
        """Return whether a gateway may be served; if not, tell it why, and the log."""
        if not check_version(link, hello):
            log_line("gateway_refused", address=address, reason=f"protocol {hello.version}")
            return False
        if hello.role != "gateway":
            code, message = "unsupported", f"Role {hello.role}; expected gateway."
        elif holder != f"gateway/{hello.name.partition('/')[0]}":
            code = "unauthorized"
            expected = hello.name.partition("/")[0]
            message = f"The certificate names {holder!r}; expected 'gateway/{expected}'."
        elif len(self._gateways.keys() | {hello.name}) > GATEWAYS_MAX:
            code = "gateway_busy"
            message = f"The engine {self._name} serves {GATEWAYS_MAX} gateways, and takes no more."
        else:
            return True
        link.reject(code, message)
        log_line("gateway_refused", address=address, reason=message)
        return False
