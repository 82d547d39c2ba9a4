"""`server.cors_origins`: which pages may read answers, errors and preflights included."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.unit.gateway.gateway_fixture import GatewayFixture

PAGE, OTHER = "https://app.example.com", "https://evil.example"
ASKED = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


def permission(headers: Mapping[str, str]) -> str | None:
    """Return the origin that an answer lets in."""
    return headers.get("Access-Control-Allow-Origin")


async def opened(gateway: GatewayFixture, *origins: str) -> GatewayFixture:
    """Return the gateway, open to pages of these origins."""
    gateway.set_server(cors_origins=origins)
    await gateway.open()
    return gateway


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/nothing"])
async def test_a_preflight_tells_what_a_page_may_send(
    unopened_gateway: GatewayFixture, path: str
) -> None:
    """SDKs in a browser send headers of their own. The request itself tells of an unknown path."""
    gateway = await opened(unopened_gateway, PAGE)
    status, body, answer = await gateway.ask(
        path, who=None, method="OPTIONS", headers={"Origin": PAGE, **ASKED}
    )
    other = await gateway.ask(path, who=None, method="OPTIONS", headers={"Origin": OTHER, **ASKED})
    await gateway.close()

    assert (status, body, permission(answer.headers)) == (204, "", PAGE)
    assert "POST" in answer.headers["Access-Control-Allow-Methods"]
    assert answer.headers["Access-Control-Allow-Headers"] == ASKED["Access-Control-Request-Headers"]
    assert answer.headers["Vary"] == "Origin"
    assert permission(other[2].headers) is None


async def test_answers_and_errors_can_be_read_by_an_allowed_page_alone(
    unopened_gateway: GatewayFixture,
) -> None:
    """A page that cannot read a 401 shows its user a network error."""
    gateway = await opened(unopened_gateway, PAGE, "http://localhost:5173")
    sent = {"Origin": PAGE}
    answers = [
        await gateway.ask(body=gateway.chat(), headers=sent),
        await gateway.ask(body=gateway.chat(stream=True), headers=sent),
        await gateway.ask(body=gateway.chat(), who=None, headers=sent),
        await gateway.ask("/v1/nothing", method="GET", headers=sent),
    ]
    foreign = await gateway.ask(body=gateway.chat(), headers={"Origin": OTHER})
    bare = await gateway.ask(body=gateway.chat())
    await gateway.close()

    assert [status for status, _, _ in answers] == [200, 200, 401, 404]
    for _, _, answer in answers:
        assert permission(answer.headers) == PAGE
        assert answer.headers["Access-Control-Expose-Headers"] == "*"
        assert "Access-Control-Allow-Credentials" not in answer.headers
    for _, _, answer in (foreign, bare):
        assert permission(answer.headers) is None
        assert answer.headers["Vary"] == "Origin", "a cache must not give it to an allowed page"


async def test_a_star_lets_every_page_in(unopened_gateway: GatewayFixture) -> None:
    """For a server on the user's own machine."""
    gateway = await opened(unopened_gateway, "*")
    _, _, answer = await gateway.ask(body=gateway.chat(), headers={"Origin": OTHER})
    _, _, preflight = await gateway.ask(
        who=None, method="OPTIONS", headers={"Origin": OTHER, **ASKED}
    )
    await gateway.close()

    assert permission(answer.headers) == permission(preflight.headers) == "*"


async def test_the_admin_listener_lets_no_page_in(unopened_gateway: GatewayFixture) -> None:
    """An administrator's browser must not act for a page."""
    gateway = await opened(unopened_gateway, "*")
    async with gateway.session.options(
        f"{gateway.admin_url}/admin/v1/me", headers={"Origin": OTHER, **ASKED}
    ) as answer:
        found = permission(answer.headers)
    await gateway.close()

    assert found is None


async def test_a_preflight_of_another_host_is_refused(unopened_gateway: GatewayFixture) -> None:
    """A name that was made to lead here must not reach the server through a browser."""
    gateway = await opened(unopened_gateway, "*")
    status, _, _ = await gateway.ask(
        who=None, method="OPTIONS", headers={"Origin": OTHER, "Host": "evil.example", **ASKED}
    )
    await gateway.close()

    assert status in (400, 403, 421)
