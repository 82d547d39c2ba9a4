"""What a tenant may do now, as operators and the tenant itself see it."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.background.history_sampling import HistorySampling
from tenancy.accounts.keys import revoke_key
from tenancy.accounts.tenants import change_tenant, set_status
from tenancy.history.samples import Sample, SampleDetails, write_samples
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.types import MINUTE_MS, wall_ms
from tests.actors import TESTER
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture

LONG = "one " * 40


async def state(admin: AdminClient, name: str = "ada") -> dict[str, Any]:
    """Return a tenant's state."""
    status, body = await admin.ask("GET", f"/admin/v1/tenants/{name}/state")
    assert status == 200, body
    found: dict[str, Any] = body
    return found


def limit(gateway: GatewayFixture, requests: int = 1) -> None:
    """Limit ada's requests per minute."""
    change_tenant(gateway.store, "ada", {"requests_per_minute": requests, "requests_at_once": 5})
    gateway.gateway.context.authenticator.refresh_now()


def keep_budget(gateway: GatewayFixture, hard_micros: int) -> None:
    """Price tokens, and set ada's budget of a month."""
    add_card(gateway.store, wall_ms, RateCard("std", input=1_000_000, output=1_000_000))
    set_budget(gateway.store, Budget(1, "month", hard_micros=hard_micros))


async def test_a_tenant_without_refusals_is_ok(admin: AdminClient) -> None:
    before = await state(admin)
    await admin.gateway.ask(body=admin.gateway.chat())
    await admin.gateway.quiet()
    after = await state(admin)

    assert (before["status"], before["since_ms"], before["reasons"]) == ("ok", None, [])
    assert (before["budgets"], before["limits"], before["last_request_ms"]) == ([], {}, None)
    assert (before["refusals_last_hour"], before["refusals_today"]) == ({}, {})
    assert [key["key_id"] for key in before["keys"]] == [1]
    assert after["status"] == "ok"
    assert abs(after["last_request_ms"] - wall_ms()) < 60_000


async def test_a_refusal_by_a_limit_shows_at_once(admin: AdminClient) -> None:
    """The page of a tenant that was refused 45 times must not look idle."""
    limit(admin.gateway)
    for _ in range(4):
        await admin.gateway.ask(body=admin.gateway.chat())
    found = await state(admin)

    assert found["status"] == "limited"
    assert abs(found["since_ms"] - wall_ms()) < 60_000
    assert found["reasons"] == ["3 requests exceeded a limit in the last hour."]
    assert found["refusals_last_hour"] == found["refusals_today"] == {"rate_limit_exceeded": 3}
    assert found["limits"] == {
        "requests_per_minute": {"limit": 1, "used_last_minute": 1},
        "requests_at_once": {"limit": 5, "used_last_minute": 0},
    }
    assert (await state(admin, "bob"))["status"] == "ok"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/admin/v1/tenants/ada", {"requests_per_minute": 100}),
        ("/admin/v1/keys/1", {"limits": {"requests_per_minute": 100}}),
    ],
)
async def test_a_changed_limit_ends_the_state(
    admin: AdminClient, path: str, body: dict[str, Any]
) -> None:
    """At once, by the tenant's limit or a key's; another change does not, a new refusal does."""
    limit(admin.gateway)
    for _ in range(2):
        await admin.gateway.ask(body=admin.gateway.chat())
    await admin.ask("PATCH", "/admin/v1/tenants/ada", {"weight": 2.0})
    before = await state(admin)
    status, _ = await admin.ask("PATCH", path, body)
    after = await state(admin)
    limit(admin.gateway)
    await admin.gateway.ask(body=admin.gateway.chat())
    again = await state(admin)

    assert (before["status"], status) == ("limited", 200)
    assert (after["status"], after["refusals_last_hour"]) == ("ok", {"rate_limit_exceeded": 1})
    assert again["status"] == "limited"


@pytest.mark.usefixtures("no_periodic_tasks")
async def test_a_refusal_after_the_change_counts_once_its_minute_is_written(
    admin: AdminClient,
) -> None:
    """A written minute is known by its start, which is before the change."""
    gateway = admin.gateway
    await admin.ask("PATCH", "/admin/v1/tenants/ada", {"requests_per_minute": 1})
    for _ in range(2):
        await gateway.ask(body=gateway.chat())
    sampling = HistorySampling(gateway.gateway.context)
    await sampling.close()
    found = await state(admin)

    assert (found["status"], found["refusals_last_hour"]) == ("limited", {"rate_limit_exceeded": 1})


