"""After whatever happened, ledger, engine and metrics have counted the same tokens."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine.api import Stats
from gateway.background.reconciliation import Reconciler
from gateway.ledger.metering import wall_ms
from gateway.observability.metrics import ENGINE_EPOCHS_MAX, Metrics
from tenancy.accounting.reconcile import Counts, Epoch, reconcile
from tests.unit.gateway.gateway_fixture import GatewayFixture


async def settled(gateway: GatewayFixture) -> Epoch:
    """The only epoch, noted when nothing runs any more."""
    await gateway.gateway.context.wait_idle(10)
    await gateway.gateway.context.finish_background()
    await gateway.gateway._reconciler.note()
    (epoch,) = reconcile(gateway.store)
    return epoch


async def test_all_kinds_of_answers_are_counted_alike(gateway: GatewayFixture) -> None:
    """Whole and streamed, hits and misses, several choices and prompts, refused ones."""
    await gateway.ask(body=gateway.chat("one " * 40))
    await gateway.ask(body=gateway.chat("one " * 40, n=3))
    await gateway.stream(gateway.chat("one " * 40 + "two"))
    prompts = {"model": gateway.model, "prompt": ["a b", "c d e"], "max_tokens": 3}
    await gateway.ask("/v1/completions", prompts, who="bob")
    await gateway.ask(body=gateway.chat("x", max_tokens=10**6))
    epoch = await settled(gateway)

    assert epoch.ledger == epoch.engine == epoch.metrics
    assert epoch.ledger.cached_tokens > 0
    assert (epoch.state, epoch.has_mismatch, epoch.entries) == ("running", False, 4)


async def test_a_client_that_leaves_is_counted_alike(gateway: GatewayFixture) -> None:
    """What the engine computed before it heard of it is in the entry too."""
    gateway.runner.hold_after(20)
    body = json.dumps(gateway.chat(max_tokens=400, stream=True)).encode()
    async with gateway.connection() as (reader, writer):
        writer.write(gateway.post("/v1/chat/completions", body))
        await reader.readuntil(b"data: ")
        writer.transport.abort()
    await gateway.until(lambda: not gateway.gateway.context.running)
    gateway.runner.release()
    await gateway.check_quiet()
    epoch = await settled(gateway)

    assert epoch.engine.prompt_tokens > 0
    assert epoch.ledger == epoch.engine == epoch.metrics


async def test_what_is_drawn_behind_the_end_of_a_text_is_nobodys(gateway: GatewayFixture) -> None:
    """The engine hears of a stop string when more has been drawn, or when all is over."""
    gateway.say("one two, three, four, five, six, seven.", ends=False)
    for most in (6, 8, 12, 40):
        await gateway.ask(body=gateway.chat("count", n=2, stop=[","], max_tokens=most))
        await gateway.stream(gateway.chat("count", stop=["two"], max_tokens=most))
    epoch = await settled(gateway)
    drawn = (await gateway.engine.get_stats()).output_tokens_total

    assert epoch.ledger == epoch.engine == epoch.metrics
    assert drawn > epoch.ledger.output_tokens > 0


async def test_while_something_runs_nothing_is_compared(gateway: GatewayFixture) -> None:
    """A difference then would be nothing but the time between two looks."""
    gateway.runner.hold_after(5)
    asking = asyncio.create_task(gateway.ask(body=gateway.chat(max_tokens=300)))  # still runs then
    await gateway.until(lambda: gateway.runner.steps >= 5)
    noting = asyncio.create_task(gateway.gateway._reconciler.note())
    await asyncio.sleep(0)
    noted_ms = wall_ms()
    await gateway.until(lambda: wall_ms() > noted_ms)  # what ends in the same instant is compared
    gateway.runner.release()
    await asyncio.gather(asking, noting)

    assert all(epoch.state in ("pending", "running") for epoch in reconcile(gateway.store))
    assert await gateway.gateway._reconciler.check()


@pytest.mark.parametrize("is_early", [True, False])
async def test_what_the_engine_has_begun_has_a_hold_when_it_is_compared(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    """Though short answers have none: whatever ran when the engine was asked, and whatever began
    while it was."""
    gateway.runner.hold_after(5)
    asking: list[asyncio.Task[object]] = []

    async def begin() -> None:
        asking.append(asyncio.create_task(gateway.ask(body=gateway.chat(max_tokens=300))))
        await gateway.until(lambda: gateway.runner.steps >= 5)

    async def counted() -> Stats:
        if not is_early:
            await begin()
        return Stats(prompt_tokens_total=7)

    monkeypatch.setattr(gateway.gateway.context.engine, "get_stats", counted)
    if is_early:
        await begin()
    await gateway.gateway._reconciler.note()
    (epoch,) = reconcile(gateway.store)
    gateway.runner.release()
    await asking[0]

    assert epoch.engine.prompt_tokens > epoch.ledger.prompt_tokens
    assert (epoch.state, epoch.has_mismatch) == ("pending", False)


async def test_a_life_of_the_engine_is_known_from_its_beginning(gateway: GatewayFixture) -> None:
    """One that dies in its first minute leaves entries that somebody will ask about."""
    await gateway.until(lambda: bool(reconcile(gateway.store)))

    (epoch,) = reconcile(gateway.store)
    assert (epoch.epoch, epoch.entries) == ("1", 0)


async def test_a_difference_is_logged(gateway: GatewayFixture) -> None:
    """Tokens in the ledger that no engine computed are a mistake of somebody's."""
    await gateway.ask(body=gateway.chat())
    await settled(gateway)
    with gateway.store.change() as db:
        for table in ("epoch_sums", "recent_sums"):  # it is in one of them
            db.execute(f"update {table} set output_tokens = output_tokens + 1")

    assert not await gateway.gateway._reconciler.check()
    (line,) = [line for line in gateway.lines if line["event"] == "ledger_mismatch"]
    assert line["ledger_output_tokens"] == line["engine_output_tokens"] + 1  # type: ignore[operator]


