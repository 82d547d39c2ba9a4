"""Rate limits as clients see them: refusals, headers, and tokens that the cache saves."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import Any

import pytest

from engine.api import CacheGrant, Request
from gateway.dialects.anthropic import messages
from gateway.dialects.gemini import generate_content
from gateway.dialects.openai import chat
from gateway.generation.rate_limits import estimate
from tenancy.accounts.keys import change_key, create_key
from tenancy.accounts.tenants import change_tenant
from tenancy.limits import Demand, Limiter, LimitState, Meter
from tenancy.types import Limits, wall_ms
from tests.actors import TESTER
from tests.fakes import FakeClock
from tests.unit.gateway.gateway_fixture import GatewayFixture

TURN = [{"role": "user", "content": "hello"}]
LONG = "Once upon a time there was a cache that forgot nothing, until it was told to. " * 3


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def gateway(gateway: GatewayFixture, clock: FakeClock) -> GatewayFixture:
    """A gateway whose limits refill only by the test's clock."""
    gateway.gateway.limits.limiter = Limiter(clock)
    return gateway


def limit(gateway: GatewayFixture, who: str = "ada", **limits: int) -> None:
    """Limit a tenant, from the next request on."""
    change_tenant(gateway.store, who, limits)
    if gateway.url:
        gateway.gateway.context.authenticator.refresh_now()


async def statuses(gateway: GatewayFixture, count: int, who: str = "ada") -> list[int]:
    """Return the statuses of concurrent chats."""
    answers = await asyncio.gather(
        *(gateway.ask(body=gateway.chat(), who=who) for _ in range(count))
    )
    return sorted(status for status, _, _ in answers)


# --- refusals ------------------------------------------------------------------------------------


async def test_admits_exactly_the_limit_under_concurrency(
    gateway: GatewayFixture,
) -> None:
    """F1: a refusal costs nothing and leaves no entry; other tenants are not affected."""
    limit(gateway, requests_per_minute=3)
    got = await statuses(gateway, 10)
    other = await statuses(gateway, 3, who="bob")

    assert got == [200] * 3 + [429] * 7
    assert other == [200] * 3
    assert len(gateway.entries()) == 6
    assert gateway.gateway.limits.limiter.running_of(1) == 0
    await gateway.check_quiet()


async def test_refusal_has_retry_after(gateway: GatewayFixture) -> None:
    """429, in whole seconds rounded up, at most a minute."""
    limit(gateway, requests_per_minute=1)
    await gateway.ask(body=gateway.chat())
    status, body, response = await gateway.ask(body=gateway.chat())

    assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
    assert response.headers["retry-after"] == "60"
    assert "x-should-retry" not in response.headers
    assert response.headers["x-ratelimit-remaining-requests"] == "0"


async def test_request_that_never_fits_must_not_retry(gateway: GatewayFixture) -> None:
    """An SDK would otherwise retry for ever."""
    limit(gateway, tokens_per_minute=5)
    status, body, response = await gateway.ask(body=gateway.chat(LONG))

    assert (status, body["error"]["code"]) == (429, "request_exceeds_limit")
    assert response.headers["x-should-retry"] == "false"
    assert "retry-after" not in response.headers


async def test_concurrency_limit_counts_running_requests(gateway: GatewayFixture) -> None:
    """The slot is free when the answer has ended."""
    limit(gateway, requests_at_once=1)
    gateway.runner.hold_after(2)
    first = asyncio.create_task(gateway.ask(body=gateway.chat()))
    await gateway.until(lambda: bool(gateway.gateway.context.running))
    refused, _, _ = await gateway.ask(body=gateway.chat())
    gateway.runner.release()
    status, _, _ = await first

    assert (refused, status) == (429, 200)
    assert (await gateway.ask(body=gateway.chat()))[0] == 200


EVERY_CALL: dict[str, tuple[str, str, Any]] = {
    "count": ("POST", "/v1/messages/count_tokens", {"messages": TURN}),
    "tokenize": ("POST", "/tokenize", {"prompt": "hello"}),
    "detokenize": ("POST", "/detokenize", {"tokens": [1]}),
    "tokenizer": ("GET", "/tokenizer_info", None),
    "quote": ("POST", "/v1/cache/quote", {"endpoint": "/v1/completions", "request": {}}),
    "malformed body": ("POST", "/v1/chat/completions", {"messages": 1}),
    "erasure": ("DELETE", "/v1/cache", None),
    "cache": ("GET", "/v1/cache", None),
    "usage": ("GET", "/v1/usage", None),
    "models": ("GET", "/v1/models", None),
    "missing": ("GET", "/v1/responses/none", None),
    "cached contents": ("GET", "/v1beta/cachedContents", None),
}


