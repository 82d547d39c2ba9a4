"""The cost of one tiny answer, within bounds so wide that every machine keeps them, and the same
with many tenants and after many answers. `python -m tests.bench.request_cost` compares the counts
with another commit's, within a tenth."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest

from engine.client.client import EngineConnection
from tenancy.accounts.keys import create_key
from tenancy.accounts.tenants import change_tenant, create_tenant
from tests.bench.request_cost import (
    CallRecorder,
    costs_of,
    grown,
    lines_of,
    nothing_by_time,
    report,
)
from tests.unit.gateway.gateway_fixture import GatewayFixture

NO_LIMIT = 10**9
LIMITS = ("requests_per_minute", "tokens_per_minute", "input_tokens_per_minute")
BOUNDS: dict[str, float] = {
    "calls on the loop": 540,
    "calls before the engine": 265,
    "turns of the loop": 16,
    "statements on the loop": 1.6,
    "files of the gateway": 70,
    "files": 120,
}
"""An answer took 359 calls, 175 of them before the engine was asked, 8 turns of the loop, one
statement of SQL on the loop's thread, and 55 of 96 files. The turns vary most: one reads the
request, one wakes its task, and so on for the engine's events and the ledger's answer; a busy
machine adds some."""
GROWTH_MAX = 1.2
MANY, COUNTED = 300, 16


@pytest.fixture
def recorder() -> Iterator[CallRecorder]:
    recorder = CallRecorder()
    yield recorder
    recorder.remove()


@pytest.fixture
async def gateway(unopened_gateway: GatewayFixture) -> AsyncIterator[GatewayFixture]:
    """A gateway in which nothing runs by time, with every kind of limit."""
    limits = dict.fromkeys((*LIMITS, "requests_at_once"), NO_LIMIT)
    change_tenant(unopened_gateway.store, "ada", limits)
    with nothing_by_time(unopened_gateway):
        yield unopened_gateway
        await unopened_gateway.close()


async def exceeded(gateway: GatewayFixture, recorder: CallRecorder) -> set[str]:
    """Open the gateway; return the names of the counts that are above their bounds."""
    recorder.install()
    await gateway.open()
    costs = await costs_of(gateway, recorder)
    recorder.remove()
    return {name for name, most in BOUNDS.items() if costs[name] > most}


async def growth(gateway: GatewayFixture, many: Callable[[], Awaitable[None]]) -> float:
    """Open the gateway; return by how much the lines for an answer grow once `many` has run."""
    await gateway.open()
    await lines_of(gateway, COUNTED)
    few = await lines_of(gateway, COUNTED)
    await many()
    gateway.gateway.context.authenticator.refresh_now()
    await lines_of(gateway, 2)
    return await lines_of(gateway, COUNTED) / few


@pytest.mark.slow
async def test_a_tiny_answer_costs_few_calls_turns_statements_and_files(
    gateway: GatewayFixture, recorder: CallRecorder
) -> None:
    """A reader can follow a request's path, and a client waits for little."""
    assert await exceeded(gateway, recorder) == set()


async def many_answers(gateway: GatewayFixture) -> None:
    """Let the gateway answer many different prompts."""
    for number in range(MANY):
        status, _, _ = await gateway.ask(body=gateway.chat(f"{number} hello", max_tokens=1))
        assert status == 200


@pytest.mark.slow
async def test_an_answer_costs_no_more_with_many_tenants(gateway: GatewayFixture) -> None:
    """None of them is walked for each request."""

    async def many() -> None:
        for number in range(MANY):
            tenant = create_tenant(gateway.store, gateway.wall, f"t{number}")
            create_key(gateway.store, gateway.wall, tenant.tenant_id)

    assert await growth(gateway, many) < GROWTH_MAX


@pytest.mark.slow
async def test_an_answer_costs_no_more_after_many(gateway: GatewayFixture) -> None:
    """What a request leaves behind is not walked by the next."""
    assert await growth(gateway, partial(many_answers, gateway)) < GROWTH_MAX


@pytest.mark.slow
async def test_a_planted_query_per_request_is_found(
    gateway: GatewayFixture, recorder: CallRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bounds above are of no use if they hold for anything."""
    submit = EngineConnection.submit

    def slower(self: EngineConnection, *arguments: Any, **more: Any) -> Any:
        assert gateway.store.query("select 1") == [(1,)]
        return submit(self, *arguments, **more)

    monkeypatch.setattr(EngineConnection, "submit", slower)

    assert "statements on the loop" in await exceeded(gateway, recorder)


@pytest.mark.slow
async def test_a_planted_walk_of_earlier_requests_is_found(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a search in a list that only grows, two lines for each."""
    submit, earlier = EngineConnection.submit, list[int]()

    def slower(self: EngineConnection, *arguments: Any, **more: Any) -> Any:
        earlier.append(len(earlier))
        for one in earlier:
            assert one >= 0
        return submit(self, *arguments, **more)

    monkeypatch.setattr(EngineConnection, "submit", slower)

    assert await growth(gateway, partial(many_answers, gateway)) > GROWTH_MAX


def test_the_report_names_what_grew_by_more_than_a_tenth() -> None:
    base = {"calls": 300.0, "statements": 1.0, "turns": 8.0}
    here = {"calls": 340.0, "statements": 2.0, "turns": 8.5}

    assert grown(base, here) == ["calls", "statements"]
    assert grown(base, base) == []
    assert report(base, here).count("grew by more than a tenth") == 2
