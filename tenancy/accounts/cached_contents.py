"""Cached contents: prefixes that a tenant named and keeps until a time it chose.

The content outlives eviction and restart: it is kept here and computed again when it has to be.
What has ended keeps its row, without its content, so that what was stored can be billed. It knows
no dialect; the content is bytes to it. `gateway.generation.cached_contents` and the handlers call
it.
"""

from __future__ import annotations

from msgspec import Struct

from tenancy.errors import BadName
from tenancy.pseudonyms import check_not_deleted
from tenancy.storage.interface import Store


class CachedContentRecord(Struct, frozen=True):
    """A cached content, without its content."""

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
    """How much one tenant may keep at once."""

    count_max: int = 1_000
    bytes_max: int = 256 * 2**20


def create_cached_content(
    store: Store, resource: CachedContentRecord, content: bytes, quota: CachedContentQuota
) -> None:
    """Keep it. Raises BadName: `resource_quota` when the tenant keeps too much already,
    `tenant_deleted` where it has been since it asked."""
    with store.change() as db:
        for (name,) in db.rows(
            "select name from tenants where tenant_id = ?", (resource.tenant_id,)
        ):
            check_not_deleted(name)
        rows = db.rows(
            "select count(*), coalesce(sum(length(content)), 0) from cached_contents"
            " where tenant_id = ? and ended_ms is null and expires_ms > ?",
            (resource.tenant_id, resource.created_ms),
        )
        kept, size = rows[0]
        if kept >= quota.count_max or size + len(content) > quota.bytes_max:
            raise BadName(
                "resource_quota",
                f"{kept} cached contents of {size} bytes are kept already; at most"
                f" {quota.count_max} of {quota.bytes_max} bytes together may be",
            )
        db.execute(
            "insert into cached_contents (resource_id, tenant_id, workspace, model, display_name,"
            " tokens, created_ms, updated_ms, expires_ms, content)"
            " values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                resource.resource_id,
                resource.tenant_id,
                resource.workspace,
                resource.model,
                resource.display_name,
                resource.tokens,
                resource.created_ms,
                resource.updated_ms,
                resource.expires_ms,
                content,
            ),
        )


def find_cached_content(
    store: Store, tenant_id: int, workspace: str, resource_id: str, now_ms: int
) -> tuple[CachedContentRecord, bytes] | None:
    """A live one of this tenant's workspace, with its content."""
    rows = store.query(
        "select resource_id, tenant_id, workspace, model, display_name, tokens, created_ms,"
        " updated_ms, expires_ms, content from cached_contents"
        " where resource_id = ? and tenant_id = ? and workspace = ?"
        " and ended_ms is null and expires_ms > ?",
        (resource_id, tenant_id, workspace, now_ms),
    )
    return (CachedContentRecord(*rows[0][:-1]), rows[0][-1]) if rows else None


def has_cached_content(
    store: Store, tenant_id: int, workspace: str, content: bytes, now_ms: int
) -> bool:
    """Does this tenant's workspace keep exactly this now? O(its resources)."""
    return bool(
        store.query(
            "select 1 from cached_contents where tenant_id = ? and workspace = ? and content = ?"
            " and ended_ms is null and expires_ms > ? limit 1",
            (tenant_id, workspace, content, now_ms),
        )
    )


def list_cached_contents(
    store: Store, tenant_id: int, workspace: str, now_ms: int, after: str, most: int
) -> list[CachedContentRecord]:
    """Live ones, in the order of their ids, from behind `after`."""
    rows = store.query(
        "select resource_id, tenant_id, workspace, model, display_name, tokens, created_ms,"
        " updated_ms, expires_ms from cached_contents where tenant_id = ? and workspace = ?"
        " and resource_id > ? and ended_ms is null and expires_ms > ? order by resource_id limit ?",
        (tenant_id, workspace, after, now_ms, most),
    )
    return [CachedContentRecord(*row) for row in rows]


def set_expiry(
    store: Store, tenant_id: int, workspace: str, resource_id: str, expires_ms: int, now_ms: int
) -> bool:
    """A live one ends at another time from now on; false: there is none."""
    with store.change() as db:
        moved = db.execute(
            "update cached_contents set expires_ms = ?, updated_ms = ?"
            " where resource_id = ? and tenant_id = ? and workspace = ?"
            " and ended_ms is null and expires_ms > ?",
            (expires_ms, now_ms, resource_id, tenant_id, workspace, now_ms),
        )
    return moved > 0


def end_cached_content(
    store: Store, tenant_id: int, workspace: str, resource_id: str, now_ms: int
) -> bool:
    """A live one ends now, its content is gone; false: there is none."""
    with store.change() as db:
        ended = db.execute(
            "update cached_contents set ended_ms = ?, content = null"
            " where resource_id = ? and tenant_id = ? and workspace = ?"
            " and ended_ms is null and expires_ms > ?",
            (now_ms, resource_id, tenant_id, workspace, now_ms),
        )
    return ended > 0


def end_cached_contents(store: Store, tenant_id: int, workspace: str | None, now_ms: int) -> int:
    """All live ones of a tenant, or of its workspace, end now, their content is gone; how many."""
    with store.change() as db:
        return db.execute(
            "update cached_contents set content = null, ended_ms ="
            " case when expires_ms < ?1 then expires_ms else ?1 end"
            " where tenant_id = ?2 and (cast(?3 as text) is null or workspace = ?3)"
            " and ended_ms is null",
            (now_ms, tenant_id, workspace),
        )


def sweep_cached_contents(store: Store, now_ms: int) -> int:
    """What has expired loses its content; how many."""
    with store.change() as db:
        return db.execute(
            "update cached_contents set ended_ms = expires_ms, content = null"
            " where ended_ms is null and expires_ms <= ?",
            (now_ms,),
        )


def cached_content_token_seconds(store: Store, tenant_id: int, since_ms: int, until_ms: int) -> int:
    """Tokens times whole seconds that cached contents were kept within [since_ms, until_ms).

    Rounded down once, at the end. O(resources of the tenant).
    """
    rows = store.query(
        "select coalesce(sum(tokens * (until_ms - since_ms)), 0) from (select tokens,"
        " case when created_ms < ?2 then ?2 else created_ms end as since_ms,"
        " case when coalesce(ended_ms, expires_ms) < ?3 then coalesce(ended_ms, expires_ms)"
        " else ?3 end as until_ms from cached_contents where tenant_id = ?1) as kept"
        " where until_ms > since_ms",
        (tenant_id, since_ms, until_ms),
    )
    return int(rows[0][0]) // 1000
