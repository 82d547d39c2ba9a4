"""Anthropic's SDK against a complete gateway, used as an application would use it.

Only the base URL and the key differ. The runner is a fake; all code between the socket and the
runner is the product's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message, Usage

from tests.e2e.anthropic_asks import connected, hello, marked
from tests.e2e.sdks import MORE, SYSTEM
from tests.unit.gateway.gateway_fixture import GatewayFixture


@pytest.fixture
async def client(gateway: GatewayFixture) -> AsyncIterator[AsyncAnthropic]:
    async with connected(gateway) as client:
        yield client


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def counts(usage: Usage) -> tuple[int, int, int]:
    """Return (read, written, other) tokens of a prompt."""
    read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    assert read is not None
    assert written is not None
    return read, written, usage.input_tokens


# --- answers -------------------------------------------------------------------------------------


async def test_message_and_stream_are_equal(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """One request in both shapes, joined by the SDK's accumulator."""
    unary = await client.messages.create(**hello(gateway))
    async with client.messages.stream(**hello(gateway)) as stream:
        names = [event.type async for event in stream]
        folded = await stream.get_final_message()

    assert text_of(folded) == text_of(unary)
    assert (folded.stop_reason, unary.stop_reason) == ("max_tokens", "max_tokens")
    assert counts(folded.usage) == counts(unary.usage)
    assert folded.usage.output_tokens == unary.usage.output_tokens == 8
    assert (names[0], names[-1]) == ("message_start", "message_stop")
    assert unary.id.startswith("msg_")
    await gateway.check_quiet()


async def test_accepts_the_key_in_either_header(gateway: GatewayFixture) -> None:
    """Newer majors of the SDK send a bearer token, older ones X-Api-Key."""
    for headers in (
        {"X-Api-Key": gateway.keys["ada"], "anthropic-version": "2023-06-01"},
        {"Authorization": f"Bearer {gateway.keys['ada']}", "anthropic-version": "2026-10-21"},
    ):
        body = {k: v for k, v in hello(gateway, **MORE).items() if k != "extra_body"}
        status, answer, response = await gateway.ask(
            "/v1/messages?beta=true", body, who=None, headers=headers
        )

        assert status == 200, answer
        assert response.headers["request-id"] == f"req_{response.headers['x-request-id']}"


async def test_count_equals_the_charge_and_computes_nothing(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """A client plans with the count and pays the charge."""
    prompt: dict[str, Any] = {
        "system": [marked(SYSTEM)],
        "messages": [{"role": "user", "content": "hello"}],
    }
    counted = await client.messages.count_tokens(model=gateway.model, **prompt)
    before = len(gateway.entries())
    message = await client.messages.create(**hello(gateway, **prompt))

    assert counted.input_tokens == sum(counts(message.usage))
    assert (before, len(gateway.entries())) == (0, 1)
    await gateway.check_quiet()


async def test_lists_models_in_anthropics_shape(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """Applications list models to fill a menu."""
    listed = await client.models.list()
    one = await client.models.retrieve(gateway.model)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.models.retrieve("claude-9")

    assert [model.id for model in listed.data] == [gateway.model]
    assert one.type == "model"
    for request_id in (one._request_id, listed._request_id, unknown.value.request_id):
        assert request_id is not None
        assert request_id.startswith("req_")


# --- caching -------------------------------------------------------------------------------------


async def test_second_request_reads_what_the_first_wrote(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """The counts agree to the token."""
    ask = hello(gateway, system=[marked(SYSTEM)])
    first, second = [await client.messages.create(**ask) for _ in range(2)]

    read, written, rest = counts(first.usage)
    assert read == 0
    assert written > 100
    assert counts(second.usage) == (written, 0, rest)
    assert text_of(first) == text_of(second)
    assert first.usage.cache_creation is not None
    assert first.usage.cache_creation.ephemeral_5m_input_tokens == written
    await gateway.check_quiet()


async def test_usage_is_split_by_ttl(gateway: GatewayFixture, client: AsyncAnthropic) -> None:
    """One hour for the instructions, five minutes for the conversation."""
    messages = [{"role": "user", "content": [marked("a question about a book " * 3)]}]
    ask = hello(gateway, system=[marked(SYSTEM, "1h")], messages=messages)
    usage = (await client.messages.create(**ask)).usage

    assert usage.cache_creation is not None
    hour = usage.cache_creation.ephemeral_1h_input_tokens
    minutes = usage.cache_creation.ephemeral_5m_input_tokens
    assert min(hour, minutes) > 0
    assert hour + minutes == usage.cache_creation_input_tokens


async def test_request_reads_what_a_prewarm_wrote(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """Applications prewarm a long prompt before the first user arrives."""
    warm = await client.messages.create(**hello(gateway, system=[marked(SYSTEM)], max_tokens=0))
    message = await client.messages.create(**hello(gateway, system=[marked(SYSTEM)]))

    assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
    assert counts(message.usage)[0] == counts(warm.usage)[1] > 0
    await gateway.check_quiet()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"system": [marked("Another one. " + SYSTEM)]}, "system_changed"),
        ({"messages": [{"role": "user", "content": "goodbye"}]}, "messages_changed"),
        ({"thinking": {"type": "disabled"}}, "unavailable"),
        ({}, None),
    ],
)
async def test_diagnosis_names_the_change(
    gateway: GatewayFixture, client: AsyncAnthropic, change: dict[str, Any], reason: str | None
) -> None:
    """The SDK's own types parse the reason."""
    ask = hello(gateway, system=[marked(SYSTEM)])
    first = await client.messages.create(**ask, diagnostics={"previous_message_id": None})
    then = {**ask, **change, "diagnostics": {"previous_message_id": first.id}}
    second = await client.messages.create(**then)
    async with client.messages.stream(**then) as stream:
        streamed = await stream.get_final_message()

    assert first.diagnostics is None
    for message in (second, streamed):
        found = message.diagnostics and message.diagnostics.cache_miss_reason
        assert (found and found.type) == reason


async def test_diagnosis_of_an_unknown_message_is_not_found(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """Another tenant's id is unknown too."""
    opted = {"previous_message_id": None}
    async with AsyncAnthropic(base_url=gateway.url, api_key=gateway.keys["bob"]) as other:
        theirs = await other.messages.create(**hello(gateway, diagnostics=opted))
    for previous in ("msg_never", theirs.id):
        ask = hello(gateway, diagnostics={"previous_message_id": previous})
        message = await client.messages.create(**ask)

        assert message.diagnostics is not None
        assert message.diagnostics.cache_miss_reason is not None
        assert message.diagnostics.cache_miss_reason.type == "previous_message_not_found"
