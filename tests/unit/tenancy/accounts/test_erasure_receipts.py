"""Receipts of erasures."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tenancy.accounts import erasure_receipts
from tenancy.accounts.erasure_receipts import (
    OVERLAP_MS,
    ErasedLevel,
    ErasureReceipt,
    confirm_levels,
    confirm_replica,
    digest_namespaces,
    forget_replica,
    list_missed,
    list_receipts,
    list_uncompleted,
    note_erased_until,
    write_receipt,
)
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import BadName, StoreError
from tenancy.storage.audit_log import Actor
from tenancy.storage.interface import Store
from tests.unit.tenancy.conftest import Wall


def receipt(number: int, tenant_id: int, at_ms: int = 0) -> ErasureReceipt:
    return ErasureReceipt(
        f"r{number}", tenant_id, 1, at_ms, "all", 2, digest_namespaces([b"a", b"b"]), 17
    )


def test_lists_own_receipts_newest_first(store: Store, wall: Wall) -> None:
    ada = create_tenant(store, wall, "ada").tenant_id
    bob = create_tenant(store, wall, "bob").tenant_id
    for number, tenant_id in enumerate([ada, bob, ada]):
        write_receipt(store, receipt(number, tenant_id, number))

    assert [one.receipt_id for one in list_receipts(store, ada)] == ["r2", "r0"]
    assert list_receipts(store, bob) == [receipt(1, bob, 1)]
    assert len(list_receipts(store, ada, limit=1)) == 1


def test_a_receipt_keeps_what_each_level_lost(store: Store, wall: Wall) -> None:
    ada = create_tenant(store, wall, "ada").tenant_id
    levels = {"device": ErasedLevel(17, 68), "disk": ErasedLevel(3, 12, "pending")}
    write_receipt(store, replace(receipt(1, ada, 1), levels=levels))
    write_receipt(store, receipt(0, ada))

    assert [one.levels for one in list_receipts(store, ada)] == [levels, {}]


def test_only_the_newest_receipts_of_a_tenant_are_kept(
    store: Store, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An erasure costs its tenant little and the disk a row: an endless loop may not fill it."""
    monkeypatch.setattr(erasure_receipts, "RECEIPTS_MAX", 3)
    ada = create_tenant(store, wall, "ada").tenant_id
    bob = create_tenant(store, wall, "bob").tenant_id
    write_receipt(store, receipt(0, bob))
    for number in range(1, 9):
        write_receipt(store, receipt(number, ada, number // 2))

    assert store.query("select receipt_id from erasures order by 1") == [
        ("r0",),
        ("r6",),
        ("r7",),
        ("r8",),
    ]


def test_digest_identifies_a_set_of_namespaces(store: Store) -> None:
    """The same set gives the same digest in any order; any other set differs, however it is
    split."""
    digests = [digest_namespaces(names) for names in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [])]

    assert digest_namespaces([b"c", b"ab"]) == digests[0]
    assert len(set(digests)) == 4


def test_receipt_requires_its_tenant(store: Store) -> None:
    """The tenant stays for as long as a receipt refers to it."""
    with pytest.raises(StoreError):
        write_receipt(store, receipt(1, 99))


@pytest.mark.parametrize("limit", [0, -1, 1_001])
def test_refuses_limit_out_of_range(store: Store, limit: int) -> None:
    with pytest.raises(BadName, match="expected 1 to 1000"):
        list_receipts(store, 1, limit)


def missed(store: Store, replica: str) -> list[tuple[str, str | None]]:
    """Return what an engine may not have carried out, each with the receipt that waits for it."""
    return [(one.what, one.receipt_id) for one in list_missed(store, replica)]


def test_an_engine_has_missed_what_waits_for_it_and_what_is_new(store: Store, wall: Wall) -> None:
    """Of one that was never seen nothing is known: it has missed all."""
    ada = create_tenant(store, wall, "ada").tenant_id
    for number, at_ms in enumerate((1, 2 * OVERLAP_MS, 9 * OVERLAP_MS)):
        named = {"what": f"lease {number}", "pending_at": ("e1",) if number == 0 else ()}
        done = {"completed_ms": at_ms if number else None}
        write_receipt(store, replace(receipt(number, ada, at_ms), **named, **done))
    note_erased_until(store, ["e1", "e2"], 3 * OVERLAP_MS)
    note_erased_until(store, ["e1", "e2"], 9 * OVERLAP_MS)

    assert missed(store, "e1") == [("lease 0", "r0"), ("lease 2", None)]
    assert missed(store, "e2") == [("lease 2", None)]
    assert missed(store, "new") == [("lease 0", None), ("lease 1", None), ("lease 2", None)]


def test_a_receipt_is_complete_when_engines_and_levels_have_confirmed(
    store: Store, wall: Wall
) -> None:
    """In whatever order; what each erased is added, and a level keeps the weakest state."""
    ada = create_tenant(store, wall, "ada").tenant_id
    levels = {"device": ErasedLevel(17, 68), "disk": ErasedLevel(3, 12, "pending")}
    write_receipt(store, replace(receipt(1, ada, 1), levels=levels, pending_at=("e1", "e2")))
    more = {"device": ErasedLevel(2, 8), "disk": ErasedLevel(1, 4, "shredded")}
    steps = [
        confirm_replica(store, "r1", "e2", more, 5),
        confirm_levels(store, "r1", {"disk": ErasedLevel(1, 4)}, 6),
        confirm_replica(store, "gone", "e1", more, 7),
        len(list_uncompleted(store)),
        confirm_replica(store, "r1", "e1", {}, 8),
        len(list_uncompleted(store)),
    ]
    (found,) = list_receipts(store, ada)

    assert steps == [0, 0, 0, 1, 1, 0]
    assert (found.pending_at, found.completed_ms, found.blocks) == ((), 8, 19)
    assert found.levels == {"device": ErasedLevel(19, 76), "disk": ErasedLevel(5, 20)}


def test_no_receipt_waits_for_an_engine_that_is_forgotten(store: Store, wall: Wall) -> None:
    """They say so; one that waits for another engine or a level goes on, and the engine, if it
    comes again, has missed all."""
    ada = create_tenant(store, wall, "ada").tenant_id
    waiting = {"device": ErasedLevel(1, 4), "disk": ErasedLevel(0, 0, "pending")}
    receipts: list[dict[str, Any]] = [
        {"pending_at": ("e1",)},
        {"pending_at": ("e1", "e2")},
        {"pending_at": ("e1",), "levels": waiting},
        {"completed_ms": 4},
    ]
    for number, changes in enumerate(receipts):
        write_receipt(store, replace(receipt(number, ada, number + 1), **changes))
    note_erased_until(store, ["e1"], 9 * OVERLAP_MS)

    told = (
        forget_replica(store, "e1", Actor("command", "root", 8)),
        forget_replica(store, "e1", Actor("command", "root", 9)),
    )
    found = {one.receipt_id: one for one in list_receipts(store, ada)}

    assert told == ((3, 1), (0, 0))
    assert [found[f"r{i}"].pending_at for i in range(4)] == [(), ("e2",), (), ()]
    assert [found[f"r{i}"].forgotten_at for i in range(4)] == [("e1",)] * 3 + [()]
    assert [found[f"r{i}"].completed_ms for i in range(4)] == [8, None, None, 4]
    assert len(missed(store, "e1")) == 4
