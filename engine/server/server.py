"""The engine process: `python -m engine.server.server`, started by a gateway.

Its standard input is a socket, over which it speaks `engine.protocol` with the gateway; the first
message names the model. When the socket ends, the gateway is gone and the process exits, even while
a step hangs; the kernel kills it with the gateway, even while it loads. SIGTERM drains: no new
requests are accepted, running ones may finish; a second SIGTERM ends the process at once. Log lines
are JSON, one per event, on standard error, and contain no prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec import Struct

from engine.api import Drain, EngineInfo
from engine.client.frame_wire import FrameWire
from engine.client.step_record import StepRecord
from engine.config import EngineConfig
from engine.core.core import Core
from engine.errors import EngineError
from engine.processes import end_with_parent, log_line
from engine.protocol import (
    PROTOCOL_VERSION,
    Hello,
    Messages,
    Rejected,
    Upward,
    Welcome,
    encode,
    encode_step,
    read_upward,
)
from engine.server.composition import core_of_model
from engine.server.gc_tuning import FrozenHeap
from engine.server.outbox import Outbox
from engine.server.service import EngineService
from engine.signals import handle_signals
from engine.wire import FrameError

SWITCH_INTERVAL_S = 0.0005
"""How long the step's thread may run Python while those that copy blocks wait for it, in seconds;
Python's own value is 5 ms. 32,768 tokens from host memory take 195 ms instead of 530 to 600."""
CAUSES_MAX, FRAMES_MAX = 4, 8
"""Errors in a chain, and frames of each, that the log names for a failed step."""
FLUSH_S = 1.0
OUTBOX_BYTES_MAX = 8 * 2**20
"""Bytes. A gateway that is so far behind in reading stops the engine until it catches up."""


class ServerSettings(Struct, frozen=True):
    """The model and the configuration of the gateway's Hello."""

    model_dir: str
    config: EngineConfig
    record_fd: int = -1
    host_fds: tuple[int, int] | None = None


