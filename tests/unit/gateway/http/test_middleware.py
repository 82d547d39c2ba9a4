"""The middleware: ids, keys, roles, errors as bytes, the log line."""

from __future__ import annotations

import gc
import json

import pytest

from gateway.dialects.canonical import Call
from gateway.errors import Refusal
from gateway.http import authentication
from gateway.http.middleware import (
    PAYERS_MAX,
    REFUSAL_WAIT_S_MAX,
    REFUSALS_AT_ONCE,
    REFUSALS_PER_S,
    RefusalPace,
)
from gateway.http.route_table import canonical
from tenancy.accounts import authentication as registry
from tenancy.accounts.keys import (
    create_admin_key,
    create_key,
    find_key,
    is_key,
    list_keys,
    revoke_key,
)
from tenancy.accounts.tenants import find_tenant, set_status
from tenancy.types import wall_ms
from tests.actors import TESTER
from tests.tables import each_row
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture

DECLARED = {
    ("POST", "/v1/chat/completions"): 401,
    ("POST", "/chat/completions"): 401,
    ("POST", "/completions"): 401,
    ("POST", "/v1/completions"): 401,
    ("POST", "/v1/embeddings"): 401,
    ("POST", "/embeddings"): 401,
    ("POST", "/v1/cache/quote"): 401,
    ("POST", "/{version}/models/{target}"): 401,
    ("POST", "/{version}/cachedContents"): 401,
    ("GET", "/{version}/cachedContents"): 401,
    ("GET", "/{version}/cachedContents/{name}"): 401,
    ("PATCH", "/{version}/cachedContents/{name}"): 401,
    ("DELETE", "/{version}/cachedContents/{name}"): 401,
    ("GET", "/v1/models"): 401,
    ("GET", "/v1/models/{name}"): 401,
    ("GET", "/models"): 401,
    ("GET", "/models/{name}"): 401,
    ("GET", "/v1beta/models"): 401,
    ("GET", "/v1beta/models/{name}"): 401,
    ("GET", "/v1alpha/models"): 401,
    ("GET", "/v1alpha/models/{name}"): 401,
    ("POST", "/v1/messages"): 401,
    ("POST", "/v1/messages/count_tokens"): 401,
    **{
        (method, base + path): 401
        for base in ("/v1/conversations", "/conversations")
        for method, path in (
            ("POST", ""),
            ("GET", "/{id}"),
            ("POST", "/{id}"),
            ("DELETE", "/{id}"),
            ("GET", "/{id}/items"),
            ("POST", "/{id}/items"),
            ("GET", "/{id}/items/{item}"),
            ("DELETE", "/{id}/items/{item}"),
        )
    },
    **{
        (method, base + path): 401
        for base in ("/v1/responses", "/responses")
        for method, path in (
            ("POST", ""),
            ("POST", "/input_tokens"),
            ("GET", "/{id}"),
            ("DELETE", "/{id}"),
            ("POST", "/{id}/cancel"),
            ("GET", "/{id}/input_items"),
        )
    },
    ("POST", "/tokenize"): 401,
    ("POST", "/detokenize"): 401,
    ("GET", "/tokenizer_info"): 401,
    ("GET", "/v1/usage"): 401,
    ("GET", "/v1/state"): 401,
    ("GET", "/v1/findings"): 401,
    ("GET", "/openapi.json"): 200,
    ("GET", "/v1/cache"): 401,
    ("DELETE", "/v1/cache"): 401,
    ("GET", "/healthz"): 200,
    ("GET", "/health"): 200,
    ("GET", "/readyz"): 200,
}
"""Every route of the public listener, and its status for a request without a key."""


async def test_every_public_route_has_the_declared_status_without_a_key(
    gateway: GatewayFixture,
) -> None:
    """C8: a new route without a role fails this test."""
    routes = {
        (route.method, canonical(route.path))
        for route in gateway.gateway.public().routes
        if not route.path.startswith("/dashboard")  # files, which are open
    }
    answers = {
        (method, path): (
            await gateway.ask(
                path.format(name="x", version="v1", target="m:generateContent", id="x", item="x"),
                method=method,
                who=None,
            )
        )[0]
        for method, path in routes
    }

    assert answers == DECLARED


