"""The dashboard over ledger and samples: charts, ranges, refusals, findings, one request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from gateway.background.webhooks import WebhookEndpoint
from tenancy.accounts.tenants import find_tenant
from tenancy.reuse.finding_counts import FindingCount, add_counts
from tenancy.types import DAY_MS, HOUR_MS
from tests.e2e.browser import IN_BROWSER, Page, signed_in
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


@pytest.fixture
async def findings_page(gateway: GatewayFixture, browser: Any) -> Page:
    """An administrator's page, where ada's prompts had one cause in each range."""
    now_ms = gateway.gateway.context.wall()
    causes = {1: "system_changes", 3 * 24: "tools_reordered", 20 * 24: "history_edited"}
    owner = find_tenant(gateway.store, "ada").tenant_id
    add_counts(
        gateway.store,
        [
            FindingCount(owner, at_ms, cause, "", 9, 9_000, at_ms, at_ms, model="tiny")
            for hours, cause in causes.items()
            for at_ms in [(now_ms // HOUR_MS - hours) * HOUR_MS]
        ],
    )
    return await signed_in(browser, gateway.admin_url, AdminClient(gateway).key)


CAUSES = """return [...document.querySelectorAll(".findings h3 .chip")]
    .map((one) => one.innerText).sort()"""
DAYS_ASKED = """return performance.getEntriesByType("resource").map((one) => new URL(one.name))
    .filter((one) => one.pathname.endsWith("/findings")).map((one) => one.searchParams.get("since"))
    .map((since) => since && Math.floor((Date.now() - Date.parse(since)) / 86_400_000)).at(-1)"""
SILENCE_FINDINGS = """const load = window.fetch;
    window.fetch = (path, ...more) =>
      String(path).includes("/findings") ? new Promise(() => {}) : load(path, ...more)"""
DAY, WEEK = ["system changes"], ["system changes", "tools reordered"]
MONTH = ["history edited", *WEEK]


class FindingsView:
    """What a user sees of findings. Its methods block."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def choose(self, label: str) -> None:
        """Choose another range."""
        Select(self.page.find(".filter select")).select_by_visible_text(label)

    def causes(self) -> list[str]:
        """Return the causes that the page has now."""
        return list(self.page.browser.execute_script(CAUSES))

    def see(self, label: str, causes: list[str]) -> tuple[int, str]:
        """Wait for a range and its causes; return the days that the server was asked for last, and
        the address."""
        page = self.page
        page.wait(lambda _: self.causes() == causes)
        assert Select(page.find(".filter select")).first_selected_option.text == label
        return page.browser.execute_script(DAYS_ASKED), str(page.browser.current_url)


async def test_findings_are_those_of_the_chosen_days(findings_page: Page) -> None:
    """The server is asked for these days only; the address keeps them over a reload, and one that
    names no range on offer shows the usual one."""
    page, view = findings_page, FindingsView(findings_page)

    def look() -> list[tuple[int, str]]:
        page.open("findings", "Of the last")
        seen = [view.see("7 d", WEEK)]
        view.choose("24 h")
        seen.append(view.see("24 h", DAY))
        view.choose("30 d")
        seen.append(view.see("30 d", MONTH))
        page.browser.refresh()
        seen.append(view.see("30 d", MONTH))
        for bad in ("8", "-1", "1e9", "toString", ""):
            page.open(f"findings?days={bad}", "Of the last")
            seen.append(view.see("7 d", WEEK))
        return seen

    days, addresses = zip(*await asyncio.to_thread(look), strict=True)

    assert days == (7, 1, 30, 30, 7, 7, 7, 7, 7)
    assert addresses[1].endswith("#/findings?days=1")
    assert addresses[2] == addresses[3]


async def test_findings_of_other_days_go_at_once(findings_page: Page) -> None:
    """Until the server answers, a page that says 24 h has none of 7 days, and no sum of theirs."""
    page, view = findings_page, FindingsView(findings_page)

    def look() -> str:
        page.open("findings", "Of the last")
        view.see("7 d", WEEK)
        page.browser.execute_script(SILENCE_FINDINGS)
        view.choose("24 h")
        page.see("Loading findings")
        return page.text()

    text = await asyncio.to_thread(look)

    assert view.causes() == []
    assert "at the pace of" not in text


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
