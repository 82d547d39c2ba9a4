"""After whatever happened, ledger, engine and metrics have counted the same tokens."""

from __future__ import annotations

import asyncio
import json

from gateway.reckoning import Reckoning
from tenancy.reconcile import Counts, Epoch, reconcile
from tests.gateway.house import House


async def settled(house: House) -> Epoch:
    """The only epoch, noted when nothing runs any more."""
    await house.gateway.context.wait_idle(10)
    await house.gateway.context.finish_background()
    await house.gateway._reckoning.note()
    (epoch,) = reconcile(house.store)
    return epoch


async def test_all_kinds_of_answers_are_counted_alike(house: House) -> None:
    """Whole and streamed, hits and misses, several choices and prompts, refused ones."""
    await house.ask(body=house.chat("one " * 40))
    await house.ask(body=house.chat("one " * 40, n=3))
    await house.stream(house.chat("one " * 40 + "two"))
    prompts = {"model": house.model, "prompt": ["a b", "c d e"], "max_tokens": 3}
    await house.ask("/v1/completions", prompts, who="bob")
    await house.ask(body=house.chat("x", max_tokens=10**6))
    epoch = await settled(house)

    assert epoch.ledger == epoch.engine == epoch.metrics
    assert epoch.ledger.cached_tokens > 0
    assert (epoch.state, epoch.is_apart, epoch.entries) == ("running", False, 4)


async def test_a_client_that_leaves_is_counted_alike(house: House) -> None:
    """What the engine computed before it heard of it is in the entry too."""
    house.runner.hold_after(20)
    body = json.dumps(house.chat(max_tokens=400, stream=True)).encode()
    async with house.connection() as (reader, writer):
        writer.write(house.post("/v1/chat/completions", body))
        await reader.readuntil(b"data: ")
        writer.transport.abort()
    await house.until(lambda: not house.gateway.context.running)
    house.runner.release()
    await house.check_quiet()
    epoch = await settled(house)

    assert epoch.engine.prompt_tokens > 0
    assert epoch.ledger == epoch.engine == epoch.metrics


async def test_while_something_runs_nothing_is_compared(house: House) -> None:
    """A difference then would be nothing but the time between two looks."""
    house.runner.hold_after(5)
    asking = asyncio.create_task(house.ask(body=house.chat()))
    await house.until(lambda: house.runner.steps >= 5)
    noting = asyncio.create_task(house.gateway._reckoning.note())
    house.runner.release()
    await asyncio.gather(asking, noting)

    assert all(epoch.state in ("pending", "running") for epoch in reconcile(house.store))
    assert await house.gateway._reckoning.check()


async def test_a_difference_is_logged(house: House) -> None:
    """Tokens in the ledger that no engine computed are a mistake of somebody's."""
    await house.ask(body=house.chat())
    await settled(house)
    with house.store.change() as db:
        db.execute("update epoch_sums set output_tokens = output_tokens + 1")

    assert not await house.gateway._reckoning.check()
    (line,) = [line for line in house.lines if line["event"] == "counts_apart"]
    assert line["ledger_output_tokens"] == line["engine_output_tokens"] + 1  # type: ignore[operator]


async def test_the_last_note_is_final(house: House) -> None:
    """After a shutdown the counts stay comparable for ever."""
    await house.ask(body=house.chat())
    await house.gateway._reckoning.close()
    (epoch,) = reconcile(house.store)

    assert (epoch.state, epoch.is_apart) == ("final", False)
    assert epoch.engine.output_tokens == 8


async def test_two_lives_of_an_engine_are_counted_apart(house: House) -> None:
    """The metrics go on where the engine begins at zero."""
    await house.ask(body=house.chat())
    first = await settled(house)
    context = house.gateway.context
    reckoning = Reckoning(context)
    await reckoning.note()
    (again,) = reconcile(house.store)

    assert first.engine == again.engine
    assert again.metrics == first.metrics
    assert Counts(3, 2, 1).minus(Counts(1, 2, 3)) == Counts(2, 0, -2)
