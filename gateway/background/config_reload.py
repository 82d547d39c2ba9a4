"""Reload of the configuration while the server runs: on SIGHUP, or by the admin API.

A reload applies declared tenants, their keys and shared scopes, which tenants may use a model, and
webhooks with their secrets. Other settings need a restart; the result lists those that differ. An
unreadable or wrong file changes nothing. This module knows no HTTP.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Sequence

from msgspec import Struct, structs

from gateway.background.webhooks import WebhookSender
from gateway.config import Config, ConfigError, effective
from gateway.config.config_file import ConfigSource
from gateway.context import Log
from gateway.engines.served_models import ServedModels
from gateway.errors import Kind, Refusal
from gateway.unfinished_work import BackgroundWork
from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.accounts.declared_keys import DeclaredKey, KeyChange
from tenancy.accounts.declared_tenants import DeclaredTenant, TenantChange, reconcile
from tenancy.accounts.keys import digest_of, is_key
from tenancy.accounts.shared_scopes import ScopeChange
from tenancy.accounts.tenants import list_tenant_records
from tenancy.errors import TenancyError
from tenancy.storage.audit_log import Actor
from tenancy.storage.interface import Store
from tenancy.types import WallClock

Change = TenantChange | KeyChange | ScopeChange


class ReloadResult(Struct, frozen=True):
    """Changes to tenants, shared scopes and keys, and settings that need a restart."""

    tenants: tuple[TenantChange, ...]
    needs_restart: tuple[str, ...]
    shared_scopes: tuple[ScopeChange, ...] = ()
    keys: tuple[KeyChange, ...] = ()
    left: tuple[str, ...] = ()
    """Tenants that an earlier file declared, if this file declares none."""
    webhooks: tuple[str, ...] = ()
    """Names of those that were added, changed or removed."""
    models: tuple[str, ...] = ()
    """Names of those that other tenants may use now."""


class ConfigReload:
    """Reads the configuration again and applies it. One gateway has one."""

    def __init__(
        self,
        config: Config,
        models: ServedModels,
        authenticator: KeyAuthenticator,
        store: Store,
        work: BackgroundWork,
        wall: WallClock,
        log: Log,
        source: ConfigSource,
        webhooks: WebhookSender,
    ) -> None:
        self.config, self._models, self._authenticator = config, models, authenticator
        self._store, self._work, self._wall = store, work, wall
        self._log, self.source, self.webhooks = log, source, webhooks
        self._turn = asyncio.Lock()

    async def reload(self, by: Actor | None = None) -> ReloadResult:
        """Read the configuration and apply it. `by`: the administrator that asked, for the audit
        log. Raises Refusal, and changes nothing then.

        Runs to completion even if the caller is cancelled, and after a reload that runs: the file
        that was read last is applied last.
        """
        return await self._work.run_to_completion(self._reload(by))

    async def _reload(self, by: Actor | None) -> ReloadResult:
        async with self._turn:
            try:
                config = await asyncio.to_thread(self.source.read)
                endpoints = await asyncio.to_thread(self.webhooks.read, config)
                changes, left = await self.declare(config, by)
            except (ConfigError, TenancyError) as error:
                self._log("reload_refused", {"reason": str(error)})
                message = f"Configuration not applied: {error}"
                raise Refusal(Kind.CONFLICT, "bad_config", message) from error
            found = ReloadResult(
                tuple(change for change in changes if isinstance(change, TenantChange)),
                tuple(changed_settings(self.config, config)),
                tuple(change for change in changes if isinstance(change, ScopeChange)),
                tuple(change for change in changes if isinstance(change, KeyChange)),
                left,
                await self.webhooks.apply(endpoints),
                self._open_models(config),
            )
        facts = {
            "tenants": len(found.tenants),
            "keys": len(found.keys),
            "webhooks": len(found.webhooks),
            "models": len(found.models),
        }
        self._log("reloaded", {**facts, "needs_restart": found.needs_restart})
        return found

    def _open_models(self, config: Config) -> tuple[str, ...]:
        """Apply which tenants may use each served model; return the names of changed models. A
        model that the file no longer names stays as it is until a restart."""
        changed = []
        for settings in config.models:
            model, tenants = self._models.by_name.get(settings.name), settings.open_to
            if model is not None and model.name == settings.name and model.tenants != tenants:
                model.tenants = tenants
                changed.append(model.name)
        return tuple(changed)

    async def declare(
        self, config: Config, by: Actor | None = None
    ) -> tuple[list[Change], tuple[str, ...]]:
        """Apply the declared tenants, keys and scopes. Returns the changes, and the tenants that
        are left from an earlier file.

        Raises StoreError, BadName, and ConfigError for a key's file; then nothing has changed.
        """
        actor = by or Actor("file", "", self._wall())
        changes, left = await asyncio.to_thread(self._reconcile, config, actor)
        self._authenticator.refresh_now()
        for change in changes:
            match change:
                case TenantChange(tenant, what):
                    self._log("tenant_declared", {"tenant": tenant, "what": what})
                case KeyChange(tenant, _, key_id, what):
                    facts = {"tenant": tenant, "key_id": key_id, "what": what}
                    self._log("key_declared", facts)
                case ScopeChange(scope, what):
                    self._log("scope_declared", {"shared_scope": scope, "what": what})
        if left:
            self._log("tenants_undeclared", {"tenants": len(left)})
        return changes, left

    def _reconcile(self, config: Config, by: Actor) -> tuple[list[Change], tuple[str, ...]]:
        """Change the database, last of all. Without any `tenants` in the file, those that an
        earlier one declared stay: the operator may have removed the last table to suspend its
        tenant."""
        tenants, left = None, tuple[str, ...]()
        if config.tenants is None:
            registered = list_tenant_records(self._store)
            left = tuple(one.tenant.name for one in registered if one.tenant.is_declared)
        else:
            tenants = with_digests(config.tenants)
        scopes = config.tenancy.shared_scopes
        return reconcile(self._store, self._wall, tenants, scopes, by), left


def changed_settings(running: Config, read: Config) -> list[str]:
    """Return the key paths of settings that differ and that a reload does not apply."""
    before, after = (
        {
            path: value
            for path, value, _ in effective(_without_access(one), {})
            if path not in ("tenants", "tenancy.shared_scopes", "webhooks")
        }
        for one in (running, read)
    )
    return sorted(
        path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
    )


def _without_access(config: Config) -> Config:
    """Return a configuration with models that say nothing of tenants: a reload applies that."""
    models = tuple(structs.replace(one, tenants=None) for one in config.models)
    return structs.replace(config, models=models)


FILE_BYTES_MAX = 1_024
"""Bytes read of a key's file."""


def with_digests(tenants: Sequence[DeclaredTenant]) -> list[DeclaredTenant]:
    """Return the tenants with the digest of each key in place of its file. Reads the files.

    Raises ConfigError for a file that is unreadable, readable by other users, or without a key.
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
        raise ConfigError(_key_error(tenant, key, f"cannot be read: {error.strerror}")) from error
    except ValueError as error:
        raise ConfigError(_key_error(tenant, key, str(error))) from error
    return structs.replace(key, sha256=digest_of(text).hex(), file="")


def _read(name: str) -> str:
    """Return the key in a file. Raises OSError, and ValueError for an unsafe or wrong file."""
    # Opening a pipe without O_NONBLOCK could block for ever.
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise ValueError("is not a regular file")
        if mode & 0o077:
            raise ValueError("is readable by other users; run chmod 600 on it")
        text = os.read(descriptor, FILE_BYTES_MAX).decode("ascii", errors="replace").strip()
    finally:
        os.close(descriptor)
    if not is_key(text):
        raise ValueError("has no key; expected tl- and 43 letters and digits")
    return text


def _key_error(tenant: str, key: DeclaredKey, problem: str) -> str:
    return f"tenants: {tenant}: key {key.label[:80]!r}: {key.file} {problem}"
