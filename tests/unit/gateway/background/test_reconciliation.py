"""After whatever happened, ledger, engine and metrics have counted the same tokens."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine.api import Stats
from gateway.background.reconciliation import Reckoning
from gateway.ledger.metering import wall_ms
from gateway.observability.metrics import EPOCHS_MAX, Telemetry
from tenancy.accounting.reconcile import Counts, Epoch, reconcile
from tests.unit.gateway.gateway_fixture import House


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


async def test_what_is_drawn_behind_the_end_of_a_text_is_nobodys(house: House) -> None:
    """The engine hears of a stop string when more has been drawn, or when all is over."""
    house.say("one two, three, four, five, six, seven.", ends=False)
    for most in (6, 8, 12, 40):
        await house.ask(body=house.chat("count", n=2, stop=[","], max_tokens=most))
        await house.stream(house.chat("count", stop=["two"], max_tokens=most))
    epoch = await settled(house)
    drawn = (await house.engine.get_stats()).output_tokens_total

    assert epoch.ledger == epoch.engine == epoch.metrics
    assert drawn > epoch.ledger.output_tokens > 0


async def test_while_something_runs_nothing_is_compared(house: House) -> None:
    """A difference then would be nothing but the time between two looks."""
    house.runner.hold_after(5)
    asking = asyncio.create_task(house.ask(body=house.chat(max_tokens=300)))  # still runs then
    await house.until(lambda: house.runner.steps >= 5)
    noting = asyncio.create_task(house.gateway._reckoning.note())
    await asyncio.sleep(0)
    noted_ms = wall_ms()
    await house.until(lambda: wall_ms() > noted_ms)  # what ends in the same instant is compared
    house.runner.release()
    await asyncio.gather(asking, noting)

    assert all(epoch.state in ("pending", "running") for epoch in reconcile(house.store))
    assert await house.gateway._reckoning.check()


@pytest.mark.parametrize("is_early", [True, False])
async def test_what_the_engine_has_begun_has_a_hold_when_it_is_compared(
    house: House, monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    """Though short answers have none: whatever ran when the engine was asked, and whatever began
    while it was."""
    house.runner.hold_after(5)
    asking: list[asyncio.Task[object]] = []

    async def begin() -> None:
        asking.append(asyncio.create_task(house.ask(body=house.chat(max_tokens=300))))
        await house.until(lambda: house.runner.steps >= 5)

    async def counted() -> Stats:
        if not is_early:
            await begin()
        return Stats(prompt_tokens_total=7)

    monkeypatch.setattr(house.gateway.context.engine, "get_stats", counted)
    if is_early:
        await begin()
    await house.gateway._reckoning.note()
    (epoch,) = reconcile(house.store)
    house.runner.release()
    await asking[0]

    assert epoch.engine.prompt_tokens > epoch.ledger.prompt_tokens
    assert (epoch.state, epoch.is_apart) == ("pending", False)


async def test_a_life_of_the_engine_is_known_from_its_beginning(house: House) -> None:
    """One that dies in its first minute leaves entries that somebody will ask about."""
    await house.until(lambda: bool(reconcile(house.store)))

    (epoch,) = reconcile(house.store)
    assert (epoch.epoch, epoch.entries) == ("1", 0)


async def test_a_difference_is_logged(house: House) -> None:
    """Tokens in the ledger that no engine computed are a mistake of somebody's."""
    await house.ask(body=house.chat())
    await settled(house)
    with house.store.change() as db:
        for table in ("epoch_sums", "recent_sums"):  # it is in one of them
            db.execute(f"update {table} set output_tokens = output_tokens + 1")

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
    """The metrics go on where the engine begins at zero; what ran in a life that ended before
    anybody looked is not taken for the next one's."""
    telemetry = house.gateway.context.telemetry
    telemetry.count_epoch("0", 100, 50, 7)
    await house.ask(body=house.chat())
    first = await settled(house)
    await Reckoning(house.gateway.context).note()
    (again,) = reconcile(house.store)

    assert first.engine == again.engine == again.metrics
    assert again.metrics == first.metrics
    assert await house.gateway._reckoning.check()
    assert Counts(3, 2, 1).minus(Counts(1, 2, 3)) == Counts(2, 0, -2)


async def test_what_is_told_of_an_epoch_is_what_metrics_count(house: House) -> None:
    """One more sum would be worth nothing if it went its own way."""
    await house.ask(body=house.chat("one " * 40))
    await house.ask(body=house.chat("one " * 40), who="bob")
    await settled(house)
    async with house.session.get(f"{house.admin_url}/metrics") as response:
        lines = (await response.text()).splitlines()

    def total(name: str) -> int:
        return sum(
            round(float(line.rpartition(" ")[2])) for line in lines if line.startswith(f"{name}{{")
        )

    assert house.gateway.context.telemetry.of_epoch("1") == (
        total("trunkline_prompt_tokens_total"),
        total("trunkline_cached_tokens_total"),
        total("trunkline_output_tokens_total"),
    )


def test_lives_of_an_engine_are_forgotten_after_a_while() -> None:
    """One that dies every minute must not grow a gateway."""
    telemetry = Telemetry(1)
    for number in range(EPOCHS_MAX + 1):
        telemetry.count_epoch(str(number), 1, 0, 0)
    telemetry.count_epoch("16", 1, 0, 0)

    assert telemetry.of_epoch("0") == (0, 0, 0)
    assert telemetry.of_epoch("1") == (1, 0, 0)
    assert telemetry.of_epoch("16") == (2, 0, 0)
