"""Pseudonyms: the names of deleted tenants, since their ledger rows stay.

The module knows no database. `accounts.deletion` assigns a pseudonym; functions that create
something for a tenant call `check_not_deleted` first.
"""

from __future__ import annotations

from tenancy.errors import BadName

PSEUDONYM_PREFIX = "deleted-"
"""The prefix of every pseudonym; no other tenant's name may begin with it."""


def is_pseudonym(name: str) -> bool:
    """Return whether a name is the pseudonym of a deleted tenant."""
    return name.startswith(PSEUDONYM_PREFIX)


def check_not_deleted(name: str) -> None:
    """Raise BadName if the name is that of a deleted tenant."""
    if is_pseudonym(name):
        raise BadName("tenant_deleted", f"tenant is deleted: {name}")
