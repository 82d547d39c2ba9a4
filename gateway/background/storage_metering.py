"""Tokens times seconds that each tenant holds in the cache.

A block belongs to one namespace, and a namespace to one tenant, however many of its sequences share
the block: so it is counted once, for that tenant, and the tenants' sum is what the pool has in use.
Integrated from what the engine tells has changed, each standing until the next; what was held is
written to the ledger every minute, and what nobody can read any more (a removed shared scope,
expired cached contents) is forgotten then. `app` runs it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress

from engine.client.namespace_stats import Change, NamespaceTable
from engine.errors import EngineError
from gateway.background.budget_alerts import SoftBudgets
from gateway.background.erasure import forget_removed
from gateway.background.quota_updates import QuotaUpdates
from gateway.caching.namespaces import owner_of
from gateway.context import Context
from gateway.retention_classes import BEST_EFFORT
from tenancy.accounts.cached_contents import sweep_cached_contents
from tenancy.accounts.tenants import list_tenants
from tenancy.errors import LedgerUnavailable, StoreError
from tenancy.ledger.idempotency import sweep
from tenancy.ledger.transactions import StorageReading

LOOK_EVERY_S = 0.5
CHURN_EVERY_S = 5.0
"""What an engine tells that dies is lost between two looks."""

WRITE_EVERY_S = 60.0
NANO = 1_000_000_000

Key = tuple[int, str]
"""A tenant's id, and the class that promises it longest, or `best_effort`."""


class StorageMeter:
    """Whole token-seconds by tenant and class; what is less than one is carried on. Pure."""

    def __init__(self) -> None:
        self._book: NamespaceTable | None = None
        self._now_ns: int | None = None
        self._held: dict[Key, int] = {}
        self._since_ns: dict[Key, int] = {}
        self._token_ns: dict[Key, int] = defaultdict(int)

    def look(self, book: NamespaceTable | None, block_size: int, now_ns: int) -> None:
        """What the engine has told is held, from now on. Without one, or by another than the last
        time, nothing of what was is. O(namespaces that changed)."""
        if self._now_ns is None or now_ns > self._now_ns:
            self._now_ns = now_ns
        if book is not self._book:
            self._book = book
            self._move({key: -tokens for key, tokens in self._held.items()})
        if book is not None:
            self._move(held_more(book.take_changes(self), block_size))

    def take(self) -> dict[Key, int]:
        """Whole token-seconds between the last look and the last call."""
        for key in self._held:
            self._settle(key)
        found = {}
        for key, token_ns in list(self._token_ns.items()):
            whole, rest = divmod(token_ns, NANO)
            if whole:
                found[key] = whole
            if rest:
                self._token_ns[key] = rest
            else:
                del self._token_ns[key]
        return found

    def put_back(self, key: Key, token_seconds: int) -> None:
        """They could not be written: the next `take` has them too."""
        self._token_ns[key] += token_seconds * NANO

    def _move(self, more: dict[Key, int]) -> None:
        for key, tokens in more.items():
            self._settle(key)
            tokens += self._held.get(key, 0)
            if tokens:
                self._held[key] = tokens
            else:
                del self._held[key], self._since_ns[key]

    def _settle(self, key: Key) -> None:
        """What it held until now is counted."""
        assert self._now_ns is not None, "nothing is held before the first look"
        since_ns = self._since_ns.get(key, self._now_ns)
        if since_ns < self._now_ns and key in self._held:
            self._token_ns[key] += self._held[key] * (self._now_ns - since_ns)
        self._since_ns[key] = self._now_ns


def held_more(changes: Iterable[Change], block_size: int) -> dict[Key, int]:
    """Tokens' worth of blocks, by tenant and class, that are held more than before; no zeros."""
    found: dict[Key, int] = defaultdict(int)
    for before, after in changes:
        for one, sign in ((before, -block_size), (after, block_size)):
            if one is None or (owner := owner_of(one.namespace)) is None:
                continue
            found[owner, BEST_EFFORT] += sign * (one.blocks - one.promised_blocks)
            for name, blocks in one.promised_by_class.items():
                found[owner, name] += sign * blocks
    return {key: tokens for key, tokens in found.items() if tokens}


def look_at_churn(gateway: Context) -> None:
    """Count what has come and gone since somebody looked. O(namespaces that moved)."""
    moves, minute = gateway.engine.cache_events.take_moves(), gateway.wall() // 60_000
    gateway.churn.update(moves, owner_of, minute)


class StorageWatch:
    """Keeps a meter going, and writes what it has measured."""

    def __init__(self, gateway: Context) -> None:
        self._gateway = gateway
        self._meter = StorageMeter()
        self._quotas = QuotaUpdates(gateway)
        self._soft_budgets = SoftBudgets(gateway)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin on the running loop."""
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """End, with what has been measured written."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._look()
        await self._write()
        await self._clear_expired()

    async def _watch(self) -> None:
        clock = self._gateway.clock
        written_s = looked_s = clock()
        while True:
            self._look()
            self._quotas.tell()
            with suppress(StoreError):  # at the next look
                await self._quotas.note_pool()
            if clock() - looked_s >= CHURN_EVERY_S:
                looked_s = clock()
                look_at_churn(self._gateway)
            if clock() - written_s >= WRITE_EVERY_S:
                written_s = clock()
                await self._write()
                with suppress(EngineError, StoreError):  # in a minute again
                    await forget_removed(self._gateway)
                await self._clear_expired()
                self._quotas.tell_again()
                await self._soft_budgets.look()
            await asyncio.sleep(LOOK_EVERY_S)

    def _look(self) -> None:
        engine, now_ns = self._gateway.engine, int(self._gateway.clock() * NANO)
        if engine.info is None:
            self._meter.look(None, 0, now_ns)
            self._gateway.holders.update(None, owner_of)
        else:
            self._meter.look(engine.namespaces, engine.info.block_size, now_ns)
            self._gateway.holders.update(engine.namespaces, owner_of)

    async def _write(self) -> None:
        """What cannot be written now is written with the next reading."""
        gateway = self._gateway
        try:
            tenants = await asyncio.to_thread(list_tenants, gateway.store)
        except StoreError:
            return
        tiers = {tenant.tenant_id: tenant.tier for tenant, _ in tenants}
        measured, at_ms = self._meter.take(), gateway.wall()
        written = {
            (tenant_id, name): gateway.ledger.write(
                StorageReading(tenant_id, name, seconds, at_ms, gateway.model, tiers[tenant_id])
            )
            for (tenant_id, name), seconds in measured.items()
            if tenant_id in tiers
        }
        for key, future in written.items():
            try:
                await future
            except LedgerUnavailable:
                self._meter.put_back(key, measured[key])

    async def _clear_expired(self) -> None:
        """What cached contents held, and kept answers, whose time is over: nobody may read it, so
        nobody keeps it."""
        store, now_ms = self._gateway.store, self._gateway.wall()
        with suppress(StoreError):  # in a minute again
            await asyncio.to_thread(sweep_cached_contents, store, now_ms)
            while await asyncio.to_thread(sweep, store, now_ms):
                pass
