"""Who pays for an answer that did not end well: the client, unless the server failed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tenancy.accounting.audit import check_books
from tenancy.accounts.tenants import change_tenant
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.types import wall_ms
from tests.unit.gateway.gateway_fixture import GatewayFixture

LATE: Any = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 300},
        "b": {"type": "string", "pattern": "^(?:.*a.{30}){3}$"},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
"""Its last member cannot be finished by what the model says: found when it is reached."""
FAILS_AS = "invalid_json_schema"
WANTED = "the text that was wanted"


@pytest.fixture
def unopened_gateway(unopened_gateway: GatewayFixture) -> GatewayFixture:
    """A gateway that holds answers to schemas, and charges for them."""
    unopened_gateway.context_tokens, unopened_gateway.takes_grammars = 2_048, True
    add_card(unopened_gateway.store, wall_ms, RateCard("std", input=3, output=15))
    return unopened_gateway


def charges(gateway: GatewayFixture) -> list[tuple[str, int, int]]:
    """Return (ending, output tokens, charge) of the ledger's entries."""
    sql = "select ending, output_tokens, charge_pico from ledger order by entry_id"
    return [(row[0], row[1], row[2]) for row in gateway.store.query(sql)]


def late(gateway: GatewayFixture, **more: Any) -> dict[str, Any]:
    """Return a request whose schema fails behind the text that is wanted."""
    signs = random.Random(3).choices("abcdefgh ", k=300)
    gateway.say('{"a": "' + WANTED + '", "b": "' + "".join(signs) + '"}')
    form = {"name": "n", "schema": LATE, "strict": True}
    wanted = {"type": "json_schema", "json_schema": form}
    return gateway.chat(max_tokens=400, response_format=wanted, **more)


async def test_schema_that_fails_behind_the_text_is_charged(gateway: GatewayFixture) -> None:
    """The text was delivered, and the client's own schema ended the stream."""
    events = await gateway.stream(late(gateway))
    await gateway.quiet()
    text = "".join(
        choice["delta"].get("content") or ""
        for event in events
        for choice in event.get("choices", ())
    )
    ((ending, output, charge),) = charges(gateway)

    assert WANTED in text
    assert (events[-1]["error"]["code"], ending) == (FAILS_AS, FAILS_AS)
    assert charge > 15 * output > 0
    assert check_books(gateway.store) == []
    await gateway.check_quiet()


async def test_unstreamed_answer_with_such_a_schema_is_charged(gateway: GatewayFixture) -> None:
    """Otherwise prompts could be written to the cache for nothing."""
    status, body, _ = await gateway.ask(body=late(gateway))
    ((ending, output, charge),) = charges(gateway)

    assert (status, body["error"]["code"], ending) == (400, FAILS_AS, FAILS_AS)
    assert charge > 15 * output > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_failed_step_is_free_and_uses_no_limit(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The fault is the server's: neither money nor the tenant's minute."""
    change_tenant(gateway.store, "ada", {"tokens_per_minute": 10_000})
    gateway.gateway.context.authenticator.refresh_now()
    collect, steps = gateway.runner.collect, iter(range(1_000))

    def fail_late() -> object:
        if next(steps) == 5:
            raise RuntimeError("the device failed")
        return collect()

    monkeypatch.setattr(gateway.runner, "collect", fail_late)
    await gateway.ask(body=gateway.chat(max_tokens=50, stream=stream))
    await gateway.quiet()
    context = gateway.gateway.context
    left = gateway.gateway.limits.limiter.status(
        context.authenticator.authenticate(gateway.keys["ada"])
    )

    assert [(ending, charge) for ending, _, charge in charges(gateway)] == [("internal_error", 0)]
    assert charges(gateway)[0][1] > 0
    assert left["tokens"].remaining == 10_000
    assert check_books(gateway.store) == []


async def test_a_fault_of_statistics_leaves_no_request_unsettled(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry is written before anything else that follows the end of a request: its hold would
    take from a budget until the next start."""

    def fail(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(gateway.gateway.context.analytics, "note", fail)
    gateway.runner.hold_after(3)
    body = json.dumps(gateway.chat(max_tokens=40, stream=True)).encode()
    async with gateway.connection() as (reader, writer):
        writer.write(gateway.post("/v1/chat/completions", body))
        await reader.readuntil(b"data: ")
        writer.transport.abort()
        await gateway.until(lambda: not gateway.gateway.open_connections)
    gateway.runner.release()
    await gateway.until(lambda: bool(charges(gateway)))  # the fault ended what would wait for it

    assert [ending for ending, _, _ in charges(gateway)] == ["cancelled"]
    assert gateway.store.query("select count(*) from holds") == [(0,)]
