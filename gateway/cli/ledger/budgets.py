"""`trunkline budget`: lists budgets with what is spent of them, or sets one, in decimal dollars."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from decimal import Decimal

from gateway.cli.arguments import UsageError
from gateway.cli.database import command_actor, open_database
from gateway.cli.ledger.amounts import amount_of_dollars, whole_micros
from gateway.cli.result import (
    CommandCall,
    CommandResult,
    Entry,
    Table,
    table_result,
)
from gateway.cli.times import show_second
from tenancy.accounts.keys import Key, list_keys
from tenancy.accounts.tenants import find_tenant, list_tenants
from tenancy.pricing.budgets import Budget, budget_states, set_budget
from tenancy.pricing.charges import format_dollars
from tenancy.types import wall_ms

NONE = "none"
"""The value of an option that removes a limit."""


def _add_budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", nargs="?", metavar="TENANT")
    text = "for a budget of one key: its label, its id or its prefix, as in `trunkline key list`"
    parser.add_argument("--key", metavar="KEY", help=text)
    parser.add_argument(
        "--window", choices=("day", "month"), default="month", help="in UTC (default: month)"
    )
    text = "hard limit; requests that could exceed it are refused; `none` removes it"
    parser.add_argument("--hard", type=_limit, metavar="USD", help=text)
    text = "soft limit; exceeding it only alerts; `none` removes it"
    parser.add_argument("--soft", type=_limit, metavar="USD", help=text)
    parser.add_argument("--remove", action="store_true", help="remove the budget")


def _limit(text: str) -> Decimal | str:
    return text if text == NONE else amount_of_dollars(text)


def _budget(call: CommandCall) -> CommandResult:
    """Set a budget, or list budgets with their spent amounts. A limit that is not given stays."""
    options, config = call.options, call.config
    given = {
        f"{name}_micros": None if amount == NONE else whole_micros(amount, f"--{name}")
        for name in ("hard", "soft")
        if (amount := getattr(options, name)) is not None
    }
    is_change = bool(options.remove or given)
    if (is_change or options.key is not None) and options.tenant is None:
        raise UsageError("TENANT is required: trunkline budget TENANT --hard USD")
    if options.remove and given:
        raise UsageError("--remove is not allowed with --hard or --soft")
    with open_database(config) as store:
        names = {tenant.tenant_id: tenant.name for tenant in list_tenants(store)}
        tenant_id = None
        if options.tenant is not None:
            tenant_id = find_tenant(store, options.tenant).tenant_id
        keys = {key.key_id: key for key in list_keys(store, options.tenant)}
        key_id = 0
        if options.key is not None:
            key_id = _find_key(list(keys.values()), options.key, options.tenant).key_id
        if is_change and tenant_id is not None:
            budget = Budget(tenant_id, options.window, key_id=key_id, **given)
            keeps = () if options.remove else {"hard_micros", "soft_micros"} - given.keys()
            set_budget(store, budget, command_actor(), keeps)
        states = budget_states(store, wall_ms, None if tenant_id is None else (tenant_id,))
    rows: Table = [
        {
            "tenant": names[state.budget.tenant_id],
            "key_id": state.budget.key_id or None,
            "key": keys[state.budget.key_id].label if state.budget.key_id in keys else None,
            "window": state.budget.window,
            "hard_usd": _usd(state.budget.hard_micros),
            "soft_usd": _usd(state.budget.soft_micros),
            "spent_usd": format_dollars(state.spent_pico),
            "reserved_usd": format_dollars(state.reserved_pico),
            "over_soft": state.is_over_soft,
            "resets": show_second(state.resets_ms),
        }
        for state in states
        if key_id in (0, state.budget.key_id)
    ]
    shown = [row | {name: _six_decimals(row[name]) for name in _SPENT} for row in rows]
    return table_result(rows, shown=shown, right=_SPENT, none="no budgets")


def _find_key(keys: Sequence[Key], which: str, tenant: str) -> Key:
    """Return the tenant's key of a label, an id, or a prefix. Raises UsageError."""
    found = [one for one in keys if which in (str(one.key_id), one.label)]
    found = found or [one for one in keys if which.startswith(one.shown)]
    found = [one for one in found if one.revoked_ms is None] or found
    if len(found) != 1:
        what = f"{len(found)} keys of {tenant} have" if found else f"no key of {tenant} has"
        shown = ", ".join(f"{one.key_id} ({one.label or one.shown})" for one in keys) or "none"
        raise UsageError(
            f"--key: {what} the label, id or prefix {which[:20]!r}; expected one of: {shown}"
        )
    return found[0]


_SPENT = ("hard_usd", "soft_usd", "spent_usd", "reserved_usd")


def _six_decimals(dollars: object) -> str | None:
    """Return an exact amount as a table shows it."""
    return None if dollars is None else f"{Decimal(str(dollars)):.6f}"


def _usd(micros: int | None) -> str | None:
    return None if micros is None else f"{Decimal(micros).scaleb(-6):f}"


COMMANDS: Mapping[str, Entry] = {
    "budget": Entry(_add_budget, _budget),
}
