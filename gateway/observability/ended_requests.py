"""Ended requests on their way to the database: counts of the running minute, and records.

    middleware ── add ──▶ queue ── count ──▶ minutes, records ──▶ background.history_sampling

The request's own path appends one record to a queue and does nothing else. Once a second the queue
is counted by tenant: refusals by code, times to first token by bucket, and the metrics that need a
finished request. All memory is bounded. This module knows no HTTP, no engine and no database.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from gateway.dialects.canonical import Boundary
from gateway.observability.metrics import Metrics, cache_outcome
from tenancy.history.request_records import RequestRecord, received_ms
from tenancy.history.samples import ALL_TENANTS, Sample, SampleDetails, add_details
from tenancy.reuse.miss_ratio_curve import bucket_of
from tenancy.types import HOUR_MS, MINUTE_MS, WallClock

QUEUE_MAX = 65_536
"""Requests that wait to be counted; beyond them the oldest are not counted."""
COUNTED_AT_ONCE = 250
"""Requests that one call counts, so that a flood of them does not hold up the event loop."""
RECORDS_PER_WRITE_MAX = 500
"""Records of requests that were not refused, in one write; the ledger has the rest."""
REFUSED_PER_WRITE_MAX, REFUSED_PER_TENANT_MAX = 1_000, 100
"""Records of refused requests in one write, of all tenants and of each."""
ASKED_MODELS_MAX = 3
"""Models that are not served, of those that a tenant has asked for; the last ones."""
SEGMENTS_EACH_END = 8
"""Parts of a prompt that a record names, from its beginning and from its end."""


class MinuteCounts:
    """Counts of one tenant in one minute. `last_refused_ms`: by code."""

    __slots__ = ("hits", "last_refused_ms", "misses", "refusals", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.refusals: Counter[str] = Counter()
        self.hits: Counter[int] = Counter()
        self.misses: Counter[int] = Counter()
        self.last_refused_ms: dict[str, int] = {}

    def add(self, record: RequestRecord) -> None:
        """Count one request. O(1)."""
        self.requests += 1
        if record.ending == "refused":
            self.refusals[record.code] += 1
            at_ms = received_ms(record.request_id) or 0
            self.last_refused_ms[record.code] = at_ms + round(1_000 * record.total_s)
        if record.first_token_s is not None:
            is_hit = cache_outcome(record.cached_tokens, record.prompt_tokens) == "hit"
            times = self.hits if is_hit else self.misses
            times[bucket_of(1_000 * record.first_token_s)] += 1

    @property
    def details(self) -> SampleDetails:
        """The counts as a sample has them."""
        return SampleDetails(dict(self.refusals), dict(self.hits), dict(self.misses))


Minute = tuple[int, Mapping[int, MinuteCounts]]
"""The start of a minute, and its counts by tenant id; `ALL_TENANTS` is always among them."""


class EndedRequests:
    """Requests that have ended, until the database has their counts. Belongs to one event loop."""

    def __init__(self, wall: WallClock, metrics: Metrics, gateway_id: str = "") -> None:
        """`gateway_id`: names this gateway's samples among those of one database.

        `add`: takes a `RequestRecord` and the parts of its prompt, as a pair. `last_hour`: the
        written minutes with refusals. `writing`: held while records are written, so that a reader
        can wait for them.
        """
        self.gateway_id = gateway_id
        self.moves = 0
        """Begun and ended writes of samples: odd while counts move to the database."""
        self._wall = wall
        self._metrics = metrics
        self._queue: deque[tuple[RequestRecord, Sequence[Boundary]]] = deque(maxlen=QUEUE_MAX)
        self.add = self._queue.append
        self._minute_ms = wall() // MINUTE_MS * MINUTE_MS
        self._running = _new_minute()
        self._ended: list[Minute] = []
        self._records: list[RequestRecord] = []
        self._refused: list[RequestRecord] = []
        self._refused_by_tenant: Counter[int] = Counter()
        self.last_hour: Sequence[Sample] = ()
        self.writing = asyncio.Lock()
        self.last_refused_ms: dict[int, dict[str, int]] = {}
        """When each tenant was refused last, by code; kept for an hour."""
        self.asked_models: dict[int, tuple[str, ...]] = {}
        """Models that a tenant has asked for and that are not served to it, the last one first;
        kept as long as `last_refused_ms`."""

    def count(self) -> bool:
        """Count up to `COUNTED_AT_ONCE` of the ended requests, and begin a minute when one is over.

        Returns whether more are left. Takes about a millisecond.
        """
        for _ in range(min(COUNTED_AT_ONCE, len(self._queue))):
            record, segments = self._queue.popleft()
            self._running[ALL_TENANTS].add(record)
            if record.tenant_id:
                own = self._running[record.tenant_id]
                own.add(record)
                if record.code in own.last_refused_ms:
                    last = self.last_refused_ms.setdefault(record.tenant_id, {})
                    last[record.code] = own.last_refused_ms[record.code]
                if record.code == "model_not_found" and record.model:
                    self._note_asked(record.tenant_id, record.model)
            self._keep(record, segments)
            self._measure(record)
        minute_ms = self._wall() // MINUTE_MS * MINUTE_MS
        if minute_ms != self._minute_ms:
            self.end_minute()
            self._minute_ms = minute_ms
        return bool(self._queue)

    @property
    def minute_ms(self) -> int:
        """The start of the running minute."""
        return self._minute_ms

    @property
    def has_counts(self) -> bool:
        """Whether a request has been counted in the running minute since it was ended last."""
        return self._running[ALL_TENANTS].requests > 0

    def end_minute(self) -> None:
        """End the running minute, or the part of it until now: a sample is written of each part,
        and they add up."""
        self._ended.append((self._minute_ms, self._running))
        self._running = _new_minute()
        since_ms = self._wall() - HOUR_MS
        self.last_refused_ms = {
            tenant_id: last
            for tenant_id, last in self.last_refused_ms.items()
            if max(last.values()) > since_ms
        }
        self.asked_models = {
            tenant_id: names
            for tenant_id, names in self.asked_models.items()
            if tenant_id in self.last_refused_ms
        }

    @property
    def ended_minutes(self) -> Sequence[Minute]:
        """The minutes that have ended and are not written, oldest first."""
        return self._ended

    def begin_writing(self) -> None:
        """Note that `ended_minutes` are being written; `wrote_minutes` ends that."""
        self.moves += 1

    def wrote_minutes(self, count: int, last_hour: Sequence[Sample]) -> None:
        """Forget the oldest minutes, which the database has now. `last_hour`: read afterwards."""
        self.moves += 1
        del self._ended[:count]
        self.last_hour = last_hour

    def take_records(self) -> list[RequestRecord]:
        """Return the records to write, and forget them."""
        records = [*self._records, *self._refused]
        self._records, self._refused = [], []
        self._refused_by_tenant.clear()
        return records

    def refusals_last_hour(self) -> dict[int, dict[str, int]]:
        """Return refusals of the last sixty minutes by tenant id and code, as of the last count;
        `ALL_TENANTS` has all. O(tenants refused * minutes)."""
        since_ms = self._wall() - HOUR_MS
        found: defaultdict[int, list[SampleDetails]] = defaultdict(list)
        for sample in self.last_hour:
            if sample.at_ms > since_ms:
                found[sample.tenant_id].append(sample.details)
        for _, counts in self.minutes():
            for tenant_id, one in counts.items():
                if one.refusals:
                    found[tenant_id].append(one.details)
        return {tenant_id: add_details(details).refusals for tenant_id, details in found.items()}

    def minutes(self) -> list[Minute]:
        """Return the minutes that the database lacks; the running one is last."""
        return [*self._ended, (self._minute_ms, self._running)]

    def _keep(self, record: RequestRecord, segments: Sequence[Boundary]) -> None:
        """Keep the record for the next write, unless that has enough of its kind."""
        if record.ending != "refused":
            if len(self._records) < RECORDS_PER_WRITE_MAX:
                ordered = sorted(segments, key=lambda one: one.end)
                named = tuple((one.path, one.end) for one in _ends_of(ordered))
                parts = _part_tokens(ordered)
                self._records.append(replace(record, segments=named, part_tokens=parts))
        elif (
            len(self._refused) < REFUSED_PER_WRITE_MAX
            and self._refused_by_tenant[record.tenant_id] < REFUSED_PER_TENANT_MAX
        ):
            self._refused_by_tenant[record.tenant_id] += 1
            self._refused.append(record)

    def _note_asked(self, tenant_id: int, model: str) -> None:
        others = [one for one in self.asked_models.get(tenant_id, ()) if one != model]
        self.asked_models[tenant_id] = (model, *others)[:ASKED_MODELS_MAX]

    def _measure(self, record: RequestRecord) -> None:
        if record.started_s is not None and record.submitted_s is not None:
            waited_s = record.started_s - record.submitted_s - (record.load_s or 0.0)
            self._metrics.queue_s.add(max(0.0, waited_s))
        if record.first_token_s is not None and record.output_tokens > 1:
            end_s = record.total_s if record.settled_s is None else record.settled_s
            each_s = (end_s - record.first_token_s) / (record.output_tokens - 1)
            self._metrics.time_per_output_token_s.add(max(0.0, each_s))


def _part_tokens(segments: Sequence[Boundary]) -> dict[str, int]:
    """Return the prompt tokens of each tier. `segments`: in order of their ends."""
    tokens: dict[str, int] = {}
    start = 0
    for one in segments:
        tokens[one.tier] = tokens.get(one.tier, 0) + one.end - start
        start = one.end
    return tokens


def _ends_of(segments: Sequence[Boundary]) -> list[Boundary]:
    """Return the first and the last segments of many."""
    last = max(SEGMENTS_EACH_END, len(segments) - SEGMENTS_EACH_END)
    return [*segments[:SEGMENTS_EACH_END], *segments[last:]]


def _new_minute() -> defaultdict[int, MinuteCounts]:
    counts: defaultdict[int, MinuteCounts] = defaultdict(MinuteCounts)
    counts[ALL_TENANTS] = MinuteCounts()
    return counts
