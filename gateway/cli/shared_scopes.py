"""`trunkline shared-scope`: caches that several tenants share.

The command works while a server runs, which sees the change within a second.
"""

from __future__ import annotations

import argparse

from msgspec import structs

from gateway.cli.arguments import UsageError
from gateway.cli.database import command_actor, open_database
from gateway.cli.result import CommandResult, table_result
from gateway.config import Config
from gateway.ledger.metering import wall_ms
from tenancy.accounts.shared_scopes import ScopeTerms, list_scopes, remove_scope, set_scope


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments; without a name the command lists all scopes."""
    parser.add_argument("name", nargs="?", metavar="NAME")
    text = "tenant that owns the scope; its quota and bill"
    parser.add_argument("--owner", metavar="TENANT", help=text)
    text = "all members: TENANT/WORKSPACE, or TENANT for all its workspaces"
    parser.add_argument("--members", nargs="*", default=[], metavar="MEMBER", help=text)
    parser.add_argument("--remove", action="store_true", help="remove the scope")


def run(options: argparse.Namespace, config: Config) -> CommandResult:
    """List scopes, create or change one, or remove it."""
    name, owner = options.name, options.owner
    if options.remove and (owner is not None or options.members):
        raise UsageError("--remove is not allowed with --owner or --members")
    if name is None and (options.remove or owner is not None or options.members):
        raise UsageError(
            "NAME is required: trunkline shared-scope NAME --owner TENANT --members ..."
        )
    if name is not None and owner is None and not options.remove:
        raise UsageError("--owner TENANT or --remove is required")
    with open_database(config) as store:
        if options.remove:
            remove_scope(store, name, command_actor())
            return CommandResult(f"shared scope {name} removed", {"name": name, "removed": True})
        if name is not None:
            terms = ScopeTerms(name=name, owner=owner, members=tuple(options.members))
            scope = set_scope(store, wall_ms, terms, command_actor())
            text = f"shared scope {name} of {owner}: {' '.join(scope.members) or 'no members'}"
            return CommandResult(text, structs.asdict(scope))
        scopes = [structs.asdict(scope) for scope in list_scopes(store)]
    if not scopes:
        return CommandResult("no shared scopes", [])
    return table_result(scopes, shown=("name", "owner", "members", "is_declared"))
