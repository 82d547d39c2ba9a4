"""A batch in parts: every text once, like shares, the vectors of the whole."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.encoder.bert import BertEncoder, load_tensors
from engine.encoder.text_parts import LONE_TOKENS, EncoderThreads, text_parts
from tests.encoders import TOKENS_MAX, VOCABULARY, prepared_encoder


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 5))
def test_parts_hold_every_text_once_and_like_shares(lengths: list[int], parts_max: int) -> None:
    """No part has more than its share and one text, so no thread is waited for much longer."""
    parts = text_parts(lengths, parts_max)

    assert sorted(number for part in parts for number in part) == [*range(len(lengths))]
    assert len(parts) <= parts_max
    assert all(parts)
    heaviest = max(sum(lengths[number] for number in part) for part in parts)
    assert heaviest <= sum(lengths) / parts_max + max(lengths)


def test_texts_of_one_length_make_equal_parts() -> None:
    """A batch of eight on four threads is two for each."""
    assert [len(part) for part in text_parts([15] * 8, 4)] == [2, 2, 2, 2]
    assert [len(part) for part in text_parts([15] * 3, 4)] == [1, 1, 1]


def test_vectors_of_parts_are_those_of_the_whole(tmp_path: Path) -> None:
    """In the order of the texts, by rounding; parts of one torch thread each."""
    card = prepared_encoder(tmp_path)
    encoder = BertEncoder(card, load_tensors(card))
    chance = random.Random(1)
    batch = [
        [2, *chance.choices(range(4, len(VOCABULARY)), k=chance.randrange(TOKENS_MAX - 1)), 3]
        for _ in range(11)
    ]
    whole = encoder.encode(batch)
    threads = EncoderThreads(encoder, 3)
    try:
        assert (threads.encode(batch) - whole).abs().max() < 1e-5
        assert torch.get_num_threads() == 1
        assert (threads.encode(batch[:1]) - whole[:1]).abs().max() < 1e-5
    finally:
        threads.close()


def test_only_a_long_text_that_is_alone_takes_torchs_threads() -> None:
    """They meet at every operation, which a short text does not repay."""
    seen: list[tuple[int, int]] = []

    class Recorder(BertEncoder):
        def __init__(self) -> None:
            pass

        def encode(self, texts: object) -> torch.Tensor:
            assert isinstance(texts, list)
            seen.append((len(texts), torch.get_num_threads()))
            return torch.zeros(len(texts), 1)

    threads = EncoderThreads(Recorder(), 2)
    try:
        threads.encode([[1] * LONE_TOKENS])
        threads.encode([[1] * (LONE_TOKENS - 1)])
    finally:
        threads.close()

    assert seen == [(1, 2), (1, 1)]
