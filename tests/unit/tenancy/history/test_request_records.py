"""Ended requests are listed by time, from the ledger and from records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from tenancy.accounts.tenants import create_tenant
from tenancy.history import request_records
from tenancy.history.request_records import (
    KEPT_MS,
    RequestFilter,
    RequestRecord,
    delete_old_records,
    find_request,
    last_request_ms,
    list_requests,
    received_ms,
    write_records,
)
from tenancy.ledger.ledger import Ledger
from tenancy.reuse.miss_causes import MissCause, read_causes, write_causes
from tenancy.storage.interface import Row, Store, Value
from tenancy.storage.sqlite import SqliteStore
from tenancy.types import HOUR_MS
from tests.unit.tenancy.conftest import Wall, used

AT_MS = 1_800_000_000_000
ALWAYS = RequestFilter(0, 2**44)


def id_at(at_ms: int) -> str:
    """Return the id of a request received at this instant."""
    return f"{at_ms:012x}{0:020x}"


def record(at_ms: int, code: str = "rate_limit_exceeded", tenant_id: int = 1) -> RequestRecord:
    """Return the record of a refused request."""
    return RequestRecord(
        request_id=id_at(at_ms),
        tenant_id=tenant_id,
        key_id=1,
        endpoint="/v1/messages",
        dialect="anthropic",
        model="m",
        is_stream=True,
        status=429 if code else 200,
        ending="refused" if code else "done",
        code=code,
        total_s=0.25,
    )


@pytest.fixture
def filled(ledger: Ledger, store: Store, wall: Wall) -> Store:
    """A store with, in this order: an entry alone, an entry with its record, and a refusal of each
    of two tenants."""
    create_tenant(store, wall, "bob")
    wall.ms = AT_MS
    for number in (0, 1):
        ledger.settle(used(id_at(AT_MS + number), AT_MS + number)).result(60)
    write_records(
        store,
        [record(AT_MS + 1, ""), record(AT_MS + 2), record(AT_MS + 3, "overloaded", tenant_id=2)],
    )
    return store


def times(store: Store, wanted: RequestFilter, limit: int = 10) -> list[int]:
    """Return when the listed requests were received, after `AT_MS`."""
    found = list_requests(store, wanted, limit)
    return [(received_ms(one.request_id) or 0) - AT_MS for one in found]


def test_lists_entries_and_refusals_newest_first(filled: Store) -> None:
    found = list_requests(filled, ALWAYS, 10)

    assert times(filled, ALWAYS) == [3, 2, 1, 0]
    assert [one.entry is not None for one in found] == [False, False, True, True]
    assert [one.record is not None for one in found] == [True, True, True, False]
    assert found[2].record == record(AT_MS + 1, "")


def test_filters_and_pages(filled: Store) -> None:
    assert times(filled, structs.replace(ALWAYS, tenant_id=1)) == [2, 1, 0]
    assert times(filled, structs.replace(ALWAYS, code="overloaded")) == [3]
    assert times(filled, structs.replace(ALWAYS, code="done")) == [1, 0]
    assert times(filled, structs.replace(ALWAYS, since_ms=AT_MS + 1, until_ms=AT_MS + 3)) == [2, 1]
    assert times(filled, structs.replace(ALWAYS, before_id=id_at(AT_MS + 2)), limit=1) == [1]


def test_finds_one_request(filled: Store) -> None:
    settled, refused = (find_request(filled, id_at(AT_MS + n)) for n in (1, 2))

    assert settled is not None
    assert settled.entry is not None
    assert (settled.entry_id, settled.entry.ttft_ms) == (2, 12)
    assert refused is not None
    assert (refused.entry, refused.record) == (None, record(AT_MS + 2))
    assert find_request(filled, id_at(AT_MS + 9)) is None


def test_causes_go_with_their_records(filled: Store) -> None:
    """One whose record was never kept goes soon; one without a tenant is not written."""
    ids = [id_at(AT_MS - 2 * HOUR_MS), id_at(AT_MS)]
    causes = [MissCause(one, 1, "m", "system_changes", "system", 90, {"at": 1}) for one in ids]
    write_causes(filled, [*causes, MissCause("gone", 99, "m", "evicted", "", 1)])
    kept = read_causes(filled, [*ids, "gone"])
    write_records(filled, [record(AT_MS - KEPT_MS - 1)])
    delete_old_records(filled, AT_MS)

    assert kept == dict(zip(ids, causes, strict=True))
    assert set(read_causes(filled, ids)) == {ids[1]}


def test_knows_the_last_request_of_a_tenant(filled: Store) -> None:
    assert [last_request_ms(filled, number) for number in (1, 2, 3)] == [AT_MS + 2, AT_MS + 3, None]


def test_records_are_kept_for_a_week_and_in_bounds(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_records, "RECORDS_MAX", 2)
    monkeypatch.setattr(request_records, "DELETED_AT_ONCE", 2)
    write_records(store, [record(AT_MS + number) for number in range(5)])

    assert delete_old_records(store, AT_MS)
    assert not delete_old_records(store, AT_MS)
    assert times(store, ALWAYS) == [4, 3]
    assert not delete_old_records(store, AT_MS + 4 + KEPT_MS)
    assert times(store, ALWAYS) == [4]


@pytest.mark.parametrize("request_id", ["", "r1", "x" * 32])
def test_ids_of_another_form_have_no_time(request_id: str) -> None:
    assert received_ms(request_id) is None


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        (structs.replace(ALWAYS, tenant_id=7), "ledger_by_tenant_request"),
        (structs.replace(ALWAYS, code="overloaded"), "ledger_by_ending"),
        (structs.replace(ALWAYS, tenant_id=7, code="overloaded"), "ledger_by_"),
        (structs.replace(ALWAYS, tenant_id=7, code="done"), "ledger_by_tenant_request"),
    ],
)
def test_a_filter_that_matches_nothing_reads_no_period(
    tmp_path: Path, wanted: RequestFilter, index: str
) -> None:
    """Of a million entries it took 0.6 s; an index has its conditions and its order."""
    store = ExplainingStore(tmp_path / "plans.db")
    list_requests(store, wanted, 100)
    store.close()
    of_ledger = store.plans[0]

    assert f"SEARCH ledger USING INDEX {index}" in of_ledger
    assert "SCAN" not in of_ledger
    assert "TEMP B-TREE" not in of_ledger


class ExplainingStore(SqliteStore):
    """A store that keeps the plan of each query."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.plans: list[str] = []

    def query(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Keep the plan, then answer."""
        if sql.startswith("select entry_id"):
            plan = super().query(f"explain query plan {sql}", values)
            self.plans.append("\n".join(str(row[-1]) for row in plan))
        return super().query(sql, values)
