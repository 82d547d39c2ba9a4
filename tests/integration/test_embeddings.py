"""`/v1/embeddings` through the whole gateway, over a fake encoder."""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.encoder.card import EncoderCard
from gateway.config import EmbeddingsConfig, ModelSettings
from gateway.embeddings.embedder import Embedder
from gateway.errors import Kind, Refusal
from tenancy.accounts.tenants import change_tenant
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.types import wall_ms
from tests.encoders import TOKENS_MAX, VOCABULARY, prepared_encoder
from tests.tables import each_row
from tests.unit.gateway.fake_encoder import DIMENSIONS, FakeEncoder, fake_vector
from tests.unit.gateway.gateway_fixture import GatewayFixture

PATH = "/v1/embeddings"
MODEL = "tiny-bert"
CLS, SEP = VOCABULARY.index("[CLS]"), VOCABULARY.index("[SEP]")
HELLO, WORLD, THE = (VOCABULARY.index(word) for word in ("hello", "world", "the"))


@pytest.fixture(scope="module")
def encoder_card(tmp_path_factory: pytest.TempPathFactory) -> EncoderCard:
    return prepared_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
async def encoder() -> FakeEncoder:
    return FakeEncoder()


@pytest.fixture
async def unopened(
    unopened_gateway: GatewayFixture, encoder_card: EncoderCard, encoder: FakeEncoder
) -> GatewayFixture:
    """Return a gateway with an embedding model that is not open."""
    await set_embedder(unopened_gateway, encoder_card, encoder)
    return unopened_gateway


async def set_embedder(
    gateway: GatewayFixture, card: EncoderCard, encoder: FakeEncoder, **settings: Any
) -> None:
    found = EmbeddingsConfig(model=MODEL, **{"aliases": ("ada-002",), **settings})
    gateway.config = msgspec.structs.replace(gateway.config, embeddings=found)
    gateway.embeddings = await asyncio.to_thread(Embedder, card, found, encoder)


@pytest.fixture
async def gateway(unopened: GatewayFixture) -> AsyncIterator[GatewayFixture]:
    await unopened.open()
    yield unopened
    await unopened.close()


async def embed(
    gateway: GatewayFixture, texts: Any = "hello", *, who: str = "ada", **more: Any
) -> tuple[int, Any, Any]:
    """Ask for vectors; return (status, body, headers)."""
    body = {"model": MODEL, "input": texts, **more}
    status, answer, response = await gateway.ask(PATH, body, who=who)
    return status, answer, response.headers


def error_of(answer: tuple[int, Any, Any]) -> tuple[int, str, str | None]:
    status, body, _ = answer
    return status, body["error"]["code"], body["error"]["param"]


def charges(gateway: GatewayFixture) -> list[tuple[Any, ...]]:
    """Return (model, ending, prompt, read, fresh, charge) of the ledger, oldest first."""
    return gateway.store.query(
        "select model, ending, prompt_tokens, cache_read_tokens, fresh_tokens, charge_pico"
        " from ledger order by entry_id"
    )


# --- answers -------------------------------------------------------------------------------------


