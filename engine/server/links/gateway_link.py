"""The engine's end of a connection: first a Hello, then commands in and events out.

A gateway has one, over TLS or, embedded, over the socket of its child; the keeper of an engine
elsewhere has one too, and reads heartbeats by it. `keeper_link` reads the settings from the first
Hello, `listener` accepts the connections of gateways.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from math import inf
from typing import NoReturn, Protocol

from engine.api import Clock, Drain, EngineInfo
from engine.errors import EngineError
from engine.processes import log_line
from engine.protocol import (
    Hello,
    Messages,
    Rejected,
    Upward,
    Welcome,
    encode,
    encode_step,
    read_upward,
)
from engine.server.outbox import Outbox
from engine.server.service import EngineService
from engine.wire import FrameError

FLUSH_S = 1.0
OUTBOX_BYTES_MAX = 8 * 2**20
"""Bytes. A gateway that is so far behind in reading has no room for more: see `Outbox`."""
SILENCE_S = 0.5
"""Seconds after which a connection that is kept awake gets an empty frame."""


class Wire(Protocol):
    """What carries frames: `FrameWire` or `TlsWire`."""

    @property
    def error(self) -> FrameError | None:
        """The violation of the framing that has ended it."""

    @property
    def unsent(self) -> int:
        """Number of bytes that it has not sent."""

    def send(self, frame: bytes) -> None:
        """Send a frame after all earlier ones."""

    def close(self) -> None:
        """Stop reading and drop unsent bytes. Safe to repeat."""


MakeWire = Callable[[Callable[[bytes], None], Callable[[], None], Callable[[], None]], Wire]
"""Returns a wire from what it calls: with a frame, at the end, and when all is sent."""


class GatewayLink:
    """One connection.

    A `ResponseSink`: the service's thread puts messages in, and the event loop writes them.
    `ended`: the other end was closed, or has violated the protocol.
    """

    def __init__(
        self,
        make_wire: MakeWire,
        on_drain: Callable[[], None] | None = lambda: None,
        *,
        patience_s: float = inf,
        clock: Clock = time.monotonic,
    ) -> None:
        """`on_drain`: called when the other end drains the engine; None: it may not. `patience_s`:
        how long the other end may be far behind before the connection is closed; without an end,
        the engine waits for it."""
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(
            lambda: call_in_loop(self._loop, self._write_frames),
            patience_s=patience_s,
            give_up=lambda: call_in_loop(self._loop, self._give_up),
            clock=clock,
        )
        self.was_given_up = False
        """Whether it was closed as it was too far behind."""
        self._hello: asyncio.Future[Upward | None] = self._loop.create_future()
        self._service: EngineService | None = None  # once the gateway is welcome
        self._on_drain = on_drain
        self._number = 0
        self._sent_at_s = 0.0
        self._beat: asyncio.TimerHandle | None = None
        self._sent, self.ended = asyncio.Event(), asyncio.Event()
        self._wire = make_wire(self._take, self._on_end, self._on_sent)

    async def read_hello(self) -> Hello | None:
        """Read the Hello. None if the other end left, or began with something else: then it has
        been answered."""
        hello = await self._hello
        if isinstance(hello, Hello):
            return hello
        if hello is not None:
            self.reject("unsupported", "The first message must be a Hello.")
        return None

    def reject(self, code: str, message: str) -> None:
        """Tell the other end why it will not be served, or not any longer."""
        if not self.ended.is_set():
            self._wire.send(encode(Rejected(code, message)))

    def welcome(
        self,
        service: EngineService,
        info: EngineInfo,
        fallen: tuple[str, ...] = (),
        start: str = "",
        *,
        moves: bool = False,
    ) -> None:
        """Tell the other end that the model is loaded; commands go to the service from now on, and
        the events of each step follow. `start`: of the gateway, as its Hello names it. `moves`: see
        `Join`.
        """
        self._service = service
        self._wire.send(encode(Welcome(info, fallen)))
        service.join(self, start, moves=moves)

    def keep_awake(self) -> None:
        """Send an empty frame whenever none left for `SILENCE_S`, so that silence means a loss."""
        if self.ended.is_set():
            return
        silent_s = self._loop.time() - self._sent_at_s
        if silent_s >= SILENCE_S:
            self._write(0, ())
            silent_s = 0.0
        self._beat = self._loop.call_later(SILENCE_S - silent_s, self.keep_awake)

    def send(self, step: int, messages: Messages) -> None:
        """Send one step's messages. Without an end of patience it blocks while the gateway is far
        behind, as long as it is connected."""
        self._outbox.put((step, messages))

    async def close(self) -> None:
        """Give the other end up to `FLUSH_S` to read the last frames, and close the connection; the
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
            return
        if self._service is None or isinstance(message, Hello):
            self._violated("Unexpected message: Hello twice, or a command before the Welcome.")
        if isinstance(message, Drain):
            if self._on_drain is None:
                self._violated("Unexpected message: only its keeper drains an engine.")
            else:
                self._on_drain()
        self._service.post(self, message)

    def _violated(self, what: str) -> NoReturn:
        self.reject("unsupported", what)
        raise FrameError(what)

    def _write_frames(self) -> None:
        answers = self._outbox.take()
        if self.ended.is_set():
            return
        try:
            for step, messages in answers:
                self._write(step, messages)
        except BaseException:
            self._wire.close()  # messages are lost: no stream may end as if whole
            self._on_end()
            raise
        if self._wire.unsent > OUTBOX_BYTES_MAX:
            self._outbox.hold()

    def _give_up(self) -> None:
        """Close the connection of a gateway that does not read: its requests are cancelled."""
        if not self.ended.is_set():
            self.was_given_up = True
            self._wire.close()
            self._on_end()

    def _write(self, step: int, messages: Messages) -> None:
        for frame in encode_step(self._number, step, messages):
            self._wire.send(frame)
            self._number += 1
        self._sent_at_s = self._loop.time()

    def _on_sent(self) -> None:
        self._sent.set()
        self._outbox.release()

    def _on_end(self) -> None:
        if self.ended.is_set():
            return
        self.ended.set()
        self._sent.set()
        self._outbox.close()
        if self._beat is not None:
            self._beat.cancel()
        if self._wire.error is not None:
            log_line("connection_lost", reason=type(self._wire.error).__name__)
        if not self._hello.done():
            self._hello.set_result(None)
        if self._service is not None:
            self._service.leave(self)


def failure_reason(failure: BaseException) -> tuple[str, str]:
    """Return the code and the message of a failed start, without messages that may quote a
    prompt."""
    if isinstance(failure, EngineError):
        return failure.code, failure.message
    return "engine_died", f"The engine failed to start: {type(failure).__name__}."


def call_in_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Call something in an event loop from another thread."""
    with contextlib.suppress(RuntimeError):  # the event loop ended before the engine did
        loop.call_soon_threadsafe(callback)
