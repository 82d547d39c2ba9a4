"""The encoder against transformers, and against itself in other batches."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from engine.encoder.bert import BertEncoder, load_tensors
from engine.encoder.card import EncoderCard
from engine.errors import ModelError
from tests.encoders import TOKENS_MAX, VOCABULARY, encoder_config, prepared_encoder

BOUND = 1e-5
"""Largest difference of a coordinate from the reference, of vectors of length 1."""


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> EncoderCard:
    return prepared_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def encoder(card: EncoderCard) -> BertEncoder:
    return BertEncoder(card, load_tensors(card))


def texts(seed: int, count: int) -> list[list[int]]:
    """Return random texts of all lengths, several of one length among them."""
    chance = random.Random(seed)
    return [
        [2, *chance.choices(range(4, len(VOCABULARY)), k=chance.randrange(TOKENS_MAX - 1)), 3]
        for _ in range(count)
    ]


def reference(card: EncoderCard, batch: list[list[int]]) -> torch.Tensor:
    """Return transformers' vectors of a padded batch."""
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(**encoder_config(card.shape))).eval()
    model.load_state_dict(load_file(card.weights), strict=False)
    longest = max(map(len, batch))
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in batch])
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in batch])
    with torch.inference_mode():
        rows = model(input_ids=ids, attention_mask=mask).last_hidden_state
    if card.pooling == "first":
        found = rows[:, 0]
    else:
        found = (rows * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(found, dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_vectors_are_those_of_transformers(card: EncoderCard, pooling: str) -> None:
    """Both poolings, padded there and packed here."""
    chosen = replace(card, pooling=pooling)
    batch = texts(seed=1, count=40)

    found = BertEncoder(chosen, load_tensors(chosen)).encode(batch)

    assert (found - reference(chosen, batch)).abs().max() < BOUND


def test_a_text_has_the_same_vector_in_every_batch(encoder: BertEncoder) -> None:
    """Up to rounding: packing must not mix the texts of a batch."""
    batch = texts(seed=2, count=30)

    whole = encoder.encode(batch)
    alone = torch.cat([encoder.encode([one]) for one in batch])

    assert (whole - alone).abs().max() < 1e-6


def test_vectors_have_length_one_and_differ(encoder: BertEncoder) -> None:
    """A model that ignored its input would pass the tests above."""
    found = encoder.encode([[2, 4, 3], [2, 5, 3], [2, 5, 4, 3], [2, 4, 5, 3]])

    assert torch.allclose(found.norm(dim=1), torch.ones(4))
    assert (found @ found.T - torch.eye(4)).max() < 0.999


def test_shortest_and_longest_texts_are_encoded(encoder: BertEncoder) -> None:
    """An empty text is its two tokens."""
    found = encoder.encode([[2, 3], [2, *[5] * (TOKENS_MAX - 2), 3]])

    assert found.shape == (2, 32)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("encoder.layer.1.output.dense.bias"), "has no tensor encoder.layer.1"),
        (lambda t: t.update(odd=torch.zeros(1)), "unexpected tensor odd"),
        (
            lambda t: t.update({"embeddings.LayerNorm.bias": torch.zeros(31)}),
            "has shape (31,); expected (32,)",
        ),
    ],
)
def test_wrong_tensors_are_refused(
    change: object, words: str, card: EncoderCard, tmp_path: Path
) -> None:
    """By name, with what is expected."""
    tensors = load_file(card.weights)
    assert callable(change)
    change(tensors)
    save_file(tensors, tmp_path / "m.safetensors")

    with pytest.raises(ModelError, match=r"m\.safetensors") as caught:
        load_tensors(replace(card, weights=str(tmp_path / "m.safetensors")))
    assert words in caught.value.message


def test_damaged_weights_are_refused(card: EncoderCard, tmp_path: Path) -> None:
    """Not a crash of the process."""
    (tmp_path / "m.safetensors").write_bytes(b"\xff" * 64)

    with pytest.raises(ModelError, match="cannot be read"):
        load_tensors(replace(card, weights=str(tmp_path / "m.safetensors")))
