"""Anthropic's own SDK against a whole gateway, as an application would use it: the base URL and the
key change, nothing else. The runner is a fake; everything between the socket and it is the product.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message, TextBlockParam, Usage

from engine.model_store import ModelCard
from gateway.dialects.anthropic import DIALECT
from gateway.errors import Kind, Refusal
from tests.gateway.house import House

MORE = {"ignore_eos": True, "seed": 7}
"""The fake model draws end tokens as readily as others; these tests want whole answers."""

SYSTEM = "You are a librarian who knows every book there is, and where it stands. " * 2


@pytest.fixture
async def client(house: House) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(
        base_url=house.url, api_key=house.keys["ada"], max_retries=0, timeout=20
    ) as client:
        yield client


def hello(house: House, **more: Any) -> dict[str, Any]:
    """A small request; `more` replaces and adds."""
    return {
        "model": house.model,
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "hello"}],
        "extra_body": MORE,
        **more,
    }


def marked(text: str, ttl: str | None = None) -> TextBlockParam:
    """A text with a breakpoint behind it."""
    control: Any = {"type": "ephemeral"} if ttl is None else {"type": "ephemeral", "ttl": ttl}
    return {"type": "text", "text": text, "cache_control": control}


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def counts(usage: Usage) -> tuple[int, int, int]:
    """(read, written, the rest) of a prompt."""
    read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    assert read is not None
    assert written is not None
    return read, written, usage.input_tokens


# --- answers -------------------------------------------------------------------------------------


async def test_a_message_and_its_stream_are_the_same(house: House, client: AsyncAnthropic) -> None:
    """One request, both shapes, and the SDK's own accumulator between them."""
    whole = await client.messages.create(**hello(house))
    async with client.messages.stream(**hello(house)) as stream:
        names = [event.type async for event in stream]
        folded = await stream.get_final_message()

    assert text_of(folded) == text_of(whole)
    assert (folded.stop_reason, whole.stop_reason) == ("max_tokens", "max_tokens")
    assert counts(folded.usage) == counts(whole.usage)
    assert folded.usage.output_tokens == whole.usage.output_tokens == 8
    assert (names[0], names[-1]) == ("message_start", "message_stop")
    assert whole.id.startswith("msg_")
    await house.check_quiet()


async def test_the_key_comes_in_either_header(house: House) -> None:
    """The SDK's newer majors send a bearer token, the older ones a header of their own."""
    for headers in (
        {"X-Api-Key": house.keys["ada"], "anthropic-version": "2023-06-01"},
        {"Authorization": f"Bearer {house.keys['ada']}", "anthropic-version": "2026-10-21"},
    ):
        body = {k: v for k, v in hello(house, **MORE).items() if k != "extra_body"}
        status, answer, response = await house.ask(
            "/v1/messages?beta=true", body, who=None, headers=headers
        )

        assert status == 200, answer
        assert response.headers["request-id"] == f"req_{response.headers['x-request-id']}"


async def test_a_stop_sequence_ends_the_answer_before_it(
    house: House, client: AsyncAnthropic
) -> None:
    """The stop is not part of the text, and is named."""
    whole = text_of(await client.messages.create(**hello(house, max_tokens=30)))
    stop = next(sign for sign in whole[3:] if sign.isprintable() and sign.strip() and sign != "�")
    cut = await client.messages.create(**hello(house, max_tokens=30, stop_sequences=[stop]))

    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert text_of(cut) == whole[: whole.index(stop)]


async def test_counting_is_what_is_charged_and_computes_nothing(
    house: House, client: AsyncAnthropic
) -> None:
    """A client plans with the one and pays the other."""
    prompt: dict[str, Any] = {
        "system": [marked(SYSTEM)],
        "messages": [{"role": "user", "content": "hello"}],
    }
    counted = await client.messages.count_tokens(model=house.model, **prompt)
    before = len(house.entries())
    message = await client.messages.create(**hello(house, **prompt))

    assert counted.input_tokens == sum(counts(message.usage))
    assert (before, len(house.entries())) == (0, 1)
    await house.check_quiet()


async def test_models_are_listed_in_anthropics_shape(house: House, client: AsyncAnthropic) -> None:
    """Applications list models to fill a menu."""
    listed = await client.models.list()
    one = await client.models.retrieve(house.model)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.models.retrieve("claude-9")

    assert [model.id for model in listed.data] == [house.model]
    assert one.type == "model"
    for request_id in (one._request_id, listed._request_id, unknown.value.request_id):
        assert request_id is not None
        assert request_id.startswith("req_")


