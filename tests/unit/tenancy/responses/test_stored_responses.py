"""Stored responses in the database: owner, thread, expiry, quota and erasure."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.erasure_receipts import ErasureReceipt, write_receipt
from tenancy.responses.stored_responses import (
    StoredResponse,
    StoredTurn,
    delete_response,
    erase_stored,
    find_response,
    load_parts,
    load_thread,
    measure_parts,
    measure_thread,
    store_responses,
    sweep_stored,
)
from tenancy.responses.stored_sums import NO_QUOTA, StorageQuota
from tenancy.storage.interface import Store
from tenancy.storage.pieces import SWEPT_AT_ONCE
from tests.unit.tenancy.conftest import Wall

ONE = StoredResponse("r1", 1, "default", 1_000, 61_000, b"in1", b"out1")
TWO = replace(
    ONE, response_id="r2", previous_id="r1", created_ms=31_000, expires_ms=91_000, input=b"in2"
)
SUMS = "select tenant_id, responses, bytes from stored_sums order by 1"


def keep(store: Store, *records: StoredResponse, quota: StorageQuota = NO_QUOTA) -> list[str]:
    """Store the records; return the obstacles."""
    return list(store_responses(store, records, quota, 1_000))


def test_response_is_private_and_expires(owned: Store) -> None:
    """By tenant and workspace; it is gone at its expiry."""
    assert keep(owned, ONE) == [""]

    assert find_response(owned, 1, "default", "r1", 60_999) == b"out1"
    assert find_response(owned, 1, "default", "r1", 61_000) is None
    assert find_response(owned, 2, "default", "r1", 2_000) is None
    assert find_response(owned, 1, "other", "r1", 2_000) is None
    assert load_thread(owned, 2, "default", "r1", 2_000) is None
    assert load_thread(owned, 1, "other", "r1", 2_000) is None
    assert not delete_response(owned, 2, "default", "r1", 2_000)
    assert owned.query(SUMS) == [(1, 1, 7)]


def test_thread_has_its_turns_in_order(owned: Store) -> None:
    """Two responses may continue the same one; each thread has only its own turns."""
    other = replace(TWO, response_id="r3", input=b"in3")
    assert keep(owned, ONE, TWO, other) == ["", "", ""]

    first = StoredTurn("r1", b"in1", b"out1")
    assert load_thread(owned, 1, "default", "r2", 32_000) == [
        first,
        StoredTurn("r2", b"in2", b"out1"),
    ]
    assert load_thread(owned, 1, "default", "r3", 32_000) == [
        first,
        StoredTurn("r3", b"in3", b"out1"),
    ]


def test_parts_of_responses_are_measured_and_loaded(owned: Store) -> None:
    """Of the workspace, and only of responses that are there."""
    keep(owned, ONE, TWO)
    ids = ["r1", "r2", "r9"]

    mine = 1, "default"
    assert measure_parts(owned, mine, "input", ids, 2_000) == {"r1": 3, "r2": 3}
    assert measure_parts(owned, mine, "response", ["r1"], 2_000) == {"r1": 4}
    assert load_parts(owned, mine, "input", ids, 2_000) == {"r1": b"in1", "r2": b"in2"}
    assert load_parts(owned, mine, "response", ["r1"], 2_000) == {"r1": b"out1"}
    for other, now_ms in (((2, "default"), 2_000), ((1, "other"), 2_000), (mine, 99_000)):
        assert load_parts(owned, other, "input", ids, now_ms) == {}
        assert measure_parts(owned, other, "input", ids, now_ms) == {}


def test_a_thread_is_measured_with_all_its_turns(owned: Store) -> None:
    """A request that continues it loads all of them; another's thread has no size."""
    keep(owned, ONE, TWO)

    assert measure_thread(owned, 1, "default", "r1", 2_000) == 7
    assert measure_thread(owned, 1, "default", "r2", 2_000) == 14
    assert measure_thread(owned, 2, "default", "r2", 2_000) is None


def test_earlier_responses_live_as_long_as_the_latest(owned: Store) -> None:
    keep(owned, ONE, TWO)

    while sweep_stored(owned, 90_999):
        pass
    found = load_thread(owned, 1, "default", "r2", 90_999)
    sweep_stored(owned, 95_000)

    assert found is not None
    assert len(found) == 2
    assert owned.query(SUMS) == [(1, 0, 0)]


