"""Google's SDK against a complete gateway: only the base URL and the key differ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google import genai
from google.genai import errors, types

from tests.e2e.sdks import gemini_request
from tests.unit.gateway.gateway_fixture import GatewayFixture

# The SDK's HTTP client warns of its inheritance and closes its sockets late.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Inheritance class:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

LONG = "The trunk is shared, the branches are one's own. " * 6


def client_of(
    gateway: GatewayFixture, key: str | None = None, version: str | None = None, **more: Any
) -> Any:
    options = types.HttpOptions(base_url=gateway.url, api_version=version, timeout=60_000, **more)
    return genai.Client(api_key=key or gateway.keys["ada"], http_options=options).aio


@pytest.fixture(params=[None, "v1beta"])
async def client(gateway: GatewayFixture, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """Return clients with the SDK's default path prefix and with the older one."""
    client = client_of(gateway, version=request.param)
    yield client
    await client.aclose()


SHORT = types.GenerateContentConfig(max_output_tokens=6, temperature=0)


async def test_second_turn_of_a_stream_reads_the_first(
    gateway: GatewayFixture, client: Any
) -> None:
    """The main use, with the counts that an application reads."""
    first = await client.models.generate_content(
        **gemini_request(gateway, contents=LONG, config=SHORT)
    )
    text, last = "", None
    stream = await client.models.generate_content_stream(
        **gemini_request(gateway, contents=LONG, config=SHORT)
    )
    async for chunk in stream:
        text += chunk.text or ""
        last = chunk

    assert last is not None
    assert text == (first.text or "")
    assert last.usage_metadata.cached_content_token_count > 0
    assert last.usage_metadata.prompt_token_count == first.usage_metadata.prompt_token_count
    assert last.candidates[0].finish_reason in ("STOP", "MAX_TOKENS")


async def test_chat_keeps_a_streamed_turn(gateway: GatewayFixture, client: Any) -> None:
    """The SDK drops a turn with a chunk without parts; the next turn must find its whole prefix."""
    chat = client.chats.create(model=gateway.model, config=SHORT)
    prompts, cached = [], []
    for text in ("And?", "So?", "Then?"):
        chunks = [chunk async for chunk in await chat.send_message_stream(text)]
        usage = chunks[-1].usage_metadata
        prompts.append(usage.prompt_token_count)
        cached.append(usage.cached_content_token_count or 0)

    curated = chat.get_history(curated=True)
    assert len(curated) == len(chat.get_history())
    assert [content.role for content in curated].count("user") == 3
    assert cached[1] >= prompts[0]
    assert cached[2] >= prompts[1]


async def test_synchronous_client_reads_the_same_answer(gateway: GatewayFixture) -> None:
    """It has another HTTP client and splits a stream into lines itself."""
    options = types.HttpOptions(base_url=gateway.url, timeout=60_000)

    def ask() -> tuple[str | None, str, int]:
        with genai.Client(api_key=gateway.keys["ada"], http_options=options) as client:
            unary = client.models.generate_content(
                **gemini_request(gateway, contents=LONG, config=SHORT)
            )
            chunks = list(
                client.models.generate_content_stream(
                    **gemini_request(gateway, contents=LONG, config=SHORT)
                )
            )
            counted = client.models.count_tokens(model=gateway.model, contents=LONG)
        return unary.text, "".join(chunk.text or "" for chunk in chunks), counted.total_tokens or 0

    unary, streamed, counted = await asyncio.to_thread(ask)

    assert unary == streamed
    assert counted > len(LONG) // 8
    await gateway.check_quiet()


async def test_count_equals_the_prompt_tokens(gateway: GatewayFixture, client: Any) -> None:
    """One renderer serves both."""
    counted = await client.models.count_tokens(model=gateway.model, contents=LONG)
    used = await client.models.generate_content(
        **gemini_request(gateway, contents=LONG, config=SHORT)
    )

    assert counted.total_tokens == used.usage_metadata.prompt_token_count


