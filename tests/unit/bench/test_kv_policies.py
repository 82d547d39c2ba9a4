"""Policies that keep tokens by attention: what each keeps, and that exact is exact."""

from __future__ import annotations

import pytest
import torch

from engine.model_store import ModelCard, prepare
from tests.bench.kv_policies import (
    AT_PROMPT,
    POLICIES,
    LayerState,
    PolicyReader,
    entropy_guided,
    heavy_hitters,
    observed,
    pyramid,
    quest_pages,
    window,
)
from tests.bench.kv_reading import Reader
from tests.models import tiny_config, write_folder

TOKENS = [(7 * index + index * index) % 250 for index in range(192)]


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    """A tiny model of random weights, in files."""
    folder = tmp_path_factory.mktemp("model")
    write_folder(folder / "tiny", tiny_config())
    return prepare("tiny", folder / "tiny", folder / "data")


@pytest.fixture(scope="module")
def reader(card: ModelCard) -> PolicyReader:
    """The harness over the tiny model."""
    return PolicyReader(card, 192)


def state(tokens: int, *, layer: int = 0, layers: int = 4) -> LayerState:
    """Return a layer with one KV head after `tokens` tokens, each with as much attention as its
    number; the first is far ahead."""
    made = LayerState(layer, layers)
    made.extend(torch.zeros(1, tokens, 4), torch.zeros(1, tokens, 4))
    made.mass = made.recent = torch.arange(float(tokens))[None].clone()
    made.mass[0, 20] = made.recent[0, 20] = 1e6
    return made


def kept(mask: torch.Tensor) -> list[int]:
    """Return the tokens that a mask keeps."""
    return [int(token) for token in mask[0].nonzero().flatten()]


def test_without_a_policy_the_harness_is_the_model(card: ModelCard, reader: PolicyReader) -> None:
    """A harness that computed something else would blame the policies for it."""
    engine = Reader(card, 192, 1, threads=1)
    expected = torch.cat([logits[0] for _, logits in engine.read(TOKENS, [""])])

    found = torch.cat([logits[0] for _, logits in reader.read(TOKENS, [""])])

    assert (found.softmax(-1) - expected.softmax(-1)).abs().max() < 0.01


def test_every_policy_is_exact_until_it_lets_a_token_go(reader: PolicyReader) -> None:
    """And differs afterwards: a policy that kept everything would look free of loss."""
    names = [f"{name} 64" for name in POLICIES]
    steps = [logits for _, logits in reader.read(TOKENS, ["", *names])]
    for index, name in enumerate(names, 1):
        same = [bool((step[index] - step[0]).abs().max() < 1e-4) for step in steps]

        first = 96 if name.split()[0] in AT_PROMPT else 64
        assert all(same[: first // 16]), name
        assert not any(same[-3:]), name


def test_a_window_keeps_sinks_and_the_last_tokens() -> None:
    """16 sinks of a budget of 48 leave 32."""
    assert kept(window(state(100), 48)) == [*range(16), *range(68, 100)]


def test_heavy_hitters_are_half_of_the_budget() -> None:
    """The last half, and those with most attention among the rest."""
    assert kept(heavy_hitters(state(100), 8)) == [20, *range(93, 100)]


def test_what_is_let_go_does_not_come_back() -> None:
    """Evicted KV is gone, however much attention it once had."""
    made = state(100)
    made.kept[0, 20] = False

    assert 20 not in kept(heavy_hitters(made, 8))


def test_an_observed_prompt_keeps_its_end_and_what_it_attended_to() -> None:
    """Smoothed over neighbours, so that a token far ahead brings those beside it."""
    found = kept(observed(state(100), 39))

    assert found == [*range(17, 24), *range(68, 100)]


def test_layers_share_a_budget_by_depth_or_by_entropy() -> None:
    """The sum over layers is the budget of all layers."""
    by_depth = [len(kept(pyramid(state(400, layer=layer), 128))) for layer in range(4)]
    by_entropy = []
    for layer, entropy in enumerate((1.0, 2.0, 3.0, 2.0)):
        made = state(400, layer=layer)
        made.entropy, made.entropies = entropy, [1.0, 2.0, 3.0, 2.0]
        by_entropy.append(len(kept(entropy_guided(made, 128))))

    assert by_depth == [224, 160, 96, 32]
    assert by_entropy == [64, 128, 192, 128]


def test_quest_reads_the_pages_whose_bound_is_highest() -> None:
    """The bound of a page is at least the score of each of its keys."""
    generator = torch.Generator().manual_seed(5)
    q = torch.rand(2, 3, 4, 8, generator=generator)
    keys = torch.randn(2, 64, 8, generator=generator)
    keys[:, 40] = 50.0  # one key whose scores are far above all others'

    chosen = quest_pages(q, keys, 32)

    assert chosen.sum(-1).tolist() == [[32] * 4] * 2
    assert chosen[..., 32:48].all()
