"""Anthropic's own SDK against a whole gateway, as an application would use it: the base URL and the
key change, nothing else. The runner is a fake; everything between the socket and it is the product.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message, TextBlockParam, Usage

from tests.e2e.anthropic_asks import MORE, SYSTEM, connected, hello, marked
from tests.unit.gateway.gateway_fixture import GatewayFixture


@pytest.fixture
async def client(gateway: GatewayFixture) -> AsyncIterator[AsyncAnthropic]:
    async with connected(gateway) as client:
        yield client


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def counts(usage: Usage) -> tuple[int, int, int]:
    """(read, written, the rest) of a prompt."""
    read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    assert read is not None
    assert written is not None
    return read, written, usage.input_tokens


# --- answers -------------------------------------------------------------------------------------


async def test_a_message_and_its_stream_are_the_same(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """One request, both shapes, and the SDK's own accumulator between them."""
    whole = await client.messages.create(**hello(gateway))
    async with client.messages.stream(**hello(gateway)) as stream:
        names = [event.type async for event in stream]
        folded = await stream.get_final_message()

    assert text_of(folded) == text_of(whole)
    assert (folded.stop_reason, whole.stop_reason) == ("max_tokens", "max_tokens")
    assert counts(folded.usage) == counts(whole.usage)
    assert folded.usage.output_tokens == whole.usage.output_tokens == 8
    assert (names[0], names[-1]) == ("message_start", "message_stop")
    assert whole.id.startswith("msg_")
    await gateway.check_quiet()


async def test_the_key_comes_in_either_header(gateway: GatewayFixture) -> None:
    """The SDK's newer majors send a bearer token, the older ones a header of their own."""
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