def test_thread_without_an_earlier_response_cannot_be_continued(owned: Store) -> None:
    """Its own response can still be read."""
    keep(owned, ONE, TWO)

    assert delete_response(owned, 1, "default", "r1", 32_000)
    assert load_thread(owned, 1, "default", "r2", 32_000) is None
    assert find_response(owned, 1, "default", "r2", 32_000) == b"out1"
    assert keep(owned, replace(TWO, response_id="r4")) == ["previous_missing"]
    assert keep(owned, replace(TWO, response_id="r4", previous_id="r2")) == [""]
    assert not delete_response(owned, 1, "default", "r1", 32_000)


def test_other_tenants_response_is_no_predecessor(owned: Store) -> None:
    keep(owned, ONE)

    found = keep(owned, replace(TWO, tenant_id=2), replace(TWO, workspace="other"))

    assert found == ["previous_missing", "previous_missing"]


@pytest.mark.parametrize("quota", [StorageQuota(2, 1_000), StorageQuota(9, 15)])
def test_quota_bounds_number_and_bytes(owned: Store, quota: StorageQuota) -> None:
    """Per tenant, also within one transaction; deleting makes room."""
    three = [replace(ONE, response_id=f"r{number}") for number in range(3)]
    other = replace(ONE, response_id="b", tenant_id=2)

    assert keep(owned, *three, other, quota=quota) == ["", "", "quota", ""]
    delete_response(owned, 1, "default", "r0", 2_000)
    assert keep(owned, three[2], quota=quota) == [""]


def test_thread_is_bounded(owned: Store) -> None:
    """A request never loads more than it could have sent."""
    assert store_responses(owned, [ONE, TWO], StorageQuota(), 13) == ["", "quota"]


@pytest.mark.parametrize(
    ("workspace", "left"),
    [(None, ["b"]), ("default", ["other", "b"]), ("none", ["r1", "other", "b"])],
)
def test_erasure_deletes_a_tenant_or_a_workspace(
    owned: Store, workspace: str | None, left: list[str]
) -> None:
    other = replace(ONE, response_id="other", workspace="other", created_ms=2_000)
    keep(owned, ONE, other, replace(ONE, response_id="b", tenant_id=2, created_ms=3_000))

    erase_stored(owned, 1, workspace)

    found = owned.query("select response_id from stored_responses order by created_ms")
    assert [row[0] for row in found] == left
    assert owned.query(SUMS)[0] == (1, len(left) - 1, 7 * (len(left) - 1))


@pytest.mark.parametrize(
    ("what", "found"), [("all", "erased"), ("workspace default", "erased"), ("workspace x", "")]
)
def test_running_request_stores_nothing_after_an_erasure(
    owned: Store, what: str, found: str
) -> None:
    """A request that began before the erasure holds what was erased."""
    write_receipt(owned, ErasureReceipt("e", 1, 1, 1_500, what, 0, "", 0))
    later = replace(ONE, response_id="later", created_ms=1_501)

    assert keep(owned, ONE, later) == [found, ""]


def test_second_erasure_keeps_later_responses(owned: Store) -> None:
    keep(owned, ONE, replace(TWO, previous_id=None))

    erase_stored(owned, 1, None, 1_000)

    assert owned.query("select response_id from stored_responses") == [("r2",)]


@pytest.mark.parametrize("has_entries", [False, True])
def test_deleted_tenant_has_no_responses(owned: Store, has_entries: bool) -> None:
    keep(owned, ONE)
    if has_entries:
        write_receipt(owned, ErasureReceipt("e", 1, 1, 0, "all", 0, "", 0))

    delete_tenant(owned, Wall(), "ada")

    assert owned.query("select * from stored_responses") == []
    assert owned.query(SUMS) == []
    assert keep(owned, replace(ONE, response_id="r9")) == ["tenant_deleted"]


def test_sweep_is_bounded(owned: Store) -> None:
    """One transaction deletes a few rows, and says whether there may be more."""
    many = [replace(ONE, response_id=f"r{number}") for number in range(SWEPT_AT_ONCE + 1)]
    keep(owned, *many)

    assert sweep_stored(owned, 61_000)
    assert not sweep_stored(owned, 61_000)
    assert owned.query("select * from stored_responses") == []