@pytest.mark.parametrize("call", EVERY_CALL)
async def test_every_call_draws_one_request_before_its_body(
    gateway: GatewayFixture, call: str
) -> None:
    """A tenant of one request a minute has one of any kind, and a second costs the server next to
    nothing."""
    limit(gateway, requests_per_minute=1)
    method, path, body = EVERY_CALL[call]
    if body is not None:
        body = {"model": gateway.model, **body}
    first, _, _ = await gateway.ask(path, body, method=method)
    second, error, response = await gateway.ask(path, b"{" * 1_000, method=method)
    other, _, _ = await gateway.ask(path, body, method=method, who="bob")

    assert first != 429
    assert (second, other) == (429, first), error
    assert response.headers["retry-after"] == "60"
    assert gateway.gateway.limits.limiter.running_of(1) == 0


async def test_tokens_over_the_limit_cost_their_request(gateway: GatewayFixture) -> None:
    """The prompt was tokenized for this refusal: asking without end is not free."""
    limit(gateway, requests_per_minute=3, tokens_per_minute=5)
    got = [(await gateway.ask(body=gateway.chat(LONG)))[1]["error"]["code"] for _ in range(5)]

    assert got == ["request_exceeds_limit"] * 3 + ["rate_limit_exceeded"] * 2


@pytest.mark.parametrize("whose", ["the tenant's", "the server's"])
async def test_body_that_is_still_sent_holds_a_place(
    unopened_gateway: GatewayFixture, whose: str
) -> None:
    """Places are taken before bodies are read, so a slow upload is a request at once."""
    gateway = unopened_gateway
    if whose == "the tenant's":
        limit(gateway, requests_at_once=1)
    else:
        gateway.set_limits(requests_per_tenant_max=1)
    await gateway.open()
    async with gateway.connection() as (_, writer):
        writer.write(gateway.post("/v1/chat/completions", b"{", "Content-Length: 500"))
        limiter = gateway.gateway.limits.limiter
        await gateway.until(lambda: limiter.running_of(1) == 1)
        during, error, response = await gateway.ask(body=gateway.chat())
        other, _, _ = await gateway.ask(body=gateway.chat(), who="bob")
    await gateway.until(lambda: limiter.running_of(1) == 0)
    later, _, _ = await gateway.ask(body=gateway.chat())

    assert (during, other, later) == (429, 200, 200)
    assert "Rate limit reached for requests at once: 1" in error["error"]["message"]
    assert response.headers["retry-after"] == "1"
    await gateway.check_quiet()
    await gateway.close()


async def test_key_limit_applies_beside_tenant_limit(gateway: GatewayFixture) -> None:
    """The tenant's other key continues."""
    other = create_key(gateway.store, wall_ms, 1)
    change_key(gateway.store, "1", limits=Limits(requests_per_minute=1), by=TESTER)
    gateway.gateway.context.authenticator.refresh_now()
    one = await statuses(gateway, 3)
    headers = {"Authorization": f"Bearer {other}"}
    two, _, _ = await gateway.ask(body=gateway.chat(), who=None, headers=headers)

    assert (one, two) == ([200, 429, 429], 200)


async def test_raised_limit_applies_to_next_request(
    gateway: GatewayFixture, clock: FakeClock
) -> None:
    """No restart; used tokens refill at the new rate."""
    limit(gateway, requests_per_minute=1)
    before = await statuses(gateway, 3)
    limit(gateway, requests_per_minute=6_000_000)
    clock.advance(0.001)
    _, _, response = await gateway.ask("/v1/models", method="GET")
    left = gateway.gateway.limits.limiter.status(
        gateway.gateway.context.authenticator.authenticate(gateway.keys["ada"])
    )

    assert before == [200, 429, 429]
    assert response.status == 200
    assert await statuses(gateway, 3) == [200] * 3
    assert left["requests"].limit == 6_000_000


# --- tokens --------------------------------------------------------------------------------------


async def test_cached_tokens_use_no_limit(gateway: GatewayFixture) -> None:
    """A cached conversation fits a limit that its first turn used up."""
    limit(gateway, input_tokens_per_minute=400)
    first, _, response = await gateway.ask(body=gateway.chat(LONG))
    left = int(response.headers["x-ratelimit-remaining-tokens"])
    again = [await gateway.ask(body=gateway.chat(LONG)) for _ in range(4)]
    other, _, _ = await gateway.ask(body=gateway.chat("another " + LONG))

    assert (first, [status for status, _, _ in again]) == (200, [200] * 4)
    assert left < 200
    assert other == 429


async def test_unused_reservation_is_returned(gateway: GatewayFixture) -> None:
    """The limit counts the actual output."""
    limit(gateway, output_tokens_per_minute=100)
    got = [(await gateway.ask(body=gateway.chat(max_tokens=8)))[0] for _ in range(5)]
    status, _, response = await gateway.ask(body=gateway.chat(max_tokens=90))

    assert got == [200] * 5
    assert status == 429
    assert response.headers["x-ratelimit-remaining-tokens"] == "60"


