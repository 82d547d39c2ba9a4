"""Gateways and the command line over a PostgreSQL server.

A blocking call on the event loop fails any test here; a query to the server is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.model_store import ModelCard
from gateway.__main__ import main
from gateway.background.history_sampling import HistorySampling
from tenancy.accounting.audit import check_books
from tenancy.accounting.reconcile import reconcile_living
from tenancy.accounts.tenants import change_tenant
from tenancy.storage import postgres
from tenancy.storage.postgres import PostgresStore
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.api.test_cached_contents import ALL, create, question
from tests.unit.gateway.gateway_fixture import PATIENCE_S, GatewayFixture
from tests.unit.tenancy.storage.postgres_server import Server, own_server


@pytest.fixture
def database(postgres_server: Server) -> str:
    return postgres_server.database()


@pytest.fixture
async def first(
    card: ModelCard, tmp_path: Path, postgres_server: Server, database: str
) -> AsyncIterator[GatewayFixture]:
    """Yield a gateway with the tenants `ada` and `bob`."""
    store = await asyncio.to_thread(PostgresStore, postgres_server.address(database))
    gateway = await asyncio.to_thread(GatewayFixture, card, tmp_path, store)
    await gateway.open()
    yield gateway
    await gateway.close()
    await asyncio.to_thread(gateway.discard)


@pytest.fixture
async def second(
    card: ModelCard, tmp_path: Path, first: GatewayFixture
) -> AsyncIterator[GatewayFixture]:
    """Yield another gateway over the same database."""
    store = await asyncio.to_thread(first.store.open_another)
    gateway = await asyncio.to_thread(GatewayFixture, card, tmp_path, store)
    await gateway.open()
    yield gateway
    await gateway.close()
    await asyncio.to_thread(gateway.discard)


@pytest.fixture
async def beside(
    card: ModelCard, tmp_path: Path, first: GatewayFixture
) -> AsyncIterator[GatewayFixture]:
    """Yield another gateway over the same database and the same engine."""
    store = await asyncio.to_thread(first.store.open_another)
    gateway = await asyncio.to_thread(GatewayFixture, card, tmp_path, store)
    gateway.keys, gateway.beside = first.keys, first
    await gateway.open()
    yield gateway
    await gateway.close()
    await asyncio.to_thread(gateway.discard)


async def poll_until(gateway: GatewayFixture, status: int, key: str | None = None) -> None:
    """Ask until the answer matches: changes reach other gateways within a second."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with asyncio.timeout(PATIENCE_S):
        while True:
            got, _, _ = await gateway.ask(
                body=gateway.chat(), who=None if key else "ada", headers=headers
            )
            if got == status:
                return
            await asyncio.sleep(0.02)


async def test_two_gateways_share_one_ledger(first: GatewayFixture, second: GatewayFixture) -> None:
    """Under concurrent load; then every sum, chain and charge is correct, and no hold is open."""
    asked = [gateway.ask(body=gateway.chat()) for _ in range(12) for gateway in (first, second)]
    statuses = [status for status, _, _ in await asyncio.gather(*asked)]
    _, text, _ = await first.ask(body=first.chat(stream=True))
    for gateway in (first, second):
        await gateway.quiet()
    rows = await asyncio.to_thread(
        first.store.query, "select count(*), count(distinct request_id) from ledger"
    )
    held = await asyncio.to_thread(first.store.query, "select count(*) from holds")
    findings = await asyncio.to_thread(check_books, first.store)

    assert statuses == [200] * 24
    assert text.rstrip().endswith("[DONE]")
    assert (rows, held, findings) == ([(25, 25)], [(0,)], [])


async def test_two_gateways_on_one_engine_agree_with_it_to_the_token(
    first: GatewayFixture, beside: GatewayFixture
) -> None:
    """Whoever looks: tokens of both are in the engine's counts, and what is held is billed once."""
    await poll_until(beside, 200, first.keys["ada"])
    texts = ["one " * 40, "one " * 40, "two " * 9]
    asked = [gateway.ask(body=first.chat(one)) for one in texts for gateway in (first, beside)]
    statuses = [status for status, _, _ in await asyncio.gather(*asked)]
    _, hit, _ = await beside.ask(body=beside.chat("one " * 40))
    for gateway in (first, beside):
        await gateway.quiet()
        await gateway.gateway.reconciler.note()
    for gateway in (first, beside):
        await gateway.gateway.reconciler.note()
    living = await asyncio.to_thread(reconcile_living, first.store, "1")
    agree = [await one.gateway.reconciler.check() for one in (first, beside)]
    least = sum(one.token_seconds for one in (await first.engine.get_held()).readings)
    await asyncio.gather(*(one.gateway.metering.write() for one in (first, beside)))
    held = sum(one.token_seconds for one in (await first.engine.get_held()).readings)
    ((billed,),) = await asyncio.to_thread(
        first.store.query, "select coalesce(sum(token_seconds), 0) from storage_hours"
    )

    assert statuses == [200] * 6
    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert living is not None
    assert (living.state, living.gateways, agree) == ("running", 2, [True, True])
    assert living.ledger == living.engine == living.metrics
    assert living.ledger.output_tokens >= 7 * 8
    assert 0 < least <= billed <= held


