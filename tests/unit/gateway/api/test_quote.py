"""`POST /v1/cache/quote`: cached tokens and price of a request that does not run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from engine.api import Namespace, Peeked, Quota
from engine.statistics import LoadReport
from engine.strides import PrefixChanges, stride_digests
from gateway.engines.replicas import Replicas
from tenancy.accounts.tenants import change_tenant
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tests.unit.gateway.engines.test_replica_choice import RecordedEngine
from tests.unit.gateway.gateway_fixture import GatewayFixture

CHAT = "/v1/chat/completions"
QUOTE = "/v1/cache/quote"


def body(gateway: GatewayFixture, text: str) -> dict[str, Any]:
    return {
        "model": gateway.model,
        "max_tokens": 3,
        "temperature": 0,
        "messages": [
            {"role": "system", "content": "You are a very patient assistant. " * 4},
            {"role": "user", "content": text},
        ],
    }


async def quoted(
    gateway: GatewayFixture, request: dict[str, Any], who: str = "ada"
) -> dict[str, Any]:
    status, found, _ = await gateway.ask(QUOTE, {"endpoint": CHAT, "request": request}, who=who)
    assert status == 200, found
    answer: dict[str, Any] = found
    return answer


async def test_quote_equals_the_later_request(gateway: GatewayFixture) -> None:
    request = body(gateway, "Hello")

    before = await quoted(gateway, request)
    _, first = (await gateway.ask(CHAT, request))[:2]
    after = await quoted(gateway, request)
    _, second = (await gateway.ask(CHAT, request))[:2]

    assert before["read"] == {}
    assert before["prompt_tokens"] == first["usage"]["prompt_tokens"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert after["read"] == {"best_effort": cached}
    assert after["physical"]["cached_tokens"] == cached
    assert after["physical"]["tier"] == "device"
    assert after["miss"] is None


async def test_quote_names_the_first_uncached_segment(
    gateway: GatewayFixture,
) -> None:
    await gateway.ask(CHAT, body(gateway, "Hello there"))

    found = await quoted(gateway, body(gateway, "Something else"))

    assert found["miss"]["path"] == "messages[1].content"
    assert found["miss"]["token"] == found["physical"]["cached_tokens"] > 0


async def test_quote_uses_the_tenants_rate_card(gateway: GatewayFixture) -> None:
    """Read tokens are cheaper; the price without any cache stands beside it."""
    card = RateCard("list", input=1_000, cache_read=100, output=4_000)
    add_card(gateway.store, lambda: 0, card)
    await gateway.ask(CHAT, body(gateway, "Hello"))

    found = await quoted(gateway, body(gateway, "Hello"))

    price, read = found["price"], found["read"]["best_effort"]
    assert price["rate_card"] == "list@1"
    assert price["prompt_pico"] == read * 100 + found["fresh_tokens"] * 1_000
    assert price["uncached_pico"] == found["prompt_tokens"] * 1_000


async def test_quote_tells_what_would_be_promised(gateway: GatewayFixture) -> None:
    """In the words of a lease, and what the request is granted then."""
    request = body(gateway, "Hello " * 40)
    assert (await quoted(gateway, request))["promise"] is None
    request["prompt_cache_options"] = {"mode": "implicit", "ttl": "30m"}
    whole = (await quoted(gateway, request))["promise"]
    change_tenant(gateway.store, "ada", {"promised_blocks_max": 4})
    gateway.gateway.context.authenticator.refresh_now()
    clipped = (await quoted(gateway, request))["promise"]
    _, _, answered = await gateway.ask(CHAT, request)

    assert (whole["lease"], whole["bound"]) == ("granted", None)
    assert whole["granted_tokens"] == whole["requested_tokens"] > 64
    assert (clipped["lease"], clipped["bound"]) == ("clipped", "quota")
    assert clipped["granted_tokens"] == 64
    assert "write=64" in answered.headers["X-Trunkline-Cache"]


async def test_quote_sees_only_the_own_namespace(gateway: GatewayFixture) -> None:
    await gateway.ask(CHAT, body(gateway, "Hello"))

    found = await quoted(gateway, body(gateway, "Hello"), who="bob")

    assert found["physical"]["cached_tokens"] == 0


async def test_quote_pins_renews_and_bills_nothing(gateway: GatewayFixture) -> None:
    """The ledger has the two real requests alone."""
    await gateway.ask(CHAT, body(gateway, "Hello"))
    blocks = (await gateway.engine.get_stats()).cached_blocks
    for _ in range(3):
        await quoted(gateway, body(gateway, "Something new"))

    stats = await gateway.engine.get_stats()

    assert stats.cached_blocks == blocks
    assert len(gateway.store.query("select 1 from ledger")) == 1


async def test_refuses_invalid_quotes(gateway: GatewayFixture) -> None:
    """An unknown path, a body without its fields, a request that is wrong."""
    answers = [
        await gateway.ask(QUOTE, wrong)
        for wrong in (
            {"endpoint": "/v1/models", "request": {}},
            {"endpoint": CHAT},
            {"endpoint": CHAT, "request": {"model": gateway.model, "messages": []}},
            {"endpoint": CHAT, "request": {**body(gateway, "x"), "model": "none"}},
        )
    ]

    assert [answer[0] for answer in answers] == [400, 400, 400, 404]


async def test_refuses_to_quote_a_request_that_could_never_run(gateway: GatewayFixture) -> None:
    too_long = body(gateway, "Hello " * 2_000)
    status, quote, _ = await gateway.ask(QUOTE, {"endpoint": CHAT, "request": too_long})
    direct = await gateway.ask(CHAT, too_long)

    assert (status, direct[0]) == (400, 400)
    assert quote["error"]["code"] == direct[1]["error"]["code"] == "context_length_exceeded"


async def test_miss_cause_names_another_partition(gateway: GatewayFixture) -> None:
    """The same prompt is cached under another cache salt of the tenant."""
    await gateway.ask(CHAT, {**body(gateway, "Hello"), "cache_salt": "one"})

    other = await quoted(gateway, {**body(gateway, "Hello"), "cache_salt": "two"})
    stranger = await quoted(gateway, {**body(gateway, "Hello"), "cache_salt": "two"}, who="bob")
    new = await quoted(gateway, {**body(gateway, "Bye"), "cache_salt": "one"})

    assert other["miss"]["cause"] == "other_namespace"
    assert stranger["miss"]["cause"] is None
    assert new["miss"]["cause"] is None


async def test_cache_header_names_another_partition(
    gateway: GatewayFixture,
) -> None:
    """The breakpoint was written under one cache salt and requested under another."""
    asked = {**body(gateway, "Hello"), "prompt_cache_options": {"ttl": "30m"}}
    headers = []
    for key, who in (("one", "ada"), ("two", "ada"), ("two", "bob")):
        request = {**asked, "cache_salt": key}
        _, _, response = await gateway.ask(CHAT, request, who=who)
        headers.append(response.headers["X-Trunkline-Cache"])

    causes = ["never_written", "other_namespace", "never_written"]
    assert [header.partition("miss=")[2] for header in headers] == [
        f"{cause}; segment=messages[0].content" for cause in causes
    ]


async def test_cache_header_names_the_first_uncached_segment(
    gateway: GatewayFixture,
) -> None:
    """As a quote does."""
    asked = {"prompt_cache_options": {"ttl": "30m"}}
    await gateway.ask(CHAT, {**body(gateway, "Hello there"), **asked})
    _, _, response = await gateway.ask(CHAT, {**body(gateway, "Something else"), **asked})
    _, _, again = await gateway.ask(CHAT, {**body(gateway, "Something else"), **asked})

    parts = dict(part.split("=") for part in response.headers["X-Trunkline-Cache"].split("; "))
    assert (parts["miss"], parts["segment"]) == ("never_written", "messages[1].content")
    assert int(parts["physical"]) > 0
    assert "segment" not in again.headers["X-Trunkline-Cache"]


async def test_prefix_that_was_promised_is_no_miss_after_a_restart(
    unopened_gateway: GatewayFixture, tmp_path: Path
) -> None:
    """The database keeps the promise; the engine's blocks are gone."""
    headers = []
    for gateway in (
        unopened_gateway,
        await asyncio.to_thread(
            GatewayFixture, unopened_gateway.card, tmp_path, unopened_gateway.store
        ),
    ):
        await gateway.open()
        asked = {**body(gateway, "Hello"), "prompt_cache_options": {"ttl": "30m"}}
        _, _, response = await gateway.ask(CHAT, asked)
        headers.append(response.headers["X-Trunkline-Cache"])
        await gateway.close()

    causes = [header.partition("miss=")[2].partition(";")[0] for header in headers]
    assert causes == ["never_written", ""]
    assert "read=0;" in headers[0]
    assert "read=0;" not in headers[1]


