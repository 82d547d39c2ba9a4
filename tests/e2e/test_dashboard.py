"""The dashboard in a real browser: sign-in, real numbers, accessibility, no foreign requests."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from engine.statistics import LevelStats, PayerBytes
from gateway.config import AdminConfig
from gateway.engines.replicas import Replicas
from tenancy.accounts.keys import create_admin_key
from tenancy.accounts.tenants import create_tenant
from tenancy.types import wall_ms
from tests.e2e.browser import IN_BROWSER, Page, signed_in
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatedRunner, GatewayFixture
from tests.unit.gateway.levels.reported_levels import STATS, ReportedEngine

pytestmark = [*IN_BROWSER, pytest.mark.slow]
WORDS = {
    "overview": "Requests by ending",
    "tenants": "bob",
    "tenants/ada": "Value of each retention class",
    "requests": "Ended requests, newest first",
    "findings": "Could be saved",
    "cache": "The pool",
    "memory": "Nothing is kept below the device",
    "money": "Rate cards",
    "access": "this one",
    "audit": "Audit log",
    "engine": "steps per second",
    "fleet": "every request goes to it",
}
"""Text of each page after requests of two tenants."""


async def used(gateway: GatewayFixture) -> AdminClient:
    """Return the client of a gateway with two tenants that have sent the same request twice."""
    admin = AdminClient(gateway)
    for who in ("ada", "bob"):
        for _ in range(2):
            await gateway.ask(body=gateway.chat("a question of some length for the cache"), who=who)
    await gateway.engine.get_stats()
    return admin


@pytest.fixture
async def entered(gateway: GatewayFixture, browser: Any) -> tuple[Page, AdminClient]:
    """An administrator with all scopes that has signed in."""
    admin = await used(gateway)
    browser.get_log("browser")  # what the pages of other tests have said
    return await signed_in(browser, gateway.admin_url, admin.key, WORDS["overview"]), admin


async def test_every_page_shows_the_apis_numbers(entered: tuple[Page, AdminClient]) -> None:
    """Without an error in the console but for endpoints that the server lacks."""
    page, admin = entered
    _, overview = await admin.ask("GET", "/admin/v1/analytics")

    texts = {name: await asyncio.to_thread(page.open, name, words) for name, words in WORDS.items()}

    share = f"{100 * overview['total']['hit_ratio']:.1f} %"
    assert share in texts["tenants"]
    assert "messages[0].content" in texts["tenants/ada"]
    assert "total $0.00" in texts["tenants/ada"]
    assert f"of {overview['engine']['blocks']} KV blocks" in texts["cache"]
    errors = [line["message"] for line in page.browser.get_log("browser")]
    assert [error for error in errors if "401" not in error and "404" not in error] == []


async def test_reads_per_write_are_those_of_each_class(
    entered: tuple[Page, AdminClient], gateway: GatewayFixture
) -> None:
    """On the tenant's page and on the Cache page: what was written once and read twice."""
    page, _ = entered
    kept = {"type": "text", "text": "Be short. " * 20, "cache_control": {"type": "ephemeral"}}
    asked = [{"role": "user", "content": "When?"}]
    body = {"model": gateway.model, "max_tokens": 2, "system": [kept], "messages": asked}
    for _ in range(3):
        status, _, _ = await gateway.ask("/v1/messages", body)
        assert status == 200
    row = re.compile(r"\b5m\s+(\d+)\s+(\d+)\s+2\.00\b")
    for address in ("tenants/ada", "cache"):
        text = await asyncio.to_thread(page.open, address, "Reads per write")
        found = row.search(text)
        assert found, text
        assert int(found[1]) == 2 * int(found[2]) > 0


