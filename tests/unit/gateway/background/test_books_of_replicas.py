"""Several engines of a model: each count is that of the engine that computed it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from engine.api import Finished, SampledToken, SampleEnded, Started, Tokens, Usage
from engine.statistics import Stats
from tenancy.accounting.reconcile import Epoch, reconcile
from tests.fakes import FakeClock
from tests.unit.gateway.engines.test_replica_choice import RecordedEngine, replicas_of
from tests.unit.gateway.gateway_fixture import GatewayFixture

OUTPUT = 8


@pytest.fixture
def engines(gateway: GatewayFixture) -> Iterator[list[RecordedEngine]]:
    """Give the model two engines elsewhere, which compute what they are told to."""
    model, engines = gateway.gateway.context.models.default, [RecordedEngine(one) for one in "ab"]
    own, model.replicas = model.replicas, replicas_of(engines, FakeClock())
    yield engines
    model.replicas = own


def begin(engine: RecordedEngine) -> None:
    """Start what an engine was sent, and count its prompts."""
    for one in engine.sent:
        engine.receive([Started(one.request_id, len(one.tokens), 0)])
    prompts = sum(len(one.tokens) for one in engine.sent)
    engine.receive([Stats(prompt_tokens_total=prompts)])


def finish(engine: RecordedEngine) -> None:
    """End what an engine was sent, and count the output."""
    for one in engine.sent:
        usage = Usage(prompt_tokens=len(one.tokens), output_tokens=OUTPUT)
        engine.receive(
            [
                Tokens(one.request_id, 0, tuple([SampledToken(65)] * OUTPUT)),
                SampleEnded(one.request_id, 0, "length", OUTPUT),
                Finished(one.request_id, "done", usage),
            ]
        )
    more = Stats(
        prompt_tokens_total=engine.stats.prompt_tokens_total,
        output_tokens_total=OUTPUT * len(engine.sent),
    )
    engine.receive([more])


async def counted(gateway: GatewayFixture) -> dict[str, Epoch]:
    """Record the counts of both engines; return them by epoch."""
    await gateway.gateway.reconciler.note()
    return {one.epoch: one for one in reconcile(gateway.store, 1) if one.epoch in "ab"}


async def asked_of_both(
    gateway: GatewayFixture, engines: list[RecordedEngine]
) -> asyncio.Task[tuple[int, Any, Any]]:
    """Send a call of two prompts; return its task once each engine was sent one."""
    prompts = {"model": gateway.model, "prompt": ["a " * 60, "b " * 70], "max_tokens": OUTPUT}
    asking = asyncio.create_task(gateway.ask("/v1/completions", prompts))
    await gateway.until(lambda: all(engine.sent for engine in engines))
    return asking


async def test_prompts_of_a_call_that_went_to_several_engines_agree_by_epoch(
    gateway: GatewayFixture, engines: list[RecordedEngine]
) -> None:
    """The call has one entry, of one of them, with the tokens of both."""
    asking = await asked_of_both(gateway, engines)
    for engine in engines:
        begin(engine)
        finish(engine)
    status, answer, _ = await asking
    found = await counted(gateway)

    assert (status, answer["usage"]["completion_tokens"]) == (200, 2 * OUTPUT)
    assert sorted(one.entries for one in found.values()) == [0, 1]
    for one in found.values():
        assert one.ledger == one.engine == one.metrics
    assert sum(one.ledger.prompt_tokens for one in found.values()) > 0


async def test_a_hold_names_the_engine_that_computes(
    gateway: GatewayFixture, engines: list[RecordedEngine]
) -> None:
    """Counts of running requests are known as such: no mismatch is told."""
    asking = [
        asyncio.create_task(gateway.ask(body=gateway.chat(f"{number} " * 60)))
        for number in range(4)
    ]
    await gateway.until(lambda: sum(len(engine.sent) for engine in engines) == len(asking))
    for engine in engines:
        begin(engine)
    found = await counted(gateway)
    agrees = await gateway.gateway.reconciler.check()
    held = gateway.store.query("select epoch, count(*) from holds group by epoch order by epoch")
    for engine in engines:
        finish(engine)
    await asyncio.gather(*asking)

    assert held == [("a", len(engines[0].sent)), ("b", len(engines[1].sent))]
    assert agrees
    assert [found[epoch].engine.prompt_tokens > 0 for epoch in "ab"] == [True, True]


async def test_counts_of_an_engine_with_a_foreign_hold_are_read_later(
    gateway: GatewayFixture, engines: list[RecordedEngine]
) -> None:
    """The hold of a call names one engine; another one has counted a prompt of it."""
    asking = await asked_of_both(gateway, engines)
    for engine in engines:
        begin(engine)
    while_it_runs = await counted(gateway)
    agrees = await gateway.gateway.reconciler.check()
    for engine in engines:
        finish(engine)
    await asking

    assert len(while_it_runs) == 1
    assert agrees
