"""`EngineKeeper` with real processes and real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.api import CacheGrant, Finished, Grammar, Request, Sampling, Started, Tokens
from engine.client.request_stream import RequestStream
from engine.config import EngineConfig
from engine.errors import EngineUnavailable, ModelError, RequestRefused
from gateway.engines.composition import own_engine
from gateway.engines.keeper import RESTARTS
from gateway.processes.child_process import RestartPolicy
from tests.fakes import solo_output
from tests.unit.engine.server.fake_engine_process import VOCAB

COMMAND = (sys.executable, "-m", "tests.unit.engine.server.fake_engine_process")
CONFIG = EngineConfig(
    heartbeat_s=0.05,
    step_timeout_s=30.0,
    step_tokens_max=16,
    prefill_chunk_tokens_max=16,
    drain_timeout_s=20.0,
)
GREEDY = Sampling(temperature=0)
DEADLINE_S = 60.0
LONG = 8_000
TICK_S = 0.7
"""More between two looks would pass for a pause of the supervisor's own."""


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> None:
    """Disabled here: each start makes a folder, in microseconds."""


def request(name: str = "a", prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 4) -> Request:
    return Request(name, prompt, max_tokens, CacheGrant(b"n"), GREEDY)


class SupervisedEngine:
    """A supervisor and its reports, for tests that wait instead of sleeping."""

    def __init__(
        self,
        fault: str = "",
        restarts: RestartPolicy = RESTARTS,
    ) -> None:
        self.reports: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self.told: list[str] = []
        self.engine = own_engine(
            Path("fake") / fault, CONFIG, self._on_report, command=COMMAND, restarts=restarts
        )

    def _on_report(self, event: str, facts: dict[str, Any]) -> None:
        self.told.append(event)
        self.reports.put_nowait((event, dict(facts)))

    async def report(self, event: str) -> dict[str, Any]:
        """Return the fields of the next report of that name."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                name, facts = await self.reports.get()
                if name == event:
                    return facts

    async def start(self) -> int:
        """Start, wait until the engine is ready, and return its process id."""
        self.engine.start()
        async with asyncio.timeout(DEADLINE_S):
            await self.engine.wait_ready()
        return await self.pid()

    async def stuck(self, forward: Callable[[float], None]) -> dict[str, Any]:
        """Let time pass until the engine is reported as stuck; return the report."""
        reporting = asyncio.create_task(self.report("engine_stuck"))
        while not reporting.done():
            forward(TICK_S)
            await asyncio.sleep(0.001)
        return await reporting

    async def beat(self, forward: Callable[[float], None]) -> None:
        """Let more time pass than a step may take, a tick with each heartbeat."""
        passed_s, last = 0.0, self.engine.stats
        while passed_s < CONFIG.step_timeout_s + 5:
            await asyncio.sleep(0.001)
            assert self.engine.ready()
            if self.engine.stats is not last:
                passed_s, last = passed_s + TICK_S, self.engine.stats
                forward(TICK_S)

    async def pid(self) -> int:
        """Return the process id of the next engine that becomes ready."""
        return int((await self.report("engine_started"))["pid"])

    async def answer(self, name: str = "canary") -> list[int]:
        """Return a complete answer of the running engine."""
        return texts(await read(self.engine.submit(request(name))))


@pytest.fixture
async def supervised() -> AsyncIterator[SupervisedEngine]:
    supervised = SupervisedEngine()
    yield supervised
    await supervised.engine.close()


async def read(stream: RequestStream) -> list[Any]:
    async with asyncio.timeout(DEADLINE_S):
        return [event async for event in stream]


async def first(stream: RequestStream, kind: type) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async for event in stream:
            if isinstance(event, kind):
                return
    raise AssertionError(f"no {kind.__name__}")


def texts(events: list[Any]) -> list[int]:
    return [t.token_id for e in events if isinstance(e, Tokens) for t in e.tokens]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_engine_is_ready_once_it_has_produced_a_token(supervised: SupervisedEngine) -> None:
    """Until then requests are refused with a time to retry."""
    with pytest.raises(EngineUnavailable) as early:
        supervised.engine.submit(request())
    assert not supervised.engine.ready()

    await supervised.start()

    assert early.value.retry_after_s > 0
    assert supervised.engine.ready()
    assert await supervised.answer() == solo_output((1, 2, 3), GREEDY, 0, 4, VOCAB)


@pytest.mark.parametrize(
    "when", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("idle", "prefill")), "decode"]
)
async def test_killed_engine_ends_its_streams_and_restarts(
    supervised: SupervisedEngine, when: str
) -> None:
    """SIGKILL, as the out-of-memory killer sends it: streams end with the connection, without a
    timeout, and the cache begins empty."""
    pid = await supervised.start()
    epoch = supervised.engine.info.epoch if supervised.engine.info else ""
    prompt = tuple(range(20)) * 300 if when == "prefill" else (1, 2, 3)
    stream = None
    if when != "idle":
        stream = supervised.engine.submit(request("a", prompt, 2_000))
        await first(stream, Started if when == "prefill" else Tokens)

    os.kill(pid, signal.SIGKILL)
    if stream is not None:
        end = (await read(stream))[-1]
        assert isinstance(end, Finished)
        assert (end.ending, end.code) == ("failed", "engine_died")
        assert end.usage.prompt_tokens == len(prompt)

    assert await supervised.pid() != pid
    assert "engine_stuck" not in supervised.told
    assert supervised.engine.info is not None
    assert supervised.engine.info.epoch != epoch
    assert (await supervised.engine.peek(b"n", prompt)).cached_tokens == 0
    assert await supervised.answer() == solo_output((1, 2, 3), GREEDY, 0, 4, VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["idle", "decode"])
async def test_stopped_engine_is_replaced(
    supervised: SupervisedEngine, forward: Callable[[float], None], when: str
) -> None:
    """A process that exists and does nothing is as dead as a process that does not exist."""
    pid = await supervised.start()
    stream = None
    if when == "decode":
        stream = supervised.engine.submit(request(max_tokens=LONG))
        await first(stream, Tokens)

    os.kill(pid, signal.SIGSTOP)
    stuck = await supervised.stuck(forward)

    if stream is not None:
        assert (await read(stream))[-1].code == "engine_died"
    assert stuck["idle_s"] >= CONFIG.step_timeout_s
    assert await supervised.pid() != pid
    assert not is_alive(pid)
    assert len(await supervised.answer()) == 4


@pytest.mark.slow
async def test_idle_engine_is_not_stuck(
    supervised: SupervisedEngine, forward: Callable[[float], None]
) -> None:
    """Heartbeats go on for longer than any step may take."""
    await supervised.start()

    await supervised.beat(forward)

    assert supervised.engine.ready()
    assert supervised.engine.restarts == 0


@pytest.mark.slow
async def test_engine_that_waits_for_a_grammar_is_not_stuck(
    forward: Callable[[float], None],
) -> None:
    """No step is taken meanwhile; a killed engine would take every tenant's cache with it."""
    supervised = SupervisedEngine("compiling")
    await supervised.start()
    grammar = Grammar("json_object")
    stream = supervised.engine.submit(msgspec.structs.replace(request(), grammar=grammar))

    await supervised.beat(forward)

    stats = await supervised.engine.get_stats()
    assert (stats.waiting, stats.compiling) == (1, 1)
    assert supervised.engine.restarts == 0
    end = await stream.cancel()
    assert end is not None
    assert end.ending == "cancelled"
    await supervised.engine.close()


