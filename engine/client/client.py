"""Client of an engine: submit a request, read its events, call it.

`Engine` is the protocol that the gateway uses. Every stream of events ends with one `Finished`,
also when the engine or the connection is lost. A slow reader is safe: tokens of one sample are
joined while they wait, so a stream holds no more than its own output and delays no other stream.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from msgspec import Struct

from engine.api import (
    Cancel,
    Command,
    Departed,
    Drain,
    EndSample,
    EngineInfo,
    Erase,
    Erased,
    Event,
    FindLease,
    Finished,
    GetDeparted,
    GetHeld,
    GetStats,
    Held,
    LeaseFound,
    LetGo,
    Namespace,
    Peek,
    Peeked,
    Quota,
    Request,
    SetQuotas,
    Started,
    Submit,
    Survey,
    Surveyed,
    Tokens,
    WatchPrefixes,
)
from engine.client.cache_event_totals import CacheEventTotals
from engine.client.frame_wire import FrameWire
from engine.client.namespace_stats import NamespaceTable
from engine.client.request_stream import RequestStream
from engine.client.step_pace import StepPace
from engine.client.tls_wire import TlsWire
from engine.errors import (
    DIED_MESSAGE,
    DUPLICATE_MESSAGE,
    EngineError,
    EngineUnavailable,
    RequestRefused,
)
from engine.protocol import (
    Facts,
    Frame,
    Hello,
    Rejected,
    Reply,
    Welcome,
    encode,
    read_downward,
)
from engine.statistics import CacheNews, LoadReport, Stats
from engine.strides import PrefixChanges
from engine.wire import FrameError

CALL_TIMEOUT_S = 10.0
"""Longest wait for the result of a call, in seconds."""
LAST_CALL_S = 3.0
"""The same for what a gateway that closes asks at last."""
QUOTAS_PER_COMMAND = 1_000
UNSENT_BYTES_MAX = 64 * 2**20
"""Bytes. An engine that is so far behind in reading refuses requests as `queue_full`."""

Call = Peek | Erase | Survey | FindLease | GetHeld | GetDeparted | GetStats
Result = Peeked | Erased | Surveyed | LeaseFound | Held | Departed | Stats
RESULTS = (Peeked, Erased, Surveyed, LeaseFound, Held, Departed, Stats)
ResultT = TypeVar("ResultT", Peeked, Erased, Surveyed, LeaseFound, Held, Departed, Stats)


class Engine(Protocol):
    """What the gateway needs of an engine, wherever it runs."""

    @property
    def info(self) -> EngineInfo | None:
        """Description of the running engine; None without an engine."""

    def is_alive(self, epoch: str) -> bool:
        """Return whether an engine of this epoch still holds what it cached. O(1)."""

    @property
    def stats(self) -> Stats:
        """The latest heartbeat."""

    @property
    def namespaces(self) -> NamespaceTable:
        """Statistics of each namespace, as of the latest `Stats`. A restarted engine has a new
        table."""

    @property
    def cache_events(self) -> CacheEventTotals:
        """Blocks that namespaces have lost and gained, as of the latest heartbeat."""

    def ready(self) -> bool:
        """Return whether the engine accepts requests now."""

    def submit(self, request: Request) -> RequestStream:
        """Submit a request. Raises EngineUnavailable, or RequestRefused if it must not be
        retried."""

    async def peek(
        self, namespace: Namespace, tokens: tuple[int, ...], quota: Quota | None = None
    ) -> Peeked:
        """Return what these tokens would find in the cache, and with the payer's `quota` how many
        of them a lease could promise."""

    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        """Set quotas from now on. Does nothing without an engine."""

    async def erase(
        self,
        namespace: Namespace,
        *,
        lease_id: str | None = None,
        tokens: tuple[int, ...] | None = None,
    ) -> Erased:
        """Erase cached KV; see `engine.api.Erase`."""

    async def survey(self, namespace: Namespace, branches_max: int) -> Surveyed:
        """Return the largest branches of a namespace's tree."""

    async def get_stats(self) -> Stats:
        """Return fresh statistics; `namespaces` is as fresh when this returns."""

    async def get_held(self) -> Held:
        """Return the token-seconds that payers have held since the engine's start."""

    async def get_departed(self, settled: Sequence[str] = ()) -> Departed:
        """Return what was counted for the starts of gateways that have left; `settled` ones are
        forgotten."""

    async def drain(self, timeout_s: float) -> None:
        """Accept no new requests; let running requests finish within `timeout_s`."""

    async def close(self) -> None:
        """Disconnect from the engine; every open stream ends."""


