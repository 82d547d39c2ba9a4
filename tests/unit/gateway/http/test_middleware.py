"""The door: ids, keys, roles, errors to bytes, the log line."""

from __future__ import annotations

import gc
import json

import pytest

from gateway.dialects.canonical import Call
from gateway.errors import Refusal
from gateway.http.authentication import WRONG_KEYS_PER_MINUTE_MAX, WrongKeys
from gateway.http.route_table import canonical
from gateway.ledger.metering import wall_ms
from tenancy.accounts.keys import create_key, list_keys, revoke_key
from tenancy.accounts.tenants import find_tenant, set_status
from tests.fakes import FakeClock
from tests.unit.gateway.gateway_fixture import GatewayFixture

DECLARED = {
    ("POST", "/v1/chat/completions"): 401,
    ("POST", "/chat/completions"): 401,
    ("POST", "/completions"): 401,
    ("POST", "/v1/completions"): 401,
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
    ("POST", "/v1/messages"): 401,
    ("POST", "/v1/messages/count_tokens"): 401,
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
    ("GET", "/v1/usage"): 401,
    ("GET", "/v1/cache"): 401,
    ("DELETE", "/v1/cache"): 401,
    ("GET", "/healthz"): 200,
    ("GET", "/readyz"): 200,
}
"""Every way in on the public listener, and what it says to somebody without a key."""


async def test_every_route_is_declared_and_refuses_strangers_as_declared(
    gateway: GatewayFixture,
) -> None:
    """C8: a walk of the router; a route added without a role would show up here."""
    routes = {(route.method, canonical(route.path)) for route in gateway.gateway.public().routes}
    answers = {
        (method, path): (
            await gateway.ask(
                path.format(name="x", version="v1", target="m:generateContent", id="x"),
                method=method,
                who=None,
            )
        )[0]
        for method, path in routes
    }

    assert answers == DECLARED


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


