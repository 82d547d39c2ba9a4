"""Webhooks over real sockets: signed, repeated until taken, and never to another address."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.background import webhooks
from gateway.background.webhooks import (
    LEASE_MS,
    WebhookEndpoint,
    parse_secret,
    read_endpoints,
)
from gateway.config import ConfigError, WebhookConfig
from tenancy.accounting.webhook_outbox import WebhookEvent, list_deliveries, put_event
from tenancy.errors import StoreError
from tests.tables import each_row
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.background.webhook_receiver import Received, Receiver, verify
from tests.unit.gateway.engines.fake_link import FakeLink
from tests.unit.gateway.gateway_fixture import PATIENCE_S, GatewayFixture

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYqr"
EVENT = WebhookEvent("1:2", "engine.restarted", {"restarts": 1, "model": "m"})
NOW_MS = 1_795_000_000_000
ROOT = Path(__file__).parents[4]
DYING = """
import os, signal, sys
from pathlib import Path
from tenancy.accounting.webhook_outbox import WebhookEvent, claim_due, put_event
from tenancy.storage.sqlite import SqliteStore
store = SqliteStore(Path(sys.argv[1]))
event = WebhookEvent("1:2", "engine.restarted", {"restarts": 1, "model": "m"})
put_event(store, event, ["ops"], int(sys.argv[2]))
assert claim_due(store, "ops", int(sys.argv[2]), int(sys.argv[3])) is not None
os.kill(os.getpid(), signal.SIGKILL)
"""


class Clock:
    """The wall clock of a gateway under test, in milliseconds."""

    def __init__(self) -> None:
        self.ms = NOW_MS

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def clock(gateway: GatewayFixture) -> Clock:
    """Return the clock that the gateway has from now on."""
    made = Clock()
    gateway.wall = made
    return made


def endpoint(url: str, *events: str, form: str = "standard", name: str = "ops") -> WebhookEndpoint:
    if form == "slack":
        return WebhookEndpoint(name, url, frozenset(events), "slack")
    return WebhookEndpoint(name, url, frozenset(events), "standard", parse_secret(SECRET, "test"))


def told(gateway: GatewayFixture, event: str) -> list[dict[str, object]]:
    return [line for line in gateway.lines if line["event"] == event]


async def sent_by(gateway: GatewayFixture, one: WebhookEndpoint, rounds: int, clock: Clock) -> None:
    """Send what is due; move the clock to the next attempt; `rounds` times."""
    sender = gateway.gateway.sender([one])
    sender.open()
    try:
        for number in range(rounds):
            await sender.send_due(one)
            if number + 1 < rounds:
                clock.ms = max(row.next_ms for row in list_deliveries(gateway.store, 10))
    finally:
        await sender.close()


async def recorded(gateway: GatewayFixture, one: WebhookEndpoint) -> None:
    await gateway.gateway.sender([one]).publish(EVENT)


async def received(
    gateway: GatewayFixture, clock: Clock, *answers: int, form: str = "standard", rounds: int = 1
) -> list[Received]:
    """Send the event to a receiver that answers so; return what it got in these rounds."""
    async with Receiver(*answers).listening() as receiver:
        one = endpoint(receiver.url, form=form)
        await recorded(gateway, one)
        await sent_by(gateway, one, rounds, clock)
    return receiver.received


async def test_a_message_is_signed_as_the_standard_says(
    gateway: GatewayFixture, clock: Clock
) -> None:
    """The verifier is independent; a changed body, id or time fails."""
    (got,) = await received(gateway, clock)
    now_s = NOW_MS // 1_000

    assert verify(SECRET, got.headers, got.body, now_s)
    assert not verify(SECRET, got.headers, got.body + b" ", now_s)
    assert not verify(SECRET, {**got.headers, "webhook-id": "evt_x"}, got.body, now_s)
    assert not verify(SECRET, got.headers, got.body, now_s + 301)
    assert not verify(SECRET[:-4] + "AAAA", got.headers, got.body, now_s)
    assert got.headers["webhook-id"] == EVENT.event_id
    assert json.loads(got.body) == {
        "type": "engine.restarted",
        "timestamp": "2026-11-18T11:06:40.000Z",
        "data": {"restarts": 1, "model": "m"},
    }
    assert SECRET not in json.dumps(gateway.lines)


async def test_slack_gets_a_sentence(gateway: GatewayFixture, clock: Clock) -> None:
    """And no signature: its address is the secret."""
    (got,) = await received(gateway, clock, form="slack")

    assert json.loads(got.body) == {
        "text": "the engine of m was lost and restarted, without what only its device memory held"
    }
    assert "webhook-signature" not in got.headers


async def test_failed_attempts_are_repeated_with_the_same_id(
    gateway: GatewayFixture, clock: Clock
) -> None:
    """A receiver recognises a repetition by its id; each attempt has a time of its own."""
    tries = await received(gateway, clock, 500, 503, rounds=3)
    (row,) = list_deliveries(gateway.store, 10)
    times = [int(got.headers["webhook-timestamp"]) for got in tries]

    assert [got.headers["webhook-id"] for got in tries] == [EVENT.event_id] * 3
    assert [later - times[0] for later in times] == [0, 5, 35]
    assert all(verify(SECRET, got.headers, got.body, clock.ms // 1_000) for got in tries)
    assert (row.state, row.attempts, row.last_status) == ("delivered", 3, 204)
    assert [line["reason"] for line in told(gateway, "webhook_failed")] == [
        "status 500",
        "status 503",
    ]


async def test_redirects_are_not_followed(gateway: GatewayFixture, clock: Clock) -> None:
    """The operator named one address, and no other gets events."""
    tries = await received(gateway, clock, 307)

    assert [got.path for got in tries] == ["/hook"]
    assert list_deliveries(gateway.store, 1)[0].last_error == "status 307"


async def test_a_receiver_that_wants_no_more_ends_the_delivery(
    gateway: GatewayFixture, clock: Clock
) -> None:
    """410, as the standard says; the log has it."""
    await received(gateway, clock, 410)

    assert list_deliveries(gateway.store, 1)[0].state == "dead"
    assert told(gateway, "webhook_dead")[0]["webhook"] == "ops"


async def test_an_unreachable_receiver_is_tried_again(
    gateway: GatewayFixture, clock: Clock
) -> None:
    """The reason names no address: it may be a secret."""
    one = endpoint("http://127.0.0.1:1/secret-path")
    await recorded(gateway, one)
    await sent_by(gateway, one, 1, clock)
    (row,) = list_deliveries(gateway.store, 10)

    assert (row.state, row.last_status) == ("pending", None)
    assert row.last_error == "ClientConnectorError"
    assert "secret-path" not in json.dumps(gateway.lines)


async def test_a_slow_receiver_is_given_up(
    gateway: GatewayFixture, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds up neither the other receivers nor its own later events for ever."""
    monkeypatch.setattr("gateway.background.webhooks.TIMEOUT_S", 0.05)
    async with Receiver(0).listening() as slow, Receiver().listening() as quick:
        both = [endpoint(slow.url, name="slow"), endpoint(quick.url, name="quick")]
        sender = gateway.gateway.sender(both)
        sender.open()
        await sender.publish(EVENT)
        await asyncio.gather(*map(sender.send_due, both))
        await sender.close()
    rows = list_deliveries(gateway.store, 9)
    states = {row.endpoint: (row.state, row.last_error) for row in rows}

    assert states["quick"][0] == "delivered"
    assert states["slow"] == ("pending", "no answer within 0 s")


