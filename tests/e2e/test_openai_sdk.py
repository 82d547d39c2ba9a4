"""OpenAI's SDK against a complete gateway, used as an application would use it.

Only the base URL and the key differ. The runner is a fake; all code between the socket and the
runner is the product's.
"""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.e2e.sdks import MORE, chat_request
from tests.unit.gateway.gateway_fixture import GatewayFixture


def question(text: str = "hello") -> list[Any]:
    return [{"role": "user", "content": text}]


async def test_second_turn_of_a_stream_reads_the_first(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """The main use, with the counts that an application reads."""
    messages = question("a first question, long enough to fill several blocks of the cache")
    text = ""
    usage: Any = None
    stream = await client.chat.completions.create(
        **chat_request(
            gateway,
            messages=messages,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=MORE,
        )
    )
    async for chunk in stream:
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    second = await client.chat.completions.create(
        **chat_request(
            gateway,
            messages=[*messages, {"role": "assistant", "content": text}, *question("and then?")],
            max_tokens=4,
            temperature=0,
            extra_body=MORE,
        )
    )

    assert (usage.completion_tokens, usage.total_tokens) == (24, usage.prompt_tokens + 24)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert usage.prompt_tokens - 8 <= cached < second.usage.prompt_tokens
    await gateway.check_quiet()


async def test_choices_share_a_prompt_and_differ(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """n forks one sequence; each choice has its own index and seed."""
    answer = await client.chat.completions.create(
        **chat_request(gateway, n=2, max_tokens=12, seed=3, extra_body=MORE)
    )

    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage.completion_tokens == 24
    await gateway.check_quiet()


async def test_one_logprob_per_token(gateway: GatewayFixture, client: AsyncOpenAI) -> None:
    """Evaluation tools zip logprobs with tokens."""
    answer = await client.chat.completions.create(
        **chat_request(gateway, max_tokens=5, logprobs=True, extra_body=MORE)
    )

    assert len(answer.choices[0].logprobs.content or []) == 5


async def test_completions_accept_text_token_ids_and_several_prompts(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """One HTTP request with several prompts has one ledger entry."""
    one = await client.completions.create(
        model=gateway.model, prompt="once upon", max_tokens=4, extra_body=MORE
    )
    several: Any = await client.completions.create(
        model=gateway.model, prompt=[[1, 2, 3], [4, 5]], max_tokens=4, extra_body=MORE
    )

    assert one.choices[0].finish_reason == "length"
    assert [choice.index for choice in several.choices] == [0, 1]
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (5, 8)
    assert len(gateway.entries()) == 2
    await gateway.check_quiet()


async def test_lists_models(gateway: GatewayFixture, client: AsyncOpenAI) -> None:
    """Applications list models to fill a menu."""
    listed = await client.models.list()

    assert [model.id for model in listed.data] == [gateway.model]
    assert (await client.models.retrieve(gateway.model)).id == gateway.model


async def test_errors_raise_the_sdks_exceptions(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """Applications branch on the class, the code and the param."""
    stranger = client.with_options(api_key="tl-nobody")
    with pytest.raises(openai.AuthenticationError) as unknown_key:
        await stranger.models.list()
    with pytest.raises(openai.NotFoundError) as unknown_model:
        await client.chat.completions.create(model="gpt-9", messages=question())
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.chat.completions.create(
            **chat_request(gateway, messages=question("word " * 600))
        )

    assert unknown_key.value.code == "invalid_api_key"
    assert unknown_model.value.code == "model_not_found"
    assert too_long.value.code == "context_length_exceeded"
    assert "Input tokens exceed the configured limit of 512 tokens" in too_long.value.message
    assert "This model's maximum context length is 512 tokens" in too_long.value.message
    assert "the model `gpt-9` does not exist" in unknown_model.value.message
    assert too_long.value.request_id is not None


@pytest.mark.usefixtures("one_at_once")
async def test_rate_limited_tenant_gets_a_rate_limit_error(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """The SDK backs off on a 429 with retry-after."""
    gateway.runner.hold_after(10)
    running = await client.chat.completions.create(
        **chat_request(gateway, max_tokens=40, stream=True, extra_body=MORE)
    )
    with pytest.raises(openai.RateLimitError) as caught:
        await client.chat.completions.create(**chat_request(gateway))
    gateway.runner.release()
    chunks = [chunk async for chunk in running]

    assert caught.value.code == "rate_limit_exceeded"
    assert "Rate limit reached" in caught.value.message
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert chunks[-1].choices[0].finish_reason == "length"
    await gateway.check_quiet()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_idempotent_request_survives_a_broken_connection(
    gateway: GatewayFixture, is_stream: bool
) -> None:
    """After a cut in the middle of the answer, a retry with the same key gets the complete answer
    of one execution, charged once.
    """
    kwargs: dict[str, Any] = {
        "model": gateway.model,
        "messages": question(),
        "max_tokens": 40,
        "stream": is_stream,
        "extra_body": MORE,
        "extra_headers": {"Idempotency-Key": "order-7"},
    }
    gateway.runner.hold_after(12)
    key = gateway.keys["ada"]
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as first:
        if is_stream:
            broken = await first.chat.completions.create(**kwargs)
            await anext(aiter(broken))
            await broken.close()
        else:
            asking = asyncio.create_task(first.chat.completions.create(**kwargs))
            await gateway.until(lambda: bool(gateway.gateway.context.running))
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=2) as again:
        # It runs still: the SDK comes back after a 409 by itself, a second later.
        asking = asyncio.create_task(again.chat.completions.create(**kwargs))
        await gateway.until(lambda: any(line.get("status") == 409 for line in gateway.lines))
        gateway.runner.release()
        answer: Any = await asking
        if is_stream:
            choices = [chunk.choices[0] async for chunk in answer]
            reason = choices[-1].finish_reason
        else:
            reason = answer.choices[0].finish_reason
        with pytest.raises(openai.ConflictError) as caught:
            await again.chat.completions.create(**{**kwargs, "max_tokens": 5})

    assert reason == "length"
    assert caught.value.code == "idempotency_key_reused"
    assert [(entry[0], entry[3]) for entry in gateway.entries()] == [("done", 40)]
    endings = [line["ending"] for line in gateway.lines]
    assert endings.count("replayed") == 1
    assert endings.count("refused") == 2, "the other body was sent once"