async def test_other_gateway_replays_a_stored_response(
    first: GatewayFixture, second: GatewayFixture
) -> None:
    """Also while the request runs: a retry reaches either gateway."""
    headers = {"Idempotency-Key": "n", "Authorization": f"Bearer {first.keys['ada']}"}
    first.runner.hold_after(4)
    running = asyncio.create_task(first.ask(body=first.chat(), who=None, headers=headers))
    await first.until(lambda: first.runner.steps >= 4)
    await poll_until(second, 200, first.keys["ada"])
    early, error, _ = await second.ask(body=second.chat(), who=None, headers=headers)
    first.runner.release()
    status, one, _ = await running
    again, two, response = await second.ask(body=second.chat(), who=None, headers=headers)

    assert (early, error["error"]["code"]) == (409, "idempotency_in_flight")
    assert (status, again, one) == (200, 200, two)
    assert response.headers["Idempotency-Replayed"] == "true"


async def test_gateways_share_cached_contents(
    first: GatewayFixture, second: GatewayFixture
) -> None:
    """Created in one, used and ended in the other; no event loop waits for the server."""
    await poll_until(second, 200, first.keys["ada"])
    mine = {"Authorization": f"Bearer {first.keys['ada']}"}
    resource = await create(first)
    path, body = question(second, resource["name"])
    used, answer, _ = await second.ask(path, body, who=None, headers=mine)
    _, listed, _ = await second.ask(ALL, who=None, headers=mine, method="GET")
    one = f"/v1beta/{resource['name']}"
    changed, _, _ = await second.ask(one, {"ttl": "7200s"}, who=None, headers=mine, method="PATCH")
    ended, _, _ = await second.ask(one, who=None, headers=mine, method="DELETE")
    again, _, _ = await first.ask(*question(first, resource["name"]))

    tokens = resource["usageMetadata"]["totalTokenCount"]
    assert answer["usageMetadata"]["cachedContentTokenCount"] == tokens
    assert [found["name"] for found in listed["cachedContents"]] == [resource["name"]]
    assert (used, changed, ended, again) == (200, 200, 200, 403)


async def test_changes_reach_the_other_gateway_within_a_second(
    first: GatewayFixture, second: GatewayFixture
) -> None:
    """Tenants and keys, created and suspended by the admin API."""
    admin = await asyncio.to_thread(AdminClient, first)
    await poll_until_admin(admin)
    made, _ = await admin.ask("POST", "/admin/v1/tenants", {"name": "eve"})
    status, key = await admin.ask("POST", "/admin/v1/tenants/eve/keys", {})
    await poll_until(second, 200, key["key"])
    suspended, _ = await admin.ask("PATCH", "/admin/v1/tenants/eve", {"status": "suspended"})
    await poll_until(second, 403, key["key"])

    assert (made, status, suspended) == (201, 201, 200)


async def poll_until_admin(admin: AdminClient) -> None:
    """Wait until the gateway accepts the administrator's new key."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status, _ = await admin.ask("GET", "/admin/v1/tenants")
            if status == 200:
                return
            await asyncio.sleep(0.02)


private_server = pytest.fixture(own_server)
"""A server that a test may stop."""


def use_all_connections(name: str) -> list[tuple[str, str, object]]:
    """Send queries on each connection that a gateway has beside its ledger's."""
    return [
        ("POST", "/admin/v1/tenants", {"name": name}),
        ("GET", "/admin/v1/usage", None),
        ("GET", "/admin/v1/tenants", None),
    ]


