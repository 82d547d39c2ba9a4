"""`AnalyticsProcessClient`: same answers as in-process analytics; requests go on when it dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from engine import wire
from engine.api import Grammar
from gateway.analytics import client
from gateway.analytics.aggregates import Analytics, ModelTerms
from gateway.analytics.client import REQUESTS_MAX, TOKENS_MAX, AnalyticsProcessClient
from gateway.analytics.completed_prompt import CompletedPrompt, PromptContext
from gateway.analytics.interface import AnalyticsClient, InProcessAnalytics
from gateway.analytics.protocol import StartAnalytics
from gateway.dialects.canonical import Boundary, Rendered, UsageRecord
from gateway.errors import Refusal
from gateway.processes.child_process import RestartPolicy
from tenancy.pricing.charges import RateCard
from tenancy.reuse.advice import ClassTerms
from tests.fakes import FakeClock

PATIENCE_S = 60.0
BEGIN = StartAnalytics(10, {"5m": ClassTerms(300.0, "5m"), "1h": ClassTerms(3_600.0, "1h")})
CARD = RateCard("c", input=1_000, cache_read=100, cache_write={"5m": 1_250})
TERMS = {"m": ModelTerms(CARD, 64), "n": ModelTerms(CARD, 0)}
NO_PAUSE = RestartPolicy((0.001,))
READS_NOTHING = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> None:
    """Disabled here: no request is served meanwhile."""


class AnalyticsUnderTest:
    """An analytics client, and its reported events."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.events: list[str] = []
        self.client: AnalyticsProcessClient

    async def open(self, *command: str) -> AnalyticsProcessClient:
        self.client = AnalyticsProcessClient(
            BEGIN, self.clock, self.wall, self.report, command or client.COMMAND, NO_PAUSE
        )
        await self.client.open()
        return self.client

    def wall(self) -> int:
        return 1_700_000_000_123 + int(1_000 * self.clock.now_s)

    def report(self, event: str, facts: dict[str, object]) -> None:
        self.events.append(event)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 (a condition has no event to wait for)
                await asyncio.sleep(0.005)


@pytest.fixture
async def analytics() -> AsyncIterator[AnalyticsUnderTest]:
    analytics = AnalyticsUnderTest()
    yield analytics
    await analytics.client.close()


def make_prompt(seed: int) -> CompletedPrompt:
    """Return a finished prompt of one of three tenants, with shared beginnings and random
    attributes."""
    chance = random.Random(seed)
    tokens = tuple(chance.choice((7, 70_000)) for _ in range(16 * chance.randrange(1, 6)))
    boundaries = tuple(
        Boundary(place, f"messages[{place}]", retention="5m", role="system")
        for place in range(16, len(tokens) + 1, 16)
    )
    cached = chance.randrange(len(tokens))
    record = UsageRecord(
        len(tokens), {"5m": cached} if cached else {}, {}, len(tokens) - cached, 5, cached
    )
    grammar = Grammar("json_object") if chance.random() < 0.3 else None
    return CompletedPrompt(
        chance.randrange(1, 4),
        ("m", "n")[seed % 2],
        record,
        Rendered(tokens, boundaries, grammar),
        chance.choice((None, 0.02)),
        chance.choice(("", "expired")),
        chance.choice(("done", "failed")),
        missed_tokens=3,
        is_further=chance.random() < 0.2,
        context=PromptContext(
            request_id=f"r{seed}",
            namespace=b"n",
            epoch="e",
            started_s=97.0 * seed,
            is_unmarked=chance.random() < 0.5,
            min_tokens=0,
            losses=chance.choice((None, {}, {"evicted_pressure": seed})),
        ),
    )


async def ask_everything(asked: AnalyticsClient) -> list[Any]:
    """Ask every question. Digests of prefixes are left out: each process has its own key."""
    tenants = [await asked.tenant(tenant_id, TERMS) for tenant_id in (1, 2, 9)]
    for row in (row for one in tenants if one is not None for row in one["top_prefixes"]):
        del row["id"]
    return [
        await asked.overview(),
        *tenants,
        await asked.missed_tokens(1, "expired"),
        await asked.missed_tokens(9, "expired"),
        (await asked.take_misses()).counts,
    ]


async def test_process_answers_like_in_process_analytics(analytics: AnalyticsUnderTest) -> None:
    """Over hours, with requests of which only some fill a frame."""
    remote = await analytics.open()
    local = InProcessAnalytics(
        Analytics(analytics.clock, analytics.wall, BEGIN.tenants_max, BEGIN.classes, 1)
    )
    for number in range(3 * REQUESTS_MAX + 7):
        analytics.clock.advance(97.0)
        for analytics_client in (local, remote):
            analytics_client.note(make_prompt(number))

    answers = await ask_everything(remote)
    assert answers == await ask_everything(local)
    assert {one.tenant_id for one in answers[-1]} == {1, 2, 3}
    assert (await remote.take_misses()).counts == []
    assert (await remote.overview())["total"]["requests"] > REQUESTS_MAX


