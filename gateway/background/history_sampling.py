"""History sampling: writes what ended requests and the cache were like, minute by minute.

Once a second it counts ended requests. Every five seconds it writes their records and adds their
counts to the running minute's samples, and at each minute's end it writes a sample of each active
tenant and of all. A gateway that is killed loses five seconds. `gateway.app` runs the task; the
admin API flushes before it reads.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from msgspec.structs import replace

from engine.statistics import Stats
from gateway.background.money_metrics import MoneyMetrics
from gateway.context import Context
from gateway.observability.ended_requests import Minute, MinuteCounts
from gateway.periodic_task import PeriodicTask
from tenancy.errors import StoreError
from tenancy.history.request_records import delete_old_records, write_records
from tenancy.history.samples import (
    ALL_TENANTS,
    Sample,
    SampleDetails,
    fold_samples,
    refused_since,
    write_samples,
)
from tenancy.types import HOUR_MS, MINUTE_MS

T = TypeVar("T")

POLL_INTERVAL_S = 1.0
"""Interval of counting."""
RECORDS_INTERVAL_S = 5.0
MONEY_INTERVAL_S = 30.0
TENANTS_SAMPLED_MAX = 256
"""Tenants with a sample in one minute: those with most refusals, then requests, then blocks."""
UNWRITTEN_MINUTES_MAX = 60
"""Minutes that wait for a database that is away; older ones are lost."""
READS_MAX = 3
"""Most reads of one report, whose counts may move each time."""
RATE_OVER_S = 60.0
"""The time over which tokens per second are averaged, in seconds."""


class TokenRates:
    """Prompt and output tokens per second of one engine, over the last minute."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int, int]] = deque()

    def update(self, stats: Stats, now_s: float) -> tuple[float, float] | None:
        """Add the engine's counts, and return the rates; None before the second call. O(1)."""
        now = (now_s, stats.prompt_tokens_total, stats.output_tokens_total)
        if self._counts and (now[1] < self._counts[-1][1] or now[2] < self._counts[-1][2]):
            self._counts.clear()  # another engine
        self._counts.append(now)
        while now_s - self._counts[0][0] > RATE_OVER_S:
            self._counts.popleft()
        first_s, prompt, output = self._counts[0]
        seconds = now_s - first_s
        if seconds <= 0:
            return None
        return (now[1] - prompt) / seconds, (now[2] - output) / seconds


