"""The outbox of webhooks: events that wait to be sent, by endpoint, and how their sending ended.

An event is durable before it is sent, and sent until the endpoint has taken it or a day has passed:
at least once, since a sender may die between the endpoint's answer and its record. A row is claimed
for the time of one attempt, so that several gateways over one database send it once. The module
knows no HTTP; `gateway.background.webhooks` sends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from tenancy.pseudonyms import is_pseudonym
from tenancy.storage.audit_log import Actor, record
from tenancy.storage.interface import Row, Store
from tenancy.types import DAY_MS, format_utc

GIVE_UP_MS = DAY_MS
"""An event that could not be sent for this long is dead."""
KEPT_MS = 45 * DAY_MS
"""How long a row is kept: longer than a month's budget, since its events are sent once."""
PAUSES_MS = tuple(
    seconds * 1_000 for seconds in (5, 30, 120, 600, 1_800, 3_600, 7_200, 14_400, 21_600)
)
"""Pauses between attempts; the last one repeats."""
DELIVERIES_MAX = 1_000
"""The most rows of one list."""
ERROR_CHARACTERS_MAX = 200
TEST_KIND = "webhook.test"
"""The kind of events that administrators ask for, and the action in the audit log."""


class WebhookEvent(Struct, frozen=True):
    """An event."""

    key: str
    """Names what happened; an event with a known key is not recorded again."""
    kind: str
    data: Mapping[str, object]
    """JSON values."""
    tenant_id: int | None = None
    """Its tenant, with which it is deleted."""

    @property
    def event_id(self) -> str:
        """The event's id, the same for the same key."""
        return f"evt_{hashlib.sha256(f'{self.kind}:{self.key}'.encode()).hexdigest()[:32]}"


class Delivery(Struct, frozen=True):
    """An event on its way to one endpoint."""

    event_id: str
    endpoint: str
    kind: str
    body: bytes
    """JSON as sent."""
    created_ms: int
    attempts: int
    """Attempts begun so far."""
    next_ms: int
    state: str
    last_status: int | None
    last_error: str | None
    ended_ms: int | None


_COLUMNS = (
    "event_id, endpoint, event_type, body, created_ms, attempts, next_ms, state, last_status,"
    " last_error, ended_ms"
)


def put_event(
    store: Store,
    event: WebhookEvent,
    endpoints: Sequence[str],
    now_ms: int,
    by: Actor | None = None,
) -> bool:
    """Record an event for these endpoints, unless its tenant is deleted. Returns whether it is new
    for any. Raises StoreError.

    `by`: the administrator who asked for a test event, for the audit log.
    """
    body = {"type": event.kind, "timestamp": format_utc(now_ms), "data": event.data}
    encoded = msgspec.json.encode(body)
    with store.change() as db:
        if event.tenant_id is not None:
            names = db.rows("select name from tenants where tenant_id = ?", (event.tenant_id,))
            if not names or is_pseudonym(names[0][0]):
                return False
        added = [
            db.execute(
                "insert into webhook_deliveries (event_id, endpoint, event_type, tenant_id, body,"
                " created_ms, next_ms) values (?, ?, ?, ?, ?, ?, ?)"
                " on conflict (event_id, endpoint) do nothing",
                (event.event_id, name, event.kind, event.tenant_id, encoded, now_ms, now_ms),
            )
            for name in endpoints
        ]
        for name in endpoints:
            record(db, by, TEST_KIND, f"webhook:{name}")
    return any(added)


def claim_due(store: Store, endpoint: str, now_ms: int, lease_ms: int) -> Delivery | None:
    """Claim the endpoint's delivery that has been due for longest; None if none is due.

    No other sender gets it for `lease_ms`. Its attempt counts from now on, also if the sender dies.
    O(log rows). Raises StoreError.
    """
    due = (endpoint, now_ms)
    where = "endpoint = ? and state = 'pending' and next_ms <= ?"
    if not store.query(f"select 1 from webhook_deliveries where {where} limit 1", due):
        return None  # reading waits for no writer
    with store.change() as db:
        rows = db.rows(
            f"select {_COLUMNS} from webhook_deliveries where {where} order by next_ms, event_id"
            " limit 1",
            due,
        )
        if not rows:
            return None
        found = _delivery(rows[0])
        db.execute(
            "update webhook_deliveries set attempts = attempts + 1, next_ms = ?"
            " where event_id = ? and endpoint = ?",
            (now_ms + lease_ms, found.event_id, endpoint),
        )
    return msgspec.structs.replace(found, attempts=found.attempts + 1)


def settle_delivery(
    store: Store,
    delivery: Delivery,
    now_ms: int,
    *,
    status: int | None,
    error: str | None,
    is_final: bool = False,
) -> str:
    """Record the end of an attempt and return the new state: delivered, pending or dead.

    `status`: of the endpoint's answer. `error`: None for a success. `is_final`: no further attempt.
    Raises StoreError; then the claim ends and the delivery is sent again.
    """
    state, next_ms = "pending", now_ms + pause_ms(delivery.attempts)
    if error is None:
        state = "delivered"
    elif is_final or next_ms - delivery.created_ms > GIVE_UP_MS:
        state = "dead"
    with store.change() as db:
        db.execute(
            "update webhook_deliveries set state = ?, next_ms = ?, last_status = ?, last_error = ?,"
            " ended_ms = ? where event_id = ? and endpoint = ? and state = 'pending'",
            (
                *(state, next_ms, status),
                None if error is None else error[:ERROR_CHARACTERS_MAX],
                *(None if state == "pending" else now_ms, delivery.event_id, delivery.endpoint),
            ),
        )
    return state


def pause_ms(attempts: int) -> int:
    """Return the pause after so many attempts: 5 s at first, six hours at last."""
    return PAUSES_MS[min(attempts, len(PAUSES_MS)) - 1]


def list_deliveries(store: Store, count: int, state: str | None = None) -> list[Delivery]:
    """Return the latest deliveries, newest first. O(rows). Raises StoreError."""
    rows = store.query(
        f"select {_COLUMNS} from webhook_deliveries where cast(?1 as text) is null or state = ?1"
        " order by created_ms desc, event_id, endpoint limit ?2",
        (state, min(count, DELIVERIES_MAX)),
    )
    return [_delivery(row) for row in rows]


def count_deliveries(store: Store) -> dict[tuple[str, str], int]:
    """Return the number of deliveries by endpoint and state. O(rows). Raises StoreError."""
    rows = store.query(
        "select endpoint, state, count(*) from webhook_deliveries group by endpoint, state"
    )
    return {(row[0], row[1]): row[2] for row in rows}


def delete_old_deliveries(store: Store, now_ms: int) -> None:
    """Delete the rows that were made more than `KEPT_MS` ago. Raises StoreError."""
    if store.query(
        "select 1 from webhook_deliveries where created_ms < ? limit 1", (now_ms - KEPT_MS,)
    ):
        with store.change() as db:
            db.execute("delete from webhook_deliveries where created_ms < ?", (now_ms - KEPT_MS,))


def _delivery(row: Row) -> Delivery:
    event_id, endpoint, kind, body, *rest = row
    return Delivery(event_id, endpoint, kind, bytes(body), *rest)
