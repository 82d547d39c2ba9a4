"""Reconciliation: ledger, engine and metrics have the same token counts."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine.statistics import Stats
from gateway.observability.metrics import ENGINE_EPOCHS_MAX, Metrics
from tenancy.accounting.reconcile import Counts, Epoch, reconcile
from tenancy.types import wall_ms
from tests.unit.gateway.gateway_fixture import GatewayFixture


async def settled(gateway: GatewayFixture) -> Epoch:
    """Return the only epoch, recorded when nothing runs."""
    await gateway.gateway.context.running.wait_idle(10)
    await gateway.gateway.context.work.finish()
    await gateway.gateway.reconciler.note()
    (epoch,) = reconcile(gateway.store)
    return epoch


async def test_counts_agree_for_all_kinds_of_requests(gateway: GatewayFixture) -> None:
    """Unary and streamed, hits and misses, several choices and prompts, refusals."""
    await gateway.ask(body=gateway.chat("one " * 40))
    await gateway.ask(body=gateway.chat("one " * 40, n=3))
    await gateway.stream(gateway.chat("one " * 40 + "two"))
    prompts = {"model": gateway.model, "prompt": ["a b", "c d e"], "max_tokens": 3}
    await gateway.ask("/v1/completions", prompts, who="bob")
    await gateway.ask(body=gateway.chat("x " * 999))
    epoch = await settled(gateway)

    assert epoch.ledger == epoch.engine == epoch.metrics
    assert epoch.ledger.cached_tokens > 0
    assert (epoch.state, epoch.has_mismatch, epoch.entries) == ("running", False, 4)


async def test_counts_agree_after_a_disconnect(gateway: GatewayFixture) -> None:
    """The entry includes tokens that the engine computed before it knew."""
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


async def test_tokens_after_a_stop_string_are_not_charged(gateway: GatewayFixture) -> None:
    """The engine learns of a stop string after it has sampled more tokens, or all."""
    gateway.say("one two, three, four, five, six, seven.", ends=False)
    for most in (6, 8, 12, 40):
        await gateway.ask(body=gateway.chat("count", n=2, stop=[","], max_tokens=most))
        await gateway.stream(gateway.chat("count", stop=["two"], max_tokens=most))
    epoch = await settled(gateway)
    drawn = (await gateway.engine.get_stats()).output_tokens_total

    assert epoch.ledger == epoch.engine == epoch.metrics
    assert drawn > epoch.ledger.output_tokens > 0


async def test_running_requests_postpone_the_comparison(gateway: GatewayFixture) -> None:
    gateway.runner.hold_after(5)
    asking = asyncio.create_task(gateway.ask(body=gateway.chat(max_tokens=300)))  # still runs then
    await gateway.until(lambda: gateway.runner.steps >= 5)
    noting = asyncio.create_task(gateway.gateway.reconciler.note())
    await asyncio.sleep(0)
    noted_ms = wall_ms()
    await gateway.until(lambda: wall_ms() > noted_ms)  # what ends in the same instant is compared
    gateway.runner.release()
    await asyncio.gather(asking, noting)

    assert all(epoch.state in ("pending", "running") for epoch in reconcile(gateway.store))
    assert await gateway.gateway.reconciler.check()


@pytest.mark.parametrize("is_early", [True, False])
async def test_requests_in_the_engine_have_holds_when_compared(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    """Short requests have deferred holds: those running when the engine is asked, and those that
    begin meanwhile."""
    gateway.runner.hold_after(5)
    asking: list[asyncio.Task[object]] = []

    async def begin() -> None:
        asking.append(asyncio.create_task(gateway.ask(body=gateway.chat(max_tokens=300))))
        await gateway.until(lambda: gateway.runner.steps >= 5)

    async def counted() -> Stats:
        if not is_early:
            await begin()
        return Stats(prompt_tokens_total=7)

    monkeypatch.setattr(gateway.engine, "get_stats", counted)
    if is_early:
        await begin()
    await gateway.gateway.reconciler.note()
    (epoch,) = reconcile(gateway.store)
    gateway.runner.release()
    await asking[0]

    assert epoch.engine.prompt_tokens > epoch.ledger.prompt_tokens
    assert (epoch.state, epoch.has_mismatch) == ("pending", False)


async def test_records_a_new_epoch_at_once(gateway: GatewayFixture) -> None:
    """An engine that dies in its first minute leaves entries that need an epoch."""
    await gateway.until(lambda: bool(reconcile(gateway.store)))

    (epoch,) = reconcile(gateway.store)
    assert (epoch.epoch, epoch.entries) == ("1", 0)


async def test_logs_a_ledger_mismatch(gateway: GatewayFixture) -> None:
    """Tokens in the ledger that no engine computed are a bug."""
    await gateway.ask(body=gateway.chat())
    await settled(gateway)
    with gateway.store.change() as db:
        for table in ("epoch_sums", "recent_sums"):  # it is in one of them
            db.execute(f"update {table} set output_tokens = output_tokens + 1")

    assert not await gateway.gateway.reconciler.check()
    (line,) = [line for line in gateway.lines if line["event"] == "ledger_mismatch"]
    assert line["ledger_output_tokens"] == line["engine_output_tokens"] + 1  # type: ignore[operator]


async def test_shutdown_records_final_counts(gateway: GatewayFixture) -> None:
    await gateway.ask(body=gateway.chat())
    await gateway.gateway.reconciler.close()
    (epoch,) = reconcile(gateway.store)

    assert (epoch.state, epoch.has_mismatch) == ("final", False)
    assert epoch.engine.output_tokens == 8


async def test_epochs_are_counted_separately(gateway: GatewayFixture) -> None:
    """Metrics continue where the engine restarts at zero; requests of an epoch that ended before
    any record are not counted in the next one."""
    metrics = gateway.gateway.context.metrics
    metrics.count_epoch("0", 100, 50, 7)
    await gateway.ask(body=gateway.chat())
    first = await settled(gateway)
    await gateway.gateway.reconciler.note()
    (again,) = reconcile(gateway.store)

    assert first.engine == again.engine == again.metrics
    assert again.metrics == first.metrics
    assert await gateway.gateway.reconciler.check()
    assert Counts(3, 2, 1).minus(Counts(1, 2, 3)) == Counts(2, 0, -2)


async def test_epoch_counts_equal_the_metrics(gateway: GatewayFixture) -> None:
    await gateway.ask(body=gateway.chat("one " * 40))
    await gateway.ask(body=gateway.chat("one " * 40), who="bob")
    await settled(gateway)
    async with gateway.session.get(f"{gateway.admin_url}/metrics") as response:
        lines = (await response.text()).splitlines()

    def total(name: str) -> int:
        return sum(
            round(float(line.rpartition(" ")[2])) for line in lines if line.startswith(f"{name}{{")
        )

    assert gateway.gateway.context.metrics.epoch_tokens("1") == (
        total("trunkline_prompt_tokens_total"),
        total("trunkline_cached_tokens_total"),
        total("trunkline_output_tokens_total"),
    )


def test_old_epochs_are_dropped() -> None:
    """An engine that dies every minute must not grow the gateway's memory."""
    metrics = Metrics(1)
    for number in range(ENGINE_EPOCHS_MAX + 1):
        metrics.count_epoch(str(number), 1, 0, 0)
    metrics.count_epoch("16", 1, 0, 0)

    assert metrics.epoch_tokens("0") == (0, 0, 0)
    assert metrics.epoch_tokens("1") == (1, 0, 0)
    assert metrics.epoch_tokens("16") == (2, 0, 0)
