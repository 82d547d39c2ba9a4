"""Counts of findings in the database: they add up, and go with their tenant."""

from __future__ import annotations

from msgspec.structs import replace

from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.tenants import create_tenant
from tenancy.reuse import finding_counts
from tenancy.reuse.finding_counts import (
    EXAMPLES_MAX,
    FACTS_MAX,
    PLACES_MAX,
    FindingCount,
    PromptOrigin,
    add_counts,
    delete_old_counts,
    read_counts,
    read_origins,
)
from tenancy.storage.interface import Store
from tenancy.types import HOUR_MS
from tests.unit.tenancy.conftest import Wall


def count(tenant_id: int, at_ms: int = 5, **more: object) -> FindingCount:
    """Return a count of one request."""
    one = FindingCount(
        tenant_id=tenant_id,
        hour_ms=at_ms // HOUR_MS * HOUR_MS,
        cause="system_changes",
        place="system",
        requests=1,
        wasted_tokens=100,
        first_ms=at_ms,
        last_ms=at_ms,
        examples=(f"r{at_ms}",),
        facts={"at": 3},
        model="m",
    )
    return replace(one, **more)


def test_counts_of_one_key_add_up(store: Store, wall: Wall) -> None:
    ada = create_tenant(store, wall, "ada").tenant_id
    add_counts(store, [count(ada, 5), count(ada, 6)])
    add_counts(store, [count(ada, 4, facts={"at": 1, "changed": 2}), count(ada, 7)])

    (found,) = read_counts(store, 0, HOUR_MS)
    assert (found.requests, found.wasted_tokens) == (4, 400)
    assert (found.first_ms, found.last_ms) == (4, 7)
    assert found.facts == {"at": 10, "changed": 2}
    assert len(found.examples) == EXAMPLES_MAX
    assert found.examples[-1] == "r7"


def test_other_keys_are_rows_of_their_own(store: Store, wall: Wall) -> None:
    ada = create_tenant(store, wall, "ada").tenant_id
    bob = create_tenant(store, wall, "bob").tenant_id
    one = count(ada)
    others = [
        replace(one, place="other"),
        replace(one, cause="expired"),
        replace(one, model="n"),
        count(ada, HOUR_MS + 1),
        count(bob),
    ]
    add_counts(store, [one, *others])

    assert len(read_counts(store, 0, 2 * HOUR_MS)) == 6
    assert len(read_counts(store, 0, HOUR_MS)) == 5
    assert [found.tenant_id for found in read_counts(store, 0, HOUR_MS, bob)] == [bob]
    assert read_counts(store, HOUR_MS, 2 * HOUR_MS) == [others[3]]


def test_counts_are_bounded(store: Store, wall: Wall) -> None:
    ada = create_tenant(store, wall, "ada").tenant_id
    facts = {f"f{number}": 1 for number in range(FACTS_MAX)}
    add_counts(store, [count(ada, place=f"p{number}") for number in range(2 * PLACES_MAX)])
    add_counts(store, [count(ada, place="p0", facts=facts), count(ada, place="more")])

    found = read_counts(store, 0, HOUR_MS)
    assert len(found) == PLACES_MAX
    assert max(len(one.facts) for one in found) == FACTS_MAX


def test_counts_of_a_tenant_that_is_gone_are_left_out(store: Store, wall: Wall) -> None:
    """A deletion may come between a request and the next write."""
    ada = create_tenant(store, wall, "ada").tenant_id
    origin = PromptOrigin(ada, "m", "t", 5)
    add_counts(store, [count(ada), count(999)], [origin, replace(origin, tenant_id=999)])
    assert [one.tenant_id for one in read_counts(store, 0, HOUR_MS)] == [ada]
    assert read_origins(store) == {ada: origin}

    delete_tenant(store, wall, "ada")
    assert read_counts(store, 0, HOUR_MS) == []
    assert read_origins(store) == {}


def test_origin_is_replaced(store: Store, wall: Wall) -> None:
    ada = create_tenant(store, wall, "ada").tenant_id
    add_counts(store, [], [PromptOrigin(ada, "m", "t", 5)])
    later = PromptOrigin(ada, "n", "t", 9, "m", "t")
    add_counts(store, [], [later])

    other = PromptOrigin(ada, "o", "t", 9, gateway="g2")
    add_counts(store, [], [other])

    assert read_origins(store) == {ada: later}
    assert read_origins(store, "g2") == {ada: other}


def test_old_hours_are_deleted(store: Store, wall: Wall) -> None:
    ada = create_tenant(store, wall, "ada").tenant_id
    add_counts(store, [count(ada), count(ada, HOUR_MS)])
    delete_old_counts(store, HOUR_MS)

    assert [one.hour_ms for one in read_counts(store, 0, 9 * HOUR_MS)] == [HOUR_MS]
    assert finding_counts.read_counts(store, 0, 0) == []
