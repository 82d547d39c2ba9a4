"""Tokens of texts, and the cache of vectors by tenant and workspace."""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.encoder.card import EncoderCard
from engine.encoder.protocol import unpack_ids
from gateway.config import EmbeddingsConfig
from gateway.embeddings.embedder import Embedder, cut_vector
from gateway.embeddings.text_tokenizer import (
    PARTS_CHARS,
    SparseTextError,
    TextTokenizer,
    TokenizedText,
)
from tests.encoders import LETTERS, TOKENS_MAX, VOCABULARY, WORDS, prepared_encoder
from tests.tables import each_row
from tests.unit.gateway.fake_encoder import FakeEncoder

CLS, SEP = 2, 3


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> EncoderCard:
    return prepared_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def tokenizer(card: EncoderCard) -> TextTokenizer:
    return TextTokenizer(card)


def ids_of(text: TokenizedText) -> list[int]:
    return unpack_ids(text.data).tolist()


# --- tokens --------------------------------------------------------------------------------------


def test_tokens_stand_between_the_two_of_the_model(tokenizer: TextTokenizer) -> None:
    """They count."""
    found = tokenizer.tokenize("hello world")

    assert ids_of(found) == [
        CLS, VOCABULARY.index("hello"), VOCABULARY.index("world"), SEP,
    ]  # fmt: skip
    assert (found.tokens, found.is_whole) == (4, True)


@each_row("seed", range(20))
def test_a_long_text_has_the_first_tokens_of_the_whole_text(
    seed: int, tokenizer: TextTokenizer, card: EncoderCard
) -> None:
    """However little of it is tokenized: words, runs of spaces, words and signs without a space,
    and a cut wherever it falls."""
    chance = random.Random(seed)
    pieces = (*WORDS, *LETTERS, " ", "  \n", " " * 300, "x" * 300, "e\u0301", "\u6771", "cats")
    ends = ("",) if seed % 2 else ("", " ")
    text = "".join(chance.choice(pieces) + chance.choice(ends) for _ in range(3_000))
    plain = Tokenizer.from_file(str(card.tokenizer_path))
    whole = plain.encode(text, add_special_tokens=False).ids

    found = tokenizer.tokenize(text)

    assert len(text) > PARTS_CHARS[0]
    assert ids_of(found)[1:-1] == whole[: TOKENS_MAX - 2]
    assert found.is_whole == (len(whole) <= TOKENS_MAX - 2)


def test_a_long_text_without_many_tokens_is_whole(tokenizer: TextTokenizer) -> None:
    """Spaces have none, and a word of more than a hundred letters has one."""
    found = tokenizer.tokenize(" " * 60_000 + "hello" + "x" * 60_000 + " the")

    assert (found.tokens, found.is_whole) == (4, True)


