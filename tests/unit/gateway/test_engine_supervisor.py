"""The keeper of the engine process, with real processes and real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.api import CacheGrant, Finished, Request, Sampling, Started, Tokens
from engine.client.client import RequestStream
from engine.config import EngineConfig
from engine.errors import EngineUnavailable, ModelError, RequestRefused
from gateway.child_process import RestartPolicy
from gateway.engine_supervisor import RESTARTS, EngineSupervisor
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
STRICT = msgspec.structs.replace(CONFIG, step_timeout_s=1.0)
"""For those who wait for it: a busy host keeps a process from its turn for half as long."""

GREEDY = Sampling(temperature=0)
DEADLINE_S = 60.0
LONG = 8_000


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> None:
    """Not here: each start makes a folder for the engine's socket, in microseconds."""


def request(name: str = "a", prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 4) -> Request:
    return Request(name, prompt, max_tokens, CacheGrant(b"n"), GREEDY)


class Kept:
    """A supervisor with its reports, waited for instead of slept for."""

    def __init__(
        self,
        fault: str = "",
        config: EngineConfig = CONFIG,
        restarts: RestartPolicy = RESTARTS,
    ) -> None:
        self.reports: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self.told: list[str] = []
        self.engine = EngineSupervisor(
            Path("fake") / fault, config, self._hear, command=COMMAND, restarts=restarts
        )

    def _hear(self, event: str, facts: dict[str, Any]) -> None:
        self.told.append(event)
        self.reports.put_nowait((event, dict(facts)))

    async def report(self, event: str) -> dict[str, Any]:
        """The facts of the next report of that name."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                name, facts = await self.reports.get()
                if name == event:
                    return facts

    async def start(self) -> int:
        """Up and ready; its process id."""
        self.engine.start()
        async with asyncio.timeout(DEADLINE_S):
            await self.engine.wait_ready()
        return await self.pid()

    async def pid(self) -> int:
        """Of the engine that became ready next."""
        return int((await self.report("engine_started"))["pid"])

    async def answer(self, name: str = "canary") -> list[int]:
        """A whole answer of the engine that lives now."""
        return words(await read(self.engine.submit(request(name))))


@pytest.fixture
async def kept() -> AsyncIterator[Kept]:
    kept = Kept()
    yield kept
    await kept.engine.close()


@pytest.fixture
async def strict() -> AsyncIterator[Kept]:
    """One that loses its patience."""
    strict = Kept(config=STRICT)
    yield strict
    await strict.engine.close()


async def read(stream: RequestStream) -> list[Any]:
    async with asyncio.timeout(DEADLINE_S):
        return [event async for event in stream]


async def first(stream: RequestStream, kind: type) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async for event in stream:
            if isinstance(event, kind):
                return
    raise AssertionError(f"no {kind.__name__}")


def words(events: list[Any]) -> list[int]:
    return [t.token_id for e in events if isinstance(e, Tokens) for t in e.tokens]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_an_engine_is_ready_once_it_has_produced_a_token(kept: Kept) -> None:
    """Before that it refuses with a time to come back."""
    with pytest.raises(EngineUnavailable) as early:
        kept.engine.submit(request())
    assert not kept.engine.ready()

    await kept.start()

    assert early.value.retry_after_s > 0
    assert kept.engine.ready()
    assert await kept.answer() == solo_output((1, 2, 3), GREEDY, 0, 4, VOCAB)


@pytest.mark.parametrize("when", ["idle", "prefill", "decode"])
async def test_a_killed_engine_ends_its_streams_at_once_and_comes_back(
    kept: Kept, when: str
) -> None:
    """SIGKILL is what the memory killer sends: streams end with the connection, which nobody has to
    be silent for, and the cache starts anew."""
    pid = await kept.start()
    epoch = kept.engine.info.epoch if kept.engine.info else ""
    prompt = tuple(range(20)) * 300 if when == "prefill" else (1, 2, 3)
    stream = None
    if when != "idle":
        stream = kept.engine.submit(request("a", prompt, 2_000))
        await first(stream, Started if when == "prefill" else Tokens)

    os.kill(pid, signal.SIGKILL)
    if stream is not None:
        end = (await read(stream))[-1]
        assert isinstance(end, Finished)
        assert (end.ending, end.code) == ("failed", "engine_died")
        assert end.usage.prompt_tokens == len(prompt)

    assert await kept.pid() != pid
    assert "engine_stuck" not in kept.told
    assert kept.engine.info is not None
    assert kept.engine.info.epoch != epoch
    assert (await kept.engine.peek(b"n", prompt)).cached_tokens == 0
    assert await kept.answer() == solo_output((1, 2, 3), GREEDY, 0, 4, VOCAB)


@pytest.mark.parametrize("when", ["idle", "decode"])
async def test_a_stopped_engine_is_noticed_and_replaced(strict: Kept, when: str) -> None:
    """A process that exists and does nothing is as dead as one that does not."""
    pid = await strict.start()
    stream = None
    if when == "decode":
        stream = strict.engine.submit(request(max_tokens=LONG))
        await first(stream, Tokens)

    os.kill(pid, signal.SIGSTOP)
    stuck = await strict.report("engine_stuck")

    if stream is not None:
        assert (await read(stream))[-1].code == "engine_died"
    assert stuck["idle_s"] >= STRICT.step_timeout_s
    assert await strict.pid() != pid
    assert not is_alive(pid)
    assert len(await strict.answer()) == 4


async def test_an_idle_engine_is_left_alone(strict: Kept) -> None:
    """No work is no fault: heartbeats go on for longer than any step may take."""
    await strict.start()
    loop = asyncio.get_running_loop()
    until_s = loop.time() + 2 * STRICT.step_timeout_s

    with pytest.raises(TimeoutError):
        async with asyncio.timeout_at(until_s):
            await strict.report("engine_stuck")

    assert strict.engine.ready()
    assert strict.engine.restarts == 0


async def test_a_step_that_never_ends_is_ended() -> None:
    """The engine's thread hangs while its process still answers signals and sockets."""
    kept = Kept("hang", STRICT)
    await kept.start()
    stream = kept.engine.submit(request())

    await kept.report("engine_stuck")

    assert (await read(stream))[-1].code == "engine_died"
    await kept.engine.close()


