"""Limits per minute and at once, for tenants and keys: reserve before, settle on the truth after.

Each limit is a token bucket that holds a minute's worth and refills evenly. What a request may
come to is reserved when it is admitted (for tokens: what is not in the cache, and the most it may
answer) and corrected when it ends, so that what was admitted never exceeds a limit, however many
ask at once. A key shares its buckets with those it was rotated from and to: a new key is no new
minute. A limit that changes at runtime holds for the next request. It knows no HTTP, no engine and
no database; the gateway calls it, on one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import msgspec
from msgspec import Struct

from tenancy.errors import BadName, LimitExceeded
from tenancy.types import Identity, Limits

LIMIT_MAX = 10**12
CONCURRENCY_RETRY_S = 1.0
"""Nobody knows when a running request ends; a second is soon enough to ask again."""

Meter = Literal["requests", "tokens", "input_tokens", "output_tokens"]
METERS: tuple[Meter, ...] = ("requests", "tokens", "input_tokens", "output_tokens")

_MeterCounts = tuple[int, int, int, int]
"""What a request counts on each of `METERS`."""

_PROMPT_METERS = (METERS.index("tokens"), METERS.index("input_tokens"))
_NEAR_LIMIT_PARTS = 8
"""A limit of which not more than one part in so many is taken presses nobody."""


class Demand(Struct, frozen=True):
    """Tokens of one request: prompt tokens that the cache does not have, and output tokens."""

    input_tokens: int
    output_tokens: int

    @property
    def counts(self) -> _MeterCounts:
        """What it counts on each of `METERS`."""
        given, made = self.input_tokens, self.output_tokens
        return 1, given + made, given, made


class LimitState(Struct, frozen=True):
    """One limit now: what is left, and how long until all of it is there again."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(slots=True)
