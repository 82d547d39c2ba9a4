"""The dashboard in a real browser: sign-in, real numbers, accessibility, no foreign requests."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from gateway.analytics.aggregates import CompletedPrompt
from gateway.dialects.canonical import Rendered, UsageRecord
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver"
    ),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]
PATIENCE_S = 60
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
)


NAMELESS = """
const view = document.getElementById("view"), found = [];
for (const one of view.querySelectorAll("table"))
  if (!one.caption?.textContent || one.querySelector("thead th:not([scope]), th:empty"))
    found.push(one.outerHTML);
for (const one of view.querySelectorAll(".scroll"))
  if ((one.tabIndex === 0) !== one.scrollWidth > one.clientWidth || !one.getAttribute("aria-label"))
    found.push(one.outerHTML);
for (const one of view.querySelectorAll("input, select"))
  if (!one.getAttribute("aria-label") && !one.labels.length) found.push(one.outerHTML);
for (const one of view.querySelectorAll("svg"))
  if (!one.getAttribute("aria-label")) found.push("svg");
for (const one of view.querySelectorAll("section"))
  if (!one.querySelector("h2")?.textContent) found.push("section");
return found;
"""


FAINT = """
const channels = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
  .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
const ground = (one) => {
  for (; one; one = one.parentElement) {
    const found = channels(getComputedStyle(one).backgroundColor);
    if (found.length === 3 || found[3] === 1) return found;
  }
  return [255, 255, 255];
};
const found = [];
for (const one of document.querySelectorAll("body *")) {
  const says = [...one.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  if (!says || !one.checkVisibility() || one instanceof SVGElement) continue;
  const style = getComputedStyle(one), size = parseFloat(style.fontSize);
  const [a, b] = [light(channels(style.color)), light(ground(one))].sort((x, y) => y - x);
  const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
  if ((a + 0.05) / (b + 0.05) < (large ? 3 : 4.5) || size < 11)
    found.push([one.tagName, one.textContent.slice(0, 40), style.color, size]);
}
return found;
"""

WORDS = {
    "Overview": "Time to first token",
    "Tenants": "bob",
    "Tenant/ada": "Value of each retention class",
    "Tree/ada": "ada / default",
    "Leases": "Blocks by tenant",
    "Money": "saved by caching",
    "Engine": "steps per second",
}
"""Text in each section after requests of two tenants."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.binary_location = CHROMIUM or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(executable_path=DRIVER)
    )
    yield driver
    driver.quit()


