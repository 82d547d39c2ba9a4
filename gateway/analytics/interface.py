"""`AnalyticsClient`: how the gateway notes finished requests and reads sums.

`gateway.analytics.client` runs analytics in a separate process. `InProcessAnalytics` runs them in
this process, for embedded gateways and tests. `generation.outcome` notes requests;
`api.admin.analytics` asks questions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import msgspec

from gateway.analytics.aggregates import Analytics, ModelTerms
from gateway.analytics.completed_prompt import CompletedPrompt
from gateway.analytics.protocol import (
    MissedTokensQuestion,
    MissesQuestion,
    OverviewQuestion,
    Question,
    TenantQuestion,
)
from tenancy.reuse.finding_counts import ExplainedMisses


class AnalyticsClient(ABC):
    """Analytics, as the gateway's event loop sees them.

    Questions raise Refusal while no process can answer them.
    """

    note: Callable[[CompletedPrompt], None]
    """See `Analytics.note`. O(1) amortised: a batch leaves now and then, in O(its tokens)."""

    @abstractmethod
    async def ask(self, question: Question) -> Any:
        """Return the answer to a question."""

    @abstractmethod
    async def close(self) -> None:
        """Stop. Safe to repeat."""

    async def overview(self) -> dict[str, Any]:
        """See `Analytics.overview`."""
        answer: dict[str, Any] = await self.ask(OverviewQuestion())
        return answer

    async def tenant(self, tenant_id: int, terms: dict[str, ModelTerms]) -> dict[str, Any] | None:
        """See `Analytics.tenant`."""
        answer: dict[str, Any] | None = await self.ask(TenantQuestion(tenant_id, terms))
        return answer

    async def missed_tokens(self, tenant_id: int, cause: str) -> int:
        """See `Analytics.missed_tokens`."""
        return int(await self.ask(MissedTokensQuestion(tenant_id, cause)))

    async def take_misses(self) -> ExplainedMisses:
        """See `Analytics.take_misses`."""
        return msgspec.convert(await self.ask(MissesQuestion()), ExplainedMisses)


class InProcessAnalytics(AnalyticsClient):
    """An `AnalyticsClient` over analytics in this process."""

    def __init__(self, analytics: Analytics) -> None:
        self._analytics = analytics
        self.note = analytics.note

    async def ask(self, question: Question) -> Any:
        """See `AnalyticsClient`."""
        return question.answer(self._analytics)

    async def close(self) -> None:
        """See `AnalyticsClient`."""
