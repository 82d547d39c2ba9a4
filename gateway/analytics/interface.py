"""The analytics that a gateway tells of finished requests and asks for sums.

`analytics_link` has them in a process of their own; here they are in this one, for embedders and
tests. `outcome` tells, `handlers.analytics` asks.
"""

from __future__ import annotations

from typing import Any, Protocol

from gateway.analytics.aggregates import Analytics, Facts
from tenancy.pricing.charges import RateCard


class AnalyticsClient(Protocol):
    """Analytics, as the gateway's loop sees them. Questions raise Refusal while there is no process
    to answer them."""

    def note(self, facts: Facts) -> None:
        """See `Analytics.note`. O(1) amortised: a batch leaves now and then, in O(its tokens)."""

    async def overview(self) -> dict[str, Any]:
        """See `Analytics.overview`."""

    async def tenant(self, name: str, card: RateCard, blocks: int) -> dict[str, Any] | None:
        """See `Analytics.tenant`."""

    async def missed_tokens(self, name: str, cause: str) -> int:
        """See `Analytics.missed_tokens`."""

    async def close(self) -> None:
        """End them. Safe to repeat."""


class InProcessAnalytics:
    """An `AnalyticsClient` of analytics in this process."""

    def __init__(self, analytics: Analytics) -> None:
        self._analytics = analytics
        self.note = analytics.note

    async def overview(self) -> dict[str, Any]:
        """See `AnalyticsClient`."""
        return self._analytics.overview()

    async def tenant(self, name: str, card: RateCard, blocks: int) -> dict[str, Any] | None:
        """See `AnalyticsClient`."""
        return self._analytics.tenant(name, card, blocks)

    async def missed_tokens(self, name: str, cause: str) -> int:
        """See `AnalyticsClient`."""
        return self._analytics.missed_tokens(name, cause)

    async def close(self) -> None:
        """See `AnalyticsClient`."""
