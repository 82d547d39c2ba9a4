"""Limits per minute and at once, for tenants and keys: reserve before, settle on the truth after.

Each limit is a token bucket that holds a minute's worth and refills evenly. What a request may
come to is reserved when it is admitted (for tokens: what is not in the cache, and the most it may
answer) and corrected when it ends, so that what was admitted never exceeds a limit, however many
ask at once. It knows no HTTP, no engine and no database; the gateway calls it, on one thread.

A bucket is what is owed and since when; it drains at the limit's own rate. Everything is whole
numbers (tokens times the nanoseconds of a minute), so sums are exact. A limit that changes at
runtime holds for the next request: a half-full bucket of one size is a half-full one of another.

    owed ┤ ╲ taken        given while owed + cost is at most a minute's worth
         │  ╲│╲
         └────────▶ time
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import msgspec
from msgspec import Struct

from tenancy.errors import BadName, LimitExceeded
from tenancy.types import Identity, Limits

SECOND_NS = 1_000_000_000
MINUTE_NS = 60 * SECOND_NS
LIMIT_MAX = 10**12
AT_ONCE_RETRY_S = 1.0
"""Nobody knows when a running request ends; a second is soon enough to ask again."""

_IDLE_LOOKS = 4
"""How many of the longest unused entries are looked at when one or two are added."""

Meter = Literal["requests", "tokens", "input_tokens", "output_tokens"]
METERS: tuple[Meter, ...] = ("requests", "tokens", "input_tokens", "output_tokens")

Kind = Literal["tenant", "key"]
Owner = tuple[Kind, int]

_OF_PROMPTS = (METERS.index("tokens"), METERS.index("input_tokens"))
_PRESSING = 8
"""A limit of which not more than one part in so many is taken presses nobody."""


class Demand(Struct, frozen=True):
    """Tokens of one request: prompt tokens that the cache does not have, and output tokens."""

    input_tokens: int
    output_tokens: int

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """What it counts on each of `METERS`."""
        given, made = self.input_tokens, self.output_tokens
        return 1, given + made, given, made


class LimitState(Struct, frozen=True):
    """One limit now: what is left, and how long until all of it is there again."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(slots=True)
