"""`trunkline tenant`, `key` and `usage`: tenants, their keys and their usage.

The commands work while a server runs, which sees a change within a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec
from msgspec import UNSET, UnsetType, structs

from gateway.caching.floors import guaranteed_floors
from gateway.cli.database import command_actor, open_database
from gateway.cli.result import CommandResult, table_result
from gateway.config import Config
from gateway.ledger.metering import wall_ms
from tenancy.accounting.focus_export import storage_by_tenant
from tenancy.accounting.usage import UsageTotal
from tenancy.accounting.usage import usage as total_usage
from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.keys import (
    SCOPES,
    Key,
    change_key,
    create_admin_key,
    create_key,
    find_key,
    list_keys,
    revoke_key,
    rotate_key,
)
from tenancy.accounts.tenants import (
    TenantRecord,
    change_tenant,
    create_tenant,
    find_tenant,
    find_tenant_record,
    list_tenant_records,
    read_floor_blocks_max,
    set_status,
    with_changes,
)
from tenancy.errors import BadName
from tenancy.ledger.epochs import ledger_epoch
from tenancy.pricing.charges import format_dollars
from tenancy.pricing.rate_cards import is_tier_free
from tenancy.storage.interface import Store
from tenancy.types import (
    TOLERANCE_MODES,
    Limits,
    Status,
    TenantSettings,
    ToleranceMode,
)

_UNITS_MS = {"m": 60_000, "h": 3_600_000, "d": 86_400_000}
DAYS_MAX = 36_500
"""Longest period of `usage`, in days."""


def tenant_create(config: Config, name: str, changes: Mapping[str, object]) -> CommandResult:
    """Create a tenant."""
    settings = with_changes(TenantSettings(), changes)
    config.caching.check_classes(settings.classes or ())
    with open_database(config) as store:
        create_tenant(
            store,
            wall_ms,
            name,
            settings.policy,
            tier=settings.tier,
            limits=settings.limits,
            by=command_actor(),
        )
        text = f"tenant {name} created; give it a key with: trunkline key create --tenant {name}"
        return _tenant_result(store, name, text)


def tenant_list(config: Config) -> CommandResult:
    """List tenants with their settings; the text omits settings that no tenant has.

    If floors exceed the pool of the last started engine, the list has the blocks kept of each.
    """
    with open_database(config) as store:
        found = list_tenant_records(store)
        kept_floors = guaranteed_floors(found, read_floor_blocks_max(store))
    rows = [
        {**_tenant_row(one), "floor_blocks_kept": kept_floors.get(one.tenant.name)} for one in found
    ]
    unset = {name for name in (rows[0] if rows else ()) if all(row[name] is None for row in rows)}
    shown = [{n: v for n, v in row.items() if n not in unset} for row in rows]
    return structs.replace(table_result(rows), text=table_result(shown).text)


def tenant_set(config: Config, name: str, changes: Mapping[str, object]) -> CommandResult:
    """Change the given settings."""
    if not changes:
        raise BadName("nothing_to_set", "nothing to change: see `trunkline tenant set --help`")
    config.caching.check_classes(with_changes(TenantSettings(), changes).classes or ())
    with open_database(config) as store:
        change_tenant(store, name, changes, by=command_actor())
        return _tenant_result(store, name, f"tenant {name} changed")


def tenant_status(config: Config, name: str, status: Status) -> CommandResult:
    """Suspend or resume a tenant."""
    with open_database(config) as store:
        set_status(store, name, status, command_actor())
        return _tenant_result(store, name, f"tenant {name} is {status}")


def tenant_delete(config: Config, name: str) -> CommandResult:
    """Delete a tenant; its ledger entries stay under a pseudonym."""
    with open_database(config) as store:
        pseudonym = delete_tenant(store, wall_ms, name, command_actor())
    entries = f"; its ledger entries stay, under {pseudonym}" if pseudonym else ""
    fields = {"name": name, "deleted": True, "pseudonym": pseudonym}
    return CommandResult(f"tenant {name} deleted{entries}", fields)


def key_create(
    config: Config,
    tenant: str | None,
    workspace: str,
    label: str,
    expires: str | None,
    scopes: str | None,
    limits: Mapping[str, object],
    tolerance: ToleranceMode | None = None,
) -> CommandResult:
    """Create a key. The text is the key alone, for `KEY=$(trunkline key create --tenant NAME)`.

    Without a tenant it is an administrator's key.
    """
    lives_ms = None if expires is None else _milliseconds(expires, "--expires")
    if tenant is None:
        if limits or workspace != "default":
            raise BadName("bad_scopes", "--admin is not allowed with a workspace or limits")
        named = None if scopes is None else scopes.split(",")
        with open_database(config) as store:
            by = command_actor()
            key = create_admin_key(
                store, wall_ms, label=label, lives_ms=lives_ms, scopes=named, by=by
            )
            return CommandResult(key, {"key": key, "scopes": list(find_key(store, key).scopes)})
    with open_database(config) as store:
        found, _ = find_tenant(store, tenant)
        key = create_key(
            store,
            wall_ms,
            found.tenant_id,
            workspace=workspace,
            label=label,
            lives_ms=lives_ms,
            scopes=SCOPES if scopes is None else scopes.split(","),
            limits=_limits(Limits(), limits),
            by=command_actor(),
            tolerance=tolerance,
        )
    return CommandResult(key, {"key": key, "tenant": tenant, "workspace": workspace})


def key_list(config: Config, tenant: str | None) -> CommandResult:
    """List keys by prefix, without secrets."""
    with open_database(config) as store:
        if tenant is not None:
            find_tenant(store, tenant)
        keys = list_keys(store, tenant)
    table = []
    for row in map(_key_row, keys):
        limits = msgspec.json.encode(row.pop("limits")).decode().strip("{}").replace('"', "")
        instants = {
            name.removesuffix("_ms"): _instant(row.pop(name))
            for name in ("created_ms", "expires_ms", "revoked_ms")
        }
        table.append({**row, **instants, "limits": limits or None})
    return structs.replace(
        table_result([_key_row(key) for key in keys]), text=table_result(table).text
    )


_KEY_TOLERANCES: Mapping[str | None, ToleranceMode | UnsetType | None] = {
    None: UNSET,
    "server": None,
    **{mode: mode for mode in TOLERANCE_MODES},
}
"""The change of a key's tolerance by the option's value; no option changes nothing."""


def key_set(
    config: Config,
    which: str,
    label: str | None,
    scopes: str | None,
    limits: Mapping[str, object],
    tolerance: str | None = None,
) -> CommandResult:
    """Change the given settings. The tolerance "server" removes the key's own."""
    if label is None and scopes is None and tolerance is None and not limits:
        raise BadName("nothing_to_set", "nothing to change: see `trunkline key set --help`")
    with open_database(config) as store:
        old = find_key(store, which)
        key = change_key(
            store,
            str(old.key_id),
            label=label,
            scopes=None if scopes is None else scopes.split(","),
            limits=_limits(old.limits, limits) if limits else None,
            by=command_actor(),
            tolerance=_KEY_TOLERANCES[tolerance],
        )
    return CommandResult(f"key {key.shown}… changed", _key_row(key))