async def test_a_tab_that_a_link_opens_is_signed_in(entered: tuple[Page, AdminClient]) -> None:
    """Ctrl-click, or the address typed anew: without the key again, until one tab signs out. The
    key is in no storage that outlives the tabs, and no cookie has it."""
    page, _ = entered
    browser, first = page.browser, page.browser.current_window_handle

    def follow() -> tuple[str, str, str, list[Any], int]:
        page.open("tenants", "bob")
        link = page.find("a[href='#/tenants/ada']")
        ActionChains(browser).key_down(Keys.CONTROL).click(link).key_up(Keys.CONTROL).perform()
        page.wait(lambda _: len(browser.window_handles) == 2)
        (other,) = set(browser.window_handles) - {first}
        browser.switch_to.window(other)
        opened = page.see("Top prefixes")
        cookies, kept = browser.get_cookies(), browser.execute_script("return localStorage.length")
        page.press("Sign out")
        page.see("Administrator's key")
        browser.switch_to.window(first)
        left = page.see("Administrator's key")
        browser.switch_to.window(other)
        browser.refresh()
        again = page.see("Administrator's key")
        browser.close()
        browser.switch_to.window(first)
        return opened, left, again, cookies, kept

    opened, left, again, cookies, kept = await asyncio.to_thread(follow)

    assert "Administrator's key" not in opened
    assert not any("Overview" in text for text in (left, again))
    assert (cookies, kept) == ([], 0)


async def test_overview_list_and_page_agree_on_a_tenants_state(
    entered: tuple[Page, AdminClient], gateway: GatewayFixture
) -> None:
    """Wrong requests limit no tenant, and each page says which they were."""
    page, admin = entered
    await admin.ask("POST", "/admin/v1/tenants", {"name": "constructor"})
    for _ in range(2):
        await gateway.ask(body={**gateway.chat(), "model": "gpt-4o"})
    why = "2 requests got the error model_not_found (asks for gpt-4o) in the last hour."
    texts = {
        name: await asyncio.to_thread(page.open, name, words)
        for name, words in (
            ("overview", why),
            ("tenants", "model_not_found"),
            ("tenants/ada", why),
        )
    }

    assert not any("limited" in text for text in texts.values())


async def test_refuses_a_wrong_key_and_shows_no_data(gateway: GatewayFixture, browser: Any) -> None:
    page = Page(browser, gateway.admin_url)
    await asyncio.to_thread(page.sign_in, "tl-wrong")

    await asyncio.to_thread(page.wait, lambda _: "key" in page.find("#refused").text.lower())

    assert "Overview" not in page.text()
    assert browser.execute_script("return sessionStorage.length") == 0


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (390, "dark"),
        (1920, "light"),
        pytest.param(390, "light", marks=pytest.mark.nightly),
        pytest.param(1920, "dark", marks=pytest.mark.nightly),
    ],
)
async def test_pages_are_accessible(
    entered: tuple[Page, AdminClient], scheme: str, width: int
) -> None:
    """No serious fault in contrast, names, roles or order; no page is wider than the screen."""
    page, _ = entered
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    found = {}
    for name, words in WORDS.items():
        await asyncio.to_thread(page.open, name, words)
        found[name] = await asyncio.to_thread(page.faults)
    page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    assert {name: faults for name, faults in found.items() if faults} == {}


@pytest.mark.parametrize("width", [1280, pytest.param(1440, marks=pytest.mark.nightly)])
async def test_no_page_scrolls_sideways(
    entered: tuple[Page, AdminClient], gateway: GatewayFixture, width: int
) -> None:
    """At the widths of laptops neither a page nor a table in it, with long names and codes."""
    page, admin = entered
    name = "the-agency-of-harbour-travel"
    await admin.ask("POST", "/admin/v1/tenants", {"name": name, "requests_per_minute": 2})
    _, made = await admin.ask("POST", f"/admin/v1/tenants/{name}/keys", {"label": "production"})
    gateway.keys[name] = made["key"]
    card = {"name": "standard", "input": 10**12, "cache_read": 10**11, "output": 10**13}
    await admin.ask("POST", "/admin/v1/rate-cards", card)
    gateway.gateway.context.authenticator.refresh_now()
    for _ in range(3):
        await gateway.ask(body=gateway.chat("a question of some length for the cache"), who=name)
    context = gateway.gateway.context
    context.models.default.replicas = Replicas.of(ReportedEngine(gateway.engine, STATS))
    screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    pages = WORDS | {"memory": "Load or compute", "requests": "rate_limit_exceeded"}
    pages[f"tenants/{name}"] = "Value of each retention class"
    found = {}
    for address, words in pages.items():
        await asyncio.to_thread(page.open, address, words)
        found[address] = await asyncio.to_thread(page.sideways)
        found[address] += await asyncio.to_thread(page.faults)
    page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    assert {name: faults for name, faults in found.items() if faults} == {}