PLACES = {
    "/v1/chat/completions": "Authorization: Bearer",
    "/v1/messages": "X-Api-Key",
    "/v1beta/models/tiny:generateContent": "X-Goog-Api-Key",
}


@each_row("is_admin", [False, True])
@each_row(("path", "place"), PLACES.items())
@each_row("key", ["", "sk-of-another-service"])
async def test_a_refused_key_is_told_what_would_be_right(
    gateway: GatewayFixture, path: str, place: str, key: str, is_admin: bool
) -> None:
    """In each dialect the header that its clients set, and the command that makes a key."""
    headers = {place.partition(":")[0]: f"Bearer {key}" if ":" in place else key}
    if is_admin:
        async with gateway.session.get(
            gateway.admin_url + "/admin/v1/tenants", headers=headers
        ) as answer:
            told, place = await answer.text(), "Authorization: Bearer"
    else:
        _, body, _ = await gateway.ask(path, {}, who=None, headers=headers)
        told = json.dumps(body)

    assert ("Unknown key" if key else "Missing API key") in told
    assert f"prints, in {place}." in told
    assert ("`trunkline key create --admin`" in told) == is_admin


async def test_a_slip_in_an_administrators_path_names_the_right_one(
    gateway: GatewayFixture,
) -> None:
    """And what belongs to the public listener says so."""
    told = {}
    for path in ("/admin/v1/tenant", "/v1/chat/completions"):
        async with gateway.session.get(gateway.admin_url + path) as answer:
            told[path] = (await answer.json())["error"]["message"]

    assert "expected '/admin/v1/tenants'" in told["/admin/v1/tenant"]
    assert "served on the public one" in told["/v1/chat/completions"]


BAD_KEYS = [
    {},
    {"Authorization": ""},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer "},
    {"Authorization": "Bearer x"},
    {"Authorization": "Basic eDp5"},
    {"Authorization": "Bearer " + "k" * 7_000},
    {"Authorization": "Bearer ' OR 1=1--"},
    {"Authorization": "Bearer %00"},
    {"Authorization": "Bearer kl\u00fcssel"},
]


