"""Samples of minutes and records of requests reach the database."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gateway.background import history_sampling
from gateway.background.history_sampling import HistorySampling
from gateway.background.money_metrics import MoneyMetrics
from tenancy.accounts.tenants import change_tenant
from tenancy.errors import StoreError
from tenancy.history.request_records import RequestFilter, find_request, list_requests
from tenancy.history.samples import ALL_TENANTS, read_samples, refused_since
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.types import MINUTE_MS, wall_ms
from tests.unit.gateway.gateway_fixture import GatewayFixture

ALWAYS = RequestFilter(0, 2**44)
LONG = "one " * 40


async def ask_beyond_limit(gateway: GatewayFixture, refusals: int = 1) -> None:
    """Ask once as ada, and then this often above her limit."""
    change_tenant(gateway.store, "ada", {"requests_per_minute": 1})
    gateway.gateway.context.authenticator.refresh_now()
    for _ in range(1 + refusals):
        await gateway.ask(body=gateway.chat(LONG))
    await gateway.quiet()


async def test_records_of_answers_and_refusals_are_written(gateway: GatewayFixture) -> None:
    await ask_beyond_limit(gateway)
    await gateway.ask("/v1/chat/completions", {}, who=None)
    await gateway.gateway.sampling.flush_requests()
    found = list_requests(gateway.store, ALWAYS, 10)  # those of one millisecond in any order
    (answered,) = (one for one in found if one.entry is not None)
    (stranger,) = (one for one in found if one.record and one.record.tenant_id == 0)
    (refused,) = (one for one in found if one not in (answered, stranger))

    assert answered.entry is not None
    assert answered.record is not None
    assert answered.record.endpoint == "/v1/chat/completions"
    assert (answered.record.status, answered.record.ending) == (200, "done")
    times = (
        answered.record.submitted_s,
        answered.record.started_s,
        answered.record.first_token_s,
        answered.record.settled_s,
        answered.record.total_s,
    )
    known = [at_s for at_s in times if at_s is not None]
    assert len(known) == 5
    assert known == sorted(known)
    assert (refused.entry, stranger.entry) == (None, None)
    assert refused.record is not None
    assert (refused.record.tenant_id, refused.record.code) == (1, "rate_limit_exceeded")
    assert stranger.record is not None
    assert (stranger.record.tenant_id, stranger.record.status) == (0, 401)


async def test_other_requests_leave_no_record(gateway: GatewayFixture) -> None:
    """Model lists, probes, unknown paths and the admin API."""
    for path in ("/v1/models", "/readyz", "/favicon.ico"):
        await gateway.ask(path, method="GET")
    async with gateway.session.get(f"{gateway.admin_url}/admin/v1/usage"):
        pass
    await gateway.gateway.sampling.flush_requests()

    assert list_requests(gateway.store, ALWAYS, 10) == []


async def test_the_running_minute_is_written_at_the_end(
    unopened_gateway: GatewayFixture,
) -> None:
    """With blocks; the next gateway knows the refusals of the last hour."""
    gateway = unopened_gateway
    began_ms = wall_ms()
    await gateway.open()
    await ask_beyond_limit(gateway, 2)
    await gateway.engine.get_stats()
    await gateway.close()
    (total,) = read_samples(gateway.store, ALL_TENANTS, began_ms - MINUTE_MS, 2**60)[:1]
    (own,) = read_samples(gateway.store, 1, began_ms - MINUTE_MS, 2**60)[:1]

    assert total.details.refusals == own.details.refusals == {"rate_limit_exceeded": 2}
    assert own.details.hits.keys() | own.details.misses.keys()
    assert own.blocks_cached
    assert (total.blocks_cached or 0) + (total.blocks_free or 0) == 256


async def test_a_killed_gateway_leaves_the_running_minute(
    unopened_gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the last seconds: counts are written with the records, and add up."""
    monkeypatch.setattr(history_sampling, "POLL_INTERVAL_S", 0.001)
    monkeypatch.setattr(history_sampling, "RECORDS_INTERVAL_S", 0.0)
    gateway, left = unopened_gateway, []
    await gateway.open()
    context = gateway.gateway.context
    for _ in range(2):
        await ask_beyond_limit(gateway, 2)
        await gateway.gateway.sampling.flush_requests()  # counts them
        await gateway.until(
            lambda: not (context.ended_requests.has_counts or context.ended_requests.ended_minutes)
        )
        samples = read_samples(gateway.store, 1, 0, 2**60)
        left.append(sum(one.refused for one in samples))
    total = sum(one.refused for one in read_samples(gateway.store, ALL_TENANTS, 0, 2**60))
    last_hour = context.ended_requests.refusals_last_hour()
    await gateway.close()

    assert (left, total) == ([2, 5], 5)
    assert last_hour[1] == last_hour[ALL_TENANTS] == {"rate_limit_exceeded": 5}