async def test_memory_shows_levels_their_owners_and_why_one_is_off(
    entered: tuple[Page, AdminClient], gateway: GatewayFixture
) -> None:
    """Each level with its bytes, and the reason of one that is off; without a fault."""
    page, _ = entered
    context = gateway.gateway.context
    engine = ReportedEngine(gateway.engine, STATS)
    engine.set_level("disk", state="off", reason="read-only file system")
    context.models.default.replicas = Replicas.of(engine)
    text = await asyncio.to_thread(page.open, "memory", "Load or compute")
    text = await asyncio.to_thread(page.see, "ada")

    assert "The disk level is off: read-only file system, since" in text
    assert "Nothing is kept below the device" not in text
    assert "88 cached tokens" in text
    assert "not measured yet" in text
    assert await asyncio.to_thread(page.faults) == []


async def test_engine_shows_which_engine_elsewhere_is_lost(
    entered: tuple[Page, AdminClient], gateway: GatewayFixture
) -> None:
    """A row for each, and a notice with the reason above."""
    page, _ = entered
    replicas = Replicas()
    replicas.add("e0", gateway.engine)
    lost = replicas.add("e1")
    lost.state, lost.reason = "wrong", "The certificate has expired."
    gateway.gateway.context.models.default.replicas = replicas
    text = await asyncio.to_thread(page.open, "engine", "Engines elsewhere")

    assert "The engine e1 is wrong: The certificate has expired." in text
    rows = text[text.index("Engines elsewhere") :]
    assert rows.index("e0") < rows.index("ready") < rows.index("e1") < rows.index("wrong")
    assert await asyncio.to_thread(page.faults) == []


async def test_memory_shows_what_a_remote_store_has(
    entered: tuple[Page, AdminClient], gateway: GatewayFixture
) -> None:
    """Its bytes by tenant beside the other levels'."""
    page, _ = entered
    context = gateway.gateway.context
    remote = LevelStats("remote", "open", payers=(PayerBytes(b"1", 7 * 2**20, 2**20),))
    stats = msgspec.structs.replace(STATS, levels=(*STATS.levels, remote))
    context.models.default.replicas = Replicas.of(ReportedEngine(gateway.engine, stats))
    await asyncio.to_thread(page.open, "memory", "Load or compute")
    text = await asyncio.to_thread(page.see, "ada")

    owners = text[text.index("Bytes by tenant") :]
    assert owners.index("disk") < owners.index("remote") < owners.index("promised")
    assert "7.0 MiB" in owners[: owners.index("Where cached")]


async def test_makes_a_tenant_and_a_key_that_works(
    entered: tuple[Page, AdminClient], gateway: GatewayFixture
) -> None:
    """The key is shown once, with programs for the SDKs; the audit log has both changes."""
    page, admin = entered
    await asyncio.to_thread(page.open, "tenants", "New tenant")

    def act() -> str:
        page.press("New tenant")
        page.fill("name", "cid")
        page.fill("requests_per_minute", "60")
        Select(page.find("#field-default_class")).select_by_visible_text("1h")
        page.press("Create tenant", "dialog")
        page.see("No key: the tenant cannot ask.")
        page.press("New key")
        page.fill("label", "laptop")
        Select(page.find("#field-cache_key")).select_by_visible_text("namespace")
        page.press("Create key", "dialog")
        text = page.see("The new key")
        page.press("Anthropic", "dialog")
        assert "from anthropic import Anthropic" in page.see("client = Anthropic(")
        page.press("I have kept it")
        page.see("laptop")
        return text

    text = await asyncio.to_thread(act)
    key = next(word for word in text.split() if word.startswith("tl-") and len(word) > 40)
    gateway.keys["cid"] = key
    status, _, _ = await gateway.ask(body=gateway.chat(), who="cid")
    _, made = await admin.ask("GET", "/admin/v1/tenants/cid")
    _, keys = await admin.ask("GET", "/admin/v1/tenants/cid/keys")
    _, log = await admin.ask("GET", "/admin/v1/audit?limit=2")

    assert status == 200
    assert [(one["cache_key"], one["tolerance"]) for one in keys["keys"]] == [("namespace", None)]
    assert (made["requests_per_minute"], made["default_class"]) == (60, "1h")
    assert key not in page.text()
    assert [change["action"] for change in log["changes"]] == ["key.create", "tenant.create"]