class Page:
    """A user at the browser. Its methods block; tests run them in a thread."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser = browser
        self.url = url

    def wait(self, holds: Any) -> Any:
        return WebDriverWait(self.browser, PATIENCE_S).until(holds)

    def sign_in(self, key: str) -> None:
        self.browser.get(f"{self.url}/dashboard")
        self.browser.execute_script("sessionStorage.clear()")
        self.browser.refresh()
        box = self.browser.find_element(By.ID, "key")
        self.wait(lambda _: box.is_displayed())
        box.send_keys(key + Keys.ENTER)

    def stop_polling(self) -> None:
        """Draw each section once, without polling, so that found elements stay."""
        self.browser.execute_script("window.setTimeout = () => 0")

    def open_section(self, section: str, words: str) -> str:
        """Open a section; return its text when it contains these words."""
        self.browser.execute_script(f"location.hash = '#{section}'")
        # Asked of the page at once: WebDriver's own way takes seconds for a thousand rows.
        text = "return document.getElementById('view').innerText.replaceAll('\\t', ' ')"
        self.wait(lambda _: words in self.browser.execute_script(text))
        return str(self.browser.execute_script(text))


async def used(gateway: GatewayFixture) -> AdminClient:
    """Yield a gateway with two tenants that have sent the same request twice."""
    admin = AdminClient(gateway)
    for who in ("ada", "bob"):
        for _ in range(2):
            await gateway.ask(body=gateway.chat("a question of some length for the cache"), who=who)
    await gateway.engine.get_stats()
    return admin


async def test_every_section_shows_the_apis_numbers(gateway: GatewayFixture, browser: Any) -> None:
    """Without an error in the console."""
    admin = await used(gateway)
    _, overview = await admin.ask("GET", "/admin/v1/analytics")
    browser.get_log("browser")  # what the pages of other tests have said
    page = Page(browser, gateway.admin_url)
    await asyncio.to_thread(page.sign_in, admin.key)

    share = f"{100 * overview['total']['hit_ratio']:.1f} %"
    text = await asyncio.to_thread(page.open_section, "Overview", share)
    await asyncio.to_thread(page.open_section, "Tenants", "bob")
    tenant = await asyncio.to_thread(
        page.open_section, "Tenant/ada", "Value of each retention class"
    )
    await asyncio.to_thread(page.open_section, "Tree/ada", "ada / default")
    await asyncio.to_thread(page.open_section, "Leases", "Blocks by tenant")
    await asyncio.to_thread(page.open_section, "Money", "saved by caching")
    await asyncio.to_thread(page.open_section, "Engine", "steps per second")

    assert "ada" in text
    assert "messages[0].content" in tenant
    assert "requests $0.00\nadjustments $0.00\ntotal $0.00" in tenant
    errors = [
        line["message"] for line in browser.get_log("browser") if "401" not in line["message"]
    ]
    assert errors == []


async def test_refuses_a_wrong_key_and_shows_no_data(gateway: GatewayFixture, browser: Any) -> None:
    page = Page(browser, gateway.admin_url)
    await asyncio.to_thread(page.sign_in, "tl-wrong")

    refused = browser.find_element(By.ID, "refused")
    await asyncio.to_thread(page.wait, lambda _: "refused" in refused.text)

    assert browser.find_element(By.ID, "view").text == ""


async def test_keyboard_and_screen_reader_reach_everything(
    gateway: GatewayFixture, browser: Any
) -> None:
    """Links are in order with the current one marked; drawings have names; branches take focus."""
    admin = await used(gateway)
    page = Page(browser, gateway.admin_url)
    await asyncio.to_thread(page.sign_in, admin.key)
    page.stop_polling()
    await asyncio.to_thread(page.open_section, "Tree/ada", "ada / default")

    current = browser.find_element(By.CSS_SELECTOR, "nav [aria-current]").text
    names = [
        drawing.get_attribute("aria-label")
        for drawing in browser.find_elements(By.CSS_SELECTOR, "svg")
    ]
    leaf = browser.find_element(By.CSS_SELECTOR, "rect.leaf")
    browser.execute_script("arguments[0].focus()", leaf)
    focused = browser.switch_to.active_element.get_attribute("aria-label")

    assert current == "Tree"
    assert names
    assert all(names)
    assert "tokens" in focused


async def test_shows_promises_and_churn(gateway: GatewayFixture, browser: Any) -> None:
    """By tenant and class, in each section that has them, as tables with captions."""
    admin = await used(gateway)
    text = {"type": "text", "text": "kept, " * 60, "cache_control": {"type": "ephemeral"}}
    asked = {
        "model": gateway.model,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": [text]}],
    }
    for _ in range(2):
        await gateway.ask("/v1/messages", asked, headers={"anthropic-version": "2023-06-01"})
    _, overview = await admin.ask("GET", "/admin/v1/analytics")
    async with asyncio.timeout(PATIENCE_S):  # the engine tells with its next heartbeat
        while not overview["churn"]["inserted_blocks"]:
            _, overview = await admin.ask("GET", "/admin/v1/analytics")
    page = Page(browser, gateway.admin_url)
    await asyncio.to_thread(page.sign_in, admin.key)

    leases = await asyncio.to_thread(page.open_section, "Leases", "kept / ended")
    tenant = await asyncio.to_thread(page.open_section, "Tenant/ada", "kept / ended")
    overview_text = await asyncio.to_thread(page.open_section, "Overview", "Block churn")

    [row] = overview["leases"]
    assert (row["tenant"], row["class"], row["given"], row["renewed"]) == ("ada", "5m", 1, 1)
    assert row["running"] == 1
    assert "ada 5m 1 1" in leases
    assert "ada 5m 1 1" in tenant
    assert "inserted" in overview_text


async def test_lists_and_finds_a_thousand_tenants(gateway: GatewayFixture, browser: Any) -> None:
    """One is found by typing and opened by keyboard."""
    admin = AdminClient(gateway)
    seen = gateway.gateway.context.analytics
    for number in range(1_000):
        record = UsageRecord(64, {"5m": 32}, {}, 32, 5, 32)
        facts = CompletedPrompt(
            f"tenant-{number:04d}", record, Rendered((number,) * 64), 0.1, "", "done"
        )
        seen.note(facts)
    page = Page(browser, gateway.admin_url)
    await asyncio.to_thread(page.sign_in, admin.key)
    await asyncio.to_thread(page.open_section, "Overview", "1,000")
    page.stop_polling()
    await asyncio.to_thread(page.open_section, "Tenants", "tenant-0000")
    rows = len(browser.find_elements(By.CSS_SELECTOR, "tbody tr"))

    def open_one() -> str:
        find = browser.find_element(By.CSS_SELECTOR, "input[type=search]")
        find.send_keys("tenant-0777")
        page.wait(lambda _: len(browser.find_elements(By.CSS_SELECTOR, "tbody tr")) == 1)
        find.send_keys(Keys.TAB)
        browser.switch_to.active_element.send_keys(Keys.ENTER)
        page.wait(lambda _: browser.current_url.endswith("#Tenant/tenant-0777"))
        return page.open_section("Tenant/tenant-0777", "tenant-0777\n")

    text = await asyncio.to_thread(open_one)

    assert rows == 1_000
    assert "50.0 %" in text


async def test_every_table_and_field_has_a_label(gateway: GatewayFixture, browser: Any) -> None:
    """Captions, column heads, labels, one heading per section, for screen readers."""
    admin = await used(gateway)
    page = Page(browser, gateway.admin_url)
    await asyncio.to_thread(page.sign_in, admin.key)
    nameless = []
    for section, text in WORDS.items():
        await asyncio.to_thread(page.open_section, section, text)
        nameless += browser.execute_script(NAMELESS)

    assert nameless == []


async def test_warns_on_every_section_with_blocks_while_the_engine_is_down(
    gateway: GatewayFixture, browser: Any
) -> None:
    """Its last known figures must not pass for current ones."""
    admin = await used(gateway)
    page = Page(browser, gateway.admin_url)
    await asyncio.to_thread(page.sign_in, admin.key)
    await asyncio.to_thread(page.open_section, "Overview", "Time to first token")
    before = browser.find_elements(By.CSS_SELECTOR, "p.warning")
    await gateway.engine.close()

    assert before == []
    for section in ("Overview", "Leases", "Engine"):
        await asyncio.to_thread(page.open_section, section, "takes no requests now")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_is_readable_on_a_phone(gateway: GatewayFixture, browser: Any, scheme: str) -> None:
    """Contrast is WCAG AA, no text is tiny, and no page is wider than the screen: tables scroll
    in their own boxes."""
    admin = await used(gateway)
    page = Page(browser, gateway.admin_url)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    screen = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    await asyncio.to_thread(page.sign_in, admin.key)
    wrong = []
    for section, text in WORDS.items():
        await asyncio.to_thread(page.open_section, section, text)
        wrong += browser.execute_script(FAINT) + browser.execute_script(NAMELESS)
        if browser.execute_script("return document.documentElement.scrollWidth > innerWidth"):
            wrong.append(section)
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    assert wrong == []


async def test_refresh_keeps_focus_and_open_details(gateway: GatewayFixture, browser: Any) -> None:
    """Focus stays on a tenant's link although its row has moved."""
    admin = await used(gateway)
    page = Page(browser, gateway.admin_url)
    await asyncio.to_thread(page.sign_in, admin.key)
    browser.execute_script("window.setTimeout = (again) => { window.again = again; }")
    rows = "return [...document.querySelectorAll('#view tbody th')].map((one) => one.innerText)"
    await asyncio.to_thread(page.open_section, "Tenants", "bob")
    before = browser.execute_script(rows)
    browser.execute_script("document.querySelector('#view a[href$=ada]').focus()")
    await gateway.ask(body=gateway.chat("ada asks once more"))
    await asyncio.to_thread(browser.execute_async_script, "window.again().then(arguments[0])")
    after, focused = (
        browser.execute_script(one) for one in (rows, "return document.activeElement.innerText")
    )

    await asyncio.to_thread(page.open_section, "Tree/ada", "ada / default")
    unfolded = browser.find_element(By.TAG_NAME, "details")
    browser.execute_script("arguments[0].firstChild.click()", unfolded)
    await asyncio.to_thread(browser.execute_async_script, "window.again().then(arguments[0])")

    assert (before, after, focused) == (["bob", "ada"], ["ada", "bob"], "ada")
    assert unfolded.get_attribute("open") is not None


async def test_sends_no_request_to_other_hosts(gateway: GatewayFixture, browser: Any) -> None:
    """No font, script or beacon is fetched elsewhere."""
    admin = await used(gateway)
    page = Page(browser, gateway.admin_url)
    browser.get_log("performance")
    await asyncio.to_thread(page.sign_in, admin.key)
    await asyncio.to_thread(page.open_section, "Overview", "Time to first token")

    found = browser.execute_script(
        "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    )

    assert found
    assert all(address.startswith(gateway.admin_url) for address in found)