class HistorySampling:
    """The task that counts ended requests and writes samples. Belongs to one event loop."""

    def __init__(self, gateway: Context) -> None:
        self._gateway = gateway
        self._money = MoneyMetrics(
            gateway.reports, gateway.authenticator, gateway.metrics, gateway.wall
        )
        self._rates = [TokenRates() for _ in gateway.models]
        self._has_told_labels = False
        self._recorded_s, self._money_s = gateway.clock(), -math.inf
        self._has_begun = False
        self._task = PeriodicTask(
            "history_sampling",
            self._sample,
            POLL_INTERVAL_S,
            gateway.log,
            gateway.clock,
            begins_at_once=True,
        )

    def start(self) -> None:
        """Start the task on the running event loop."""
        self._task.start()

    async def close(self) -> None:
        """Stop the task and write the last counts, those of the running minute too."""
        await self._task.close()
        await self.flush_requests()
        self._gateway.ended_requests.end_minute()
        await self._write_minutes()

    async def count_ended(self) -> None:
        """Count the requests that have ended, so that a reader of the counts sees them."""
        has_more = True
        while has_more:
            has_more = self._gateway.ended_requests.count()
            await asyncio.sleep(0)  # other requests have their turn

    async def flush_requests(self) -> None:
        """Count the requests that have ended and write their records, so that a reader of the
        database sees them. A failed write costs the records, a caller that is cancelled does
        not."""
        await self.count_ended()
        await self._gateway.work.shield(self._write_records())

    async def _write_records(self) -> None:
        ended = self._gateway.ended_requests
        async with ended.writing:
            if records := ended.take_records():
                with suppress(StoreError):
                    await asyncio.to_thread(write_records, self._gateway.store, records)

    def _sample_of(self, minute: Minute, tenant_id: int) -> Sample:
        """Return a tenant's sample of a minute, or that of all, with the blocks of this moment.
        O(1), and for all O(tenants)."""
        at_ms, counts = minute
        details = counts[tenant_id].details if tenant_id in counts else SampleDetails()
        sample = Sample(tenant_id, at_ms, details, gateway=self._gateway.ended_requests.gateway_id)
        if all(model.replicas.info is None for model in self._gateway.models):
            return sample
        if tenant_id != ALL_TENANTS:
            held = self._gateway.usage.tenants.of(tenant_id)
            return replace(
                sample, blocks_promised=held["promised_blocks"], blocks_cached=held["blocks"]
            )
        stats = self._gateway.models.stats()
        return replace(
            sample,
            blocks_promised=self._gateway.usage.tenants.total("promised_blocks"),
            blocks_cached=stats.used_blocks,
            blocks_free=stats.free_blocks,
        )

    def live_samples(self, tenant_id: int) -> list[Sample]:
        """Return a tenant's samples, or those of all, of the minutes that the database lacks: the
        running one last. O(changed namespaces), and for all O(tenants)."""
        self._gateway.usage.update_tenants()
        return [
            self._sample_of(minute, tenant_id) for minute in self._gateway.ended_requests.minutes()
        ]

    async def read_at_once(self, read: Callable[[], Awaitable[T]]) -> T:
        """Return what `read` finds in the database and in the minutes that it lacks, counted once:
        it reads again if counts moved between the two meanwhile, which takes milliseconds."""
        for _ in range(READS_MAX - 1):
            moves = self._gateway.ended_requests.moves
            found = await read()
            if moves == self._gateway.ended_requests.moves and not moves % 2:
                return found
        return await read()

    async def _sample(self) -> None:
        """Do what is due of counting, writing and clearing; the first round reads the past."""
        gateway = self._gateway
        if not self._has_begun:
            self._has_begun = True
            with suppress(StoreError):
                gateway.ended_requests.last_hour = await self._read_last_hour()
            return
        await self.count_ended()
        self._update_rates()
        self._tell_labels()
        if gateway.clock() - self._recorded_s >= RECORDS_INTERVAL_S:
            self._recorded_s = gateway.clock()
            await self.flush_requests()
            if gateway.ended_requests.has_counts and not gateway.ended_requests.ended_minutes:
                gateway.ended_requests.end_minute()
        if minutes := gateway.ended_requests.ended_minutes:
            is_over = minutes[0][0] != gateway.ended_requests.minute_ms
            await self._write_minutes()
            if is_over:
                await self._clear_old()
        if gateway.clock() - self._money_s >= MONEY_INTERVAL_S:
            self._money_s = gateway.clock()
            await self._money.update()

    async def _write_minutes(self) -> None:
        """Write the minutes, and parts of the running one, that have ended; a failed write is tried
        again. The refusals of the last hour are read anew once a minute; those of a part are known.
        """
        ended, running_ms = self._gateway.ended_requests, self._gateway.ended_requests.minute_ms
        minutes, last_hour = list(ended.ended_minutes), ended.last_hour
        written = max(0, len(minutes) - UNWRITTEN_MINUTES_MAX)
        ended.begin_writing()
        with suppress(StoreError):
            for minute in minutes[written:]:
                samples = self._samples(minute, is_part=minute[0] == running_ms)
                await asyncio.to_thread(write_samples, self._gateway.store, samples)
                written += 1
                last_hour = [*last_hour, *(one for one in samples if one.refused)]
            if any(at_ms != running_ms for at_ms, _ in minutes):
                last_hour = await self._read_last_hour()
        ended.wrote_minutes(written, last_hour)

    def _samples(self, minute: Minute, *, is_part: bool) -> list[Sample]:
        """Return one sample for all, and one for each tenant that was busiest; of a part of a
        minute only for those with requests."""
        usage, (_, counts) = self._gateway.usage.tenants, minute
        most = 0 if is_part else TENANTS_SAMPLED_MAX
        held = {tenant_id for tenant_id, _ in usage.largest(most)}
        nothing = MinuteCounts()

        def rank(tenant_id: int) -> tuple[int, int, int]:
            one = counts.get(tenant_id, nothing)
            return one.refusals.total(), one.requests, usage.of(tenant_id)["blocks"]

        busiest = sorted({*counts, *held} - {ALL_TENANTS}, key=rank, reverse=True)
        return [
            self._sample_of(minute, tenant_id)
            for tenant_id in (ALL_TENANTS, *busiest[:TENANTS_SAMPLED_MAX])
        ]

    async def _read_last_hour(self) -> list[Sample]:
        since_ms = self._gateway.wall() - HOUR_MS - MINUTE_MS
        return await asyncio.to_thread(refused_since, self._gateway.store, since_ms)

    async def _clear_old(self) -> None:
        """Fold old samples and delete old records; the next minute tries again."""
        store, now_ms = self._gateway.store, self._gateway.wall()
        with suppress(StoreError):
            await asyncio.to_thread(fold_samples, store, now_ms)
            while await asyncio.to_thread(delete_old_records, store, now_ms):
                pass

    def _update_rates(self) -> None:
        """Set the metrics of tokens per second, from the engines' counts of the last minute."""
        gateway, metrics, now_s = self._gateway, self._gateway.metrics, self._gateway.clock()
        found = [
            rates.update(model.replicas.stats, now_s)
            for model, rates in zip(gateway.models, self._rates, strict=True)
        ]
        if any(rates is not None for rates in found):
            known = [rates for rates in found if rates is not None]
            metrics.prompt_tokens_per_s.set(sum(prompt for prompt, _ in known))
            metrics.output_tokens_per_s.set(sum(output for _, output in known))

    def _tell_labels(self) -> None:
        """Log once that metrics name no further tenant."""
        metrics = self._gateway.metrics
        if metrics.has_unnamed_tenants and not self._has_told_labels:
            self._has_told_labels = True
            limit = self._gateway.config.tenancy.tenants_as_labels_max
            self._gateway.log("tenant_labels_used_up", {"tenancy.tenants_as_labels_max": limit})
