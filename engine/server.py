"""The engine as a process: `python -m engine.server` behind a Unix socket.

Its first line of input is a `ServerSettings` as JSON; the end of its input means that the parent
is gone, and it goes too. SIGTERM drains: nothing new is taken, what runs may finish; a second one
ends it at once. Log lines are JSON, one per event, on standard error; never prompts.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from engine.api import PROTOCOL_VERSION, Drain, EngineInfo, Event, Frame, Reply
from engine.config import EngineConfig
from engine.core import Core
from engine.errors import EngineError
from engine.frames import (
    Downward,
    FrameError,
    Hello,
    Rejected,
    Upward,
    Welcome,
    encode,
    upward_decoder,
)
from engine.service import EngineService, core_of_model

READ_BYTES = 1 << 18
OUTBOX_BYTES_MAX = 8 * 2**20
"""A gateway that reads slower than this far behind stops the engine until it catches up."""


class ServerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """What a parent tells its engine. `token`: whoever connects has to know it."""

    socket_path: str
    token: str
    model_dir: str
    config: EngineConfig


class SocketOutlet:
    """One connection's way out: called on the service's thread, written on the loop's."""

    def __init__(self, writer: asyncio.StreamWriter, loop: asyncio.AbstractEventLoop) -> None:
        self._writer = writer
        self._loop = loop
        self._number = 0
        self._has_room = threading.Event()
        self._has_room.set()
        self.is_open = True
        self._catching_up: asyncio.Task[None] | None = None

    def send(self, step: int, messages: tuple[Event | Reply, ...]) -> None:
        """Blocks while the peer is far behind, for as long as it is connected."""
        frame = Frame(self._number, step, messages)
        self._number += 1
        self._has_room.wait()
        self._loop.call_soon_threadsafe(self._write, frame)

    def close(self) -> None:
        """The connection is gone; nobody waits for it."""
        self.is_open = False
        self._has_room.set()

    def _write(self, message: Downward) -> None:
        if not self.is_open or self._writer.is_closing():
            return
        self._writer.write(encode(message))
        if self._writer.transport.get_write_buffer_size() > OUTBOX_BYTES_MAX:
            self._has_room.clear()
            self._catching_up = self._loop.create_task(self._catch_up())

    async def _catch_up(self) -> None:
        try:
            await self._writer.drain()
        except OSError:
            self.close()
        self._has_room.set()


class EngineServer:
    """Accepts connections for one service."""

    def __init__(self, service: EngineService, token: str) -> None:
        self._service = service
        self._token = token
        self._outlets: list[SocketOutlet] = []

    async def serve(self, path: Path, stop: asyncio.Event) -> None:
        """Until `stop` is set. The socket is readable and writable by its owner alone."""
        mask = os.umask(0o177)
        try:
            server = await asyncio.start_unix_server(self._connected, str(path), limit=READ_BYTES)
        finally:
            os.umask(mask)
        async with server:
            await stop.wait()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        outlet = SocketOutlet(writer, asyncio.get_running_loop())
        try:
            await self._converse(reader, writer, outlet)
        except (FrameError, OSError) as error:
            log("connection_lost", reason=type(error).__name__)
        finally:
            outlet.close()
            self._service.leave(outlet)
            writer.close()

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, outlet: SocketOutlet
    ) -> None:
        decoder = upward_decoder()
        is_known = False
        while data := await reader.read(READ_BYTES):
            for message in decoder.feed(data):
                if not is_known:
                    answer = await self._greet(message)
                    writer.write(encode(answer))
                    if not isinstance(answer, Welcome):
                        await writer.drain()
                        return
                    is_known = True
                elif isinstance(message, Hello):
                    raise FrameError("a second hello")
                else:
                    self._service.post(outlet, message)

    async def _greet(self, message: Upward) -> Welcome | Rejected:
        if not isinstance(message, Hello):
            return Rejected("unsupported", "The first message has to be a hello.")
        if message.version != PROTOCOL_VERSION:
            return Rejected("unsupported", f"This engine speaks version {PROTOCOL_VERSION}.")
        if not hmac.compare_digest(message.token.encode(), self._token.encode()):
            return Rejected("unsupported", "The token is not this engine's.")
        await asyncio.to_thread(self._service.ready.wait)
        failure, info = self._service.failure, self._service.info
        if isinstance(failure, EngineError):
            return Rejected(failure.code, failure.message)
        if failure is not None or info is None:
            return Rejected("engine_died", f"The engine failed to start: {failure!r}.")
        return Welcome(info)


class _Silent:
    """An outlet for commands nobody waits to hear about."""

    def send(self, step: int, messages: tuple[Event | Reply, ...]) -> None:
        """Nothing."""


def log(event: str, **facts: object) -> None:
    """One JSON line on standard error."""
    line = msgspec.json.encode({"at": round(time.time(), 3), "event": event, **facts})  # noqa: TID251
    sys.stderr.buffer.write(line + b"\n")
    sys.stderr.buffer.flush()


async def run(settings: ServerSettings, make_core: Callable[[], tuple[Core, EngineInfo]]) -> int:
    """Serve until drained, told to stop, or broken. Returns the exit status."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    service = EngineService(make_core, settings.config)

    def end() -> None:
        if stop.is_set():
            os._exit(1)
        if is_draining.is_set():
            stop.set()
            return
        is_draining.set()
        log("draining")
        service.post(_Silent(), Drain(settings.config.drain_timeout_s))
        idle = _stop_when_idle(service, stop, settings.config.drain_timeout_s)
        tasks.append(loop.create_task(idle))

    is_draining = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []
    loop.add_signal_handler(signal.SIGTERM, end)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # the gateway hears it too, and decides
    loop.add_reader(sys.stdin.fileno(), lambda: _parent_spoke(stop))
    service.start()
    tasks.append(loop.create_task(_watch(service, stop)))
    await EngineServer(service, settings.token).serve(Path(settings.socket_path), stop)
    for task in tasks:
        task.cancel()
    failure = service.failure
    if failure is not None:
        log("engine_failed", error=type(failure).__name__, message=str(failure))
    service.stop(1.0)
    return 0 if failure is None else 1


def _parent_spoke(stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        stop.set()


async def _watch(service: EngineService, stop: asyncio.Event) -> None:
    """Ends the process when the service has ended by itself."""
    await asyncio.to_thread(service.ready.wait)
    if service.info is not None:
        log("ready", model=service.info.model, blocks=service.info.blocks, pid=os.getpid())
    await asyncio.to_thread(service.stopped.wait)
    await asyncio.sleep(0.2)  # let the last frames leave
    stop.set()


async def _stop_when_idle(service: EngineService, stop: asyncio.Event, timeout_s: float) -> None:
    """Drained when nobody owns a request any more."""
    deadline_s = time.monotonic() + timeout_s + 1.0
    while service.open_requests and time.monotonic() < deadline_s:  # noqa: ASYNC110 - a thread's
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.05)  # let the last frames leave
    stop.set()


def main() -> int:
    """Read the settings, load the model, serve."""
    line = sys.stdin.buffer.readline()
    settings = msgspec.json.decode(line, type=ServerSettings)
    folder = Path(settings.model_dir)
    return asyncio.run(run(settings, lambda: core_of_model(folder, settings.config)))


if __name__ == "__main__":
    sys.exit(main())
