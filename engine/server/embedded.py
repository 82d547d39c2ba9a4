"""An engine in a thread of this process: for tests and for embedding.

The same service and the same streams as over a socket, without the socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.api import Command, EngineInfo, Event, Reply
from engine.client.client import EngineConnection
from engine.config import EngineConfig
from engine.core.core import Core
from engine.server.outbox import Outbox
from engine.server.service import EngineService


class LocalEngine(EngineConnection):
    """`engine.client.client.Engine` over a service in a thread. Make one with `start`."""

    def __init__(self, service: EngineService, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.service = service
        self._loop = loop
        self._outbox = Outbox(self._wake)

    @classmethod
    async def start(
        cls, make_core: Callable[[], tuple[Core, EngineInfo]], config: EngineConfig
    ) -> LocalEngine:
        """Load and wait until it has produced a token. Raises what loading raised."""
        loop = asyncio.get_running_loop()

        service = EngineService(make_core, config, changed=lambda: engine._tell(engine._changed))
        engine = cls(service, loop)
        service.start()
        await asyncio.to_thread(service.ready.wait)
        if service.failure is not None:
            raise service.failure
        engine.info = service.info
        service.join(engine)
        return engine

    def _changed(self) -> None:
        if self.service.stopped.is_set():
            self._read()
            self.mark_lost("engine_died", "The engine stopped.")

    def post(self, command: Command) -> None:
        """See `EngineConnection.post`."""
        if self.service.stopped.is_set():
            self.mark_lost("engine_died", "The engine stopped.")
            return
        self.service.post(self, command)

    def send(self, step: int, messages: tuple[Event | Reply, ...]) -> None:
        """`engine.server.service.ResponseSink`: called on the service's thread."""
        self._outbox.put((step, messages))

    def _wake(self) -> None:
        self._tell(self._read)

    def _tell(self, what: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop has ended before its engine: nobody reads any more
            self._outbox.close()

    def _read(self) -> None:
        for _, messages in self._outbox.take():
            self.receive(messages)

    async def close(self) -> None:
        """See `Engine.close`."""
        await asyncio.to_thread(self.service.stop)
        self._outbox.close()
        self.mark_lost("engine_died", "The engine was closed.")
