"""What came of an answer, told to everybody who counts: when, how often, and with which ending."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from gateway.dialects.openai.chat import ChatEncoder
from gateway.observability.tracing import CompletedRequest, Tracer
from tenancy.errors import LedgerUnavailable
from tenancy.ledger.transactions import Item
from tenancy.types import UsageEntry
from tests.unit.gateway.admin_client import Admin
from tests.unit.gateway.gateway_fixture import GatewayFixture


class Spans(Tracer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[CompletedRequest] = []

    def record(self, answered: CompletedRequest) -> None:
        """See `Tracer`."""
        self.told.append(answered)

    def close(self) -> None:
        """See `Tracer`."""


class SlowEntries:
    """Entries wait until a test says what becomes of them."""

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
        """They are written."""
        for entry, waiter in self.waiting:
            await self._write(entry)
            waiter.set_result(None)


@pytest.fixture
def slow(gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch) -> SlowEntries:
    """The gateway's ledger from now on."""
    return SlowEntries(gateway, monkeypatch)


def counted(gateway: GatewayFixture) -> tuple[int, int]:
    """Tokens of prompts and of outputs, as metrics have them."""
    prompt, _, output = gateway.gateway.context.telemetry.of_epoch("1")
    return prompt, output


async def endings(gateway: GatewayFixture) -> dict[str, int]:
    """How answers have ended, as analytics has it."""
    return dict((await gateway.gateway.context.analytics.overview())["endings"])


@pytest.mark.parametrize("stream", [False, True])
async def test_what_an_answer_took_is_counted_while_its_entry_is_written(
    gateway: GatewayFixture, slow: SlowEntries, stream: bool
) -> None:
    """A commit takes longer than all counting; how it ended is known after it."""
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


async def test_an_answer_whose_entry_is_not_written_has_failed_and_is_counted_once(
    gateway: GatewayFixture, slow: SlowEntries
) -> None:
    """It was computed: what was counted stays true, and nobody is told that it was done."""
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
async def test_what_cannot_be_said_is_not_charged(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A mistake of ours in the last bytes of an answer must not be found on a bill: they are made
    before its entry is handed in."""

    def broken(*_: object) -> bytes:
        raise ZeroDivisionError("test")

    monkeypatch.setattr(ChatEncoder, "close" if stream else "unary", broken)
    body = json.dumps(gateway.chat("one two", stream=stream)).encode()
    async with gateway.connection() as (reader, writer):
        writer.write(gateway.post("/v1/chat/completions", body))
        await reader.readuntil(b"\r\n\r\n")
        await gateway.until(lambda: not gateway.gateway.context.running)
        writer.transport.abort()
    await gateway.gateway.context.finish_background()
    rows = gateway.store.query("select ending from ledger")

    assert rows == [("failed",)]


async def test_a_client_that_leaves_while_his_entry_is_written_is_counted_once(
    gateway: GatewayFixture, slow: SlowEntries
) -> None:
    """He pays for what was done, and has not got it."""
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


async def test_who_is_found_to_have_left_twice_has_his_tokens_everywhere(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a write and at the end of his connection, say: his request was reported before what ran
    for it was given up, and so without its tokens."""
    context, handlers = gateway.gateway.context, list[asyncio.Task[Any] | None]()
    context.tracer = spans = Spans()
    new_id = context.new_id

    def watched() -> str:
        handlers.append(asyncio.current_task())
        return new_id()

    monkeypatch.setattr(context, "new_id", watched)
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
    assert (span.prompt_tokens, span.output_tokens) == (prompt, output)
    await gateway.check_quiet()


async def test_an_answer_to_several_prompts_is_one_request_wherever_requests_are_counted(
    gateway: GatewayFixture,
) -> None:
    """Numbers that are shown beside each other have to agree: dashboard, usage and ledger."""
    admin = Admin(gateway)
    body = {"model": gateway.model, "prompt": ["one two", "three", "four"], "max_tokens": 2}
    await gateway.ask("/v1/completions", {**body, "ignore_eos": True})
    await gateway.ask(body=gateway.chat())

    _, seen = await admin.ask("GET", "/admin/v1/analytics")
    _, mine = await admin.ask("GET", "/admin/v1/analytics/ada")
    _, used = await admin.ask("GET", "/admin/v1/usage")
    metrics = gateway.gateway.context.telemetry.exposition().decode()

    counted = (used["totals"]["requests"], used["totals"]["prompt_tokens"])
    assert counted[0] == 2
    assert (seen["total"]["requests"], seen["total"]["prompt_tokens"]) == counted
    assert (mine["total"]["requests"], mine["total"]["prompt_tokens"]) == counted
    assert seen["endings"] == mine["endings"] == {"done": 2}
    assert sum(times["count"] for times in seen["first_token_ms"].values()) == 2
    assert sum(minute[1] for minute in seen["minutes"]) == 2
    ended = re.findall(r'requests_total{ending="done",.*tenant="ada"} (.*)', metrics)
    assert sum(map(float, ended)) == 2