async def test_an_event_survives_the_death_of_its_sender(
    gateway: GatewayFixture, clock: Clock, tmp_path: Path
) -> None:
    """Killed between the write and the delivery: the next sender takes it over."""
    path = gateway.store.place
    command = [sys.executable, "-c", DYING, path, str(NOW_MS), str(LEASE_MS)]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}
    )
    ended = await process.wait()
    async with Receiver().listening() as receiver:
        one = endpoint(receiver.url)
        await sent_by(gateway, one, 1, clock)
        early = len(receiver.received)
        clock.ms += LEASE_MS
        await sent_by(gateway, one, 1, clock)

    assert ended == -signal.SIGKILL
    assert (early, len(receiver.received)) == (0, 1)
    assert list_deliveries(gateway.store, 1)[0].state == "delivered"


async def test_an_endpoint_gets_the_events_that_it_wants(
    gateway: GatewayFixture, clock: Clock
) -> None:
    sender = gateway.gateway.sender(
        [
            endpoint("http://127.0.0.1:1", "key.expires", name="keys"),
            endpoint("http://127.0.0.1:1", name="all"),
        ],
    )
    is_new = await sender.publish(EVENT)
    again = await sender.publish(EVENT)

    assert (is_new, again) == (True, False)
    assert [row.endpoint for row in list_deliveries(gateway.store, 10)] == ["all"]


