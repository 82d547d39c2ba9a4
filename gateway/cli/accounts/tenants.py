"""`trunkline tenant`: tenants and their settings.

The commands work while a server runs, which knows a change when they return.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial

from msgspec import structs

from gateway.caching.floors import guaranteed_floors
from gateway.cli.arguments import (
    LIMITS,
    add_actions,
    add_limits,
    changes,
    named,
    number_or_none,
)
from gateway.cli.database import command_actor, open_database
from gateway.cli.result import CommandCall, CommandResult, Entry, Table, table_result
from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.tenants import (
    TenantRecord,
    change_tenant,
    create_tenant,
    find_tenant_record,
    list_tenant_records,
    read_floor_blocks_max,
    set_status,
    with_changes,
)
from tenancy.errors import BadName
from tenancy.pricing.rate_cards import is_tier_free
from tenancy.storage.interface import Store
from tenancy.types import AT_REST, FIDELITIES, Status, TenantSettings, wall_ms


def _add_actions(command: argparse.ArgumentParser) -> None:
    texts = {
        "create": "Create a tenant.",
        "list": "List tenants with their settings.",
        "set": "Change the given settings of a tenant.",
        "suspend": "Disable a tenant's keys within a second; running requests finish.",
        "resume": "Enable a suspended tenant's keys within a second.",
        "delete": "Delete a tenant and its data; ledger entries stay under a pseudonym.",
    }
    for action, parser in add_actions(command, texts).items():
        if action != "list":
            parser.add_argument("name")
        if action in ("create", "set"):
            _add_shares(parser)
            add_limits(parser)


def _add_shares(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tier", metavar="NAME", help="pricing tier")
    text = "guaranteed cache blocks"
    parser.add_argument("--floor", type=int, metavar="BLOCKS", help=text)
    text = "most cache blocks, or `none`"
    parser.add_argument("--ceiling", type=_blocks, metavar="BLOCKS", help=text)
    parser.add_argument("--weight", type=float, help="scheduling weight")
    parser.add_argument("--priority", type=int, help="scheduling priority; higher runs first")
    text = "allowed retention classes, comma-separated, or `all`"
    parser.add_argument("--classes", type=_classes, metavar="NAMES", help=text)
    text = "retention class of requests that name none, or `none`"
    parser.add_argument("--default-class", metavar="NAME", help=text)
    text = "how far copies below the device may be from what the model computed"
    parser.add_argument("--fidelity", choices=FIDELITIES, help=text)
    text = "where KV may rest: `local`, the server's disk; `remote`, its remote store, too; `never`"
    parser.add_argument("--at-rest", choices=AT_REST, help=text)
    text = "attention windows: `allowed`, `never`, or `window=W;sinks=S` for requests without one"
    parser.add_argument("--attention", metavar="WINDOW", help=text)
    text = "most promised blocks, or `none`"
    parser.add_argument("--promised", type=_blocks, metavar="BLOCKS", help=text)


@named("number of blocks", "a whole number, or none")
def _blocks(text: str) -> int | str:
    return number_or_none(text)


def _classes(text: str) -> tuple[str, ...] | str:
    return "none" if text == "all" else tuple(filter(None, text.split(",")))


SETTINGS = {
    "tier": "tier",
    "floor": "floor_blocks",
    "ceiling": "ceiling_blocks",
    "weight": "weight",
    "priority": "priority",
    "classes": "classes",
    "default_class": "default_class",
    "fidelity": "fidelity",
    "at_rest": "at_rest",
    "attention": "attention",
    "promised": "promised_blocks_max",
    **LIMITS,
}
"""Tenant settings by option name."""


def _create(call: CommandCall) -> CommandResult:
    name = call.options.name
    settings = with_changes(TenantSettings(), changes(call.options, SETTINGS))
    call.config.caching.check_settings(settings)
    with open_database(call.config, create=True) as store:
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


def _list(call: CommandCall) -> CommandResult:
    """List tenants with their settings; the text omits settings that no tenant has.

    If floors exceed the pool of the last started engine, the list has the blocks kept of each.
    """
    with open_database(call.config) as store:
        found = list_tenant_records(store)
        kept_floors = guaranteed_floors(found, read_floor_blocks_max(store))
    rows: Table = [
        {**_tenant_row(one), "floor_blocks_kept": kept_floors.get(one.tenant.name)} for one in found
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    set_ones = [name for name in names if any(row[name] is not None for row in rows)]
    return table_result(rows, columns=set_ones)


def _set(call: CommandCall) -> CommandResult:
    """Change the given settings."""
    name, given = call.options.name, changes(call.options, SETTINGS)
    if not given:
        raise BadName("nothing_to_set", "nothing to change: see `trunkline tenant set --help`")
    call.config.caching.check_settings(with_changes(TenantSettings(), given))
    with open_database(call.config) as store:
        change_tenant(store, name, given, by=command_actor())
        return _tenant_result(store, name, f"tenant {name} changed")


def _set_status(call: CommandCall, status: Status) -> CommandResult:
    """Suspend or resume a tenant."""
    name = call.options.name
    with open_database(call.config) as store:
        set_status(store, name, status, command_actor())
        return _tenant_result(store, name, f"tenant {name} is {status}")


def _delete(call: CommandCall) -> CommandResult:
    """Delete a tenant; its ledger entries stay under a pseudonym."""
    name = call.options.name
    with open_database(call.config) as store:
        pseudonym = delete_tenant(store, wall_ms, name, command_actor())
    entries = f"; its ledger entries stay, under {pseudonym}" if pseudonym else ""
    fields = {"name": name, "deleted": True, "pseudonym": pseudonym}
    return CommandResult(f"tenant {name} deleted{entries}", fields)


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


_ACTIONS: Mapping[str, Callable[[CommandCall], CommandResult]] = {
    "create": _create,
    "list": _list,
    "set": _set,
    "suspend": partial(_set_status, status="suspended"),
    "resume": partial(_set_status, status="active"),
    "delete": _delete,
}

COMMANDS: Mapping[str, Entry] = {
    "tenant": Entry(_add_actions, lambda call: _ACTIONS[call.options.action](call))
}
