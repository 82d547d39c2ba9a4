"""The books of promises: prefixes that were written in a retention class and are still promised.

They outlive the gateway that made the promises: a prefix that was written for an hour, and paid as
a write, is read after a restart. A row has digests and opaque namespaces, never text. The module
knows no engine and no clock; `gateway.caching.promise_store` reads and writes the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from tenancy.pseudonyms import PSEUDONYM_PREFIX
from tenancy.storage.interface import Store, placeholders

PrefixClass = tuple[bytes, bytes, str]
"""Namespace, digest, and name of the retention class."""


class WrittenPrefix(Struct, frozen=True):
    """One promise. `writer`, `model`, `template`, `content`: see `gateway.caching.prefix_index`."""

    namespace: bytes
    digest: bytes
    name: str
    tenant_id: int
    tokens: int
    retention: str
    """The terms of the class `name` as JSON."""
    expires_ms: int | None
    """None without an end."""
    promised_until_ms: int
    epoch: str
    """The engine that held it."""
    writer: int
    model: str
    template: str
    content: bytes


_COLUMNS = (
    *("gateway", "namespace", "digest", "class", "tenant_id", "tokens", "retention", "expires_ms"),
    *("promised_until_ms", "epoch", "writer", "model", "template", "content"),
)
_CHANGING = ("tokens", "retention", "expires_ms", "promised_until_ms", "epoch")
_UPSERT = (
    f"insert into written_prefixes ({', '.join(_COLUMNS)}) values {placeholders(len(_COLUMNS))}"
    " on conflict (gateway, namespace, digest, class) do update set "
    + ", ".join(f"{name} = excluded.{name}" for name in _CHANGING)
)


def take_over(store: Store, gateway: str, now_ms: int) -> list[WrittenPrefix]:
    """Return the promises of this gateway that still run, those that end first at the beginning.

    Deletes what has ended and what belongs to tenants that are gone. Promises of a file that was
    moved to a server go to the first gateway that takes over. O(rows). Raises StoreError.
    """
    with store.change() as db:
        db.execute("delete from written_prefixes where promised_until_ms <= ?", (now_ms,))
        db.execute(
            "delete from written_prefixes where tenant_id not in"
            " (select tenant_id from tenants where name not like ?)",
            (f"{PSEUDONYM_PREFIX}%",),
        )
        if gateway:
            db.execute("update written_prefixes set gateway = ? where gateway = ''", (gateway,))
    rows = store.query(
        f"select {', '.join(_COLUMNS[1:])} from written_prefixes where gateway = ?"
        " order by promised_until_ms, namespace, digest, class",
        (gateway,),
    )
    return [WrittenPrefix(*row) for row in rows]


def take_over_from(store: Store, dead: str, gateway: str, now_ms: int) -> list[WrittenPrefix]:
    """Move the promises of a gateway that died to another, and return them; of prefixes that the
    other one has promised too its own stay. A second call, by whomever, returns none. O(rows).
    Raises StoreError."""
    with store.change() as db:
        db.execute("delete from written_prefixes where promised_until_ms <= ?", (now_ms,))
        db.execute(
            "delete from written_prefixes where gateway = ?1 and exists (select 1 from"
            " written_prefixes as own where own.gateway = ?2"
            " and own.namespace = written_prefixes.namespace"
            " and own.digest = written_prefixes.digest)",
            (dead, gateway),
        )
        rows = db.rows(
            f"select {', '.join(_COLUMNS[1:])} from written_prefixes where gateway = ?"
            " order by promised_until_ms, namespace, digest, class",
            (dead,),
        )
        db.execute("update written_prefixes set gateway = ? where gateway = ?", (gateway, dead))
    return [WrittenPrefix(*row) for row in rows]


def other_gateways(store: Store, gateway: str) -> list[str]:
    """Return the other gateways that have promises. Raises StoreError."""
    rows = store.query(
        "select distinct gateway from written_prefixes where gateway not in (?, '')", (gateway,)
    )
    return [row[0] for row in rows]


def save(
    store: Store, gateway: str, kept: Sequence[WrittenPrefix], gone: Sequence[PrefixClass]
) -> None:
    """Write promises and delete others, all or nothing. O(changes). Raises StoreError."""
    if not kept and not gone:
        return
    with store.change() as db:
        db.execute_many(_DELETE, [(gateway, *one) for one in gone])
        db.execute_many(_UPSERT, [(gateway, *structs.astuple(one)) for one in kept])


def delete_ended(store: Store, now_ms: int) -> None:
    """Delete the promises of all gateways that have ended. Raises StoreError."""
    if store.query(
        "select 1 from written_prefixes where promised_until_ms <= ? limit 1", (now_ms,)
    ):
        with store.change() as db:
            db.execute("delete from written_prefixes where promised_until_ms <= ?", (now_ms,))


_DELETE = (
    "delete from written_prefixes where gateway = ? and namespace = ? and digest = ? and class = ?"
)
