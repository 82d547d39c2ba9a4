"""`trunkline tenant`, `key` and `usage`: who may use this server, and what they used. They work
beside a running server, which sees the change within a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from msgspec import structs

from gateway.app import open_store
from gateway.commands.answer import Answer, CommandError, tabled
from gateway.config import Config
from gateway.metering import wall_ms
from tenancy.errors import BadName
from tenancy.keys import create_key, list_keys, revoke_key
from tenancy.ledger import Ledger
from tenancy.registry import (
    create_tenant,
    find_tenant,
    list_tenants,
    set_policy,
    set_status,
)
from tenancy.store import Store
from tenancy.types import CachePolicy

_UNITS_MS = {"m": 60_000, "h": 3_600_000, "d": 86_400_000}
DAYS_MAX = 36_500


def tenant_create(config: Config, name: str, changes: dict[str, object]) -> Answer:
    """Make a tenant."""
    with _opened(config) as store:
        create_tenant(store, wall_ms, name, structs.replace(CachePolicy(), **changes))
        text = f"tenant {name} created; give it a key with: trunkline key create --tenant {name}"
        return _about(store, name, text)


def tenant_list(config: Config) -> Answer:
    """All tenants with their policies."""
    with _opened(config) as store:
        return tabled([_row(store, tenant.name) for tenant, _ in list_tenants(store)])


def tenant_set(config: Config, name: str, changes: dict[str, object]) -> Answer:
    """Change a tenant's share."""
    if not changes:
        raise BadName("nothing_to_set", "say what to set: --floor, --ceiling, --weight, --priority")
    with _opened(config) as store:
        _, policy = find_tenant(store, name)
        set_policy(store, name, structs.replace(policy, **changes))
        return _about(store, name, f"tenant {name} changed")


def tenant_status(config: Config, name: str, status: str) -> Answer:
    """Suspend or resume."""
    with _opened(config) as store:
        set_status(store, name, status)
        return _about(store, name, f"tenant {name} is {status}")


def key_create(
    config: Config, tenant: str, workspace: str, label: str, expires: str | None
) -> Answer:
    """A new key: alone in words, so that `KEY=$(trunkline key create --tenant NAME)` works."""
    lives_ms = None if expires is None else _milliseconds(expires)
    with _opened(config) as store:
        found, _ = find_tenant(store, tenant)
        key = create_key(
            store, wall_ms, found.tenant_id, workspace=workspace, label=label, lives_ms=lives_ms
        )
    return Answer(key, {"key": key, "tenant": tenant, "workspace": workspace})


def key_list(config: Config, tenant: str | None) -> Answer:
    """Keys as they may be shown: never whole."""
    with _opened(config) as store:
        if tenant is not None:
            find_tenant(store, tenant)
        keys = list_keys(store, tenant)
    answer = tabled([{**structs.asdict(key), "shown": f"{key.shown}…"} for key in keys])
    instants = ("created_ms", "expires_ms", "revoked_ms")
    people = [
        {
            name.removesuffix("_ms"): _instant(value) if name in instants else value
            for name, value in {**structs.asdict(key), "shown": f"{key.shown}…"}.items()
        }
        for key in keys
    ]
    return structs.replace(answer, text=tabled(people).text)


def key_revoke(config: Config, which: str) -> Answer:
    """A key stops working within a second."""
    with _opened(config) as store:
        key = revoke_key(store, wall_ms, which)
    return Answer(f"key {key.shown}… of {key.tenant} revoked", structs.asdict(key))


def usage(config: Config, tenant: str | None, days: int | None) -> Answer:
    """Sums of ledger entries, by tenant."""
    if days is not None and not 1 <= days <= DAYS_MAX:
        raise BadName("bad_time", f"--days: {days} is not between 1 and {DAYS_MAX}")
    since_ms = 0 if days is None else wall_ms() - days * _UNITS_MS["d"]
    with _opened(config) as store:
        if tenant is not None:
            find_tenant(store, tenant)
        return tabled([structs.asdict(t) for t in Ledger.totals(store, tenant, since_ms)])


@contextmanager
def _opened(config: Config) -> Iterator[Store]:
    try:
        store, _ = open_store(config)
    except OSError as error:
        raise CommandError(
            f"the data directory {config.data} cannot be used: {error.strerror}"
        ) from error
    try:
        yield store
    finally:
        store.close()


def _about(store: Store, name: str, text: str) -> Answer:
    return Answer(text, _row(store, name))


def _row(store: Store, name: str) -> dict[str, object]:
    tenant, policy = find_tenant(store, name)
    return {"name": tenant.name, "status": tenant.status, **structs.asdict(policy)}


def _instant(at_ms: object) -> str | None:
    if not isinstance(at_ms, int):
        return None
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")


def _milliseconds(text: str) -> int:
    number, unit = text[:-1], text[-1:]
    is_number = number.isascii() and number.isdigit() and len(number) <= 6
    if not is_number or unit not in _UNITS_MS or not int(number):
        raise BadName("bad_time", f"--expires: {text!r} is no time; write 30m, 12h or 90d")
    return int(number) * _UNITS_MS[unit]
