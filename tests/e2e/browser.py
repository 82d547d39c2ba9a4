"""A browser without a screen, and a user at the dashboard in it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
IN_BROWSER = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]
"""Marks of tests that use a browser."""
PATIENCE_S = 40
POLL_S = 0.05
"""How often a page is looked at. Selenium's half a second was most of what a test took."""
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
    "--hide-scrollbars",
    "--window-size=1200,900",
)


AXE = (Path(__file__).parents[1] / "data" / "axe.min.js").read_text()
FAULTS = """
const done = arguments[0];
axe.run(document, {resultTypes: ["violations"]}).then((found) => done(found.violations
  .filter((one) => ["serious", "critical"].includes(one.impact))
  .map((one) => [one.id, one.nodes.length, one.nodes[0].html.slice(0, 200)])));
"""
SIDEWAYS = """
return [...document.querySelectorAll(".scroll")]
  .filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.ariaLabel);
"""
INPUT = "arguments[0].dispatchEvent(new Event('input', {bubbles: true}))"
QUICK_POLLS = """
const later = window.setTimeout;
window.setTimeout = (act, ms, ...more) =>
  later(act, [5000, 15000].includes(ms) ? ms / 10 : ms, ...more);
"""
"""Makes the two polls of `api.js`, for which tests wait, ten times as quick."""


def open_browser(profile: Path) -> Any:
    """Start chromium with an empty profile; the caller quits it."""
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.binary_location = CHROMIUM or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": QUICK_POLLS})
    return driver


class Page:
    """A user at the browser. Its methods block; tests run them in a thread."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser = browser
        self.url = url

    def wait(self, holds: Any) -> Any:
        return WebDriverWait(self.browser, PATIENCE_S, POLL_S).until(holds)

    def sign_in(self, key: str) -> None:
        self.browser.get(f"{self.url}/dashboard")
        self.browser.execute_script("sessionStorage.clear()")
        self.browser.refresh()
        box = self.find("#key")
        box.send_keys(key + Keys.ENTER)

    def text(self) -> str:
        # Asked of the page at once: WebDriver's own way takes seconds for a thousand rows.
        read = "return document.body.innerText.replaceAll('\\t', ' ')"
        return str(self.browser.execute_script(read))

    def see(self, words: str) -> str:
        """Wait until the page has these words; return its text."""
        self.wait(lambda _: words in self.text())
        return self.text()

    def open(self, address: str, words: str) -> str:
        """Open a page; return its text when it has these words."""
        self.browser.execute_script(f"location.hash = '#/{address}'")
        return self.see(words)

    def find(self, selector: str) -> Any:
        """Wait for an element that is shown."""

        def shown(browser: Any) -> Any:
            found = browser.find_elements(By.CSS_SELECTOR, selector)
            return next((one for one in found if one.is_displayed()), None)

        return self.wait(shown)

    def press(self, text: str, within: str = "body") -> None:
        """Click the button with this text, once it takes clicks: the page draws after an event."""
        path = f"//button[normalize-space()='{text}'][not(@disabled)]"
        box = self.find(within)
        self.wait(lambda _: box.find_elements(By.XPATH, f".{path}"))
        self.browser.execute_script("arguments[0].click()", box.find_element(By.XPATH, f".{path}"))

    def fill(self, name: str, text: str) -> None:
        """Type into a field of the open dialog."""
        box = self.find(f"dialog #field-{name}")
        box.clear()  # the page hears of that by no event, and would draw the old text again
        self.browser.execute_script(INPUT, box)
        box.send_keys(text)

    def sideways(self) -> list[str]:
        """Return the names of tables that are wider than their panels."""
        return list(self.browser.execute_script(SIDEWAYS))

    def faults(self) -> list[Any]:
        """Return serious faults of accessibility, and whether the page is wider than the screen."""
        self.browser.execute_script(AXE)
        found = list(self.browser.execute_async_script(FAULTS))
        wide = "return document.documentElement.scrollWidth > innerWidth"
        return [*found, *(["wider than the screen"] if self.browser.execute_script(wide) else [])]


async def signed_in(browser: Any, url: str, key: str, words: str = "Hit ratio") -> Page:
    """Sign in at a listener; return the page when it has these words."""
    page = Page(browser, url)
    await asyncio.to_thread(page.sign_in, key)
    await asyncio.to_thread(page.see, words)
    return page
