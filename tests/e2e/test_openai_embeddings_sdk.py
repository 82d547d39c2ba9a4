"""OpenAI's SDK asks for embeddings, of a gateway over a fake encoder and of the real model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import openai
import pytest
import torch
from openai import AsyncOpenAI

from engine.encoder.bert import BertEncoder, load_tensors
from engine.encoder.card import EncoderCard, prepare_encoder
from engine.encoder.protocol import unpack_ids
from engine.errors import ModelError
from engine.model_store import DEFAULT_ENCODER, resolve
from gateway.config import EmbeddingsConfig
from gateway.embeddings.embedder import Embedder
from gateway.embeddings.text_tokenizer import TextTokenizer
from tests.encoders import VOCABULARY, prepared_encoder
from tests.unit.gateway.fake_encoder import FakeEncoder, fake_vector
from tests.unit.gateway.gateway_fixture import GatewayFixture

pytestmark = pytest.mark.e2e

MODEL = "tiny-bert"
HELLO = [2, VOCABULARY.index("hello"), 3]
PUBLISHED = {
    "This is an example sentence": [6.76569194e-02, 6.34959713e-02, 4.87131119e-02],
    "Each sentence is converted": [8.64386186e-02, 1.02762647e-01, 5.39456727e-03],
}
"""The first numbers of vectors on the page of all-MiniLM-L6-v2."""


@pytest.fixture
async def client(unopened_gateway: GatewayFixture, tmp_path: Path) -> AsyncIterator[AsyncOpenAI]:
    """Yield a client of a gateway with an embedding model."""
    gateway = unopened_gateway
    card = await asyncio.to_thread(prepared_encoder, tmp_path)
    settings = EmbeddingsConfig(model=MODEL)
    gateway.config = msgspec.structs.replace(gateway.config, embeddings=settings)
    gateway.embeddings = await asyncio.to_thread(Embedder, card, settings, FakeEncoder())
    await gateway.open()
    async with AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=gateway.keys["ada"], max_retries=0, timeout=60
    ) as client:
        yield client
    await gateway.check_quiet()
    await gateway.close()


async def test_vectors_come_in_both_formats(client: AsyncOpenAI) -> None:
    """The SDK asks for base64 unless it is told otherwise, and decodes it."""
    packed = await client.embeddings.create(model=MODEL, input="hello")
    plain = await client.embeddings.create(
        model=MODEL, input=["hello", "world"], encoding_format="float", user="u"
    )

    assert packed.data[0].embedding == fake_vector(HELLO)
    assert plain.data[0].embedding == fake_vector(HELLO)
    assert [one.index for one in plain.data] == [0, 1]
    assert (packed.usage.prompt_tokens, packed.usage.total_tokens) == (3, 3)
    assert plain.usage.model_extra == {"prompt_tokens_details": {"cached_tokens": 3}}


async def test_token_ids_are_texts(client: AsyncOpenAI) -> None:
    """One list, or a list of lists."""
    one = await client.embeddings.create(model=MODEL, input=[HELLO[1]])
    many = await client.embeddings.create(model=MODEL, input=[[HELLO[1]], HELLO])

    assert [found.embedding for found in (*one.data, *many.data)] == [fake_vector(HELLO)] * 3


async def test_errors_are_the_sdks(client: AsyncOpenAI) -> None:
    """By class, with the field."""
    with pytest.raises(openai.BadRequestError) as bad:
        await client.embeddings.create(model=MODEL, input="hello", dimensions=4)
    with pytest.raises(openai.NotFoundError) as missing:
        await client.embeddings.create(model="text-embedding-3-large", input="hello")

    assert (bad.value.param, bad.value.code) == ("dimensions", "invalid_value")
    assert missing.value.code == "model_not_found"
    assert MODEL in [model.id async for model in client.models.list()]


def real_encoder() -> EncoderCard:
    """Return the built-in embedding model; skips the test if it was not fetched."""
    models = Path(os.environ.get("TRUNKLINE_DATA_DIR", "data")) / "models"
    try:
        return prepare_encoder(DEFAULT_ENCODER, resolve(DEFAULT_ENCODER, models), models)
    except ModelError as error:
        pytest.skip(error.message)


@pytest.mark.model
@pytest.mark.slow
def test_the_real_model_gives_its_published_vectors() -> None:
    """`trunkline pull all-minilm-l6-v2` fetches it. Near texts have near vectors."""
    card = real_encoder()
    tokenizer, encoder = TextTokenizer(card), BertEncoder(card, load_tensors(card))
    texts = [*PUBLISHED, "A cat sits on the mat", "The kitten is on a rug", "Interest rates rose"]

    found = encoder.encode([unpack_ids(tokenizer.tokenize(text).data).tolist() for text in texts])

    for row, numbers in zip(found, PUBLISHED.values(), strict=False):
        assert torch.allclose(row[:3], torch.tensor(numbers), atol=1e-6)
    near, far = found[2] @ found[3], found[2] @ found[4]
    assert near > 0.5 > 0.2 > far