class GatewayConnection:
    """The engine's end of the socket: first a Hello, then commands in and events out.

    A `ResponseSink`: the service's thread puts messages in, and the event loop writes them.
    `ended`: the gateway has closed its end, or violated the protocol.
    """

    def __init__(self, end: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._wire = FrameWire(end, self._take, self._on_end, self._on_sent)
        self._outbox = Outbox(lambda: _call_in_loop(self._loop, self._write_frames))
        self._hello: asyncio.Future[Upward | None] = self._loop.create_future()
        self._service: EngineService | None = None  # once the gateway is welcome
        self._number = 0
        self._sent, self.ended = asyncio.Event(), asyncio.Event()

    async def read_settings(self) -> ServerSettings | None:
        """Read the Hello.

        Returns None if the gateway left or speaks another protocol: then it has been answered, and
        the process can only exit.
        """
        hello = await self._hello
        if isinstance(hello, Hello) and hello.version == PROTOCOL_VERSION:
            try:
                config = msgspec.convert(hello.config, EngineConfig)
            except msgspec.ValidationError as error:
                log_line("connection_lost", reason=type(error).__name__)
                return None
            return ServerSettings(hello.model_dir, config, hello.record_fd, hello.host_fds)
        if isinstance(hello, Hello):
            found = f"Unsupported protocol version: {hello.version}"
            self.reject("unsupported", f"{found}; expected {PROTOCOL_VERSION}.")
        elif hello is not None:
            self.reject("unsupported", "The first message must be a Hello.")
        return None

    def reject(self, code: str, message: str) -> None:
        """Tell the gateway why it will not be served."""
        self._wire.send(encode(Rejected(code, message)))

    def welcome(self, service: EngineService, info: EngineInfo) -> None:
        """Tell the gateway that the model is loaded; commands go to the service from now on, and
        the events of each step follow.
        """
        self._service = service
        self._wire.send(encode(Welcome(info)))
        service.join(self)

    def send(self, step: int, messages: Messages) -> None:
        """Send one step's messages. Blocks while the gateway is far behind, as long as it is
        connected."""
        self._outbox.put((step, messages))

    async def close(self) -> None:
        """Give the gateway up to `FLUSH_S` to read the last frames, and close the connection; the
        engine waits for it no longer.
        """
        if self._wire.unsent and not self.ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._sent.wait()
        self._wire.close()
        self._on_end()

    # -- called in the event loop ---------------------------------------------------------------

    def _take(self, body: bytes) -> None:
        message = read_upward(body)
        if not self._hello.done():
            self._hello.set_result(message)
        elif self._service is not None and not isinstance(message, Hello):
            self._service.post(self, message)
        else:
            what = "Unexpected message: Hello twice, or a command before the Welcome."
            self.reject("unsupported", what)
            raise FrameError(what)

    def _write_frames(self) -> None:
        answers = self._outbox.take()
        if self.ended.is_set():
            return
        try:
            for step, messages in answers:
                for frame in encode_step(self._number, step, messages):
                    self._wire.send(frame)
                    self._number += 1
        except BaseException:
            self._wire.close()  # messages are lost: no stream may end as if whole
            self._on_end()
            raise
        if self._wire.unsent > OUTBOX_BYTES_MAX:
            self._outbox.hold()

    def _on_sent(self) -> None:
        self._sent.set()
        self._outbox.release()

    def _on_end(self) -> None:
        if self.ended.is_set():
            return
        self.ended.set()
        self._sent.set()
        self._outbox.close()
        if self._wire.error is not None:
            log_line("connection_lost", reason=type(self._wire.error).__name__)
        if not self._hello.done():
            self._hello.set_result(None)
        if self._service is not None:
            self._service.leave(self)


class _DiscardSink:
    """A `ResponseSink` for commands without a reader of replies."""

    def send(self, step: int, messages: Messages) -> None:
        """Discard the messages."""


def log_failed_step(step: int, error: Exception) -> None:
    """Log the error of a step, its causes and where each was raised, innermost frame last.

    Messages are left out: they may quote a prompt.
    """
    causes: list[str] = []
    raised: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(causes) < CAUSES_MAX:
        causes.append(type(cause).__name__)
        frames = traceback.extract_tb(cause.__traceback__)[-FRAMES_MAX:]
        raised += [f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in frames]
        cause = cause.__cause__ or cause.__context__
    log_line("step_failed", step=step, error=causes[0], causes=causes[1:], frames=raised)


async def run(
    wire: socket.socket, make_core: Callable[[ServerSettings], tuple[Core, EngineInfo]]
) -> int:
    """Serve until drained, stopped, disconnected or broken. Returns the exit status."""
    loop = asyncio.get_running_loop()
    gateway = GatewayConnection(wire)
    settings = await gateway.read_settings()
    if settings is None:
        await gateway.close()
        return 1
    stop, loaded, draining = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def on_change() -> None:
        loaded.set()
        if service.stopped.is_set():
            stop.set()

    def on_sigterm() -> None:
        if draining.is_set() or not loaded.is_set():
            stop.set()
            return
        draining.set()
        log_line("draining")
        service.post(_DiscardSink(), Drain(settings.config.drain_timeout_s))

    service = EngineService(
        lambda: make_core(settings),
        settings.config,
        record=StepRecord(settings.record_fd) if settings.record_fd >= 0 else None,
        on_change=lambda: _call_in_loop(loop, on_change),
    )
    # The gateway receives a terminal's interrupt, too, and decides.
    with handle_signals({signal.SIGTERM: on_sigterm, signal.SIGINT: lambda: None}):
        service.start()
        await _wait_any(loaded, stop, gateway.ended)
        info, failure = service.info, service.failure
        if info is not None:
            log_line("ready", model=info.model, blocks=info.blocks, pid=os.getpid())
            for level in service.levels_off:
                log_line("level_off", level=level.name, reason=level.reason)
            gateway.welcome(service, info)
            await _wait_any(stop, gateway.ended)
        elif failure is not None:
            log_line("loading_failed", error=type(failure).__name__)
            gateway.reject(*_failure_reason(failure))
        if gateway.ended.is_set() and info is not None:  # before that, a gateway ends failed starts
            log_line("parent_gone")
        await gateway.close()
    failure = service.failure
    if failure is not None:
        # Messages of other errors may quote a prompt.
        message = failure.message if isinstance(failure, EngineError) else ""
        log_line("engine_failed", error=type(failure).__name__, message=message)
    return 0 if failure is None else 1


def _failure_reason(failure: BaseException) -> tuple[str, str]:
    """Return the code and the message of a failed start, without messages that may quote a
    prompt."""
    if isinstance(failure, EngineError):
        return failure.code, failure.message
    return "engine_died", f"The engine failed to start: {type(failure).__name__}."


async def _wait_any(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _call_in_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop ended before the engine did
        loop.call_soon_threadsafe(callback)


def serve_process(make_core: Callable[[ServerSettings], tuple[Core, EngineInfo]]) -> NoReturn:
    """Serve the gateway at the other end of standard input, and end the process.

    Exits without joining the engine's thread, which may be in a step that never ends.
    """

    def make(settings: ServerSettings) -> tuple[Core, EngineInfo]:
        gc.disable()  # collections took a tenth of importing torch, and its objects stay
        made = make_core(settings)
        made[0].on_step_failed = log_failed_step
        FrozenHeap().settle()  # libraries and weights live as long as the process
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.enable()
        return made

    end_with_parent(sys.stdin.fileno())
    wire = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    with Path(os.devnull).open() as nothing:
        # The engine's compilers inherit its standard input and must not keep the socket open.
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    status = asyncio.run(run(wire, make))
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(status)


def main() -> NoReturn:
    """Serve a prepared model folder with the real runner."""
    serve_process(
        lambda settings: core_of_model(Path(settings.model_dir), settings.config, settings.host_fds)
    )


if __name__ == "__main__":
    main()