class LostRequest(Struct, frozen=True):
    """A request that was in flight when the engine was lost, with the output tokens seen."""

    request: Request
    output_tokens: int


class EngineConnection(ABC):
    """Streams and calls over one connection to an engine; subclasses carry the messages.

    `lost_requests`: the requests that waited or ran when the engine was lost. `done_in_isolation`:
    isolated requests that were done.
    """

    def __init__(self) -> None:
        self.info: EngineInfo | None = None
        self.stats = Stats()
        self.cache_events = CacheEventTotals()
        self.namespaces = NamespaceTable()
        self._streams: dict[str, RequestStream] = {}
        self._requests: dict[str, Request] = {}  # the request of each stream
        self._calls: dict[int, asyncio.Future[Result]] = {}
        self._next_call, self._call_timeout_s = 1, CALL_TIMEOUT_S
        self._is_draining = False
        self._is_closed = False
        self.rescue: Callable[[Request, RequestStream], bool] | None = None
        """Takes a request that the engine has lost over, if it returns True."""
        self.submitted = 0
        """Number of requests that were sent over this connection."""
        self._watch: Callable[[Facts | Started], None] | None = None
        self.done = 0
        """Number of requests that have ended otherwise."""
        self.lost_requests: list[LostRequest] = []
        self.done_in_isolation: list[Request] = []

    @abstractmethod
    def post(self, command: Command) -> None:
        """Send a command. Never blocks; the reader notices a lost connection."""

    @abstractmethod
    async def close(self) -> None:
        """See `Engine.close`."""

    @property
    def is_draining(self) -> bool:
        """Return whether it takes no requests any more."""
        return self._is_draining

    @property
    def is_stuck(self) -> bool:
        """Return whether its step takes many times as long as the longest of late."""
        return False

    @property
    def has_foreign_hold(self) -> bool:
        """Return whether a request runs here whose hold names another engine: it has moved here, or
        is one of several prompts of a call. O(requests)."""
        own = "" if self.info is None else self.info.epoch
        streams = self._streams.values()
        return any(one.moves or one.hold_epoch not in ("", own) for one in streams)

    def has_request(self, request_id: str) -> bool:
        """Return whether a request has not ended here."""
        return request_id in self._streams

    @property
    def in_flight(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._streams)

    def ready(self) -> bool:
        """See `Engine.ready`."""
        return self.info is not None and not self._is_closed and not self._is_draining

    def submit(
        self, request: Request, moved: RequestStream | None = None, *, may_move: bool = False
    ) -> RequestStream:
        """See `Engine.submit`. `moved`: a stream that goes on here, by its continuation."""
        if not self.ready() or self.info is None:
            code = "draining" if self._is_draining else "not_ready"
            raise EngineUnavailable(code, "The engine does not accept requests now.")
        if request.request_id in self._streams:
            raise RequestRefused("duplicate_request", DUPLICATE_MESSAGE)
        stream = moved or RequestStream(request.request_id, self, may_move=may_move)
        self._streams[request.request_id], self._requests[request.request_id] = stream, request
        try:
            self.post(Submit(request))
        except EngineError:
            del self._streams[request.request_id], self._requests[request.request_id]
            raise
        self.submitted += 1
        if moved is not None:
            moved.move(self)
        stream.epoch = self.info.epoch
        return stream

    def forget(self, request_id: str) -> None:
        """Cancel a request after its reader has gone, and drop its further events."""
        if self._streams.pop(request_id, None) is not None:
            del self._requests[request_id]
            if not self._is_closed:
                self.post(Cancel(request_id))

    async def peek(
        self, namespace: Namespace, tokens: tuple[int, ...], quota: Quota | None = None
    ) -> Peeked:
        """See `Engine.peek`."""
        return await self._call(Peek(self._call_id(), namespace, tokens, quota), Peeked)

    def is_alive(self, epoch: str) -> bool:
        """See `Engine.is_alive`."""
        return self.info is not None and self.info.epoch == epoch

    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        """See `Engine.set_quotas`."""
        if self.info is not None and not self._is_closed:
            for start in range(0, len(quotas), QUOTAS_PER_COMMAND):
                self.post(SetQuotas(tuple(quotas[start : start + QUOTAS_PER_COMMAND])))

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

    async def survey(self, namespace: Namespace, branches_max: int) -> Surveyed:
        """See `Engine.survey`."""
        return await self._call(Survey(self._call_id(), namespace, branches_max), Surveyed)

    async def find_lease(self, namespace: Namespace, lease_id: str) -> LeaseFound:
        """Return the tokens that a lease covers here; see `engine.api.LeaseFound`. Raises
        EngineUnavailable."""
        return await self._call(FindLease(self._call_id(), namespace, lease_id), LeaseFound)

    def let_go(self) -> None:
        """Tell an engine that drains that it need not wait for this gateway."""
        if not self._is_closed:
            self.post(LetGo())

    async def get_stats(self) -> Stats:
        """See `Engine.get_stats`."""
        return await self._call(GetStats(self._call_id()), Stats)

    async def get_held(self) -> Held:
        """See `Engine.get_held`."""
        return await self._call(GetHeld(self._call_id()), Held)

    async def get_departed(self, settled: Sequence[str] = ()) -> Departed:
        """See `Engine.get_departed`."""
        return await self._call(GetDeparted(self._call_id(), tuple(settled)), Departed)

    async def drain(self, timeout_s: float) -> None:
        """See `Engine.drain`."""
        self._is_draining = True
        if not self._is_closed:
            self.post(Drain(timeout_s))

    def watch_prefixes(self, watch: Callable[[Facts | Started], None]) -> None:
        """Have `watch` called with all prefixes of the engine, in parts, and then with each change
        of them or of its load, before the events of the step that made it; and with each start of a
        request, before its reader. Again: all prefixes anew. Raises EngineUnavailable."""
        self._watch = watch
        self.post(WatchPrefixes())

    def receive(self, messages: Iterable[Event | Reply]) -> None:
        """Handle the engine's messages, in order."""
        streams = self._streams
        for message in messages:
            if isinstance(message, Tokens):  # nearly all messages
                stream = streams.get(message.request_id)
                if stream is not None:
                    stream.push(message)
            elif isinstance(message, Finished):
                self._on_finished(message)
            elif isinstance(message, RESULTS):
                self._on_result(message)
            elif isinstance(message, CacheNews):
                self.cache_events.add(message)
            elif isinstance(message, PrefixChanges | LoadReport):
                if self._watch is not None:
                    self._watch(message)
            elif message.request_id in streams:
                if self._watch is not None and isinstance(message, Started):
                    self._watch(message)
                streams[message.request_id].push(message)

    def _on_finished(self, end: Finished) -> None:
        stream = self._streams.pop(end.request_id, None)
        if stream is None:
            return
        request = self._requests.pop(end.request_id)
        if end.code == "engine_died":
            self.lost_requests.append(LostRequest(request, stream.output_tokens))
            self._lose(request, stream, end.message)
        elif end.code == "draining" and self.rescue is not None and self.rescue(request, stream):
            pass  # it crossed the message that says so
        elif end.code == "answer_lost":  # the engine does not know, and would go on
            self.post(Cancel(end.request_id))
            stream.fail(end.code, end.message)
        else:
            if request.isolated_tokens and end.ending == "done":
                self.done_in_isolation.append(request)
            self.done += 1
            stream.push(end)

    def mark_lost(self, message: str) -> None:
        """Fail every stream and every call with `engine_died`. Safe to repeat."""
        self._is_closed = True
        streams, self._streams = self._streams, {}
        requests, self._requests = self._requests, {}
        self.lost_requests += [
            LostRequest(request, streams[name].output_tokens) for name, request in requests.items()
        ]
        for name, stream in streams.items():
            self._lose(requests[name], stream, message)
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(EngineUnavailable("engine_died", message))

    def _lose(self, request: Request, stream: RequestStream, message: str) -> None:
        """Let a request go on elsewhere, or fail it."""
        if self.rescue is None or not self.rescue(request, stream):
            stream.fail("engine_died", message, is_abandoned=True)

    def hurry(self) -> None:
        """Wait at most `LAST_CALL_S` for the results of calls from now on, those that wait already
        included; after a result that has not come, for none. Safe to repeat."""
        if self._call_timeout_s == CALL_TIMEOUT_S:
            self._call_timeout_s = LAST_CALL_S
            waiting = list(self._calls.values())
            asyncio.get_running_loop().call_later(LAST_CALL_S, self._give_up, waiting)

    def _give_up(self, calls: list[asyncio.Future[Result]]) -> None:
        for future in calls:
            if not future.done():
                self._call_timeout_s = 0.0
                future.set_exception(_no_answer(LAST_CALL_S))

    def _call_id(self) -> int:
        self._next_call += 1
        return self._next_call

    def _on_result(self, reply: Result) -> None:
        if isinstance(reply, Stats):
            self.namespaces.add(reply.changed)
            if reply.call_id == 0:
                self.stats = reply
                return
        if (future := self._calls.pop(reply.call_id, None)) is not None and not future.done():
            future.set_result(reply)

    async def _call(self, command: Call, kind: type[ResultT]) -> ResultT:
        if self._is_closed or self.info is None:
            raise EngineUnavailable("not_ready", "The engine is not running.")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._calls[command.call_id] = future
        timeout_s = self._call_timeout_s
        try:
            self.post(command)
            async with asyncio.timeout(timeout_s):
                reply = await future
        except TimeoutError as error:
            if timeout_s == LAST_CALL_S:
                self._call_timeout_s = 0.0
            raise _no_answer(timeout_s) from error
        finally:
            self._calls.pop(command.call_id, None)
        assert isinstance(reply, kind), "a call is answered by its own kind"
        return reply


