"""The admin API of ended requests."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from tenancy.accounts.keys import create_key
from tenancy.accounts.tenants import change_tenant
from tenancy.history.request_users import UserNote, write_users
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.types import wall_ms
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture

SECRET = "the words of a client that no operator needs " * 3


@pytest.fixture
async def admin(gateway: GatewayFixture) -> AdminClient:
    """A client of a gateway with an answered request of ada, a refused one, and one of bob."""
    add_card(gateway.store, wall_ms, RateCard("std", input=1_000_000, output=2_000_000))
    change_tenant(gateway.store, "ada", {"requests_per_minute": 1})
    gateway.gateway.context.authenticator.refresh_now()
    for who in ("ada", "ada", "bob"):
        await gateway.ask(body=gateway.chat(SECRET, stream=who == "bob"), who=who)
        await gateway.quiet()  # a request ends after its answer's last byte
    return AdminClient(gateway)


STABLE = (
    "You answer questions of employees about leave, travel and pay. Be short and polite, and name"
    " the paragraph of the handbook that the answer is from. Refuse to talk about anything else."
)


async def listed(admin: AdminClient, query: str = "") -> list[dict[str, Any]]:
    """Return the rows of a page."""
    status, body = await admin.ask("GET", f"/admin/v1/requests{query}")
    assert status == 200, body
    rows: list[dict[str, Any]] = body["requests"]
    return rows


async def test_lists_requests_newest_first(admin: AdminClient) -> None:
    bob, refused, ada = await listed(admin)

    assert [one["tenant"] for one in (bob, refused, ada)] == ["bob", "ada", "ada"]
    assert [one["ending"] for one in (bob, refused, ada)] == ["done", "refused", "done"]
    assert [one["status"] for one in (bob, refused, ada)] == [200, 429, 200]
    assert [one["stream"] for one in (bob, refused, ada)] == [True, False, False]
    assert (refused["code"], ada["code"]) == ("rate_limit_exceeded", "")
    assert ada["endpoint"] == "/v1/chat/completions"
    assert ada["dialect"].startswith("openai")
    assert ada["received_ms"] <= ada["ended_ms"]
    assert ada["prompt_tokens"] == ada["computed_tokens"] > 0
    assert float(ada["cost_usd"]) == (ada["prompt_tokens"] + 2 * ada["output_tokens"]) / 1e6
    assert refused["cost_usd"] is None


async def test_names_the_key_by_its_label_and_the_clients_user(admin: AdminClient) -> None:
    """An operator knows a key by the label that they gave it, not by its number."""
    gateway = admin.gateway
    bob = gateway.gateway.context.authenticator.authenticate(gateway.keys["bob"]).tenant
    gateway.keys["app"] = create_key(gateway.store, wall_ms, bob.tenant_id, label="booking app")
    gateway.gateway.context.authenticator.refresh_now()
    await gateway.ask(who="app")
    await gateway.quiet()
    request_id = (await listed(admin))[0]["request_id"]
    write_users(gateway.store, [UserNote(request_id, bob.tenant_id, "guest 7")])
    newest, before, *_ = await listed(admin)
    _, whole = await admin.ask("GET", f"/admin/v1/requests/{newest['request_id']}")

    for shown in (newest, whole):
        assert (shown["key_label"], shown["user"]) == ("booking app", "guest 7")
    assert (before["key_label"], before["user"]) == (None, None)


async def test_filters_and_pages(admin: AdminClient) -> None:
    everything = [one["request_id"] for one in await listed(admin)]
    _, first = await admin.ask("GET", "/admin/v1/requests?limit=2")
    _, second = await admin.ask("GET", f"/admin/v1/requests?limit=2&before={first['next_before']}")
    pages = [one["request_id"] for page in (first, second) for one in page["requests"]]

    assert len(await listed(admin, "?tenant=ada")) == 2
    assert len(await listed(admin, "?code=rate_limit_exceeded")) == 1
    assert len(await listed(admin, "?code=done")) == 2
    assert await listed(admin, "?until=2020-01-01") == []
    assert pages == everything
    assert second["next_before"] is None


@pytest.mark.parametrize(
    ("query", "status"), [("before=x", 400), ("format=xml", 400), ("tenant=nobody", 404)]
)
async def test_refuses_wrong_filters(admin: AdminClient, query: str, status: int) -> None:
    assert (await admin.ask("GET", f"/admin/v1/requests?{query}"))[0] == status


async def test_shows_a_request_whole(admin: AdminClient) -> None:
    """Its times in order, its price by line, its entry; and no text."""
    *_, ada = await listed(admin, "?tenant=ada")
    status, body = await admin.ask("GET", f"/admin/v1/requests/{ada['request_id']}")
    times = list(body["times"].values())
    lines = body["price"]["lines"]

    assert status == 200
    assert ada.items() <= body.items()
    assert None not in times
    assert times == sorted(times)
    assert [(one["line"], one["usd_per_mtok"]) for one in lines] == [
        ("input", "1.000000"),
        ("output", "2.000000"),
    ]
    assert sum(float(one["usd"]) for one in lines) == pytest.approx(float(ada["cost_usd"]))
    assert body["entry"]["request_id"] == ada["request_id"]
    assert body["entry"]["rate_card_id"] == body["price"]["rate_card_id"] == "std@1"
    assert SECRET.split()[1] not in json.dumps(body)


async def test_shows_a_refused_request(admin: AdminClient) -> None:
    _, refused, _ = await listed(admin)
    _, body = await admin.ask("GET", f"/admin/v1/requests/{refused['request_id']}")

    assert (body["entry"], body["price"], body["code"]) == (None, None, "rate_limit_exceeded")
    assert body["times"]["submitted_ms"] is None
    assert body["times"]["ended_ms"] >= body["times"]["received_ms"]


async def test_shows_an_entry_without_its_record(admin: AdminClient) -> None:
    """The ledger outlives the records."""
    await listed(admin)
    with admin.gateway.store.change() as db:
        db.execute("delete from request_records")
    bob, ada = await listed(admin)
    status, body = await admin.ask("GET", f"/admin/v1/requests/{ada['request_id']}")

    assert (status, bob["tenant"], ada["endpoint"], ada["status"]) == (200, "bob", None, None)
    assert body["times"]["started_ms"] is None
    assert body["times"]["ended_ms"] >= body["times"]["received_ms"]


async def test_an_unknown_request_is_not_found(admin: AdminClient) -> None:
    status, body = await admin.ask("GET", f"/admin/v1/requests/{'0' * 32}")

    assert (status, body["error"]["code"]) == (404, "request_unknown")


async def test_csv_has_the_rows_of_the_list(admin: AdminClient) -> None:
    _, text = await admin.ask("GET", "/admin/v1/requests?format=csv")
    rows = list(csv.DictReader(io.StringIO(text)))

    assert [row["tenant"] for row in rows] == ["bob", "ada", "ada"]
    assert rows[0]["received"].endswith("Z")
    assert rows[0]["stream"] == "true"


async def test_says_why_a_prompt_was_computed_again(admin: AdminClient) -> None:
    """For calls without breakpoints too: the finding's cause, place and cost, and its id; the
    header of the next answer names the cause of the comparison before."""
    gateway = admin.gateway
    headers = []
    for number in range(5):
        system = {"role": "system", "content": f"Today is day {number}. {STABLE}"}
        body = {**gateway.chat("How?"), "messages": [system, {"role": "user", "content": "How?"}]}
        status, _, response = await gateway.ask(body=body, who="bob")
        assert status == 200
        headers.append(response.headers["X-Trunkline-Cache"])
        await gateway.quiet()
        await listed(admin)
    rows = await listed(admin, "?tenant=bob")
    _, page = await admin.ask("GET", f"/admin/v1/requests/{rows[0]['request_id']}")
    _, found = await admin.ask("GET", "/admin/v1/findings")
    fault = next(one for one in found["findings"] if not one["legitimate"])

    assert (rows[0]["cause"], rows[0]["place"]) == ("system_changes", "messages[0].content")
    assert rows[0]["wasted_tokens"] > 64
    assert float(rows[0]["wasted_usd"]) > 0
    assert rows[0]["finding_id"] == fault["finding_id"]
    assert rows[0]["request_id"] in fault["example_request_ids"]
    assert "cause=" not in headers[0]
    assert headers[-1].endswith("; cause=system_changes; segment=messages[0].content")
    assert page["part_tokens"]["system"] > 64
    assert sum(page["part_tokens"].values()) <= page["prompt_tokens"]


async def test_shows_which_parts_of_a_prompt_were_cached(admin: AdminClient) -> None:
    """By their paths, without their text."""
    gateway = admin.gateway
    system = {"type": "text", "text": SECRET, "cache_control": {"type": "ephemeral"}}
    for text in ("first", "second"):
        message = {"role": "user", "content": text}
        body = {"model": gateway.model, "max_tokens": 2, "system": [system], "messages": [message]}
        await gateway.ask("/v1/messages", body, who="bob")
    await gateway.quiet()
    newest, *_ = await listed(admin)
    _, found = await admin.ask("GET", f"/admin/v1/requests/{newest['request_id']}")
    first, last = found["segments"]

    assert (first["path"], last["path"]) == ("system[0]", "messages[0].content")
    assert first["tokens"] == first["cached_tokens"] == first["end"] > 0
    assert 0 <= last["cached_tokens"] < last["tokens"]
    assert first["cached_tokens"] + last["cached_tokens"] == found["cached_tokens"]
    assert SECRET not in json.dumps(found)
