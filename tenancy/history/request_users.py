"""The end users that requests name, for usage by user.

A note is beside the ledger, not in it: sums of money never depend on it, and an entry without a
note counts for no user. The gateway writes notes of running requests in batches;
`tenancy.accounting.usage` reads them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from msgspec import Struct

from tenancy.pseudonyms import PSEUDONYM_PREFIX
from tenancy.storage.interface import Store, pad_to_power_of_two, placeholders

USER_CHARACTERS_MAX = 64
"""A longer user is stored as a digest."""


class UserNote(Struct, frozen=True):
    """The user that a request named."""

    request_id: str
    tenant_id: int
    user: str


def user_ref(user: str) -> str:
    """Return a user as it is stored: as sent, or a digest of a long or unprintable one. O(1)."""
    if len(user) <= USER_CHARACTERS_MAX and user.isprintable():
        return user
    return f"sha256:{hashlib.sha256(user.encode(errors='replace')).hexdigest()[:32]}"


def read_users(store: Store, request_ids: Sequence[str]) -> dict[str, str]:
    """Return the users of these requests by id. O(requests). Raises StoreError."""
    if not request_ids:
        return {}
    wanted = pad_to_power_of_two(request_ids)
    found = store.query(
        "select request_id, user_ref from request_users"
        f" where request_id in {placeholders(len(wanted))}",
        wanted,
    )
    return {row[0]: row[1] for row in found}


def write_users(store: Store, notes: Sequence[UserNote]) -> None:
    """Write notes; a request that has one keeps it, and a deleted tenant gets none. Raises
    StoreError."""
    with store.change() as db:
        db.execute_many(
            "insert into request_users (request_id, tenant_id, user_ref) select ?, tenant_id, ?"
            " from tenants where tenant_id = ? and name not like ?"
            " on conflict (request_id) do nothing",
            [(one.request_id, one.user, one.tenant_id, f"{PSEUDONYM_PREFIX}%") for one in notes],
        )
