"""Tokens times seconds that each tenant holds in the cache.

A block belongs to one namespace, and a namespace to one tenant, however many of its sequences share
the block: so it is counted once, for that tenant, and the tenants' sum is what the pool has in use.
Integrated from the engine's heartbeats, each standing until the next; what was held is written to
the ledger every minute, and what nobody can read any more (a removed shared scope, expired cached
contents) is forgotten then. `app` runs it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import suppress

from engine.api import Stats
from engine.errors import EngineError
from gateway.cache_terms import BEST_EFFORT
from gateway.context import Context
from gateway.erasure import forget_removed, owner_of
from gateway.quotas import QuotaNews
from tenancy.bookkeeping import StorageReading
from tenancy.errors import LedgerUnavailable, StoreError
from tenancy.idempotency import sweep
from tenancy.registry import list_tenants
from tenancy.resources import sweep_resources

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
        self._since_ns: int | None = None
        self._held: dict[Key, int] = {}
        self._token_ns: dict[Key, int] = defaultdict(int)

    def look(self, stats: Stats, block_size: int, now_ns: int) -> None:
        """What the latest heartbeat says is held, from now on. O(namespaces)."""
        if self._since_ns is not None and now_ns > self._since_ns:
            for key, tokens in self._held.items():
                self._token_ns[key] += tokens * (now_ns - self._since_ns)
        self._since_ns = now_ns
        self._held = held(stats, block_size)

    def forget(self, now_ns: int) -> None:
        """There is no engine, so nothing is held."""
        self.look(Stats(), 0, now_ns)

    def take(self) -> dict[Key, int]:
        """Whole token-seconds since the last call."""
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


def held(stats: Stats, block_size: int) -> dict[Key, int]:
    """Tokens' worth of blocks by tenant and class."""
    found: dict[Key, int] = defaultdict(int)
    for one in stats.namespaces:
        owner = owner_of(one.namespace)
        if owner is None:
            continue
        rest = one.blocks - one.promised_blocks
        for name, blocks in (*one.promised_by_class.items(), (BEST_EFFORT, rest)):
            if blocks:
                found[owner, name] += blocks * block_size
    return dict(found)


def look_at_churn(gateway: Context) -> None:
    """Count what has come and gone since somebody looked. O(namespaces)."""
    moves, minute = gateway.engine.losses.moves(), gateway.wall() // 60_000
    gateway.churn.look(moves, owner_of, minute)


class StorageWatch:
    """Keeps a meter going, and writes what it has measured."""

    def __init__(self, gateway: Context) -> None:
        self._gateway = gateway
        self._meter = StorageMeter()
        self._quotas = QuotaNews(gateway)
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
            await asyncio.sleep(LOOK_EVERY_S)

    def _look(self) -> None:
        engine, now_ns = self._gateway.engine, int(self._gateway.clock() * NANO)
        if engine.info is None:
            self._meter.forget(now_ns)
        else:
            self._meter.look(engine.stats, engine.info.block_size, now_ns)

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
            await asyncio.to_thread(sweep_resources, store, now_ms)
            while await asyncio.to_thread(sweep, store, now_ms):
                pass
