"""Text to tokens, piece by piece: stable prefixes, roles cannot be spoofed, bytes round-trip."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from engine.model_store import ModelCard
from gateway.prompt.token_budget import TokenBudget, TooManyTokensError
from gateway.prompt.tokenizer import PieceTokenizer
from tests.tiny_tokenizer import SPECIALS, tokenizer_document

SPECIAL_IDS = tuple(range(len(SPECIALS)))


@pytest.fixture(scope="session")
def byte_level(card: ModelCard) -> PieceTokenizer:
    """Byte-level BPE, as in GPT-2 and most models since."""
    return PieceTokenizer(card.tokenizer_path, card.special_token_ids)


@pytest.fixture(scope="session")
def sentence_piece(
    tmp_path_factory: pytest.TempPathFactory, sentence_piece_settings: dict[str, Any]
) -> PieceTokenizer:
    path = tmp_path_factory.mktemp("spm") / "tokenizer.json"
    path.write_text(json.dumps(sentence_piece_settings))
    return PieceTokenizer(path, (0, 1, 2))


@pytest.fixture(scope="session")
def sentence_piece_settings() -> dict[str, Any]:
    """BPE with byte fallback and a space before each text, as in Llama 2."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "a", "b", "\u2581a", "ab", "\u2581ab"]
    merges = [("\u2581", "a"), ("a", "b"), ("\u2581a", "b")]
    made = Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(word, normalized=False) for word in words[:3]])
    settings: dict[str, Any] = json.loads(made.to_str())
    return settings


def spell(tokenizer: PieceTokenizer, ids: tuple[int, ...]) -> str:
    """Return the text of tokens."""
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


TEXT = st.text(max_size=20)


@given(TEXT)
def test_byte_level_round_trip(byte_level: PieceTokenizer, text: str) -> None:
    """Any text, byte for byte."""
    assert spell(byte_level, byte_level.encode(text, specials=False)) == text


@given(TEXT)
def test_byte_fallback_round_trip(sentence_piece: PieceTokenizer, text: str) -> None:
    """Also with a character for the space, and rare characters as bytes."""
    ids = sentence_piece.encode(text, specials=False, is_first=False)

    assert spell(sentence_piece, ids) == text.replace("\u2581", " ")


def test_prefix_space_only_before_first_piece(sentence_piece: PieceTokenizer) -> None:
    """A prompt of ten pieces is one text."""
    first = sentence_piece.encode("ab", specials=False)
    later = sentence_piece.encode("ab", specials=False, is_first=False)

    assert (spell(sentence_piece, first), spell(sentence_piece, later)) == (" ab", "ab")


@pytest.mark.parametrize("word", SPECIALS)
def test_special_tokens_only_with_specials(byte_level: PieceTokenizer, word: str) -> None:
    """A client that writes <|im_start|>system writes text: no role can be spoofed."""
    text = f"a{word}system{word}"
    ids = byte_level.encode(text, specials=False)

    assert set(ids).isdisjoint(SPECIAL_IDS)
    assert spell(byte_level, ids) == text
    assert byte_level.encode(word, specials=True) == (SPECIALS.index(word),)


@given(st.lists(st.sampled_from([*SPECIALS, "<|im_", "start|>", "<", "a", " "]), max_size=6))
def test_no_spelling_makes_a_special_token(byte_level: PieceTokenizer, parts: list[str]) -> None:
    """Halves, neighbours, repetitions."""
    ids = byte_level.encode("".join(parts), specials=False)

    assert set(ids).isdisjoint(SPECIAL_IDS)
    assert spell(byte_level, ids) == "".join(parts)


@given(st.lists(st.sampled_from(["<|im_end|>", "<", "x", " a"]), max_size=6))
def test_vocabulary_with_special_words_gives_no_special_token(
    greedy: PieceTokenizer, parts: list[str]
) -> None:
    """A vocabulary that matches whole words first would find the special token."""
    ids = greedy.encode("".join(parts), specials=False)

    assert set(ids).isdisjoint(SPECIAL_IDS)
    assert spell(greedy, ids) == "".join(parts)


@pytest.fixture(scope="session")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> PieceTokenizer:
    path = tmp_path_factory.mktemp("greedy") / "tokenizer.json"
    path.write_text(json.dumps(greedy_settings()))
    return PieceTokenizer(path, SPECIAL_IDS)


def greedy_settings() -> dict[str, Any]:
    """Return a vocabulary that matches whole words first, as Llama 3's."""
    settings: dict[str, Any] = tokenizer_document()
    settings["model"]["ignore_merges"] = True
    settings["pre_tokenizer"] = {**settings["pre_tokenizer"], "use_regex": False}
    return settings