async def test_a_stop_sequence_ends_the_answer_before_it(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """The stop is not part of the text, and is named."""
    whole = text_of(await client.messages.create(**hello(gateway, max_tokens=30)))
    stop = next(sign for sign in whole[3:] if sign.isprintable() and sign.strip() and sign != "�")
    cut = await client.messages.create(**hello(gateway, max_tokens=30, stop_sequences=[stop]))

    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert text_of(cut) == whole[: whole.index(stop)]


async def test_counting_is_what_is_charged_and_computes_nothing(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """A client plans with the one and pays the other."""
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


async def test_models_are_listed_in_anthropics_shape(
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


async def test_what_one_request_wrote_the_next_one_reads(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """The contract, to the token: a write, then a read of just that."""
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


def drawn(draw: random.Random) -> dict[str, Any]:
    """A random prompt with random breakpoints: an hour's before five minutes', at most four."""
    nouns = ["book", "hall", "shelf", "page", "ink"]
    words = [" ".join(draw.choices(nouns, k=9)) for _ in range(7)]
    blocks: list[Any] = [{"type": "text", "text": text} for text in words]
    places = sorted(draw.sample(range(len(blocks)), draw.randint(1, 4)))
    hours = draw.randint(0, len(places))
    for number, place in enumerate(places):
        blocks[place] = marked(words[place], "1h" if number < hours else None)
    turns = [{"role": "user", "content": blocks[2:4]}]
    turns += [
        {"role": "assistant", "content": blocks[4:5]},
        {"role": "user", "content": blocks[5:]},
    ]
    return {"system": blocks[:2], "messages": turns}


@pytest.mark.parametrize("seed", range(3))
async def test_a_second_identical_request_reads_exactly_what_the_first_wrote(
    gateway: GatewayFixture, client: AsyncAnthropic, seed: int
) -> None:
    """For any breakpoints; and the sum is what counting says, whoever asks."""
    draw = random.Random(seed)
    for _ in range(5):
        prompt = drawn(draw)
        ask = hello(gateway, **prompt, max_tokens=1)
        counted = await client.messages.count_tokens(model=gateway.model, **prompt)
        first, second = [counts((await client.messages.create(**ask)).usage) for _ in range(2)]

        assert sum(first) == sum(second) == counted.input_tokens
        assert second == (first[0] + first[1], 0, first[2])
        assert first[1] > 0
    await gateway.check_quiet()


async def test_what_nobody_marked_is_neither_read_nor_written(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """The engine finds it all the same; the contract says who asked for it."""
    for _ in range(2):
        message = await client.messages.create(**hello(gateway, system=SYSTEM))

        assert counts(message.usage)[:2] == (0, 0)
    assert gateway.entries()[1][2] > 100, "the engine has found what it had"


async def test_breakpoints_do_not_change_the_answer(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """Whoever pays for keeping a prefix gets the same words."""
    plain = await client.messages.create(**hello(gateway, system=SYSTEM))
    kept = await client.messages.create(**hello(gateway, system=[marked(SYSTEM, "1h")]))

    assert text_of(plain) == text_of(kept)
    assert sum(counts(plain.usage)) == sum(counts(kept.usage))


async def test_a_request_is_split_by_how_long_it_is_kept(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """An hour for the instructions, five minutes for the conversation."""
    messages = [{"role": "user", "content": [marked("a question about a book " * 3)]}]
    ask = hello(gateway, system=[marked(SYSTEM, "1h")], messages=messages)
    usage = (await client.messages.create(**ask)).usage

    assert usage.cache_creation is not None
    hour = usage.cache_creation.ephemeral_1h_input_tokens
    minutes = usage.cache_creation.ephemeral_5m_input_tokens
    assert min(hour, minutes) > 0
    assert hour + minutes == usage.cache_creation_input_tokens


async def test_automatic_caching_follows_a_conversation(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """Each turn reads what the one before wrote, without a mark in any block."""
    messages: list[Any] = [{"role": "user", "content": "where is the first book? " * 4}]
    known = 0
    for turn in range(3):
        ask = hello(gateway, messages=messages, cache_control={"type": "ephemeral"}, max_tokens=4)
        message = await client.messages.create(**ask)
        read, written, _ = counts(message.usage)

        assert read == known, turn
        assert written > 0
        known = read + written
        messages += [
            {"role": "assistant", "content": f"In hall {turn}."},
            {"role": "user", "content": f"And book number {turn}?"},
        ]
    await gateway.check_quiet()


async def test_a_prewarm_answers_nothing_and_the_next_request_reads_it(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """Applications warm a long prompt before anybody asks."""
    warm = await client.messages.create(**hello(gateway, system=[marked(SYSTEM)], max_tokens=0))
    message = await client.messages.create(**hello(gateway, system=[marked(SYSTEM)]))

    assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
    assert counts(message.usage)[0] == counts(warm.usage)[1] > 0
    await gateway.check_quiet()


async def test_a_coding_agents_billing_line_does_not_break_the_prefix(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """It is another one in each request."""
    usages = []
    for number in range(2):
        line: TextBlockParam = {
            "type": "text",
            "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number};",
        }
        ask = hello(gateway, system=[line, marked(SYSTEM)])
        usages.append((await client.messages.create(**ask)).usage)

    assert counts(usages[1])[0] == counts(usages[0])[1] > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"system": [marked("Another one. " + SYSTEM)]}, "system_changed"),
        ({"messages": [{"role": "user", "content": "goodbye"}]}, "messages_changed"),
        ({"thinking": {"type": "disabled"}}, "unavailable"),
        ({}, None),
    ],
)
async def test_a_miss_is_explained(
    gateway: GatewayFixture, client: AsyncAnthropic, change: dict[str, Any], reason: str | None
) -> None:
    """What changed since the earlier request, as the SDK's own types say it."""
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


async def test_an_unknown_earlier_message_is_said_to_be_unknown(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """Another tenant's id is as unknown as one that never was."""
    opted = {"previous_message_id": None}
    async with AsyncAnthropic(base_url=gateway.url, api_key=gateway.keys["bob"]) as other:
        theirs = await other.messages.create(**hello(gateway, diagnostics=opted))
    for previous in ("msg_never", theirs.id):
        ask = hello(gateway, diagnostics={"previous_message_id": previous})
        message = await client.messages.create(**ask)

        assert message.diagnostics is not None
        assert message.diagnostics.cache_miss_reason is not None
        assert message.diagnostics.cache_miss_reason.type == "previous_message_not_found"