@each_row("headers", BAD_KEYS)
async def test_every_bad_key_gets_the_same_401(
    gateway: GatewayFixture, headers: dict[str, str]
) -> None:
    """C1, C5: the body is not read, and the key is never echoed."""
    status, answer, response = await gateway.ask(body=b"not json", who=None, headers=headers)

    assert status == 401, answer
    assert answer["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    given = headers.get("Authorization", "").removeprefix("Bearer").strip()
    assert len(given) < 3 or given not in json.dumps(answer)
    assert len(given) < 3 or given not in json.dumps(gateway.lines)
    await gateway.check_quiet()


async def test_prefix_of_a_key_is_refused(gateway: GatewayFixture) -> None:
    """C6: an authentication cache keyed by part of the key would confuse tenants."""
    for cut in (20, 30, -1):
        key = gateway.keys["ada"][:cut]
        status, _, _ = await gateway.ask(
            body=gateway.chat(), who=None, headers={"Authorization": f"Bearer {key}"}
        )
        assert status == 401


async def test_two_different_keys_are_refused_and_the_same_key_twice_is_accepted(
    gateway: GatewayFixture,
) -> None:
    """C4: a proxy and the gateway might pick different keys."""
    other, _, _ = await gateway.ask(body=gateway.chat(), headers={"X-Api-Key": gateway.keys["bob"]})
    same, _, _ = await gateway.ask(body=gateway.chat(), headers={"X-Api-Key": gateway.keys["ada"]})

    assert (other, same) == (400, 200)


async def test_headers_that_name_another_tenant_are_ignored(gateway: GatewayFixture) -> None:
    """C3: the key alone identifies the tenant."""
    headers = {"X-Tenant": "bob", "OpenAI-Organization": "bob", "OpenAI-Project": "bob"}
    await gateway.ask(body=gateway.chat(), headers=headers)

    rows = gateway.store.query("select name from ledger join tenants using (tenant_id)")
    assert rows == [("ada",)]


async def test_revoked_key_gets_401_and_suspended_tenant_403(
    gateway: GatewayFixture,
) -> None:
    """C2, C7: the command line changes the database beside a running server."""
    tenant = find_tenant(gateway.store, "ada")
    second = create_key(gateway.store, wall_ms, tenant.tenant_id)
    revoke_key(gateway.store, wall_ms, str(list_keys(gateway.store, "ada")[-1].key_id), by=TESTER)
    set_status(gateway.store, "bob", "suspended")
    gateway.gateway.context.authenticator.refresh_now()  # as after a write by another process

    revoked, error, _ = await gateway.ask(
        "/v1/models", method="GET", who=None, headers={"Authorization": f"Bearer {second}"}
    )
    suspended, _, _ = await gateway.ask("/v1/models", method="GET", who="bob")

    assert (revoked, error["error"]["code"]) == (401, "invalid_api_key")
    assert suspended == 403
    assert second not in json.dumps(error)


async def test_refusals_of_a_former_key_belong_to_its_tenant(gateway: GatewayFixture) -> None:
    """Else a tenant whose key was revoked, or that is suspended, looks idle."""
    tenant = find_tenant(gateway.store, "ada")
    dead = create_key(gateway.store, wall_ms, tenant.tenant_id)
    key_id = list_keys(gateway.store, "ada")[-1].key_id
    revoke_key(gateway.store, wall_ms, str(key_id), by=TESTER)
    set_status(gateway.store, "bob", "suspended")
    context = gateway.gateway.context
    context.authenticator.refresh_now()
    for headers in (gateway.headers("bob"), {"Authorization": f"Bearer {dead}"}, {}):
        await gateway.ask(body=gateway.chat(), who=None, headers=headers)
    await gateway.gateway.sampling.count_ended()
    lines = [line for line in gateway.lines if line["event"] == "request"]
    text = context.metrics.exposition().decode()

    assert {
        who: dict(codes) for who, codes in context.ended_requests.refusals_last_hour().items()
    } == {
        0: {"tenant_suspended": 1, "invalid_api_key": 2},
        1: {"invalid_api_key": 1},
        2: {"tenant_suspended": 1},
    }
    assert [(line["tenant"], line["key_id"]) for line in lines] == [
        ("bob", 2),
        ("ada", key_id),
        (None, None),
    ]
    assert 'trunkline_tenant_refusals_total{code="tenant_suspended",tenant="bob"} 1.0' in text


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def wrong_keys_max(gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return a small limit of wrong keys, in a minute that does not end."""
    monkeypatch.setattr(authentication, "WRONG_KEYS_PER_MINUTE_MAX", 3)
    gateway.clock = lambda: 1_000.0
    return 3


@pytest.fixture
def rare_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry reads changes an hour later, unless it is asked to."""
    monkeypatch.setattr(registry, "REFRESH_S", 3_600.0)


def unannounced_key(gateway: GatewayFixture, listener: str) -> tuple[str, str]:
    """Make a key as another process does; return it and an address that asks for one."""
    if listener == "admin":
        made = create_admin_key(gateway.store, wall_ms, by=TESTER)
        return made, f"{gateway.admin_url}/admin/v1/tenants"
    ada = find_tenant(gateway.store, "ada").tenant_id
    return create_key(gateway.store, wall_ms, ada), f"{gateway.url}/v1/models"


@pytest.mark.usefixtures("rare_reads")
@pytest.mark.parametrize("listener", ["public", "admin"])
async def test_a_key_works_from_the_moment_in_which_it_is_made(
    gateway: GatewayFixture, listener: str
) -> None:
    """A script makes one and asks with it in the next line."""
    key, url = unannounced_key(gateway, listener)
    revoked = create_key(gateway.store, wall_ms, 1)
    revoke_key(gateway.store, wall_ms, str(find_key(gateway.store, revoked).key_id), by=TESTER)
    headers = {"Authorization": f"Bearer {key}", "x-api-key": revoked}
    async with gateway.session.get(url, headers=headers) as response:
        assert response.status == 200


@pytest.mark.usefixtures("rare_reads")
async def test_a_flood_of_unknown_keys_reads_the_database_a_bounded_number_of_times(
    gateway: GatewayFixture, wrong_keys_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the bound a new key waits for the next regular read."""
    monkeypatch.setattr(authentication, "LOOKUPS_PER_SECOND_MAX", 2)
    monkeypatch.setattr(authentication, "WRONG_KEYS_PER_MINUTE_MAX", 100)
    unknown = [f"tl-{number:043}" for number in range(2)]
    for wrong in unknown:
        await gateway.ask("/v1/models", method="GET", who=None, headers=bearer(wrong))
    key, url = unannounced_key(gateway, "public")
    statuses = []
    for _ in range(2):
        async with gateway.session.get(url, headers=bearer(key)) as response:
            statuses.append(response.status)
        gateway.gateway.context.authenticator.refresh_now()

    assert all(map(is_key, unknown))
    assert statuses == [401, 200]


@pytest.mark.parametrize("listener", ["public", "admin"])
async def test_wrong_key_limit_does_not_affect_good_keys(
    gateway: GatewayFixture, wrong_keys_max: int, listener: str
) -> None:
    """C14: tenants may share an address with a client that guesses keys."""
    url, good = f"{gateway.url}/v1/models", gateway.keys["ada"]
    if listener == "admin":
        url, good = f"{gateway.admin_url}/admin/v1/tenants", AdminClient(gateway).key
    statuses = []
    for key in (*["wrong"] * (wrong_keys_max + 1), good):
        headers = {"Authorization": f"Bearer {key}"}
        async with gateway.session.get(url, headers=headers) as response:
            statuses.append(response.status)

    assert statuses == [*[401] * wrong_keys_max, 429, 200]


async def test_wrong_keys_beside_a_good_one_are_guesses_too(
    gateway: GatewayFixture, wrong_keys_max: int
) -> None:
    """Otherwise a tenant could guess its neighbours' keys without a limit."""
    statuses = []
    for guess in [*["placeholder"] * 4, *map(str, range(wrong_keys_max))]:
        headers = {**gateway.headers("ada"), "x-api-key": guess}
        status, _, _ = await gateway.ask("/v1/models", method="GET", who=None, headers=headers)
        statuses.append(status)

    assert statuses == [*[200] * (4 + wrong_keys_max - 1), 429]


async def test_valid_key_beside_another_services_key_is_served(gateway: GatewayFixture) -> None:
    """Claude Code behind a gateway sends a cached x-api-key; a proxy adds its own login."""
    ada, bob = gateway.keys["ada"], gateway.keys["bob"]
    for headers, expected in (
        ({"Authorization": f"Bearer {ada}", "x-api-key": "sk-old"}, 200),
        ({"Authorization": "Bearer dummy", "x-api-key": ada}, 200),
        ({"Authorization": "Bearer ", "x-api-key": ada}, 200),
        ({"Authorization": "Basic dTpw", "x-goog-api-key": ada}, 200),
        ({"Authorization": f"Bearer {ada}", "x-api-key": bob}, 400),
        ({"Authorization": "Bearer dummy", "x-api-key": "sk-old"}, 401),
    ):
        status, _, _ = await gateway.ask("/v1/models", method="GET", who=None, headers=headers)

        assert status == expected, headers


async def test_administrators_key_counts_beside_a_tenants(gateway: GatewayFixture) -> None:
    url = f"{gateway.admin_url}/admin/v1/tenants"
    administrator = f"Bearer {AdminClient(gateway).key}"
    headers = {"Authorization": administrator, "x-api-key": gateway.keys["ada"]}
    async with gateway.session.get(url, headers=headers) as response:
        assert response.status == 200


async def test_revoked_and_suspended_keys_do_not_count_as_wrong_keys(
    gateway: GatewayFixture, wrong_keys_max: int
) -> None:
    """Clients behind a proxy share an address: retries of a suspended tenant must not use up the
    wrong-key limit, neither its own nor its neighbours'."""
    tenant = find_tenant(gateway.store, "ada")
    dead = create_key(gateway.store, wall_ms, tenant.tenant_id)
    revoke_key(gateway.store, wall_ms, str(list_keys(gateway.store, "ada")[-1].key_id), by=TESTER)
    set_status(gateway.store, "bob", "suspended")
    gateway.gateway.context.authenticator.refresh_now()
    seen = set()
    for headers in (gateway.headers("bob"), {"Authorization": f"Bearer {dead}"}):
        for _ in range(wrong_keys_max + 1):
            status, _, _ = await gateway.ask("/v1/models", method="GET", who=None, headers=headers)
            seen.add(status)
    headers = {"Authorization": "Bearer wrong"}
    wrong, _, _ = await gateway.ask("/v1/models", method="GET", who=None, headers=headers)

    assert (seen, wrong) == ({401, 403}, 401)


async def test_request_log_line_has_no_prompt_and_no_key(gateway: GatewayFixture) -> None:
    """The log holds ids and counts only."""
    await gateway.ask(body=gateway.chat("the planted prompt"))
    (line,) = [line for line in gateway.lines if line["event"] == "request"]

    assert line["route"] == "/v1/chat/completions"
    assert (line["status"], line["ending"], line["output_tokens"]) == (200, "done", 8)
    assert (line["tenant"], line["address"]) == ("ada", "127.0.0.1")
    assert "planted" not in json.dumps(gateway.lines)
    assert gateway.keys["ada"] not in json.dumps(gateway.lines)


async def test_unexpected_error_is_a_500_and_its_message_is_not_logged(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception's message holds a prompt, as a real one may."""

    def broken(*_: object) -> object:
        raise ValueError("the planted prompt")

    monkeypatch.setattr(gateway.renderer, "render", broken)
    status, answer, _ = await gateway.ask(body=gateway.chat())

    assert (status, answer["error"]["code"]) == (500, "internal_error")
    assert "planted" not in json.dumps([answer, gateway.lines])
    assert any(line.get("error") == "ValueError" for line in gateway.lines)
    monkeypatch.undo()
    await gateway.check_quiet()


async def test_server_header_names_no_version(gateway: GatewayFixture) -> None:
    """Attackers look up known defects by version: check responses, refusals and probes."""
    responses = [
        (await gateway.ask(body=gateway.chat()))[2],
        (await gateway.ask(body=b"{"))[2],
        (await gateway.ask("/healthz", method="GET", who=None))[2],
    ]

    assert [response.headers["server"] for response in responses] == ["trunkline"] * 3


def _live_calls_and_refusals() -> list[object]:
    return [found for found in gc.get_objects() if type(found) in (Refusal, Call)]


TOO_LONG = [{"role": "user", "content": "hello " * 120}]


@pytest.mark.parametrize("more", [{"temperature": 99}, {"model": "none"}, {"messages": TOO_LONG}])
async def test_refused_request_is_freed_without_the_garbage_collector(
    gateway: GatewayFixture, more: dict[str, object]
) -> None:
    """A reference cycle of refusal, traceback and frame kept the whole request body alive until
    the garbage collector ran, which is rare."""
    gc.collect()
    gc.disable()
    try:
        others = _live_calls_and_refusals()  # constants of other tests in this process
        body = {**gateway.chat("hello " * 9), **more}
        statuses = {(await gateway.ask(body=body))[0] for _ in range(3)}
        live = _live_calls_and_refusals()
        kept = [found for found in live if not any(found is old for old in others)]
    finally:
        gc.enable()

    assert statuses <= {400, 404}
    assert kept == []


async def test_refused_strangers_fill_no_log(gateway: GatewayFixture) -> None:
    """Twenty lines a second for all of them, and a count of the rest; a tenant has its own."""
    gateway.clock = lambda: 1_000.0
    for _ in range(50):
        await gateway.ask(body=gateway.chat(), who=None)
    for _ in range(25):
        await gateway.ask(body=b"{", who="bob")
    await gateway.ask(body=gateway.chat())

    def refused(tenant_id: int | None) -> int:
        lines = [line for line in gateway.lines if line.get("ending") == "refused"]
        return sum(line["tenant_id"] == tenant_id for line in lines)

    # A line is written after its answer, which the client may have read before.
    await gateway.until(lambda: any(line.get("ending") == "done" for line in gateway.lines))
    await gateway.until(lambda: refused(None) >= 20 <= refused(2))
    await gateway.quiet()
    assert (refused(None), refused(2)) == (20, 20)


async def test_a_connection_error_of_ours_is_an_internal_error(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the client's own connection may end its request without an answer and without a log
    line of an error."""

    def refuse(_: object, *, may_move: bool) -> None:
        raise ConnectionRefusedError("the planted address")

    monkeypatch.setattr(gateway.engine, "submit", refuse)
    status, answer, _ = await gateway.ask(body=gateway.chat())
    await gateway.until(lambda: any(line["event"] == "request" for line in gateway.lines))

    assert (status, answer["error"]["code"]) == (500, "internal_error")
    assert [line["error"] for line in gateway.lines if line["event"] == "error"] == [
        "ConnectionRefusedError"
    ]
    assert "planted" not in json.dumps(gateway.lines)


async def test_refusal_for_want_of_a_scope_says_which_key_has_it(gateway: GatewayFixture) -> None:
    """An administrator of another scope, a tenant at the admin API, an administrator at a paid
    one."""
    reader = create_admin_key(gateway.store, wall_ms, scopes=("read", "tenants"), by=TESTER)
    card = f"{gateway.admin_url}/admin/v1/rate-cards"
    told = []
    for key, url, method in (
        (reader, card, "POST"),
        (gateway.keys["ada"], card, "GET"),
        (reader, f"{gateway.url}/v1/models", "GET"),
    ):
        async with gateway.session.request(method, url, headers=bearer(key)) as response:
            told.append((response.status, (await response.json())["error"]["message"]))

    assert [status for status, _ in told] == [403] * 3
    assert "does not have the 'money' scope, but read, tenants;" in told[0][1]
    assert "key create --admin --scopes money" in told[0][1]
    assert "expected an administrator's, such as the one in admin.key" in told[1][1]
    assert "key create --tenant NAME" in told[2][1]


# --- the pace of refusals ------------------------------------------------------------------------


def test_a_payers_refusals_have_a_pace_and_no_others() -> None:
    """A burst is answered at once, then so many a second; another payer waits for nothing."""
    now_s = [0.0]
    pace = RefusalPace(lambda: now_s[0])

    waits = [pace.wait_s("greedy") for _ in range(REFUSALS_AT_ONCE + REFUSALS_PER_S)]

    assert waits[:REFUSALS_AT_ONCE] == pytest.approx([0.0] * REFUSALS_AT_ONCE)
    assert waits[-1] == pytest.approx(1.0)
    assert pace.wait_s("quiet") == 0.0
    now_s[0] = 3.0
    assert pace.wait_s("greedy") == 0.0


def test_no_refusal_waits_longer_than_the_bound() -> None:
    """However many ask at once, and their number is forgotten when they have stopped."""
    now_s = [0.0]
    pace = RefusalPace(lambda: now_s[0])
    waits = [pace.wait_s("greedy") for _ in range(100 * REFUSALS_PER_S)]

    assert max(waits) == REFUSAL_WAIT_S_MAX
    now_s[0] = REFUSAL_WAIT_S_MAX + REFUSALS_AT_ONCE / REFUSALS_PER_S
    assert pace.wait_s("greedy") == 0.0


def test_payers_that_come_once_are_forgotten() -> None:
    """Strangers' addresses cost bounded memory; who was last there is remembered."""
    pace = RefusalPace(lambda: 0.0)
    for _ in range(2 * REFUSALS_AT_ONCE):
        pace.wait_s("early")
    for number in range(PAYERS_MAX):
        pace.wait_s(number)

    assert pace.wait_s("early") == 0.0
