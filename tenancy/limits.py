"""Rate limits and concurrency limits of tenants and keys, as token buckets.

Each limit is a token bucket that holds one minute's worth and refills evenly. A request is reserved
before anything is done for it, then extended by the most that it may use (tokens: those not in the
cache, and the maximum output), and corrected to actual usage at its end, so concurrent requests
never exceed a limit. Rotated keys share the buckets of their line, so a new key does not get a
fresh minute. A changed limit applies to the next request. The module knows no HTTP, no engine and
no database. The gateway calls it on one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import msgspec
from msgspec import Struct

from tenancy.errors import BadName, LimitExceeded
from tenancy.types import Identity, Limits

SECOND_NS = 1_000_000_000
MS_NS = 1_000_000
MINUTE_NS = 60 * SECOND_NS
LIMIT_MAX = 10**12
"""The largest value of any limit."""
CONCURRENCY_RETRY_S = 1.0
"""Seconds to wait after a concurrency refusal; the end of a running request cannot be predicted."""

Kind = Literal["tenant", "key"]
Meter = Literal["requests", "tokens", "input_tokens", "output_tokens"]
METERS: tuple[Meter, ...] = ("requests", "tokens", "input_tokens", "output_tokens")
"""The counted quantities, each of which may have a limit per minute."""

_MeterCounts = tuple[int, int, int, int]
"""The counts of one request, in the order of `METERS`."""

_PROMPT_METERS = (METERS.index("tokens"), METERS.index("input_tokens"))
_NEAR_LIMIT_PARTS = 8
"""A limit counts as near once more than one part in this many is taken."""


class Demand(Struct, frozen=True):
    """Token counts of one request: prompt tokens that are not cached, and output tokens."""

    input_tokens: int
    output_tokens: int

    @property
    def counts(self) -> _MeterCounts:
        """The counts of the request, in the order of `METERS`."""
        inputs, outputs = self.input_tokens, self.output_tokens
        return 1, inputs + outputs, inputs, outputs


NO_DEMAND = Demand(0, 0)
"""The demand of a request that computes nothing: the request itself."""


class LimitState(Struct, frozen=True):
    """A limit at one instant: what remains, and the time until all of it is free again."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(slots=True)
