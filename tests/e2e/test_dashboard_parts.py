"""What the dashboard's modules do where a slow server, an old range or another zone decides."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tenancy.accounts.keys import create_key
from tenancy.accounts.tenants import find_tenant
from tenancy.types import wall_ms
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
    found = await in_page(page, body, history="charts/history")

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


async def test_small_amounts_are_not_zero(page: Page) -> None:
    """A few tokens at a low price; the largest amount says how many decimals all have."""
    body = """
      const amounts = [0, 12.345, 0.05, 0.004, "0.0000004", 0.000000000001, -0.00000025, null];
      const scale = [0.0000002, 1.5, 0.123456].map(format.exactDollars);
      return [amounts.map(format.dollars), scale, format.dollarsOf([5, 0.001])(0.001)];
    """
    found = await in_page(page, body, format="format")

    written = ["$0.00", "$12.35", "$0.0500", "$0.004000", "$0.000000400", "$0.000000000001"]
    assert found == [
        [*written, "−$0.000000250", "–"],
        ["$0.0000002", "$1.50", "$0.123456"],
        "$0.00",
    ]


async def test_a_sentence_keeps_the_name_of_a_field(page: Page) -> None:
    """It is what the reader has to look for in a request."""
    told = {
        "acme: the system message changes": "The system message changes",
        "acme: messages[0].content changes": "messages[0].content changes",
        "acme: cache_salt is another one": "cache_salt is another one",
        "asks for gpt-4o": "Asks for gpt-4o",
    }
    said = await in_page(
        page,
        f"""
        const box = document.createElement("div"), data = {{ findings: {list(told)}.map(
          (sentence, id) => ({{ tenant: "acme", sentence, finding_id: `f${{id}}`, title: "",
            cause: "", wasted_tokens: 0 }})) }};
        parts.render(parts.html`<${{findings.FindingList}} found=${{{{ data }}}} />`, box);
        return [...box.querySelectorAll(".says > p:not(.note)")].map((one) => one.textContent);
        """,
        findings="findings",
        parts="html",
    )

    assert said == list(told.values())


async def test_of_many_budgets_the_most_used_are_shown_first(page: Page) -> None:
    """Ten thousand bars would stop the page, and the one that is spent would be below them."""
    body = """
      const box = document.createElement("div");
      const all = Array.from({ length: 1000 }, (_, n) => ({ tenant: `t${n}`, window: "day",
        key_id: 0, hard_usd: "10", spent_usd: n === 999 ? "10" : "1", reserved_usd: "0" }));
      parts.render(parts.html`<${budgets.Budgets} budgets=${all} hasTenant />`, box);
      const items = () => box.querySelectorAll("li");
      const shown = [items().length, items()[0].querySelector("a").textContent];
      box.querySelector("button").click();
      while (items().length < 1000) await new Promise((go) => setTimeout(go, 0));
      shown.push(box.querySelectorAll("button").length);
      parts.render(null, box);
      return shown;
    """
    found = await in_page(page, body, parts="html", budgets="accounts/budgets")

    assert found == [100, "t999", 0]


async def test_a_poll_leaves_the_text_that_is_being_typed(page: Page) -> None:
    """A filter is set at the end of its text, and the page is drawn anew every five seconds."""
    body = """
      const box = document.createElement("div"), told = [];
      const draw = (value) => parts.render(parts.html`<${pieces.Search} label="Tenant"
        value=${value} set=${(text) => told.push(text)} />`, box);
      const turn = () => new Promise((go) => setTimeout(go, 0));
      draw("");
      const input = box.firstChild, shown = [];
      for (const [text, event] of [["ad", "input"], ["ada ", "input"], ["ada ", "change"]]) {
        input.value = text;
        input.dispatchEvent(new Event(event));
        await turn();
        draw("");
        shown.push(input.value);
      }
      draw("ada");
      input.dispatchEvent(new Event("blur"));
      while (input.value !== "ada") await turn();
      draw("bob");
      shown.push(input.value);
      parts.render(null, box);
      return [shown, told];
    """
    found = await in_page(page, body, parts="html", pieces="pieces")

    assert found == [["ad", "ada ", "ada ", "bob"], ["ada"]]


async def test_an_answer_to_an_earlier_key_signs_nobody_out(page: Page) -> None:
    """A poll was on its way when the key was changed."""
    body = """
      const load = window.fetch, told = [], { signedOut } = api.connection;
      let answer;
      window.fetch = () => new Promise((go) => { answer = go; });
      api.connection.signedOut = (error) => told.push(error.status);
      for (const next of ["another", "first"]) {
        api.keepKey("first");
        const asked = api.ask("/probe").catch(() => {});
        api.keepKey(next);
        answer(new Response("{}", { status: 401 }));
        await asked;
      }
      api.keepKey("");
      window.fetch = load;
      api.connection.signedOut = signedOut;
      return told;
    """
    found = await in_page(page, body, api="api")

    assert found == [401]


async def test_a_question_without_an_answer_is_given_up(page: Page) -> None:
    """A server that takes requests and never answers is a lost one; a change is not given up."""
    body = """
      const load = window.fetch, timeout = AbortSignal.timeout, clock = new AbortController();
      AbortSignal.timeout = () => clock.signal;
      window.fetch = (_, { signal, method }) => new Promise((answer, fail) => {
        signal?.addEventListener("abort", () => fail(signal.reason));
        if (method === "POST") answer(new Response("{}"));
      });
      const asked = api.ask("/probe").catch((error) => error.name);
      clock.abort(new DOMException("late", "TimeoutError"));
      const name = await asked, isLost = api.connection.since !== null;
      await api.ask("/probe", { method: "POST" });
      AbortSignal.timeout = timeout;
      window.fetch = load;
      return [name, isLost, api.connection.since];
    """
    found = await in_page(page, body, api="api")

    assert found == ["TimeoutError", True, None]


async def test_an_answer_that_is_no_json_is_an_error(page: Page) -> None:
    """A proxy's page with status 200 must not pass for data."""
    body = """
      const load = window.fetch;
      window.fetch = async () => new Response("<html>");
      const error = await api.ask("/probe").catch((one) => one);
      window.fetch = load;
      return [error instanceof api.Refused, error.isPassing, error.message];
    """
    found = await in_page(page, body, api="api")

    assert found == [True, True, "The answer is no JSON: it is not this server's."]