async def test_sends_requests_in_batches(
    analytics: AnalyticsUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By number, and by prompt tokens; a question sends all pending requests first."""
    remote = await analytics.open()
    await remote.overview()
    frames: list[object] = []
    encode_frame = wire.encode_frame

    def noted(message: Any) -> bytes:
        frames.append(len(message.prompts) if hasattr(message, "prompts") else "question")
        return encode_frame(message)

    monkeypatch.setattr(client, "encode_frame", noted)
    for _ in range(REQUESTS_MAX + 1):
        remote.note(make_prompt(1))
    long = Rendered((1,) * TOKENS_MAX)
    remote.note(
        CompletedPrompt(1, "m", UsageRecord(TOKENS_MAX, fresh=TOKENS_MAX), long, None, "", "done")
    )
    remote.note(make_prompt(2))
    await remote.overview()

    assert frames == [REQUESTS_MAX, 2, 1, "question"]


async def test_replaces_dead_process_with_empty_one(analytics: AnalyticsUnderTest) -> None:
    """Questions are refused meanwhile, with a time to retry."""
    remote = await analytics.open()
    remote.note(make_prompt(1))
    before = await remote.overview()
    first = remote.pid
    os.kill(first, signal.SIGSTOP)
    asked = asyncio.create_task(remote.overview())
    await asyncio.sleep(0)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(Refusal, match="are restarting") as refused:
        await asked
    remote.note(make_prompt(2))
    await analytics.until(lambda: remote.pid not in (0, first))
    after = await remote.overview()

    assert refused.value.code == "analytics_away"
    assert (before["total"]["requests"], after["total"]["requests"]) in ((1, 0), (1, 1))
    assert analytics.events == ["analytics_started", "analytics_died", "analytics_started"]


async def test_process_that_cannot_start_delays_nothing(analytics: AnalyticsUnderTest) -> None:
    """The start is retried, and requests are dropped meanwhile."""
    remote = await analytics.open("/nowhere/analytics")
    for number in range(2 * REQUESTS_MAX):
        remote.note(make_prompt(number))
    with pytest.raises(Refusal, match="are restarting"):
        await remote.overview()
    await analytics.until(lambda: analytics.events.count("analytics_not_started") > 1)


async def test_process_that_reads_nothing_costs_bounded_memory(
    analytics: AnalyticsUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests beyond the bound are dropped; close kills the process."""
    monkeypatch.setattr(client, "UNSENT_MAX", 2**20)
    monkeypatch.setattr(client, "CLOSE_S", 0.1)
    remote = await analytics.open(*READS_NOTHING)
    long = Rendered(tuple(range(TOKENS_MAX)))
    one = CompletedPrompt(1, "m", UsageRecord(TOKENS_MAX, fresh=TOKENS_MAX), long, None, "", "done")
    for _ in range(200):
        remote.note(one)
    assert remote._wire is not None
    unsent, pid = remote._wire.unsent, remote.pid
    await remote.close()
    await remote.close()

    assert 2**20 < unsent < 2**20 + 5 * TOKENS_MAX
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_process_that_stands_still_is_replaced(
    analytics: AnalyticsUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is alive and would hold its readers, and the end of the gateway, which asks once more."""
    monkeypatch.setattr(client, "WATCH_EVERY_S", 0.01)
    monkeypatch.setattr("gateway.processes.child_process.REAP_S", 0.01)
    remote = await analytics.open()
    remote.note(make_prompt(1))
    await remote.overview()
    first = remote.pid
    os.kill(first, signal.SIGSTOP)

    with monkeypatch.context() as impatient:
        impatient.setattr(client, "ANSWER_S", 0.05)
        with pytest.raises(Refusal, match="not answer") as refused:
            await remote.take_misses()
    await analytics.until(lambda: remote.pid not in (0, first))
    after = await remote.overview()

    assert refused.value.code == "analytics_away"
    assert after["total"]["requests"] == 0
    assert analytics.events == ["analytics_started", "analytics_died", "analytics_started"]


async def test_process_exits_with_its_gateway(analytics: AnalyticsUnderTest) -> None:
    remote = await analytics.open()
    await remote.overview()
    process, wire = remote._child._process, remote._wire
    assert process is not None
    assert wire is not None
    wire.close()
    async with asyncio.timeout(PATIENCE_S):
        status = await process.wait()

    assert status == 0
