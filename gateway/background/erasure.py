"""Erasure of cached prefixes: of a tenant, a workspace, a shared scope or one lease.

An erasure returns after the engines that are there have confirmed it, and leaves a receipt, which
names the engines elsewhere that were away: `missed_erasures` has it carried out there. Namespaces
map to tenants by `gateway.caching.namespaces`. This module knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from engine.api import Erased, Namespace
from engine.statistics import NamespaceStats
from gateway.caching.namespaces import SHARED_SCOPE_PREFIX, namespaces_of, tenant_and_workspace_of
from gateway.caching.prefix_index import IndexedPrefix, PrefixIndex
from gateway.context import Context
from gateway.errors import Kind, Refusal
from gateway.http import json_api
from gateway.levels.report import is_disk_away
from tenancy.accounts.cached_contents import end_cached_contents
from tenancy.accounts.deletion import filter_deleted
from tenancy.accounts.erasure_receipts import (
    ErasedLevel,
    ErasedState,
    ErasureReceipt,
    add_levels,
    confirm_levels,
    digest_namespaces,
    list_uncompleted,
    write_receipt,
)
from tenancy.accounts.shared_scopes import ScopeRecord, list_scopes
from tenancy.errors import ConstraintBroken
from tenancy.ledger.idempotency import forget_answers
from tenancy.responses.conversations import erase_conversations
from tenancy.responses.stored_responses import erase_stored
from tenancy.storage.audit_log import Actor
from tenancy.storage.interface import Store

LEASE_ID_CHARS_MAX = 200
"""Longest lease id of a request, in characters."""
CALLS_IN_FLIGHT_MAX = 32
"""Concurrent erase calls to the engines."""


class ErasedLevelAnswer(Struct, frozen=True):
    """What an erasure took from a level. `shredded`: gone, and the key with which it was sealed is
    destroyed. `pending`: the level has not confirmed it yet, and `why`, if that is known; the
    server tries again each minute."""

    blocks: int
    bytes: int
    state: Literal["gone", "shredded", "pending"]
    why: str


class ReceiptAnswer(Struct, frozen=True):
    """The receipt of an erasure. `at`: RFC 3339. `levels`: by name; null in old receipts.
    `pending_at`: the engines elsewhere that were away: each carries it out before it takes requests
    again. `forgotten_at`: those that an administrator has forgotten before. `completed_at`: when
    all engines and levels had; null until then."""

    receipt_id: str
    at: str
    what: str
    blocks: int
    levels: dict[str, ErasedLevelAnswer] | None
    pending_at: list[str]
    forgotten_at: list[str]
    completed_at: str | None
    embeddings: int
    namespaces: int
    namespace_digest: str
    key_id: int | None


class ErasureTarget(Struct, frozen=True):
    """The part of a tenant's cache to erase: all, a workspace, or one lease.

    Without a workspace it includes the shared scopes that the tenant owns. A shared scope is like a
    workspace of its owner: see `scope_target`.
    """

    tenant_id: int
    key_id: int
    """The key that requests it, or 0."""
    workspace: str | None = None
    lease_id: str | None = None

    def describe(self) -> str:
        """Return the target as the receipt names it."""
        if self.lease_id is not None:
            return f"lease {self.lease_id}"
        if self.workspace is None:
            return "all"
        if self.workspace.startswith(SHARED_SCOPE_PREFIX):
            return f"shared scope {self.workspace.removeprefix(SHARED_SCOPE_PREFIX)}"
        return f"workspace {self.workspace}"

    def covers(self, namespace: Namespace) -> bool:
        """Return whether a namespace belongs to the target."""
        owner = tenant_and_workspace_of(namespace)
        return owner is not None and (
            owner[0] == self.tenant_id and self.workspace in (None, owner[1])
        )


class Holding(Struct, frozen=True):
    """The blocks that a tenant holds in one namespace."""

    tenant_id: int
    workspace: str
    stats: NamespaceStats

    @property
    def is_held(self) -> bool:
        """Whether any level has copies of it."""
        return bool(self.stats.blocks or self.stats.host_bytes or self.stats.is_stored)

    @property
    def scope_id(self) -> int | None:
        """Id of the shared scope, or None for a workspace. The tenant is the scope's owner."""
        number = self.workspace.removeprefix(SHARED_SCOPE_PREFIX)
        return int(number) if number != self.workspace else None

    def shown(self, scopes: Mapping[int, str]) -> dict[str, str | None]:
        """Return the workspace, or the name of the shared scope. `scopes`: names by id."""
        if self.scope_id is None:
            return {"workspace": self.workspace, "shared_scope": None}
        return {"workspace": None, "shared_scope": scopes.get(self.scope_id, "removed")}