async def test_a_quote_without_its_envelope_names_it(gateway: GatewayFixture) -> None:
    """The request's own body is the commonest first try; a misspelt field is told as one."""
    request = body(gateway, "Hello")
    for given in (request, {**request, "endpoint": CHAT}):
        status, found, _ = await gateway.ask(QUOTE, given)
        assert (status, found["error"]["param"]) == (400, "request")
        assert "request: missing" in found["error"]["message"]
        assert '"endpoint": "/v1/chat/completions", "request": {' in found["error"]["message"]
    status, found, _ = await gateway.ask(QUOTE, {"endpoint": CHAT, "request": request, "x": 1})

    assert (status, "unknown field `x`" in found["error"]["message"]) == (400, True)


class PeekedEngine(RecordedEngine):
    """An engine that has been asked what it has of a prompt, and has so many tokens of each."""

    def __init__(self, epoch: str) -> None:
        super().__init__(epoch)
        self.cached_tokens = 0
        self.peeks: list[tuple[Namespace, tuple[int, ...]]] = []

    async def peek(
        self, namespace: Namespace, tokens: tuple[int, ...], quota: Quota | None = None
    ) -> Peeked:
        self.peeks.append((namespace, tokens))
        return Peeked(0, self.cached_tokens)

    def tell(self, waiting_tokens: int) -> None:
        """Tell a queue, and a pace of 1,000 prompt tokens a second."""
        self.receive([LoadReport(waiting_tokens=waiting_tokens, prefill_tokens_per_s=1_000.0)])


