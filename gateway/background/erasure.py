"""Whose cache is whose, and forgetting it: from the engine's namespaces back to tenants.

A namespace begins with its tenant and its workspace (`admission.namespace_of`); here, and nowhere
else, these are read from it again. An erasure waits until the engine has said that it is done, and
leaves a receipt. It knows no HTTP; administration and self-service call it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct

from engine.api import Namespace, NamespaceStats
from gateway.caching.namespaces import SHARED_SCOPE_PREFIX, namespaces_of, tenant_and_workspace_of
from gateway.caching.prefix_index import IndexedPrefix, PrefixIndex
from gateway.context import Context
from gateway.errors import Kind, Refusal
from gateway.http import json_api
from tenancy.accounts.cached_contents import end_cached_contents
from tenancy.accounts.deletion import filter_deleted
from tenancy.accounts.erasure_receipts import ErasureReceipt, digest_namespaces, write_receipt
from tenancy.accounts.shared_scopes import ScopeRecord, list_scopes
from tenancy.ledger.idempotency import forget_answers

LEASE_ID_SIGNS_MAX = 200
_AT_ONCE = 32
"""Calls to the engine that are on their way at the same time."""


class ErasureTarget(Struct, frozen=True):
    """What of a tenant's cache is meant: all, with the shared scopes it owns, a workspace's, or one
    lease. `key_id` asks for it. A shared scope is as a workspace of its owner: `of_scope`."""

    tenant_id: int
    key_id: int
    workspace: str | None = None
    lease_id: str | None = None

    def words(self) -> str:
        """As the receipt says it."""
        if self.lease_id is not None:
            return f"lease {self.lease_id}"
        if self.workspace is None:
            return "all"
        if self.workspace.startswith(SHARED_SCOPE_PREFIX):
            return f"shared scope {self.workspace.removeprefix(SHARED_SCOPE_PREFIX)}"
        return f"workspace {self.workspace}"

    def covers(self, namespace: Namespace) -> bool:
        """Is this one of the namespaces that are meant?"""
        whose = tenant_and_workspace_of(namespace)
        return whose is not None and (
            whose[0] == self.tenant_id and self.workspace in (None, whose[1])
        )


class Holding(Struct, frozen=True):
    """What a tenant holds of the cache in one namespace now."""

    tenant_id: int
    workspace: str
    stats: NamespaceStats

    @property
    def scope_id(self) -> int | None:
        """Of the shared scope that it is, if it is one; the tenant is then its owner."""
        number = self.workspace.removeprefix(SHARED_SCOPE_PREFIX)
        return int(number) if number != self.workspace else None

    def shown(self, scopes: Mapping[int, str]) -> dict[str, str | None]:
        """Its workspace, or the name of the shared scope."""
        if self.scope_id is None:
            return {"workspace": self.workspace, "shared_scope": None}
        return {"workspace": None, "shared_scope": scopes.get(self.scope_id, "removed")}


def of_scope(scope: ScopeRecord, key_id: int, lease_id: str | None = None) -> ErasureTarget:
    """All of a shared scope, or a lease in it."""
    return ErasureTarget(scope.owner_id, key_id, f"{SHARED_SCOPE_PREFIX}{scope.scope_id}", lease_id)


def holdings(namespaces: Iterable[NamespaceStats], tenant_id: int | None = None) -> list[Holding]:
    """What is held, by whom; of one tenant alone, if it is given. O(namespaces), at 1 us each, or
    0.1 us for those of others than the tenant."""
    found = namespaces_of(namespaces, tenant_id)
    pairs = ((tenant_and_workspace_of(one.namespace), one) for one in found)
    return [Holding(*whose, one) for whose, one in pairs if whose is not None]


def entries_of(
    gateway: Context, tenant_id: int, workspace: str | None = None, most: int | None = None
) -> list[IndexedPrefix]:
    """What was agreed to be kept for a tenant and has not ended, longest unused first; `most`: of
    these the latest. O(its entries), or of these until there are as many."""
    now_s = gateway.clock()
    mine = ErasureTarget(tenant_id, 0, workspace)
    owned = reversed(gateway.contracts.entries.owned_by(tenant_id))
    live = (entry for entry in owned if entry.is_live(now_s) and mine.covers(entry.key[0]))
    return list(islice(live, most))[::-1]


async def erase(gateway: Context, target: ErasureTarget) -> ErasureReceipt:
    """Forget it in the engine, in the books and among cached contents, then write the receipt; to
    the end, also if whoever asked goes away.

    Blocks that a running answer uses are out of reach of others at once and freed when it ends.
    Raises Refusal for a lease that is not there, EngineUnavailable and StoreError: it may be asked
    for again, until there is a receipt.
    """
    receipts: list[ErasureReceipt] = []

    async def work() -> None:
        receipts.append(await _erase(gateway, target))

    await gateway.finish(work())
    return receipts[0]


async def scope_names(gateway: Context) -> dict[int, str]:
    """Names of the shared scopes there are, by id."""
    return {scope.scope_id: scope.name for scope in await gateway.reports.ask(list_scopes)}


async def forget_removed(gateway: Context) -> None:
    """Forget what deleted tenants hold, with a receipt, and shared scopes that have been removed:
    nobody can read it any more. Raises EngineUnavailable and StoreError."""
    await gateway.engine.get_stats()
    everything = holdings(gateway.engine.namespaces)
    found = [one for one in everything if one.stats.blocks]
    owners = {one.tenant_id for one in found}
    for tenant_id in await gateway.reports.ask(lambda store: filter_deleted(store, owners)):
        await erase(gateway, ErasureTarget(tenant_id, 0))
    held = [one for one in everything if one.scope_id is not None]
    if not held:
        return
    # Asked after what is held: a scope that was made since is there too.
    there = await scope_names(gateway)
    for one in held:
        if one.scope_id not in there:
            gateway.contracts.entries.erase_namespace(one.stats.namespace)
            await gateway.engine.erase(one.stats.namespace)


def receipt_body(receipt: ErasureReceipt) -> dict[str, Any]:
    """A receipt as it is answered."""
    return {
        "receipt_id": receipt.receipt_id,
        "at": json_api.instant(receipt.at_ms),
        "what": receipt.what,
        "blocks": receipt.blocks,
        "namespaces": receipt.namespaces,
        "namespace_digest": receipt.namespace_digest,
        "key_id": receipt.key_id,
    }


async def _erase(gateway: Context, target: ErasureTarget) -> ErasureReceipt:
    await gateway.engine.get_stats()
    book = gateway.contracts.entries
    held = {one.namespace for one in gateway.engine.namespaces}
    agreed = {entry.key[0] for entry in book.owned_by(target.tenant_id)}
    names = sorted(filter(target.covers, held | agreed))
    # First the books: what is billed as a read has to be there to be read.
    forgotten = _forget(book, names, target.lease_id)
    if target.lease_id is None:
        ended = (gateway.store, target.tenant_id, target.workspace, gateway.wall())
        await asyncio.to_thread(end_cached_contents, *ended)
        await asyncio.to_thread(forget_answers, *ended[:3])
    blocks = await _erase_all(gateway, names, target.lease_id)
    # Again, for what has begun between the two: it was erased as well, and nobody owes it.
    _forget(book, names, target.lease_id)
    if target.lease_id is not None and not forgotten and not blocks:
        raise Refusal(Kind.NOT_FOUND, "lease_unknown", "There is no such lease.", param="lease_id")
    receipt = ErasureReceipt(
        receipt_id=gateway.new_id(),
        tenant_id=target.tenant_id,
        key_id=target.key_id,
        at_ms=gateway.wall(),
        what=target.words(),
        namespaces=len(names),
        namespace_digest=digest_namespaces(names),
        blocks=blocks,
    )
    await asyncio.to_thread(write_receipt, gateway.store, receipt)
    facts = {"tenant_id": target.tenant_id, "key_id": target.key_id, "blocks": blocks}
    gateway.log("cache_erased", {"receipt": receipt.receipt_id, **facts})
    return receipt


def _forget(book: PrefixIndex, names: Sequence[Namespace], lease_id: str | None) -> int:
    """In the books: how many entries."""
    if lease_id is None:
        return sum(map(book.erase_namespace, names))
    digest = _digest(lease_id)
    return sum(book.erase((name, digest)) for name in names)


async def _erase_all(gateway: Context, names: Sequence[Namespace], lease_id: str | None) -> int:
    blocks = 0
    for start in range(0, len(names), _AT_ONCE):
        some = names[start : start + _AT_ONCE]
        calls = (gateway.engine.erase(name, lease_id=lease_id) for name in some)
        blocks += sum(erased.blocks for erased in await asyncio.gather(*calls))
    return blocks


def _digest(lease_id: str) -> bytes:
    """The digest that a lease is named after; b"" for other names."""
    try:
        return bytes.fromhex(lease_id)
    except ValueError:
        return b""
