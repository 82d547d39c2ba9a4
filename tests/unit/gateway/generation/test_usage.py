"""Usage of several prompts."""

from __future__ import annotations

from gateway.dialects.canonical import UsageRecord
from gateway.generation.usage import sum_usage


def test_sums_usage_by_class() -> None:
    one = UsageRecord(10, {"5m": 4}, {"1h": 2}, 4, 3, 4, 1)
    two = UsageRecord(20, {"5m": 1, "best_effort": 9}, {}, 10, 2, 9, 0)

    both = sum_usage([one, two])

    assert both == UsageRecord(30, {"5m": 5, "best_effort": 9}, {"1h": 2}, 14, 5, 13, 1)
    assert both.total_in == both.read_tokens() + both.write_tokens() + both.fresh
