"""The engine as a process: `python -m engine.server.server` behind a Unix socket.

Its first line of input is a `ServerSettings` as JSON; the end of its input means that the parent
is gone, and it goes too. SIGTERM drains: nothing new is taken, what runs may finish; a second one
ends it at once. Log lines are JSON, one per event, on standard error; never prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec import Struct

from engine.api import PROTOCOL_VERSION, Drain, EngineInfo, Event, Frame, Reply
from engine.config import EngineConfig
from engine.core.core import Core
from engine.errors import EngineError
from engine.protocol import (
    FrameError,
    Hello,
    Rejected,
    Upward,
    Welcome,
    encode,
    upward_decoder,
)
from engine.server.gc_tuning import FrozenHeap
from engine.server.outbox import Outbox
from engine.server.service import EngineService, core_of_model
from engine.signals import heeded

READ_BYTES = 1 << 18
FLUSH_S = 1.0
REJECT_S = 5.0
OUTBOX_BYTES_MAX = 8 * 2**20
"""A gateway that reads slower than this far behind stops the engine until it catches up."""


class ServerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """What a parent tells its engine. `token`: whoever connects has to know it."""

    socket_path: str
    token: str
    model_dir: str
    config: EngineConfig


class SocketResponseSink:
    """One connection's way out: filled on the service's thread, written on the loop's."""

    def __init__(self, writer: asyncio.StreamWriter, loop: asyncio.AbstractEventLoop) -> None:
        self._writer = writer
        self._loop = loop
        self._number = 0
        self._outbox = Outbox(self._wake)
        self._catching_up: asyncio.Task[None] | None = None

    def send(self, step: int, messages: tuple[Event | Reply, ...]) -> None:
        """Blocks while the peer is far behind, for as long as it is connected."""
        self._outbox.put((step, messages))

    def close(self) -> None:
        """The connection is gone; nobody waits for it."""
        self._outbox.close()
        self._writer.close()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended before its engine
            self._loop.call_soon_threadsafe(self._write)

    def _write(self) -> None:
        answers = self._outbox.take()
        if self._writer.is_closing():
            return
        for step, messages in answers:
            self._writer.write(encode(Frame(self._number, step, messages)))
            self._number += 1
        if self._writer.transport.get_write_buffer_size() > OUTBOX_BYTES_MAX:
            self._outbox.hold()
            if self._catching_up is None:
                self._catching_up = self._loop.create_task(self._catch_up())

    async def flush(self) -> None:
        """Give the peer a moment to read the last frames."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                self._writer.transport.set_write_buffer_limits(high=0)
                await self._writer.drain()

    async def _catch_up(self) -> None:
        with contextlib.suppress(OSError):  # the connection's own reader sees it too
            await self._writer.drain()
        self._catching_up = None
        self._outbox.release()


class EngineServer:
    """Accepts connections for one service."""

    def __init__(self, service: EngineService, token: str, loaded: asyncio.Event) -> None:
        """`loaded`: set once the service is ready or will never be."""
        self._service = service
        self._token = token
        self._loaded = loaded
        self._outlets: set[SocketResponseSink] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, path: Path) -> None:
        """Take connections from now on. The socket is open to its owner alone. Raises OSError."""
        mask = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(
                self._connected, str(path), limit=READ_BYTES
            )
        finally:
            os.umask(mask)

    async def close(self) -> None:
        """Take no more, let the last frames leave, and hang up."""
        if self._server is not None:
            self._server.close()
        for outlet in list(self._outlets):
            await outlet.flush()
            outlet.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        outlet = SocketResponseSink(writer, asyncio.get_running_loop())
        self._outlets.add(outlet)
        try:
            await self._converse(reader, writer, outlet)
        except (FrameError, OSError) as error:
            log("connection_lost", reason=type(error).__name__)
        except asyncio.CancelledError:
            pass  # the process is ending, and the loop with it
        finally:
            outlet.close()
            self._service.leave(outlet)
            self._outlets.discard(outlet)

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, outlet: SocketResponseSink
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
                    self._service.join(outlet)
                elif isinstance(message, Hello):
                    raise FrameError("a second hello")
                else:
                    self._service.post(outlet, message)

    async def _greet(self, message: Upward) -> Welcome | Rejected:
        if not isinstance(message, Hello):
            return Rejected("unsupported", "The first message has to be a hello.")
        if not hmac.compare_digest(message.token.encode(), self._token.encode()):
            return Rejected("unsupported", "The token is not this engine's.")
        if message.version != PROTOCOL_VERSION:
            return Rejected("unsupported", f"This engine speaks version {PROTOCOL_VERSION}.")
        await self._loaded.wait()
        failure, info = self._service.failure, self._service.info
        if isinstance(failure, EngineError):
            return Rejected(failure.code, failure.message)
        if failure is not None or info is None:
            return Rejected("engine_died", f"The engine failed to start: {type(failure).__name__}.")
        return Welcome(info)


class _Silent:
    """An outlet for commands nobody waits to hear about."""

    def send(self, step: int, messages: tuple[Event | Reply, ...]) -> None:
        """Nothing."""


def log(event: str, **facts: object) -> None:
    """One JSON line on standard error; nothing where nobody holds its other end."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = msgspec.json.encode({"at": at, "event": event, **facts})
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.buffer.write(line + b"\n")
        sys.stderr.buffer.flush()


