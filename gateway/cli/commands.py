"""The commands by name: their help, and the module that is imported when a command is called.

Each module has `COMMANDS`, its entries by name. A command pays only for its own imports.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class Command(Struct, frozen=True):
    """A command's help, and its module below `gateway.cli`."""

    text: str
    module: str
    has_actions: bool = False
    """Its first argument is an action with options."""


def version_text() -> str:
    """Return the program's name and version."""
    from importlib import metadata  # a quarter of the time that `trunkline --help` takes

    return f"trunkline {metadata.version('trunkline')}"


COMMANDS: Mapping[str, Command] = {
    "serve": Command("Run the gateway and its engine.", "serve"),
    "pull": Command("Fetch a model.", "serve"),
    "check-config": Command("Print every setting and its source.", "program"),
    "doctor": Command("Check what a server needs, and say what to do.", "doctor.command"),
    "plan": Command("Say which models fit which GPUs, and how much KV remains.", "doctor.gpus"),
    "version": Command("Print the version.", "program"),
    "completion": Command("Print the completion script of a shell.", "program"),
    "tenant": Command(
        "Create, list, change, suspend, resume and delete tenants.",
        "accounts.tenants",
        has_actions=True,
    ),
    "key": Command(
        "Create, list, change, rotate and revoke keys.", "accounts.keys", has_actions=True
    ),
    "usage": Command("Print usage by tenant, key, model, user, day or hour.", "ledger.usage"),
    "prices": Command("List, add and end rate cards.", "ledger.prices"),
    "budget": Command("List budgets, or set one.", "ledger.budgets"),
    "adjust": Command("Credit or debit a ledger entry.", "ledger.books"),
    "close": Command("Close days of the ledger.", "ledger.books"),
    "check-books": Command("Recompute every sum, chain and charge of the ledger.", "ledger.books"),
    "reconcile": Command("Compare the token counts of ledger, engine and metrics.", "ledger.books"),
    "export": Command("Export the ledger as CSV, Parquet, CloudEvents or FOCUS.", "ledger.exports"),
    "backup": Command("Copy the database to a file; a server may run.", "ledger.backups"),
    "restore": Command("Replace the database by a backup; no server may run.", "ledger.backups"),
    "move-database": Command(
        "Move the database from a file to a PostgreSQL server.", "ledger.backups"
    ),
    "shared-scope": Command(
        "List, create, change or remove caches that tenants share.", "accounts.shared_scopes"
    ),
    "levels": Command(
        "Show the levels of the cache; make, verify, seal or empty the disk.",
        "levels",
        has_actions=True,
    ),
    "engine": Command(
        "Keep an engine for gateways elsewhere; drain and undrain it.",
        "fleet.engine",
        has_actions=True,
    ),
    "fleet": Command(
        "Make a fleet's certificates; keep its engines on Ray; explain where a request went.",
        "fleet.fleet",
        has_actions=True,
    ),
    "audit": Command(
        "List changes to tenants, keys, prices, budgets and caches.", "accounts.audit"
    ),
    "advise": Command("Say which prompts are paid for twice, why, and what to change.", "findings"),
    "check-prompt": Command("Say where two request bodies part, and what that costs.", "findings"),
    "openapi": Command("Print the OpenAPI document of a listener.", "openapi"),
    "bench": Command("Measure an endpoint, or a server started for it.", "benchmarks"),
    "replay": Command("Replay a recorded trace against an endpoint.", "benchmarks"),
    "simulate": Command("Simulate a fleet of engines under traffic.", "benchmarks"),
}
