"""`trunkline tenant` and `trunkline key`: who may use this server. They work beside a running one,
which sees the change within a second."""

from __future__ import annotations

from msgspec import structs

from gateway.app import open_store
from gateway.config import Config
from gateway.metering import wall_ms
from tenancy.errors import BadName
from tenancy.keys import create_key, list_keys, revoke_key
from tenancy.registry import (
    create_tenant,
    find_tenant,
    list_tenants,
    set_policy,
    set_status,
)
from tenancy.types import CachePolicy

Table = list[dict[str, object]]
_UNITS_MS = {"m": 60_000, "h": 3_600_000, "d": 86_400_000}


def tenant_create(config: Config, name: str, changes: dict[str, object]) -> str:
    """Make a tenant."""
    store, _ = open_store(config)
    create_tenant(store, wall_ms, name, structs.replace(CachePolicy(), **changes))
    return f"tenant {name} created; give it a key with: trunkline key create --tenant {name}"


def tenant_list(config: Config) -> Table:
    """All tenants with their policies."""
    store, _ = open_store(config)
    return [
        {"name": tenant.name, "status": tenant.status, **structs.asdict(policy)}
        for tenant, policy in list_tenants(store)
    ]


def tenant_set(config: Config, name: str, changes: dict[str, object]) -> str:
    """Change a tenant's share."""
    store, _ = open_store(config)
    _, policy = find_tenant(store, name)
    if not changes:
        raise BadName("nothing_to_set", "say what to set: --floor, --ceiling, --weight, --priority")
    set_policy(store, name, structs.replace(policy, **changes))
    return f"tenant {name} changed"


def tenant_status(config: Config, name: str, status: str) -> str:
    """Suspend or resume."""
    store, _ = open_store(config)
    set_status(store, name, status)
    return f"tenant {name} is {status}"


def key_create(config: Config, tenant: str, workspace: str, label: str, expires: str | None) -> str:
    """A new key, alone."""
    store, _ = open_store(config)
    found, _ = find_tenant(store, tenant)
    return create_key(
        store,
        wall_ms,
        found.tenant_id,
        workspace=workspace,
        label=label,
        lives_ms=None if expires is None else _milliseconds(expires),
    )


def key_list(config: Config, tenant: str | None) -> Table:
    """Keys as they may be shown."""
    store, _ = open_store(config)
    return [structs.asdict(key) for key in list_keys(store, tenant)]


def key_revoke(config: Config, which: str) -> str:
    """A key stops working within a second."""
    store, _ = open_store(config)
    key = revoke_key(store, wall_ms, which)
    return f"key {key.shown}… of {key.tenant} revoked"


def _milliseconds(text: str) -> int:
    number, unit = text[:-1], text[-1:]
    if not number.isdigit() or unit not in _UNITS_MS or int(number) == 0:
        raise BadName("bad_time", f"{text!r} is no time; write 30m, 12h or 90d")
    return int(number) * _UNITS_MS[unit]
