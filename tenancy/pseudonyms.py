"""The names under which deleted tenants' money rows stay, and who is told that one is deleted.

It knows no database; `deletion` gives such a name, and whoever would make something for a tenant
asks first.
"""

from __future__ import annotations

from tenancy.errors import BadName

PSEUDONYM_PREFIX = "deleted-"
"""Begins them; nobody else's name begins so."""


def is_pseudonym(name: str) -> bool:
    """Is it that of a deleted tenant?"""
    return name.startswith(PSEUDONYM_PREFIX)


def check_not_deleted(name: str) -> None:
    """Raises BadName for a tenant that has been deleted."""
    if is_pseudonym(name):
        raise BadName("tenant_deleted", f"{name} is what is left of a deleted tenant")