class TokenBucket:
    """A token bucket of one meter, kept in token-nanoseconds.

    The debt at an instant is `full_at` less now times `limit`; below zero the bucket is full.
    `queued_full_at` is the same, including the requests that were refused with a time to retry.
    """

    kind: Kind
    meter: int
    limit: int
    full_at: int = 0
    queued_full_at: int = 0

    def owed(self, now_ns: int) -> int:
        """Return the debt in token-nanoseconds. Changes nothing."""
        return max(0, self.full_at - now_ns * self.limit)

    def resize(self, now_ns: int, limit: int) -> None:
        """Change the limit and keep the used share, rounded up."""
        before, after = now_ns * self.limit, now_ns * limit
        self.full_at = after - min(0, (before - self.full_at) * limit // self.limit)
        self.queued_full_at = after - min(0, (before - self.queued_full_at) * limit // self.limit)
        self.limit = limit

    def wait_ns(self, now_ns: int, cost: int) -> int:
        """Return the nanoseconds until `cost` fits. O(1). Changes nothing."""
        return max(0, -(-(self.owed(now_ns) + cost - self.limit * MINUTE_NS) // self.limit))

    def take_turn_ns(self, now_ns: int, cost: int) -> int:
        """Return the nanoseconds until `cost` fits behind all queued retries, and queue it.

        Each refused request gets its own turn; otherwise all of them would retry at the same
        instant and most would be refused again. At most a minute.
        """
        whole, drained = self.limit * MINUTE_NS, now_ns * self.limit
        turn = max(self.full_at, self.queued_full_at, drained) + cost - drained
        self.queued_full_at = drained + min(turn, 2 * whole)
        return min(MINUTE_NS, -(-(turn - whole) // self.limit))

    def is_idle(self, now_ns: int) -> bool:
        """Return whether the bucket equals a new one."""
        return max(self.full_at, self.queued_full_at) <= now_ns * self.limit


_Row = tuple[tuple[TokenBucket, int, int], ...]
"""The buckets of one `_Usage`: (bucket, meter, the limit while this row applies)."""


@dataclass(slots=True)
class _Usage:
    """The buckets and the running requests of one tenant or one line of keys."""

    kind: Kind
    buckets: dict[int, TokenBucket] = field(default_factory=dict)
    """By index into `METERS`."""
    running: int = 0
    elsewhere: int = 0
    """Requests of other gateways that run, as far as this one knows."""
    running_max: int = LIMIT_MAX
    """How many requests these limits allow to run at a time."""
    limits: Limits = field(default_factory=Limits)
    row: _Row = ()
    """The buckets that `limits` sets."""

    def apply(self, limits: Limits, now_ns: int) -> _Row:
        """Return the buckets under these limits, which apply from now on. O(1) if unchanged."""
        if limits is not self.limits:
            if limits != self.limits:
                self._change(limits, now_ns)
            self.limits = limits
        return self.row

    def _change(self, limits: Limits, now_ns: int) -> None:
        row = []
        for meter, limit in _limits_by_meter(limits):
            bucket = self.buckets.get(meter)
            if bucket is None:
                bucket = self.buckets[meter] = TokenBucket(self.kind, meter, limit)
            elif bucket.limit != limit:
                bucket.resize(now_ns, limit)
            row.append((bucket, meter, limit))
        self.row = tuple(row)
        most = limits.requests_at_once
        self.running_max = LIMIT_MAX if most is None else most

    def is_idle(self, now_ns: int) -> bool:
        """Return whether all buckets equal new ones and no request runs."""
        return not self.running and all(b.is_idle(now_ns) for b in self.buckets.values())


class Reservation:
    """The reservation of one request. The caller must settle it once, however the request ends."""

    __slots__ = ("_accounts", "_counts", "_is_open", "_limiter", "_rows", "on_change")

    def __init__(
        self,
        limiter: Limiter,
        accounts: tuple[_Usage, _Usage],
        rows: tuple[_Row, _Row],
        counts: _MeterCounts,
    ) -> None:
        self._limiter = limiter
        self._accounts = accounts
        self._rows = rows
        self._counts = counts
        self._is_open = True
        self.on_change: Callable[[Demand, bool], None] | None = None
        """Called with each corrected estimate, and whether it is the last one."""

    def settle(self, actual: Demand) -> None:
        """Correct the reservation to actual usage and end it.

        An overestimate is free for other requests at once; an underestimate becomes debt. The
        request itself stays counted. A second call changes nothing.
        """
        if self._is_open:
            self._replace(actual)
            self._is_open = False
            self._limiter.release(self._accounts)
            if self.on_change is not None:
                self.on_change(actual, True)

    def correct(self, estimate: Demand) -> None:
        """Replace the estimate while the request goes on; an overestimate is free at once."""
        if self._is_open and self._counts != estimate.counts:
            self._replace(estimate)
            if self.on_change is not None:
                self.on_change(estimate, False)

    def _replace(self, estimate: Demand) -> None:
        before, after = self._counts, estimate.counts
        now_ns, self._counts = self._limiter.now_ns(), after
        for row in self._rows:
            for bucket, meter, limit in row:
                if more := (after[meter] - before[meter]) * MINUTE_NS:
                    if limit != bucket.limit:
                        more = -(-more * bucket.limit // limit)
                    drained = now_ns * bucket.limit
                    bucket.full_at = max(max(bucket.full_at, drained) + more, drained)

    def extend(self, estimate: Demand) -> None:
        """Replace the estimate by a larger one that every limit has room for, or change nothing.

        Raises LimitExceeded for the limit that takes longest to free for a further request of this
        size; the reservation then stays open as it was.
        """
        assert self._is_open, "a settled reservation cannot be extended"
        now_ns, before, after = self._limiter.now_ns(), self._counts, estimate.counts
        fits = True
        taken: list[tuple[TokenBucket, int]] = []
        for row in self._rows:
            for bucket, meter, limit in row:
                more = (after[meter] - before[meter]) * MINUTE_NS
                if limit != bucket.limit:
                    more = -(-more * bucket.limit // limit)
                drained = now_ns * bucket.limit
                if bucket.full_at < drained:
                    bucket.full_at = drained
                bucket.full_at += more
                taken.append((bucket, more))
                if more > 0 and bucket.full_at - drained > bucket.limit * MINUTE_NS:
                    fits = False
        if fits:
            self._counts = after
            return
        for bucket, more in taken:
            bucket.full_at -= more
        raise _bucket_refusal(self._rows, after, now_ns)

    def follow(self, estimate: Demand, owed: Sequence[Sequence[int]]) -> None:
        """Take an estimate for which the shared limits had room, and their debts; see
        `Limiter.follow`."""
        self._counts = estimate.counts
        now_ns = self._limiter.now_ns()
        for row, debts in zip(self._rows, owed, strict=True):
            _follow(row, debts, now_ns)

    def is_near_limit(self, estimate: Demand) -> bool:
        """Return whether the estimate would take more than an eighth of a prompt-token limit.

        Only then does it matter how much of the prompt is cached. O(1). Changes no count.
        """
        now_ns, counts = self._limiter.now_ns(), estimate.counts
        for row in self._rows:
            for bucket, meter, _ in row:
                if meter in _PROMPT_METERS:
                    owed = max(0, bucket.full_at - now_ns * bucket.limit)
                    taken = owed + counts[meter] * MINUTE_NS
                    if taken * _NEAR_LIMIT_PARTS > bucket.limit * MINUTE_NS:
                        return True
        return False

    def status(self) -> dict[Meter, LimitState]:
        """Return `Limiter.status` for the limits under which the request was admitted."""
        return _states(self._rows, self._limiter.now_ns())

    @property
    def is_open(self) -> bool:
        """Whether the reservation is not settled yet."""
        return self._is_open


class Limiter:
    """All limits of one process. Belongs to one thread; every call is atomic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self.parts = 1
        """How many gateways have a part of each limit for themselves; 1 while they share them."""
        self._tenants: OrderedDict[int, _Usage] = OrderedDict()
        self._keys: OrderedDict[int, _Usage] = OrderedDict()

    def reserve(self, identity: Identity, *, has_room: bool = False) -> Reservation:
        """Reserve a request without tokens in every limit of the identity, or in none; they follow
        by `Reservation.extend`. About 3 us. `has_room`: the shared limits have reserved it.

        Raises LimitExceeded: for concurrent requests, or else the limit that takes longest to free.
        """
        now_ns, counts = self.now_ns(), NO_DEMAND.counts
        tenant = self._usage_of(self._tenants, "tenant", identity.tenant.tenant_id, now_ns)
        key = self._usage_of(self._keys, "key", identity.line_id, now_ns)
        limits, key_limits = identity.limits, identity.key_limits
        if self.parts > 1:
            limits, key_limits = part_of(limits, self.parts), part_of(key_limits, self.parts)
        rows = tenant.apply(limits, now_ns), key.apply(key_limits, now_ns)
        fits = (
            tenant.running + tenant.elsewhere < tenant.running_max
            and key.running + key.elsewhere < key.running_max
        )
        for row in rows:
            for bucket, meter, limit in row:
                drained, full_at = now_ns * limit, bucket.full_at
                if full_at < drained:
                    full_at = drained
                bucket.full_at = full_at = full_at + counts[meter] * MINUTE_NS
                if full_at - drained > limit * MINUTE_NS:
                    fits = False
        if not fits and not has_room:
            for row in rows:
                for bucket, meter, _ in row:
                    bucket.full_at -= counts[meter] * MINUTE_NS
            raise _concurrency_refusal((tenant, key)) or _bucket_refusal(rows, counts, now_ns)
        tenant.running += 1
        key.running += 1
        return Reservation(self, (tenant, key), rows, counts)

    def follow(
        self, identity: Identity, owed: Sequence[Sequence[int]], running: Sequence[int]
    ) -> None:
        """Take over the shared state of tenant and key: for each its debts by meter in
        token-milliseconds, and its requests at once over all gateways. O(limits)."""
        now_ns = self.now_ns()
        tenant = self._usage_of(self._tenants, "tenant", identity.tenant.tenant_id, now_ns)
        key = self._usage_of(self._keys, "key", identity.line_id, now_ns)
        rows = tenant.apply(identity.limits, now_ns), key.apply(identity.key_limits, now_ns)
        for account, row, debts, count in zip((tenant, key), rows, owed, running, strict=True):
            account.elsewhere = max(0, count - account.running)
            _follow(row, debts, now_ns)

    def divide(self, parts: int) -> None:
        """Let this gateway have one part of so many of each limit, as it cannot know what the
        others use; 1: all, as they are shared again. O(tenants and lines in memory)."""
        self.parts = parts
        for account in (*self._tenants.values(), *self._keys.values()):
            account.elsewhere = 0

    def status(self, identity: Identity) -> dict[Meter, LimitState]:
        """Return, per limited meter, the tighter state of tenant and key. Used for headers."""
        now_ns = self.now_ns()
        return _states([one.row for one in self._peek(identity, now_ns)], now_ns)

    def status_of_tenant(self, tenant_id: int, limits: Limits) -> dict[Meter, LimitState]:
        """Return the state of each of a tenant's own limits. O(limits)."""
        now_ns = self.now_ns()
        usage = self._tenants.get(tenant_id) or _Usage("tenant")
        return _states([usage.apply(limits, now_ns)], now_ns)

    def release(self, accounts: tuple[_Usage, _Usage]) -> None:
        """End a request of these two; called once by `Reservation.settle`."""
        tenant, key = accounts
        tenant.running -= 1
        key.running -= 1
        assert min(tenant.running, key.running) >= 0, "a reservation is settled once"

    def running_of(self, tenant_id: int) -> int:
        """Return how many reservations of a tenant are open. O(1)."""
        usage = self._tenants.get(tenant_id)
        return 0 if usage is None else usage.running

    def __len__(self) -> int:
        """Return the number of tenants and key lines in memory."""
        return len(self._tenants) + len(self._keys)

    def check(self) -> None:
        """Raise AssertionError if the counts disagree. O(tenants and lines in memory)."""
        of_tenants, of_keys = (
            [account.running for account in accounts.values()]
            for accounts in (self._tenants, self._keys)
        )
        assert min(of_tenants + of_keys, default=0) >= 0, "fewer than no request runs"
        assert sum(of_tenants) == sum(of_keys), "tenants and keys run different counts"

    def _peek(self, identity: Identity, now_ns: int) -> tuple[_Usage, _Usage]:
        """Return the usage of tenant and key, or a new one when there is none in memory."""
        tenant = self._tenants.get(identity.tenant.tenant_id) or _Usage("tenant")
        key = self._keys.get(identity.line_id) or _Usage("key")
        tenant.apply(identity.limits, now_ns)
        key.apply(identity.key_limits, now_ns)
        return tenant, key

    @staticmethod
    def _usage_of(
        accounts: OrderedDict[int, _Usage], kind: Kind, number: int, now_ns: int
    ) -> _Usage:
        """Return the usage of a tenant or a key line, and keep it in memory.

        An insertion checks two others, in turn, and drops those that equal a new one. So what stays
        in memory was used within about a minute, runs a request, or is in debt.
        """
        found = accounts.get(number)
        if found is None:
            for _ in range(min(2, len(accounts))):
                other = next(iter(accounts))
                if accounts[other].is_idle(now_ns):
                    del accounts[other]
                else:
                    accounts.move_to_end(other)
            found = accounts[number] = _Usage(kind)
        return found

    def now_ns(self) -> int:
        """Return the limiter's clock in nanoseconds."""
        return int(self._clock() * SECOND_NS)


def _follow(row: _Row, debts: Sequence[int], now_ns: int) -> None:
    """Set the debts of buckets, in token-milliseconds by meter."""
    for bucket, meter, _ in row:
        bucket.full_at = now_ns * bucket.limit + debts[meter] * MS_NS


@lru_cache(maxsize=1_024)
def part_of(limits: Limits, parts: int) -> Limits:
    """Return one part of so many of each limit, at least 1."""
    values = msgspec.structs.asdict(limits)
    return Limits(
        **{
            name: None if limit is None else max(1, limit // parts)
            for name, limit in values.items()
        }
    )


def check_limits(limits: Limits) -> None:
    """Raise BadName if a limit is out of range."""
    for name, limit in msgspec.structs.asdict(limits).items():
        if limit is not None and not 1 <= limit <= LIMIT_MAX:
            raise BadName("bad_limits", f"{name} out of range: {limit}; expected 1 to {LIMIT_MAX}")


def limit_of(limits: Limits, meter: Meter) -> int | None:
    """Return a meter's limit per minute, or None."""
    limit: int | None = getattr(limits, f"{meter}_per_minute")
    return limit


@lru_cache(maxsize=1_024)
def _limits_by_meter(limits: Limits) -> tuple[tuple[int, int], ...]:
    """Return (index into `METERS`, limit) for each limit that is set."""
    found = ((place, limit_of(limits, meter)) for place, meter in enumerate(METERS))
    return tuple((place, limit) for place, limit in found if limit is not None)


def _states(rows: Iterable[_Row], now_ns: int) -> dict[Meter, LimitState]:
    """Return, per meter, the tighter of the states in these rows."""
    states: dict[Meter, LimitState] = {}
    for row in rows:
        for bucket, meter, limit in row:
            owed, name = bucket.full_at - now_ns * limit, METERS[meter]
            if owed < 0:
                owed = 0
            left = limit - -(-owed // MINUTE_NS)
            if left < 0:
                left = 0
            if name not in states or left < states[name].remaining:
                states[name] = LimitState(limit, left, owed / limit / SECOND_NS)
    return states


def _concurrency_refusal(accounts: Iterable[_Usage]) -> LimitExceeded | None:
    """Build the refusal of the first account with running requests; None without one."""
    for account in accounts:
        running = account.running + account.elsewhere
        if running >= account.running_max:
            return LimitExceeded(
                "requests_at_once",
                f"Rate limit reached for requests at once: {running} running, limit"
                f" {account.running_max} for this {account.kind}.",
                retry_after_s=CONCURRENCY_RETRY_S,
                limit=account.running_max,
                remaining=0,
                reset_s=CONCURRENCY_RETRY_S,
            )
    return None


def _bucket_refusal(rows: Iterable[_Row], counts: _MeterCounts, now_ns: int) -> LimitExceeded:
    """Build the refusal of a bucket: a request that can never fit, then the longest wait."""
    wanted = [(bucket, counts[meter]) for row in rows for bucket, meter, _ in row]
    for bucket, count in wanted:
        if count > bucket.limit:
            return _never_fits(bucket, count)
    # A retry after the longest wait also passes the other limits.
    bucket, count = max(wanted, key=lambda one: one[0].wait_ns(now_ns, one[1] * MINUTE_NS))
    return _over_limit(bucket, count, now_ns)


def _never_fits(bucket: TokenBucket, count: int) -> LimitExceeded:
    """Refuse a request that is larger than the whole bucket; it would wait forever."""
    words = METERS[bucket.meter].replace("_", " ")
    return LimitExceeded(
        "request_exceeds_limit",
        f"Request exceeds the {bucket.kind}'s limit: it may use {count} {words}, limit"
        f" {bucket.limit} per minute; expected a shorter prompt or a smaller maximum output.",
        retry_after_s=None,
        limit=bucket.limit,
        remaining=0,
        reset_s=0.0,
    )


def _over_limit(bucket: TokenBucket, count: int, now_ns: int) -> LimitExceeded:
    """Refuse a request until its turn, and take that turn."""
    meter = METERS[bucket.meter]
    state = _states([((bucket, bucket.meter, bucket.limit),)], now_ns)[meter]
    words = meter.replace("_", " ")
    return LimitExceeded(
        f"{meter}_per_minute",
        f"Rate limit reached: {bucket.limit} {words} per minute, {state.remaining} remaining.",
        retry_after_s=bucket.take_turn_ns(now_ns, count * MINUTE_NS) / SECOND_NS,
        limit=bucket.limit,
        remaining=state.remaining,
        reset_s=state.reset_s,
    )
