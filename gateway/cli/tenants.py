"""`trunkline tenant`, `key` and `usage`: who may use this server, and what they used. They work
beside a running server, which sees the change within a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec
from msgspec import structs

from gateway.caching.floors import guaranteed_floors
from gateway.cli.database import opened
from gateway.cli.result import CommandResult, tabled
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
from tenancy.types import Limits, Status, TenantSettings

_UNITS_MS = {"m": 60_000, "h": 3_600_000, "d": 86_400_000}
DAYS_MAX = 36_500


def tenant_create(config: Config, name: str, changes: Mapping[str, object]) -> CommandResult:
    """Make a tenant."""
    settings = with_changes(TenantSettings(), changes)
    config.caching.check_classes(settings.classes or ())
    with opened(config) as store:
        create_tenant(
            store, wall_ms, name, settings.policy, tier=settings.tier, limits=settings.limits
        )
        text = f"tenant {name} created; give it a key with: trunkline key create --tenant {name}"
        return _about(store, name, text)


def tenant_list(config: Config) -> CommandResult:
    """All tenants with what is set of them; for a person without what is set nowhere. Where floors
    ask for more than the engine that was started last can keep, with what it keeps of each."""
    with opened(config) as store:
        found = list_tenant_records(store)
        cut = guaranteed_floors(found, read_floor_blocks_max(store))
    rows = [{**_row(one), "floor_blocks_kept": cut.get(one.tenant.name)} for one in found]
    unset = {name for name in (rows[0] if rows else ()) if all(row[name] is None for row in rows)}
    shown = [{n: v for n, v in row.items() if n not in unset} for row in rows]
    return structs.replace(tabled(rows), text=tabled(shown).text)


def tenant_set(config: Config, name: str, changes: Mapping[str, object]) -> CommandResult:
    """Change what is named."""
    if not changes:
        raise BadName("nothing_to_set", "say what to set: `trunkline tenant set --help` lists it")
    config.caching.check_classes(with_changes(TenantSettings(), changes).classes or ())
    with opened(config) as store:
        change_tenant(store, name, changes)
        return _about(store, name, f"tenant {name} changed")


def tenant_status(config: Config, name: str, status: Status) -> CommandResult:
    """Suspend or resume."""
    with opened(config) as store:
        set_status(store, name, status)
        return _about(store, name, f"tenant {name} is {status}")


def tenant_delete(config: Config, name: str) -> CommandResult:
    """Delete one; its money rows stay, under a pseudonym."""
    with opened(config) as store:
        pseudonym = delete_tenant(store, wall_ms, name)
    guaranteed_floors = f"; its entries stay, as those of {pseudonym}" if pseudonym else ""
    fields = {"name": name, "deleted": True, "pseudonym": pseudonym}
    return CommandResult(f"tenant {name} deleted{guaranteed_floors}", fields)


def key_create(
    config: Config,
    tenant: str | None,
    workspace: str,
    label: str,
    expires: str | None,
    scopes: str | None,
    limits: Mapping[str, object],
) -> CommandResult:
    """A new key: alone in words, so that `KEY=$(trunkline key create --tenant NAME)` works.

    Without a tenant it is an administrator's.
    """
    lives_ms = None if expires is None else _milliseconds(expires, "--expires")
    if tenant is None:
        if scopes is not None or limits or workspace != "default":
            raise BadName("bad_scopes", "an administrator's key has no workspace, scopes or limits")
        with opened(config) as store:
            key = create_admin_key(store, wall_ms, label=label, lives_ms=lives_ms)
        return CommandResult(key, {"key": key, "scopes": ["admin"]})
    with opened(config) as store:
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
        )
    return CommandResult(key, {"key": key, "tenant": tenant, "workspace": workspace})


def key_list(config: Config, tenant: str | None) -> CommandResult:
    """Keys as they may be shown: never whole."""
    with opened(config) as store:
        if tenant is not None:
            find_tenant(store, tenant)
        keys = list_keys(store, tenant)
    people = []
    for row in map(_key_row, keys):
        limits = msgspec.json.encode(row.pop("limits")).decode().strip("{}").replace('"', "")
        instants = {
            name.removesuffix("_ms"): _instant(row.pop(name))
            for name in ("created_ms", "expires_ms", "revoked_ms")
        }
        people.append({**row, **instants, "limits": limits or None})
    return structs.replace(tabled([_key_row(key) for key in keys]), text=tabled(people).text)


def key_set(
    config: Config,
    which: str,
    label: str | None,
    scopes: str | None,
    limits: Mapping[str, object],
) -> CommandResult:
    """Change what is named."""
    if label is None and scopes is None and not limits:
        raise BadName("nothing_to_set", "say what to set: `trunkline key set --help` lists it")
    with opened(config) as store:
        old = find_key(store, which)
        key = change_key(
            store,
            str(old.key_id),
            label=label,
            scopes=None if scopes is None else scopes.split(","),
            limits=_limits(old.limits, limits) if limits else None,
        )
    return CommandResult(f"key {key.shown}… changed", _key_row(key))


def key_rotate(config: Config, which: str, grace: str) -> CommandResult:
    """A new key, alone in words; the old one works on for a while."""
    grace_ms = 0 if grace == "0" else _milliseconds(grace, "--grace")
    with opened(config) as store:
        key, new, old = rotate_key(store, wall_ms, which, grace_ms)
    return CommandResult(key, {"key": key, "new": _key_row(new), "old": _key_row(old)})


def key_revoke(config: Config, which: str) -> CommandResult:
    """A key stops working within a second."""
    with opened(config) as store:
        key = revoke_key(store, wall_ms, which)
    whose = f"of {key.tenant}" if key.tenant else "of an administrator"
    return CommandResult(f"key {key.shown}… {whose} revoked", _key_row(key))


_USAGE = (
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
"""What a person is shown of a sum. Charge, storage and adjustments add up to the bill."""


def usage(config: Config, tenant: str | None, days: int | None) -> CommandResult:
    """Sums of ledger entries, of their adjustments and of what was held, by tenant."""
    if days is not None and not 1 <= days <= DAYS_MAX:
        raise BadName("bad_time", f"--days: {days} is not between 1 and {DAYS_MAX}")
    since_ms = 0 if days is None else wall_ms() - days * _UNITS_MS["d"]
    with opened(config, makes=False) as store:
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
    return tabled(rows, shown=_USAGE)


def _about(store: Store, name: str, text: str) -> CommandResult:
    """With a word about it if its floor cannot be kept, or if it is charged nothing."""
    found = find_tenant_record(store, name)
    most = read_floor_blocks_max(store)
    cut = guaranteed_floors(list_tenant_records(store), most).get(name)
    if cut is not None and cut < found.policy.floor_blocks:
        text += (
            f"; of its floor of {found.policy.floor_blocks} blocks {cut} are kept: floors together"
            f" may take {most} of the pool"
        )
    if is_tier_free(store, wall_ms, found.tenant.tier):
        text += f"; no rate card holds for its tier {found.tenant.tier!r}: it is charged nothing"
    return CommandResult(text, _row(found))


def _row(one: TenantRecord) -> dict[str, object]:
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
    """What is named changes. The command line's values are whole numbers or None."""
    return msgspec.convert({**structs.asdict(old), **changes}, Limits)


def _instant(at_ms: object) -> str | None:
    if not isinstance(at_ms, int):
        return None
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")


def _milliseconds(text: str, what: str) -> int:
    number, unit = text[:-1], text[-1:]
    is_number = number.isascii() and number.isdigit() and len(number) <= 6
    if not is_number or unit not in _UNITS_MS or not int(number):
        raise BadName("bad_time", f"{what}: {text!r} is no time; write 30m, 12h or 90d")
    return int(number) * _UNITS_MS[unit]
