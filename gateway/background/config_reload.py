"""Reading the configuration again while the server runs: by SIGHUP, or when an administrator asks.

Declared tenants, their keys and shared scopes are made so; every other setting waits for a
restart, and which ones differ is said. A file that cannot be read, or that says what cannot be,
changes nothing. It knows no HTTP; `app` and the admin API call it.
"""

from __future__ import annotations

import asyncio

from msgspec import Struct

from gateway.background.key_files import with_digests
from gateway.config import Config, ConfigError, effective
from gateway.context import Context
from gateway.errors import Kind, Refusal
from tenancy.accounts.declared_keys import KeyChange
from tenancy.accounts.declared_tenants import Change, reconcile
from tenancy.accounts.shared_scopes import ScopeChange
from tenancy.accounts.tenants import list_registered
from tenancy.errors import TenancyError


class Reloaded(Struct, frozen=True):
    """What was done to tenants, to shared scopes and to keys, and which settings differ from those
    that the server runs with. `left`: tenants that an earlier file declared, where this one says
    nothing of any."""

    tenants: tuple[Change, ...]
    needs_restart: tuple[str, ...]
    shared_scopes: tuple[ScopeChange, ...] = ()
    keys: tuple[KeyChange, ...] = ()
    left: tuple[str, ...] = ()


async def reload(gateway: Context) -> Reloaded:
    """Read it and make it so. Raises Refusal with what is wrong, having changed nothing."""
    try:
        config = await asyncio.to_thread(gateway.read_config)
        changes = await declare(gateway, config)
    except (ConfigError, TenancyError) as error:
        gateway.log("reload_refused", {"reason": str(error)})
        raise Refusal(Kind.CONFLICT, "bad_config", f"Nothing was changed: {error}") from error
    found = Reloaded(
        tuple(change for change in changes if isinstance(change, Change)),
        tuple(differences(gateway.config, config)),
        tuple(change for change in changes if isinstance(change, ScopeChange)),
        tuple(change for change in changes if isinstance(change, KeyChange)),
        await asyncio.to_thread(_left, gateway, config),
    )
    facts = {"tenants": len(found.tenants), "keys": len(found.keys)}
    gateway.log("reloaded", {**facts, "needs_restart": found.needs_restart})
    return found


async def declare(gateway: Context, config: Config) -> list[Change | KeyChange | ScopeChange]:
    """Make what is declared so, and say what was done. Raises StoreError, BadName, and ConfigError
    for a key's file."""
    changes = await asyncio.to_thread(_reconcile, gateway, config)
    for change in changes:
        match change:
            case Change(tenant, what):
                gateway.log("tenant_declared", {"tenant": tenant, "what": what})
            case KeyChange(tenant, _, key_id, what):
                facts = {"tenant": tenant, "key_id": key_id, "what": what}
                gateway.log("key_declared", facts)
            case ScopeChange(scope, what):
                gateway.log("scope_declared", {"shared_scope": scope, "what": what})
    if left := await asyncio.to_thread(_left, gateway, config):
        gateway.log("tenants_left", {"tenants": len(left)})
    gateway.registry.look_again()
    return changes


def _left(gateway: Context, config: Config) -> tuple[str, ...]:
    """Whoever took out the last table may have meant to suspend it."""
    if config.tenants is not None:
        return ()
    there = list_registered(gateway.store)
    return tuple(one.tenant.name for one in there if one.tenant.is_declared)


def _reconcile(gateway: Context, config: Config) -> list[Change | KeyChange | ScopeChange]:
    tenants = None if config.tenants is None else with_digests(config.tenants)
    return reconcile(gateway.store, gateway.wall, tenants, config.tenancy.shared_scopes)


def differences(running: Config, read: Config) -> list[str]:
    """Paths of the settings that differ, but for what a reload makes so."""
    before, after = (
        {
            path: value
            for path, value, _ in effective(one, {})
            if path not in ("tenants", "tenancy.shared_scopes")
        }
        for one in (running, read)
    )
    return sorted(
        path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
    )