# --- caching -------------------------------------------------------------------------------------


async def test_what_one_request_wrote_the_next_one_reads(
    house: House, client: AsyncAnthropic
) -> None:
    """The contract, to the token: a write, then a read of just that."""
    ask = hello(house, system=[marked(SYSTEM)])
    first, second = [await client.messages.create(**ask) for _ in range(2)]

    read, written, rest = counts(first.usage)
    assert read == 0
    assert written > 100
    assert counts(second.usage) == (written, 0, rest)
    assert text_of(first) == text_of(second)
    assert first.usage.cache_creation is not None
    assert first.usage.cache_creation.ephemeral_5m_input_tokens == written
    await house.check_quiet()


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
    house: House, client: AsyncAnthropic, seed: int
) -> None:
    """For any breakpoints; and the sum is what counting says, whoever asks."""
    draw = random.Random(seed)
    for _ in range(5):
        prompt = drawn(draw)
        ask = hello(house, **prompt, max_tokens=1)
        counted = await client.messages.count_tokens(model=house.model, **prompt)
        first, second = [counts((await client.messages.create(**ask)).usage) for _ in range(2)]

        assert sum(first) == sum(second) == counted.input_tokens
        assert second == (first[0] + first[1], 0, first[2])
        assert first[1] > 0
    await house.check_quiet()


async def test_what_nobody_marked_is_neither_read_nor_written(
    house: House, client: AsyncAnthropic
) -> None:
    """The engine finds it all the same; the contract says who asked for it."""
    for _ in range(2):
        message = await client.messages.create(**hello(house, system=SYSTEM))

        assert counts(message.usage)[:2] == (0, 0)
    assert house.entries()[1][2] > 100, "the engine has found what it had"


async def test_breakpoints_do_not_change_the_answer(house: House, client: AsyncAnthropic) -> None:
    """Whoever pays for keeping a prefix gets the same words."""
    plain = await client.messages.create(**hello(house, system=SYSTEM))
    kept = await client.messages.create(**hello(house, system=[marked(SYSTEM, "1h")]))

    assert text_of(plain) == text_of(kept)
    assert sum(counts(plain.usage)) == sum(counts(kept.usage))


async def test_a_request_is_split_by_how_long_it_is_kept(
    house: House, client: AsyncAnthropic
) -> None:
    """An hour for the instructions, five minutes for the conversation."""
    messages = [{"role": "user", "content": [marked("a question about a book " * 3)]}]
    ask = hello(house, system=[marked(SYSTEM, "1h")], messages=messages)
    usage = (await client.messages.create(**ask)).usage

    assert usage.cache_creation is not None
    hour = usage.cache_creation.ephemeral_1h_input_tokens
    minutes = usage.cache_creation.ephemeral_5m_input_tokens
    assert min(hour, minutes) > 0
    assert hour + minutes == usage.cache_creation_input_tokens


async def test_automatic_caching_follows_a_conversation(
    house: House, client: AsyncAnthropic
) -> None:
    """Each turn reads what the one before wrote, without a mark in any block."""
    messages: list[Any] = [{"role": "user", "content": "where is the first book? " * 4}]
    known = 0
    for turn in range(3):
        ask = hello(house, messages=messages, cache_control={"type": "ephemeral"}, max_tokens=4)
        message = await client.messages.create(**ask)
        read, written, _ = counts(message.usage)

        assert read == known, turn
        assert written > 0
        known = read + written
        messages += [
            {"role": "assistant", "content": f"In hall {turn}."},
            {"role": "user", "content": f"And book number {turn}?"},
        ]
    await house.check_quiet()


async def test_a_prewarm_answers_nothing_and_the_next_request_reads_it(
    house: House, client: AsyncAnthropic
) -> None:
    """Applications warm a long prompt before anybody asks."""
    warm = await client.messages.create(**hello(house, system=[marked(SYSTEM)], max_tokens=0))
    message = await client.messages.create(**hello(house, system=[marked(SYSTEM)]))

    assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
    assert counts(message.usage)[0] == counts(warm.usage)[1] > 0
    await house.check_quiet()


