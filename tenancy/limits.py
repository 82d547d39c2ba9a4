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

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
"""How many of the longest unused entries each reservation looks at: more than it adds."""

Meter = Literal["requests", "tokens", "input_tokens", "output_tokens"]
METERS: tuple[Meter, ...] = ("requests", "tokens", "input_tokens", "output_tokens")


class Demand(Struct, frozen=True):
    """Tokens of one request: prompt tokens that the cache does not have, and output tokens."""

    input_tokens: int
    output_tokens: int

    def of(self, meter: Meter) -> int:
        """What it counts on a meter."""
        match meter:
            case "requests":
                return 1
            case "tokens":
                return self.input_tokens + self.output_tokens
            case "input_tokens":
                return self.input_tokens
            case "output_tokens":
                return self.output_tokens


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
        gone = (now_ns - self.at_ns) * self.limit
        self.at_ns = now_ns
        self.owed = max(0, self.owed - gone)
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
        left = max(0, self.limit * MINUTE_NS - self.owed)
        return LimitState(self.limit, left // MINUTE_NS, self.owed / self.limit / SECOND_NS)

    def is_idle(self, now_ns: int) -> bool:
        """Would a new one be the same?"""
        return max(self.owed, self.told) <= (now_ns - self.at_ns) * self.limit


@dataclass(slots=True)
class _Account:
    """What a tenant or a key has used."""

    buckets: dict[Meter, _Bucket] = field(default_factory=dict)
    at_once: int = 0

    def bucket(self, meter: Meter) -> _Bucket:
        found = self.buckets.get(meter)
        if found is None:
            found = self.buckets[meter] = _Bucket()
        return found

    def is_idle(self, now_ns: int) -> bool:
        """Would a new one be the same?"""
        return not self.at_once and all(b.is_idle(now_ns) for b in self.buckets.values())


class _Taken(Struct, frozen=True):
    """What a request takes of a bucket, at the limit that held then."""

    bucket: _Bucket
    meter: Meter
    limit: int
    count: int

    @property
    def cost(self) -> int:
        """In the bucket's own measure."""
        return self.count * MINUTE_NS


Owner = tuple[Literal["tenant", "key"], int]


class Reservation:
    """What one request has been given. Settle it once, however the request ended."""

    __slots__ = ("_accounts", "_is_open", "_limiter", "_taken")

    def __init__(
        self, limiter: Limiter, accounts: tuple[_Account, ...], taken: tuple[_Taken, ...]
    ) -> None:
        self._limiter = limiter
        self._accounts = accounts
        self._taken = taken
        self._is_open = True

    def settle(self, actual: Demand) -> None:
        """Correct the estimate by the truth; what was too much is there for others at once, what
        was too little is owed. The request itself stays counted. A second call changes nothing."""
        if self._is_open:
            self._is_open = False
            self._limiter.settle(self._accounts, self._taken, actual)

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
        self._drop_idle(now_ns)
        owners = tuple(self._owners(identity))
        self._check_fit(owners, estimate)
        accounts = tuple(self._account(owner) for owner, _ in owners)
        _check_at_once(owners, accounts)
        wanted = tuple(_wanted(owners, accounts, estimate, now_ns))
        _check_rates(wanted)
        for taken in wanted:
            taken.bucket.owed += taken.cost
        for account in accounts:
            account.at_once += 1
        self._open += 1
        return Reservation(self, accounts, wanted)

    def status(self, identity: Identity) -> dict[Meter, LimitState]:
        """For each meter with a limit: the tighter of the tenant's and the key's. For headers."""
        now_ns = self._now_ns()
        states: dict[Meter, LimitState] = {}
        for owner, limits in self._owners(identity):
            account = self._accounts.get(owner) or _Account()
            for meter in METERS:
                limit = limit_of(limits, meter)
                if limit is None:
                    continue
                bucket = account.buckets.get(meter) or _Bucket()
                bucket.drain(now_ns, limit)
                state = bucket.state()
                if meter not in states or state.remaining < states[meter].remaining:
                    states[meter] = state
        return states

    def settle(
        self, accounts: tuple[_Account, ...], taken: tuple[_Taken, ...], actual: Demand
    ) -> None:
        """See `Reservation.settle`, which calls it once."""
        now_ns = self._now_ns()
        for one in taken:
            bucket = one.bucket
            bucket.drain(now_ns, bucket.limit)
            more = (max(0, actual.of(one.meter)) - one.count) * MINUTE_NS
            bucket.owed = max(0, bucket.owed - (-more * bucket.limit // one.limit))
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

    def _owners(self, identity: Identity) -> Iterator[tuple[Owner, Limits]]:
        yield ("tenant", identity.tenant.tenant_id), identity.limits
        yield ("key", identity.key_id), identity.key_limits

    def _account(self, owner: Owner) -> _Account:
        found = self._accounts.get(owner)
        if found is None:
            found = self._accounts[owner] = _Account()
        self._accounts.move_to_end(owner)
        return found

    def _drop_idle(self, now_ns: int) -> None:
        """Forget the longest unused that a new one would equal. What is left has been used within
        about a minute, or runs, or owes; each reservation adds two at most and looks at four."""
        for _ in range(min(_IDLE_LOOKS, len(self._accounts))):
            owner = next(iter(self._accounts))
            if self._accounts[owner].is_idle(now_ns):
                del self._accounts[owner]
            else:
                self._accounts.move_to_end(owner)

    def _check_fit(self, owners: tuple[tuple[Owner, Limits], ...], estimate: Demand) -> None:
        """What is more than a whole bucket would wait for ever."""
        for (kind, _), limits in owners:
            for meter in METERS:
                limit, wanted = limit_of(limits, meter), estimate.of(meter)
                if limit is not None and wanted > limit:
                    words = meter.replace("_", " ")
                    raise LimitExceeded(
                        "request_exceeds_limit",
                        f"This request may take {wanted} {words} and the {kind}'s limit is {limit}"
                        " per minute; a shorter prompt or a smaller maximum of output would fit.",
                        retry_after_s=None,
                        limit=limit,
                        remaining=0,
                        reset_s=0.0,
                    )

    def _now_ns(self) -> int:
        return int(self._clock() * SECOND_NS)


def check_limits(limits: Limits) -> None:
    """Raises BadName for limits that cannot be."""
    for name, limit in msgspec.structs.asdict(limits).items():
        if limit is not None and not 1 <= limit <= LIMIT_MAX:
            raise BadName("bad_limits", f"{name} of {limit} is not between 1 and {LIMIT_MAX}")


def limit_of(limits: Limits, meter: Meter) -> int | None:
    """A meter's limit per minute."""
    match meter:
        case "requests":
            return limits.requests_per_minute
        case "tokens":
            return limits.tokens_per_minute
        case "input_tokens":
            return limits.input_tokens_per_minute
        case "output_tokens":
            return limits.output_tokens_per_minute


def _wanted(
    owners: tuple[tuple[Owner, Limits], ...],
    accounts: tuple[_Account, ...],
    estimate: Demand,
    now_ns: int,
) -> Iterator[_Taken]:
    for (_, limits), account in zip(owners, accounts, strict=True):
        for meter in METERS:
            limit = limit_of(limits, meter)
            if limit is not None:
                bucket = account.bucket(meter)
                bucket.drain(now_ns, limit)
                yield _Taken(bucket, meter, limit, estimate.of(meter))


def _check_at_once(
    owners: tuple[tuple[Owner, Limits], ...], accounts: tuple[_Account, ...]
) -> None:
    for ((kind, _), limits), account in zip(owners, accounts, strict=True):
        limit = limits.requests_at_once
        if limit is not None and account.at_once >= limit:
            raise LimitExceeded(
                "requests_at_once",
                f"{account.at_once} requests of this {kind} are running; {limit} may at once.",
                retry_after_s=AT_ONCE_RETRY_S,
                limit=limit,
                remaining=0,
                reset_s=AT_ONCE_RETRY_S,
            )


def _check_rates(wanted: tuple[_Taken, ...]) -> None:
    """The limit that is longest in the way refuses: who waits for it need not wait for others."""
    worst = max(wanted, key=lambda one: one.bucket.after_ns(one.cost), default=None)
    if worst is None or not worst.bucket.after_ns(worst.cost):
        return
    state = worst.bucket.state()
    retry_after_s = worst.bucket.turn_ns(worst.cost) / SECOND_NS
    words = worst.meter.replace("_", " ")
    raise LimitExceeded(
        f"{worst.meter}_per_minute",
        f"The limit of {worst.limit} {words} per minute is reached: {state.remaining} are left.",
        retry_after_s=retry_after_s,
        limit=worst.limit,
        remaining=state.remaining,
        reset_s=state.reset_s,
    )
