"""Webhooks: sends the events of the outbox to the addresses that the operator configured.

Requests have the form of Standard Webhooks (webhook-id, webhook-timestamp, webhook-signature with
HMAC-SHA256), or of a Slack message. Each endpoint has a task of its own, so that a slow one delays
no other. A failed attempt is repeated after growing pauses for a day; then the event is dead, and
the log says so. Redirects are not followed, and nothing of an answer but its status is read. The
module knows no event; `webhook_events` finds them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
from msgspec import Struct

from engine.api import Clock
from gateway.background.webhook_events import WebhookEvents, message_of
from gateway.config import Config, ConfigError, WebhookConfig, WebhookFormat, check_web_address
from gateway.context import Log
from gateway.periodic_task import PeriodicTask
from tenancy.accounting.webhook_outbox import (
    TEST_KIND,
    Delivery,
    WebhookEvent,
    claim_due,
    delete_old_deliveries,
    put_event,
    settle_delivery,
)
from tenancy.errors import StoreError
from tenancy.storage.audit_log import Actor
from tenancy.storage.interface import Store
from tenancy.types import WallClock

ENCODED_MARK = "whsec_"
"""The beginning of a secret as text."""
SECRET_BYTES_MIN, SECRET_BYTES_MAX = 24, 64
"""Length of a secret, by the standard."""
POLL_S = 1.0
"""Longest time between an event and its first attempt."""
CHECK_INTERVAL_S = 60.0
"""Interval of the search for new events."""
TIMEOUT_S = 10.0
"""Longest time of an attempt."""
LEASE_MS = 30_000
"""How long an attempt keeps other senders from its event; longer than an attempt."""
GONE = 410
"""The status by which an endpoint says that it wants no further events."""


class WebhookEndpoint(Struct, frozen=True):
    """A webhook, with the contents of the files that its configuration names."""

    name: str
    url: str
    events: frozenset[str]
    form: WebhookFormat
    secret: bytes = b""


ReadEndpoints = Callable[[Config], Sequence[WebhookEndpoint]]


def read_endpoints(
    configured: Sequence[WebhookConfig], environment: Mapping[str, str]
) -> tuple[WebhookEndpoint, ...]:
    """Return the endpoints with their secrets. Reads the named files. Raises ConfigError."""
    return tuple(_endpoint(one, environment) for one in configured)


def _endpoint(one: WebhookConfig, environment: Mapping[str, str]) -> WebhookEndpoint:
    what = f"webhooks: {one.name}"
    url = one.url or _read_line(one.url_file, f"{what}: url_file")
    check_web_address(url, f"{what}: url")
    secret = b""
    if one.format == "standard":
        if one.secret_file:
            text = _read_line(one.secret_file, f"{what}: secret_file")
        else:
            text = environment.get(one.secret_env, "")
            if not text:
                raise ConfigError(
                    f"{what}: secret_env: variable {one.secret_env!r} is not set; expected"
                    f" {ENCODED_MARK}… in it"
                )
        secret = parse_secret(text, what)
    return WebhookEndpoint(one.name, url, frozenset(one.events), one.format, secret)


def parse_secret(text: str, what: str) -> bytes:
    """Return the bytes of `whsec_` and base64. Raises ConfigError, which never quotes the text."""
    try:
        secret = base64.b64decode(text.removeprefix(ENCODED_MARK), validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise ConfigError(
            f"{what}: invalid secret; expected {ENCODED_MARK} and {SECRET_BYTES_MIN} to"
            f" {SECRET_BYTES_MAX} bytes in base64. Make one with:"
            f' echo "{ENCODED_MARK}$(openssl rand -base64 32)"'
        )
    return secret


def _read_line(path: str, what: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{what}: {path} cannot be read: {reason}") from error


def signature(secret: bytes, event_id: str, at_s: int, body: bytes) -> str:
    """Return the value of webhook-signature: version 1, HMAC-SHA256 of id, time and body."""
    signed = b".".join((event_id.encode(), str(at_s).encode(), body))
    digest = hmac.new(secret, signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


class WebhookSender:
    """The webhooks of one gateway. Belongs to one event loop; does nothing without endpoints."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        wall: WallClock,
        log: Log,
        events: WebhookEvents,
        endpoints: Sequence[WebhookEndpoint],
        read: ReadEndpoints | None = None,
    ) -> None:
        """`read`: returns the endpoints of a configuration with their secrets, for a reload; raises
        ConfigError. Without it a reload changes none."""
        self.endpoints = tuple(endpoints)
        self.read: ReadEndpoints = read or (lambda config: self.endpoints)
        self._store, self._clock, self._wall, self._log = store, clock, wall, log
        self._events = events
        self._unrecorded: dict[str, WebhookEvent] = {}
        """Counted events that the database has not taken yet, by id."""
        self._session: aiohttp.ClientSession | None = None
        self._search = self._task("webhooks", lambda: self.check(), CHECK_INTERVAL_S)
        self._sending = {one.name: self._sending_of(one) for one in self.endpoints}
        self._is_started = False

    def start(self) -> None:
        """Start the tasks on the running event loop."""
        self._is_started = True
        if self.endpoints:
            self._begin(*self._sending.values())

    async def apply(self, endpoints: Sequence[WebhookEndpoint]) -> tuple[str, ...]:
        """Send to these endpoints from now on. Returns the names of those that were added, changed
        or removed.

        An attempt to a changed or removed endpoint is given up; what was not sent is sent to the
        endpoint of that name, if there is one, now or after a later reload. One call at a time.
        """
        before = {one.name: one for one in self.endpoints}
        after = {one.name: one for one in endpoints}
        names = [n for n in {**before, **after} if before.get(n) != after.get(n)]
        await asyncio.gather(*(self._sending.pop(n).close(0) for n in names if n in before))
        self.endpoints = tuple(endpoints)
        added = {name: self._sending_of(after[name]) for name in names if name in after}
        self._sending |= added
        if self._is_started and added:
            self._begin(*added.values())
        return tuple(sorted(names))

    def _begin(self, *tasks: PeriodicTask) -> None:
        """Start tasks, before the first ones the HTTP client and the search."""
        if self._session is None:
            self.open()
            self._search.start()
        for task in tasks:
            task.start()

    def open(self) -> None:
        """Open the HTTP client on the running event loop."""
        # Proxies of the environment would see events that the operator sends to one address.
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), trust_env=False
        )

    async def close(self) -> None:
        """Stop the tasks; what was not sent is sent after the next start."""
        self._is_started = False
        await asyncio.gather(*(one.close(0) for one in (self._search, *self._sending.values())))
        if self._session is not None:
            await self._session.close()

    async def publish(self, event: WebhookEvent) -> bool:
        """Record an event for the endpoints that want it. Returns whether it is new.

        Raises StoreError.
        """
        names = [one.name for one in self.endpoints if not one.events or event.kind in one.events]
        return bool(names) and await self._put(event, names)

    async def test(self, endpoint: WebhookEndpoint, key: str, by: Actor) -> WebhookEvent:
        """Record a test event for one endpoint, also if it takes other events. Raises StoreError.

        `key`: another one for each test. `by`: for the audit log.
        """
        event = WebhookEvent(key, TEST_KIND, {"webhook": endpoint.name})
        await self._put(event, [endpoint.name], by)
        return event

    async def check(self) -> None:
        """Search for events since the last check and record them; delete old ones.

        A failed read or write of the store is tried again at the next check.
        """
        for event in self._events.count():
            self._unrecorded.setdefault(event.event_id, event)
        with suppress(StoreError):
            for event in tuple(self._unrecorded.values()):
                await self.publish(event)
                del self._unrecorded[event.event_id]
            for event in await self._events.read():
                await self.publish(event)
            await asyncio.to_thread(delete_old_deliveries, self._store, self._wall())

    async def send_due(self, endpoint: WebhookEndpoint) -> bool:
        """Send the endpoint's event that has been due for longest. Returns whether one was due.

        Raises StoreError.
        """
        claim = partial(claim_due, self._store, endpoint.name, self._wall(), LEASE_MS)
        delivery = await asyncio.to_thread(claim)
        if delivery is None:
            return False
        status, error = await self._post(endpoint, delivery)
        settle = partial(
            settle_delivery,
            self._store,
            delivery,
            self._wall(),
            status=status,
            error=error,
            is_final=status == GONE,
        )
        state = await asyncio.to_thread(settle)
        if error is not None:
            facts: dict[str, object] = {
                "webhook": endpoint.name,
                "event_id": delivery.event_id,
                "type": delivery.kind,
                "attempts": delivery.attempts,
                "reason": error,
            }
            self._log("webhook_dead" if state == "dead" else "webhook_failed", facts)
        return True

    async def _put(
        self, event: WebhookEvent, names: Sequence[str], by: Actor | None = None
    ) -> bool:
        put = partial(put_event, self._store, event, names, self._wall(), by)
        is_new = await asyncio.to_thread(put)
        for name in names:
            if (sending := self._sending.get(name)) is not None:  # else a reload took it meanwhile
                sending.wake()
        return is_new

    async def _post(
        self, endpoint: WebhookEndpoint, delivery: Delivery
    ) -> tuple[int | None, str | None]:
        """Make one attempt: (status, None for a success or the reason of the failure).

        A reason never holds the address, which may be a secret.
        """
        assert self._session is not None, "started"
        body, headers = request_of(endpoint, delivery, self._wall() // 1_000)
        try:
            async with self._session.post(
                endpoint.url, data=body, headers=headers, allow_redirects=False
            ) as response:
                status = response.status
        except TimeoutError:
            return None, f"no answer within {TIMEOUT_S:.0f} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a host's name
            return None, type(error).__name__
        return status, None if 200 <= status < 300 else f"status {status}"

    def _task(
        self, name: str, work: Callable[[], Awaitable[None]], interval_s: float
    ) -> PeriodicTask:
        return PeriodicTask(name, work, interval_s, self._log, self._clock, begins_at_once=True)

    def _sending_of(self, one: WebhookEndpoint) -> PeriodicTask:
        return self._task(f"webhook {one.name}", partial(self._send_all, one), POLL_S)

    async def _send_all(self, endpoint: WebhookEndpoint) -> None:
        """Send what is due; a failed read or write of the store is tried again."""
        with suppress(StoreError):
            while await self.send_due(endpoint):
                pass


def request_of(
    endpoint: WebhookEndpoint, delivery: Delivery, at_s: int
) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of an attempt at `at_s`, in Unix seconds."""
    headers = {"Content-Type": "application/json", "User-Agent": "trunkline"}
    if endpoint.form == "slack":
        return msgspec.json.encode({"text": message_of(delivery.body)}), headers
    headers |= {
        "webhook-id": delivery.event_id,
        "webhook-timestamp": str(at_s),
        "webhook-signature": signature(endpoint.secret, delivery.event_id, at_s, delivery.body),
    }
    return delivery.body, headers
