"""`trunkline shared-scope`: caches that several tenants share.

The command works while a server runs, which sees the change within a second.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from msgspec import structs

from gateway.cli.arguments import UsageError
from gateway.cli.database import command_actor, open_database
from gateway.cli.result import CommandCall, CommandResult, Entry, table_result
from tenancy.accounts.shared_scopes import ScopeTerms, list_scopes, remove_scope, set_scope
from tenancy.types import wall_ms


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments; without a name the command lists all scopes."""
    parser.add_argument("name", nargs="?", metavar="NAME")
    text = "tenant that owns the scope; its quota and bill"
    parser.add_argument("--owner", metavar="TENANT", help=text)
    text = "all members: TENANT/WORKSPACE, or TENANT for all its workspaces"
    parser.add_argument("--members", nargs="*", default=[], metavar="MEMBER", help=text)
    parser.add_argument("--remove", action="store_true", help="remove the scope")


def _run(call: CommandCall) -> CommandResult:
    """List scopes, create or change one, or remove it."""
    options = call.options
    name, owner = options.name, options.owner
    if options.remove and (owner is not None or options.members):
        raise UsageError("--remove is not allowed with --owner or --members")
    if name is None and (options.remove or owner is not None or options.members):
        raise UsageError(
            "NAME is required: trunkline shared-scope NAME --owner TENANT --members ..."
        )
    if name is not None and owner is None and not options.remove:
        raise UsageError("--owner TENANT or --remove is required")
    with open_database(call.config) as store:
        if options.remove:
            remove_scope(store, name, command_actor())
            return CommandResult(f"shared scope {name} removed", {"name": name, "removed": True})
        if name is not None:
            terms = ScopeTerms(name=name, owner=owner, members=tuple(options.members))
            scope = set_scope(store, wall_ms, terms, command_actor())
            text = f"shared scope {name} of {owner}: {' '.join(scope.members) or 'no members'}"
            return CommandResult(text, structs.asdict(scope))
        scopes = [structs.asdict(scope) for scope in list_scopes(store)]
    columns = ("name", "owner", "members", "is_declared")
    return table_result(scopes, columns=columns, none="no shared scopes")


COMMANDS: Mapping[str, Entry] = {"shared-scope": Entry(_add_arguments, _run)}
