"""The messages between a gateway and its analytics' process. Pure: bytes in, messages out.

    gateway                              analytics' process
      Begin ───────────────────────────▶
      Told, several requests at once ──▶
      a question ──────────────────────▶
                             ◀─────────── Said          one per question, in their order

Each is the body of one frame of `tenancy.ledger.child_process`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from gateway.analytics.aggregates import Facts
from tenancy.pricing.charges import RateCard
from tenancy.reuse.advice import ClassTerms


class StartAnalytics(Struct, frozen=True, array_like=True, tag="begin"):
    """The gateway's first message: the arguments of `Analytics`."""

    tenants_max: int
    classes: dict[str, ClassTerms]


class CompletedAnswers(Struct, frozen=True, array_like=True, tag="told", gc=False):
    """Finished requests, each with the gateway's monotonic seconds. `wall_ms`: Unix time at 0 s."""

    wall_ms: float
    facts: list[tuple[float, Facts]]


class OverviewQuestion(Struct, frozen=True, array_like=True, tag="overview"):
    """Asks for `Analytics.overview`."""


class TenantQuestion(Struct, frozen=True, array_like=True, tag="tenant"):
    """Asks for `Analytics.tenant`."""

    name: str
    card: RateCard
    blocks: int


class MissedTokensQuestion(Struct, frozen=True, array_like=True, tag="missed_tokens"):
    """Asks for `Analytics.missed_tokens`."""

    name: str
    cause: str


class AnswerTold(Struct, frozen=True, array_like=True):
    """The answer to the oldest question without an answer."""

    answer: Any


Question = OverviewQuestion | TenantQuestion | MissedTokensQuestion
ToAnalytics = StartAnalytics | CompletedAnswers | Question

_TO_ANALYTICS: msgspec.msgpack.Decoder[ToAnalytics] = msgspec.msgpack.Decoder(ToAnalytics)
_SAID = msgspec.msgpack.Decoder(AnswerTold)


def read_to_analytics(data: bytes) -> ToAnalytics:
    """Decode a frame's body. Raises msgspec's errors, as all readers here do."""
    return _TO_ANALYTICS.decode(data)


def read_said(data: bytes) -> AnswerTold:
    """Decode a frame's body."""
    return _SAID.decode(data)
