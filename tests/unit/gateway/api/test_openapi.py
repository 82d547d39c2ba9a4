"""The OpenAPI documents: valid, complete, and true of what the handlers answer."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gateway.__main__ import main
from gateway.api.listeners import described
from gateway.api.openapi import ListenerName
from gateway.background.webhooks import WebhookEndpoint
from gateway.http.route_table import Route, canonical
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.api.admin.test_audit import CHANGES
from tests.unit.gateway.gateway_fixture import GatewayFixture

LISTENERS: tuple[ListenerName, ...] = ("public", "admin")
DOCUMENTS = {name: described(name) for name in LISTENERS}
STATIC = ("/dashboard",)
"""Paths of files, which are no API. The root leads to them."""


@pytest.fixture(scope="module")
def validator() -> Any:
    """Return the class that holds a value against a JSON schema; it has read its own schemas."""
    found = pytest.importorskip("jsonschema").Draft202012Validator
    found.check_schema({})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("listener", LISTENERS)
def test_document_is_valid(listener: ListenerName) -> None:
    """By the published schema of OpenAPI 3.1, with unique operation ids and declared parameters."""
    validator = pytest.importorskip("openapi_spec_validator")

    validator.validate(DOCUMENTS[listener], cls=validator.OpenAPIV31SpecValidator)


def routes_of(gateway: GatewayFixture) -> dict[ListenerName, tuple[Route, ...]]:
    """The routes of a gateway that have to be described."""
    found = {"public": gateway.gateway.public().routes, "admin": gateway.gateway.admin().routes}
    return {
        listener: tuple(
            one for one in found[listener] if not one.path.startswith(STATIC) and one.path != "/"
        )
        for listener in LISTENERS
    }


async def test_every_route_is_in_the_document(gateway: GatewayFixture) -> None:
    """With an error, and with the scope that its key needs."""
    for listener, routes in routes_of(gateway).items():
        paths = DOCUMENTS[listener]["paths"]
        for one in routes:
            found = paths[canonical(one.path)][one.method.lower()]
            ways = found["security"]
            scopes = {scope for way in ways for names in way.values() for scope in names}
            assert scopes == {one.role.removeprefix("admin:")} - {"open", "admin"}
            assert bool(ways) is (one.role != "open")
            assert {"4XX", "5XX", str(one.status)} == found["responses"].keys()
            assert ("requestBody" in found) is (one.body is not None)


def test_requests_that_generate_declare_their_headers() -> None:
    """Those by which a request says how its KV may be kept and read; others have none."""
    declared = {
        (path, method): sorted(
            one["name"] for one in operation["parameters"] if one["in"] == "header"
        )
        for path, operations in DOCUMENTS["public"]["paths"].items()
        for method, operation in operations.items()
    }
    both = ["X-Trunkline-Attention", "X-Trunkline-Fidelity"]
    all_three = sorted([*both, "X-Trunkline-Drafts"])

    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
        assert declared[path, "post"] == all_three
    assert declared["/v1/cache/quote", "post"] == both
    assert declared["/v1/messages/count_tokens", "post"] == []
    assert declared["/v1/usage", "get"] == []


async def test_query_parameters_are_those_that_handlers_take(gateway: GatewayFixture) -> None:
    """A part of what is to be deleted, told where no handler looks, must not delete all of it."""
    admin = AdminClient(gateway)
    for one in routes_of(gateway)["admin"]:
        if one.path.startswith("/admin"):
            path = re.sub("{[a-z]+_id}", "1", one.path).replace("{name}", "ada")
            status, answer = await admin.ask(one.method, f"{path}?nonsense=1")
            expected = ", ".join(one.query) or "none"
            assert (status, answer["error"]["code"]) == (400, "unknown_parameter"), one.path
            assert answer["error"]["message"].endswith(f"expected: {expected}."), one.path


async def test_a_part_of_a_tenant_is_not_deleted_as_all_of_it(gateway: GatewayFixture) -> None:
    admin = AdminClient(gateway)
    status, answer = await admin.ask("DELETE", "/admin/v1/tenants/ada", {"workspace": "web"})

    assert (status, answer["error"]["code"]) == (400, "unexpected_body")
    assert (await admin.ask("GET", "/admin/v1/tenants/ada"))[0] == 200


def check(
    validator: Any, listener: ListenerName, method: str, path: str, status: int, body: object
) -> None:
    """Hold a body against the document's schema of a status: its types, and that it names every
    field of the body. `path`: as declared."""
    whole = DOCUMENTS[listener]
    responses = whole["paths"][path][method.lower()]["responses"]
    described = responses.get(str(status)) or responses[f"{status // 100}XX"]
    schema = described["content"]["application/json"]["schema"]
    errors = validator({**schema, "components": whole["components"]}).iter_errors(body)

    assert [error.message for error in errors] == [], (method, path, status)
    struct = whole["components"]["schemas"].get(schema.get("$ref", "").rpartition("/")[2], {})
    if isinstance(body, dict) and "properties" in struct:
        assert body.keys() <= struct["properties"].keys(), (method, path, status)


async def test_answers_of_the_admin_api_are_as_described(
    unopened_gateway: GatewayFixture, validator: Any
) -> None:
    """Every change of the audit log's test, and every list after it."""
    gateway = unopened_gateway
    gateway.endpoints = [WebhookEndpoint("ops", "http://127.0.0.1:9", frozenset(), "slack")]
    await gateway.open()
    admin = AdminClient(gateway)
    _, _, response = await gateway.ask(body=gateway.chat())
    await gateway.quiet()
    request_id = response.headers["X-Request-Id"]
    last = list(CHANGES)[-1]
    lists = {
        f"GET {one.path}": (("GET", one.path.replace("{name}", "ada"), None), "")
        for one in routes_of(gateway)["admin"]
        if one.method == "GET" and one.path.startswith("/admin") and "_id}" not in one.path
    }
    path = "/admin/v1/requests/{request_id}"
    lists[f"GET {path}"] = (("GET", path.format(request_id=request_id), None), "")
    lists["GET /admin/v1/keys/{key_id}"] = (("GET", "/admin/v1/keys/1", None), "")
    lists["GET /admin/v1/shared-scopes/{name}"] = CHANGES["PUT /admin/v1/shared-scopes/{name}"]
    lists["GET /admin/v1/erasures"] = (("GET", "/admin/v1/erasures?tenant=ada", None), "")
    changes = {name: one for name, one in CHANGES.items() if name != last}
    for name, ((method, path, body), _) in {**changes, **lists, last: CHANGES[last]}.items():
        status, answer = await admin.ask(method, path, body)
        assert status in (200, 201), (name, answer)
        declared_method, _, declared = name.partition(" ")
        if declared_method == method:
            check(validator, "admin", method, declared, status, answer)
    await gateway.close()


