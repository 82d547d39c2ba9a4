"""Keep miss causes and their sums in the database, so that they outlive the gateway.

Analytics explain misses in a process of their own. A task takes the causes every ten seconds,
writes those of single requests (`tenancy.reuse.miss_causes`), and adds all of them to the counts of
findings (`tenancy.reuse.finding_counts`); a report flushes them first. A killed gateway loses at
most the last ten seconds. `gateway.app` makes the store.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from msgspec import structs

from gateway.analytics.prompt_findings import HEAD
from gateway.caching.namespaces import owner_of
from gateway.context import Context
from gateway.errors import Refusal
from gateway.findings.causes import NOT_SERVED
from gateway.periodic_task import PeriodicTask
from tenancy.errors import StoreError
from tenancy.reuse.finding_counts import (
    FindingCount,
    PromptOrigin,
    add_counts,
    delete_old_counts,
    read_origins,
)
from tenancy.reuse.miss_causes import FIRST_USE, MissCause, write_causes
from tenancy.types import DAY_MS, HOUR_MS

FLUSH_S = 10.0
"""Seconds between two writes."""
SWEEP_FLUSHES = 360
"""Writes between two deletions of old counts."""
KEPT_DAYS = 90
PENDING_MAX = 20_000
"""Causes, and counts, that wait for a database that fails; later ones are lost."""
TAKERS_MAX = 3
"""Tenants that one count of evictions names, those that took most blocks."""
TAKER = "taker:"
"""Prefix of the facts that name a tenant by its id, with the blocks that it took."""


class FindingStore:
    """The stored findings of one gateway. Belongs to one event loop; a thread writes."""

    def __init__(self, gateway: Context, gateway_id: str = "") -> None:
        """`gateway_id`: names this gateway's origins; "" for a database that has one gateway."""
        self._gateway = gateway
        self._gateway_id = gateway_id
        self._causes: list[MissCause] = []
        self._counts: list[FindingCount] = []
        self._origins: dict[int, PromptOrigin] | None = None
        self._taken: Counter[tuple[int, int]] = Counter()
        self._turn = asyncio.Lock()
        self._rounds = 0
        self._task = PeriodicTask("findings", self._run, FLUSH_S, gateway.log, gateway.clock)

    def start(self) -> None:
        """Write counts from now on, on the running event loop."""
        self._task.start()

    async def flush(self) -> None:
        """Write all causes so far; durable on return. Raises StoreError; the next call writes them
        then. Analytics that restart have no causes. A caller that is cancelled leaves at once, and
        the write goes on: a second one would count the same again."""
        await self._gateway.work.shield(self._flush())

    async def _flush(self) -> None:
        store = self._gateway.store
        async with self._turn:
            with suppress(Refusal):
                taken = await self._gateway.analytics.take_misses()
                self._gateway.recent_causes.note(taken.causes, self._gateway.clock())
                self._causes = [*self._causes, *taken.causes][:PENDING_MAX]
                self._counts = [*self._counts, *taken.counts, *self._unserved()][:PENDING_MAX]
            await asyncio.to_thread(write_causes, store, self._causes)
            self._causes = []
            if not self._counts:
                return
            if self._origins is None:
                self._origins = await asyncio.to_thread(read_origins, store, self._gateway_id)
            counts, origins = self._attribute(self._counts, self._origins)
            counts = self._name_takers(counts)
            await asyncio.to_thread(add_counts, store, counts, list(origins.values()))
            self._counts = []
            self._origins |= origins

    async def close(self) -> None:
        """Stop, and write everything. A database that fails costs the last counts. Safe to repeat,
        and without `start`."""
        await self._task.close()
        with suppress(StoreError):
            await self.flush()

    # -- internals ----------------------------------------------------------------------------

    async def _run(self) -> None:
        """Write the counts, and now and then delete old ones."""
        self._rounds += 1
        with suppress(StoreError):  # tried again with the next counts
            await self.flush()
            if self._rounds % SWEEP_FLUSHES == 0:
                before_ms = self._gateway.wall() - KEPT_DAYS * DAY_MS
                await asyncio.to_thread(delete_old_counts, self._gateway.store, before_ms)

    def _unserved(self) -> list[FindingCount]:
        """Return the counts of requests for models that are not served."""
        default, now_ms = self._gateway.models.default.name, self._gateway.wall()
        hour_ms = now_ms // HOUR_MS * HOUR_MS
        return [
            FindingCount(
                *(tenant_id, hour_ms, NOT_SERVED, name, requests, 0, now_ms, now_ms), model=default
            )
            for (tenant_id, name), requests in self._gateway.unserved.take().items()
        ]

    def _attribute(
        self, counts: Sequence[FindingCount], origins: dict[int, PromptOrigin]
    ) -> tuple[list[FindingCount], dict[int, PromptOrigin]]:
        """Return the counts, those of first uses as findings, and the origins that changed.

        A first use becomes a finding if the tenant's prompts were made for another model or
        template before, which had seen the same beginning: for an hour, because its prompts return
        one after the other. A tenant that turns from one served model to another has changed
        nothing.
        """
        served = {one.origin() for one in self._gateway.models}
        found, changed = [], dict[int, PromptOrigin]()
        for one in sorted(counts, key=lambda count: count.first_ms):
            if one.cause != FIRST_USE:
                found.append(one)
                continue
            model, _, template = one.place.partition("/")
            origin = changed.get(one.tenant_id) or origins.get(one.tenant_id)
            if origin is None or (origin.model, origin.template) != (model, template):
                before = ("", "") if origin is None else (origin.model, origin.template)
                heads_before = "" if origin is None else origin.heads
                origin = PromptOrigin(
                    *(one.tenant_id, model, template, one.first_ms, *before, self._gateway_id),
                    heads_before=heads_before,
                )
            origin = origin.with_heads(_heads_of(one))
            changed[one.tenant_id] = origin
            seen = origin.heads_before.split()
            computed = [n for head, n in _heads_of(one).items() if n and head in seen]
            requests = len(computed)
            if (origin.model_before, origin.template_before) in served:
                continue
            if origin.model_before and requests and one.first_ms < origin.since_ms + HOUR_MS:
                cause = "template_changed" if origin.model_before == model else "model_changed"
                found.append(
                    structs.replace(
                        one,
                        cause=cause,
                        place="",
                        requests=requests,
                        wasted_tokens=sum(computed),
                        facts={},
                    )
                )
        return found, changed

    def _name_takers(self, counts: Sequence[FindingCount]) -> list[FindingCount]:
        """Return the counts, those of evictions with the tenants that took blocks since the last
        write."""
        if not any("evicted_pressure" in one.facts for one in counts):
            return list(counts)
        pairs = self._gateway.models.evictions_by_taker()
        sums: Counter[tuple[int, int]] = Counter()
        for (owner_space, taker_space), blocks in pairs.items():
            owner, taker = owner_of(owner_space), owner_of(taker_space)
            if owner is not None and taker is not None and owner != taker:
                sums[owner, taker] += blocks
        news, self._taken = sums - self._taken, sums
        found = []
        for one in counts:
            if "evicted_pressure" in one.facts:
                mine = {pair[1]: n for pair, n in news.items() if pair[0] == one.tenant_id}
                takers = Counter(mine).most_common(TAKERS_MAX)
                facts = {**one.facts, **{f"{TAKER}{tenant}": n for tenant, n in takers}}
                one = structs.replace(one, facts=facts)
            found.append(one)
        return found


def _heads_of(count: FindingCount) -> dict[str, int]:
    """Return the beginnings of a count of first uses, with the tokens computed for each."""
    return {
        fact.removeprefix(HEAD): number
        for fact, number in count.facts.items()
        if fact.startswith(HEAD)
    }