async def test_asks_for_the_name_before_it_destroys(
    entered: tuple[Page, AdminClient], gateway: GatewayFixture
) -> None:
    """Delete takes clicks only while the name is typed. An erasure shows its receipt."""
    page, admin = entered
    await asyncio.to_thread(page.open, "tenants/ada", "Erase cache")

    def act() -> tuple[bool, str]:
        page.press("Delete")
        confirm = page.find("dialog button.danger")
        before = confirm.is_enabled()
        page.fill("confirm", "ada")
        page.wait(lambda _: confirm.is_enabled())
        page.fill("confirm", "bob")
        page.wait(lambda _: not confirm.is_enabled())
        page.press("Cancel", "dialog")
        page.press("Erase cache")
        page.fill("confirm", "ada")
        page.press("Erase", "dialog")
        return before, page.see("Erased: the receipt")

    before, text = await asyncio.to_thread(act)
    _, receipts = await admin.ask("GET", "/admin/v1/erasures?tenant=ada")

    assert not before
    assert "blocks" in text
    assert len(receipts["erasures"]) == 1


async def test_changes_a_tenant_and_its_keys(entered: tuple[Page, AdminClient]) -> None:
    """Each dialog closes when its change is made, and the page shows it."""
    page, admin = entered
    await asyncio.to_thread(page.open, "tenants/ada", "Settings")

    def send(button: str, words: str) -> None:
        page.press(button, "dialog")
        page.wait(lambda _: not page.browser.find_elements(By.CSS_SELECTOR, "dialog"))
        page.see(words)

    def act() -> None:
        page.press("Settings")
        page.fill("requests_at_once", "60")
        send("Save settings", "0 of 60")
        page.press("Rotate")
        page.press("Rotate", "dialog")
        page.see("The new key")
        send("I have kept it", "replaced by key 4")
        page.press("Revoke")
        page.fill("confirm", "key 4")
        send("Revoke", "revoked 20")
        page.press("Suspend")
        page.fill("confirm", "ada")
        send("Suspend", "Resume")

    await asyncio.to_thread(act)
    _, tenant = await admin.ask("GET", "/admin/v1/tenants/ada")
    _, keys = await admin.ask("GET", "/admin/v1/tenants/ada/keys")

    assert (tenant["requests_at_once"], tenant["status"]) == (60, "suspended")
    assert [key["replaced_by"] for key in keys["keys"]] == [4, None]
    assert keys["keys"][1]["revoked"] is not None


async def test_sets_prices_and_budgets_in_dollars(entered: tuple[Page, AdminClient]) -> None:
    page, admin = entered
    await asyncio.to_thread(page.open, "money", "New rate card")

    def act() -> None:
        page.press("New rate card")
        for name, text in (
            ("name", "std"),
            ("input", "3"),
            ("cache_read", "0.3"),
            ("output", "15"),
        ):
            page.fill(name, text)
        page.press("Add rate card", "dialog")
        page.see("std@1")
        page.open("tenants/ada", "Set a budget")
        page.press("Set a budget")
        page.fill("hard", "20")
        page.press("Set budget", "dialog")
        page.see("of $20.00")

    await asyncio.to_thread(act)
    _, cards = await admin.ask("GET", "/admin/v1/rate-cards")
    _, budgets = await admin.ask("GET", "/admin/v1/budgets?tenant=ada")

    prices = [(card["input"], card["cache_read"], card["output"]) for card in cards["rate_cards"]]
    assert (3_000_000, 300_000, 15_000_000) in prices
    assert budgets["budgets"][0]["hard_usd"].startswith("20")


