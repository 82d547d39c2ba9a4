"""`AnalyticsClient`: how the gateway notes finished requests and reads sums.

`gateway.analytics.client` runs analytics in a separate process. `InProcessAnalytics` runs them in
this process, for embedded gateways and tests. `generation.outcome` notes requests;
`api.admin.analytics` asks questions.
"""

from __future__ import annotations

from typing import Any, Protocol

from gateway.analytics.aggregates import Analytics, CompletedPrompt
from tenancy.pricing.charges import RateCard
from tenancy.reuse.finding_counts import FindingCount


class AnalyticsClient(Protocol):
    """Analytics, as the gateway's event loop sees them.

    Questions raise Refusal while no process can answer them.
    """

    def note(self, completed: CompletedPrompt) -> None:
        """See `Analytics.note`. O(1) amortised: a batch leaves now and then, in O(its tokens)."""

    async def overview(self) -> dict[str, Any]:
        """See `Analytics.overview`."""

    async def tenant(self, tenant_id: int, card: RateCard, blocks: int) -> dict[str, Any] | None:
        """See `Analytics.tenant`."""

    async def missed_tokens(self, tenant_id: int, cause: str) -> int:
        """See `Analytics.missed_tokens`."""

    async def take_findings(self) -> list[FindingCount]:
        """See `Analytics.take_findings`."""

    async def close(self) -> None:
        """Stop. Safe to repeat."""


class InProcessAnalytics:
    """An `AnalyticsClient` whose analytics run in this process."""

    def __init__(self, analytics: Analytics) -> None:
        self._analytics = analytics
        self.note = analytics.note

    async def overview(self) -> dict[str, Any]:
        """See `AnalyticsClient`."""
        return self._analytics.overview()

    async def tenant(self, tenant_id: int, card: RateCard, blocks: int) -> dict[str, Any] | None:
        """See `AnalyticsClient`."""
        return self._analytics.tenant(tenant_id, card, blocks)

    async def missed_tokens(self, tenant_id: int, cause: str) -> int:
        """See `AnalyticsClient`."""
        return self._analytics.missed_tokens(tenant_id, cause)

    async def take_findings(self) -> list[FindingCount]:
        """See `AnalyticsClient`."""
        return self._analytics.take_findings()

    async def close(self) -> None:
        """See `AnalyticsClient`."""