def _no_answer(waited_s: float) -> EngineUnavailable:
    return EngineUnavailable("timeout", f"The engine did not answer within {waited_s:.0f} s.")


class SocketEngine(EngineConnection):
    """An engine in a separate process; `connect` makes one.

    `last_frame_s`: the loop's time of its last frame.
    """

    def __init__(self, wire: socket.socket | TlsWire) -> None:
        """`wire`: an end of the process's socket, or a connection to an engine elsewhere; owned by
        the engine from now on."""
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._wire: FrameWire | TlsWire = (
            wire.follow(self.take_frame, self._on_end)
            if isinstance(wire, TlsWire)
            else FrameWire(wire, self.take_frame, self._on_end)
        )
        self.on_drain: Callable[[str], None] = lambda message: None
        """Called when the engine takes no new requests any more."""
        self.fallen: tuple[str, ...] = ()
        """Ids of the requests in the step in which the life before ended."""
        self.loss = ""
        """Why the connection has ended, where this end knows it."""
        self._frames = 0
        self._unsent: list[bytes] = []
        self._welcome: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.last_frame_s = self._loop.time()
        self._pace = StepPace(self.last_frame_s) if isinstance(wire, TlsWire) else None
        """None beside its gateway: there is no other engine to ask."""

    @property
    def is_stuck(self) -> bool:
        """See `EngineConnection.is_stuck`."""
        if self._pace is None or not self._streams:
            return False
        return self._pace.is_stuck(self._loop.time())

    @classmethod
    async def connect(cls, wire: socket.socket | TlsWire, hello: Hello) -> SocketEngine:
        """Send a Hello over a wire, and wait until the engine's model is loaded.

        Raises EngineError with the process's error code: engine_died if the process closed the
        connection first.
        """
        engine = cls(wire)
        try:
            await engine.greet(hello)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def greet(self, hello: Hello) -> None:
        """Send a Hello and wait for the engine's Welcome. Raises EngineError."""
        self._wire.send(encode(hello))
        await self._welcome

    def post(self, command: Command) -> None:
        """See `EngineConnection.post`. Raises EngineUnavailable if the engine has stopped reading,
        except for commands that end a request: a cancelled request must learn its usage.

        With fewer than two streams a command is written at once: the engine works while the loop
        turn goes on. With more streams, all commands of a turn leave in one write at its end: a
        write costs more than all other work on a command.
        """
        if self._is_closed:
            return
        is_full = self._wire.unsent > UNSENT_BYTES_MAX
        if is_full and not isinstance(command, Cancel | EndSample | Drain):
            raise EngineUnavailable("queue_full", "The engine does not keep up with its requests.")
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent.append(encode(command))
        if len(self._streams) < 2:
            if self._pace is not None and isinstance(command, Submit):
                self._pace.begin(self._loop.time())
            self._send()

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and not self._is_closed:
            self._wire.send(b"".join(unsent))

    async def wait_lost(self) -> None:
        """Return when the connection has ended."""
        await asyncio.wait([self._ended])

    async def close(self) -> None:
        """See `Engine.close`."""
        self._send()
        self._wire.close()
        self._end("The connection to the engine was closed.")

    # -- called by the wire -----------------------------------------------------------------------

    def take_frame(self, body: bytes) -> None:
        """Handle a frame of the engine. A protocol error ends the connection."""
        self.last_frame_s = self._loop.time()
        try:
            message = read_downward(body)
            if isinstance(message, Frame) and self.info is not None:
                self._check_number(message.number)
                if self._pace is not None and message.messages and self._streams:
                    self._pace.note(self.last_frame_s)
                self.receive(message.messages)
            elif isinstance(message, Rejected) and self.info is not None:
                self._is_draining = True
                self.on_drain(message.message)
            elif self._welcome.done():
                raise FrameError("a second Welcome")
            else:
                self._on_welcome(message)
        except EngineError as error:
            self.loss = error.message
            if not self._welcome.done():
                self._welcome.set_exception(error)
            self._wire.close()
            self._end(DIED_MESSAGE)

    def _on_end(self) -> None:
        wire = self._wire
        violation, told = wire.error, wire.reason if isinstance(wire, TlsWire) else ""
        self.loss = told if violation is None else violation.message
        self._end(DIED_MESSAGE)
        if not self._welcome.done():
            closed = EngineUnavailable("engine_died", "The engine closed the connection.")
            self._welcome.set_exception(violation or closed)

    def _check_number(self, number: int) -> None:
        """Count a frame. Raises FrameError after a gap: events are lost, so no stream is whole."""
        if number != self._frames:
            raise FrameError(f"frame {number}; expected frame {self._frames}")
        self._frames += 1

    def _on_welcome(self, message: Welcome | Rejected | Frame) -> None:
        if isinstance(message, Rejected):
            raise EngineError(message.code, message.message)
        if isinstance(message, Frame):
            raise FrameError("a Frame before the Welcome")
        self.info, self.fallen = message.info, message.fallen
        self._welcome.set_result(message.info)

    def _end(self, message: str) -> None:
        """Mark the engine as lost and wake `wait_lost`. Safe to repeat."""
        self.mark_lost(message)
        if not self._ended.done():
            self._ended.set_result(None)
