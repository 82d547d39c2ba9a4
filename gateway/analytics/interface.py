"""Where the gateway tells of answers that are over, and asks what they come to.

`analytics_link` has them in a process of their own; here they are in this one, for embedders and
tests. `outcome` tells, the analytics desk asks.
"""

from __future__ import annotations

from typing import Any, Protocol

from gateway.analytics.aggregates import Analytics, Facts
from tenancy.pricing.charges import RateCard


class AnalyticsDoor(Protocol):
    """Analytics, as far as a loop sees them. Questions raise Refusal while nobody is there who
    could answer."""

    def note(self, facts: Facts) -> None:
        """See `Analytics.note`. O(1), and now and then O(tokens of those before)."""

    async def overview(self) -> dict[str, Any]:
        """See `Analytics.overview`."""

    async def tenant(self, name: str, card: RateCard, blocks: int) -> dict[str, Any] | None:
        """See `Analytics.tenant`."""

    async def missed_tokens(self, name: str, cause: str) -> int:
        """See `Analytics.missed_tokens`."""

    async def close(self) -> None:
        """Nobody tells or asks any more. Safe to call twice."""


class AnalyticsHere:
    """Analytics of this process."""

    def __init__(self, analytics: Analytics) -> None:
        self._analytics = analytics
        self.note = analytics.note

    async def overview(self) -> dict[str, Any]:
        """See `AnalyticsDoor`."""
        return self._analytics.overview()

    async def tenant(self, name: str, card: RateCard, blocks: int) -> dict[str, Any] | None:
        """See `AnalyticsDoor`."""
        return self._analytics.tenant(name, card, blocks)

    async def missed_tokens(self, name: str, cause: str) -> int:
        """See `AnalyticsDoor`."""
        return self._analytics.missed_tokens(name, cause)

    async def close(self) -> None:
        """See `AnalyticsDoor`."""