async def test_answer_has_openai_shape_and_the_texts_order(gateway: GatewayFixture) -> None:
    """Usage counts the two tokens around each text."""
    status, body, _ = await embed(gateway, ["hello world", "hello"])

    assert status == 200
    assert body["object"] == "list"
    assert body["model"] == MODEL
    assert [(one["object"], one["index"]) for one in body["data"]] == [
        ("embedding", 0), ("embedding", 1),
    ]  # fmt: skip
    assert [one["embedding"] for one in body["data"]] == [
        fake_vector([CLS, HELLO, WORLD, SEP]), fake_vector([CLS, HELLO, SEP]),
    ]  # fmt: skip
    assert body["usage"] == {
        "prompt_tokens": 7,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    await gateway.check_quiet()


async def test_base64_has_the_same_numbers(gateway: GatewayFixture) -> None:
    """Little-endian float32; OpenAI's SDK asks for it."""
    _, plain, _ = await embed(gateway)
    _, packed, _ = await embed(gateway, encoding_format="base64")
    numbers = array("f", base64.b64decode(packed["data"][0]["embedding"]))

    assert numbers.tolist() == plain["data"][0]["embedding"]


@pytest.mark.parametrize(
    "given",
    [
        [HELLO, WORLD],
        [[HELLO, WORLD]],
        [CLS, HELLO, WORLD, SEP],
        ["hello world"],
        "Hello   WORLD",
    ],
)
async def test_a_text_and_its_token_ids_have_one_vector(
    gateway: GatewayFixture, given: Any
) -> None:
    """The two tokens around a text may be among the ids or not."""
    _, body, _ = await embed(gateway, given)

    assert body["data"][0]["embedding"] == fake_vector([CLS, HELLO, WORLD, SEP])


async def test_a_text_that_is_too_long_is_cut_and_a_header_tells(gateway: GatewayFixture) -> None:
    """As the model's own library cuts it. The bill has what was embedded."""
    _, body, headers = await embed(gateway, ["hello", "the " * 100, "the " * 5_000])

    assert body["usage"]["prompt_tokens"] == 3 + 2 * TOKENS_MAX
    assert headers["X-Trunkline-Truncated"] == "2 of 3 inputs: 1, 2"
    cut = fake_vector([CLS, *[THE] * (TOKENS_MAX - 2), SEP])
    assert [one["embedding"] for one in body["data"][1:]] == [cut, cut]


async def test_the_longest_text_is_not_cut(gateway: GatewayFixture) -> None:
    """Its two tokens count."""
    _, body, headers = await embed(gateway, "the " * (TOKENS_MAX - 2))

    assert body["usage"]["prompt_tokens"] == TOKENS_MAX
    assert "X-Trunkline-Truncated" not in headers


async def test_embedding_without_v1_and_by_an_alias(gateway: GatewayFixture) -> None:
    """Clients omit /v1, and know only hosted names. The ledger has the model's own name."""
    status, body, _ = await gateway.ask("/embeddings", {"model": "ada-002", "input": "hello"})

    assert (status, body["model"]) == (200, "ada-002")
    assert charges(gateway)[0][0] == MODEL


async def test_models_list_the_embedding_model_for_openai_alone(gateway: GatewayFixture) -> None:
    """Anthropic's and Gemini's lists have models that generate."""
    _, listed, _ = await gateway.ask("/v1/models", method="GET")
    _, one, _ = await gateway.ask(f"/v1/models/{MODEL}", method="GET")
    _, other, _ = await gateway.ask(
        "/v1/models", method="GET", headers={"anthropic-version": "2023-06-01"}
    )

    assert [model["id"] for model in listed["data"]] == [gateway.model, MODEL, "ada-002"]
    assert one["id"] == MODEL
    assert [model["id"] for model in other["data"]] == [gateway.model]


# --- refusals ------------------------------------------------------------------------------------


@each_row(
    ("fields", "status", "code", "param"),
    [
        ({"input": ""}, 400, "invalid_value", "input"),
        ({"input": []}, 400, "invalid_value", "input"),
        ({"input": ["a", ""]}, 400, "invalid_value", "input[1]"),
        ({"input": [[]]}, 400, "invalid_value", "input[0]"),
        ({"input": 5}, 400, "invalid_value", "input"),
        ({"input": {"text": "a"}}, 400, "invalid_value", "input"),
        ({"input": [True]}, 400, "invalid_value", "input[0]"),
        ({"input": ["a", [1, "b"]]}, 400, "invalid_value", "input[1][1]"),
        ({"input": [-1]}, 400, "invalid_value", "input[0]"),
        ({"input": ["a", "x" * 600_000]}, 400, "invalid_value", "input[1]"),
        ({"input": [len(VOCABULARY)]}, 400, "invalid_value", "input"),
        ({"input": [[1], [2**31 - 1]]}, 400, "invalid_value", "input[1]"),
        ({"input": ["a"] * 2_049}, 400, "invalid_value", "input"),
        ({"input": ["the " * 30] * 2_048, "x": 1}, 400, "unknown_parameter", "x"),
        ({"encoding_format": "hex"}, 400, "invalid_value", "encoding_format"),
        ({"dimensions": 16}, 400, "invalid_value", "dimensions"),
        ({"dimensions": 0}, 400, "invalid_value", "dimensions"),
        ({"dimensions": 33}, 400, "invalid_value", "dimensions"),
        ({"truncate_prompt_tokens": 8}, 400, "unsupported_parameter", "truncate_prompt_tokens"),
        ({"model": "nothing"}, 404, "model_not_found", "model"),
    ],
)
async def test_bad_requests_are_refused_in_openai_shape(
    gateway: GatewayFixture,
    encoder: FakeEncoder,
    fields: dict[str, Any],
    status: int,
    code: str,
    param: str,
) -> None:
    """The field is named; nothing is encoded and no entry written."""
    found = await embed(gateway, **{"texts": "hello", **_as_texts(fields)})

    assert error_of(found) == (status, code, param)
    assert encoder.seen == []
    assert charges(gateway) == []


def _as_texts(fields: dict[str, Any]) -> dict[str, Any]:
    return {"texts" if name == "input" else name: value for name, value in fields.items()}


@pytest.mark.parametrize("aliases", [(), ("*",)])
async def test_each_kind_of_model_says_what_it_is_for(
    unopened: GatewayFixture, aliases: tuple[str, ...]
) -> None:
    """A chat model embeds nothing, an embedding model answers no chat, also where the chat model
    takes every name that none has."""
    gateway = unopened
    settings = ModelSettings(aliases=aliases)
    gateway.config = msgspec.structs.replace(gateway.config, model=settings)
    await gateway.open()
    found = await embed(gateway, model=gateway.model)
    status, chat, _ = await gateway.ask(body=gateway.chat(model=MODEL))
    await gateway.close()

    assert error_of(found) == (400, "model_not_supported", "model")
    assert "is a chat model" in found[1]["error"]["message"]
    assert (status, chat["error"]["code"]) == (400, "model_not_supported")
    assert "/v1/embeddings" in chat["error"]["message"]


async def test_own_dimensions_may_be_named(gateway: GatewayFixture) -> None:
    """Clients that always send them keep working."""
    status, body, _ = await embed(gateway, dimensions=DIMENSIONS)

    assert (status, len(body["data"][0]["embedding"])) == (200, DIMENSIONS)


async def test_too_many_tokens_are_refused(gateway: GatewayFixture) -> None:
    """2,048 long texts of another model could be more than one request may hold."""
    assert gateway.embeddings is not None
    card = msgspec.structs.replace(gateway.embeddings.card, tokens_max=400)
    gateway.embeddings = None
    encoder = FakeEncoder()
    await set_embedder(gateway, card, encoder)
    gateway.gateway.context.embeddings = gateway.embeddings

    found = await embed(gateway, ["the " * 300] * 1_024)

    assert error_of(found) == (400, "context_length_exceeded", "input")
    assert encoder.seen == []


# --- without a model, with other settings ---------------------------------------------------------


async def test_server_without_an_embedding_model_says_so(unopened_gateway: GatewayFixture) -> None:
    """404, as for other endpoints that are not offered."""
    await unopened_gateway.open()
    try:
        found = await embed(unopened_gateway)
        assert error_of(found) == (404, "not_served", None)
        assert "embeddings.model" in found[1]["error"]["message"]
    finally:
        await unopened_gateway.close()


async def test_texts_that_are_too_long_are_refused_where_none_is_cut(
    unopened_gateway: GatewayFixture, encoder_card: EncoderCard, encoder: FakeEncoder
) -> None:
    """`embeddings.truncate = false`, for those who would rather split their texts."""
    await set_embedder(unopened_gateway, encoder_card, encoder, truncate=False)
    await unopened_gateway.open()
    try:
        found = await embed(unopened_gateway, ["hello", "the " * 100])
        assert error_of(found) == (400, "context_length_exceeded", "input[1]")
    finally:
        await unopened_gateway.close()


async def test_vectors_of_a_model_that_allows_it_are_cut_and_stretched(
    unopened_gateway: GatewayFixture, tmp_path: Path, encoder: FakeEncoder
) -> None:
    """Matryoshka: the first coordinates, of length 1 again. The cache keeps the whole vector."""
    card = await asyncio.to_thread(
        prepared_encoder, tmp_path, matryoshka_dimensions=[8, 16, DIMENSIONS]
    )
    await set_embedder(unopened_gateway, card, encoder)
    await unopened_gateway.open()
    try:
        _, cut, _ = await embed(unopened_gateway, dimensions=8)
        _, whole, _ = await embed(unopened_gateway)
        found = await embed(unopened_gateway, dimensions=9)
    finally:
        await unopened_gateway.close()

    first, rest = cut["data"][0]["embedding"], whole["data"][0]["embedding"]
    assert len(first) == 8
    assert sum(one * one for one in first) == pytest.approx(1, abs=1e-6)
    assert first[1] / first[0] == pytest.approx(rest[1] / rest[0], abs=1e-5)
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert error_of(found) == (400, "invalid_value", "dimensions")


# --- cache ---------------------------------------------------------------------------------------


async def test_a_text_is_found_again_by_its_tokens(
    gateway: GatewayFixture, encoder: FakeEncoder
) -> None:
    """It is not encoded again, and counts as cached, in usage and on the bill."""
    _, first, _ = await embed(gateway, ["hello world", "hello"])
    _, second, _ = await embed(gateway, ["the", "HELLO world"])

    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert second["data"][1]["embedding"] == first["data"][0]["embedding"]
    assert encoder.seen[1][1] == [[CLS, THE, SEP]]
    assert charges(gateway)[1] == (MODEL, "done", 7, 4, 3, 0)


async def test_a_text_that_occurs_twice_in_a_request_is_encoded_once(
    gateway: GatewayFixture, encoder: FakeEncoder
) -> None:
    """Its second place counts as cached."""
    _, body, _ = await embed(gateway, ["hello", "the", "hello"])

    assert encoder.seen[0][1] == [[CLS, HELLO, SEP], [CLS, THE, SEP]]
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert body["data"][0]["embedding"] == body["data"][2]["embedding"]


async def test_tenants_never_find_each_others_texts(
    gateway: GatewayFixture, encoder: FakeEncoder
) -> None:
    """Neither in counts nor in time: the second tenant's text is encoded again."""
    await embed(gateway)
    _, body, _ = await embed(gateway, who="bob")

    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert [texts for _, texts in encoder.seen] == [[[CLS, HELLO, SEP]]] * 2
    assert encoder.seen[0][0] != encoder.seen[1][0]


async def test_an_erasure_empties_the_tenants_cache_and_counts_it(
    gateway: GatewayFixture, encoder: FakeEncoder
) -> None:
    """Another tenant's vectors stay."""
    await embed(gateway, ["hello", "the"])
    await embed(gateway, who="bob")

    status, receipt, _ = await gateway.ask("/v1/cache", method="DELETE")
    _, mine, _ = await embed(gateway)
    _, other, _ = await embed(gateway, who="bob")
    _, state, _ = await gateway.ask("/v1/cache", method="GET")

    assert (status, receipt["embeddings"]) == (200, 2)
    assert state["erasures"][0]["embeddings"] == 2
    assert mine["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


async def test_what_is_encoded_during_an_erasure_is_not_stored(
    gateway: GatewayFixture, encoder: FakeEncoder
) -> None:
    """The receipt says that nothing is left, so nothing may come after it."""
    encoder.hold()
    running = asyncio.create_task(embed(gateway))
    await gateway.until(lambda: bool(encoder.seen))
    await gateway.ask("/v1/cache", method="DELETE")
    encoder.release()
    await running

    _, body, _ = await embed(gateway)

    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


# --- the ledger, limits and budgets ---------------------------------------------------------------


def price(gateway: GatewayFixture) -> None:
    add_card(
        gateway.store,
        wall_ms,
        RateCard("embed", model=MODEL, input=20_000, cache_read=2_000, output=1),
    )


async def test_a_request_is_charged_by_the_models_rate_card(unopened: GatewayFixture) -> None:
    """Tokens that were found cost the price of cache reads; there is no output."""
    price(unopened)
    await unopened.open()
    try:
        await embed(unopened, ["hello world"])
        await embed(unopened, ["hello world", "the"])
    finally:
        await unopened.close()

    assert charges(unopened) == [
        (MODEL, "done", 4, 0, 4, 4 * 20_000),
        (MODEL, "done", 7, 4, 3, 3 * 20_000 + 4 * 2_000),
    ]


async def test_an_idempotent_request_is_encoded_and_charged_once(
    gateway: GatewayFixture, encoder: FakeEncoder
) -> None:
    """The stored answer is the same to the byte."""
    body = json.dumps({"model": MODEL, "input": "hello"}).encode()
    headers = {"Idempotency-Key": "one"}

    first = await gateway.ask(PATH, body, headers=headers)
    second = await gateway.ask(PATH, body, headers=headers)
    other = await gateway.ask(PATH, body + b" ", headers=headers)

    assert first[1] == second[1]
    assert second[2].headers["Idempotency-Replayed"] == "true"
    assert other[0] == 409
    assert len(charges(gateway)) == len(encoder.seen) == 1
    await gateway.check_quiet()


async def test_a_client_that_leaves_pays_nothing(
    gateway: GatewayFixture, encoder: FakeEncoder
) -> None:
    """Nothing was delivered, and the entry says who left. Its text is not cached, else it would
    cost the price of a cache read when it comes again; its tokens count for the minute's limit."""
    change_tenant(gateway.store, "ada", {"tokens_per_minute": 10})
    gateway.gateway.context.authenticator.refresh_now()
    encoder.hold()
    running = asyncio.create_task(embed(gateway))
    await gateway.until(lambda: bool(encoder.seen))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await gateway.quiet()
    encoder.release()
    _, again, headers = await embed(gateway)

    assert charges(gateway) == [(MODEL, "cancelled", 0, 0, 0, 0), (MODEL, "done", 3, 0, 3, 0)]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert int(headers["X-RateLimit-Remaining-Tokens"]) in (4, 5)
    await gateway.check_quiet()


async def test_an_encoder_that_is_away_charges_nothing(
    gateway: GatewayFixture, encoder: FakeEncoder
) -> None:
    """503 with a time to retry, and the tokens are given back to the limits."""
    encoder.error = Refusal(Kind.BUSY, "engine_restarting", "It stopped.", retry_after_s=3.0)

    status, body, response = await gateway.ask(PATH, {"model": MODEL, "input": "hello"})

    assert (status, body["error"]["code"]) == (503, "engine_restarting")
    assert response.headers["Retry-After"] == "3"
    assert charges(gateway) == [(MODEL, "engine_restarting", 0, 0, 0, 0)]
    await gateway.check_quiet()


async def test_tokens_per_minute_hold_and_cached_ones_are_free(gateway: GatewayFixture) -> None:
    """A text that is found again computes nothing."""
    await embed(gateway, "hello world")
    change_tenant(gateway.store, "ada", {"tokens_per_minute": 8})
    gateway.gateway.context.authenticator.refresh_now()

    cached = [await embed(gateway, "hello world") for _ in range(3)]
    fresh = await embed(gateway, "the cat sat")
    over = await embed(gateway, "the sat cat")
    huge = await embed(gateway, "the " * 20)

    assert [status for status, _, _ in cached] == [200] * 3
    assert cached[-1][2]["X-RateLimit-Remaining-Tokens"] == "8"
    assert (fresh[0], fresh[2]["X-RateLimit-Remaining-Tokens"]) == (200, "3")
    assert error_of(over) == (429, "rate_limit_exceeded", None)
    assert error_of(huge) == (429, "request_exceeds_limit", None)


async def test_a_spent_budget_refuses_before_anything_is_encoded(
    unopened: GatewayFixture, encoder: FakeEncoder
) -> None:
    """As for answers."""
    price(unopened)
    [(tenant_id,)] = unopened.store.query("select tenant_id from tenants where name = 'ada'")
    set_budget(unopened.store, Budget(int(str(tenant_id)), "day", hard_micros=0))
    await unopened.open()
    try:
        found = await embed(unopened, "hello world")
    finally:
        await unopened.close()

    assert (found[0], found[1]["error"]["type"]) == (429, "insufficient_quota")
    assert encoder.seen == []
    assert charges(unopened) == []


async def test_a_draining_server_refuses(gateway: GatewayFixture) -> None:
    """And a request that runs finishes first."""
    gateway.gateway.context.running.is_draining = True

    found = await embed(gateway)

    assert error_of(found) == (503, "shutting_down", None)


async def test_a_running_request_finishes_while_the_server_drains(
    gateway: GatewayFixture, encoder: FakeEncoder
) -> None:
    """It counts among the running ones."""
    encoder.hold()
    running = asyncio.create_task(embed(gateway))
    await gateway.until(lambda: bool(encoder.seen))
    draining = asyncio.create_task(gateway.gateway.drain(60.0))
    await gateway.until(lambda: gateway.gateway.context.running.is_draining)
    encoder.release()

    status, _, _ = await running
    await draining

    assert status == 200


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
async def test_the_largest_number_of_inputs_keeps_their_order(
    gateway: GatewayFixture, encoding_format: str
) -> None:
    """Tokenized and encoded in threads; half of the texts occur twice."""
    words = [f"{number:x}" for number in range(1_024)]

    status, body, headers = await embed(gateway, [*words, *words], encoding_format=encoding_format)
    first, last = body["data"][1], body["data"][1_025]

    assert (status, [one["index"] for one in body["data"]]) == (200, list(range(2_048)))
    assert first["embedding"] == last["embedding"] != body["data"][2]["embedding"]
    assert (
        body["usage"]["prompt_tokens_details"]["cached_tokens"] * 2
        == (body["usage"]["prompt_tokens"])
    )
    assert headers["X-Trunkline-Cache"].startswith("read=")
    await gateway.check_quiet()


async def test_an_idempotent_request_goes_on_without_its_client(
    gateway: GatewayFixture, encoder: FakeEncoder
) -> None:
    """Its client comes back for the answer, which was charged once."""
    body = json.dumps({"model": MODEL, "input": "hello"}).encode()
    headers = {"Idempotency-Key": "one"}
    encoder.hold()
    running = asyncio.create_task(gateway.ask(PATH, body, headers=headers))
    await gateway.until(lambda: bool(encoder.seen))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    encoder.release()
    await gateway.quiet()

    status, _, response = await gateway.ask(PATH, body, headers=headers)

    assert (status, response.headers["Idempotency-Replayed"]) == (200, "true")
    assert charges(gateway) == [(MODEL, "done", 3, 0, 3, 0)]


async def test_metrics_and_the_log_have_counts_and_no_text(gateway: GatewayFixture) -> None:
    """The log line is that of other requests."""
    await embed(gateway, ["hello world", "hello world"])
    line = next(one for one in gateway.lines if one["event"] == "request")
    async with gateway.session.get(gateway.admin_url + "/metrics") as response:
        text = await response.text()

    assert (line["model"], line["prompt_tokens"], line["cached_tokens"]) == (MODEL, 8, 4)
    assert 'trunkline_embedding_texts_total{tenant="ada"} 2.0' in text
    assert 'trunkline_embedding_cached_tokens_total{tenant="ada"} 4.0' in text
    assert "trunkline_encoder_ready 1.0" in text
    assert "hello" not in json.dumps(gateway.lines)
