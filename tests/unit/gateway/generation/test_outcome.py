"""The outcome of an answer is reported once, at the right time, with the right ending."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from msgspec.structs import replace

from engine.api import LevelWait, Started
from gateway.caching import Contract
from gateway.dialects.canonical import UsageRecord
from gateway.dialects.openai.chat import ChatEncoder
from gateway.observability.tracing import CompletedRequest, Tracer
from tenancy.errors import LedgerUnavailable
from tenancy.ledger.transactions import Item
from tenancy.types import Identity, UsageEntry
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture

LONG = "one " * 40


class Spans(Tracer):
    """A tracer that keeps its spans."""

    def __init__(self) -> None:
        self.told: list[CompletedRequest] = []

    def record(self, answered: CompletedRequest) -> None:
        """See `Tracer`."""
        self.told.append(answered)

    def close(self) -> None:
        """See `Tracer`."""


class SlowEntries:
    """A ledger whose entries wait until the test completes them."""

    def __init__(self, gateway: GatewayFixture, patch: pytest.MonkeyPatch) -> None:
        self._write = gateway.gateway.context.ledger.write
        self.waiting: list[tuple[UsageEntry, asyncio.Future[None]]] = []
        patch.setattr(gateway.gateway.context.ledger, "write", self.write)

    def write(self, item: Item) -> asyncio.Future[None]:
        """See `LedgerClient`."""
        if not isinstance(item, UsageEntry):
            return self._write(item)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append((item, waiter))
        return waiter

    async def let_go(self) -> None:
        """Complete the waiting entries."""
        for entry, waiter in self.waiting:
            await self._write(entry)
            waiter.set_result(None)


@pytest.fixture
def slow(gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch) -> SlowEntries:
    """Replace the gateway's ledger by a slow one."""
    return SlowEntries(gateway, monkeypatch)


def counted(gateway: GatewayFixture) -> tuple[int, int]:
    """Return the prompt and output tokens in the metrics."""
    prompt, _, output = gateway.gateway.context.metrics.epoch_tokens("1")
    return prompt, output


async def endings(gateway: GatewayFixture) -> dict[str, int]:
    """Return the endings of answers in analytics."""
    return dict((await gateway.gateway.context.analytics.overview())["endings"])


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_is_recorded_while_entry_is_written(
    gateway: GatewayFixture, slow: SlowEntries, stream: bool
) -> None:
    """A commit takes longer than the counting; the ending is known after it."""
    asking = asyncio.create_task(gateway.ask(body=gateway.chat(max_tokens=3, stream=stream)))
    await gateway.until(lambda: bool(slow.waiting))
    before = (counted(gateway), await endings(gateway), gateway.lines[:])
    await slow.let_go()
    status, _, _ = await asking

    (entry, _) = slow.waiting[0]
    assert before == ((entry.prompt_tokens, 3), {}, [])
    assert status == 200
    assert (counted(gateway), await endings(gateway)) == ((entry.prompt_tokens, 3), {"done": 1})
    assert gateway.lines[-1]["output_tokens"] == 3
    await gateway.check_quiet()