def scope_target(scope: ScopeRecord, key_id: int, lease_id: str | None = None) -> ErasureTarget:
    """Return the target for a shared scope, or for one lease in it."""
    return ErasureTarget(scope.owner_id, key_id, f"{SHARED_SCOPE_PREFIX}{scope.scope_id}", lease_id)


def list_holdings(
    namespaces: Iterable[NamespaceStats], tenant_id: int | None = None
) -> list[Holding]:
    """Return the holdings of all tenants, or of one.

    O(namespaces): about 1 us each, or 0.1 us for those of other tenants.
    """
    found = namespaces_of(namespaces, tenant_id)
    pairs = ((tenant_and_workspace_of(one.namespace), one) for one in found)
    return [Holding(*owner, one) for owner, one in pairs if owner is not None]


class CacheErasure:
    """Erases what one gateway and its database keep of prefixes. Belongs to one event loop."""

    def __init__(self, gateway: Context) -> None:
        self._gateway = gateway
        self.under_way: list[ErasureTarget] = []
        """Erasures whose receipts are not written yet."""
        self.on_pending: Callable[[Collection[str]], None] = lambda names: None
        """Called with the names of the engines elsewhere that a new receipt waits for."""

    def live_entries(
        self, tenant_id: int, workspace: str | None = None, limit: int | None = None
    ) -> list[IndexedPrefix]:
        """Return a tenant's live entries of the prefix index, least recently used first.

        `limit`: only that many, the latest ones. O(entries), or O(entries up to the limit).
        """
        now_s = self._gateway.clock()
        scope = ErasureTarget(tenant_id, 0, workspace)
        owned = reversed(self._gateway.contracts.entries.owned_by(tenant_id))
        live = (entry for entry in owned if entry.is_live(now_s) and scope.covers(entry.key[0]))
        return list(islice(live, limit))[::-1]

    async def erase(self, target: ErasureTarget, by: Actor | None = None) -> ErasureReceipt:
        """Erase the target, then write the receipt. Runs to completion even if the caller is
        cancelled. `by`: the administrator that asked, for the audit log.

        Erases the engine's blocks, the entries of the prefix index with their rows in the database
        and, without a lease id, vectors of texts, cached contents, stored responses and
        conversations: what is in memory first, then rows, in small transactions that a full disk
        has room for. Blocks in use by a running request are unreachable for others at once, and
        freed when it ends. The receipt counts the blocks of all models, and names the engines
        elsewhere that are away. Raises Refusal for an unknown lease, EngineUnavailable if an engine
        of this machine is away, and StoreError: the caller may try again until it has a receipt.
        """
        return await self._gateway.work.shield(self._erase(target, by))

    async def scope_names(self) -> dict[int, str]:
        """Return the names of existing shared scopes by id."""
        return {
            scope.scope_id: scope.name for scope in await self._gateway.reports.ask(list_scopes)
        }

    async def erase_removed(self) -> None:
        """Erase what deleted tenants have in caches, with a receipt, and blocks of removed scopes.

        No client can read it any more. A tenant that left no ledger rows has no receipts; it may
        have blocks of a request that ran while it was deleted. Raises EngineUnavailable and
        StoreError.
        """
        await self._gateway.models.refresh()
        everything = list_holdings(self._gateway.models.namespaces())
        found = [one for one in everything if one.is_held]
        owners = {one.tenant_id for one in found}
        if self._gateway.embeddings is not None:
            owners |= self._gateway.embeddings.owners
        for tenant_id in await self._gateway.reports.ask(
            lambda store: filter_deleted(store, owners)
        ):
            with suppress(ConstraintBroken):  # of the receipt, written last: no row has this number
                await self.erase(ErasureTarget(tenant_id, 0))
        held = [one for one in everything if one.scope_id is not None]
        if not held:
            return
        # Read after the holdings, so that a scope created meanwhile is found.
        existing = await self.scope_names()
        for one in held:
            if one.scope_id not in existing:
                self._gateway.contracts.entries.erase_namespace(one.stats.namespace)
                await self._gateway.models.erase(one.stats.namespace)

    async def retry_pending(self) -> None:
        """Try again what a level could not confirm, and say so in the receipt once it has.

        Erases what was named as it is now: what was written since goes too. Raises
        EngineUnavailable and StoreError.
        """
        found = await asyncio.to_thread(list_uncompleted, self._gateway.store)
        self._gateway.metrics.levels.pending_receipts = len(found)
        if is_disk_away(self._gateway.models.stats()):
            return
        for receipt in found:
            if all(one.state != "pending" for one in receipt.levels.values()):
                continue  # it waits for engines that are away
            target = target_of(receipt.what, receipt.tenant_id, receipt.key_id)
            names, _ = await self._names_of(target)
            _forget_entries(self._gateway.contracts.entries, names, target.lease_id)
            levels, _ = await self._erase_all(names, target.lease_id)
            if any(one.state == "pending" for one in levels.values()):
                continue
            now = self._gateway.wall()
            completed = await asyncio.to_thread(
                confirm_levels, self._gateway.store, receipt.receipt_id, levels, now
            )
            self._gateway.metrics.levels.pending_receipts -= completed
            self._gateway.log("erasure_confirmed", {"receipt": receipt.receipt_id})

    async def _erase(self, target: ErasureTarget, by: Actor | None) -> ErasureReceipt:
        self.under_way.append(target)
        try:
            receipt = await self._erase_and_write(target, by)
        finally:
            self.under_way.remove(target)
        if receipt.pending_at:
            self.on_pending(receipt.pending_at)
        return receipt

    async def _erase_and_write(self, target: ErasureTarget, by: Actor | None) -> ErasureReceipt:
        index, (names, away) = self._gateway.contracts.entries, await self._names_of(target)
        # The prefix index first: a prefix billed as read must still be cached.
        forgotten = _forget_entries(index, names, target.lease_id)
        vectors = 0
        if target.lease_id is None and self._gateway.embeddings is not None:
            vectors = self._gateway.embeddings.erase(target.tenant_id, target.workspace)
        levels, lost = await self._erase_all(names, target.lease_id)
        # Again for prefixes added meanwhile: the engine erased these too, so no read may be billed.
        _forget_entries(index, names, target.lease_id)
        # What is in memory needs no room; a database without room is asked after it.
        if target.lease_id is None:
            await self._gateway.contents.ask(
                partial(self._erase_contents, target), target.tenant_id
            )
        await self._gateway.promise_store.flush()  # durable before the receipt
        blocks, pending_at = levels["device"].blocks, tuple(sorted(away | lost))
        pending = [name for name, one in levels.items() if one.state == "pending"]
        found = forgotten or pending or pending_at or any(one.blocks for one in levels.values())
        if target.lease_id is not None and not found:
            raise Refusal(Kind.NOT_FOUND, "lease_unknown", "Lease not found.", param="lease_id")
        at_ms = self._gateway.wall()
        receipt = ErasureReceipt(
            receipt_id=self._gateway.new_id(),
            tenant_id=target.tenant_id,
            key_id=target.key_id,
            at_ms=at_ms,
            what=target.describe(),
            namespaces=len(names),
            namespace_digest=digest_namespaces(names),
            blocks=blocks,
            levels=levels,
            embeddings=vectors,
            pending_at=pending_at,
            completed_ms=None if pending or pending_at else at_ms,
        )
        await asyncio.to_thread(write_receipt, self._gateway.store, receipt, by)
        if target.lease_id is None:
            # Again for what running requests stored meanwhile; from here on the receipt forbids it.
            owner = (self._gateway.store, target.tenant_id, target.workspace, receipt.at_ms)
            await asyncio.to_thread(erase_stored, *owner)
            await asyncio.to_thread(erase_conversations, *owner)
            await asyncio.to_thread(self._gateway.store.keep_room)
        facts: dict[str, object] = {
            "tenant_id": target.tenant_id,
            "key_id": target.key_id,
            "blocks": blocks,
        }
        if pending:
            facts["pending"] = pending
        if pending_at:
            facts["pending_at"] = pending_at
        self._gateway.metrics.levels.pending_receipts += receipt.completed_ms is None
        self._gateway.log("cache_erased", {"receipt": receipt.receipt_id, **facts})
        return receipt

    def _erase_contents(self, target: ErasureTarget, _: Store) -> None:
        """Delete what the database has of the target's texts, in small transactions."""
        owner = self._gateway.store, target.tenant_id, target.workspace
        self._gateway.store.make_room()
        erase_stored(*owner)
        erase_conversations(*owner)
        forget_answers(*owner)
        end_cached_contents(*owner, self._gateway.wall())

    async def _names_of(self, target: ErasureTarget) -> tuple[list[Namespace], frozenset[str]]:
        """Return the namespaces of a target that have blocks or entries, and the names of the
        engines elsewhere that cannot be asked now."""
        away = await self._gateway.models.refresh_all()
        held = {one.namespace for one in self._gateway.models.namespaces()}
        owned = self._gateway.contracts.entries.owned_by(target.tenant_id)
        return sorted(filter(target.covers, held | {entry.key[0] for entry in owned})), away

    async def _erase_all(
        self, names: Sequence[Namespace], lease_id: str | None
    ) -> tuple[dict[str, ErasedLevel], frozenset[str]]:
        """Erase in the engines. Returns what each level lost, the device among them, and the names
        of the engines elsewhere that did not answer."""
        sums: dict[str, ErasedLevel] = {"device": ErasedLevel(0, 0)}
        away = frozenset[str]()
        for start in range(0, len(names), CALLS_IN_FLIGHT_MAX):
            batch = names[start : start + CALLS_IN_FLIGHT_MAX]
            calls = (self._gateway.models.erase(name, lease_id) for name in batch)
            for name, (erased, lost) in zip(batch, await asyncio.gather(*calls), strict=True):
                away |= lost
                info = self._gateway.models.info_of(name)
                size = 0 if info is None else info.kv_bytes_per_block
                sums = add_levels(sums, levels_of(erased, size))
        if is_disk_away(self._gateway.models.stats()):  # it may have namespaces that are not known
            before = sums.get("disk", ErasedLevel(0, 0))
            sums["disk"] = replace(before, state="pending")
        return sums, away


