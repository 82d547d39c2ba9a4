"""Talking to an engine: submit a request, read its events, ask it things.

`Engine` is what the gateway sees. A stream of events always ends with one `Finished`, whatever
happens to the engine or the connection meanwhile. Reading slowly is safe: tokens of one stream are
joined while they wait, so a stream never holds more than its own output, and never another's up.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from engine.api import (
    CacheNews,
    Cancel,
    Command,
    Drain,
    EndSample,
    EngineInfo,
    Erase,
    Erased,
    Event,
    Finished,
    Frame,
    GetStats,
    Namespace,
    Peek,
    Peeked,
    Quota,
    Reply,
    Request,
    SetQuotas,
    Stats,
    Submit,
    Survey,
    Surveyed,
    Tokens,
)
from engine.client.cache_event_totals import CacheEventTotals
from engine.client.namespace_stats import NamespaceTable
from engine.client.request_stream import RequestStream, Wakeup
from engine.errors import EngineError, EngineUnavailable, RequestRefused
from engine.protocol import FrameError, Hello, Rejected, Welcome, downward_decoder, encode

__all__ = ["Engine", "EngineConnection", "RequestStream", "SocketEngine", "Wakeup"]

CALL_TIMEOUT_S = 10.0
QUOTAS_AT_ONCE = 1_000
UNSENT_BYTES_MAX = 64 * 2**20
"""An engine that reads slower than this far behind is full for the time being."""

STOPPED = "The engine stopped while it worked on this request."

Call = Peek | Erase | Survey | GetStats
Called = Peeked | Erased | Surveyed | Stats
CALLED = (Peeked, Erased, Surveyed, Stats)
Answer = TypeVar("Answer", Peeked, Erased, Surveyed, Stats)


class Engine(Protocol):
    """What the gateway needs of an engine, wherever it runs."""

    @property
    def info(self) -> EngineInfo | None:
        """Of the engine that answers now; None while there is none."""

    @property
    def stats(self) -> Stats:
        """The latest heartbeat."""

    @property
    def namespaces(self) -> NamespaceTable:
        """What each holds, as of the latest `Stats` of whatever kind. Another engine, another
        book."""

    @property
    def losses(self) -> CacheEventTotals:
        """What namespaces have lost, as of the latest heartbeat."""

    def ready(self) -> bool:
        """Would a request be taken now?"""

    def submit(self, request: Request) -> RequestStream:
        """Send a request. Raises EngineUnavailable, or RequestRefused if it must not be tried."""

    async def peek(self, namespace: Namespace, tokens: tuple[int, ...]) -> Peeked:
        """What would these tokens hit?"""

    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        """These hold from now on. Nothing is done where there is no engine: it knows no payer."""

    async def erase(
        self,
        namespace: Namespace,
        *,
        lease_id: str | None = None,
        tokens: tuple[int, ...] | None = None,
    ) -> Erased:
        """Forget cached KV; see `engine.api.Erase`."""

    async def survey(self, namespace: Namespace, most: int) -> Surveyed:
        """What shape has a namespace's tree?"""

    async def get_stats(self) -> Stats:
        """Fresh numbers; `namespaces` is as fresh when they are here."""

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new; let what runs finish."""

    async def close(self) -> None:
        """Let go of the engine; every open stream ends."""


class EngineConnection(ABC):
    """Streams and calls over one connection to one engine, whatever carries the messages.

    `died_with`: the requests that were being computed when the engine was lost.
    """

    def __init__(self) -> None:
        self.info: EngineInfo | None = None
        self.stats = Stats()
        self.losses = CacheEventTotals()
        self.namespaces = NamespaceTable()
        self.heard_at_s = 0.0
        self._streams: dict[str, RequestStream] = {}
        self._asked: dict[str, Request] = {}  # what each of them is to be answered
        self._calls: dict[int, asyncio.Future[Called]] = {}
        self._next_call = 1
        self._is_draining = False
        self._is_closed = False
        self.died_with: list[Request] = []

    @abstractmethod
    def post(self, command: Command) -> None:
        """Send a command on its way. Never blocks; a lost connection is noticed by the reader."""

    def ready(self) -> bool:
        """See `Engine.ready`."""
        return self.info is not None and not self._is_closed and not self._is_draining

    def submit(self, request: Request) -> RequestStream:
        """See `Engine.submit`."""
        if not self.ready():
            code = "draining" if self._is_draining else "not_ready"
            raise EngineUnavailable(code, "The engine is not taking requests now.")
        if request.request_id in self._streams:
            raise RequestRefused("duplicate_request", "A request with this id is running already.")
        stream = RequestStream(request.request_id, self)
        self._streams[request.request_id], self._asked[request.request_id] = stream, request
        try:
            self.post(Submit(request))
        except EngineError:
            del self._streams[request.request_id], self._asked[request.request_id]
            raise
        return stream

    def forget(self, request_id: str) -> None:
        """A reader has gone: cancel, and drop what still comes for it."""
        if self._streams.pop(request_id, None) is not None:
            del self._asked[request_id]
            if not self._is_closed:
                self.post(Cancel(request_id))

    async def peek(self, namespace: Namespace, tokens: tuple[int, ...]) -> Peeked:
        """See `Engine.peek`."""
        return await self._call(Peek(self._call_id(), namespace, tokens), Peeked)

    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        """See `Engine.set_quotas`."""
        if self.info is not None and not self._is_closed:
            for start in range(0, len(quotas), QUOTAS_AT_ONCE):
                self.post(SetQuotas(tuple(quotas[start : start + QUOTAS_AT_ONCE])))

    async def erase(
        self,
        namespace: Namespace,
        *,
        lease_id: str | None = None,
        tokens: tuple[int, ...] | None = None,
    ) -> Erased:
        """See `Engine.erase`."""
        if lease_id is not None and tokens is not None:
            raise ValueError("erase by lease_id or by tokens, not both")
        return await self._call(Erase(self._call_id(), namespace, lease_id, tokens), Erased)

    async def survey(self, namespace: Namespace, most: int) -> Surveyed:
        """See `Engine.survey`."""
        return await self._call(Survey(self._call_id(), namespace, most), Surveyed)

    async def get_stats(self) -> Stats:
        """See `Engine.get_stats`."""
        return await self._call(GetStats(self._call_id()), Stats)

    async def drain(self, timeout_s: float) -> None:
        """See `Engine.drain`."""
        self._is_draining = True
        if not self._is_closed:
            self.post(Drain(timeout_s))

    def receive(self, messages: Iterable[Event | Reply]) -> None:
        """What the engine says, in order."""
        streams = self._streams
        for message in messages:
            if isinstance(message, Tokens):  # as nearly all are
                stream = streams.get(message.request_id)
                if stream is not None:
                    stream.push(message)
            elif isinstance(message, Finished):
                self._finish(message)
            elif isinstance(message, CALLED):
                self._answer(message)
            elif isinstance(message, CacheNews):
                self.losses.add(message)
            elif message.request_id in streams:
                streams[message.request_id].push(message)

    def _finish(self, end: Finished) -> None:
        stream = self._streams.pop(end.request_id, None)
        if stream is None:
            return
        request = self._asked.pop(end.request_id)
        if end.code == "engine_died":
            self.died_with.append(request)
            stream.fail(end.code, end.message)
        else:
            stream.push(end)

    def lost(self, code: str, message: str) -> None:
        """The engine is gone: every stream ends, every call fails. Safe to call twice."""
        self._is_closed = True
        streams, self._streams = self._streams, {}
        self.died_with.extend(self._asked.values())
        self._asked = {}
        for stream in streams.values():
            stream.fail(code, message)
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(EngineUnavailable(code, message))

    def _call_id(self) -> int:
        self._next_call += 1
        return self._next_call

    def _answer(self, reply: Called) -> None:
        if isinstance(reply, Stats):
            self.namespaces.add(reply.changed)
            if reply.call_id == 0:
                self.stats = reply
                return
        if (future := self._calls.pop(reply.call_id, None)) is not None and not future.done():
            future.set_result(reply)

    async def _call(self, command: Call, kind: type[Answer]) -> Answer:
        if self._is_closed or self.info is None:
            raise EngineUnavailable("not_ready", "There is no engine to ask.")
        future: asyncio.Future[Called] = asyncio.get_running_loop().create_future()
        self._calls[command.call_id] = future
        try:
            self.post(command)
            async with asyncio.timeout(CALL_TIMEOUT_S):
                reply = await future
        except TimeoutError as error:
            raise EngineUnavailable("timeout", "The engine did not answer in time.") from error
        finally:
            self._calls.pop(command.call_id, None)
        assert isinstance(reply, kind), "a call is answered by its own kind"
        return reply


class SocketEngine(EngineConnection, asyncio.Protocol):
    """An engine in a process of its own; `connect` makes one. What has come is taken within the
    transport's own call: a task that reads is a turn of the loop more for each step."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._decoder = downward_decoder()
        self._frames = 0
        self._unsent: list[bytes] = []
        self._welcome: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self.heard_at_s = self._loop.time()

    @classmethod
    async def connect(cls, wire: socket.socket, hello: Hello) -> SocketEngine:
        """Say hello over the socket of a new process, and wait until its model is loaded.

        `wire`: a Unix stream socket, owned by the engine from now on. Raises OSError, and
        EngineError with the process's own code: engine_died if it closed the connection first.
        """
        transport, engine = await asyncio.get_running_loop().create_unix_connection(cls, sock=wire)
        try:
            transport.write(encode(hello))
            await engine.wait_ready()
        except BaseException:
            transport.close()
            raise
        return engine

    async def wait_ready(self) -> EngineInfo:
        """The engine's word on itself, once it is ready. Raises EngineError."""
        return await self._welcome

    def post(self, command: Command) -> None:
        """See `EngineConnection.post`. Raises EngineUnavailable if the engine has stopped reading,
        but for what ends a request: whoever gives one up has to learn what it has used.

        For a request alone it leaves at once: the engine works while the turn of the loop goes on.
        Where there are more, what is posted in one turn leaves in one write, at its end: a write
        costs more than all else that is done to a command.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        is_full = transport.get_write_buffer_size() > UNSENT_BYTES_MAX
        if is_full and not isinstance(command, Cancel | EndSample | Drain):
            raise EngineUnavailable("queue_full", "The engine does not keep up with its requests.")
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent.append(encode(command))
        if len(self._streams) < 2:
            self._send()

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(unsent))

    async def wait_lost(self) -> None:
        """Returns when the connection has ended."""
        await asyncio.wait([self._ended])

    async def close(self) -> None:
        """See `Engine.close`."""
        self._send()
        self._end("The connection to the engine was closed.")
        if self._transport is not None:
            self._transport.close()

    # -- called by the transport ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`. What breaks the protocol ends the connection."""
        self.heard_at_s = self._loop.time()
        try:
            for message in self._decoder.feed(data):
                if isinstance(message, Frame) and message.number == self._frames and self.info:
                    self._frames += 1
                    self.receive(message.messages)
                elif self._welcome.done():
                    raise FrameError("a frame out of turn")
                else:
                    self._greet(message)
        except EngineError as error:
            if not self._welcome.done():
                self._welcome.set_exception(error)
            self._end(STOPPED)
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._end(STOPPED)
        if not self._welcome.done():
            closed = EngineUnavailable("engine_died", "The engine closed the connection.")
            self._welcome.set_exception(closed)

    def _greet(self, message: Welcome | Rejected | Frame) -> None:
        if isinstance(message, Rejected):
            raise EngineError(message.code, message.message)
        if isinstance(message, Frame):
            raise FrameError("a frame before the welcome")
        self.info = message.info
        self._welcome.set_result(message.info)

    def _end(self, message: str) -> None:
        """The same to everybody who waits: this engine is lost. Safe to call twice."""
        self.lost("engine_died", message)
        if not self._ended.done():
            self._ended.set_result(None)
