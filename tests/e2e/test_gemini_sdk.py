"""Google's own SDK against a whole gateway: the base URL and the key change, nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google import genai
from google.genai import errors, types

from engine.model_store import ModelCard
from tests.gateway.house import House
from tests.models import prepared

# The SDK's own way with its HTTP client, which warns and collects its sockets late.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Inheritance class:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

LONG = "The trunk is shared, the branches are one's own. " * 6


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return prepared(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def house(card: ModelCard, tmp_path: Path) -> AsyncIterator[House]:
    house = House(card, tmp_path)
    await house.open()
    yield house
    await house.close()
    house.discard()


def client_of(house: House, key: str | None = None, version: str | None = None) -> Any:
    options = types.HttpOptions(base_url=house.url, api_version=version, timeout=20_000)
    return genai.Client(api_key=key or house.keys["ada"], http_options=options).aio


@pytest.fixture(params=[None, "v1beta"])
async def client(house: House, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """By the SDK's own choice of prefix, and by the older one."""
    client = client_of(house, version=request.param)
    yield client
    await client.aclose()


SHORT = types.GenerateContentConfig(max_output_tokens=6, temperature=0)


async def test_a_conversation_is_streamed_and_its_second_turn_reads_the_first(
    house: House, client: Any
) -> None:
    """The main job, with the numbers an application would look at."""
    first = await client.models.generate_content(model=house.model, contents=LONG, config=SHORT)
    text, last = "", None
    stream = await client.models.generate_content_stream(
        model=house.model, contents=LONG, config=SHORT
    )
    async for chunk in stream:
        text += chunk.text or ""
        last = chunk

    assert last is not None
    assert text == (first.text or "")
    assert last.usage_metadata.cached_content_token_count > 0
    assert last.usage_metadata.prompt_token_count == first.usage_metadata.prompt_token_count
    assert last.candidates[0].finish_reason in ("STOP", "MAX_TOKENS")


async def test_tokens_are_counted_as_they_will_be(house: House, client: Any) -> None:
    """The same renderer, so the same number."""
    counted = await client.models.count_tokens(model=house.model, contents=LONG)
    used = await client.models.generate_content(model=house.model, contents=LONG, config=SHORT)

    assert counted.total_tokens == used.usage_metadata.prompt_token_count


async def test_cached_content_lives_the_whole_life_of_one(house: House, client: Any) -> None:
    """Create, use, list, change, delete; then it is an error that names nothing."""
    made = await client.caches.create(
        model=house.model,
        config=types.CreateCachedContentConfig(
            contents=LONG, system_instruction="Be brief.", ttl="300s", display_name="trunk"
        ),
    )
    config = types.GenerateContentConfig(
        cached_content=made.name, max_output_tokens=4, temperature=0
    )
    used = await client.models.generate_content(model=house.model, contents="And?", config=config)
    listed = [one.name async for one in await client.caches.list()]
    changed = await client.caches.update(
        name=made.name, config=types.UpdateCachedContentConfig(ttl="7200s")
    )
    await client.caches.delete(name=made.name)
    with pytest.raises(errors.ClientError) as caught:
        await client.models.generate_content(model=house.model, contents="And?", config=config)

    tokens = made.usage_metadata.total_token_count
    assert used.usage_metadata.cached_content_token_count >= tokens
    assert listed == [made.name]
    assert changed.expire_time > made.expire_time
    assert caught.value.code == 403


async def test_models_are_listed(house: House, client: Any) -> None:
    """And one is shown."""
    names = [model.name async for model in await client.models.list()]
    one = await client.models.get(model=house.model)

    assert names == [f"models/{house.model}"]
    assert one.input_token_limit > 0


@pytest.mark.parametrize(
    ("key", "model", "config", "code", "status"),
    [
        ("tl-wrong", None, {}, 401, "UNAUTHENTICATED"),
        (None, "other", {}, 404, "NOT_FOUND"),
        (None, None, {"max_output_tokens": 10**6}, 400, "INVALID_ARGUMENT"),
        (None, None, {"cached_content": "none"}, 403, "PERMISSION_DENIED"),
    ],
)
async def test_errors_are_the_sdks_own(
    house: House,
    key: str | None,
    model: str | None,
    config: dict[str, Any],
    code: int,
    status: str,
) -> None:
    """With their code and status, where it looks for them."""
    with pytest.raises(errors.ClientError) as caught:
        await client_of(house, key).models.generate_content(
            model=model or house.model,
            contents="hi",
            config=types.GenerateContentConfig(**config),
        )

    assert (caught.value.code, caught.value.status) == (code, status)


async def test_a_reader_that_leaves_frees_its_blocks(house: House) -> None:
    """Closing the generator closes the connection; the engine hears of it."""
    stream = await client_of(house).models.generate_content_stream(
        model=house.model,
        contents="hi",
        config=types.GenerateContentConfig(max_output_tokens=300, temperature=0),
    )
    async for _ in stream:
        break
    await stream.aclose()
    await house.until(lambda: not house.gateway.context.running)

    assert (await house.quiet()).running == 0
