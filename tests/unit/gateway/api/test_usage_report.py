"""Usage reports: windows, groups and totals."""

from __future__ import annotations

import pytest

from gateway.api.usage_report import parse_groups, totals_body, whole_hours
from gateway.errors import Refusal
from gateway.http.json_api import Window
from tenancy.accounting.usage import UsageTotal
from tenancy.types import HOUR_MS
from tests.tables import each_row


def test_widens_window_to_whole_hours() -> None:
    """Hourly sums answer it; the response has the widened window."""
    window = whole_hours(Window(HOUR_MS + 1, 2 * HOUR_MS + 1))

    assert window == Window(HOUR_MS, 3 * HOUR_MS)
    assert whole_hours(window) == window


def test_group_order_is_fixed() -> None:
    assert parse_groups("") == ()
    assert parse_groups("day,model") == parse_groups("model,day")
    assert set(parse_groups("key,day,tenant")) == {"tenant", "key", "day"}


@each_row("text", ["week", "day,day", "hour,day", "day;model", "'", "day, model"])
def test_refuses_unknown_groups(text: str) -> None:
    """A group is never put into SQL as sent."""
    with pytest.raises(Refusal, match="group_by"):
        parse_groups(text)


def test_refuses_tenant_group_for_a_tenant() -> None:
    with pytest.raises(Refusal):
        parse_groups("tenant", own=True)


def test_hit_ratio_of_no_tokens_is_null() -> None:
    assert totals_body([])["hit_ratio"] is None


def test_totals_add_counts_and_money_and_divide_once() -> None:
    """A mean of ratios would be another number."""
    rows = [
        UsageTotal("a", requests=1, prompt_tokens=100, cache_read_tokens=100, charge_pico=3),
        UsageTotal("b", requests=2, prompt_tokens=300, saved_pico=-1),
    ]
    total = totals_body(rows)

    assert (total["requests"], total["hit_ratio"]) == (3, 0.25)
    assert (total["charge_usd"], total["saved_usd"]) == ("0.000000000003", "-0.000000000001")
