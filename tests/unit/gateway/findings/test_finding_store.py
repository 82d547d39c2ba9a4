"""`FindingStore`: counts reach the database once, also when a write fails on the way."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.context import Context
from gateway.errors import Kind, Refusal
from gateway.findings import finding_store
from gateway.findings.finding_store import TAKER, FindingStore
from tenancy.errors import StoreError
from tenancy.reuse.finding_counts import (
    ExplainedMisses,
    FindingCount,
    PromptOrigin,
    add_counts,
    read_counts,
    read_origins,
    sum_counts,
)
from tenancy.reuse.miss_causes import FIRST_USE, MissCause
from tenancy.types import HOUR_MS
from tests.unit.gateway.gateway_fixture import GatewayFixture

ONE = MissCause("r", 1, "served", "system_changes", "system", 100, {"at": 1}, 5)
FIRST = MissCause("r", 1, "served", FIRST_USE, "m/t", 50, {"head:a": 50}, 5)


@pytest.fixture
def context(gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch) -> Context:
    """The parts of a gateway whose analytics return what a test puts into `taken`."""
    context = gateway.gateway.context
    monkeypatch.setattr(context.analytics, "take_misses", Taken())
    return context


class Taken:
    """Causes that wait to be taken."""

    def __init__(self) -> None:
        self.causes: list[MissCause] = []
        self.error: Exception | None = None

    async def __call__(self) -> ExplainedMisses:
        """See `AnalyticsClient.take_misses`."""
        if self.error is not None:
            raise self.error
        causes, self.causes = self.causes, []
        return ExplainedMisses(causes, sum_counts(map(FindingCount.of, causes)))


def put(context: Context, *causes: MissCause) -> None:
    """Let the next call take these."""
    taken: Any = context.analytics.take_misses
    taken.causes += causes


async def rows(context: Context) -> list[FindingCount]:
    return await asyncio.to_thread(read_counts, context.store, 0, 2**62)


async def test_counts_are_written_with_the_model(context: Context) -> None:
    kept = FindingStore(context)
    put(context, ONE)
    await kept.flush()
    put(context, ONE)
    await kept.flush()
    await kept.flush()

    (found,) = await rows(context)
    assert (found.requests, found.model) == (2, "served")


async def test_failed_write_is_made_up_for(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreError("store_busy", "busy")

    kept = FindingStore(context)
    put(context, ONE, FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(finding_store, "add_counts", fail)
        with pytest.raises(StoreError):
            await kept.flush()
    put(context, replace(FIRST, place="n/t", at_ms=6))
    await kept.flush()

    found = {one.cause: one.requests for one in await rows(context)}
    assert found == {"system_changes": 1, "model_changed": 1}


async def test_counts_are_written_once_though_the_reader_leaves(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser that closes the page cancels the request that flushes."""
    begun, go_on = threading.Event(), threading.Event()

    def add_slowly(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(30)
        add_counts(*arguments)

    monkeypatch.setattr(finding_store, "add_counts", add_slowly)
    kept = FindingStore(context)
    put(context, ONE)
    reader = asyncio.create_task(kept.flush())
    assert await asyncio.to_thread(begun.wait, 30)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    go_on.set()
    await kept.flush()

    assert [one.requests for one in await rows(context)] == [1]


async def test_analytics_that_restart_are_asked_again(context: Context) -> None:
    kept = FindingStore(context)
    taken: Any = context.analytics.take_misses
    taken.error = Refusal(Kind.BUSY, "analytics_away", "later")
    await kept.flush()
    taken.error = None
    put(context, ONE)
    await kept.flush()

    assert len(await rows(context)) == 1


async def test_close_writes_the_rest(context: Context) -> None:
    kept = FindingStore(context)
    kept.start()
    put(context, ONE)
    await kept.close()
    await kept.close()

    assert len(await rows(context)) == 1


async def test_fault_of_one_round_ends_no_later_one(
    gateway: GatewayFixture, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of ours in one count must not end all findings until a restart."""
    monkeypatch.setattr(finding_store, "FLUSH_S", 0.0)
    taken: Any = context.analytics.take_misses
    taken.error = ZeroDivisionError("a bug")
    kept = FindingStore(context)
    kept.start()
    await gateway.until(lambda: "background_failed" in str(gateway.lines))
    taken.error = None
    put(context, ONE)
    await gateway.until(lambda: not taken.causes)
    await kept.close()

    assert len(await rows(context)) == 1


@pytest.mark.parametrize(
    ("place", "at_ms", "cause"),
    [
        ("n/t", 10, "model_changed"),
        ("m/u", 10, "template_changed"),
        ("n/u", 10, "model_changed"),
        ("m/t", 10, ""),
    ],
)
async def test_first_use_under_another_origin_is_a_finding(
    context: Context, place: str, at_ms: int, cause: str
) -> None:
    put(context, FIRST)
    await FindingStore(context).flush()
    later = FindingStore(context)  # of the next gateway
    put(context, replace(FIRST, place=place, at_ms=at_ms))
    await later.flush()

    origins = await asyncio.to_thread(read_origins, context.store)
    assert [one.cause for one in await rows(context)] == ([cause] if cause else [])
    model, _, template = place.partition("/")
    assert (origins[1].model, origins[1].template) == (model, template)


async def test_a_change_of_the_model_costs_what_the_one_before_had_seen(context: Context) -> None:
    """Prompts that are new altogether are no loss of a swap."""
    new = replace(FIRST, place="n/t", at_ms=10, facts={"head:a": 50, "head:b": 70, "head:c": 9})
    put(context, replace(FIRST, facts={"head:a": 50, "head:c": 9}))
    await FindingStore(context).flush()
    put(context, new)
    await FindingStore(context).flush()  # of the next gateway

    (found,) = await rows(context)
    assert (found.cause, found.requests, found.wasted_tokens) == ("model_changed", 2, 59)


async def test_first_uses_count_for_an_hour_after_a_change(context: Context) -> None:
    """Then new prompts are new."""
    kept = FindingStore(context)
    changed = replace(FIRST, place="n/t", at_ms=10)
    later = replace(changed, at_ms=HOUR_MS + 9)
    late = replace(changed, at_ms=HOUR_MS + 10)
    put(context, FIRST, changed, later, late)
    await kept.flush()

    assert sum(one.requests for one in await rows(context)) == 2


async def test_gateways_of_one_database_may_serve_other_models(context: Context) -> None:
    """A tenant that uses both has changed nothing."""
    first, second = FindingStore(context, "g1"), FindingStore(context, "g2")
    for kept, place in ((first, "m/t"), (second, "n/t"), (first, "m/t"), (second, "n/t")):
        put(context, replace(FIRST, place=place))
        await kept.flush()

    assert await rows(context) == []


async def test_origin_is_one_row_per_tenant(context: Context) -> None:
    put(context, FIRST, replace(FIRST, place="n/t", at_ms=9))
    await FindingStore(context).flush()

    origins = await asyncio.to_thread(read_origins, context.store)
    assert origins == {1: PromptOrigin(1, "n", "t", 9, "m", "t", "", "a", "a")}


async def test_takers_of_blocks_are_named_once(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what was taken since the last write; never the owner itself."""

    def space(tenant: int) -> bytes:
        number = str(tenant).encode()
        parts = (number, b"default", b"m", b"t", b"")
        return b"".join(len(part).to_bytes(4, "big") + part for part in parts)

    evictions = {(space(1), space(2)): 30, (space(1), space(1)): 9, (space(3), space(2)): 5}
    totals = next(iter(context.models.default.replicas)).cache_events
    monkeypatch.setattr(totals, "evictions_by_taker", lambda: dict(evictions))
    kept = FindingStore(context)
    evicted = replace(ONE, cause="evicted", place="", facts={"evicted_pressure": 1})
    put(context, evicted)
    await kept.flush()
    evictions[space(1), space(2)] += 4
    put(context, evicted)
    await kept.flush()

    (found,) = await rows(context)
    assert found.facts == {"evicted_pressure": 2, f"{TAKER}2": 34}
