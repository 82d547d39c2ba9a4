"""Reading the configuration again while the server runs: by SIGHUP, or when an administrator asks.

Declared tenants, their keys and shared scopes are made so; every other setting waits for a
restart, and which ones differ is said. A file that cannot be read, or that says what cannot be,
changes nothing. It knows no HTTP; `app` and the admin API call it.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Sequence

from msgspec import Struct, structs

from gateway.config import Config, ConfigError, effective
from gateway.context import Context
from gateway.errors import Kind, Refusal
from tenancy.accounts.declared_keys import DeclaredKey, KeyChange
from tenancy.accounts.declared_tenants import DeclaredTenant, TenantChange, reconcile
from tenancy.accounts.keys import digest_of, is_key
from tenancy.accounts.shared_scopes import ScopeChange
from tenancy.accounts.tenants import list_tenant_records
from tenancy.errors import TenancyError


class ReloadResult(Struct, frozen=True):
    """What was done to tenants, to shared scopes and to keys, and which settings differ from those
    that the server runs with. `left`: tenants that an earlier file declared, where this one says
    nothing of any."""

    tenants: tuple[TenantChange, ...]
    needs_restart: tuple[str, ...]
    shared_scopes: tuple[ScopeChange, ...] = ()
    keys: tuple[KeyChange, ...] = ()
    left: tuple[str, ...] = ()


async def reload(gateway: Context) -> ReloadResult:
    """Read it and make it so. Raises Refusal with what is wrong, having changed nothing."""
    try:
        config = await asyncio.to_thread(gateway.read_config)
        changes = await declare(gateway, config)
    except (ConfigError, TenancyError) as error:
        gateway.log("reload_refused", {"reason": str(error)})
        raise Refusal(Kind.CONFLICT, "bad_config", f"Nothing was changed: {error}") from error
    found = ReloadResult(
        tuple(change for change in changes if isinstance(change, TenantChange)),
        tuple(differences(gateway.config, config)),
        tuple(change for change in changes if isinstance(change, ScopeChange)),
        tuple(change for change in changes if isinstance(change, KeyChange)),
        await asyncio.to_thread(_left, gateway, config),
    )
    facts = {"tenants": len(found.tenants), "keys": len(found.keys)}
    gateway.log("reloaded", {**facts, "needs_restart": found.needs_restart})
    return found


async def declare(gateway: Context, config: Config) -> list[TenantChange | KeyChange | ScopeChange]:
    """Make what is declared so, and say what was done. Raises StoreError, BadName, and ConfigError
    for a key's file."""
    changes = await asyncio.to_thread(_reconcile, gateway, config)
    for change in changes:
        match change:
            case TenantChange(tenant, what):
                gateway.log("tenant_declared", {"tenant": tenant, "what": what})
            case KeyChange(tenant, _, key_id, what):
                facts = {"tenant": tenant, "key_id": key_id, "what": what}
                gateway.log("key_declared", facts)
            case ScopeChange(scope, what):
                gateway.log("scope_declared", {"shared_scope": scope, "what": what})
    if left := await asyncio.to_thread(_left, gateway, config):
        gateway.log("tenants_left", {"tenants": len(left)})
    gateway.registry.refresh_now()
    return changes


def _left(gateway: Context, config: Config) -> tuple[str, ...]:
    """Whoever took out the last table may have meant to suspend it."""
    if config.tenants is not None:
        return ()
    there = list_tenant_records(gateway.store)
    return tuple(one.tenant.name for one in there if one.tenant.is_declared)


def _reconcile(gateway: Context, config: Config) -> list[TenantChange | KeyChange | ScopeChange]:
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


FILE_BYTES_MAX = 1_024


def with_digests(tenants: Sequence[DeclaredTenant]) -> list[DeclaredTenant]:
    """The same with each key's digest in the place of its file. Reads the files.

    Raises ConfigError for one that cannot be read, that others may read, or with no key in it.
    """
    return [
        structs.replace(one, keys=tuple(_with_digest(one.name, key) for key in one.keys))
        for one in tenants
    ]


def _with_digest(tenant: str, key: DeclaredKey) -> DeclaredKey:
    if not key.file:
        return key
    try:
        text = _read(key.file)
    except OSError as error:
        raise ConfigError(_at(tenant, key, f"cannot be read: {error.strerror}")) from error
    except ValueError as error:
        raise ConfigError(_at(tenant, key, str(error))) from error
    return structs.replace(key, sha256=digest_of(text).hex(), file="")


def _read(name: str) -> str:
    """Raises OSError; ValueError for what is not a key kept as one."""
    # What is no file might be waited for, for ever.
    number = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(number).st_mode
        if not stat.S_ISREG(mode):
            raise ValueError("is no file")
        if mode & 0o077:
            raise ValueError("can be read by others than its owner; chmod 600 it")
        text = os.read(number, FILE_BYTES_MAX).decode("ascii", errors="replace").strip()
    finally:
        os.close(number)
    if not is_key(text):
        raise ValueError("has no key in it: tl- and 43 letters and digits")
    return text


def _at(tenant: str, key: DeclaredKey, what: str) -> str:
    return f"tenants: {tenant}: key {key.label[:80]!r}: {key.file} {what}"