async def run(settings: ServerSettings, make_core: Callable[[], tuple[Core, EngineInfo]]) -> int:
    """Serve until drained, told to stop, or broken. Returns the exit status."""
    loop = asyncio.get_running_loop()
    stop, loaded, draining = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def changed() -> None:
        if service.info is not None and not loaded.is_set():
            log("ready", model=service.info.model, blocks=service.info.blocks, pid=os.getpid())
        loaded.set()
        if service.stopped.is_set() and service.info is not None:
            stop.set()

    def asked_to_end() -> None:
        if draining.is_set() or not loaded.is_set():
            stop.set()
            return
        draining.set()
        log("draining")
        service.post(_Silent(), Drain(settings.config.drain_timeout_s))

    def parent_spoke() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin.fileno())
            log("parent_gone")
            stop.set()

    service = EngineService(make_core, settings.config, changed=lambda: _tell_loop(loop, changed))
    # A terminal's interrupt reaches the gateway too, which decides.
    with heeded({signal.SIGTERM: asked_to_end, signal.SIGINT: lambda: None}):
        loop.add_reader(sys.stdin.fileno(), parent_spoke)
        server = EngineServer(service, settings.token, loaded)
        await server.listen(Path(settings.socket_path))
        service.start()
        await _either(loaded, stop)
        if service.failure is not None:
            log("loading_failed", error=type(service.failure).__name__)
            loop.call_later(REJECT_S, stop.set)  # whoever waits for the welcome hears why not
        await stop.wait()
        await server.close()
    failure = service.failure
    if failure is not None:
        # Only our own words are known to quote no prompt.
        message = failure.message if isinstance(failure, EngineError) else ""
        log("engine_failed", error=type(failure).__name__, message=message)
    return 0 if failure is None else 1


async def _either(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _tell_loop(loop: asyncio.AbstractEventLoop, changed: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended before its engine
        loop.call_soon_threadsafe(changed)


def serve_process(make_core: Callable[[ServerSettings], tuple[Core, EngineInfo]]) -> NoReturn:
    """Read the settings from standard input, load, serve, and end the process.

    It leaves without joining the engine's thread: that one may be deep in a step that never ends.
    """
    line = sys.stdin.buffer.readline()
    settings = msgspec.json.decode(line, type=ServerSettings)

    def make() -> tuple[Core, EngineInfo]:
        made = make_core(settings)
        FrozenHeap().settle()  # Libraries and weights stay for as long as this process lives.
        return made

    status = asyncio.run(run(settings, make))
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(status)


def main() -> NoReturn:
    """The real engine: a prepared model folder over the real runner."""
    serve_process(lambda settings: core_of_model(Path(settings.model_dir), settings.config))


if __name__ == "__main__":
    main()
