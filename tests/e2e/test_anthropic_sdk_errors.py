"""Anthropic's SDK on errors: its exceptions and retries."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import anthropic
import pytest
from anthropic import AsyncAnthropic

from tests.e2e.anthropic_asks import connected, hello, marked
from tests.unit.gateway.gateway_fixture import GatewayFixture


@pytest.fixture
async def client(gateway: GatewayFixture) -> AsyncIterator[AsyncAnthropic]:
    async with connected(gateway) as client:
        yield client


async def test_errors_raise_the_sdks_exceptions(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """Applications branch on the class, the type and the code."""
    stranger = client.with_options(api_key="tl-nobody")
    with pytest.raises(anthropic.AuthenticationError) as unknown_key:
        await stranger.messages.create(**hello(gateway))
    with pytest.raises(anthropic.NotFoundError) as unknown_model:
        await client.messages.create(**hello(gateway, model="claude-9"))
    words = [{"role": "user", "content": "word " * 400}]
    with pytest.raises(anthropic.BadRequestError) as too_long:
        await client.messages.create(**hello(gateway, messages=words))
    with pytest.raises(anthropic.BadRequestError) as too_many:
        await client.messages.create(**hello(gateway, system=[marked("x")] * 5))
    sampled = await client.messages.create(**hello(gateway, extra_body={"temperature": 1.0}))

    assert unknown_key.value.error_code == "invalid_api_key"
    assert unknown_model.value.type == "not_found_error"
    assert too_long.value.error_code == "context_length_exceeded"
    assert too_long.value.request_id is not None
    assert too_long.value.request_id.startswith("req_")
    assert "Found 5" in too_many.value.message
    assert re.search(r"prompt is too long: \d+ tokens > \d+ maximum", too_long.value.message)
    assert "does not exist" in unknown_model.value.message
    assert sampled.type == "message"
    assert len(gateway.entries()) == 1
    await gateway.check_quiet()


@pytest.fixture
def short_bodies(unopened_gateway: GatewayFixture) -> None:
    """Limit a body, before the gateway opens, to 2,000 bytes."""
    unopened_gateway.set_server(body_bytes_max=2_000)


@pytest.mark.usefixtures("short_bodies")
async def test_body_over_the_limit_is_content_too_large(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """The size check precedes parsing."""
    words = [{"role": "user", "content": "word " * 1_000}]
    with pytest.raises(anthropic.ContentTooLargeError):
        await client.messages.create(**hello(gateway, messages=words))


@pytest.mark.usefixtures("one_at_once")
async def test_sdk_retries_after_a_rate_limit(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """An application does not notice a limit that lasts a moment."""
    client = client.with_options(max_retries=2)
    gateway.runner.hold_after(10)
    running = await client.messages.create(**hello(gateway, max_tokens=40, stream=True))
    waiting = asyncio.ensure_future(client.messages.create(**hello(gateway)))
    await gateway.until(lambda: any(line.get("status") == 429 for line in gateway.lines))
    gateway.runner.release()
    names = [event.type async for event in running]
    message = await waiting

    assert names[-1] == "message_stop"
    assert message.usage.output_tokens == 8
    statuses = [line["status"] for line in gateway.lines if line["event"] == "request"]
    assert statuses == [429, 200, 200]
    await gateway.check_quiet()


async def test_idempotent_request_is_replayed(gateway: GatewayFixture) -> None:
    """Unary or streamed, by the SDK's own headers.

    While the request runs, the SDK waits and retries.
    """
    key = gateway.keys["ada"]
    named = {"extra_headers": {"Idempotency-Key": "order-7"}}
    async with AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=2) as client:
        gateway.runner.hold_after(4)
        one = asyncio.create_task(client.messages.create(**hello(gateway, **named)))
        await gateway.until(lambda: bool(gateway.gateway.context.running))
        two = asyncio.create_task(client.messages.create(**hello(gateway, **named)))
        await gateway.until(lambda: any(line.get("status") == 409 for line in gateway.lines))
        gateway.runner.release()
        first, second = await one, await two
        streams = []
        for _ in range(2):
            more = {"extra_headers": {"Idempotency-Key": "order-8"}}
            async with client.messages.stream(**hello(gateway, **more)) as stream:
                streams.append(await stream.get_final_message())
        with pytest.raises(anthropic.ConflictError) as caught:
            await client.messages.create(**hello(gateway, max_tokens=5, **named))

    assert first == second
    assert streams[0] == streams[1]
    assert caught.value.type == "conflict_error"
    assert [entry[0] for entry in gateway.entries()] == ["done", "done"]
    assert [line["ending"] for line in gateway.lines].count("replayed") == 2
