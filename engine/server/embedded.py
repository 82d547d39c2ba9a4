"""An engine in a thread of this process, for embedding and for tests.

It uses the service and the streams of the socket engine, without the socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.api import Command, EngineInfo
from engine.client.client import EngineConnection
from engine.config import EngineConfig
from engine.core.core import Core
from engine.protocol import Messages
from engine.server.outbox import Outbox
from engine.server.service import EngineService


class LocalEngine(EngineConnection):
    """An `engine.client.client.Engine` over a service in a thread. Make one with `start`."""

    def __init__(
        self, service: EngineService, loop: asyncio.AbstractEventLoop, *, is_owner: bool = True
    ) -> None:
        """`is_owner`: its end is the service's."""
        super().__init__()
        self.service = service
        self._is_owner = is_owner
        self._loop = loop
        self._outbox = Outbox(self._schedule_read)

    @classmethod
    async def start(
        cls, make_core: Callable[[], tuple[Core, EngineInfo]], config: EngineConfig
    ) -> LocalEngine:
        """Load the model and wait until a token was produced. Raises the error of a failed
        start."""
        loop = asyncio.get_running_loop()

        service = EngineService(
            make_core, config, on_change=lambda: engine._call_in_loop(engine._on_service_change)
        )
        engine = cls(service, loop)
        service.start()
        await asyncio.to_thread(service.ready.wait)
        if service.failure is not None:
            raise service.failure
        engine.info = service.info
        service.join(engine)
        return engine

    def beside(self) -> LocalEngine:
        """Return a second connection to the same engine, as of another gateway. It ends before this
        one does."""
        other = LocalEngine(self.service, self._loop, is_owner=False)
        other.info = self.info
        self.service.join(other)
        return other

    def _on_service_change(self) -> None:
        if self.service.stopped.is_set():
            self._receive_all()
            self.mark_lost("The engine stopped.")

    def post(self, command: Command) -> None:
        """See `EngineConnection.post`."""
        if self.service.stopped.is_set():
            self.mark_lost("The engine stopped.")
            return
        self.service.post(self, command)

    def send(self, step: int, messages: Messages) -> None:
        """`engine.server.service.ResponseSink`: called in the service's thread."""
        self._outbox.put((step, messages))

    def _schedule_read(self) -> None:
        self._call_in_loop(self._receive_all)

    def _call_in_loop(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the event loop ended before the engine did
            self._outbox.close()

    def _receive_all(self) -> None:
        for _, messages in self._outbox.take():
            self.receive(messages)

    async def close(self) -> None:
        """See `Engine.close`."""
        if self._is_owner:
            await asyncio.to_thread(self.service.stop)
        else:
            self.service.leave(self)
        self._outbox.close()
        self.mark_lost("The engine was closed.")
