"""`trunkline key`: keys of tenants and of administrators.

The commands work while a server runs, which knows a change when they return. A key is named by its
number, `key_id`, or by the prefix that lists show.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import msgspec
from msgspec import UNSET, UnsetType, structs

from gateway.cli.arguments import LIMITS, add_actions, add_limits, changes
from gateway.cli.database import command_actor, open_database
from gateway.cli.result import CommandCall, CommandResult, Entry, Table, table_result
from gateway.cli.times import parse_duration, show_minute
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
from tenancy.accounts.tenants import find_tenant
from tenancy.errors import BadName
from tenancy.types import CACHE_KEY_MODES, TOLERANCE_MODES, Limits, wall_ms


def _add_actions(command: argparse.ArgumentParser) -> None:
    texts = {
        "create": "Create a key and print it, once.",
        "list": "List keys with their settings.",
        "set": "Change the given settings of a key.",
        "rotate": "Create and print a replacement; the old key expires after a grace period.",
        "revoke": "Disable a key within a second, for good.",
    }
    actions = add_actions(command, texts)
    create, change = actions["create"], actions["set"]
    for action in ("set", "rotate", "revoke"):
        actions[action].add_argument("key", help="key id, or the prefix that lists show")
    owner = create.add_mutually_exclusive_group(required=True)
    owner.add_argument("--tenant", metavar="NAME")
    owner.add_argument("--admin", action="store_true", help="create an administrator's key")
    text = "cache scope inside the tenant (default: default)"
    create.add_argument("--workspace", default="default", metavar="NAME", help=text)
    create.add_argument("--label", default="", help="label shown in lists")
    text = "lifetime: 90d, 12h, 30m (default: unlimited)"
    create.add_argument("--expires", metavar="TIME", help=text)
    change.add_argument("--label", help="label shown in lists")
    scopes = (
        "comma-separated scopes: inference, usage, cache; of an administrator's key: read, tenants,"
        " money, erase"
    )
    tolerance = "how to treat fields that are not honoured"
    create.add_argument("--scopes", metavar="NAMES", help=f"{scopes} (default: all)")
    text = f"{tolerance} (default: as the server)"
    create.add_argument("--tolerance", choices=TOLERANCE_MODES, help=text)
    cache_key = "what prompt_cache_key means: a hint, or a namespace of its own"
    text = f"{cache_key} (default: as the server)"
    create.add_argument("--cache-key", choices=CACHE_KEY_MODES, help=text)
    add_limits(create)
    change.add_argument("--scopes", metavar="NAMES", help=scopes)
    text = f"{tolerance}; server: as the server"
    change.add_argument("--tolerance", choices=(*TOLERANCE_MODES, "server"), help=text)
    text = f"{cache_key}; server: as the server"
    change.add_argument("--cache-key", choices=(*CACHE_KEY_MODES, "server"), help=text)
    add_limits(change)
    actions["list"].add_argument("--tenant", metavar="NAME")
    text = "grace period of the old key: 30m, 24h, 7d (default: 24h)"
    actions["rotate"].add_argument("--grace", default="24h", metavar="TIME", help=text)


def _create(call: CommandCall) -> CommandResult:
    """Create a key. The text is only the key, for `KEY=$(trunkline key create --tenant NAME)`.

    The data has the key's number, `key_id`.
    """
    options = call.options
    lives_ms = None if options.expires is None else parse_duration(options.expires, "--expires")
    scopes = None if options.scopes is None else options.scopes.split(",")
    limits = changes(options, LIMITS)
    if options.admin and (limits or options.workspace != "default"):
        raise BadName("bad_scopes", "--admin is not allowed with a workspace or limits")
    with open_database(call.config, create=True) as store:
        by = command_actor()
        if options.admin:
            key = create_admin_key(
                store, wall_ms, label=options.label, lives_ms=lives_ms, scopes=scopes, by=by
            )
        else:
            found = find_tenant(store, options.tenant)
            key = create_key(
                store,
                wall_ms,
                found.tenant_id,
                workspace=options.workspace,
                label=options.label,
                lives_ms=lives_ms,
                scopes=SCOPES if scopes is None else scopes,
                limits=_limits(Limits(), limits),
                by=by,
                tolerance=options.tolerance,
                cache_key=options.cache_key,
            )
        return CommandResult(key, {"key": key, **_key_row(find_key(store, key))})


def _list(call: CommandCall) -> CommandResult:
    """List keys by prefix, without secrets."""
    tenant = call.options.tenant
    with open_database(call.config) as store:
        if tenant is not None:
            find_tenant(store, tenant)
        keys = list_keys(store, tenant)
    shown: Table = []
    for row in map(_key_row, keys):
        limits = msgspec.json.encode(row.pop("limits")).decode().strip("{}").replace('"', "")
        instants = {
            name.removesuffix("_ms"): show_minute(row.pop(name))
            for name in ("created_ms", "expires_ms", "revoked_ms")
        }
        shown.append({**row, **instants, "limits": limits or None})
    return table_result([_key_row(key) for key in keys], shown=shown)


_NO_MODE: Mapping[str | None, UnsetType | None] = {None: UNSET, "server": None}
"""The change of a key's mode by an option's value that names none: no option changes nothing."""


def _set(call: CommandCall) -> CommandResult:
    """Change the given settings. "server" removes the key's own tolerance or meaning of
    `prompt_cache_key`."""
    options = call.options
    label, scopes, limits = options.label, options.scopes, changes(options, LIMITS)
    modes = options.tolerance, options.cache_key
    if {label, scopes, *modes} == {None} and not limits:
        raise BadName("nothing_to_set", "nothing to change: see `trunkline key set --help`")
    with open_database(call.config) as store:
        old = find_key(store, options.key)
        key = change_key(
            store,
            str(old.key_id),
            label=label,
            scopes=None if scopes is None else scopes.split(","),
            limits=_limits(old.limits, limits) if limits else None,
            by=command_actor(),
            tolerance=_NO_MODE.get(modes[0], modes[0]),
            cache_key=_NO_MODE.get(modes[1], modes[1]),
        )
    return CommandResult(f"key {key.shown}… changed", _key_row(key))


def _rotate(call: CommandCall) -> CommandResult:
    """Create a replacement, which is all of the text; the old key stays valid for the grace
    period."""
    options = call.options
    grace_ms = 0 if options.grace == "0" else parse_duration(options.grace, "--grace")
    with open_database(call.config) as store:
        key, new, old = rotate_key(store, wall_ms, options.key, grace_ms, command_actor())
    return CommandResult(key, {"key": key, "new": _key_row(new), "old": _key_row(old)})


def _revoke(call: CommandCall) -> CommandResult:
    with open_database(call.config) as store:
        key = revoke_key(store, wall_ms, call.options.key, command_actor())
    owner = f"of {key.tenant}" if key.tenant else "of an administrator"
    return CommandResult(f"key {key.shown}… {owner} revoked", _key_row(key))


def _key_row(key: Key) -> dict[str, object]:
    row = {**msgspec.to_builtins(key), "shown": f"{key.shown}…"}
    row["declared"] = row.pop("is_declared")
    return row


def _limits(old: Limits, changes: Mapping[str, object]) -> Limits:
    """Return the old limits with the changed ones replaced. `changes`: integers or None."""
    return msgspec.convert({**structs.asdict(old), **changes}, Limits)


_ACTIONS: Mapping[str, Callable[[CommandCall], CommandResult]] = {
    "create": _create,
    "list": _list,
    "set": _set,
    "rotate": _rotate,
    "revoke": _revoke,
}

COMMANDS: Mapping[str, Entry] = {
    "key": Entry(_add_actions, lambda call: _ACTIONS[call.options.action](call))
}