@pytest.mark.parametrize("headers", BAD_KEYS, ids=range(len(BAD_KEYS)))
async def test_bad_keys_are_all_refused_alike(
    gateway: GatewayFixture, headers: dict[str, str]
) -> None:
    """C1, C5: 401 before the body is read, the key never shown back."""
    status, answer, response = await gateway.ask(body=b"not json", who=None, headers=headers)

    assert status == 401, answer
    assert answer["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    given = headers.get("Authorization", "").removeprefix("Bearer").strip()
    assert len(given) < 3 or given not in json.dumps(answer)
    assert len(given) < 3 or given not in json.dumps(gateway.lines)
    await gateway.check_quiet()


async def test_a_prefix_of_a_key_is_nobody(gateway: GatewayFixture) -> None:
    """C6: caches of authentication by a part of the key have mixed tenants up."""
    for cut in (20, 30, -1):
        key = gateway.keys["ada"][:cut]
        status, _, _ = await gateway.ask(
            body=gateway.chat(), who=None, headers={"Authorization": f"Bearer {key}"}
        )
        assert status == 401


async def test_two_different_keys_are_ambiguous_and_the_same_twice_is_not(
    gateway: GatewayFixture,
) -> None:
    """C4: a proxy and we might pick different ones."""
    other, _, _ = await gateway.ask(body=gateway.chat(), headers={"X-Api-Key": gateway.keys["bob"]})
    same, _, _ = await gateway.ask(body=gateway.chat(), headers={"X-Api-Key": gateway.keys["ada"]})

    assert (other, same) == (400, 200)


async def test_headers_that_name_another_tenant_change_nothing(gateway: GatewayFixture) -> None:
    """C3: who asks comes from the key alone."""
    headers = {"X-Tenant": "bob", "OpenAI-Organization": "bob", "OpenAI-Project": "bob"}
    await gateway.ask(body=gateway.chat(), headers=headers)

    rows = gateway.store.query("select name from ledger join tenants using (tenant_id)")
    assert rows == [("ada",)]


async def test_a_revoked_key_and_a_suspended_tenant_are_out_within_a_second(
    gateway: GatewayFixture,
) -> None:
    """C2, C7: the command line writes beside a running server."""
    tenant, _ = find_tenant(gateway.store, "ada")
    second = create_key(gateway.store, wall_ms, tenant.tenant_id)
    revoke_key(gateway.store, wall_ms, str(list_keys(gateway.store, "ada")[-1].key_id))
    set_status(gateway.store, "bob", "suspended")
    gateway.gateway.context.registry.refresh_now()  # another process wrote

    revoked, error, _ = await gateway.ask(
        "/v1/models", method="GET", who=None, headers={"Authorization": f"Bearer {second}"}
    )
    suspended, _, _ = await gateway.ask("/v1/models", method="GET", who="bob")

    assert (revoked, error["error"]["code"]) == (401, "invalid_api_key")
    assert suspended == 403
    assert second not in json.dumps(error)


async def test_floods_of_wrong_keys_are_slowed_and_good_keys_are_not(
    gateway: GatewayFixture,
) -> None:
    """C14: guessing from one address ends; a customer behind the same address does not notice."""
    headers = {"Authorization": "Bearer wrong"}
    statuses = [
        (await gateway.ask("/v1/models", method="GET", who=None, headers=headers))[0]
        for _ in range(WRONG_KEYS_PER_MINUTE_MAX + 1)
    ]
    good, _, _ = await gateway.ask("/v1/models", method="GET")

    assert set(statuses[: WRONG_KEYS_PER_MINUTE_MAX // 2]) == {401}
    assert statuses[-1] in (401, 429)  # 401 if a minute began meanwhile
    assert good == 200


async def test_keys_that_were_good_are_told_why_they_are_not(gateway: GatewayFixture) -> None:
    """Behind a proxy all have one address: a suspended tenant's retries are no guesses, neither of
    its own nor in the way of those who are told that their key is wrong."""
    tenant, _ = find_tenant(gateway.store, "ada")
    dead = create_key(gateway.store, wall_ms, tenant.tenant_id)
    revoke_key(gateway.store, wall_ms, str(list_keys(gateway.store, "ada")[-1].key_id))
    set_status(gateway.store, "bob", "suspended")
    gateway.gateway.context.registry.refresh_now()
    seen = set()
    for headers in (gateway.headers("bob"), {"Authorization": f"Bearer {dead}"}):
        for _ in range(WRONG_KEYS_PER_MINUTE_MAX + 1):
            status, _, _ = await gateway.ask("/v1/models", method="GET", who=None, headers=headers)
            seen.add(status)
    headers = {"Authorization": "Bearer wrong"}
    wrong, _, _ = await gateway.ask("/v1/models", method="GET", who=None, headers=headers)

    assert (seen, wrong) == ({401, 403}, 401)


def test_wrong_keys_are_counted_by_minute_for_a_bounded_number_of_addresses() -> None:
    """A counter that grows with attackers is an attack of its own."""
    clock = FakeClock()
    counter = WrongKeys(clock)
    within = [counter.is_too_many("a") for _ in range(WRONG_KEYS_PER_MINUTE_MAX)]
    over = counter.is_too_many("a")
    clock.advance(60)
    later = counter.is_too_many("a")
    for number in range(10_000):
        counter.is_too_many(f"address {number}")

    assert (any(within), over, later) == (False, True, False)
    assert len(counter._seen) <= 4_096


async def test_one_line_per_request_without_prompts_or_keys(gateway: GatewayFixture) -> None:
    """The log is for operators: ids and counts."""
    await gateway.ask(body=gateway.chat("the planted prompt"))
    (line,) = [line for line in gateway.lines if line["event"] == "request"]

    assert line["route"] == "/v1/chat/completions"
    assert (line["status"], line["ending"], line["output_tokens"]) == (200, "done", 8)
    assert "planted" not in json.dumps(gateway.lines)
    assert gateway.keys["ada"] not in json.dumps(gateway.lines)


async def test_an_unforeseen_error_is_a_plain_500_and_a_line_without_its_message(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The positive control of secrecy: an exception that carries a prompt."""

    def broken(prompt: object) -> object:
        raise ValueError("the planted prompt")

    monkeypatch.setattr(gateway.renderer, "render", broken)
    status, answer, _ = await gateway.ask(body=gateway.chat())

    assert (status, answer["error"]["code"]) == (500, "internal_error")
    assert "planted" not in json.dumps([answer, gateway.lines])
    assert any(line.get("error") == "ValueError" for line in gateway.lines)
    monkeypatch.undo()
    await gateway.check_quiet()


async def test_no_answer_says_what_the_server_is_made_of(gateway: GatewayFixture) -> None:
    """A version is the first thing an attacker looks up: in answers, refusals and probes."""
    responses = [
        (await gateway.ask(body=gateway.chat()))[2],
        (await gateway.ask(body=b"{"))[2],
        (await gateway.ask("/healthz", method="GET", who=None))[2],
    ]

    assert [response.headers["server"] for response in responses] == ["trunkline"] * 3


def _requests_and_refusals() -> list[object]:
    return [one for one in gc.get_objects() if type(one) in (Refusal, Call)]


@pytest.mark.parametrize("more", [{"temperature": 99}, {"model": "none"}, {"max_tokens": 10**6}])
async def test_what_was_refused_is_let_go_at_once(
    gateway: GatewayFixture, more: dict[str, object]
) -> None:
    """A refusal whose traceback holds the frame that holds it kept the request's whole body until
    the garbage collector came by, which it rarely does."""
    gc.collect()
    gc.disable()
    try:
        others = _requests_and_refusals()  # constants of other tests in this process
        body = {**gateway.chat("hello " * 9), **more}
        statuses = {(await gateway.ask(body=body))[0] for _ in range(3)}
        kept = [one for one in _requests_and_refusals() if not any(one is old for old in others)]
    finally:
        gc.enable()

    assert statuses <= {400, 404}
    assert kept == []
