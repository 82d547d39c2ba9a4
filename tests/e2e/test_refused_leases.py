"""A lease that was not granted whole is told in the body, and the official SDKs take the body."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import AsyncAnthropic
from google import genai
from google.genai import types
from openai import AsyncOpenAI

from tenancy.accounts.tenants import change_tenant
from tests.unit.gateway.gateway_fixture import GatewayFixture

# The Google SDK's HTTP client warns of its inheritance and closes its sockets late.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Inheritance class:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]
LONG = "A handbook of many words that is read again and again. " * 3


def may_promise_nothing(gateway: GatewayFixture) -> None:
    """Refuse every lease of the tenant."""
    change_tenant(gateway.store, "ada", {"promised_blocks_max": 0})
    gateway.gateway.context.authenticator.refresh_now()


def is_told(extras: Any, retention: str) -> bool:
    """Return whether the usage object says which lease was refused, and by which bound."""
    told = extras["trunkline"]["cache"]
    assert told.pop("requested_tokens") > 0
    return bool(
        told == {"lease": "refused", "bound": "quota", "retention": retention, "granted_tokens": 0}
    )


async def test_anthropic_sdk_takes_a_refused_lease(gateway: GatewayFixture) -> None:
    """Streamed and not: `cache_creation_input_tokens: 0` has a reason."""
    kept: Any = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]
    ask: Any = {
        "model": gateway.model,
        "max_tokens": 4,
        "system": kept,
        "messages": [{"role": "user", "content": "hello"}],
    }
    async with AsyncAnthropic(base_url=gateway.url, api_key=gateway.keys["ada"]) as client:
        before = await client.messages.create(**ask)
        may_promise_nothing(gateway)
        kept[0]["text"] = LONG[::-1]
        unary = await client.messages.create(**ask)
        async with client.messages.stream(**ask) as stream:
            folded = await stream.get_final_message()

    assert not before.usage.model_extra
    assert (unary.usage.cache_creation_input_tokens, unary.usage.cache_read_input_tokens) == (0, 0)
    assert is_told(unary.usage.model_extra, "5m")
    assert is_told(folded.usage.model_extra, "5m")


async def test_openai_sdk_takes_a_refused_lease(gateway: GatewayFixture) -> None:
    """In chat completions and in responses."""
    may_promise_nothing(gateway)
    more: Any = {"extra_body": {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}}
    client = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.keys["ada"], max_retries=0)
    async with client:
        chat = await client.chat.completions.create(
            model=gateway.model, messages=[{"role": "user", "content": LONG}], max_tokens=4, **more
        )
        response = await client.responses.create(
            model=gateway.model, input=LONG[::-1], max_output_tokens=4, **more
        )

    assert chat.usage is not None
    assert response.usage is not None
    assert is_told(chat.usage.model_extra, "30m")
    assert is_told(response.usage.model_extra, "30m")


async def test_google_sdk_takes_a_refused_lease(gateway: GatewayFixture) -> None:
    """Its models name every field, and leave out what they do not know."""
    may_promise_nothing(gateway)
    options = types.HttpOptions(base_url=gateway.url, timeout=60_000)
    client: Any = genai.Client(api_key=gateway.keys["ada"], http_options=options).aio
    config: Any = types.CreateCachedContentConfig(contents=[LONG], ttl="60s")
    stored = await client.caches.create(model=gateway.model, config=config)
    asked = types.GenerateContentConfig(cached_content=stored.name, max_output_tokens=4)
    answer = await client.models.generate_content(
        model=gateway.model, contents="hello", config=asked
    )
    body = {
        "cachedContent": stored.name,
        "contents": [{"role": "user", "parts": [{"text": "hello"}]}],
        "generationConfig": {"maxOutputTokens": 4},
    }
    _, raw, _ = await gateway.ask(f"/v1beta/models/{gateway.model}:generateContent", body)
    await client.aclose()

    assert answer.usage_metadata.prompt_token_count > 0
    assert is_told(raw["usageMetadata"], "resource")


async def test_strict_server_leaves_it_out(unopened_gateway: GatewayFixture) -> None:
    """Its answers have the fields that the hosted APIs have, and no others."""
    gateway = unopened_gateway
    gateway.set_server(tolerance="strict")
    await gateway.open()
    may_promise_nothing(gateway)
    cache = {"mode": "implicit", "ttl": "30m"}
    body = {"messages": [{"role": "user", "content": LONG}], "prompt_cache_options": cache}
    status, answer, response = await gateway.ask(body={**body, "model": gateway.model})
    await gateway.close()

    assert (status, "trunkline" in answer["usage"]) == (200, False)
    assert "lease=refused" in response.headers["X-Trunkline-Cache"]