async def test_refusals_are_known_after_their_minute_and_a_restart(
    unopened_gateway: GatewayFixture,
) -> None:
    gateway = unopened_gateway
    await gateway.open()
    limit(gateway)
    for _ in range(2):
        await gateway.ask(body=gateway.chat())
    await gateway.close()
    await gateway.open()
    found = await state(AdminClient(gateway))
    await gateway.close()

    assert found["status"] == "limited"
    assert found["refusals_last_hour"] == {"rate_limit_exceeded": 1}
    assert found["last_request_ms"]


async def test_an_old_refusal_limits_no_more(admin: AdminClient) -> None:
    at_ms = wall_ms() // MINUTE_MS * MINUTE_MS - 20 * MINUTE_MS
    details = SampleDetails({"rate_limit_exceeded": 2, "overloaded": 1})
    write_samples(admin.gateway.store, [Sample(1, at_ms, details)])
    found = await state(admin)

    assert (found["status"], found["since_ms"]) == ("ok", None)
    assert found["reasons"] == ["1 request got the error overloaded in the last hour."]


async def test_a_streak_of_refusals_began_with_its_first(admin: AdminClient) -> None:
    minute_ms = wall_ms() // MINUTE_MS * MINUTE_MS
    times = [minute_ms - number * MINUTE_MS for number in (40, 8, 4, 1)]
    for at_ms in times:
        details = SampleDetails({"rate_limit_exceeded": 1})
        write_samples(admin.gateway.store, [Sample(1, at_ms, details)])

    assert (await state(admin))["since_ms"] == times[1]


async def test_a_budget_that_refuses_is_over(admin: AdminClient) -> None:
    """Though it is not spent to the last micro-dollar; a raised budget ends it."""
    keep_budget(admin.gateway, 100)
    await admin.gateway.ask(body=admin.gateway.chat())
    status, _, _ = await admin.gateway.ask(body=admin.gateway.chat(LONG * 3))
    over = await state(admin)
    await admin.ask(
        "PUT", "/admin/v1/tenants/ada/budgets", {"window": "month", "hard_micros": 10**7}
    )
    raised = await state(admin)

    assert status == 429
    assert over["status"] == "over_budget"
    assert abs(over["since_ms"] - wall_ms()) < 60_000
    assert over["reasons"][0].startswith("The budget of the tenant is $0.0001 a month: $")
    assert over["reasons"][1:] == ["1 request did not fit a budget in the last hour."]
    assert 0 < over["budgets"][0]["share"] < 1
    assert over["budgets"][0]["ends_at_ms"] > wall_ms()
    assert (raised["status"], raised["refusals_last_hour"]) == ("ok", {"budget_exceeded": 1})


async def test_a_spent_budget_is_over_without_a_refusal(admin: AdminClient) -> None:
    keep_budget(admin.gateway, 0)
    found = await state(admin)
    set_budget(admin.gateway.store, Budget(1, "month", hard_micros=1))

    assert (found["status"], found["budgets"][0]["share"]) == ("over_budget", None)
    assert (await state(admin))["status"] == "ok"


async def test_a_passed_soft_budget_is_a_reason(admin: AdminClient) -> None:
    add_card(admin.gateway.store, wall_ms, RateCard("std", input=1_000_000))
    set_budget(admin.gateway.store, Budget(1, "day", soft_micros=1))
    await admin.gateway.ask(body=admin.gateway.chat(LONG))
    await admin.gateway.quiet()
    found = await state(admin)

    assert found["status"] == "ok"
    assert found["reasons"] == ["The soft budget of $0.000001 a day is passed."]


async def test_a_suspended_tenant_says_since_when(admin: AdminClient) -> None:
    await admin.ask("PATCH", "/admin/v1/tenants/ada", {"status": "suspended"})
    ours = await state(admin)
    set_status(admin.gateway.store, "bob", "suspended")
    unlogged = await state(admin, "bob")

    assert ours["status"] == unlogged["status"] == "suspended"
    assert abs(ours["since_ms"] - wall_ms()) < 60_000
    assert unlogged["since_ms"] is None


async def test_a_tenant_without_a_valid_key_says_so(admin: AdminClient) -> None:
    revoke_key(admin.gateway.store, wall_ms, "1", by=TESTER)

    assert (await state(admin))["reasons"] == ["The tenant has no valid key."]
    assert (await admin.ask("GET", "/admin/v1/tenants/nobody/state"))[0] == 404