async def test_offers_only_what_the_scopes_allow(gateway: GatewayFixture, browser: Any) -> None:
    await used(gateway)
    key = create_admin_key(gateway.store, wall_ms, scopes=("read",))
    gateway.gateway.context.authenticator.refresh_now()
    page = await signed_in(browser, gateway.admin_url, key)

    texts = [
        await asyncio.to_thread(page.open, name, words)
        for name, words in (("tenants", "bob"), ("tenants/ada", "Top prefixes"), ("money", "Rate"))
    ]

    acts = ("New tenant", "New key", "Revoke", "Erase cache", "Delete", "Suspend", "New rate card")
    assert [act for act in acts for text in texts if act in text] == []


async def test_lists_and_finds_more_tenants_than_a_page(
    gateway: GatewayFixture, browser: Any
) -> None:
    """One is found by typing, in the address too, and opened by keyboard."""
    admin = AdminClient(gateway)
    for number in range(1_098):
        create_tenant(gateway.store, wall_ms, f"tenant-{number:04d}")
    gateway.gateway.context.authenticator.refresh_now()
    page = await signed_in(browser, gateway.admin_url, admin.key)
    await asyncio.to_thread(page.open, "tenants", "Show all 1,100 rows")

    def open_one() -> str:
        page.find("input[type=search]").send_keys("tenant-1077")
        page.wait(lambda _: len(page.browser.find_elements(By.CSS_SELECTOR, "tbody tr")) == 1)
        address = str(page.browser.current_url)
        link = page.find("tbody a")
        page.browser.execute_script("arguments[0].focus()", link)
        link.send_keys(Keys.ENTER)
        page.see("Tenants / tenant-1077")
        return address

    assert "q=tenant-1077" in await asyncio.to_thread(open_one)


async def test_says_since_when_the_server_is_gone(
    entered: tuple[Page, AdminClient], gateway: GatewayFixture
) -> None:
    """The last figures stay, and are named as such."""
    page, _ = entered
    await asyncio.to_thread(page.open, "tenants", "bob")
    for listener in gateway.gateway.listeners:
        await listener.close()

    text = await asyncio.to_thread(page.see, "Disconnected since")

    assert "bob" in text


async def test_warns_while_the_engine_is_down(
    entered: tuple[Page, AdminClient], gateway: GatewayFixture
) -> None:
    """Its last known figures must not pass for current ones."""
    page, _ = entered
    await gateway.engine.close()

    for name in ("overview", "cache", "engine"):
        await asyncio.to_thread(page.open, name, "takes no requests now")


async def test_a_tenants_own_page_shows_itself_alone(gateway: GatewayFixture, browser: Any) -> None:
    """On the public listener, with the tenant's key; an administrator's key gets nothing there."""
    admin = await used(gateway)
    _, receipt = await admin.ask("POST", "/admin/v1/erase", {"tenant": "ada"})
    page = await signed_in(browser, gateway.url, gateway.keys["ada"], "Erasures")
    text = page.text()
    faults = await asyncio.to_thread(page.faults)
    await asyncio.to_thread(page.sign_in, admin.key)
    refused = await asyncio.to_thread(page.see, "administrator")

    assert "Hit ratio" in text
    assert f" {receipt['what']} " in text[text.index("Erasures") :]
    assert "bob" not in text
    assert "Hit ratio" not in refused
    assert faults == []