async def test_hanging_step_is_replaced(forward: Callable[[float], None]) -> None:
    """The engine's thread hangs while its process still answers signals and sockets."""
    supervised = SupervisedEngine("hang")
    await supervised.start()
    stream = supervised.engine.submit(request())

    await supervised.stuck(forward)

    assert (await read(stream))[-1].code == "engine_died"
    await supervised.engine.close()


@pytest.mark.slow
async def test_engine_is_replaced_after_any_number_of_deaths() -> None:
    """It may be killed for a while by a lack of memory; the gateway must not need an operator."""
    supervised = SupervisedEngine(restarts=RestartPolicy((0.01,), first_starts_max=2))
    await supervised.start()
    for deaths in range(1, 7):
        assert supervised.engine.info is not None
        os.kill(supervised.engine.info.pid, signal.SIGKILL)
        assert (await supervised.report("engine_died"))["restarts"] == deaths
        await supervised.pid()

    assert len(await supervised.answer()) == 4
    await supervised.engine.close()


async def test_retry_after_covers_the_pause() -> None:
    """A client that comes earlier would be refused again."""
    supervised = SupervisedEngine(restarts=RestartPolicy((50.0,)))
    pid = await supervised.start()
    os.kill(pid, signal.SIGKILL)
    await supervised.report("engine_died")
    await asyncio.sleep(0)

    with pytest.raises(EngineUnavailable) as refused:
        supervised.engine.submit(request())

    assert 40.0 < refused.value.retry_after_s <= 60.0
    await supervised.engine.close()


