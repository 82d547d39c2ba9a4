"""Tests of the overhead bench: null engine, load, and figures."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.api import CacheGrant, Event, Finished, Request, Sampling, Started, Tokens
from engine.config import EngineConfig
from engine.model_store import ModelCard
from gateway.bench.client import BenchError
from gateway.engines.composition import own_engine
from gateway.engines.replicas import Replicas
from tenancy.storage.sqlite import SqliteStore
from tests.bench.overhead.__main__ import parse_arguments, run_overhead_bench
from tests.bench.overhead.load import Load, LoadResult, run
from tests.bench.overhead.null_gateway import (
    NULL_ENGINE,
    Ready,
    config_of,
    make_key,
)
from tests.bench.overhead.null_gateway import NullGatewaySettings as GatewaySettings
from tests.bench.overhead.overhead import (
    OverheadRun,
    Server,
    summarize,
)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> None:
    """Allow blocking calls: starting processes creates folders and opens logs, while no request
    runs."""


@asynccontextmanager
async def null_engine(card: ModelCard) -> AsyncIterator[Replicas]:
    """Start the process as the gateway does."""
    engine = own_engine(
        Path(card.folder), EngineConfig(), lambda event, facts: None, command=NULL_ENGINE
    )
    engine.start()
    await engine.wait_ready()
    try:
        yield engine
    finally:
        await engine.close()


def asked(request_id: str, output: int, rate: int | None = None) -> Request:
    grant = CacheGrant(namespace=b"bench")
    return Request(request_id, (1, 2, 3), output, grant, sampling=Sampling(seed=rate))


async def test_null_engine_without_rate_sends_all_tokens_at_once(card: ModelCard) -> None:
    """A small response then measures only the gateway."""
    async with null_engine(card) as engine:
        events = await engine.submit(asked("a", 4)).next_batch()

    kinds = [type(event).__name__ for event in events]
    assert kinds == ["Started", "Tokens", "SampleEnded", "Finished"]
    assert isinstance(events[-1], Finished)
    assert (events[-1].ending, events[-1].usage.output_tokens) == ("done", 4)


async def test_null_engine_with_rate_sends_one_token_per_step(card: ModelCard) -> None:
    """Streams of one rate step together, each to its own end, as a batch does in a real engine."""
    async with null_engine(card) as engine:
        streams = [engine.submit(asked(f"{n}", n, rate=500)) for n in (2, 3)]
        heard = [[event async for event in stream] for stream in streams]

    assert [_said(events) for events in heard] == [2, 3]
    assert all(isinstance(events[0], Started) for events in heard)
    assert [sum(isinstance(e, Finished) for e in events) for events in heard] == [1, 1]


def _said(events: list[Event]) -> int:
    return sum(len(event.tokens) for event in events if isinstance(event, Tokens))


async def test_null_engine_ends_a_cancelled_stream_once(card: ModelCard) -> None:
    """Clients disconnect under load too; the gateway waits for the end and its usage."""
    async with null_engine(card) as engine:
        stream = engine.submit(asked("long", 10_000, rate=100))
        assert isinstance((await stream.next_batch())[0], Started)
        end = await stream.cancel()

    assert end is not None
    assert end.ending == "cancelled"


async def test_null_engine_answers_all_other_commands(card: ModelCard) -> None:
    """Peeking, erasing and counting must not hang the measured gateway."""
    async with null_engine(card) as engine:
        peeked = await engine.peek(b"bench", (1, 2))
        erased, away = await engine.erase(b"bench")
        stats = await engine.get_stats()
        await engine.drain(1.0)

        assert (peeked.cached_tokens, erased.blocks, stats.running, away) == (0, 0, 0, frozenset())


# --- the load ----------------------------------------------------------------------------------


Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def scripted_server(answer: Answer) -> AsyncIterator[Ready]:
    """Serve the same bytes for every request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65_536):
            await answer(writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield Ready(f"http://127.0.0.1:{port}", "key", "model", 0)
    finally:
        server.close()
        await server.wait_closed()


async def test_load_finds_ends_and_events_at_any_chunking() -> None:
    """It parses nothing, so a split in the wrong place could lose an event or an end."""
    body = b"7\r\ndata: 1\r\n7\r\ndata: 2\r\n0\r\n\r\n"
    whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body

    async def byte_by_byte(writer: asyncio.StreamWriter) -> None:
        for at in range(len(whole)):
            writer.write(whole[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0)

    counted: list[bool] = []
    async with scripted_server(byte_by_byte) as target:
        found = await run(target, Load(1, 0.1, is_stream=True, rest_s=0.0), counted.append)

    answers = len(found.times_s)
    assert answers > 0
    assert abs(found.events - 2 * answers) <= 2  # responses at the edges of the measurement
    assert counted == [True, False]
    assert all(
        0 < first <= whole for first, whole in zip(found.first_s, found.times_s, strict=True)
    )


async def test_error_response_ends_the_benchmark() -> None:
    """Refusals are fast: counted as responses they would make any server look good."""

    async def refuse(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\nno")

    async with scripted_server(refuse) as target:
        with pytest.raises(BenchError, match="429 Too Many"):
            await run(target, Load(2, 0.05, rest_s=0.0), lambda _: None)


async def test_truncated_response_ends_the_benchmark() -> None:

    async def hang_up(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
        writer.close()

    async with scripted_server(hang_up) as target:
        with pytest.raises(BenchError, match="the connection was closed"):
            await run(target, Load(1, 0.05, rest_s=0.0), lambda _: None)


# --- all of it -----------------------------------------------------------------------------------


def test_run_measures_both_servers_under_every_load(card: ModelCard) -> None:
    """The real command: two servers as processes, keys, limits and a ledger."""
    options = parse_arguments(["--concurrency", "2", "--seconds", "0.15"])

    report = run_overhead_bench(options, Path(card.folder), lambda line: None)

    assert [(line.kind, line.concurrency) for line in report.lines] == [
        (kind, 2) for kind in ("unary", "stream", "paced")
    ]
    assert all(line.mock.answers_per_s > 0 < line.gateway.answers_per_s for line in report.lines)
    if sys.platform == "linux":
        assert all(line.gateway.cpu_us > 0 for line in report.lines)
    assert "gateway/s" in report.text()
    assert len(json.loads(report.json())["lines"]) == 3


def test_every_kind_of_limit_counts_and_none_refuses(tmp_path: Path) -> None:
    """A gateway without limits would be measured without their cost."""
    settings = GatewaySettings("model", str(tmp_path), streams_max=512)
    config = config_of(settings)
    store = SqliteStore(config.data / config.tenancy.database)
    make_key(store)
    (of_tenant,) = store.query("select limits from tenants")[0]
    (of_key,) = store.query("select limits from keys")[0]
    store.close()

    assert len(json.loads(of_tenant)) == 5
    assert len(json.loads(of_key)) == 2
    assert config.limits.requests_per_tenant_max > settings.streams_max


def test_figures_follow_from_counts() -> None:
    """By hand: half a second, ten responses of four tokens, 0.1 s of processor time."""
    run = OverheadRun(LoadResult(0.5, [0.002] * 9 + [0.010], [0.001] * 10, 30, 0.25), 0.1, 0.05)

    whole = summarize(run, Load(1, 0.5))
    stream = summarize(run, Load(1, 0.5, is_stream=True))

    assert (whole.answers_per_s, whole.tokens_per_s, whole.events) == (20, 80, 3)
    assert (whole.p50_ms, whole.p99_ms, stream.p99_ms) == (2, 10, 1)
    assert (round(whole.cpu, 6), round(whole.cpu_us)) == (0.2, 2500)
    assert round(whole.writer, 6) == 0.1


def server(found: LoadResult, cpu_s: float) -> Server:
    """Return the result of one client over a second."""
    return summarize(OverheadRun(found, cpu_s), Load(1, 1.0))
