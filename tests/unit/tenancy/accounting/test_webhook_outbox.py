"""The outbox: an event is recorded once, sent until it is taken, and given up after a day."""

from __future__ import annotations

import json

import pytest

from tenancy.accounting.webhook_outbox import (
    GIVE_UP_MS,
    KEPT_MS,
    WebhookEvent,
    claim_due,
    count_deliveries,
    delete_old_deliveries,
    list_deliveries,
    pause_ms,
    put_event,
    settle_delivery,
)
from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.tenants import create_tenant
from tenancy.storage.interface import Store
from tenancy.types import DAY_MS
from tests.unit.tenancy.conftest import Wall

LEASE_MS = 30_000
EVENT = WebhookEvent("7:100", "key.expires", {"key_id": 7})


def fail(store: Store, wall: Wall, endpoint: str = "ops") -> str:
    """Claim the due delivery and record a failure; return its state."""
    delivery = claim_due(store, endpoint, wall(), LEASE_MS)
    assert delivery is not None
    return settle_delivery(store, delivery, wall(), status=500, error="status 500")


def test_an_event_is_recorded_once_for_each_endpoint(store: Store, wall: Wall) -> None:
    """A restart finds the same event again, and so does a second gateway."""
    first = put_event(store, EVENT, ["ops", "chat"], wall())
    again = put_event(store, EVENT, ["ops", "chat"], wall() + 60_000)
    other = put_event(store, WebhookEvent("7:100", "tenant.limited", {}), ["ops"], wall())
    rows = list_deliveries(store, 10)

    assert (first, again, other) == (True, False, True)
    assert sorted((row.endpoint, row.kind) for row in rows) == [
        ("chat", "key.expires"),
        ("ops", "key.expires"),
        ("ops", "tenant.limited"),
    ]
    assert json.loads(rows[0].body)["timestamp"] == "1970-01-01T00:16:40.000Z"


def test_a_claim_keeps_other_senders_away(store: Store, wall: Wall) -> None:
    """Until it ends: the sender may have died between the answer and its record."""
    put_event(store, EVENT, ["ops"], wall())
    mine = claim_due(store, "ops", wall(), LEASE_MS)
    theirs = claim_due(store, "ops", wall(), LEASE_MS)
    wall.ms += LEASE_MS
    later = claim_due(store, "ops", wall(), LEASE_MS)

    assert mine is not None
    assert theirs is None
    assert later is not None
    assert (mine.attempts, later.attempts) == (1, 2)


def test_a_success_ends_the_delivery(store: Store, wall: Wall) -> None:
    put_event(store, EVENT, ["ops"], wall())
    delivery = claim_due(store, "ops", wall(), LEASE_MS)
    assert delivery is not None
    state = settle_delivery(store, delivery, wall(), status=204, error=None)
    wall.ms += GIVE_UP_MS
    (row,) = list_deliveries(store, 10)

    assert state == "delivered"
    assert (row.last_status, row.last_error, row.ended_ms) == (204, None, 1_000_000)
    assert claim_due(store, "ops", wall(), LEASE_MS) is None
    assert count_deliveries(store) == {("ops", "delivered"): 1}


def test_pauses_grow_until_a_day_has_passed(store: Store, wall: Wall) -> None:
    """Then the event is dead, and no attempt follows."""
    wall.ms = 20_000 * DAY_MS  # the clock's own size must not count
    put_event(store, EVENT, ["ops"], wall())
    began_ms, pauses, state = wall.ms, [], "pending"
    (row,) = list_deliveries(store, 1)
    while state == "pending":
        state = fail(store, wall)
        (row,) = list_deliveries(store, 1)
        pauses.append(row.next_ms - wall.ms)
        assert claim_due(store, "ops", wall(), LEASE_MS) is None
        wall.ms = max(wall.ms, row.next_ms)

    assert state == "dead"
    assert pauses == sorted(pauses)
    assert pauses[0] == 5_000
    assert 10 <= len(pauses) <= 20
    assert row.ended_ms is not None
    assert row.ended_ms - began_ms <= GIVE_UP_MS
    assert list_deliveries(store, 10, "dead") == [row]


@pytest.mark.parametrize(("attempts", "pause"), [(1, 5_000), (9, 21_600_000), (99, 21_600_000)])
def test_the_longest_pause_repeats(attempts: int, pause: int) -> None:
    assert pause_ms(attempts) == pause


def test_a_deleted_tenant_leaves_no_event(store: Store, wall: Wall) -> None:
    """Its name is in the body. What is found before the deletion may be recorded after it."""
    tenant = create_tenant(store, wall, "gone")
    put_event(store, WebhookEvent("x", "tenant.limited", {}, tenant.tenant_id), ["ops"], wall())
    delete_tenant(store, wall, "gone")
    late = WebhookEvent("y", "tenant.limited", {}, tenant.tenant_id)

    assert not put_event(store, late, ["ops"], wall())
    assert list_deliveries(store, 10) == []


def test_old_events_are_deleted(store: Store, wall: Wall) -> None:
    """After the longest window in which one could be found again, and not a later one."""
    put_event(store, EVENT, ["ops"], wall())
    put_event(store, WebhookEvent("8:100", "key.expires", {}), ["ops"], wall() + 1)
    delete_old_deliveries(store, wall() + KEPT_MS)
    kept = len(list_deliveries(store, 10))
    delete_old_deliveries(store, wall() + KEPT_MS + 1)

    assert (kept, len(list_deliveries(store, 10))) == (2, 1)