async def test_a_report_is_read_again_if_counts_moved_meanwhile(gateway: GatewayFixture) -> None:
    """Else it would have them twice, from the database and from memory, or not at all."""
    context, reads = gateway.gateway.context, 0

    async def read() -> int:
        nonlocal reads
        reads += 1
        if reads == 1:
            context.ended_requests.begin_writing()
        if reads == 2:
            context.ended_requests.wrote_minutes(0, context.ended_requests.last_hour)
        return reads

    assert await gateway.gateway.sampling.read_at_once(read) == 3
    assert await gateway.gateway.sampling.read_at_once(read) == 4


async def test_each_minute_has_a_sample(
    unopened_gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quiet minute too: a chart tells a quiet server from one that was down."""
    monkeypatch.setattr(history_sampling, "POLL_INTERVAL_S", 0.001)
    monkeypatch.setattr(history_sampling, "RECORDS_INTERVAL_S", 0.0)
    gateway = unopened_gateway
    await gateway.open()
    gateway.gateway.context.ended_requests.end_minute()
    await gateway.until(lambda: not gateway.gateway.context.ended_requests.ended_minutes)
    samples = read_samples(gateway.store, ALL_TENANTS, wall_ms() - 2 * MINUTE_MS, 2**60)
    await gateway.close()

    assert samples
    assert refused_since(gateway.store, 0) == []


@pytest.mark.usefixtures("no_periodic_tasks")
async def test_failed_writes_are_tried_again(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = gateway.gateway.context
    sampling = HistorySampling(context)

    def fail(*_: object) -> None:
        raise StoreError("disk", "full")

    context.ended_requests.end_minute()
    with monkeypatch.context() as failing:
        failing.setattr(history_sampling, "write_samples", fail)
        await sampling.close()
        waiting = len(context.ended_requests.ended_minutes)
    await sampling.close()

    assert waiting == 2
    assert not context.ended_requests.ended_minutes
    assert read_samples(gateway.store, ALL_TENANTS, 0, 2**60)


async def test_a_request_has_the_cause_of_its_miss(gateway: GatewayFixture) -> None:
    text = {"type": "text", "text": "too short", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [text]}]
    body = {"model": gateway.model, "max_tokens": 2, "messages": messages}
    _, _, response = await gateway.ask("/v1/messages", body)
    await gateway.quiet()
    await gateway.gateway.sampling.flush_requests()
    found = find_request(gateway.store, response.headers["X-Request-Id"])

    assert found is not None
    assert found.record is not None
    assert found.record.missed == "never_written"


async def test_money_metrics_have_charges_and_budgets(gateway: GatewayFixture) -> None:
    """By the ledger, so that a restart forgets nothing."""
    add_card(gateway.store, wall_ms, RateCard("std", input=1_000_000))
    set_budget(gateway.store, Budget(1, "month", hard_micros=20_000_000))
    _, answer, _ = await gateway.ask(body=gateway.chat(LONG))
    await gateway.quiet()
    of = gateway.gateway.context
    await MoneyMetrics(of.reports, of.authenticator, of.metrics, of.wall).update()
    text = gateway.gateway.context.metrics.exposition().decode()
    dollars = answer["usage"]["prompt_tokens"] / 1e6

    assert f'trunkline_cost_usd_total{{tenant="ada"}} {dollars}' in text
    assert f'trunkline_budget_spent_usd{{tenant="ada",window="month"}} {dollars}' in text
    assert 'trunkline_budget_limit_usd{kind="hard",tenant="ada",window="month"} 20.0' in text


async def test_tells_once_that_tenants_share_a_label(
    unopened_gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_sampling, "POLL_INTERVAL_S", 0.001)
    gateway = unopened_gateway
    gateway.config = replace(
        gateway.config, tenancy=replace(gateway.config.tenancy, tenants_as_labels_max=0)
    )
    await gateway.open()
    gateway.gateway.context.metrics.tenant_label("ada")
    await gateway.until(
        lambda: any(line["event"] == "tenant_labels_used_up" for line in gateway.lines)
    )
    await gateway.close()

    assert [line["event"] for line in gateway.lines].count("tenant_labels_used_up") == 1