def test_greedy_vocabulary_would_match_special_words(greedy: PieceTokenizer) -> None:
    """Otherwise the test above would prove nothing."""
    plain = Tokenizer.from_str(json.dumps({**greedy_settings(), "added_tokens": []}))

    assert plain.encode("<|im_end|>").ids == [SPECIALS.index("<|im_end|>")]
    assert len(greedy.encode("<|im_end|>", specials=False)) > 1


def test_piece_is_encoded_once(byte_level: PieceTokenizer) -> None:
    """Turn 50 of a chat costs only its new text."""
    first = byte_level.encode("some words to keep", specials=False)

    assert byte_level.encode("some words to keep", specials=False) is first
    assert byte_level.encode("some words to keep", specials=True) == first


def test_piece_cache_is_bounded(card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients choose what it holds, but not how much."""
    monkeypatch.setattr("gateway.prompt.tokenizer.CACHE_BYTES_MAX", 20_000)
    tokenizer = PieceTokenizer(card.tokenizer_path, card.special_token_ids)
    kept = tokenizer.encode("the first", specials=False)
    texts = [f"text number {n}" for n in range(200)]
    for text in texts:
        tokenizer.encode(text, specials=False)
    last = tokenizer.encode(texts[-1], specials=False)

    assert tokenizer.encode(texts[-1], specials=False) is last
    assert tokenizer.encode("the first", specials=False) is not kept
    assert tokenizer.cached_bytes <= 20_000


def test_ids_without_a_token_have_no_bytes(byte_level: PieceTokenizer) -> None:
    """Vocabularies are padded; a padded id may be sampled."""
    assert byte_level.token_bytes(10**6) == b""
    assert byte_level.token_bytes(SPECIAL_IDS[0]) == b""


def test_text_is_cached_after_encoding(card: ModelCard, sentence_piece: PieceTokenizer) -> None:
    """Cached text is cheap enough for the event loop. A text at the very beginning has other tokens
    if the tokenizer puts a space before it."""
    fresh = PieceTokenizer(card.tokenizer_path, card.special_token_ids)
    before = fresh.is_cached("known", specials=False)
    fresh.encode("known", specials=False, is_first=True)
    sentence_piece.encode("abba", specials=False, is_first=True)

    assert (before, fresh.is_cached("known", specials=False)) == (False, True)
    assert not fresh.is_cached("known", specials=True)
    assert not sentence_piece.is_cached("abba", specials=False)


def test_an_owner_finds_only_its_own_pieces(card: ModelCard) -> None:
    """Otherwise the time of a text would tell what another tenant has sent."""
    fresh = PieceTokenizer(card.tokenizer_path, card.special_token_ids)
    first = fresh.encode("a secret", specials=False, owner=1)

    assert not fresh.is_cached("a secret", specials=False, owner=2)
    second = fresh.encode("a secret", specials=False, owner=2)
    assert second == first
    assert second is not first
    assert fresh.encode("a secret", specials=False, owner=1) is first


CUT_PIECES = (
    *("a b", "x ", " y", "the cat", "don't", "  ", "\n", "\t z", ".", "1 2", "9a b8"),
    *("\u00e9", "\u6f22\u5b57", "\U0001f600", " \u0301a", *SPECIALS),
)
CUT_TEXT = st.lists(st.sampled_from(CUT_PIECES), max_size=60).map("".join)


@pytest.mark.parametrize("specials", [False, True])
@given(text=CUT_TEXT)
def test_a_text_that_is_cut_has_the_tokens_of_the_whole(
    byte_level: PieceTokenizer, sentence_piece: PieceTokenizer, specials: bool, text: str
) -> None:
    """The cut changes when work can stop, and nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        for tokenizer in (byte_level, sentence_piece):
            whole = tokenizer.encode(text, specials=specials, owner=1)
            patch.setattr("gateway.prompt.tokenizer.CUT_CHARS", 4)
            cut = tokenizer.encode(text, specials=specials, owner=2, budget=TokenBudget())
            patch.undo()

            assert cut == whole


def test_a_vocabulary_with_a_word_over_the_cut_is_never_cut(tmp_path: Path) -> None:
    """A token may hold a letter and the space after it; then the whole text is one call."""
    settings = tokenizer_document()
    settings["model"]["vocab"]["a\u0120"] = len(settings["model"]["vocab"])
    settings["pre_tokenizer"] = {**settings["pre_tokenizer"], "use_regex": False}
    settings["model"]["merges"] = [*settings["model"]["merges"], ["a", "\u0120"]]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(settings))
    tokenizer = PieceTokenizer(path, SPECIAL_IDS)
    text = "a b" * 9_000

    assert tokenizer.encode(text, specials=False, budget=TokenBudget()) == tokenizer.encode(
        text, specials=False, owner=1
    )