async def test_a_range_beyond_all_times_is_the_usual_one(page: Page) -> None:
    """An address that was written by hand must not leave an empty page."""
    body = """
      const query = (until) => new URLSearchParams({ since: 1, until });
      return [8e15, 9e15].map((until) => route.rangeOf(query(until)).name);
    """
    found = await in_page(page, body, route="route")

    assert found == ["24h", "24h"]


async def test_a_key_that_no_header_can_carry_is_refused_by_the_form(page: Page) -> None:
    """A pasted quotation mark; the server is not asked, and not said to be away."""
    valid = "return document.querySelector('#key').checkValidity()"
    found = []
    for key in ("“tl-key”", "tl-key", " tl-key "):
        page.find("#key").clear()
        page.find("#key").send_keys(key)
        found.append(page.browser.execute_script(valid))

    assert found == [False, True, True]


@pytest.mark.slow
async def test_an_overloaded_server_takes_no_key_away(page: Page, gateway: GatewayFixture) -> None:
    """The form keeps the key and tries again."""
    key = AdminClient(gateway).key
    page.browser.execute_script("""
      const load = window.fetch, error = { code: "overloaded", message: "Overloaded." };
      window.fetch = async () => {
        window.fetch = load;
        return new Response(JSON.stringify({ error }), { status: 503 });
      };
    """)

    def act() -> Any:
        page.find("#key").send_keys(key)
        page.press("Sign in")
        page.see("Overloaded; trying again.")
        kept = page.browser.execute_script("return sessionStorage.getItem('key')")
        page.see("Hit ratio")
        return kept

    assert await asyncio.to_thread(act) == key


@pytest.mark.slow
async def test_a_new_key_stays_while_the_server_is_busy(
    page: Page, gateway: GatewayFixture
) -> None:
    """It is shown once: a poll that fails must not take it away."""
    await signed_in(page.browser, page.url, AdminClient(gateway).key)

    def act() -> bool:
        page.open("tenants/ada", "Refusals by code")
        page.press("New key")
        page.press("Create key", "dialog")
        page.see("shown once")
        secret = str(page.find("dialog pre").text)
        page.browser.execute_script("""
          const load = window.fetch, error = { code: "busy", message: "A busy server." };
          window.fetch = async (path, options) => (path !== "/admin/v1/tenants/ada"
            ? load(path, options) : new Response(JSON.stringify({ error }), { status: 503 }));
          document.dispatchEvent(new Event("visibilitychange"));
        """)
        page.see("A busy server.")
        return str(page.find("dialog pre").text) == secret

    assert await asyncio.to_thread(act)


@pytest.mark.slow
async def test_an_administrators_key_is_shown_beside_a_thousand_of_tenants(
    page: Page, gateway: GatewayFixture
) -> None:
    """And all of a tenant's."""
    tenant_id = find_tenant(gateway.store, "ada").tenant_id
    for number in range(1_000):
        create_key(gateway.store, wall_ms, tenant_id, label=f"made {number}")
    await signed_in(page.browser, page.url, AdminClient(gateway).key)

    await asyncio.to_thread(page.open, "access", "this one")
    text = await asyncio.to_thread(page.open, "tenants/ada", "Show all 1,001 rows")

    assert "Only the first" not in text


DRAFT_ROWS = """
  const table = [...document.querySelectorAll("table")].find((one) =>
    one.querySelector("caption")?.textContent === "Drafts by tenant and source");
  return [...table.querySelectorAll("tbody tr")].map((row) =>
    [...row.children].map((cell) => cell.textContent.trim()));
"""


async def test_engine_shows_drafts_by_tenant_and_source(
    unopened_gateway: GatewayFixture, browser: Any
) -> None:
    """Drafted, accepted, their share and the steps saved are those of the API."""
    gateway = unopened_gateway
    gateway.draft_step_s = (1.0,) * 64
    await gateway.open()
    gateway.say("one line after another, and one line after another, and one line after another")
    for who in ("ada", "bob", "bob"):
        await gateway.ask(body=gateway.chat(max_tokens=40), who=who)
    admin = AdminClient(gateway)
    counted = (await admin.ask("GET", "/admin/v1/analytics"))[1]["drafts"]
    page = await signed_in(browser, gateway.admin_url, admin.key, "Requests by ending")
    browser.get_log("browser")
    await asyncio.to_thread(page.open, "engine", "Drafts")
    shown = await asyncio.to_thread(page.browser.execute_script, DRAFT_ROWS)
    faults = await asyncio.to_thread(page.faults)
    errors = [line["message"] for line in browser.get_log("browser")]
    await gateway.close()

    wanted = [
        [
            *(one["tenant"], one["source"], str(one["drafted"]), str(one["accepted"])),
            f"{100 * one['accepted'] / one['drafted']:.1f} %",
            str(one["accepted"]),
        ]
        for one in counted
    ]
    assert {"ada", "bob"} == {one["tenant"] for one in counted}
    assert sorted(shown) == sorted(wanted)
    assert (faults, errors) == ([], [])
