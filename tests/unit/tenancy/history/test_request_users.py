"""Usage by user: notes beside the ledger, and sums that stay whole without them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tenancy.accounting.usage import sum_tenants, usage
from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.keys import create_key
from tenancy.accounts.tenants import create_tenant
from tenancy.history.request_users import UserNote, user_ref, write_users
from tenancy.ledger.adjustments import Adjustment, adjust
from tenancy.ledger.ledger import Ledger
from tenancy.storage.interface import Store
from tenancy.types import HOUR_MS
from tests.actors import TESTER
from tests.unit.tenancy.conftest import Wall, used

PATIENCE_S = 60


def fill(store: Store, wall: Wall) -> None:
    """Write five entries of two tenants over six hours; two name no user."""
    for name in ("ada", "bob"):
        tenant = create_tenant(store, wall, name)
        create_key(store, wall, tenant.tenant_id)
    ledger = Ledger(store, wall)
    for number, tenant_id in enumerate((1, 1, 1, 2, 2)):
        one = replace(used(f"r{number}", wall()), tenant_id=tenant_id, key_id=tenant_id)
        ledger.settle(one).result(PATIENCE_S)
        wall.ms += HOUR_MS + 7
    ledger.close()
    notes = [("r0", 1, "alice"), ("r1", 1, "bert"), ("r3", 2, "alice")]
    write_users(store, [UserNote(*note) for note in notes])
    adjust(store, wall, Adjustment("x", "r0", 9, "a favour"), by=TESTER)


def test_entries_are_summed_by_user(store: Store, wall: Wall) -> None:
    """Entries without a user are a row of their own, so the sum is the total."""
    fill(store, wall)
    found = usage(store, by=("user",))
    (ada, _) = usage(store)
    over_all = sum_tenants(found)

    assert [(one.tenant, one.user, one.requests, one.adjusted_pico) for one in found] == [
        ("ada", "", 1, 0),
        ("ada", "alice", 1, 9),
        ("ada", "bert", 1, 0),
        ("bob", "", 1, 0),
        ("bob", "alice", 1, 0),
    ]
    assert sum(one.prompt_tokens for one in found if one.tenant == "ada") == ada.prompt_tokens
    assert [(one.user, one.requests) for one in over_all] == [("", 2), ("alice", 2), ("bert", 1)]


def test_users_are_grouped_by_time_and_key_too(store: Store, wall: Wall) -> None:
    """An adjustment counts for the user of its entry, in the hour in which it was booked."""
    fill(store, wall)
    found = usage(store, tenant="ada", by=("key", "user", "hour"), since_ms=HOUR_MS)

    assert [(one.key_id, one.user, one.from_ms, one.requests) for one in found] == [
        (1, "", 2 * HOUR_MS, 1),
        (1, "alice", 5 * HOUR_MS, 0),
        (1, "bert", HOUR_MS, 1),
    ]


def test_a_note_is_kept_once_and_deleted_with_its_tenant(store: Store, wall: Wall) -> None:
    """A client's retry of an idempotent request names the same request."""
    fill(store, wall)
    write_users(store, [UserNote("r0", 1, "mallory")])
    kept = store.query("select user_ref from request_users where request_id = 'r0'")
    delete_tenant(store, wall, "ada")

    assert kept == [("alice",)]
    assert store.query("select request_id from request_users") == [("r3",)]


@pytest.mark.parametrize("has_entries", [True, False])
def test_a_deleted_tenants_note_stops_no_other(
    store: Store, wall: Wall, *, has_entries: bool
) -> None:
    """A request that runs at the deletion is noted behind it, in one batch with others."""
    fill(store, wall)
    gone = create_tenant(store, wall, "eve").tenant_id if not has_entries else 1
    delete_tenant(store, wall, "ada" if has_entries else "eve")
    write_users(store, [UserNote("r8", gone, "mallory"), UserNote("r9", 2, "bert")])

    found = store.query("select request_id, user_ref from request_users where request_id >= 'r8'")
    assert found == [("r9", "bert")]


def test_long_and_unprintable_users_are_digests() -> None:
    """Bounded, of one line, and the same for the same user."""
    assert user_ref("u" * 64) == "u" * 64
    assert user_ref("u" * 65) == user_ref("u" * 65)
    assert user_ref("u" * 65).startswith("sha256:")
    assert user_ref("a\nb").startswith("sha256:")
    assert len(user_ref("ü" * 10_000)) < 64
