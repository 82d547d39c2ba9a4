"""The wire between a gateway and its analytics' process: length-prefixed msgpack, as the ledger's.

    gateway                              analytics' process
      Begin ───────────────────────────▶
      Told, some answers at once ──────▶
      a question ──────────────────────▶
                             ◀─────────── Said          one per question, in their order

Pure: bytes in, messages out.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from gateway.analytics.aggregates import Facts
from tenancy.pricing.charges import RateCard
from tenancy.reuse.advice import Kept


class Begin(Struct, frozen=True, array_like=True, tag="begin"):
    """First: `Analytics`' own arguments."""

    tenants_max: int
    classes: dict[str, Kept]


class Told(Struct, frozen=True, array_like=True, tag="told", gc=False):
    """Answers that are over, each with the gateway's monotonic seconds. `wall_ms`: at 0 of them."""

    wall_ms: float
    facts: list[tuple[float, Facts]]


class Overview(Struct, frozen=True, array_like=True, tag="overview"):
    """A question."""


class Tenant(Struct, frozen=True, array_like=True, tag="tenant"):
    """A question."""

    name: str
    card: RateCard
    blocks: int


class MissedTokens(Struct, frozen=True, array_like=True, tag="missed_tokens"):
    """A question."""

    name: str
    cause: str


class Said(Struct, frozen=True, array_like=True):
    """The answer to the question that was asked longest ago."""

    answer: Any


Question = Overview | Tenant | MissedTokens
ToAnalytics = Begin | Told | Question

_TO_ANALYTICS: msgspec.msgpack.Decoder[ToAnalytics] = msgspec.msgpack.Decoder(ToAnalytics)
_SAID = msgspec.msgpack.Decoder(Said)


def read_to_analytics(data: bytes) -> ToAnalytics:
    """Of a frame. Raises msgspec's errors, as all that read here do."""
    return _TO_ANALYTICS.decode(data)


def read_said(data: bytes) -> Said:
    """Of a frame."""
    return _SAID.decode(data)