async def test_five_deaths_in_a_minute_keep_it_down() -> None:
    """A crash loop helps nobody: it says so and stays down."""
    # A busy host may take more than a minute for five starts.
    kept = Kept(restarts=msgspec.structs.replace(RESTARTS, deaths_window_s=600.0))
    await kept.start()
    for deaths in range(1, 5):
        assert kept.engine.info is not None
        os.kill(kept.engine.info.pid, signal.SIGKILL)
        assert (await kept.report("engine_died"))["restarts"] == deaths
        await kept.pid()

    assert kept.engine.info is not None
    os.kill(kept.engine.info.pid, signal.SIGKILL)
    await kept.report("engine_restart_limit")

    assert not kept.engine.ready()
    with pytest.raises(EngineUnavailable):
        kept.engine.submit(request())
    with pytest.raises(EngineUnavailable):
        await kept.engine.wait_ready()
    await kept.engine.close()


async def test_a_request_that_kills_twice_is_refused() -> None:
    """One poisonous prompt must not keep everybody's engine dying; its neighbours come back."""
    kept = Kept("deadly")
    await kept.start()
    for attempt in ("first", "second"):
        stream = kept.engine.submit(request(attempt, (13,)))
        assert (await read(stream))[-1].code == "engine_died"
        await kept.pid()

    with pytest.raises(RequestRefused) as refused:
        kept.engine.submit(request("third", (13,)))

    assert refused.value.code == "poison_request"
    assert len(words(await read(kept.engine.submit(request("other", (12,)))))) == 4
    await kept.engine.close()


async def test_a_finished_request_is_no_suspect(kept: Kept) -> None:
    """Whoever had its answer before the engine died did not kill it."""
    await kept.start()
    for attempt in ("first", "second"):
        assert len(await kept.answer(attempt)) == 4
        assert kept.engine.info is not None
        os.kill(kept.engine.info.pid, signal.SIGKILL)
        await kept.pid()

    assert len(await kept.answer("third")) == 4


async def test_a_model_that_is_missing_is_said_once() -> None:
    """Starting again would not find it."""
    kept = Kept("missing")
    kept.engine.start()

    with pytest.raises(ModelError) as missing:
        async with asyncio.timeout(DEADLINE_S):
            await kept.engine.wait_ready()

    assert missing.value.code == "not_found"
    assert kept.engine.restarts == 0
    await kept.engine.close()


async def test_drain_lets_a_stream_finish_before_the_process_ends(kept: Kept) -> None:
    """SIGTERM in a deployment: no new work, no lost answer."""
    pid = await kept.start()
    stream = kept.engine.submit(request(max_tokens=500))
    await first(stream, Started)

    await kept.engine.drain(CONFIG.drain_timeout_s)
    with pytest.raises(EngineUnavailable):
        kept.engine.submit(request("late"))
    events = await read(stream)
    await kept.engine.close()

    assert events[-1].ending == "done"
    assert not is_alive(pid)


async def test_close_leaves_no_process_behind(kept: Kept) -> None:
    """Nor one that is in the middle of an answer."""
    pid = await kept.start()
    stream = kept.engine.submit(request(max_tokens=LONG))
    await first(stream, Tokens)

    await kept.engine.close()

    assert not is_alive(pid)
    assert (await read(stream))[-1].ending == "failed"


async def test_close_ends_a_process_that_is_being_ended(strict: Kept) -> None:
    """One that hears no signal lives on when whoever waited for its end has been cancelled."""
    pid = await strict.start()
    os.kill(pid, signal.SIGSTOP)
    await strict.report("engine_stuck")

    await strict.engine.close()

    assert not is_alive(pid)