async def test_a_coding_agents_billing_line_does_not_break_the_prefix(
    house: House, client: AsyncAnthropic
) -> None:
    """It is another one in each request."""
    usages = []
    for number in range(2):
        line: TextBlockParam = {
            "type": "text",
            "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number};",
        }
        ask = hello(house, system=[line, marked(SYSTEM)])
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
    house: House, client: AsyncAnthropic, change: dict[str, Any], reason: str | None
) -> None:
    """What changed since the earlier request, as the SDK's own types say it."""
    ask = hello(house, system=[marked(SYSTEM)])
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
    house: House, client: AsyncAnthropic
) -> None:
    """Another tenant's id is as unknown as one that never was."""
    opted = {"previous_message_id": None}
    async with AsyncAnthropic(base_url=house.url, api_key=house.keys["bob"]) as other:
        theirs = await other.messages.create(**hello(house, diagnostics=opted))
    for previous in ("msg_never", theirs.id):
        ask = hello(house, diagnostics={"previous_message_id": previous})
        message = await client.messages.create(**ask)

        assert message.diagnostics is not None
        assert message.diagnostics.cache_miss_reason is not None
        assert message.diagnostics.cache_miss_reason.type == "previous_message_not_found"


# --- errors, retries, leaving --------------------------------------------------------------------


