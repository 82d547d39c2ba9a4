"""Notes of the end users that requests name, written in batches beside the ledger.

A note is made before its request runs and written within a second, so a kill loses the attribution
of the last moment and no money. The number of users that a tenant may name in a day is bounded. The
module knows no HTTP; `gateway.app` makes one if `billing.attribution` asks for it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import suppress

from tenancy.errors import StoreError
from tenancy.history.request_users import UserNote, user_ref, write_users
from tenancy.storage.interface import Store
from tenancy.types import DAY_MS, WallClock

USERS_PER_DAY_MAX = 10_000
"""Different users of a tenant in a UTC day; further ones are counted as one."""
OTHER = "(other)"
GATHER_S = 0.5
"""Seconds that a note waits for others."""
PENDING_MAX = 100_000
"""Notes that wait while the database cannot be written; further ones are lost."""


class UserAttribution:
    """The notes of one gateway. Belongs to one event loop."""

    def __init__(self, store: Store, wall: WallClock) -> None:
        self._store = store
        self._wall = wall
        self._day = -1
        self._seen: dict[int, set[str]] = defaultdict(set)
        self._pending: list[UserNote] = []
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    def note(self, request_id: str, tenant_id: int, user: str) -> None:
        """Note the user of a request. O(1); waits for nothing."""
        day = self._wall() // DAY_MS
        if day != self._day:
            self._day = day
            self._seen.clear()
        name, seen = user_ref(user), self._seen[tenant_id]
        if name not in seen:
            if len(seen) >= USERS_PER_DAY_MAX:
                name = OTHER
            seen.add(name)
        if len(self._pending) < PENDING_MAX:
            self._pending.append(UserNote(request_id, tenant_id, name))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write_later())

    async def close(self) -> None:
        """Write what is pending; what cannot be written is lost."""
        self._closing.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        await self._write()

    async def _write_later(self) -> None:
        while self._pending and not self._closing.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(GATHER_S):
                    await self._closing.wait()
            await self._write()

    async def _write(self) -> None:
        """Write the pending notes; keep them if that fails."""
        batch, self._pending = self._pending, []
        if not batch:
            return
        try:
            await asyncio.to_thread(write_users, self._store, batch)
        except StoreError:
            self._pending = (batch + self._pending)[:PENDING_MAX]
