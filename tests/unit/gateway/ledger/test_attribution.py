"""Attribution to users: what clients send is noted before the request runs, within bounds."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest

from gateway.config import BillingConfig
from gateway.ledger import attribution
from gateway.ledger.attribution import OTHER, UserAttribution
from tenancy.errors import StoreError
from tenancy.types import DAY_MS
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import PATIENCE_S, GatewayFixture


def noted(gateway: GatewayFixture) -> list[str]:
    rows = gateway.store.query("select user_ref from request_users order by request_id")
    return [row[0] for row in rows]


async def test_usage_by_user_over_both_apis(unopened_gateway: GatewayFixture) -> None:
    """OpenAI's `user` and Anthropic's `metadata.user_id`; requests without one count for none."""
    gateway = unopened_gateway
    billing = BillingConfig(attribution="user")
    gateway.config = msgspec.structs.replace(gateway.config, billing=billing)
    await gateway.open()
    admin, notes = AdminClient(gateway), gateway.gateway.context.attribution
    await gateway.ask(body=gateway.chat(user="alice"))
    message = {
        "model": gateway.model,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "hello"}],
        "metadata": {"user_id": "bert"},
    }
    await gateway.ask("/v1/messages", message)
    await gateway.ask(body=gateway.chat())
    assert notes is not None
    await notes.close()
    _, found = await admin.ask("GET", "/admin/v1/usage?tenant=ada&group_by=user")
    status, error = await admin.ask("GET", "/admin/v1/usage?group_by=user&since=2026-01-01")

    assert [(row["user"], row["requests"]) for row in found["rows"]] == [
        (None, 1),
        ("alice", 1),
        ("bert", 1),
    ]
    assert found["totals"]["requests"] == 3
    assert (status, error["error"]["param"]) == (400, "since")


async def test_without_the_setting_no_user_is_stored(gateway: GatewayFixture) -> None:
    await gateway.ask(body=gateway.chat(user="alice"))

    assert gateway.gateway.context.attribution is None
    assert noted(gateway) == []


async def test_users_of_a_day_are_bounded(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that names a new user with each request must not fill reports."""
    monkeypatch.setattr(attribution, "USERS_PER_DAY_MAX", 2)
    now_ms = 0
    notes = UserAttribution(gateway.store, lambda: now_ms)
    for number, user in enumerate("abca"):
        notes.note(f"r{number}", 1, user)
    notes.note("r4", 2, "c")
    now_ms = DAY_MS
    notes.note("r5", 1, "c")
    await notes.close()

    assert noted(gateway) == ["a", "b", OTHER, "a", "c", "c"]


async def test_a_failed_write_is_tried_again(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy database loses no note."""

    def fail(*_: object) -> None:
        raise StoreError("busy", "busy")

    notes = UserAttribution(gateway.store, lambda: 0)
    notes.note("r0", 1, "a")
    with monkeypatch.context() as broken:
        broken.setattr(attribution, "write_users", fail)
        await notes.close()
    lost = noted(gateway)
    await notes.close()

    assert (lost, noted(gateway)) == ([], ["a"])


async def test_closing_waits_for_the_write_that_runs(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is closed next, and a failed write must not lose its notes."""
    began, go = threading.Event(), threading.Event()

    def fail_late(*_: object) -> None:
        began.set()
        assert go.wait(PATIENCE_S), "a test forgot to let the write go on"
        raise StoreError("busy", "busy")

    monkeypatch.setattr(attribution, "GATHER_S", 0.0)
    notes = UserAttribution(gateway.store, lambda: 0)
    with monkeypatch.context() as broken:
        broken.setattr(attribution, "write_users", fail_late)
        notes.note("r0", 1, "a")
        assert await asyncio.to_thread(began.wait, PATIENCE_S)
    closing = asyncio.create_task(notes.close())
    await asyncio.sleep(0)
    go.set()
    await closing

    assert noted(gateway) == ["a"]