async def test_the_last_note_is_final(gateway: GatewayFixture) -> None:
    """After a shutdown the counts stay comparable for ever."""
    await gateway.ask(body=gateway.chat())
    await gateway.gateway._reconciler.close()
    (epoch,) = reconcile(gateway.store)

    assert (epoch.state, epoch.has_mismatch) == ("final", False)
    assert epoch.engine.output_tokens == 8


async def test_two_lives_of_an_engine_are_counted_apart(gateway: GatewayFixture) -> None:
    """The metrics go on where the engine begins at zero; what ran in a life that ended before
    anybody looked is not taken for the next one's."""
    telemetry = gateway.gateway.context.telemetry
    telemetry.count_epoch("0", 100, 50, 7)
    await gateway.ask(body=gateway.chat())
    first = await settled(gateway)
    await Reconciler(gateway.gateway.context).note()
    (again,) = reconcile(gateway.store)

    assert first.engine == again.engine == again.metrics
    assert again.metrics == first.metrics
    assert await gateway.gateway._reconciler.check()
    assert Counts(3, 2, 1).minus(Counts(1, 2, 3)) == Counts(2, 0, -2)


async def test_what_is_told_of_an_epoch_is_what_metrics_count(gateway: GatewayFixture) -> None:
    """One more sum would be worth nothing if it went its own way."""
    await gateway.ask(body=gateway.chat("one " * 40))
    await gateway.ask(body=gateway.chat("one " * 40), who="bob")
    await settled(gateway)
    async with gateway.session.get(f"{gateway.admin_url}/metrics") as response:
        lines = (await response.text()).splitlines()

    def total(name: str) -> int:
        return sum(
            round(float(line.rpartition(" ")[2])) for line in lines if line.startswith(f"{name}{{")
        )

    assert gateway.gateway.context.telemetry.epoch_tokens("1") == (
        total("trunkline_prompt_tokens_total"),
        total("trunkline_cached_tokens_total"),
        total("trunkline_output_tokens_total"),
    )


def test_lives_of_an_engine_are_forgotten_after_a_while() -> None:
    """One that dies every minute must not grow a gateway."""
    telemetry = Metrics(1)
    for number in range(ENGINE_EPOCHS_MAX + 1):
        telemetry.count_epoch(str(number), 1, 0, 0)
    telemetry.count_epoch("16", 1, 0, 0)

    assert telemetry.epoch_tokens("0") == (0, 0, 0)
    assert telemetry.epoch_tokens("1") == (1, 0, 0)
    assert telemetry.epoch_tokens("16") == (2, 0, 0)
