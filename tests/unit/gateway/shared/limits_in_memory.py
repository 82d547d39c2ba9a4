"""Shared limits in memory: the plain twin of the script in `gateway.shared.valkey`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from gateway.shared.interface import (
    LEASE_S,
    REQUEST_S,
    TOKEN_MS,
    Account,
    AccountLimits,
    Change,
    Counts,
    Standing,
)

NOTHING: Counts = (0, 0, 0, 0)


class _Debts:
    """The debts of one account as of `at_ms`, under the limits of then."""

    def __init__(self) -> None:
        self.owed = [0, 0, 0, 0]
        self.at_ms = [0, 0, 0, 0]
        self.limits = [0, 0, 0, 0]
        self.running: dict[str, int] = {}
        """The ends of leases, by request."""

    def now(self, limits: AccountLimits, now_ms: int) -> list[int]:
        """Return the debts at an instant; a changed limit keeps the used share, rounded up."""
        found = []
        for meter, limit in enumerate(limits[:4]):
            owed, before = self.owed[meter], self.limits[meter]
            if not limit:
                owed = 0
            elif before and before != limit:
                owed = -(-owed * limit // before)
            found.append(max(0, owed - (now_ms - self.at_ms[meter]) * limit))
        return found


class LimitsInMemory:
    """See `SharedLimits`."""

    is_away = False
    gateways = 1

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._debts: defaultdict[str, _Debts] = defaultdict(_Debts)
        self._requests: dict[str, tuple[Counts, int]] = {}

    async def change(self, change: Change) -> Standing:
        """See `SharedLimits`."""
        return self.apply(change)

    def note(self, change: Change) -> None:
        """See `SharedLimits`."""
        self.apply(change)

    def apply(self, change: Change) -> Standing:
        """Change the accounts, all or nothing. O(running requests of both)."""
        now_ms, kind = self._now_ms(), change.kind
        before, until_ms = self._requests.get(change.request_id, (NOTHING, 0))
        is_known = until_ms > now_ms
        before = before if is_known else NOTHING
        changes = not is_known if kind == "take" else is_known or kind == "extend"
        after = change.counts if changes else before
        debts = [self._debts[account.name] for account in change.accounts]
        owed = [
            one.now(account.limits, now_ms)
            for one, account in zip(debts, change.accounts, strict=True)
        ]
        for one in debts:
            one.running = {name: end for name, end in one.running.items() if end > now_ms}
        more = [(new - old) * TOKEN_MS for new, old in zip(after, before, strict=True)]
        fits = kind in ("correct", "settle") or all(
            self._fits(account, one, now, more, is_taking=kind == "take" and not is_known)
            for account, one, now in zip(change.accounts, debts, owed, strict=True)
        )
        if fits and changes:
            self._requests[change.request_id] = after, now_ms + int(REQUEST_S * 1_000)
            for one, now, account in zip(debts, owed, change.accounts, strict=True):
                for meter, limit in enumerate(account.limits[:4]):
                    if not limit:
                        continue
                    now[meter] = max(0, now[meter] + more[meter])
                    one.owed[meter], one.at_ms[meter], one.limits[meter] = now[meter], now_ms, limit
                if kind == "take":
                    one.running[change.request_id] = now_ms + int(LEASE_S * 1_000)
                elif kind == "settle":
                    one.running.pop(change.request_id, None)
        return Standing(
            fits,
            (_counts(owed[0]), _counts(owed[1])),
            (len(debts[0].running), len(debts[1].running)),
        )

    @staticmethod
    def _fits(
        account: Account, debts: _Debts, owed: list[int], more: list[int], *, is_taking: bool
    ) -> bool:
        *meters, at_once = account.limits
        if is_taking and at_once and len(debts.running) >= at_once:
            return False
        return all(
            not limit or one <= 0 or now + one <= limit * TOKEN_MS
            for limit, now, one in zip(meters, owed, more, strict=True)
        )


def _counts(owed: list[int]) -> Counts:
    return owed[0], owed[1], owed[2], owed[3]
