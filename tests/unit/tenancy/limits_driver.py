"""A limiter with a clock, which tests drive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tenancy.errors import LimitExceeded
from tenancy.limits import NO_DEMAND, Demand, Limiter, Reservation
from tenancy.types import CachePolicy, Identity, Limits, Tenant

FREE = Limits()
SMALL = Demand(1, 1)


class Clock:
    """Seconds that a test sets, in whole milliseconds, so they are exact."""

    def __init__(self) -> None:
        self.ms = 5_000

    def __call__(self) -> float:
        return self.ms / 1000


@dataclass
class Desk:
    """A limiter, its clock and its reservations."""

    clock: Clock = field(default_factory=Clock)
    open: list[Reservation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.limiter = Limiter(self.clock)

    def ask(
        self,
        limits: Limits,
        demand: Demand = SMALL,
        *,
        key_limits: Limits = FREE,
        key_id: int = 1,
        line_id: int | None = None,
        tenant_id: int = 1,
    ) -> LimitExceeded | None:
        """Reserve a request and its tokens. Returns None if admitted, otherwise the refusal."""
        who = identity(limits, key_limits, key_id=key_id, line_id=line_id, tenant_id=tenant_id)
        place = None
        try:
            place = self.limiter.reserve(who)
            place.extend(demand)
        except LimitExceeded as refusal:
            if place is not None:
                place.settle(NO_DEMAND)
            return refusal
        finally:
            self.limiter.check()
        self.open.append(place)
        return None

    def given(self, count: int, limits: Limits, demand: Demand = SMALL, **more: Any) -> int:
        """Return how many of `count` reservations were admitted."""
        return sum(self.ask(limits, demand, **more) is None for _ in range(count))

    def extend(self, estimate: Demand) -> bool:
        """Extend the newest reservation; return whether there was room."""
        try:
            self.open[-1].extend(estimate)
        except LimitExceeded:
            return False
        finally:
            self.limiter.check()
        return True

    def settle(self, actual: Demand) -> None:
        """Settle the oldest open reservation."""
        self.open.pop(0).settle(actual)
        self.limiter.check()


def identity(
    limits: Limits,
    key_limits: Limits = FREE,
    *,
    key_id: int = 1,
    line_id: int | None = None,
    tenant_id: int = 1,
) -> Identity:
    """Return an identity. `line_id` is the key's own id unless it was rotated from another."""
    return Identity(
        Tenant(tenant_id, "ada", "active", 0),
        "default",
        key_id,
        key_id if line_id is None else line_id,
        CachePolicy(),
        limits=limits,
        key_limits=key_limits,
    )