async def test_sends_no_request_to_other_hosts(entered: tuple[Page, AdminClient]) -> None:
    """No font, script or beacon is fetched elsewhere."""
    page, _ = entered

    found = page.browser.execute_script(
        "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    )

    assert found
    assert all(address.startswith(page.url) for address in found)


async def test_addresses_keep_range_and_filters(entered: tuple[Page, AdminClient]) -> None:
    """A link shows what its sender saw; the range stays from page to page, the filter does not."""
    page, _ = entered

    def look() -> tuple[list[str], str]:
        page.open("tenants?range=7d&q=ad", "tier")
        page.wait(lambda _: page.find("[aria-pressed=true]").text == "7 d")
        rows = [one.text for one in page.browser.find_elements(By.CSS_SELECTOR, "tbody th")]
        page.find("nav a[href*='money']").click()
        page.see("Rate cards")
        return rows, str(page.browser.current_url)

    rows, address = await asyncio.to_thread(look)

    assert rows == ["ada"]
    assert address.endswith("#/money?range=7d")


async def test_tables_save_as_csv(entered: tuple[Page, AdminClient]) -> None:
    """As shown, with a label that a spreadsheet would run made text; markup in it is text too."""
    page, admin = entered
    label = "=1+1<img src=x onerror=window.hit=1>"
    await admin.ask("POST", "/admin/v1/tenants/ada/keys", {"label": label})
    await asyncio.to_thread(page.open, "tenants/ada", label)

    def save() -> str:
        page.browser.execute_script(
            "window.saved = []; URL.createObjectURL = (one) => { saved.push(one); return '#'; };"
        )
        button = page.find("[aria-label='Save as CSV: Keys']")
        page.browser.execute_script("arguments[0].click()", button)
        return str(page.browser.execute_async_script("saved[0].text().then(arguments[0])"))

    lines = (await asyncio.to_thread(save)).splitlines()

    assert lines[0].startswith("key,label,workspace,scopes")
    assert any(f",'{label},default," in line for line in lines)
    assert page.browser.execute_script("return window.hit") is None


async def test_opens_without_a_key_behind_a_trusted_proxy(
    unopened_gateway: GatewayFixture, browser: Any
) -> None:
    """The proxy's user is shown, and the page makes changes."""
    gateway = unopened_gateway
    admin = AdminConfig(
        trusted_header="X-Forwarded-User",
        trusted_proxies=("127.0.0.1/32",),
        trusted_scopes=("read", "tenants"),
    )
    gateway.config = msgspec.structs.replace(gateway.config, admin=admin)
    await gateway.open()
    page = Page(browser, gateway.admin_url)
    headers = {"headers": {"X-Forwarded-User": "alice@example.com"}}

    def act() -> str:
        browser.execute_cdp_cmd("Network.enable", {})
        browser.execute_cdp_cmd("Network.setExtraHTTPHeaders", headers)
        browser.get(f"{page.url}/dashboard#/tenants")
        page.see("alice@example.com")
        page.press("New tenant")
        page.fill("name", "cid")
        page.press("Create tenant", "dialog")
        return page.see("Tenants / cid")

    try:
        text = await asyncio.to_thread(act)
    finally:
        browser.execute_cdp_cmd("Network.setExtraHTTPHeaders", {"headers": {}})
        await gateway.close()

    assert "Sign out" not in text
    assert "Erase cache" not in text


async def test_several_models_are_shown_apart(
    unopened_gateway: GatewayFixture, browser: Any
) -> None:
    """The pool of each, its engine, who may use it, which a tenant uses, and which is down."""
    gateway = unopened_gateway
    gateway.more = {"second": GatedRunner(gateway.card.config.vocab)}
    await gateway.open()
    gateway.gateway.context.models.by_name["second"].tenants = frozenset({"ada", "bob"})
    admin = await used(gateway)
    for name in (gateway.model, "second"):
        await gateway.ask(body=gateway.chat("a question for the cache", model=name))
    page = await signed_in(browser, gateway.admin_url, admin.key, WORDS["overview"])
    browser.get_log("browser")
    cache = await asyncio.to_thread(page.open, "cache", "The pool of second")
    sizes = await asyncio.to_thread(page.open, "tenants/ada", "Value of more KV memory of second")
    faults = await asyncio.to_thread(page.faults)
    await gateway.engines["second"].close()
    engine = await asyncio.to_thread(page.open, "engine", "The engine of second takes no requests")
    errors = [line["message"] for line in browser.get_log("browser")]
    await gateway.close()

    assert f"Value of more KV memory of {gateway.model}" in sizes
    assert f"The pool of {gateway.model}" in cache
    assert "of 512 KV blocks" in cache
    assert engine.count("steps per second") >= 2
    assert "open to ada, bob" in engine
    assert (faults, errors) == ([], [])
