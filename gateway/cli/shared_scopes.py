"""`trunkline shared-scope`: caches that several tenants share. It works beside a running server,
which sees the change within a second.
"""

from __future__ import annotations

import argparse

from msgspec import structs

from gateway.cli.arguments import UsageError
from gateway.cli.database import opened
from gateway.cli.result import CommandResult, tabled
from gateway.config import Config
from gateway.ledger.metering import wall_ms
from tenancy.accounts.shared_scopes import ScopeTerms, list_scopes, remove_scope, set_scope


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Without a name: all of them."""
    parser.add_argument("name", nargs="?", metavar="NAME")
    text = "the tenant that pays for what it holds, within its quota"
    parser.add_argument("--owner", metavar="TENANT", help=text)
    text = "all who share it: TENANT/WORKSPACE, or TENANT for all its workspaces"
    parser.add_argument("--members", nargs="*", default=[], metavar="MEMBER", help=text)
    parser.add_argument("--remove", action="store_true", help="its members share no more")


def run(options: argparse.Namespace, config: Config) -> CommandResult:
    """List them, make or change one, or remove it."""
    name, owner = options.name, options.owner
    if options.remove and (owner is not None or options.members):
        raise UsageError("--remove takes no --owner and no --members")
    if name is None and (options.remove or owner is not None or options.members):
        raise UsageError("say which: trunkline shared-scope NAME --owner TENANT --members ...")
    if name is not None and owner is None and not options.remove:
        raise UsageError("say whose it is: --owner TENANT, or --remove it")
    with opened(config) as store:
        if options.remove:
            remove_scope(store, name)
            return CommandResult(f"shared scope {name} removed", {"name": name, "removed": True})
        if name is not None:
            terms = ScopeTerms(name=name, owner=owner, members=tuple(options.members))
            scope = set_scope(store, wall_ms, terms)
            text = f"shared scope {name} of {owner}: {' '.join(scope.members) or 'nobody yet'}"
            return CommandResult(text, structs.asdict(scope))
        scopes = [structs.asdict(scope) for scope in list_scopes(store)]
    if not scopes:
        return CommandResult("no shared scopes", [])
    return tabled(scopes, shown=("name", "owner", "members", "is_declared"))