class _Bucket:
    """Token-nanoseconds. `told`: what would be owed if those who were refused had been given when
    they were told to come back."""

    limit: int = 1
    at_ns: int = 0
    owed: int = 0
    told: int = 0

    def drain(self, now_ns: int, limit: int) -> None:
        """As it is now, at this limit. Shares are rounded up where the limit has changed."""
        gone, owed = (now_ns - self.at_ns) * self.limit, self.owed
        self.at_ns = now_ns
        self.owed = owed - gone if owed > gone else 0
        if self.told:
            self.told = max(0, self.told - gone)
        if limit != self.limit:
            self.owed = -(-self.owed * limit // self.limit)
            self.told = -(-self.told * limit // self.limit)
            self.limit = limit

    def after_ns(self, cost: int) -> int:
        """How long until that much fits. O(1). Changes nothing."""
        return max(0, -(-(self.owed + cost - self.limit * MINUTE_NS) // self.limit))

    def turn_ns(self, cost: int) -> int:
        """How long until that much fits after all who were told to wait before: each gets a turn
        of his own, or all would come at once and most be refused again. At most a minute."""
        whole = self.limit * MINUTE_NS
        turn = max(self.owed, self.told) + cost
        self.told = min(turn, 2 * whole)
        return min(MINUTE_NS, -(-(turn - whole) // self.limit))

    def state(self) -> LimitState:
        """For headers."""
        limit, owed = self.limit, self.owed
        left = limit - -(-owed // MINUTE_NS)
        return LimitState(limit, left if left > 0 else 0, owed / limit / SECOND_NS)

    def share(self, now_ns: int) -> float:
        """Which part of the limit is taken. Changes nothing."""
        owed = self.owed - (now_ns - self.at_ns) * self.limit
        return owed / (self.limit * MINUTE_NS) if owed > 0 else 0.0

    def is_idle(self, now_ns: int) -> bool:
        """Would a new one be the same?"""
        return max(self.owed, self.told) <= (now_ns - self.at_ns) * self.limit


@dataclass(slots=True)
class _Account:
    """What a tenant or a key has used. `buckets`: by the place of the meter in `METERS`."""

    kind: Kind
    buckets: defaultdict[int, _Bucket] = field(default_factory=lambda: defaultdict(_Bucket))
    at_once: int = 0

    def is_idle(self, now_ns: int) -> bool:
        """Would a new one be the same?"""
        return not self.at_once and all(b.is_idle(now_ns) for b in self.buckets.values())


class _Taken(Struct):
    """What a request takes of a bucket, as far as is known, at the limit that held then."""

    bucket: _Bucket
    kind: Kind
    meter: int
    limit: int
    count: int


class Reservation:
    """What one request has been given. Settle it once, however the request ended."""

    __slots__ = ("_accounts", "_is_open", "_limiter", "_taken")

    def __init__(
        self, limiter: Limiter, accounts: tuple[_Account, ...], taken: list[_Taken]
    ) -> None:
        self._limiter = limiter
        self._accounts = accounts
        self._taken = taken
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
        if self._is_open:
            self._limiter.correct(self._taken, estimate)

    def status(self) -> dict[Meter, LimitState]:
        """What `Limiter.status` says, as of the reservation itself: to be asked at once."""
        states: dict[Meter, LimitState] = {}
        for taken in self._taken:
            _keep_tighter(states, METERS[taken.meter], taken.bucket)
        return states

    @property
    def is_open(self) -> bool:
        """Has it not been settled?"""
        return self._is_open


class Limiter:
    """All limits of one process. Belongs to one thread; every call is a whole."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._accounts: OrderedDict[Owner, _Account] = OrderedDict()
        self._open = 0

    def reserve(self, identity: Identity, estimate: Demand) -> Reservation:
        """Take all that a request may come to from every limit that holds for it, or nothing.

        About 5 us. Raises LimitExceeded for the limit that is longest in the way.
        """
        assert min(estimate.input_tokens, estimate.output_tokens) >= 0
        now_ns = self._now_ns()
        accounts = self._accounts_of(identity, now_ns)
        counts = estimate.counts
        taken: list[_Taken] = []
        fits = True
        for account, limits in zip(accounts, (identity.limits, identity.key_limits), strict=True):
            kind, buckets, at_once = account.kind, account.buckets, limits.requests_at_once
            if at_once is not None and account.at_once >= at_once:
                fits = False
            for meter, limit in _set(limits):
                bucket, count = buckets[meter], counts[meter]
                bucket.drain(now_ns, limit)
                taken.append(_Taken(bucket, kind, meter, limit, count))
                if bucket.owed > (limit - count) * MINUTE_NS:
                    fits = False
        if not fits:
            raise _refusal(identity, accounts, taken)
        for one in taken:
            one.bucket.owed += one.count * MINUTE_NS
        for account in accounts:
            account.at_once += 1
        self._open += 1
        return Reservation(self, accounts, taken)

    def presses(self, identity: Identity, estimate: Demand) -> bool:
        """Would so much take more than an eighth of a limit on prompt tokens, with what is taken
        already? Only then it matters how much of it the cache has. Changes nothing."""
        now_ns, counts = self._now_ns(), estimate.counts
        for owner, limits in _owners(identity):
            account = self._accounts.get(owner)
            for meter, limit in _of_prompts(limits):
                bucket = None if account is None else account.buckets.get(meter)
                taken = 0.0 if bucket is None else bucket.share(now_ns)
                if (taken + counts[meter] / limit) * _PRESSING > 1:
                    return True
        return False

    def status(self, identity: Identity) -> dict[Meter, LimitState]:
        """For each meter with a limit: the tighter of the tenant's and the key's. For headers."""
        now_ns = self._now_ns()
        states: dict[Meter, LimitState] = {}
        for owner, limits in _owners(identity):
            account = self._accounts.get(owner) or _Account(owner[0])
            for meter, limit in _set(limits):
                bucket = account.buckets.get(meter) or _Bucket()
                bucket.drain(now_ns, limit)
                _keep_tighter(states, METERS[meter], bucket)
        return states

    def correct(self, taken: Sequence[_Taken], actual: Demand) -> None:
        """See `Reservation.correct`, which calls it."""
        now_ns, counts = self._now_ns(), actual.counts
        for one in taken:
            count = counts[one.meter]
            if count == one.count:
                continue  # it may drain the next time that it is asked
            more, bucket = (count - one.count) * MINUTE_NS, one.bucket
            one.count = count
            bucket.drain(now_ns, bucket.limit)
            bucket.owed = max(0, bucket.owed - (-more * bucket.limit // one.limit))

    def leave(self, accounts: Sequence[_Account]) -> None:
        """See `Reservation.settle`, which calls it once."""
        for account in accounts:
            account.at_once -= 1
            assert account.at_once >= 0, "a reservation is settled once"
        self._open -= 1

    @property
    def open_reservations(self) -> int:
        """Requests that were admitted and not settled."""
        return self._open

    def __len__(self) -> int:
        """Tenants and keys that are remembered."""
        return len(self._accounts)

    def check(self) -> None:
        """Raises AssertionError where the books disagree. O(what is remembered)."""
        counts = {"tenant": 0, "key": 0}
        for (kind, number), account in self._accounts.items():
            assert account.at_once >= 0, f"{kind} {number} has {account.at_once} at once"
            counts[kind] += account.at_once
        assert counts == {"tenant": self._open, "key": self._open}, f"{counts} of {self._open}"

    def _accounts_of(self, identity: Identity, now_ns: int) -> tuple[_Account, ...]:
        """The tenant's and the key's, made where they are new; used last from now on."""
        tenant, key = _owners(identity)
        if tenant[0] not in self._accounts or key[0] not in self._accounts:
            self._drop_idle(now_ns)
        return self._account(tenant[0]), self._account(key[0])

    def _account(self, owner: Owner) -> _Account:
        found = self._accounts.get(owner)
        if found is None:
            found = self._accounts[owner] = _Account(owner[0])
        else:
            self._accounts.move_to_end(owner)
        return found

    def _drop_idle(self, now_ns: int) -> None:
        """Forget the longest unused that a new one would equal. What is left has been used within
        about a minute, or runs, or owes; who is new adds two at most and looks at four."""
        for _ in range(min(_IDLE_LOOKS, len(self._accounts))):
            owner = next(iter(self._accounts))
            if self._accounts[owner].is_idle(now_ns):
                del self._accounts[owner]
            else:
                self._accounts.move_to_end(owner)

    def _now_ns(self) -> int:
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
def _set(limits: Limits) -> tuple[tuple[int, int], ...]:
    """(place in `METERS`, limit) of those that are set."""
    found = ((place, limit_of(limits, meter)) for place, meter in enumerate(METERS))
    return tuple((place, limit) for place, limit in found if limit is not None)


@lru_cache(maxsize=1_024)
def _of_prompts(limits: Limits) -> tuple[tuple[int, int], ...]:
    """Those of them that count prompt tokens."""
    return tuple((place, limit) for place, limit in _set(limits) if place in _OF_PROMPTS)


def _owners(identity: Identity) -> tuple[tuple[Owner, Limits], tuple[Owner, Limits]]:
    return (
        (("tenant", identity.tenant.tenant_id), identity.limits),
        (("key", identity.key_id), identity.key_limits),
    )


def _keep_tighter(states: dict[Meter, LimitState], meter: Meter, bucket: _Bucket) -> None:
    state, other = bucket.state(), states.get(meter)
    if other is None or state.remaining < other.remaining:
        states[meter] = state


def _refusal(
    identity: Identity, accounts: tuple[_Account, ...], wanted: list[_Taken]
) -> LimitExceeded:
    """Of what does not fit: what never will, then what runs, then what waits longest."""
    for one in wanted:
        if one.count > one.limit:
            return _never_fits(one)
    for account, limits in zip(accounts, (identity.limits, identity.key_limits), strict=True):
        limit = limits.requests_at_once
        if limit is not None and account.at_once >= limit:
            return LimitExceeded(
                "requests_at_once",
                f"{account.at_once} requests of this {account.kind} are running; {limit} may at"
                " once.",
                retry_after_s=AT_ONCE_RETRY_S,
                limit=limit,
                remaining=0,
                reset_s=AT_ONCE_RETRY_S,
            )
    # Who waits for the limit that is longest in the way need not wait for others.
    return _full(max(wanted, key=lambda one: one.bucket.after_ns(one.count * MINUTE_NS)))


def _never_fits(one: _Taken) -> LimitExceeded:
    """What is more than a whole bucket would wait for ever."""
    words = METERS[one.meter].replace("_", " ")
    return LimitExceeded(
        "request_exceeds_limit",
        f"This request may take {one.count} {words} and the {one.kind}'s limit is {one.limit}"
        " per minute; a shorter prompt or a smaller maximum of output would fit.",
        retry_after_s=None,
        limit=one.limit,
        remaining=0,
        reset_s=0.0,
    )


def _full(one: _Taken) -> LimitExceeded:
    """It says when to come back, and that turn is taken."""
    state, meter = one.bucket.state(), METERS[one.meter]
    words = meter.replace("_", " ")
    return LimitExceeded(
        f"{meter}_per_minute",
        f"The limit of {one.limit} {words} per minute is reached: {state.remaining} are left.",
        retry_after_s=one.bucket.turn_ns(one.count * MINUTE_NS) / SECOND_NS,
        limit=one.limit,
        remaining=state.remaining,
        reset_s=state.reset_s,
    )
