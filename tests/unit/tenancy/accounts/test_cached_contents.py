"""Cached contents in the database: owner, expiry, quota and stored token-seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tenancy.accounts.cached_contents import (
    CachedContentQuota,
    CachedContentRecord,
    create_cached_content,
    end_cached_content,
    end_cached_contents,
    find_cached_content,
    has_cached_content,
    list_cached_contents,
    set_expiry,
    sweep_cached_contents,
)
from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import BadName
from tenancy.storage.interface import Store
from tests.unit.tenancy.storage.new_sqlite import new_sqlite

QUOTA = CachedContentQuota(3, 100)
ONE = CachedContentRecord("a", 1, "default", "m", "", 10, 1_000, 1_000, 61_000)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = new_sqlite(tmp_path / "t.db")
    for name in ("ada", "bob"):
        create_tenant(store, lambda: 0, name)
    return store


def test_cached_content_is_private_and_expires(store: Store) -> None:
    """By tenant and workspace; it is gone at its expiry."""
    create_cached_content(store, ONE, b"words", QUOTA)

    assert find_cached_content(store, 1, "default", "a", 60_999) == (ONE, b"words")
    assert find_cached_content(store, 1, "default", "a", 61_000) is None
    assert find_cached_content(store, 2, "default", "a", 2_000) is None
    assert find_cached_content(store, 1, "other", "a", 2_000) is None


def test_deleted_tenant_stores_no_content(store: Store) -> None:
    """A tenant may be deleted while its request's long content is read."""
    create_cached_content(store, ONE, b"words", QUOTA)
    delete_tenant(store, lambda: 2_000, "ada")

    with pytest.raises(BadName, match="tenant is deleted"):
        create_cached_content(store, replace(ONE, resource_id="b"), b"words", QUOTA)
    assert store.query("select count(content) from cached_contents") == [(0,)]


def test_quota_bounds_count_and_bytes(store: Store) -> None:
    """Only live cached contents count."""
    for name in "abc":
        create_cached_content(store, replace(ONE, resource_id=name), b"x" * 10, QUOTA)

    with pytest.raises(BadName, match="quota exceeded: 3 stored"):
        create_cached_content(store, replace(ONE, resource_id="d"), b"", QUOTA)
    with pytest.raises(BadName, match="quota exceeded"):
        create_cached_content(store, replace(ONE, tenant_id=2, resource_id="e"), b"x" * 101, QUOTA)
    later = replace(ONE, resource_id="f", created_ms=61_000, expires_ms=62_000)
    create_cached_content(store, later, b"x", QUOTA)

    assert [
        one.resource_id for one in list_cached_contents(store, 1, "default", 61_000, "", 9)
    ] == ["f"]


def test_ended_content_is_deleted_and_its_row_stays(store: Store) -> None:
    """Deleted or expired: the content goes; when it ended stays."""
    create_cached_content(store, ONE, b"words", QUOTA)
    create_cached_content(store, replace(ONE, resource_id="b"), b"words", QUOTA)
    is_ended = end_cached_content(store, 1, "default", "a", 31_000)
    swept = sweep_cached_contents(store, 61_000)

    assert (is_ended, swept) == (True, 1)
    rows = store.query("select content, ended_ms from cached_contents order by resource_id")
    assert rows == [(None, 31_000), (None, 61_000)]
    assert not end_cached_content(store, 1, "default", "a", 32_000)


def test_expiry_can_change_while_live(store: Store) -> None:
    """Later or sooner, but not after expiry."""
    create_cached_content(store, ONE, b"words", QUOTA)

    assert set_expiry(store, 1, "default", "a", 90_000, 2_000)
    assert find_cached_content(store, 1, "default", "a", 89_999) is not None
    assert not set_expiry(store, 1, "default", "a", 99_000, 90_000)
    assert not set_expiry(store, 2, "default", "a", 99_000, 3_000)


def test_pages_cover_each_content_once(store: Store) -> None:
    """In the order of ids."""
    for name in "cab":
        create_cached_content(store, replace(ONE, resource_id=name), b"x", QUOTA)

    first = list_cached_contents(store, 1, "default", 2_000, "", 2)
    second = list_cached_contents(store, 1, "default", 2_000, first[-1].resource_id, 2)

    assert [one.resource_id for one in (*first, *second)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("workspace", "left"), [(None, ["d"]), ("default", ["c", "d"]), ("nowhere", list("abcd"))]
)
def test_erasure_ends_all_of_a_tenant_or_workspace(
    store: Store, workspace: str | None, left: list[str]
) -> None:
    """Other tenants' contents stay."""
    for name, tenant_id, where in (("a", 1, "default"), ("b", 1, "default"), ("c", 1, "lab")):
        made = replace(ONE, resource_id=name, tenant_id=tenant_id, workspace=where)
        create_cached_content(store, made, b"words", QUOTA)
    create_cached_content(store, replace(ONE, resource_id="d", tenant_id=2), b"words", QUOTA)
    ended = end_cached_contents(store, 1, workspace, 31_000)
    rows = store.query("select resource_id from cached_contents where content is not null")

    assert ended == 4 - len(left)
    assert sorted(row[0] for row in rows) == left


def test_same_content_may_be_stored_twice(store: Store) -> None:
    """A deletion must know whether another cached content still needs the blocks."""
    create_cached_content(store, ONE, b"words", QUOTA)
    create_cached_content(store, replace(ONE, resource_id="b"), b"words", QUOTA)
    create_cached_content(store, replace(ONE, resource_id="c", workspace="other"), b"words", QUOTA)
    kept = []
    for name in "ab":
        end_cached_content(store, 1, "default", name, 2_000)
        kept.append(has_cached_content(store, 1, "default", b"words", 2_000))

    assert kept == [True, False]
    assert has_cached_content(store, 1, "other", b"words", 2_000)
    assert not has_cached_content(store, 1, "other", b"words", ONE.expires_ms)