async def test_server_outage_refuses_requests_with_retry_after(
    card: ModelCard, tmp_path: Path, private_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503; the gateway resumes by itself when the server is back."""
    monkeypatch.setattr(postgres, "RECONNECT_S", 0.5)
    name = await asyncio.to_thread(private_server.database)
    store = await asyncio.to_thread(PostgresStore, private_server.address(name))
    gateway = await asyncio.to_thread(GatewayFixture, card, tmp_path, store)
    await gateway.open()
    try:
        admin = await asyncio.to_thread(AdminClient, gateway)
        await poll_until_admin(admin)
        before, _, _ = await gateway.ask(body=gateway.chat())
        asked = [(await admin.ask("GET", "/admin/v1/usage"))[0]]
        await asyncio.to_thread(private_server.kill)
        away, _, answer = await gateway.ask(body=gateway.chat())
        asked += [(await admin.ask(*question))[0] for question in use_all_connections("eve")]
        await asyncio.to_thread(private_server.start)
        await poll_until(gateway, 200)
        asked += [(await admin.ask(*question))[0] for question in use_all_connections("gus")]
        await gateway.quiet()
        endings = await asyncio.to_thread(store.query, "select distinct ending from ledger")
        findings = await asyncio.to_thread(check_books, store)
    finally:
        await gateway.close()
        await asyncio.to_thread(gateway.discard)

    assert (before, away) == (200, 503)
    assert asked == [200, 503, 503, 503, 201, 200, 200]
    assert int(answer.headers["retry-after"]) > 0
    assert (endings, findings) == ([("done",)], [])


def test_commands_work_on_postgresql(
    tmp_path: Path,
    postgres_server: Server,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line of configuration; the password is in the environment, and never shown."""
    config = tmp_path / "trunkline.toml"
    url = postgres_server.url(postgres_server.database(is_empty=True))
    listen = '[server]\nlisten = "127.0.0.1:0"\n[admin]\nlisten = "127.0.0.1:0"\n'
    config.write_text(f'data_dir = "{tmp_path}/data"\n{listen}[tenancy]\ndatabase = "{url}"\n')
    monkeypatch.setenv("TRUNKLINE_CONFIG", str(config))
    monkeypatch.setenv("PGPASSWORD", "secret")
    commands = (
        *("doctor", "tenant create ada --weight 2", "key create --tenant ada", "key list"),
        *("tenant list", "tenant set ada --priority 3", "key rotate 2", "key revoke 2", "usage"),
        *("check-books", "tenant suspend ada", "reconcile", "close --list", "check-config"),
        "doctor",
    )
    statuses = {command: main(command.split()) for command in commands}
    out, err = capsys.readouterr()

    assert {command: status for command, status in statuses.items() if status} == {}
    assert (err, "secret" in out) == ("", False)
    assert not (tmp_path / "data" / "trunkline.db").exists()


@pytest.mark.parametrize("command", ["check-config", "tenant list"])
def test_refuses_a_password_in_the_address_without_repeating_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    config = tmp_path / "trunkline.toml"
    config.write_text('tenancy.database = "postgresql://ada:secret@h/books"\n')
    monkeypatch.setenv("TRUNKLINE_CONFIG", str(config))
    status = main(command.split())
    out, err = capsys.readouterr()

    assert (status, out, "secret" in err) == (2, "", False)
    assert "tenancy.database" in err
    assert "no password" in err


@pytest.mark.usefixtures("no_periodic_tasks")
async def test_gateways_show_each_others_refusals(
    first: GatewayFixture, second: GatewayFixture
) -> None:
    """In a tenant's state, in charts and in the list of requests, once a minute has ended."""
    await asyncio.to_thread(change_tenant, first.store, "ada", {"requests_per_minute": 1})
    first.gateway.context.authenticator.refresh_now()
    await poll_until(first, 429)
    await first.quiet()
    first.gateway.context.ended_requests.gateway_id = "first"
    await HistorySampling(first.gateway.context).close()
    admin = await asyncio.to_thread(AdminClient, second)
    await poll_until_admin(admin)
    _, state = await admin.ask("GET", "/admin/v1/tenants/ada/state")
    _, history = await admin.ask("GET", "/admin/v1/history?range=1h&tenant=ada")
    _, requests = await admin.ask("GET", "/admin/v1/requests?tenant=ada")
    series = history["series"]

    assert (state["status"], state["refusals_last_hour"]) == (
        "limited",
        {"rate_limit_exceeded": 1},
    )
    assert sum(one or 0 for one in series["refused"]) == 1
    assert sum(one or 0 for one in series["requests"]) == len(requests["requests"]) - 1 > 0
    assert [one["ending"] for one in requests["requests"][:2]] == ["refused", "done"]