async def test_a_quote_is_that_of_the_engine_that_would_be_chosen(
    gateway: GatewayFixture,
) -> None:
    """Its hits and its wait: not those of an engine with a longer queue, nor sums over both."""
    engines = [PeekedEngine("a"), PeekedEngine("b")]
    replicas = Replicas()
    for number, engine in enumerate(engines):
        replicas.add(f"e{number}", engine)
        engine.receive([PrefixChanges(is_first=True)])
    model = gateway.gateway.context.models.default
    own, model.replicas = model.replicas, replicas
    first, second = engines
    request = body(gateway, "What is known of all this? " * 8)
    second.tell(100_000)
    first.tell(0)
    cold = await quoted(gateway, request)
    ((namespace, tokens),) = first.peeks
    second.cached_tokens = 256
    second.receive([PrefixChanges(device_added=b"".join(stride_digests(namespace, tokens)[:2]))])
    second.tell(100)
    warm = await quoted(gateway, request)
    model.replicas = own

    total = cold["prompt_tokens"]
    assert (cold["physical"]["cached_tokens"], cold["first_token_s"]) == (0, rounded(total / 1_000))
    assert warm["physical"]["cached_tokens"] == 256
    assert warm["first_token_s"] == rounded((100 + total - 256) / 1_000)
    assert [len(one.peeks) for one in engines] == [1, 1]
    assert not first.sent
    assert not second.sent
    assert replicas.chooser.recent.newest(1) == []


def rounded(seconds: float) -> float:
    return float(f"{seconds:.1e}")
