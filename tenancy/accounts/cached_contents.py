"""Cached contents in the database: prefixes that a tenant stores under an id until a set time.

The content survives eviction and restart: the gateway computes it again when the cache has lost it.
An ended cached content loses its content and keeps its row, so that its storage can be billed. The
module knows no dialect; the content is opaque bytes.
"""

from __future__ import annotations

from msgspec import Struct, structs

from tenancy.errors import BadName
from tenancy.pseudonyms import check_not_deleted
from tenancy.storage.interface import Row, Store, Transaction, placeholders
from tenancy.storage.pieces import SWEPT_AT_ONCE, delete_all, first_piece


class CachedContentRecord(Struct, frozen=True):
    """A cached content's metadata, without the content."""

    resource_id: str
    tenant_id: int
    workspace: str
    model: str
    display_name: str
    tokens: int
    created_ms: int
    updated_ms: int
    expires_ms: int


class CachedContentQuota(Struct, frozen=True):
    """Bounds on one tenant's live cached contents."""

    count_max: int = 1_000
    bytes_max: int = 256 * 2**20


_FIELDS = CachedContentRecord.__struct_fields__
_COLUMNS = ", ".join(_FIELDS)
_LIVE = "ended_ms is null and expires_ms > ?"
_OF_WORKSPACE = f"tenant_id = ? and workspace = ? and {_LIVE}"
_ONE = f"resource_id = ? and {_OF_WORKSPACE}"


def create_cached_content(
    store: Store, resource: CachedContentRecord, content: bytes, quota: CachedContentQuota
) -> None:
    """Store a cached content.

    Raises BadName: `resource_quota` if the tenant's quota is full, `tenant_deleted` if the tenant
    was deleted since the request was authenticated.
    """
    with store.change() as db:
        for (name,) in db.rows(
            "select name from tenants where tenant_id = ?", (resource.tenant_id,)
        ):
            check_not_deleted(name)
        rows = db.rows(
            "select count(*), coalesce(sum(length(content)), 0) from cached_contents"
            f" where tenant_id = ? and {_LIVE}",
            (resource.tenant_id, resource.created_ms),
        )
        kept, size = rows[0]
        if kept >= quota.count_max or size + len(content) > quota.bytes_max:
            raise BadName(
                "resource_quota",
                f"cached content quota exceeded: {kept} stored with {size} bytes; limit"
                f" {quota.count_max} with {quota.bytes_max} bytes",
            )
        db.execute(
            f"insert into cached_contents ({_COLUMNS}, content)"
            f" values {placeholders(len(_FIELDS) + 1)}",
            (*structs.astuple(resource), content),
        )


def find_cached_content(
    store: Store, tenant_id: int, workspace: str, resource_id: str, now_ms: int
) -> tuple[CachedContentRecord, bytes] | None:
    """Return a live cached content of the workspace, with its content, or None."""
    rows = store.query(
        f"select {_COLUMNS}, content from cached_contents where {_ONE}",
        (resource_id, tenant_id, workspace, now_ms),
    )
    return (CachedContentRecord(*rows[0][:-1]), rows[0][-1]) if rows else None


def has_cached_content(
    store: Store, tenant_id: int, workspace: str, content: bytes, now_ms: int
) -> bool:
    """Return whether the workspace stores exactly this content now. O(its cached contents)."""
    return bool(
        store.query(
            f"select 1 from cached_contents where content = ? and {_OF_WORKSPACE} limit 1",
            (content, tenant_id, workspace, now_ms),
        )
    )


def list_cached_contents(
    store: Store, tenant_id: int, workspace: str, now_ms: int, after: str, most: int
) -> list[CachedContentRecord]:
    """Return up to `most` live cached contents of the workspace, by id, from behind `after`."""
    rows = store.query(
        f"select {_COLUMNS} from cached_contents where resource_id > ? and {_OF_WORKSPACE}"
        " order by resource_id limit ?",
        (after, tenant_id, workspace, now_ms, most),
    )
    return [CachedContentRecord(*row) for row in rows]


def set_expiry(
    store: Store, tenant_id: int, workspace: str, resource_id: str, expires_ms: int, now_ms: int
) -> bool:
    """Change the expiry of a live cached content. Returns False if there is none."""
    with store.change() as db:
        updated = db.execute(
            f"update cached_contents set expires_ms = ?, updated_ms = ? where {_ONE}",
            (expires_ms, now_ms, resource_id, tenant_id, workspace, now_ms),
        )
    return updated > 0


def end_cached_content(
    store: Store, tenant_id: int, workspace: str, resource_id: str, now_ms: int
) -> bool:
    """End a live cached content now and delete its content. Returns False if there is none."""
    with store.change() as db:
        ended = db.execute(
            f"update cached_contents set ended_ms = ?, content = null where {_ONE}",
            (now_ms, resource_id, tenant_id, workspace, now_ms),
        )
    return ended > 0


def end_cached_contents(store: Store, tenant_id: int, workspace: str | None, now_ms: int) -> int:
    """End all live cached contents of a tenant, or of one workspace. Returns the count."""
    where = "tenant_id = ?1 and (cast(?2 as text) is null or workspace = ?2)"
    return _end_all(store, where, (tenant_id, workspace), now_ms)


def sweep_cached_contents(store: Store, now_ms: int) -> int:
    """Delete the content of expired cached contents. Returns the count."""
    return _end_all(store, "expires_ms <= ?1", (now_ms,), now_ms)


def _end_all(store: Store, where: str, values: Row, now_ms: int) -> int:
    """End the live contents that `where` finds, in small transactions; return their count."""
    count = 0

    def end_some(db: Transaction) -> bool:
        nonlocal count
        found = db.rows(
            "select resource_id, length(content) from cached_contents"
            f" where {where} and ended_ms is null limit {SWEPT_AT_ONCE + 1:d}",
            values,
        )
        ids = first_piece(found)
        if ids:
            count += db.execute(
                "update cached_contents set content = null, ended_ms ="
                " case when expires_ms < ? then expires_ms else ? end"
                f" where resource_id in {placeholders(len(ids))}",
                [now_ms, now_ms, *ids],
            )
        return len(found) > len(ids)

    delete_all(store, end_some)
    return count