def key_rotate(config: Config, which: str, grace: str) -> CommandResult:
    """Create a replacement, alone in the text; the old key stays valid for the grace period."""
    grace_ms = 0 if grace == "0" else _milliseconds(grace, "--grace")
    with open_database(config) as store:
        key, new, old = rotate_key(store, wall_ms, which, grace_ms, command_actor())
    return CommandResult(key, {"key": key, "new": _key_row(new), "old": _key_row(old)})


def key_revoke(config: Config, which: str) -> CommandResult:
    """Disable a key within a second."""
    with open_database(config) as store:
        key = revoke_key(store, wall_ms, which, command_actor())
    owner = f"of {key.tenant}" if key.tenant else "of an administrator"
    return CommandResult(f"key {key.shown}… {owner} revoked", _key_row(key))


_USAGE_COLUMNS = (
    "tenant",
    "requests",
    "prompt_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "fresh_tokens",
    "output_tokens",
    "charge_usd",
    "storage_usd",
    "adjusted_usd",
    "saved_usd",
)
"""Columns of usage in the printed table. The bill is charge, storage and adjustments."""


def usage(config: Config, tenant: str | None, days: int | None) -> CommandResult:
    """Return sums of ledger entries, adjustments and storage by tenant."""
    if days is not None and not 1 <= days <= DAYS_MAX:
        raise BadName("bad_time", f"--days: {days} is out of range; expected 1 to {DAYS_MAX}")
    since_ms = 0 if days is None else wall_ms() - days * _UNITS_MS["d"]
    with open_database(config, create=False) as store:
        if tenant is not None:
            find_tenant(store, tenant)
        totals = {
            total.tenant: total for total in total_usage(store, tenant=tenant, since_ms=since_ms)
        }
        held = storage_by_tenant(store, tenant, since_ms, None)
        epoch = ledger_epoch(store).number
    rows = []
    for name in sorted(totals.keys() | held.keys()):
        row = structs.asdict(totals.get(name, UsageTotal(name)))
        row |= {"storage_pico": held.get(name, 0), "ledger_epoch": epoch}
        for money in ("charge", "storage", "adjusted", "saved"):
            row[f"{money}_usd"] = format_dollars(int(row[f"{money}_pico"]))
        rows.append(row)
    return table_result(rows, shown=_USAGE_COLUMNS)


def _tenant_result(store: Store, name: str, text: str) -> CommandResult:
    """Return the tenant, with a warning if its floor cannot be kept or no rate card applies."""
    found = find_tenant_record(store, name)
    blocks_max = read_floor_blocks_max(store)
    kept_floor = guaranteed_floors(list_tenant_records(store), blocks_max).get(name)
    if kept_floor is not None and kept_floor < found.policy.floor_blocks:
        text += (
            f"; {kept_floor} of its {found.policy.floor_blocks} floor blocks are kept: all floors"
            f" together may take {blocks_max} blocks"
        )
    if is_tier_free(store, wall_ms, found.tenant.tier):
        text += f"; no rate card applies to tier {found.tenant.tier!r}: nothing is charged"
    return CommandResult(text, _tenant_row(found))


def _tenant_row(one: TenantRecord) -> dict[str, object]:
    tenant = one.tenant
    return {
        "name": tenant.name,
        "status": tenant.status,
        "declared": tenant.is_declared,
        **structs.asdict(one.settings),
    }


def _key_row(key: Key) -> dict[str, object]:
    row = {**msgspec.to_builtins(key), "shown": f"{key.shown}…"}
    row["declared"] = row.pop("is_declared")
    return row


def _limits(old: Limits, changes: Mapping[str, object]) -> Limits:
    """Return the old limits with the changed ones replaced. `changes`: integers or None."""
    return msgspec.convert({**structs.asdict(old), **changes}, Limits)


def _instant(at_ms: object) -> str | None:
    if not isinstance(at_ms, int):
        return None
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")


def _milliseconds(text: str, what: str) -> int:
    number, unit = text[:-1], text[-1:]
    is_number = number.isascii() and number.isdigit() and len(number) <= 6
    if not is_number or unit not in _UNITS_MS or not int(number):
        raise BadName("bad_time", f"{what}: invalid time {text!r}: expected 30m, 12h or 90d")
    return int(number) * _UNITS_MS[unit]
