"""`X-Trunkline-Fidelity`: a request may be stricter than its tenant, and never laxer."""

from __future__ import annotations

import json

import msgspec
import pytest

from gateway.background.erasure import list_holdings
from gateway.caching.namespaces import owner_of, parts_of
from gateway.levels.fidelity import FIDELITY_HEADER
from tenancy.accounts.tenants import change_tenant, find_tenant_record
from tests.tables import each_row
from tests.unit.gateway.gateway_fixture import GatewayFixture

CHAT = "/v1/chat/completions"
LONG = "a prompt of some length " * 4


def allow(gateway: GatewayFixture, **settings: object) -> int:
    """Change the settings of ada; return her id."""
    change_tenant(gateway.store, "ada", settings)
    gateway.gateway.context.authenticator.refresh_now()
    return find_tenant_record(gateway.store, "ada").tenant.tenant_id


async def cached(gateway: GatewayFixture, headers: dict[str, str] | None = None) -> int:
    """Send the same prompt; return how much of it was cached."""
    status, found, _ = await gateway.ask(CHAT, gateway.chat(LONG), headers=headers)
    assert status == 200, found
    return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_requests_that_allow_less_have_a_namespace_of_their_own(
    gateway: GatewayFixture,
) -> None:
    """Otherwise an exact request could meet what was computed over a lossy copy."""
    ada = allow(gateway, fidelity="rough")
    exact = {FIDELITY_HEADER: "exact"}
    found = [await cached(gateway), await cached(gateway, exact)]
    again = [await cached(gateway), await cached(gateway, exact)]
    await gateway.engine.get_stats()
    held = [one.namespace for one in gateway.engine.namespaces]

    assert found == [0, 0]
    assert min(again) > 0
    assert sorted(parts_of(one)[5:] for one in held) == [(), ("rough",)]
    assert {owner_of(one) for one in held} == {ada}
    assert {one.workspace for one in list_holdings(gateway.engine.namespaces, ada)} == {"default"}


async def test_erasure_covers_every_fidelity(gateway: GatewayFixture) -> None:
    """A workspace's erasure must leave nothing behind in the namespace of lossy copies."""
    allow(gateway, fidelity="near")
    await cached(gateway)
    await cached(gateway, {FIDELITY_HEADER: "exact"})
    status, receipt, _ = await gateway.ask("/v1/cache", method="DELETE")

    assert (status, receipt["namespaces"]) == (200, 2)
    assert await cached(gateway) == 0


@pytest.mark.parametrize(("asked", "status"), [("exact", 200), ("near", 200), ("rough", 400)])
async def test_a_request_may_only_be_stricter(
    gateway: GatewayFixture, asked: str, status: int
) -> None:
    """A laxer one is refused, not silently made stricter."""
    allow(gateway, fidelity="near")
    found, answer, _ = await gateway.ask(CHAT, gateway.chat(), headers={FIDELITY_HEADER: asked})

    assert found == status
    if status == 400:
        assert answer["error"]["code"] == "fidelity_not_allowed"
        assert "expected one of: exact, near." in answer["error"]["message"]
    await gateway.check_quiet()


@each_row(
    "lines",
    [
        ["X-Trunkline-Fidelity: lossy"],
        ["X-Trunkline-Fidelity: Exact"],
        ["X-Trunkline-Fidelity:"],
        ["X-Trunkline-Fidelity: exact", "X-Trunkline-Fidelity: exact"],
        ["X-Trunkline-Fidelity: exact, near"],
        ["X-Trunkline-Fidelity: " + "x" * 4_000],
        ["X-Trunkline-Fidelity: ex\u00e4ct"],
    ],
)
async def test_other_values_are_refused_with_the_words(
    gateway: GatewayFixture, lines: list[str]
) -> None:
    """The error is short for any header, and names the three words."""
    body = json.dumps(gateway.chat()).encode()
    answer = await gateway.raw(gateway.post(CHAT, body, *lines, "Connection: close"))
    head, _, text = answer.partition(b"\r\n\r\n")

    assert head.split(b" ")[1] == b"400", answer
    assert b"expected one of: exact, near, rough" in text
    assert len(text) < 400
    await gateway.check_quiet()


async def test_control_characters_are_no_http(gateway: GatewayFixture) -> None:
    """The parser of heads refuses them before any handler sees the header."""
    body = json.dumps(gateway.chat()).encode()
    line = "X-Trunkline-Fidelity: ex\x01act"
    answer = await gateway.raw(gateway.post(CHAT, body, line, "Connection: close"))

    assert answer.split(b" ")[1] == b"400"


async def test_a_quote_asks_the_namespace_of_its_fidelity(gateway: GatewayFixture) -> None:
    """A quote tells what the same request with the same header would find."""
    allow(gateway, fidelity="near")
    await cached(gateway)
    quote = {"endpoint": CHAT, "request": gateway.chat(LONG)}
    _, own, _ = await gateway.ask("/v1/cache/quote", quote)
    _, exact, _ = await gateway.ask("/v1/cache/quote", quote, headers={FIDELITY_HEADER: "exact"})
    status, answer, _ = await gateway.ask(
        "/v1/cache/quote", quote, headers={FIDELITY_HEADER: "rough"}
    )

    assert own["physical"]["cached_tokens"] > 0
    assert exact["physical"]["cached_tokens"] == 0
    assert (status, answer["error"]["code"]) == (400, "fidelity_not_allowed")


def keep_int8(gateway: GatewayFixture) -> None:
    """Let the engine say that it keeps KV in 8 bits."""
    assert gateway.engine.info is not None
    gateway.engine.info = msgspec.structs.replace(gateway.engine.info, kv_fidelity="near")


async def test_a_pool_of_8_bits_is_told_where_no_one_asked(gateway: GatewayFixture) -> None:
    """The tenant's default speaks of copies, which are as exact as the pool; the header says what
    the answer was computed with."""
    allow(gateway)
    keep_int8(gateway)
    _, _, first = await gateway.ask(CHAT, gateway.chat(LONG))
    status, found, second = await gateway.ask(CHAT, gateway.chat(LONG))
    assert status == 200, found
    for answer in (first, second):
        assert "; fidelity=near" in answer.headers["X-Trunkline-Cache"]
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    await gateway.engine.get_stats()
    assert [parts_of(one.namespace)[5:] for one in gateway.engine.namespaces] == [("near",)]


@pytest.mark.parametrize(
    ("least", "asked", "code"),
    [
        ("exact", "exact", "fidelity_not_available"),
        ("exact", "near", "fidelity_not_allowed"),
        ("near", "exact", "fidelity_not_available"),
        ("near", "near", ""),
        ("rough", "rough", ""),
    ],
)
async def test_who_asks_a_pool_of_8_bits_for_exact_is_refused(
    gateway: GatewayFixture, least: str, asked: str, code: str
) -> None:
    """In an answer and in a quote; not silently given less."""
    allow(gateway, fidelity=least)
    keep_int8(gateway)
    headers = {FIDELITY_HEADER: asked}
    quote = {"endpoint": CHAT, "request": gateway.chat(LONG)}
    for path, body in ((CHAT, gateway.chat()), ("/v1/cache/quote", quote)):
        status, answer, _ = await gateway.ask(path, body, headers=headers)

        assert status == (400 if code else 200), answer
        if code:
            assert answer["error"]["code"] == code
    await gateway.check_quiet()