async def test_a_wrong_request_is_named_and_limits_nothing(admin: AdminClient) -> None:
    """An operator sees the cure at once: an alias for the name that the tenant asks for."""
    gateway = admin.gateway
    for model in ("gpt-4o", "claude-x", "gpt-4o"):
        await gateway.ask(body={**gateway.chat(), "model": model})
    await gateway.ask(body={**gateway.chat(), "n": -1})
    found = await state(admin)

    assert found["status"] == "ok"
    assert found["reasons"][-1] == (
        "3 requests got the error model_not_found (asks for gpt-4o, claude-x) in the last hour."
    )
    assert len(found["reasons"]) == 2


async def listed(admin: AdminClient) -> dict[str, dict[str, Any]]:
    """Return the states of the list of tenants, by name."""
    _, page = await admin.ask("GET", "/admin/v1/tenants")
    return {one["name"]: one["state"] for one in page["tenants"]}


async def test_the_list_says_what_each_tenants_state_says(admin: AdminClient) -> None:
    """Status and reasons: limited, over budget, suspended, without a key, wrong requests, well, and
    a name that every object of a page's language has."""
    gateway, store = admin.gateway, admin.gateway.store
    limit(gateway)
    for _ in range(3):
        await gateway.ask(body=gateway.chat())
    await gateway.ask(who="bob", body={**gateway.chat(), "model": "gpt-4o"})
    for name in ("constructor", "spent", "gone", "keyless", "well"):
        await admin.ask("POST", "/admin/v1/tenants", {"name": name})
        if name != "keyless":
            await admin.ask("POST", f"/admin/v1/tenants/{name}/keys", {})
    budget = {"window": "month", "hard_micros": 0}
    await admin.ask("PUT", "/admin/v1/tenants/spent/budgets", budget)
    set_status(store, "gone", "suspended")
    found = await listed(admin)
    own = {name: await state(admin, name) for name in found}

    assert {name: (one["status"], one["reasons"]) for name, one in found.items()} == {
        name: (one["status"], one["reasons"]) for name, one in own.items()
    }
    assert {name: one["status"] for name, one in found.items()} == {
        **dict.fromkeys(("bob", "constructor", "keyless", "well"), "ok"),
        "ada": "limited",
        "spent": "over_budget",
        "gone": "suspended",
    }
    assert found["keyless"]["reasons"] == ["The tenant has no valid key."]
    assert found["constructor"]["reasons"] == found["well"]["reasons"] == []


async def test_the_list_names_the_most_frequent_error(admin: AdminClient) -> None:
    gateway = admin.gateway
    await gateway.ask(body={**gateway.chat(), "n": -1})
    for _ in range(2):
        await gateway.ask(body={**gateway.chat(), "model": "gpt-4o"})
    found = await listed(admin)

    assert (found["ada"]["refused_last_hour"], found["ada"]["top_code"]) == (3, "model_not_found")
    assert (found["bob"]["refused_last_hour"], found["bob"]["top_code"]) == (0, None)


async def test_a_changed_limit_ends_the_state_in_the_list_too(admin: AdminClient) -> None:
    """By the same records of the audit log, of all tenants at once."""
    limit(admin.gateway)
    for _ in range(2):
        await admin.gateway.ask(body=admin.gateway.chat())
    before = await listed(admin)
    await admin.ask("PATCH", "/admin/v1/tenants/ada", {"requests_per_minute": 100})

    assert (before["ada"]["status"], (await listed(admin))["ada"]["status"]) == ("limited", "ok")


async def test_a_tenant_sees_its_own_state(admin: AdminClient) -> None:
    """With the asking key alone."""
    await admin.ask("POST", "/admin/v1/tenants/ada/keys", {})
    status, body, _ = await admin.gateway.ask("/v1/state", method="GET")
    operators = await state(admin)

    assert (status, body["tenant"], body["status"]) == (200, "ada", "ok")
    assert [key["key_id"] for key in body["keys"]] == [1]
    assert len(operators["keys"]) == 2
    assert body.keys() == operators.keys()


@pytest.mark.usefixtures("no_periodic_tasks")
async def test_analytics_count_refusals_of_the_last_hour(admin: AdminClient) -> None:
    """By tenant and code; a stranger's too in the total."""
    limit(admin.gateway)
    for _ in range(3):
        await admin.gateway.ask(body=admin.gateway.chat())
    await admin.gateway.ask(body=admin.gateway.chat(), who=None)
    _, before = await admin.ask("GET", "/admin/v1/analytics")
    context = admin.gateway.gateway.context
    context.ended_requests.end_minute()
    await HistorySampling(context).close()
    _, after = await admin.ask("GET", "/admin/v1/analytics")

    assert before["refused_last_hour"] == after["refused_last_hour"]
    assert before["refused_last_hour"] == {
        "total": 3,
        "tenants": {"ada": 2},
        "codes": {"rate_limit_exceeded": 2, "invalid_api_key": 1},
    }