async def test_answers_of_self_service_are_as_described(
    gateway: GatewayFixture, validator: Any
) -> None:
    """Usage, state, cache, quote, tokenizer and probes."""
    await gateway.ask(body=gateway.chat())
    quote = {"endpoint": "/v1/chat/completions", "request": gateway.chat()}
    for method, path, body in (
        ("GET", "/v1/usage", None),
        ("GET", "/v1/state", None),
        ("GET", "/v1/findings", None),
        ("GET", "/v1/cache", None),
        ("POST", "/v1/cache/quote", quote),
        ("DELETE", "/v1/cache", None),
        ("POST", "/tokenize", {"prompt": "hello", "return_token_strs": True}),
        ("POST", "/detokenize", {"tokens": [1]}),
        ("GET", "/tokenizer_info", None),
        ("GET", "/healthz", None),
        ("GET", "/readyz", None),
    ):
        status, answer, _ = await gateway.ask(path, body, method=method)
        assert status == 200, (path, answer)
        check(validator, "public", method, path, status, answer)


async def test_errors_are_as_described(gateway: GatewayFixture, validator: Any) -> None:
    """Each family's SDK reads its own shape."""
    admin = AdminClient(gateway)
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/messages"),
        ("GET", "/v1/usage"),
        ("POST", "/v1/cache/quote"),
    ):
        status, answer, _ = await gateway.ask(path, {}, method=method, who=None)
        assert status == 401
        check(validator, "public", method, path, status, answer)
    status, answer, _ = await gateway.ask("/v1beta/cachedContents", {}, who=None)
    check(validator, "public", "POST", "/{version}/cachedContents", status, answer)
    status, answer = await admin.ask("GET", "/admin/v1/tenants/nemo")
    check(validator, "admin", "GET", "/admin/v1/tenants/{name}", status, answer)


async def test_bodies_of_requests_are_as_described(gateway: GatewayFixture, validator: Any) -> None:
    """What the handlers take is valid by the document, too."""
    gemini = {
        "contents": [{"parts": [{"text": "hello"}]}],
        "generationConfig": {"maxOutputTokens": 4},
    }
    message = {"model": gateway.model, "max_tokens": 4, "messages": gateway.chat()["messages"]}
    response = {"model": gateway.model, "input": "hello"}
    cases: list[tuple[ListenerName, str, str, Any]] = [
        ("public", "/v1/chat/completions", "post", gateway.chat()),
        ("public", "/v1/messages", "post", message),
        ("public", "/v1/responses", "post", response),
        ("public", "/tokenize", "post", {"messages": message["messages"]}),
        ("public", "/detokenize", "post", {"tokens": [1, 2]}),
        ("public", "/{version}/models/{target}", "post", gemini),
        *(
            ("admin", name.split()[1], name.split()[0].lower(), body)
            for name, ((_, _, body), _) in CHANGES.items()
            if body is not None
        ),
    ]
    for listener, path, method, body in cases:
        whole = DOCUMENTS[listener]
        described = whole["paths"][path][method]["requestBody"]["content"]["application/json"]
        schema = {**described["schema"], "components": whole["components"]}
        assert [e.message for e in validator(schema).iter_errors(body)] == [], path


async def test_both_listeners_serve_their_document_without_a_key(gateway: GatewayFixture) -> None:
    """The document is no secret, and a generator of clients has no key."""
    status, public, _ = await gateway.ask("/openapi.json", method="GET", who=None)
    admin_status, admin = await AdminClient(gateway).ask("GET", "/openapi.json", key=None)

    assert (status, admin_status) == (200, 200)
    assert public == DOCUMENTS["public"]
    assert admin == DOCUMENTS["admin"]


def test_the_command_prints_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    """It needs no server."""
    assert main(["openapi", "--admin"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert found["openapi"] == "3.1.0"
    assert "/admin/v1/tenants" in found["paths"]
