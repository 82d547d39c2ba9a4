"""Analytics' process says what analytics here would say; when it dies, answers go on without it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from engine.api import Grammar
from gateway.analytics import client
from gateway.analytics.aggregates import Analytics, Facts
from gateway.analytics.client import ANSWERS_MAX, TOKENS_MAX, AnalyticsProcessClient
from gateway.analytics.interface import AnalyticsClient, InProcessAnalytics
from gateway.analytics.protocol import StartAnalytics
from gateway.child_process import RestartPolicy
from gateway.dialects.canonical import Boundary, Rendered, UsageRecord
from gateway.errors import Refusal
from tenancy.ledger import child_process
from tenancy.pricing.charges import RateCard
from tenancy.reuse.advice import ClassTerms
from tests.fakes import FakeClock

PATIENCE_S = 60.0
BEGIN = StartAnalytics(10, {"5m": ClassTerms(300.0, "5m"), "1h": ClassTerms(3_600.0, "1h")})
CARD = RateCard("c", input=1_000, cache_read=100, cache_write={"5m": 1_250})
AT_ONCE = RestartPolicy((0.001,))
READS_NOTHING = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> None:
    """Not here: nobody is served meanwhile."""


class Opened:
    """A link, and what it reported."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.events: list[str] = []
        self.link: AnalyticsProcessClient

    async def open(self, *command: str) -> AnalyticsProcessClient:
        self.link = await AnalyticsProcessClient.open(
            BEGIN, self.clock, self.wall, self.report, command or client.COMMAND, AT_ONCE
        )
        return self.link

    def wall(self) -> int:
        return 1_700_000_000_123 + int(1_000 * self.clock.now_s)

    def report(self, event: str, facts: dict[str, object]) -> None:
        self.events.append(event)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110 (whatever it is has no event to wait for)
                await asyncio.sleep(0.005)


@pytest.fixture
async def made() -> AsyncIterator[Opened]:
    made = Opened()
    yield made
    await made.link.close()


def some_facts(seed: int) -> Facts:
    """Prompts that begin alike, of three tenants, with all that can be said of them."""
    chance = random.Random(seed)
    tokens = tuple(chance.choice((7, 70_000)) for _ in range(16 * chance.randrange(1, 6)))
    marks = tuple(
        Boundary(place, f"messages[{place}]", retention="5m", role="system")
        for place in range(16, len(tokens) + 1, 16)
    )
    cached = chance.randrange(len(tokens))
    record = UsageRecord(
        len(tokens), {"5m": cached} if cached else {}, {}, len(tokens) - cached, 5, cached
    )
    grammar = Grammar("json_object") if chance.random() < 0.3 else None
    return Facts(
        chance.choice(("ada", "bob", "eve")),
        record,
        Rendered(tokens, marks, grammar),
        chance.choice((None, 0.02)),
        chance.choice(("", "expired")),
        chance.choice(("done", "failed")),
        missed_tokens=3,
        is_further=chance.random() < 0.2,
    )


async def said(door: AnalyticsClient) -> list[Any]:
    """All that can be asked."""
    return [
        await door.overview(),
        *[await door.tenant(name, CARD, 64) for name in ("ada", "bob", "nobody")],
        await door.missed_tokens("ada", "expired"),
        await door.missed_tokens("nobody", "expired"),
    ]


async def test_a_process_says_what_analytics_here_would_say(made: Opened) -> None:
    """Over hours, with answers of which only some fill a frame."""
    link = await made.open()
    here = InProcessAnalytics(Analytics(made.clock, made.wall, BEGIN.tenants_max, BEGIN.classes))
    for number in range(3 * ANSWERS_MAX + 7):
        made.clock.advance(97.0)
        for door in (here, link):
            door.note(some_facts(number))

    assert await said(link) == await said(here)
    assert (await link.overview())["total"]["requests"] > ANSWERS_MAX


async def test_answers_leave_some_at_a_time(made: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their number, and by what their prompts have; a question takes all that wait with it."""
    link = await made.open()
    await link.overview()
    frames: list[object] = []
    packed = child_process.packed

    def noted(message: Any) -> bytes:
        frames.append(len(message.facts) if hasattr(message, "facts") else "question")
        return packed(message)

    monkeypatch.setattr(client, "packed", noted)
    for _ in range(ANSWERS_MAX + 1):
        link.note(some_facts(1))
    long = Rendered((1,) * TOKENS_MAX)
    link.note(Facts("ada", UsageRecord(TOKENS_MAX, fresh=TOKENS_MAX), long, None, "", "done"))
    link.note(some_facts(2))
    await link.overview()

    assert frames == [ANSWERS_MAX, 2, 1, "question"]


async def test_a_process_that_dies_is_replaced_and_begins_anew(made: Opened) -> None:
    """Whoever asks meanwhile is told to ask again."""
    link = await made.open()
    link.note(some_facts(1))
    before = await link.overview()
    first = link.pid
    os.kill(first, signal.SIGSTOP)
    asked = asyncio.create_task(link.overview())
    await asyncio.sleep(0)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(Refusal, match="being started again") as refused:
        await asked
    link.note(some_facts(2))
    await made.until(lambda: link.pid not in (0, first))
    after = await link.overview()

    assert refused.value.code == "analytics_away"
    assert (before["total"]["requests"], after["total"]["requests"]) in ((1, 0), (1, 1))
    assert made.events == ["analytics_started", "analytics_died", "analytics_started"]


async def test_nobody_waits_for_one_that_cannot_be_started(made: Opened) -> None:
    """It is tried again, and what comes is let go."""
    link = await made.open("/nowhere/analytics")
    for number in range(2 * ANSWERS_MAX):
        link.note(some_facts(number))
    with pytest.raises(Refusal, match="being started again"):
        await link.overview()
    await made.until(lambda: made.events.count("analytics_not_started") > 1)


async def test_one_that_reads_nothing_costs_so_much_and_no_more(
    made: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is behind is let go, and at the end it is killed."""
    monkeypatch.setattr(client, "UNSENT_MAX", 2**20)
    monkeypatch.setattr(client, "CLOSE_S", 0.1)
    link = await made.open(*READS_NOTHING)
    long = Rendered(tuple(range(TOKENS_MAX)))
    one = Facts("ada", UsageRecord(TOKENS_MAX, fresh=TOKENS_MAX), long, None, "", "done")
    for _ in range(200):
        link.note(one)
    assert link._wire is not None
    unsent, pid = link._wire.unsent, link.pid
    await link.close()
    await link.close()

    assert 2**20 < unsent < 2**20 + 5 * TOKENS_MAX
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_it_goes_when_its_gateway_does(made: Opened) -> None:
    """However that ended: nobody is left to tell it."""
    link = await made.open()
    await link.overview()
    process, wire = link._child._process, link._wire
    assert process is not None
    assert wire is not None
    wire.close()
    async with asyncio.timeout(PATIENCE_S):
        status = await process.wait()

    assert status == 0
