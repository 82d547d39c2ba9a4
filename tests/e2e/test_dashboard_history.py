"""The dashboard over ledger and samples: charts, ranges, refusals, findings, one request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By

from gateway.background.webhooks import WebhookEndpoint
from tenancy.types import DAY_MS
from tests.e2e.browser import IN_BROWSER, signed_in
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture

pytestmark = IN_BROWSER
SYSTEM = "You are the assistant of a shop that sells lamps, tables and chairs. " * 4


async def ask(gateway: GatewayFixture, system: str, question: str) -> int:
    """Send a chat of ada's; return the status."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    status, _, _ = await gateway.ask(body=gateway.chat() | {"messages": messages})
    return status


async def test_charts_outlive_a_restart(gateway: GatewayFixture, browser: Any) -> None:
    """The ledger and the samples have the history; only what is since the start begins anew."""
    for number in range(6):
        await ask(gateway, SYSTEM, f"question {number}")
    await gateway.close()
    await gateway.open()
    page = await signed_in(browser, gateway.admin_url, AdminClient(gateway).key)

    text = await asyncio.to_thread(page.see, "ended 6")
    drawn = page.browser.find_elements(By.CSS_SELECTOR, ".plot[aria-label] canvas")

    assert "No requests since the start." in text
    assert len(drawn) >= 4


@pytest.mark.slow
async def test_a_young_server_shows_its_last_hour(gateway: GatewayFixture, browser: Any) -> None:
    """In a day, what it has done so far would be a dot at the charts' edge; later it is a day."""
    page = await signed_in(browser, gateway.admin_url, AdminClient(gateway).key)
    young = await asyncio.to_thread(lambda: page.find("[aria-pressed=true]").text)
    with gateway.store.change() as db:
        db.execute("update tenants set created_ms = created_ms - ?", (DAY_MS,))
    page = await signed_in(browser, gateway.admin_url, AdminClient(gateway).key)
    grown = await asyncio.to_thread(lambda: page.find("[aria-pressed=true]").text)

    assert (young, grown) == ("1 h", "24 h")


async def test_a_drag_over_a_chart_chooses_its_range(gateway: GatewayFixture, browser: Any) -> None:
    """The address has the range, for every page."""
    await ask(gateway, SYSTEM, "a question")
    page = await signed_in(browser, gateway.admin_url, AdminClient(gateway).key)

    def drag() -> str:
        plot = page.find(".u-over")
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
        chain = ActionChains(browser).move_to_element_with_offset(plot, -40, 0)
        chain.click_and_hold().move_by_offset(80, 0).release().perform()
        page.wait(lambda _: page.find("[aria-pressed=true]").text == "Custom")
        return str(browser.current_url)

    address = await asyncio.to_thread(drag)

    assert "since=" in address
    assert "until=" in address


@pytest.mark.slow
async def test_a_refusal_is_on_its_tenants_page(gateway: GatewayFixture, browser: Any) -> None:
    """With its code and the tenant's status, five seconds later at the latest; Overview names the
    tenant."""
    admin = AdminClient(gateway)
    await admin.ask("PATCH", "/admin/v1/tenants/ada", {"requests_per_minute": 1})
    page = await signed_in(browser, gateway.admin_url, AdminClient(gateway).key)
    await asyncio.to_thread(page.open, "tenants/ada", "No request was refused today.")
    statuses = [await ask(gateway, SYSTEM, "a question") for _ in range(3)]

    text = await asyncio.to_thread(page.see, "rate_limit_exceeded")
    overview = await asyncio.to_thread(page.open, "overview", "exceeded a limit in the last hour")

    assert statuses[-1] == 429
    assert "limited" in text
    assert "ada" in overview


@pytest.mark.slow
async def test_shows_one_request_by_its_id(gateway: GatewayFixture, browser: Any) -> None:
    """Found by its id; with its tokens and its way, and no text of it."""
    await ask(gateway, SYSTEM, "a question")
    await ask(gateway, SYSTEM, "another question")
    _, listed = await AdminClient(gateway).ask("GET", "/admin/v1/requests")
    one = listed["requests"][0]
    page = await signed_in(browser, gateway.admin_url, AdminClient(gateway).key)

    def look() -> str:
        page.open("requests", "Ended requests, newest first")
        page.find("[aria-label='Request by id']").send_keys(one["request_id"] + "\n")
        return page.see("Ledger entry")

    text = await asyncio.to_thread(look)

    assert f"{one['read_tokens']} of {one['prompt_tokens']} prompt tokens" in text
    assert "/v1/chat/completions" in text
    assert "lamps" not in text


@pytest.mark.slow
async def test_says_what_wastes_money(gateway: GatewayFixture, browser: Any) -> None:
    """A system message that begins with a number, on Overview, the tenant's page and its own."""
    for number in range(12):
        await ask(gateway, f"{7919 * (number + 1)} {SYSTEM}", "a question")
    page = await signed_in(browser, gateway.admin_url, AdminClient(gateway).key)
    title = "The system message changes"

    texts = [
        await asyncio.to_thread(page.open, name, title)
        for name in ("overview", "findings", "tenants/ada")
    ]
    own = await signed_in(browser, gateway.url, gateway.keys["ada"], title)
    texts.append(own.text())

    assert all("To do:" in text for text in texts)


@pytest.mark.slow
async def test_sends_a_test_event_to_a_webhook(
    unopened_gateway: GatewayFixture, browser: Any
) -> None:
    """Its delivery is in the list, with what became of it; the address, a secret, is not."""
    gateway = unopened_gateway
    closed = "http://127.0.0.1:9/secret-path"
    gateway.endpoints = (WebhookEndpoint("ops", closed, frozenset(), "slack"),)
    await gateway.open()
    page = await signed_in(browser, gateway.admin_url, AdminClient(gateway).key)

    def act() -> str:
        page.open("access", "Send a test")
        page.press("Send a test")
        page.press("Send", "dialog")
        return page.see("Latest deliveries")

    try:
        text = await asyncio.to_thread(act)
        faults = await asyncio.to_thread(page.faults)
    finally:
        await gateway.close()

    assert "ops" in text
    assert "secret-path" not in text
    assert faults == []
