"""An engine that computes nothing: `python -m tests.bench.overhead.null_engine`.

It answers every request with one repeated token, at the rate that the request's seed sets: so many
tokens per second, or all at once. The gateway is left to measure. It speaks the wire of
`engine.protocol`, one frame per step for all streams of a rate, as the real engine does. It knows
no model, cache or sampling. `tests.bench.overhead.null_gateway` starts it by the engine's
supervisor.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import cast

from engine.api import (
    Cancel,
    Command,
    Departed,
    Disown,
    Drain,
    Ending,
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
    Peek,
    Peeked,
    Request,
    SampledToken,
    SampleEnded,
    SetQuotas,
    Started,
    Submit,
    Survey,
    Surveyed,
    Tokens,
    Usage,
    WatchPrefixes,
)
from engine.model_store import load_card
from engine.protocol import Downward, Frame, Hello, Reply, Welcome, encode, read_upward
from engine.statistics import Stats
from engine.wire import Decoder

HEARTBEAT_S = 0.25
TOKEN = SampledToken(100)
"""A letter in every byte-level vocabulary whose special tokens come first."""


class _Running:
    """A running request."""

    __slots__ = ("left", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.left = request.max_tokens


class NullEngine(asyncio.Protocol):
    """One connection. Streams of one rate step together; a slow reader pauses them."""

    def __init__(self) -> None:
        self.lost = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._decoder = Decoder(read_upward)
        self._transport: asyncio.Transport | None = None
        self._is_known = False
        self._may_write = True
        self._is_draining = False
        self._number = 0
        self._step = 0
        self._running: dict[str, _Running] = {}
        self._by_rate: dict[int, dict[str, _Running]] = {}
        self._at_once: list[Event] = []

    # -- the socket ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop every step."""
        self.lost.set()
        self._transport = None
        self._by_rate.clear()

    def pause_writing(self) -> None:
        """Pause steps until the gateway has read."""
        self._may_write = False

    def resume_writing(self) -> None:
        """Continue steps."""
        self._may_write = True

    def data_received(self, data: bytes) -> None:
        """Handle commands in order. Events that they cause at once are one step, as in the real
        engine."""
        for message in self._decoder.feed(data):
            if self._is_known and not isinstance(message, Hello):
                self._handle(message)
            else:
                self._greet(message)
        if self._at_once:
            self._step += 1
            said, self._at_once = self._at_once, []
            self._send_events(*said)
            self._close_if_idle()

    def _greet(self, message: Hello | Command) -> None:
        assert isinstance(message, Hello), "a hello comes first"
        self._is_known = True
        self._write(Welcome(info_of(Path(message.model_dir))))
        self._send_heartbeat()

    def _write(self, message: Downward) -> None:
        if self._transport is not None:
            self._transport.write(encode(message))

    def _send_events(self, *messages: Event | Reply) -> None:
        self._write(Frame(self._number, self._step, messages))
        self._number += 1

    def _send_heartbeat(self) -> None:
        if self._transport is not None:
            self._send_events(Stats(step=self._step, running=len(self._running)))
            self._loop.call_later(HEARTBEAT_S, self._send_heartbeat)

    # -- requests -----------------------------------------------------------------------------

    def _handle(self, command: Command) -> None:
        match command:
            case Submit(request=request):
                self._begin(request)
            case Cancel(request_id=request_id):
                self._end(request_id, "cancelled")
            case EndSample(request_id=request_id):
                self._end(request_id, "done")
            case Peek(call_id=call_id):
                self._send_events(Peeked(call_id, 0))
            case Erase(call_id=call_id):
                self._send_events(Erased(call_id, 0))
            case GetStats(call_id=call_id):
                self._send_events(Stats(call_id, step=self._step, running=len(self._running)))
            case GetHeld(call_id=call_id):
                self._send_events(Held(call_id, ()))
            case GetDeparted(call_id=call_id):
                self._send_events(Departed(call_id, ()))
            case FindLease(call_id=call_id):
                self._send_events(LeaseFound(call_id))
            case LetGo() | SetQuotas() | WatchPrefixes() | Disown():
                pass
            case Survey(call_id=call_id):
                self._send_events(Surveyed(call_id, ()))
            case Drain():
                self._is_draining = True
                self._close_if_idle()

    def _begin(self, request: Request) -> None:
        running = _Running(request)
        started = Started(request.request_id, len(request.tokens), 0)
        rate = request.sampling.seed
        self._running[request.request_id] = running
        if not rate:
            self._at_once += [started, *self._tokens(running, running.left)]
            return
        self._send_events(started)
        together = self._by_rate.get(rate)
        if together is None:
            together = self._by_rate[rate] = {}
            due_s = self._loop.time() + 1 / rate
            self._loop.call_at(due_s, self._run_step, rate, due_s)
        together[request.request_id] = running

    def _run_step(self, rate: int, due_s: float) -> None:
        """Run one step of one rate: a token for each of its streams. A late step is not made up
        for."""
        together = self._by_rate.get(rate)
        if not together:
            self._by_rate.pop(rate, None)
            return
        if self._may_write:
            self._step += 1
            self._send_events(
                *[e for running in list(together.values()) for e in self._tokens(running, 1)]
            )
        next_s = max(due_s + 1 / rate, self._loop.time())
        self._loop.call_at(next_s, self._run_step, rate, next_s)

    def _tokens(self, running: _Running, count: int) -> list[Event]:
        request_id = running.request.request_id
        running.left -= count
        said: list[Event] = [
            Tokens(request_id, index, (TOKEN,) * count) for index in range(running.request.samples)
        ]
        return said if running.left > 0 else said + self._last(running, "done")

    def _last(self, running: _Running, ending: Ending) -> list[Event]:
        request = running.request
        del self._running[request.request_id]
        self._by_rate.get(request.sampling.seed or 0, {}).pop(request.request_id, None)
        tokens = request.max_tokens - running.left
        ends: list[Event] = [
            SampleEnded(request.request_id, index, "length", tokens)
            for index in range(0 if running.left else request.samples)
        ]
        usage = Usage(
            prompt_tokens=len(request.tokens),
            computed_tokens=len(request.tokens),
            output_tokens=tokens * request.samples,
            first_token_s=0.0,
        )
        return [*ends, Finished(request.request_id, ending, usage)]

    def _end(self, request_id: str, ending: Ending) -> None:
        running = self._running.get(request_id)
        if running is not None:
            self._send_events(*self._last(running, ending))
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        is_idle = not self._running and not self._at_once
        if self._is_draining and is_idle and self._transport is not None:
            self._transport.close()


def info_of(model_dir: Path) -> EngineInfo:
    """Return the engine's info: a model's shape, and unlimited blocks. Raises ModelError."""
    card = load_card(model_dir)
    return EngineInfo(
        epoch="null",
        model=card.name,
        model_digest=card.digest,
        model_dir=str(model_dir),
        vocab_size=card.config.vocab,
        context_tokens=card.config.context,
        block_size=16,
        blocks=2**20,
        floor_blocks_max=2**19,
        kv_bytes_per_block=1,
        kv_format="none",
        device="none",
        pid=os.getpid(),
    )


async def serve() -> None:
    """Serve until standard input ends, which means that the gateway has exited."""
    wire = socket.socket(fileno=sys.stdin.fileno())
    loop = asyncio.get_running_loop()
    _, engine = await loop.create_unix_connection(NullEngine, sock=wire)
    await engine.lost.wait()


def main() -> None:
    """Serve the gateway that started this process."""
    asyncio.run(serve())


if __name__ == "__main__":
    main()