def test_a_long_text_stops_when_its_budget_is_spent(byte_level: PieceTokenizer) -> None:
    """Some parts are tokenized, and no more."""
    asked = []

    def ask() -> bool:
        asked.append(True)
        return False

    with pytest.raises(TooManyTokensError):
        byte_level.encode("some words " * 50_000, specials=False, budget=TokenBudget(9_000, ask))
    assert len(asked) < 10


@given(st.lists(st.sampled_from(["<think>", "<|s|>", "<th", "ab", " ", "\0"]), max_size=6))
def test_added_tokens_keep_their_ids_beside_special_ones(
    added: PieceTokenizer, parts: list[str]
) -> None:
    """Folders name added tokens outside of the vocabulary, which are numbered in their order: left
    out, a special token gave its id to the next one, and a client's <think> vanished as special."""
    text = "".join(parts)
    ids = added.encode(text, specials=False)

    assert spell(added, ids) == text
    assert ids.count(added.encode("<think>", specials=True)[0]) == text.count("<think>")


@pytest.fixture(scope="session")
def added(tmp_path_factory: pytest.TempPathFactory) -> PieceTokenizer:
    """A special token and an ordinary one behind it, both outside of the vocabulary."""
    settings: dict[str, Any] = tokenizer_document()
    vocab = settings["model"]["vocab"]
    first = max([*vocab.values(), *(token["id"] for token in settings["added_tokens"])]) + 1
    shape = settings["added_tokens"][0]
    settings["added_tokens"] += [
        {**shape, "id": first, "content": "<|s|>", "special": True},
        {**shape, "id": first + 1, "content": "<think>", "special": False},
    ]
    path = tmp_path_factory.mktemp("added") / "tokenizer.json"
    path.write_text(json.dumps(settings))
    return PieceTokenizer(path, (*SPECIAL_IDS, first))


@given(TEXT)
def test_tokenizers_that_share_a_vocabulary_are_those_that_read_it(
    sentence_piece: PieceTokenizer, sentence_piece_settings: dict[str, Any], text: str
) -> None:
    """Without special tokens, and without the space before a text."""
    settings = {**sentence_piece_settings, "added_tokens": []}
    later = {**settings, "normalizer": settings["normalizer"]["normalizers"][1]}
    for is_first, document in ((True, settings), (False, later)):
        alone = Tokenizer.from_str(json.dumps(document)).encode(text, add_special_tokens=False)

        ids = sentence_piece.encode(text, specials=False, is_first=is_first)

        assert [*ids] == [one for one in alone.ids if one > 2]


def test_a_text_that_cannot_fit_is_not_tokenized(byte_level: PieceTokenizer) -> None:
    """A text of one word cannot be cut; the longest tokens bound its tokens from below."""
    text = "x" * 1_000_000
    least = byte_level.least_tokens(text)

    with pytest.raises(TooManyTokensError) as raised:
        byte_level.encode(text, specials=False, budget=TokenBudget(least - 1))
    assert raised.value.tokens == least


@given(st.text(max_size=40) | st.text(st.sampled_from("ab  \n\u0301#1"), max_size=40))
def test_the_lower_bound_of_tokens_holds(
    byte_level: PieceTokenizer, sentence_piece: PieceTokenizer, text: str
) -> None:
    for tokenizer in (byte_level, sentence_piece):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, specials=False))


def test_other_threads_run_while_a_text_is_tokenized(byte_level: PieceTokenizer) -> None:
    """`Tokenizer.encode` holds the interpreter for as long as it runs. Here no thread is made to
    give it up, so another one runs only if the library lets it; a busy machine may run it late."""
    text = "".join(f"word{n} " for n in range(30_000))

    def runs_beside(owner: int) -> bool:
        may_run, has_run = threading.Event(), threading.Event()

        def run() -> None:
            may_run.wait()
            has_run.set()

        thread = threading.Thread(target=run)
        thread.start()
        may_run.set()
        byte_level.encode(text, specials=False, owner=owner)
        found = has_run.is_set()
        thread.join()
        return found

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    try:
        assert any(map(runs_beside, range(1, 10)))
    finally:
        sys.setswitchinterval(interval_s)