def levels_of(erased: Erased, block_bytes: int) -> dict[str, ErasedLevel]:
    """Return what each level lost to an erasure in an engine. `block_bytes`: of a block of KV."""
    found = {"device": ErasedLevel(erased.blocks, erased.blocks * block_bytes)}
    for one in erased.levels:
        state: ErasedState = "shredded" if one.is_shredded else "gone"
        state = "pending" if one.code else state
        why = one.code if one.level == "remote" else ""
        found = add_levels(found, {one.level: ErasedLevel(one.blocks, one.bytes, state, why)})
    return found


def target_of(what: str, tenant_id: int, key_id: int = 0) -> ErasureTarget:
    """Return the target that a receipt's words describe; see `ErasureTarget.describe`."""
    target = ErasureTarget(tenant_id, key_id)
    if what.startswith("lease "):
        return replace(target, lease_id=what.removeprefix("lease "))
    if what.startswith("workspace "):
        return replace(target, workspace=what.removeprefix("workspace "))
    if what.startswith("shared scope "):
        name = what.removeprefix("shared scope ")
        return replace(target, workspace=f"{SHARED_SCOPE_PREFIX}{name}")
    return target


def receipt_body(receipt: ErasureReceipt) -> dict[str, Any]:
    """Return a receipt as responses show it."""
    return {
        "receipt_id": receipt.receipt_id,
        "at": json_api.instant(receipt.at_ms),
        "what": receipt.what,
        "blocks": receipt.blocks,
        "levels": receipt.levels,
        "pending_at": list(receipt.pending_at),
        "forgotten_at": list(receipt.forgotten_at),
        "completed_at": None
        if receipt.completed_ms is None
        else json_api.instant(receipt.completed_ms),
        "embeddings": receipt.embeddings,
        "namespaces": receipt.namespaces,
        "namespace_digest": receipt.namespace_digest,
        "key_id": receipt.key_id,
    }


def _forget_entries(index: PrefixIndex, names: Sequence[Namespace], lease_id: str | None) -> int:
    """Remove entries from the prefix index; returns their number."""
    if lease_id is None:
        return sum(map(index.erase_namespace, names))
    digest = _lease_digest(lease_id)
    return sum(index.erase((name, digest)) for name in names)


def _lease_digest(lease_id: str) -> bytes:
    """Return the digest that a lease id encodes; b"" for a malformed id."""
    try:
        return bytes.fromhex(lease_id)
    except ValueError:
        return b""
