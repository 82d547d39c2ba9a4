"""What the dashboard's modules do where a slow server, an old range or another zone decides."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e.browser import IN_BROWSER, Page, signed_in
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture

pytestmark = IN_BROWSER
LATE_ANSWER = """
  const answers = [], timers = new Set(), box = document.createElement("div"), every = 7777;
  const turns = async () => {
    for (let n = 0; n < 20; n += 1) await new Promise((go) => ask(go, 0));
  };
  const ask = window.setTimeout, forget = window.clearTimeout, load = window.fetch;
  window.setTimeout = (run, delay) => {
    const id = ask(run, delay);
    if (delay === every) timers.add(id);
    return id;
  };
  window.clearTimeout = (id) => { timers.delete(id); forget(id); };
  window.fetch = (path, options) => (path !== "/probe" ? load(path, options)
    : new Promise((answer) => answers.push((text) => answer(new Response(text)))));
  let again;
  const Probe = () => {
    const found = api.useData("/probe", every);
    again = found.again;
    return parts.html`<i>${found.data ?? ""}</i>`;
  };
  parts.render(parts.html`<${Probe} />`, box);
  while (!answers.length) await turns();
  again();
  answers[1]('"new"');
  while (box.textContent !== "new") await turns();
  answers[0]('"old"');
  await turns();
  const shown = box.textContent, waiting = timers.size;
  parts.render(null, box);
  for (let n = 0; n < 50 && timers.size; n += 1) await turns();
  Object.assign(window, { setTimeout: ask, clearTimeout: forget, fetch: load });
  return [shown, waiting, timers.size];
"""


async def in_page(page: Page, body: str, **modules: str) -> Any:
    """Return what the body of a function returns, in a page, with modules of `parts` by name."""
    names = ", ".join(modules)
    files = ", ".join(f"import('/dashboard/parts/{name}.js')" for name in modules.values())
    run = f"Promise.all([{files}]).then(async ([{names}]) => {{ {body} }})"
    script = f"{run}.then(arguments[0], (error) => arguments[0](String(error)));"
    return await asyncio.to_thread(page.browser.execute_async_script, script)


@pytest.fixture
async def page(gateway: GatewayFixture, browser: Any) -> Page:
    """The form to sign in, which loads every module and asks for nothing."""
    page = Page(browser, gateway.admin_url)
    await asyncio.to_thread(browser.get, f"{page.url}/dashboard")
    await asyncio.to_thread(page.find, "#key")
    return page


async def test_an_older_answer_does_not_replace_a_newer_one(page: Page) -> None:
    """Of two rounds at once one timer is left, and none when the page is left."""
    found = await in_page(page, LATE_ANSWER, parts="html", api="api")

    assert found == ["new", 1, 0]


async def test_a_sum_beside_a_gap_is_a_part_of_it(page: Page) -> None:
    """Nothing was charged in the minutes that a server that stops had left: no line to zero."""
    body = """
      const requests = [0, 5, 0, null, null, 0, 3, 0, 2, 0];
      const cost_usd = requests.map((n) => (n === null ? null : String(n)));
      return history.amounts({ requests, cost_usd }, "cost_usd");
    """
    found = await in_page(page, body, history="history")

    assert found == [0, 5, None, None, None, None, 3, 0, 2, 0]


async def test_an_old_range_has_whole_hours(page: Page, gateway: GatewayFixture) -> None:
    """A drag over last week's chart: the server has no minutes of that, and says so with a 400."""
    body = """
      const now = Date.now(), query = new URLSearchParams({ since: now - 5 * 86_400_000,
        until: now - 5 * 86_400_000 + 3 * 3_600_000 });
      return api.address("/admin/v1/history", route.rangeOf(query).history);
    """
    path = await in_page(page, body, api="api", route="route")
    status, told = await AdminClient(gateway).ask("GET", path)

    assert (status, told.get("step_ms")) == (200, 3_600_000)


async def test_a_day_of_the_ledger_is_utcs(page: Page) -> None:
    """West of Greenwich its first instant is the evening before."""
    zone = {"timezoneId": "America/New_York"}
    page.browser.execute_cdp_cmd("Emulation.setTimezoneOverride", zone)
    body = """
      const at = "2026-11-23T00:00:00.000Z";
      return [format.utcDay(at), format.time(at), format.zone()];
    """
    try:
        found = await in_page(page, body, format="format")
    finally:
        page.browser.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": ""})

    assert found == ["23 Nov", "22 Nov 19:00", "America/New_York"]


@pytest.mark.slow
async def test_older_requests_are_shown_without_a_gap(page: Page, gateway: GatewayFixture) -> None:
    """The list is one answer of the server, however many requests have ended since."""
    for number in range(101):
        await gateway.ask(body=gateway.chat(f"question {number}", max_tokens=1))

    await signed_in(page.browser, page.url, AdminClient(gateway).key)

    def look() -> list[int]:
        page.open("requests", "Show older")
        rows = "return document.querySelectorAll('tbody tr').length"
        before = page.browser.execute_script(rows)
        page.press("Show older")
        page.wait(lambda browser: browser.execute_script(rows) > before)
        assert "Show older" not in page.text()
        return [before, page.browser.execute_script(rows)]

    assert await asyncio.to_thread(look) == [100, 101]


@pytest.mark.slow
async def test_a_keys_budget_is_changed_as_one(page: Page, gateway: GatewayFixture) -> None:
    """From Money too, where the page does not know the tenant's keys."""
    admin = AdminClient(gateway)
    _, listed = await admin.ask("GET", "/admin/v1/tenants/ada/keys")
    key_id = listed["keys"][0]["key_id"]
    body = {"window": "day", "hard_micros": 5_000_000, "key_id": key_id}
    await admin.ask("PUT", "/admin/v1/tenants/ada/budgets", body)
    await signed_in(page.browser, page.url, admin.key)

    def act() -> str:
        page.open("money", f"day, key {key_id}")
        page.press("Change")
        owner = str(page.find("#field-key").text)
        page.fill("hard", "7")
        page.press("Set budget", "dialog")
        page.see("of $7.00")
        return owner

    owner = await asyncio.to_thread(act)
    _, told = await admin.ask("GET", "/admin/v1/budgets?tenant=ada")

    assert owner == f"key {key_id}"
    assert [(one["key_id"], one["window"]) for one in told["budgets"]] == [(key_id, "day")]
