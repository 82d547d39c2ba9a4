"""Closed-loop load at minimal cost: bare sockets, one request after another on each.

A response is scanned only for its end; nothing in it is parsed. So the client takes a small part of
the processor time of any Python server, and reports that part (`busy`). It knows no endpoint beyond
its address. `tests.bench.overhead.overhead` calls it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import cast

import msgspec
from msgspec import Struct

from gateway.bench.client import BenchError
from tests.bench.overhead.null_gateway import Ready

PATIENCE_S = 60.0


class Load(Struct, frozen=True):
    """A load: request, concurrency and duration.

    `rate`: tokens per second of each stream (0: unlimited). `rest_s`: seconds before the
    measurement.
    """

    concurrency: int
    seconds: float
    output: int = 4
    is_stream: bool = False
    rate: int = 0
    rest_s: float = 0.5


class LoadResult(Struct, frozen=True):
    """Results of a load. Times are of complete responses, `first_s` to their first bytes.

    `events`: server-sent events. `busy`: share of one core that the client itself took.
    """

    took_s: float
    times_s: list[float]
    first_s: list[float]
    events: int
    busy: float

    @property
    def answers_per_s(self) -> float:
        """Completed responses per second."""
        return len(self.times_s) / self.took_s


def request_of(target: Ready, load: Load, headers: Sequence[str] = ()) -> bytes:
    """Return the bytes of a request, the same for all clients. `headers`: further headers of
    this server."""
    body = msgspec.json.encode(
        {
            "model": target.model,
            "messages": [{"role": "user", "content": "Say a letter."}],
            "max_tokens": load.output,
            "ignore_eos": True,
            "stream": load.is_stream,
            **({"seed": load.rate} if load.rate else {}),
        }
    )
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {target.key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
    )
    more = "".join(f"{line}\r\n" for line in headers)
    return f"{head}{more}\r\n".encode() + body


class _Client(asyncio.Protocol):
    """One connection that sends again as soon as its response is complete."""

    def __init__(self, request: bytes, done: Callable[[_Client], None]) -> None:
        self._request = request
        self._done = done
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._missing = -1  # bytes left of a body of known length; -1: length unknown
        self._tail = b""
        self.sent_s = self.first_s = 0.0
        self.events = 0
        self.is_stopped = False
        self.failure: str | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_stopped:
            self.failure = self.failure or "the connection was closed"
        if not self.over.done():
            self.over.set_result(None)

    def send(self) -> None:
        """Send the request, or close."""
        assert self._transport is not None
        if self.is_stopped:
            self._transport.close()
            return
        self._head, self._tail, self._missing = b"", b"", -1
        self.first_s = 0.0
        self.sent_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.first_s:
            self._head += data
            at = self._head.find(b"\r\n\r\n")
            if at < 0:
                return
            head, data = self._head[:at].lower(), self._head[at + 4 :]
            if not head.startswith(b"http/1.1 200"):
                self._fail(self._head)
                return
            _, found, rest = head.partition(b"content-length:")
            if found:
                self._missing = int(rest.split(b"\r\n", 1)[0])
            self.first_s = time.perf_counter()
        if self._missing >= 0:
            self._missing -= len(data)
            if self._missing <= 0:
                self._end()
            return
        # Include the previous chunk's end: an event's start may be split.
        self.events += (self._tail[-5:] + data).count(b"data: ")
        self._tail = (self._tail + data[-7:])[-7:]
        if self._tail == b"\r\n0\r\n\r\n":
            self._end()

    def _end(self) -> None:
        self._done(self)
        self.send()

    def _fail(self, head: bytes) -> None:
        assert self._transport is not None
        self.failure = head[:400].decode("latin-1")
        self._transport.close()


class _Tally:
    """Counts of the measurement, after the rest."""

    def __init__(self) -> None:
        self.is_counting = False
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.times_s: list[float] = []
        self.first_s: list[float] = []

    def done(self, client: _Client) -> None:
        if self.is_counting:
            if not self.times_s:
                self.first.set_result(None)
            self.times_s.append(time.perf_counter() - client.sent_s)
            self.first_s.append(client.first_s - client.sent_s)


async def run(
    target: Ready, load: Load, counting: Callable[[bool], None], headers: Sequence[str] = ()
) -> LoadResult:
    """Load a server for the duration, and until one response has been counted.

    `counting` is called when the measurement starts and ends. Raises BenchError if a response is
    not successful.
    """
    loop = asyncio.get_running_loop()
    tally, request = _Tally(), request_of(target, load, headers)
    host, _, port = target.url.rpartition("//")[2].partition(":")
    clients: list[_Client] = []
    for _ in range(load.concurrency):
        _, client = await loop.create_connection(
            lambda: _Client(request, tally.done), host, int(port)
        )
        clients.append(client)
    await asyncio.sleep(load.rest_s)
    events = sum(client.events for client in clients)
    counting(True)
    tally.is_counting = True
    start_s, busy_s = time.perf_counter(), time.process_time()
    await asyncio.sleep(load.seconds)
    ends = [client.over for client in clients]
    await asyncio.wait(
        [tally.first, *ends], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED
    )
    took_s, busy_s = time.perf_counter() - start_s, time.process_time() - busy_s
    tally.is_counting = False
    counting(False)
    events = sum(client.events for client in clients) - events
    for client in clients:
        client.is_stopped = True
    _, late = await asyncio.wait(ends, timeout=PATIENCE_S)
    failures = [client.failure for client in clients if client.failure]
    if late or failures:
        first = failures[0] if failures else "no end"
        raise BenchError(f"{len(late) + len(failures)} answers were not whole; the first: {first}")
    return LoadResult(took_s, tally.times_s, tally.first_s, events, busy_s / took_s)
