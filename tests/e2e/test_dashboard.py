"""The dashboard in a real browser: it signs in, shows real numbers, and asks nobody else."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from engine.model_store import ModelCard
from tests.gateway.admin import Admin
from tests.gateway.house import House
from tests.models import prepared

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver"
    ),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]
PATIENCE_S = 20
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
)


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return prepared(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def house(card: ModelCard, tmp_path: Path) -> AsyncIterator[House]:
    house = House(card, tmp_path)
    await house.open()
    yield house
    await house.close()
    house.discard()


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
    """What a person at the browser does. Everything here blocks; tests run it in a thread."""

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

    def see(self, section: str, words: str) -> str:
        """Go there; its text once these words are in it."""
        self.browser.execute_script(f"location.hash = '#{section}'")
        view = self.browser.find_element(By.ID, "view")
        self.wait(lambda _: words in view.text)
        return str(view.text)


async def used(house: House) -> Admin:
    """A house in which two tenants have asked the same twice."""
    admin = Admin(house)
    for who in ("ada", "bob"):
        for _ in range(2):
            await house.ask(body=house.chat("a question of some length for the cache"), who=who)
    await house.engine.get_stats()
    return admin


async def test_an_operator_signs_in_and_sees_real_numbers(house: House, browser: Any) -> None:
    """Every section, with the numbers that the API has; and no error in the console."""
    admin = await used(house)
    _, overview = await admin.ask("GET", "/admin/v1/analytics")
    page = Page(browser, house.admin_url)
    await asyncio.to_thread(page.sign_in, admin.key)

    share = f"{100 * overview['total']['hit_ratio']:.1f} %"
    text = await asyncio.to_thread(page.see, "Overview", share)
    await asyncio.to_thread(page.see, "Tenants", "bob")
    tenant = await asyncio.to_thread(page.see, "Tenant/ada", "What each retention class")
    await asyncio.to_thread(page.see, "Tree/ada", "ada / default")
    await asyncio.to_thread(page.see, "Leases", "Blocks by tenant")
    await asyncio.to_thread(page.see, "Money", "saved by caching")
    await asyncio.to_thread(page.see, "Engine", "steps a second")

    assert "ada" in text
    assert "messages[0].content" in tenant
    errors = [
        line["message"] for line in browser.get_log("browser") if "401" not in line["message"]
    ]
    assert errors == []


async def test_a_wrong_key_is_refused_and_shows_nothing(house: House, browser: Any) -> None:
    """Without a good key the page holds no number of anybody."""
    page = Page(browser, house.admin_url)
    await asyncio.to_thread(page.sign_in, "tl-wrong")

    refused = browser.find_element(By.ID, "refused")
    await asyncio.to_thread(page.wait, lambda _: "refused" in refused.text)

    assert browser.find_element(By.ID, "view").text == ""


async def test_it_can_be_used_by_keyboard_and_read_aloud(house: House, browser: Any) -> None:
    """Links in order, the current one said; every drawing has a name; branches can be reached."""
    admin = await used(house)
    page = Page(browser, house.admin_url)
    await asyncio.to_thread(page.sign_in, admin.key)
    await asyncio.to_thread(page.see, "Tree/ada", "ada / default")

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


async def test_no_request_leaves_this_host(house: House, browser: Any) -> None:
    """Nothing is fetched from elsewhere: no font, no script, no beacon."""
    admin = await used(house)
    page = Page(browser, house.admin_url)
    browser.get_log("performance")
    await asyncio.to_thread(page.sign_in, admin.key)
    await asyncio.to_thread(page.see, "Overview", "Time to first token")

    found = browser.execute_script(
        "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    )

    assert found
    assert all(address.startswith(house.admin_url) for address in found)
