"""The admin API of charts over time."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.api.admin.history import FINE_MS, POINTS_MAX, STEPS_MS, read_period
from gateway.errors import Refusal
from gateway.http import json_api
from tenancy.accounts.tenants import change_tenant
from tenancy.history.samples import (
    ALL_TENANTS,
    Sample,
    SampleDetails,
    write_samples,
)
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.types import DAY_MS, HOUR_MS, MINUTE_MS, UsageEntry, wall_ms
from tests.tables import each_row
from tests.unit.gateway.admin_client import AdminClient

NOW_MS = 20_000 * DAY_MS + 5 * HOUR_MS + 1
LONG = "one " * 40
LEVELS = ("device", "host", "disk", "remote")


async def history(admin: AdminClient, query: str = "range=1h") -> dict[str, Any]:
    """Return a chart."""
    status, body = await admin.ask("GET", f"/admin/v1/history?{query}")
    assert status == 200, body
    found: dict[str, Any] = body
    return found


def known(values: list[Any]) -> list[Any]:
    """Return the values that are no gaps."""
    return [value for value in values if value is not None]


# --- periods -------------------------------------------------------------------------------------


@each_row(
    ("name", "step_ms", "points"),
    [
        ("1h", MINUTE_MS, 60),
        ("24h", 5 * MINUTE_MS, 288),
        ("7d", HOUR_MS, 168),
        ("30d", 2 * HOUR_MS, 360),
    ],
)
def test_a_range_ends_now(name: str, step_ms: int, points: int) -> None:
    period = read_period({"range": name}, NOW_MS)

    assert (period.step_ms, len(period.at_ms)) == (step_ms, points)
    assert period.until_ms - step_ms <= NOW_MS < period.until_ms


@each_row("length_ms", [1, HOUR_MS, FINE_MS, FINE_MS + 1, 60 * DAY_MS, 400 * DAY_MS])
@each_row("ago_ms", [0, 100 * DAY_MS])
def test_a_period_has_at_most_the_points_of_a_chart(length_ms: int, ago_ms: int) -> None:
    """In whole buckets; of hours where minutes are not kept."""
    since_ms = NOW_MS - ago_ms - length_ms
    given = {
        "since": json_api.instant(since_ms),
        "until": json_api.instant(since_ms + length_ms),
    }
    period = read_period(given, NOW_MS)

    assert 0 < len(period.at_ms) <= POINTS_MAX
    assert period.since_ms <= since_ms < period.since_ms + period.step_ms
    assert period.step_ms in STEPS_MS
    assert period.step_ms >= HOUR_MS or (length_ms < FINE_MS and not ago_ms)


@each_row(
    ("given", "param"),
    [
        ({"range": "2h"}, "range"),
        ({"range": "1h", "since": "2026-01-01"}, "range"),
        ({"range": "24h", "step_ms": "60000"}, "step_ms"),
        ({"range": "24h", "step_ms": "90001"}, "step_ms"),
        ({"range": "7d", "step_ms": "1800000"}, "step_ms"),
        ({"range": "7d", "step_ms": "5400000"}, "step_ms"),
        ({"range": "7d", "step_ms": "0"}, "step_ms"),
    ],
)
def test_refuses_a_period_that_it_cannot_show(given: dict[str, str], param: str) -> None:
    with pytest.raises(Refusal) as refused:
        read_period(given, NOW_MS)

    assert refused.value.param == param


# --- series --------------------------------------------------------------------------------------


async def test_shows_tokens_money_and_refusals_of_the_running_minute(admin: AdminClient) -> None:
    """What the ledger booked and what was refused, without waiting for a sample."""
    gateway = admin.gateway
    add_card(gateway.store, wall_ms, RateCard("std", input=1_000_000, output=2_000_000))
    change_tenant(gateway.store, "ada", {"requests_per_minute": 1})
    gateway.gateway.context.authenticator.refresh_now()
    _, answer, _ = await gateway.ask(body=gateway.chat(LONG))
    await gateway.ask(body=gateway.chat(LONG))
    await gateway.quiet()
    await gateway.engine.get_stats()
    body = await history(admin)
    series, usage = body["series"], answer["usage"]
    micros = usage["prompt_tokens"] + 2 * usage["completion_tokens"]

    assert len(body["at_ms"]) == 60
    assert body["at_ms"][1] - body["at_ms"][0] == body["step_ms"] == MINUTE_MS
    assert all(
        len(values) == 60
        for one in series.values()
        for values in (one.values() if isinstance(one, dict) else [one])
    )
    assert sum(known(series["requests"])) == 1
    assert sum(known(series["prompt_tokens"])) == usage["prompt_tokens"]
    assert sum(known(series["output_tokens"])) == usage["completion_tokens"]
    assert sum(map(float, known(series["cost_usd"]))) == pytest.approx(micros / 1e6)
    assert sum(known(series["refused"])) == 1
    assert sum(known(series["refusals_by_code"]["rate_limit_exceeded"])) == 1
    assert len(known(series["first_token_ms_miss"]["p50"])) == 1
    assert known(series["first_token_ms_hit"]["p95"]) == []
    assert known(series["blocks_free"])[-1] + known(series["blocks_cached"])[-1] == 256
    assert (body["budget"], body["previous"]) == (None, None)
    assert known(series["budget_spent_usd"]) == []


async def test_a_minute_without_a_gateway_is_a_gap(admin: AdminClient) -> None:
    """And one in which nothing happened is 0."""
    store, now_ms = admin.gateway.store, wall_ms() // MINUTE_MS * MINUTE_MS
    quiet_ms = now_ms - 10 * MINUTE_MS
    write_samples(store, [Sample(ALL_TENANTS, quiet_ms, blocks_cached=7)])
    body = await history(admin)
    places = [body["at_ms"].index(at_ms) for at_ms in (quiet_ms, quiet_ms - MINUTE_MS)]

    for name, quiet in (("requests", 0), ("cost_usd", "0.000000000000"), ("blocks_cached", 7)):
        assert [body["series"][name][place] for place in places] == [quiet, None], name
    assert [body["series"]["first_token_ms_hit"]["p50"][place] for place in places] == [None, None]


async def test_quantiles_of_a_range_come_from_its_summed_buckets(admin: AdminClient) -> None:
    """A busy minute weighs more than a quiet one, and the tail of one minute is seen."""
    store, now_ms = admin.gateway.store, wall_ms() // MINUTE_MS * MINUTE_MS
    busy, quiet = SampleDetails({}, {13: 98}, {21: 4}), SampleDetails({}, {25: 1, 33: 1})
    write_samples(store, [Sample(ALL_TENANTS, now_ms - 10 * MINUTE_MS, busy)])
    write_samples(store, [Sample(ALL_TENANTS, now_ms - 20 * MINUTE_MS, quiet)])
    write_samples(store, [Sample(ALL_TENANTS, now_ms - 90 * MINUTE_MS, quiet)])
    body = await history(admin)
    modelled = await history(admin, "model=m")

    edge = {place: round(2 ** (place / 4), 1) for place in (13, 21, 25, 33)}
    assert body["first_token_ms"] == {
        "hit": {"count": 100, "p50": edge[13], "p95": edge[13], "p99": edge[25]},
        "miss": {"count": 4, "p50": edge[21], "p95": edge[21], "p99": edge[21]},
    }
    assert body["previous_first_token_ms"]["hit"]["p99"] == edge[33]
    assert body["previous_first_token_ms"]["miss"]["p50"] is None
    assert modelled["first_token_ms"] is None


async def test_shows_the_period_before(admin: AdminClient) -> None:
    at_ms = wall_ms() // MINUTE_MS * MINUTE_MS - 90 * MINUTE_MS
    details = SampleDetails({"overloaded": 3}, {24: 1})
    write_samples(admin.gateway.store, [Sample(ALL_TENANTS, at_ms, details)])
    body = await history(admin)

    assert known(body["series"]["refused"]) == [0]
    assert known(body["previous"]["refused"]) == [3]
    assert body["previous"].keys() == body["series"].keys()
    assert len(body["previous"]["refused"]) == 60


async def test_one_tenant_and_one_model(admin: AdminClient) -> None:
    """Samples know no model; a tenant without blocks has none."""
    gateway = admin.gateway
    await gateway.ask(body=gateway.chat(LONG))
    await gateway.quiet()
    ada, bob = [await history(admin, f"tenant={name}") for name in ("ada", "bob")]
    modelled, other = [await history(admin, f"model={name}") for name in (gateway.model, "x")]

    assert [sum(known(one["series"]["requests"])) for one in (ada, bob)] == [1, 0]
    assert sum(known(ada["series"]["blocks_cached"])) > 0
    assert known(bob["series"]["blocks_cached"]) == [0]
    assert known(ada["series"]["blocks_free"]) == []
    assert [sum(known(one["series"]["requests"])) for one in (modelled, other)] == [1, 0]
    assert known(modelled["series"]["refused"]) == []
    assert modelled["series"]["refusals_by_code"] == {}
    assert (await admin.ask("GET", "/admin/v1/history?tenant=nobody"))[0] == 404


async def test_a_budget_burns_down(admin: AdminClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was spent in the window before the chart begins counts; a new window begins at 0. An
    hour without a gateway is a gap."""
    gateway = admin.gateway
    day_ms = (wall_ms() // DAY_MS + 2) * DAY_MS
    monkeypatch.setattr(gateway, "wall", lambda: day_ms + HOUR_MS - 1)
    add_card(gateway.store, lambda: day_ms - DAY_MS, RateCard("std", input=1_000_000))
    set_budget(gateway.store, Budget(1, "day", hard_micros=100))
    for number, hour in enumerate((-20, -2, 0)):
        at_ms = day_ms + hour * HOUR_MS
        entry = UsageEntry(
            *(f"{number}", 1, 1, "m", "done", at_ms, at_ms + 5),
            *(10, 0, 0, 10, 0, 0),
        )
        await gateway.gateway.ledger.write(entry)
    since, until = (json_api.instant(day_ms + hours * HOUR_MS) for hours in (-3, 2))
    body = await history(admin, f"tenant=ada&since={since}&until={until}&step_ms=3600000")
    spent = body["series"]["budget_spent_usd"]

    assert [one and float(one) for one in spent] == [None, 2e-5, None, 1e-5, None]
    assert (body["budget"]["window"], body["budget"]["share"]) == ("day", 0.1)


async def test_cached_tokens_are_told_by_level(admin: AdminClient) -> None:
    """From the ledger: they are there after a restart, of a tenant and of a model."""
    gateway = admin.gateway
    at_ms = wall_ms()
    counts = (100, 90, 0, 10, 1, 90)
    entry = UsageEntry("leveled", 1, 1, gateway.model, "done", at_ms, at_ms, *counts)
    entry = replace(entry, host_cached_tokens=50, disk_cached_tokens=20, remote_cached_tokens=10)
    await gateway.gateway.ledger.write(entry)

    for wanted in ("tenant=ada", f"model={gateway.model}"):
        series = (await history(admin, f"range=1h&{wanted}"))["series"]
        found = {name: sum(known(series[f"{name}_cached_tokens"])) for name in LEVELS}
        assert found == {"device": 10, "host": 50, "disk": 20, "remote": 10}
    status, body = await admin.ask("GET", "/admin/v1/requests/leveled")
    assert (status, body["loaded_tokens"]) == (200, {"host": 50, "disk": 20, "remote": 10})


async def test_csv_has_a_row_per_bucket(admin: AdminClient) -> None:
    await admin.gateway.ask(body=admin.gateway.chat(LONG))
    await admin.gateway.quiet()
    status, text = await admin.ask("GET", "/admin/v1/history?range=1h&format=csv")
    rows = list(csv.DictReader(io.StringIO(text)))

    assert (status, len(rows)) == (200, 60)
    assert rows[0]["at"].endswith(":00.000Z")
    assert rows[0]["requests"] == ""
    assert sum(int(row["requests"] or 0) for row in rows) == 1
    assert "first_token_ms_hit_p95" in rows[0]
    assert sum(int(row["disk_cached_tokens"] or 0) for row in rows) == 0