async def test_disconnect_returns_unused_reservation(gateway: GatewayFixture) -> None:
    """And its concurrency slot."""
    limit(gateway, output_tokens_per_minute=1_000, requests_at_once=1)
    gateway.runner.hold_after(10)
    body = json.dumps(gateway.chat(max_tokens=400, stream=True)).encode()
    async with gateway.connection() as (reader, writer):
        writer.write(gateway.post("/v1/chat/completions", body))
        await reader.readuntil(b"data: ")
    await gateway.until(lambda: not gateway.gateway.context.running)  # that it left is known
    gateway.runner.release()
    await gateway.quiet()
    limiter = gateway.gateway.limits.limiter
    left = limiter.status(gateway.gateway.context.authenticator.authenticate(gateway.keys["ada"]))

    assert limiter.running_of(1) == 0
    assert left["output_tokens"].remaining > 900
    await gateway.check_quiet()


async def test_later_refusal_returns_reservation(gateway: GatewayFixture) -> None:
    """The ledger is unavailable: nothing ran, so only the request counts."""
    limit(gateway, tokens_per_minute=1_000)
    await gateway.gateway.ledger.close()
    status, _, response = await gateway.ask(body=gateway.chat())
    limiter = gateway.gateway.limits.limiter
    left = limiter.status(gateway.gateway.context.authenticator.authenticate(gateway.keys["ada"]))

    assert status == 503
    assert left["tokens"].remaining == 1_000
    assert response.headers["x-ratelimit-remaining-tokens"] == "1000"
    assert limiter.running_of(1) == 0


def test_estimate_is_an_upper_bound() -> None:
    """All samples of all prompts; nothing is saved if nothing may be read."""
    grant = CacheGrant(b"a")
    one = Request("1", (1,) * 40, 10, grant, samples=3)
    two = Request("2", (1,) * 20, 5, grant)
    blind = Request("3", (1,) * 20, 5, CacheGrant(b"a", read=False))

    assert estimate([one, two], 32) == Demand(28, 35)
    assert estimate([blind], 16) == Demand(20, 5)


# --- headers -------------------------------------------------------------------------------------

STATES: dict[Meter, LimitState] = {
    "requests": LimitState(10, 4, 0.2501),
    "tokens": LimitState(1_000, 900, 72.5),
    "input_tokens": LimitState(800, 750, 60.0),
}


def test_openai_headers_are_durations() -> None:
    """The tighter token limit, because there is one header."""
    headers = chat.DIALECT.limit_headers(STATES, 0)

    assert {name.lower(): value for name, value in headers.items()} == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "4",
        "x-ratelimit-reset-requests": "251ms",
        "x-ratelimit-limit-tokens": "800",
        "x-ratelimit-remaining-tokens": "750",
        "x-ratelimit-reset-tokens": "1m0s",
    }


def test_anthropic_headers_are_instants() -> None:
    """RFC 3339, rounded up to the second."""
    headers = messages.DIALECT.limit_headers(STATES, 1_767_268_800_999)
    lower = {name.lower(): value for name, value in headers.items()}

    assert lower["anthropic-ratelimit-requests-remaining"] == "4"
    assert lower["anthropic-ratelimit-input-tokens-limit"] == "800"
    assert lower["anthropic-ratelimit-tokens-reset"] == "2026-01-01T12:01:14Z"
    assert all(datetime.fromisoformat(v) for n, v in lower.items() if n.endswith("reset"))


def test_gemini_has_no_headers() -> None:
    assert generate_content.DIALECT.limit_headers(STATES, 0) == {}


async def test_answers_have_limit_headers(gateway: GatewayFixture) -> None:
    """After this request was counted, streamed or not."""
    limit(gateway, requests_per_minute=10)
    _, _, whole = await gateway.ask(body=gateway.chat())
    _, _, stream = await gateway.ask(body=gateway.chat(stream=True))

    assert whole.headers["x-ratelimit-remaining-requests"] == "9"
    assert stream.headers["x-ratelimit-remaining-requests"] == "8"
    assert stream.headers["x-ratelimit-limit-requests"] == "10"


async def test_no_headers_without_limits(gateway: GatewayFixture) -> None:
    _, _, response = await gateway.ask(body=gateway.chat())

    assert not any("ratelimit" in name.lower() for name in response.headers)


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0ms"), (1.0, "1s"), (59.9999, "1m0s")])
def test_duration_is_rounded_up(seconds: float, text: str) -> None:
    """A client that waits exactly that long is not too early."""
    states: dict[Meter, LimitState] = {"requests": LimitState(1, 0, seconds)}
    headers = chat.DIALECT.limit_headers(states, 0)

    assert headers["X-RateLimit-Reset-Requests"] == text