@pytest.mark.slow
async def test_request_that_kills_the_engine_is_refused_after_a_try_alone() -> None:
    """One bad prompt must not keep killing the engine; the requests beside it are served again."""
    supervised = SupervisedEngine("deadly")
    await supervised.start()
    for attempt in ("first", "second"):
        beside = supervised.engine.submit(request(f"beside {attempt}", (12,), LONG))
        await first(beside, Tokens)
        stream = supervised.engine.submit(request(attempt, (13,)))
        assert (await read(stream))[-1].code == "engine_died"
        await supervised.pid()
    beside = supervised.engine.submit(request("beside third", (12,), LONG))
    await first(beside, Tokens)
    stream = supervised.engine.submit(request("third", (13,)))
    assert (await read(stream))[-1].code == "engine_died"
    assert (await supervised.report("engine_poisoned")) == {"request_id": "third"}
    await supervised.pid()

    with pytest.raises(RequestRefused) as refused:
        supervised.engine.submit(request("fourth", (13,)))

    assert refused.value.code == "poison_request"
    assert len(texts(await read(supervised.engine.submit(request("other", (12,)))))) == 4
    await supervised.engine.close()


@pytest.mark.slow
async def test_honest_requests_in_flight_at_two_deaths_are_served(
    supervised: SupervisedEngine,
) -> None:
    """The out-of-memory killer comes twice, and again: clients that try again get their answers,
    whether their requests ran or waited."""
    pid = await supervised.start()
    names = [f"client {number}" for number in range(80)]  # more than the batch holds
    for death in range(2):
        streams = [
            supervised.engine.submit(request(f"{name} {death}", (1, 2, at % 60, at // 60), LONG))
            for at, name in enumerate(names)
        ]
        await first(streams[0], Tokens)
        os.kill(pid, signal.SIGKILL)
        for stream in streams:
            assert (await read(stream))[-1].code == "engine_died"
        pid = await supervised.pid()

    streams = [
        supervised.engine.submit(request(name, (1, 2, at % 60, at // 60), 40))
        for at, name in enumerate(names)
    ]
    answers = [texts(await read(stream)) for stream in streams]

    for at, answer in enumerate(answers):
        assert answer == solo_output((1, 2, at % 60, at // 60), GREEDY, 0, 40, VOCAB)


@pytest.mark.slow
async def test_finished_request_is_not_suspected(supervised: SupervisedEngine) -> None:
    """It ended before the engine died."""
    await supervised.start()
    for attempt in ("first", "second"):
        assert len(await supervised.answer(attempt)) == 4
        assert supervised.engine.info is not None
        os.kill(supervised.engine.info.pid, signal.SIGKILL)
        await supervised.pid()

    assert len(await supervised.answer("third")) == 4


async def test_missing_model_is_not_retried() -> None:
    """Another start would not find it."""
    supervised = SupervisedEngine("missing")
    supervised.engine.start()

    with pytest.raises(ModelError) as missing:
        async with asyncio.timeout(DEADLINE_S):
            await supervised.engine.wait_ready()

    assert missing.value.code == "not_found"
    assert supervised.engine.restarts == 0
    await supervised.engine.close()


async def test_drain_finishes_streams_before_the_process_exits(
    supervised: SupervisedEngine,
) -> None:
    """SIGTERM in a deployment: no new work, no lost response."""
    pid = await supervised.start()
    stream = supervised.engine.submit(request(max_tokens=500))
    await first(stream, Started)

    await supervised.engine.drain(CONFIG.drain_timeout_s)
    with pytest.raises(EngineUnavailable):
        supervised.engine.submit(request("late"))
    events = await read(stream)
    await supervised.engine.close()

    assert events[-1].ending == "done"
    assert not is_alive(pid)


async def test_close_leaves_no_process_behind(supervised: SupervisedEngine) -> None:
    """Nor a process that is in the middle of a request."""
    pid = await supervised.start()
    stream = supervised.engine.submit(request(max_tokens=LONG))
    await first(stream, Tokens)

    await supervised.engine.close()

    assert not is_alive(pid)
    assert (await read(stream))[-1].ending == "failed"


@pytest.mark.slow
async def test_close_reaps_a_process_whose_reaping_was_cancelled(
    supervised: SupervisedEngine, forward: Callable[[float], None]
) -> None:
    """A process that ignores signals must not outlive a cancelled `end`."""
    pid = await supervised.start()
    os.kill(pid, signal.SIGSTOP)
    await supervised.stuck(forward)

    await supervised.engine.close()

    assert not is_alive(pid)