async def test_the_wait_for_a_load_is_told_everywhere(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the header, the log line, the histogram of its level and the request's page."""
    begin, wait = Contract.begin, LevelWait(0.25, "disk")

    def begin_loaded(contract: Contract, started: Started) -> UsageRecord:
        loaded = (("disk", started.cached_tokens),)
        return begin(contract, replace(started, loaded_tokens=loaded, wait=wait))

    await gateway.ask(body=gateway.chat(LONG))
    plain = gateway.lines[-1]["load_ms"]
    monkeypatch.setattr(Contract, "begin", begin_loaded)
    _, _, answer = await gateway.ask(body=gateway.chat(LONG))
    line = gateway.lines[-1]
    await gateway.quiet()
    asked = await AdminClient(gateway).ask("GET", f"/admin/v1/requests/{line['id']}")
    text = gateway.gateway.context.metrics.exposition().decode()

    assert (plain, line["load_ms"]) == (None, 250.0)
    assert "; load_ms=250.0" in answer.headers["X-Trunkline-Cache"]
    assert asked[1]["load_ms"] == 250.0
    assert asked[1]["loaded_tokens"] == {"disk": line["cached_tokens"]}
    assert 'trunkline_load_seconds_sum{level="disk"} 0.25' in text


async def test_failed_entry_makes_a_failed_answer_counted_once(
    gateway: GatewayFixture, slow: SlowEntries
) -> None:
    """The tokens were computed and stay counted; the answer is not reported as done."""
    asking = asyncio.create_task(gateway.ask(body=gateway.chat(max_tokens=1)))
    await gateway.until(lambda: bool(slow.waiting))
    (entry, waiter) = slow.waiting[0]
    waiter.set_exception(LedgerUnavailable("not_durable", "no disk"))
    status, answer, _ = await asking
    line = gateway.lines[-1]

    assert (status, answer["error"]["code"]) == (503, "ledger_unavailable")
    assert (counted(gateway), await endings(gateway)) == ((entry.prompt_tokens, 1), {"failed": 1})
    assert (line["ending"], line["code"]) == ("refused", "ledger_unavailable")
    assert (line["prompt_tokens"], line["output_tokens"]) == (entry.prompt_tokens, 1)
    await gateway.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_unencodable_answer_is_not_charged(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The last bytes are encoded before the entry is submitted, so our bug is not billed."""

    def broken(*_: object) -> bytes:
        raise ZeroDivisionError("test")

    monkeypatch.setattr(ChatEncoder, "close" if stream else "unary", broken)
    body = json.dumps(gateway.chat("one two", stream=stream)).encode()
    async with gateway.connection() as (reader, writer):
        writer.write(gateway.post("/v1/chat/completions", body))
        await reader.readuntil(b"\r\n\r\n")
        await gateway.until(lambda: not gateway.gateway.context.running)
        writer.transport.abort()
    await gateway.gateway.context.work.finish()
    rows = gateway.store.query("select ending from ledger")

    assert rows == [("failed",)]


async def test_disconnect_while_entry_is_written_is_counted_once(
    gateway: GatewayFixture, slow: SlowEntries
) -> None:
    """The client pays for the work, though it got no response."""
    body = gateway.post("/v1/chat/completions", json.dumps(gateway.chat(max_tokens=3)).encode())
    async with gateway.connection() as (_, writer):
        writer.write(body)
        await gateway.until(lambda: bool(slow.waiting))
        writer.transport.abort()
        await gateway.until(lambda: bool(gateway.lines))

    (entry, _) = slow.waiting[0]
    assert entry.ending == "done"
    assert (counted(gateway), await endings(gateway)) == (
        (entry.prompt_tokens, 3),
        {"cancelled": 1},
    )
    assert gateway.lines[-1]["ending"] == "cancelled"
    await gateway.quiet()


async def test_second_disconnect_keeps_final_counts(
    unopened_gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write and the connection's end may both cancel the request before it is given up."""
    gateway, spans = unopened_gateway, Spans()
    monkeypatch.setattr("gateway.app.open_tracer", lambda config, log: spans)
    await gateway.open()
    context, handlers = gateway.gateway.context, list[asyncio.Task[Any] | None]()
    authenticate = context.authenticator.authenticate

    def watched(key: str) -> Identity:
        handlers.append(asyncio.current_task())
        return authenticate(key)

    monkeypatch.setattr(context.authenticator, "authenticate", watched)
    gateway.runner.hold_after(20)
    body = gateway.post("/v1/chat/completions", json.dumps(gateway.chat(max_tokens=400)).encode())
    async with gateway.connection() as (_, writer):
        writer.write(body)
        await gateway.until(lambda: gateway.runner.is_held)
        (serving,) = handlers
        assert serving is not None
        for _ in range(3):
            serving.cancel()
            await asyncio.sleep(0)
        early = gateway.lines[:]
        gateway.runner.release()
        await gateway.until(lambda: bool(gateway.lines))

    ((ending, prompt, _, output),) = gateway.entries()
    line, (span,) = gateway.lines[-1], spans.told
    assert early == []
    assert 0 < output < 400
    assert (line["ending"], ending) == ("cancelled", "cancelled")
    assert (line["prompt_tokens"], line["output_tokens"]) == counted(gateway) == (prompt, output)
    assert (span.usage.total_in, span.usage.out) == (prompt, output)
    await gateway.check_quiet()
    await gateway.close()


async def test_several_prompts_are_one_request_in_all_counts(
    gateway: GatewayFixture,
) -> None:
    """Dashboard, usage and ledger must agree."""
    admin = AdminClient(gateway)
    body = {"model": gateway.model, "prompt": ["one two", "three", "four"], "max_tokens": 2}
    await gateway.ask("/v1/completions", {**body, "ignore_eos": True})
    await gateway.ask(body=gateway.chat())

    _, seen = await admin.ask("GET", "/admin/v1/analytics")
    _, mine = await admin.ask("GET", "/admin/v1/analytics/ada")
    _, used = await admin.ask("GET", "/admin/v1/usage")
    metrics = gateway.gateway.context.metrics.exposition().decode()

    counted = (used["totals"]["requests"], used["totals"]["prompt_tokens"])
    assert counted[0] == 2
    assert (seen["total"]["requests"], seen["total"]["prompt_tokens"]) == counted
    assert (mine["total"]["requests"], mine["total"]["prompt_tokens"]) == counted
    assert seen["endings"] == mine["endings"] == {"done": 2}
    assert sum(times["count"] for times in seen["first_token_ms"].values()) == 2
    assert sum(minute[1] for minute in seen["minutes"]) == 2
    ended = re.findall(r'requests_total{ending="done",.*tenant="ada"} (.*)', metrics)
    assert sum(map(float, ended)) == 2
