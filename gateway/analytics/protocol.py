"""Messages between a gateway and its analytics process. Pure: bytes in, messages out.

    gateway                              analytics process
      StartAnalytics ──────────────────▶
      CompletedRequests, a batch ──────▶
      a question ──────────────────────▶
                             ◀─────────── QuestionResult     one per question, in order

Each message is the body of one frame of `engine.wire`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from gateway.analytics.aggregates import Analytics, ModelTerms
from gateway.analytics.completed_prompt import CompletedPrompt
from tenancy.reuse.advice import ClassTerms


class StartAnalytics(Struct, frozen=True, array_like=True, tag="begin"):
    """The gateway's first message: the arguments of `Analytics`."""

    tenants_max: int
    classes: dict[str, ClassTerms]


class CompletedRequests(Struct, frozen=True, array_like=True, tag="completed", gc=False):
    """Finished requests, each with the gateway's monotonic seconds."""

    wall_ms: float
    """Unix time at 0 s."""
    prompts: list[tuple[float, CompletedPrompt]]


class OverviewQuestion(Struct, frozen=True, array_like=True, tag="overview"):
    """Ask for `Analytics.overview`."""

    def answer(self, analytics: Analytics) -> object:
        """Return what `analytics` answers."""
        return analytics.overview()


class TenantQuestion(Struct, frozen=True, array_like=True, tag="tenant"):
    """Ask for `Analytics.tenant`."""

    tenant_id: int
    terms: dict[str, ModelTerms]

    def answer(self, analytics: Analytics) -> object:
        """Return what `analytics` answers."""
        return analytics.tenant(self.tenant_id, self.terms)


class MissedTokensQuestion(Struct, frozen=True, array_like=True, tag="missed_tokens"):
    """Ask for `Analytics.missed_tokens`."""

    tenant_id: int
    cause: str

    def answer(self, analytics: Analytics) -> object:
        """Return what `analytics` answers."""
        return analytics.missed_tokens(self.tenant_id, self.cause)


class MissesQuestion(Struct, frozen=True, array_like=True, tag="misses"):
    """Ask for `Analytics.take_misses`."""

    def answer(self, analytics: Analytics) -> object:
        """Return what `analytics` answers."""
        return analytics.take_misses()


class QuestionResult(Struct, frozen=True, array_like=True):
    """The answer to the oldest unanswered question."""

    answer: Any


Question = OverviewQuestion | TenantQuestion | MissedTokensQuestion | MissesQuestion
ToAnalytics = StartAnalytics | CompletedRequests | Question

_TO_ANALYTICS: msgspec.msgpack.Decoder[ToAnalytics] = msgspec.msgpack.Decoder(ToAnalytics)
_FROM_ANALYTICS = msgspec.msgpack.Decoder(QuestionResult)


def read_to_analytics(data: bytes) -> ToAnalytics:
    """Decode a frame's body. Raises msgspec's errors, as all readers of this module do."""
    return _TO_ANALYTICS.decode(data)


def read_from_analytics(data: bytes) -> QuestionResult:
    """Decode a frame's body."""
    return _FROM_ANALYTICS.decode(data)
