"""Usage as it is answered over HTTP."""

from __future__ import annotations

import pytest

from gateway.api.usage_report import HOUR_MS, parse_groups, totals_body, whole_hours
from gateway.errors import Refusal
from gateway.http.json_api import Window
from tenancy.accounting.usage import UsageTotal


def test_a_window_is_widened_to_whole_hours() -> None:
    """So that sums by the hour answer it; the answer says which window it is of."""
    window = whole_hours(Window(HOUR_MS + 1, 2 * HOUR_MS + 1))

    assert window == Window(HOUR_MS, 3 * HOUR_MS)
    assert whole_hours(window) == window


def test_groups_are_named_once_in_any_order() -> None:
    """The rows' order is ours."""
    assert parse_groups("") == ()
    assert parse_groups("day,model") == parse_groups("model,day")
    assert set(parse_groups("key,day,tenant")) == {"tenant", "key", "day"}


@pytest.mark.parametrize("text", ["week", "day,day", "hour,day", "day;model", "'", "day, model"])
def test_groups_that_cannot_be_are_refused(text: str) -> None:
    """Never put into a query as they came."""
    with pytest.raises(Refusal, match="group_by"):
        parse_groups(text)


def test_a_tenant_does_not_group_by_tenants() -> None:
    """There is one."""
    with pytest.raises(Refusal):
        parse_groups("tenant", own=True)


def test_a_sum_of_nothing_has_no_ratio() -> None:
    """Nothing of nothing is not zero."""
    assert totals_body([])["hit_ratio"] is None


def test_a_sum_adds_counts_and_money_and_divides_once() -> None:
    """A mean of ratios would be another number."""
    rows = [
        UsageTotal("a", requests=1, prompt_tokens=100, cache_read_tokens=100, charge_pico=3),
        UsageTotal("b", requests=2, prompt_tokens=300, saved_pico=-1),
    ]
    total = totals_body(rows)

    assert (total["requests"], total["hit_ratio"]) == (3, 0.25)
    assert (total["charge_usd"], total["saved_usd"]) == ("0.000000000003", "-0.000000000001")