async def test_errors_are_the_sdks_own_exceptions(house: House, client: AsyncAnthropic) -> None:
    """Applications switch on these classes, on the type and on the code."""
    stranger = client.with_options(api_key="tl-nobody")
    with pytest.raises(anthropic.AuthenticationError) as unknown_key:
        await stranger.messages.create(**hello(house))
    with pytest.raises(anthropic.NotFoundError) as unknown_model:
        await client.messages.create(**hello(house, model="claude-9"))
    words = [{"role": "user", "content": "word " * 400}]
    with pytest.raises(anthropic.BadRequestError) as too_long:
        await client.messages.create(**hello(house, messages=words))
    with pytest.raises(anthropic.BadRequestError) as too_many:
        await client.messages.create(**hello(house, system=[marked("x")] * 5))
    with pytest.raises(anthropic.BadRequestError) as sampled:
        await client.messages.create(**hello(house, extra_body={"temperature": 1.0}))

    assert unknown_key.value.error_code == "invalid_api_key"
    assert unknown_model.value.type == "not_found_error"
    assert too_long.value.error_code == "context_length_exceeded"
    assert too_long.value.request_id is not None
    assert too_long.value.request_id.startswith("req_")
    assert "Found 5" in too_many.value.message
    assert "temperature" in sampled.value.message
    assert house.entries() == []
    await house.check_quiet()


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        (Kind.BAD, anthropic.BadRequestError),
        (Kind.AUTH, anthropic.AuthenticationError),
        (Kind.QUOTA, anthropic.PaymentRequiredError),
        (Kind.PERMISSION, anthropic.PermissionDeniedError),
        (Kind.NOT_FOUND, anthropic.NotFoundError),
        (Kind.TIMEOUT, anthropic.RequestTimeoutError),
        (Kind.CONFLICT, anthropic.ConflictError),
        (Kind.TOO_BIG, anthropic.ContentTooLargeError),
        (Kind.RATE, anthropic.RateLimitError),
        (Kind.INTERNAL, anthropic.InternalServerError),
        (Kind.BUSY, anthropic.OverloadedError),
        (Kind.DEADLINE, anthropic.GatewayTimeoutError),
    ],
)
async def test_each_kind_of_refusal_is_an_exception_of_its_own(
    house: House, kind: Kind, raised: type[anthropic.APIStatusError]
) -> None:
    """From our bytes to the class, without waiting for each to happen."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        status, body = DIALECT.error_body(Refusal(kind, "some_code", "Why."), "r1")
        head = {"content-type": "application/json", **DIALECT.headers("r1")}
        return httpx2.Response(status, content=body, headers=head)

    transport = httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
    async with AsyncAnthropic(api_key="k", max_retries=0, http_client=transport) as client:
        with pytest.raises(raised) as caught:
            await client.messages.create(**hello(house))

    assert type(caught.value) is raised
    assert (caught.value.error_code, caught.value.request_id) == ("some_code", "req_r1")


async def test_a_body_over_the_limit_is_content_too_large(card: ModelCard, tmp_path: Path) -> None:
    """Before it is parsed."""
    house = House(card, tmp_path)
    house.set_server(body_bytes_max=2_000)
    await house.open()
    async with AsyncAnthropic(base_url=house.url, api_key=house.keys["ada"]) as client:
        words = [{"role": "user", "content": "word " * 1_000}]
        with pytest.raises(anthropic.ContentTooLargeError):
            await client.messages.create(**hello(house, messages=words))
    await house.close()
    house.discard()


async def test_a_server_that_drains_is_overloaded(house: House, client: AsyncAnthropic) -> None:
    """529 with retry-after: behind a load balancer the retry lands elsewhere."""
    await house.gateway.drain(0.0)
    with pytest.raises(anthropic.OverloadedError) as caught:
        await client.messages.create(**hello(house))

    assert "retry-after" in caught.value.response.headers


async def test_the_sdk_waits_as_long_as_it_is_told_and_succeeds(
    card: ModelCard, tmp_path: Path
) -> None:
    """A limit that is reached for a moment is none an application notices."""
    house = House(card, tmp_path)
    house.set_limits(requests_per_tenant_max=1)
    await house.open()
    client = AsyncAnthropic(base_url=house.url, api_key=house.keys["ada"], max_retries=2)
    house.runner.hold_after(10)
    running = await client.messages.create(**hello(house, max_tokens=40, stream=True))
    waiting = asyncio.ensure_future(client.messages.create(**hello(house)))
    await house.until(lambda: any(line.get("status") == 429 for line in house.lines))
    house.runner.release()
    names = [event.type async for event in running]
    message = await waiting

    assert names[-1] == "message_stop"
    assert message.usage.output_tokens == 8
    assert [line["status"] for line in house.lines if line["event"] == "request"] == [429, 200, 200]
    await client.close()
    await house.check_quiet()
    await house.close()
    house.discard()


async def test_leaving_a_stream_cancels_it_in_the_engine(
    house: House, client: AsyncAnthropic
) -> None:
    """`break` in an application must not leave the engine working for nobody."""
    house.runner.hold_after(20)
    async with client.messages.stream(**hello(house, max_tokens=400)) as stream:
        async for event in stream:
            if event.type == "text":
                break
    await house.until(lambda: not house.gateway.context.running)
    house.runner.release()

    await house.check_quiet()
    (entry,) = house.entries()
    assert entry[0] == "cancelled"
    assert 0 < entry[3] < 400


async def test_an_engine_that_fails_in_a_stream_raises_in_the_sdk(
    house: House, client: AsyncAnthropic
) -> None:
    """A stream that only stops is silent truncation; the error event raises."""
    house.runner.hold_after(20)
    events = aiter(await client.messages.create(**hello(house, max_tokens=400, stream=True)))
    await anext(events)
    house.runner.fail_launch.update(range(2_000))
    house.runner.release()
    with pytest.raises(anthropic.APIStatusError) as caught:
        _ = [event async for event in events]

    assert caught.value.type in ("api_error", "overloaded_error")


async def test_a_slow_answer_is_kept_open_by_pings(card: ModelCard, tmp_path: Path) -> None:
    """Proxies close what says nothing; the SDK ignores what means nothing."""
    house = House(card, tmp_path)
    house.set_server(stream_keep_alive_s=0.01)
    await house.open()
    house.runner.hold_after(0)
    body = {k: v for k, v in hello(house, stream=True, **MORE).items() if k != "extra_body"}
    headers = {**house.headers(), "anthropic-version": "2026-10-21"}
    async with house.session.post(f"{house.url}/v1/messages", json=body, headers=headers) as answer:
        first = await answer.content.readuntil(b"\n\n")
        house.runner.release()
        rest = await answer.read()

    assert first == DIALECT.keep_alive()
    assert rest.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
    await house.check_quiet()
    await house.close()
    house.discard()


async def test_a_named_request_is_answered_again(house: House) -> None:
    """Whole or streamed, by the SDK's own headers; and while it runs the SDK waits and comes
    back."""
    key = house.keys["ada"]
    named = {"extra_headers": {"Idempotency-Key": "order-7"}}
    async with AsyncAnthropic(base_url=house.url, api_key=key, max_retries=2) as client:
        house.runner.hold_after(4)
        one = asyncio.create_task(client.messages.create(**hello(house, **named)))
        await house.until(lambda: bool(house.gateway.context.running))
        two = asyncio.create_task(client.messages.create(**hello(house, **named)))
        await house.until(lambda: any(line.get("status") == 409 for line in house.lines))
        house.runner.release()
        first, second = await one, await two
        streams = []
        for _ in range(2):
            more = {"extra_headers": {"Idempotency-Key": "order-8"}}
            async with client.messages.stream(**hello(house, **more)) as stream:
                streams.append(await stream.get_final_message())
        with pytest.raises(anthropic.ConflictError) as caught:
            await client.messages.create(**hello(house, max_tokens=5, **named))

    assert first == second
    assert streams[0] == streams[1]
    assert caught.value.type == "conflict_error"
    assert [entry[0] for entry in house.entries()] == ["done", "done"]
    assert [line["ending"] for line in house.lines].count("replayed") == 2
