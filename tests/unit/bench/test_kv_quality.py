"""The bench of packed KV's quality: its parts, on a tiny model and by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch

from engine.model_store import ModelCard, prepare
from kernels import reference_kv
from tests.bench import kv_texts
from tests.bench.kv_quality import Comparison, Summary, compare, noise_floor, recall
from tests.bench.kv_reading import Reader
from tests.models import tiny_config, write_folder

TOKENS = [(7 * index + index * index) % 250 for index in range(64)]


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    """A tiny model of random weights, in files."""
    folder = tmp_path_factory.mktemp("model")
    write_folder(folder / "tiny", tiny_config())
    return prepare("tiny", folder / "tiny", folder / "data")


@pytest.fixture(scope="module")
def reader(card: ModelCard) -> Reader:
    """A reader of three variants."""
    return Reader(card, 64, 3, threads=1)


def test_packed_blocks_are_read_back_by_later_tokens(reader: Reader) -> None:
    """The first block's logits are those of exact KV, since a token's own block is exact; later
    ones differ, more for 4 bits than for 8."""
    steps = [logits for _, logits in reader.read(TOKENS, ["", "int8c", "int4c"])]

    assert torch.equal(steps[0][0], steps[0][1])
    assert torch.equal(steps[0][0], steps[0][2])
    near, rough = ((steps[3][index] - steps[3][0]).abs().max() for index in (1, 2))
    assert 0 < near < rough


def test_what_is_read_back_is_what_the_reference_unpacks(reader: Reader) -> None:
    """The bench must measure the format's own bytes, in the order in which the pool keeps them."""
    list(reader.read(TOKENS, ["", "int8c", "int4c"]))
    kv = reader.kv.format
    data = reader.kv.data[: 3 * 4].clone()
    if kv.layout == "panels":
        data = reference_kv.from_panels(data.flatten(-3), kv.kv_heads, kv.head_dim)
    first, packed = data[0], data[4]

    expected = reference_kv.unpack(
        reference_kv.pack(first, "int8c"), "int8c", (kv.layers, kv.kv_heads, kv.head_dim), kv.dtype
    )

    assert torch.equal(packed, expected)


def test_exact_kv_in_steps_of_another_size_is_the_noise_floor(reader: Reader) -> None:
    """On the CPU in C a row's bits do not depend on the step: no divergence at all."""
    floor = noise_floor(reader, TOKENS)

    assert floor.divergence < 1e-6
    assert floor.same == 1.0


def fake_read(
    _tokens: Sequence[int], variants: Sequence[str]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Read four tokens: exact KV is sure of token 1, every variant prefers token 0 by a little."""
    exact = torch.tensor([[0.0, 3.0]]).repeat(4, 1)
    other = torch.tensor([[0.1, 0.0]]).repeat(4, 1)
    yield 0, torch.stack([exact if not name else other for name in variants])


def test_figures_compare_with_exact_kv() -> None:
    """By hand: both read 1, 1, 1, 1, of which three are predicted."""
    found = compare(fake_read, ["int8c"], [[1, 1, 1, 1]])["int8c"]
    summary = found.summary()

    p, q = 1 / (1 + math.exp(-3)), 1 / (1 + math.exp(0.1))
    assert len(found.losses) == 3
    assert summary.same == 0.0
    assert summary.perplexity == pytest.approx(1 / q, rel=1e-5)
    assert summary.change == pytest.approx(p / q - 1, rel=1e-5)
    assert summary.divergence == pytest.approx(
        p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)), rel=1e-4
    )
    assert summary.divergence_p99 == pytest.approx(summary.divergence, rel=1e-4)


def test_exact_kv_beside_itself_shows_no_difference() -> None:
    """The planted fault of the measures: they must be able to say zero."""
    comparison = Comparison()
    logs = torch.log_softmax(torch.randn(5, 9, generator=torch.Generator().manual_seed(1)), -1)

    comparison.add(logs, logs, torch.arange(5))

    assert comparison.summary() == Summary(
        comparison.summary().perplexity, change=0.0, divergence=0.0, divergence_p99=0.0, same=1.0
    )


def test_recall_counts_answers_whose_tokens_are_all_predicted() -> None:
    """Exact KV predicts token 1 everywhere, the variant token 0."""
    task = kv_texts.Task([0, 1, 1, 0], [(1, 3), (2, 4), (3, 4)])

    assert recall(fake_read, ["", "int8c"], [task]) == [1 / 3, 1 / 3]


def test_a_copied_run_is_asked_from_its_second_token() -> None:
    """The first token of the second half follows nothing that was seen."""
    task = kv_texts.copying(range(100), 5, seed=1)

    assert task.token_ids[:5] == task.token_ids[5:]
    assert task.answers == [(6, 7), (7, 8), (8, 9), (9, 10)]
