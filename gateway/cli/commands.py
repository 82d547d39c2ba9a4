"""The commands by name: their help, and the module that is imported when a command is called.

Each module has `COMMANDS`, its entries by name. A command pays only for its own imports.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class Command(Struct, frozen=True):
    """A command's help and module. `has_actions`: its first argument is an action with options."""

    text: str
    module: str
    has_actions: bool = False


def version_text() -> str:
    """Return the program's name and version."""
    from importlib import metadata  # a quarter of the time that `trunkline --help` takes

    return f"trunkline {metadata.version('trunkline')}"


COMMANDS: Mapping[str, Command] = {
    "serve": Command("Run the gateway and its engine.", "gateway.cli.serve"),
    "pull": Command("Fetch a model.", "gateway.cli.serve"),
    "check-config": Command("Print every setting and its source.", "gateway.cli.program"),
    "doctor": Command("Check what a server needs, and say what to do.", "gateway.cli.doctor"),
    "version": Command("Print the version.", "gateway.cli.program"),
    "completion": Command("Print the completion of a shell.", "gateway.cli.program"),
    "tenant": Command(
        "Create, list, change, suspend, resume and delete tenants.",
        "gateway.cli.tenants",
        has_actions=True,
    ),
    "key": Command(
        "Create, list, change, rotate and revoke keys.", "gateway.cli.keys", has_actions=True
    ),
    "usage": Command("Print usage by tenant, key, model, day or hour.", "gateway.cli.usage"),
    "prices": Command("List rate cards, or add one.", "gateway.cli.billing"),
    "budget": Command("List budgets, or set one.", "gateway.cli.billing"),
    "adjust": Command("Credit or debit a ledger entry.", "gateway.cli.billing"),
    "close": Command("Close days of the ledger.", "gateway.cli.billing"),
    "check-books": Command(
        "Recompute every sum, chain and charge of the ledger.", "gateway.cli.billing"
    ),
    "reconcile": Command(
        "Compare the token counts of ledger, engine and metrics.", "gateway.cli.billing"
    ),
    "export": Command(
        "Export the ledger as CSV, Parquet, CloudEvents or FOCUS.", "gateway.cli.billing"
    ),
    "backup": Command("Copy the database to a file; a server may run.", "gateway.cli.backups"),
    "restore": Command(
        "Replace the database by a backup; no server may run.", "gateway.cli.backups"
    ),
    "move-database": Command(
        "Move the ledger from a file to a PostgreSQL server.", "gateway.cli.backups"
    ),
    "shared-scope": Command(
        "List, create, change or remove caches that tenants share.", "gateway.cli.shared_scopes"
    ),
    "levels": Command(
        "Show the levels of the cache; make, verify, seal or empty the disk.",
        "gateway.cli.levels",
        has_actions=True,
    ),
    "audit": Command(
        "List changes of tenants, keys, prices, budgets and caches.", "gateway.cli.audit"
    ),
    "advise": Command("Say what prompts cost twice, and what to change.", "gateway.cli.findings"),
    "check-prompt": Command(
        "Say where two request bodies part, and what that costs.", "gateway.cli.findings"
    ),
    "openapi": Command("Print the OpenAPI document of a listener.", "gateway.cli.openapi"),
    "bench": Command("Measure an endpoint, or a server started for it.", "gateway.cli.benchmarks"),
    "replay": Command("Replay a recorded trace against an endpoint.", "gateway.cli.benchmarks"),
}