class TokenBucket:
    """What is owed at a time is `until` less the time times the limit; below zero nothing is.
    `told`: the same, if those who were refused had been given when they were told to come back."""

    kind: Kind
    meter: int
    limit: int
    until: int = 0
    told: int = 0

    def owed(self, now_ns: int) -> int:
        """Token-nanoseconds. Changes nothing."""
        return max(0, self.until - now_ns * self.limit)

    def resize(self, now_ns: int, limit: int) -> None:
        """The limit has changed; shares are rounded up."""
        before, after = now_ns * self.limit, now_ns * limit
        self.until = after - min(0, (before - self.until) * limit // self.limit)
        self.told = after - min(0, (before - self.told) * limit // self.limit)
        self.limit = limit

    def after_ns(self, now_ns: int, cost: int) -> int:
        """How long until that much fits. O(1). Changes nothing."""
        return max(0, -(-(self.owed(now_ns) + cost - self.limit * MINUTE_NS) // self.limit))

    def turn_ns(self, now_ns: int, cost: int) -> int:
        """How long until that much fits after all who were told to wait before: each gets a turn
        of his own, or all would come at once and most be refused again. At most a minute."""
        whole, drained = self.limit * MINUTE_NS, now_ns * self.limit
        turn = max(self.until, self.told, drained) + cost - drained
        self.told = drained + min(turn, 2 * whole)
        return min(MINUTE_NS, -(-(turn - whole) // self.limit))

    def is_idle(self, now_ns: int) -> bool:
        """Would a new one be the same?"""
        return max(self.until, self.told) <= now_ns * self.limit


_Row = tuple[tuple[TokenBucket, int, int], ...]
"""Buckets of an account: (bucket, meter, the limit while this row holds)."""


@dataclass(slots=True)
class _Usage:
    """What a tenant or a line of keys has used. `buckets`: by the place of the meter in `METERS`;
    `row`: those that `limits` sets; `of_prompts`: of them, those on prompt tokens; `at_once_max`:
    how many of its requests may run by them."""

    kind: Kind
    buckets: dict[int, TokenBucket] = field(default_factory=dict)
    at_once: int = 0
    at_once_max: int = LIMIT_MAX
    limits: Limits = field(default_factory=Limits)
    row: _Row = ()
    of_prompts: _Row = ()

    def under(self, limits: Limits, now_ns: int) -> _Row:
        """Its buckets under these limits, which hold from now on. O(1) where they did before."""
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
        self.of_prompts = tuple(one for one in row if one[1] in _PROMPT_METERS)
        most = limits.requests_at_once
        self.at_once_max = LIMIT_MAX if most is None else most

    def is_idle(self, now_ns: int) -> bool:
        """The same of all of it."""
        return not self.at_once and all(b.is_idle(now_ns) for b in self.buckets.values())


class Reservation:
    """What one request has been given. Settle it once, however the request ended."""

    __slots__ = ("_accounts", "_counts", "_is_open", "_limiter", "_rows")

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

    def settle(self, actual: Demand) -> None:
        """Correct the estimate by the truth; what was too much is there for others at once, what
        was too little is owed. The request itself stays counted. A second call changes nothing."""
        if self._is_open:
            self.correct(actual)
            self._is_open = False
            self._limiter.leave(self._accounts)

    def correct(self, estimate: Demand) -> None:
        """More is known of it now, and it goes on: what was too much is there for others."""
        before, after = self._counts, estimate.counts
        if not self._is_open or before == after:
            return
        now_ns, self._counts = self._limiter.now_ns(), after
        for row in self._rows:
            for bucket, meter, limit in row:
                if more := (after[meter] - before[meter]) * MINUTE_NS:
                    if limit != bucket.limit:
                        more = -(-more * bucket.limit // limit)
                    drained = now_ns * bucket.limit
                    bucket.until = max(max(bucket.until, drained) + more, drained)

    def status(self) -> dict[Meter, LimitState]:
        """What `Limiter.status` says of the limits that it was given under."""
        return _states(self._rows, self._limiter.now_ns())

    @property
    def is_open(self) -> bool:
        """Has it not been settled?"""
        return self._is_open


class Limiter:
    """All limits of one process. Belongs to one thread; every call is a whole."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._tenants: OrderedDict[int, _Usage] = OrderedDict()
        self._keys: OrderedDict[int, _Usage] = OrderedDict()
        self._open = 0

    def reserve(self, identity: Identity, estimate: Demand) -> Reservation:
        """Take all that a request may come to from every limit that holds for it, or nothing. About
        3 us. Raises LimitExceeded for the limit that is longest in the way."""
        counts = estimate.counts
        assert min(counts) >= 0
        now_ns = self.now_ns()
        tenant = self._account(self._tenants, "tenant", identity.tenant.tenant_id, now_ns)
        key = self._account(self._keys, "key", identity.line_id, now_ns)
        rows = tenant.under(identity.limits, now_ns), key.under(identity.key_limits, now_ns)
        fits = tenant.at_once < tenant.at_once_max and key.at_once < key.at_once_max
        for row in rows:
            for bucket, meter, limit in row:
                drained, until = now_ns * limit, bucket.until
                if until < drained:
                    until = drained
                bucket.until = until = until + counts[meter] * MINUTE_NS
                if until - drained > limit * MINUTE_NS:
                    fits = False
        if not fits:
            for row in rows:
                for bucket, meter, _ in row:
                    bucket.until -= counts[meter] * MINUTE_NS
            raise _refusal((tenant, key), rows, counts, now_ns)
        tenant.at_once += 1
        key.at_once += 1
        self._open += 1
        return Reservation(self, (tenant, key), rows, counts)

    def presses(self, identity: Identity, estimate: Demand) -> bool:
        """Would so much take more than an eighth of a limit on prompt tokens, with what is taken
        already? Only then it matters how much of it the cache has. Changes no count."""
        now_ns, counts = self.now_ns(), estimate.counts
        for account in self._looked_at(identity, now_ns):
            for bucket, meter, limit in account.of_prompts:
                taken = bucket.owed(now_ns) + counts[meter] * MINUTE_NS
                if taken * _NEAR_LIMIT_PARTS > limit * MINUTE_NS:
                    return True
        return False

    def status(self, identity: Identity) -> dict[Meter, LimitState]:
        """For each meter with a limit: the tighter of the tenant's and the key's. For headers."""
        now_ns = self.now_ns()
        return _states([one.row for one in self._looked_at(identity, now_ns)], now_ns)

    def leave(self, accounts: tuple[_Usage, _Usage]) -> None:
        """See `Reservation.settle`, which calls it once."""
        tenant, key = accounts
        tenant.at_once -= 1
        key.at_once -= 1
        self._open -= 1
        assert min(tenant.at_once, key.at_once) >= 0, "a reservation is settled once"

    @property
    def open_reservations(self) -> int:
        """Requests that were admitted and not settled."""
        return self._open

    def __len__(self) -> int:
        """Tenants and lines of keys that are remembered."""
        return len(self._tenants) + len(self._keys)

    def check(self) -> None:
        """Raises AssertionError where the books disagree. O(what is remembered)."""
        for kind, accounts in (("tenant", self._tenants), ("key", self._keys)):
            for number, account in accounts.items():
                assert account.at_once >= 0, f"{kind} {number} has {account.at_once} at once"
            running = sum(account.at_once for account in accounts.values())
            assert running == self._open, f"{running} of {kind}s run, {self._open} are open"

    def _looked_at(self, identity: Identity, now_ns: int) -> tuple[_Usage, _Usage]:
        """The tenant's and the key's; of those who are not remembered, what they begin with."""
        tenant = self._tenants.get(identity.tenant.tenant_id) or _Usage("tenant")
        key = self._keys.get(identity.line_id) or _Usage("key")
        tenant.under(identity.limits, now_ns)
        key.under(identity.key_limits, now_ns)
        return tenant, key

    @staticmethod
    def _account(
        accounts: OrderedDict[int, _Usage], kind: Kind, number: int, now_ns: int
    ) -> _Usage:
        """One that is remembered from now on. Whoever is new looks at two others, in turn, and
        forgets those that a new one would equal: what is left has been used within about a minute,
        or runs, or owes."""
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
        """By its clock."""
        return int(self._clock() * SECOND_NS)


def check_limits(limits: Limits) -> None:
    """Raises BadName for limits that cannot be."""
    for name, limit in msgspec.structs.asdict(limits).items():
        if limit is not None and not 1 <= limit <= LIMIT_MAX:
            raise BadName("bad_limits", f"{name} of {limit} is not between 1 and {LIMIT_MAX}")


def limit_of(limits: Limits, meter: Meter) -> int | None:
    """A meter's limit per minute."""
    limit: int | None = getattr(limits, f"{meter}_per_minute")
    return limit


@lru_cache(maxsize=1_024)
def _limits_by_meter(limits: Limits) -> tuple[tuple[int, int], ...]:
    """(place in `METERS`, limit) of those that are set."""
    found = ((place, limit_of(limits, meter)) for place, meter in enumerate(METERS))
    return tuple((place, limit) for place, limit in found if limit is not None)


def _states(rows: Iterable[_Row], now_ns: int) -> dict[Meter, LimitState]:
    """Of each meter the tighter one."""
    states: dict[Meter, LimitState] = {}
    for row in rows:
        for bucket, meter, limit in row:
            owed, name = bucket.until - now_ns * limit, METERS[meter]
            if owed < 0:
                owed = 0
            left = limit - -(-owed // MINUTE_NS)
            if left < 0:
                left = 0
            if name not in states or left < states[name].remaining:
                states[name] = LimitState(limit, left, owed / limit / SECOND_NS)
    return states


def _refusal(
    accounts: Iterable[_Usage], rows: Iterable[_Row], counts: _MeterCounts, now_ns: int
) -> LimitExceeded:
    """Of what does not fit: what never will, then what runs, then what waits longest."""
    wanted = [(bucket, counts[meter]) for row in rows for bucket, meter, _ in row]
    for bucket, count in wanted:
        if count > bucket.limit:
            return _never_fits(bucket, count)
    for account in accounts:
        if account.at_once >= account.at_once_max:
            return LimitExceeded(
                "requests_at_once",
                f"{account.at_once} requests of this {account.kind} are running;"
                f" {account.at_once_max} may at once.",
                retry_after_s=CONCURRENCY_RETRY_S,
                limit=account.at_once_max,
                remaining=0,
                reset_s=CONCURRENCY_RETRY_S,
            )
    # Who waits for the limit that is longest in the way need not wait for others.
    bucket, count = max(wanted, key=lambda one: one[0].after_ns(now_ns, one[1] * MINUTE_NS))
    return _over_limit(bucket, count, now_ns)


def _never_fits(bucket: TokenBucket, count: int) -> LimitExceeded:
    """What is more than a whole bucket would wait for ever."""
    words = METERS[bucket.meter].replace("_", " ")
    return LimitExceeded(
        "request_exceeds_limit",
        f"This request may take {count} {words} and the {bucket.kind}'s limit is {bucket.limit}"
        " per minute; a shorter prompt or a smaller maximum of output would fit.",
        retry_after_s=None,
        limit=bucket.limit,
        remaining=0,
        reset_s=0.0,
    )


def _over_limit(bucket: TokenBucket, count: int, now_ns: int) -> LimitExceeded:
    """It says when to come back, and that turn is taken."""
    meter = METERS[bucket.meter]
    state = _states([((bucket, bucket.meter, bucket.limit),)], now_ns)[meter]
    words = meter.replace("_", " ")
    return LimitExceeded(
        f"{meter}_per_minute",
        f"The limit of {bucket.limit} {words} per minute is reached: {state.remaining} are left.",
        retry_after_s=bucket.turn_ns(now_ns, count * MINUTE_NS) / SECOND_NS,
        limit=bucket.limit,
        remaining=state.remaining,
        reset_s=state.reset_s,
    )


SECOND_NS = 1_000_000_000
MINUTE_NS = 60 * SECOND_NS

Kind = Literal["tenant", "key"]