def test_a_text_is_tokenized_only_as_far_as_its_limit_needs(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library holds a hundred bytes for each character, spaces between words or not."""
    seen: list[int] = []
    whole = tokenizer._ids

    def ids(text: str) -> list[int]:
        seen.append(len(text))
        return whole(text)

    monkeypatch.setattr(tokenizer, "_ids", ids)

    for text in ("the " * 2_000_000, "\u6771" * 1_000_000, "cat." * 1_000_000):
        assert not tokenizer.tokenize(text).is_whole
    with pytest.raises(SparseTextError, match="0 tokens in 524288 characters"):
        tokenizer.tokenize(" " * 1_000_000)

    assert seen == [8_192, 8_192, 8_192, *PARTS_CHARS]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((7, 8), [CLS, 7, 8, SEP]),
        ((CLS, 7, 8, SEP), [CLS, 7, 8, SEP]),
        ((CLS, 7), [CLS, CLS, 7, SEP]),
        ((SEP,), [CLS, SEP, SEP]),
        ((CLS, SEP), [CLS, SEP]),
    ],
)
def test_token_ids_get_the_two_around_them_once(
    given: tuple[int, ...], expected: list[int], tokenizer: TextTokenizer
) -> None:
    """Libraries give ids with or without them."""
    assert ids_of(tokenizer.wrap(given)) == expected


@pytest.mark.parametrize("wrong", [-1, len(VOCABULARY), 2**40])
def test_token_id_outside_the_vocabulary_is_refused(wrong: int, tokenizer: TextTokenizer) -> None:
    """It would index past the embeddings."""
    with pytest.raises(ValueError, match=str(wrong)):
        tokenizer.wrap((1, wrong))


# --- cache ---------------------------------------------------------------------------------------


async def embedded(
    embedder: Embedder, *texts: str, tenant: int = 1, workspace: str = "default"
) -> tuple[list[bytes], int]:
    """Embed texts; return their vectors and the cached tokens."""
    found = [embedder.tokenizer.tokenize(text) for text in texts]
    lookup = embedder.look_up(tenant, workspace, found)
    vectors = await embedder.complete(lookup)
    embedder.store(lookup)
    return vectors, lookup.cached_tokens


def embedder_of(card: EncoderCard, cache_mib: int = 64) -> tuple[Embedder, FakeEncoder]:
    encoder = FakeEncoder()
    settings = EmbeddingsConfig(model="tiny-bert", cache_mib=cache_mib)
    return Embedder(card, settings, encoder), encoder


@pytest.fixture
def fail_on_blocking_calls() -> None:
    """Allow these tests to read the tokenizer's file."""


async def test_a_workspace_finds_only_its_own_vectors(card: EncoderCard) -> None:
    """Neither another tenant's nor another workspace's."""
    embedder, encoder = embedder_of(card)
    first, _ = await embedded(embedder, "hello")
    again, cached = await embedded(embedder, "hello")
    other = [
        (await embedded(embedder, "hello", tenant=2))[1],
        (await embedded(embedder, "hello", workspace="lab"))[1],
    ]

    assert (again, cached) == (first, 3)
    assert other == [0, 0]
    assert len(encoder.seen) == 3


async def test_an_erasure_removes_one_workspace_or_all(card: EncoderCard) -> None:
    """And says how many vectors there were."""
    embedder, _ = embedder_of(card)
    await embedded(embedder, "hello", "the")
    await embedded(embedder, "hello", workspace="lab")
    await embedded(embedder, "hello", tenant=2)

    assert embedder.erase(1, "lab") == 1
    assert embedder.erase(1, "lab") == 0
    assert embedder.erase(1) == 2
    assert embedder.owners == {2}
    assert (await embedded(embedder, "hello"))[1] == 0
    assert (await embedded(embedder, "hello", tenant=2))[1] == 3
    assert embedder.erase(3) == 0


async def test_the_cache_is_bounded_and_shared_fairly(card: EncoderCard) -> None:
    """A tenant that embeds without end pushes out its own vectors."""
    embedder, _ = embedder_of(card, cache_mib=1)
    await embedded(embedder, "hello", tenant=2)
    for start in range(0, 6_000, 500):
        words = [f"{number:x}" for number in range(start, start + 500)]
        await embedded(embedder, *words)

    assert 0.9 * 2**20 < embedder.cached_bytes <= 2**20
    assert (await embedded(embedder, "hello", tenant=2))[1] == 3
    assert (await embedded(embedder, "0"))[1] == 0
    assert (await embedded(embedder, f"{5_999:x}"))[1] > 0


async def test_without_a_cache_nothing_is_found(card: EncoderCard) -> None:
    """`cache_mib = 0`. A text that occurs twice in a request is encoded once all the same."""
    embedder, encoder = embedder_of(card, cache_mib=0)
    await embedded(embedder, "hello")
    vectors, cached = await embedded(embedder, "hello", "hello")

    assert (cached, vectors[0] == vectors[1], embedder.cached_bytes) == (3, True, 0)
    assert [len(texts) for _, texts in encoder.seen] == [1, 1]


async def test_a_text_is_found_only_once_its_request_has_stored_it(card: EncoderCard) -> None:
    """A request that ends before it is charged stores nothing."""
    embedder, _ = embedder_of(card)
    text = [embedder.tokenizer.tokenize("hello")]
    await embedder.complete(embedder.look_up(1, "default", text))
    before = embedder.look_up(1, "default", text)
    await embedder.complete(before)
    embedder.erase(2)
    embedder.store(before)

    assert embedder.look_up(1, "default", text).cached_tokens == 0
    assert before.cached_tokens == 0


async def test_a_failed_text_is_not_stored(card: EncoderCard) -> None:
    """It is encoded when it comes again."""
    embedder, encoder = embedder_of(card)
    encoder.error = RuntimeError("lost")
    with pytest.raises(RuntimeError):
        await embedded(embedder, "hello")
    encoder.error = None

    assert (await embedded(embedder, "hello"))[1] == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from((1, 2)),
            st.sampled_from(("default", "lab")),
            st.lists(st.sampled_from("abc"), min_size=1, max_size=3),
        ),
        st.tuples(st.sampled_from((1, 2)), st.sampled_from(("default", "lab", None)), st.none()),
    ),
    max_size=12,
)


@given(STEPS)
def test_what_is_found_is_what_the_workspace_embedded_since_its_erasure(
    card: EncoderCard, steps: list[tuple[int, str | None, list[str] | None]]
) -> None:
    """Against a model: a set of texts for each workspace, unaffected by its neighbour."""

    async def run() -> None:
        embedder, _ = embedder_of(card)
        known: dict[tuple[int, str], set[str]] = {}
        for tenant, workspace, texts in steps:
            if texts is None:
                covered = [one for one in known if one[0] == tenant and workspace in (None, one[1])]
                gone = sum(len(known.pop(one)) for one in covered)
                assert embedder.erase(tenant, workspace) == gone
                continue
            assert workspace is not None
            held = known.setdefault((tenant, workspace), set())
            expected = 3 * (len(texts) - len(set(texts) - held))
            _, cached = await embedded(embedder, *texts, tenant=tenant, workspace=workspace)
            assert cached == expected
            held |= set(texts)

    asyncio.run(run())


def test_a_cut_vector_has_length_one() -> None:
    """The first coordinates keep their ratio."""
    cut = array("f", [])
    cut.frombytes(cut_vector(array("f", [3.0, 4.0, 12.0]).tobytes(), 2))

    assert cut.tolist() == pytest.approx([0.6, 0.8])
    assert math.hypot(*cut) == pytest.approx(1)
    assert cut_vector(bytes(12), 2) == bytes(8)


def test_names_have_the_model_first(card: EncoderCard, tmp_path: Path) -> None:
    """An alias that equals the name is listed once."""
    settings = EmbeddingsConfig(model="m", aliases=("ada-002", card.name))

    assert Embedder(card, settings, FakeEncoder()).names == (card.name, "ada-002")