async def test_a_fault_of_the_search_is_logged(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ends neither the search nor the gateway."""
    failed = asyncio.Event()

    async def fail() -> None:
        failed.set()
        raise ZeroDivisionError("the planted prompt")

    sender = gateway.gateway.sender([endpoint("http://127.0.0.1:1")])
    monkeypatch.setattr(sender, "check", fail)
    sender.start()
    await failed.wait()
    await sender.close()

    assert told(gateway, "background_failed")[0]["error"] == "ZeroDivisionError"
    assert "planted" not in json.dumps(gateway.lines)


async def test_endpoints_change_while_the_sender_runs(gateway: GatewayFixture) -> None:
    """A new one is sent to at once, a changed one at its new address, a removed one no more."""
    sender = gateway.gateway.sender([])
    sender.start()
    async with Receiver().listening() as old, Receiver().listening() as new:
        added = await sender.apply([endpoint(old.url)])
        await sender.publish(WebhookEvent("1", "engine.restarted", {"restarts": 1, "model": "m"}))
        await gateway.until(lambda: len(old.received) == 1)
        changed = await sender.apply([endpoint(new.url)])
        await sender.publish(WebhookEvent("2", "engine.restarted", {"restarts": 2, "model": "m"}))
        await gateway.until(lambda: len(new.received) == 1)
        removed = await sender.apply([])
        is_sent = await sender.publish(
            WebhookEvent("3", "engine.restarted", {"restarts": 3, "model": "m"})
        )
        await sender.close()

    assert (added, changed, removed) == (("ops",), ("ops",), ("ops",))
    assert (len(old.received), len(new.received), is_sent) == (1, 1, False)


async def test_administrators_see_and_test_webhooks(unopened_gateway: GatewayFixture) -> None:
    """A test event goes to an endpoint with any list of events; its address is not shown."""
    gateway = unopened_gateway
    async with Receiver().listening() as receiver:
        gateway.endpoints = [endpoint(receiver.url, "key.expires")]
        await gateway.open()
        admin = AdminClient(gateway)
        status, made = await admin.ask("POST", "/admin/v1/webhooks/ops/test")
        missing, error = await admin.ask("POST", "/admin/v1/webhooks/other/test")
        wrong, _ = await admin.ask("GET", "/admin/v1/webhooks?state=sent")
        async with asyncio.timeout(60):
            _, found = await admin.ask("GET", "/admin/v1/webhooks?limit=5")
            while not found["webhooks"][0]["delivered"]:
                _, found = await admin.ask("GET", "/admin/v1/webhooks?limit=5")
    (got,) = receiver.received

    assert (status, missing, wrong) == (201, 404, 400)
    assert error["error"]["code"] == "webhook_unknown"
    assert got.headers["webhook-id"] == made["event_id"]
    assert found["deliveries"][0]["type"] == "webhook.test"
    assert (found["webhooks"][0]["name"], found["webhooks"][0]["events"]) == (
        "ops",
        ["key.expires"],
    )
    assert receiver.url not in json.dumps(found)


def test_secrets_come_from_files_and_variables(tmp_path: Path) -> None:
    """Never from the configuration, which is shown."""
    (tmp_path / "secret").write_text(SECRET + "\n")
    (tmp_path / "url").write_text("https://hooks.example/T/B\n")
    endpoints = read_endpoints(
        [
            WebhookConfig("a", url="https://a.example", secret_file=str(tmp_path / "secret")),
            WebhookConfig("b", url="https://b.example", secret_env="HOOK"),
            WebhookConfig("c", url_file=str(tmp_path / "url"), format="slack"),
        ],
        {"HOOK": SECRET},
    )

    assert endpoints[0].secret == endpoints[1].secret != b""
    assert endpoints[2].url == "https://hooks.example/T/B"


@each_row(
    ("webhook", "what"),
    [
        (WebhookConfig("a", url="https://a.example", secret_env="NONE"), "'NONE' is not set"),
        (WebhookConfig("a", url="https://a.example", secret_env="BAD"), "openssl rand -base64 32"),
        (WebhookConfig("a", url="https://a.example", secret_file="/nowhere"), "cannot be read"),
        (WebhookConfig("a", url_file="/dev/null", format="slack"), "url: not an address"),
    ],
)
def test_a_missing_secret_is_named_and_never_quoted(webhook: WebhookConfig, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        read_endpoints([webhook], {"BAD": "whsec_c2hvcnQ="})

    assert "c2hvcnQ" not in str(caught.value)


async def test_counted_events_wait_for_the_database(
    gateway: GatewayFixture, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart is counted once: the check that finds it may find no database."""
    (replica,) = gateway.gateway.context.models.default.replicas
    replica.link = link = FakeLink()
    sender = gateway.gateway.sender([endpoint("http://127.0.0.1:1", "engine.restarted")])
    link.restarts = 1

    def fail(*_: object) -> None:
        raise StoreError("busy", "busy")

    with monkeypatch.context() as broken:
        broken.setattr(webhooks, "put_event", fail)
        await sender.check()
    lost = list_deliveries(gateway.store, 10)
    await sender.check()
    await sender.check()

    assert lost == []
    assert [row.kind for row in list_deliveries(gateway.store, 10)] == ["engine.restarted"]


async def test_a_reload_may_remove_the_endpoint_of_an_event(
    gateway: GatewayFixture, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the event's row and its first attempt."""
    sender = gateway.gateway.sender([endpoint("http://127.0.0.1:1")])
    loop = asyncio.get_running_loop()

    def put_and_remove(*row: Any) -> bool:
        is_new = put_event(*row)
        asyncio.run_coroutine_threadsafe(sender.apply([]), loop).result(PATIENCE_S)
        return is_new

    monkeypatch.setattr(webhooks, "put_event", put_and_remove)

    assert await sender.publish(EVENT)