async def test_cached_content_life_cycle(gateway: GatewayFixture, client: Any) -> None:
    """Create, use, list, update, delete; then an error that names nothing."""
    made = await client.caches.create(
        model=gateway.model,
        config=types.CreateCachedContentConfig(
            contents=LONG, system_instruction="Be brief.", ttl="300s", display_name="trunk"
        ),
    )
    config = types.GenerateContentConfig(
        cached_content=made.name, max_output_tokens=4, temperature=0
    )
    used = await client.models.generate_content(
        **gemini_request(gateway, contents="And?", config=config)
    )
    listed = [one.name async for one in await client.caches.list()]
    changed = await client.caches.update(
        name=made.name, config=types.UpdateCachedContentConfig(ttl="7200s")
    )
    await client.caches.delete(name=made.name)
    with pytest.raises(errors.ClientError) as caught:
        await client.models.generate_content(
            **gemini_request(gateway, contents="And?", config=config)
        )

    tokens = made.usage_metadata.total_token_count
    assert used.usage_metadata.cached_content_token_count >= tokens
    assert listed == [made.name]
    assert changed.expire_time > made.expire_time
    assert caught.value.code == 403


async def test_lists_and_gets_models(gateway: GatewayFixture, client: Any) -> None:
    names = [model.name async for model in await client.models.list()]
    one = await client.models.get(model=gateway.model)

    assert names == [f"models/{gateway.model}"]
    assert one.input_token_limit > 0


@pytest.mark.parametrize(
    ("key", "model", "config", "code", "status"),
    [
        ("tl-wrong", None, {}, 401, "UNAUTHENTICATED"),
        (None, "other", {}, 404, "NOT_FOUND"),
        (None, None, {"temperature": 9.0}, 400, "INVALID_ARGUMENT"),
        (None, None, {"cached_content": "none"}, 403, "PERMISSION_DENIED"),
    ],
)
async def test_errors_raise_the_sdks_exceptions(
    gateway: GatewayFixture,
    key: str | None,
    model: str | None,
    config: dict[str, Any],
    code: int,
    status: str,
) -> None:
    """The SDK reads code and status from the body."""
    with pytest.raises(errors.ClientError) as caught:
        await client_of(gateway, key).models.generate_content(
            model=model or gateway.model,
            contents="hi",
            config=types.GenerateContentConfig(**config),
        )

    assert (caught.value.code, caught.value.status) == (code, status)


@pytest.mark.usefixtures("one_at_once")
async def test_sdk_retries_after_a_rate_limit_if_configured(gateway: GatewayFixture) -> None:
    """The SDK retries only on request and ignores retry-after; header and RetryInfo agree for other
    clients.
    """
    once = client_of(gateway)
    again = types.HttpRetryOptions(
        attempts=500, initial_delay=0.01, max_delay=0.01, exp_base=1, jitter=0
    )
    gateway.runner.hold_after(10)
    config = types.GenerateContentConfig(max_output_tokens=40, temperature=0)
    running = aiter(
        await once.models.generate_content_stream(**gemini_request(gateway, config=config))
    )
    first = await anext(running)
    with pytest.raises(errors.ClientError) as caught:
        await once.models.generate_content(**gemini_request(gateway, config=SHORT))
    waiting = asyncio.ensure_future(
        client_of(gateway, retry_options=again).models.generate_content(
            **gemini_request(gateway, config=SHORT)
        )
    )
    await gateway.until(lambda: sum(line.get("status") == 429 for line in gateway.lines) > 1)
    gateway.runner.release()
    chunks = [first, *[chunk async for chunk in running]]
    answer = await waiting

    retry = caught.value.details["error"]["details"][-1]
    assert (caught.value.code, caught.value.status) == (429, "RESOURCE_EXHAUSTED")
    assert 1 <= int(retry["retryDelay"].removesuffix("s")) <= 60
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    assert chunks[-1].candidates[0].finish_reason in ("STOP", "MAX_TOKENS")
    assert answer.usage_metadata.candidates_token_count > 0
    await gateway.check_quiet()
