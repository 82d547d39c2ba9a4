"""Masks on logits, and the samplers under them: on the CPU's path and on a device's."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import Sampling
from engine.plan import BegunSequence, Mask
from engine.sampling.gpu_sampler import GpuSampler
from engine.sampling.sampler import Sampler
from engine.sampling.token_masks import restricted, spread

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 300

SETTINGS = {
    "greedy": Sampling(temperature=0),
    "temperature": Sampling(temperature=0.8, seed=3),
    "top-k": Sampling(temperature=1.3, top_k=40, seed=4),
    "top-p": Sampling(temperature=1.0, top_p=0.7, seed=5),
    "min-p": Sampling(temperature=1.0, min_p=0.05, seed=6),
    "hot": Sampling(temperature=90.0, seed=8),
    "bias": Sampling(temperature=1.0, seed=9, logit_bias={7: 100.0, 8: -100.0}),
    "penalties": Sampling(
        temperature=1.0,
        seed=10,
        repetition_penalty=100.0,
        presence_penalty=5.0,
        frequency_penalty=100.0,
    ),
}


def mask_of(*token_ids: int) -> Mask:
    mask = np.zeros(-(-VOCAB // 32), np.uint32)
    for token_id in token_ids:
        mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask.view(np.int32)


def sampler_of(*samplings: Sampling) -> Sampler:
    sampler = Sampler(VOCAB, CPU)
    for sequence_id, sampling in enumerate(samplings):
        sampler.begin(BegunSequence(sequence_id, sampling, [1, 2], 2))
    return sampler


def noise(seed: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def allowed(added: torch.Tensor) -> list[int]:
    """The tokens of one row that may be drawn."""
    assert set(added.tolist()) <= {0.0, float("-inf")}
    return torch.isfinite(added).nonzero()[:, 0].tolist()


def test_bits_are_tokens_from_the_lowest_up() -> None:
    """Word by word, the sign bit and the last, partial word included."""
    mask = mask_of(0, 31, 32, 63, 298, 299)

    added = spread(torch.from_numpy(mask[None]), VOCAB)

    assert added.shape == (1, VOCAB)
    assert allowed(added[0]) == [0, 31, 32, 63, 298, 299]


@given(seed=st.integers(0, 10_000))
@settings(max_examples=20)
def test_every_bit_says_the_same_on_every_device(seed: int) -> None:
    """By a table of bytes, by shifts where there is a device, and by counting."""
    words = np.random.default_rng(seed).integers(-(2**31), 2**31, (3, 10)).astype(np.int32)

    here = spread(torch.from_numpy(words), VOCAB)
    there = spread(torch.from_numpy(words).to(DEVICE), VOCAB).cpu()

    assert torch.equal(here, there)
    for row, added in zip(words, here, strict=True):
        counted = [i for i in range(VOCAB) if int(row[i // 32]) >> i % 32 & 1]
        assert allowed(added) == counted


def test_rows_without_a_mask_are_left_alone() -> None:
    """And a batch without any is not even copied."""
    logits = noise(0, 2)

    limited = restricted(logits, [5, 6], {6: mask_of(3, 4)})

    assert torch.equal(limited[0], logits[0])
    assert torch.isfinite(limited[1]).nonzero()[:, 0].tolist() == [3, 4]
    assert restricted(logits, [5, 6], {9: mask_of(1)}) is logits


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("device", ["cpu sampler", "device sampler"])
def test_nothing_is_drawn_that_the_mask_leaves_out(name: str, device: str) -> None:
    """Whatever bias, penalty, heat or filter says."""
    sampling = msgspec.structs.replace(SETTINGS[name], seed=None)
    allowed = {11, 12, 200}
    masks = {0: mask_of(*allowed)}
    full: Sampler | GpuSampler = Sampler(VOCAB, CPU)
    if device == "device sampler":
        full = GpuSampler(VOCAB, DEVICE)
    full.begin(BegunSequence(0, sampling, [1, 2, 11], 2))

    drawn = set()
    for seed in range(60):
        if isinstance(full, GpuSampler):
            (token,) = full.draw_fully(noise(seed, 1).to(DEVICE), [0], masks)
        else:
            (token,) = full.sample(noise(seed, 1), [0], masks)
        drawn.add(token.token_id)

    assert drawn <= allowed
    assert len(drawn) > 1


@pytest.mark.parametrize("name", SETTINGS)
def test_both_samplers_draw_the_same_under_a_mask(name: str) -> None:
    """A batch may move from one to the other; the tokens of a seed may not."""
    masks = {0: mask_of(*range(0, VOCAB, 7))}
    cpu, device = sampler_of(SETTINGS[name]), GpuSampler(VOCAB, CPU)
    device.begin(BegunSequence(0, SETTINGS[name], [1, 2], 2))

    ours, theirs = [], []
    for seed in range(20):
        ours += cpu.sample(noise(seed, 1), [0], masks)
        theirs += device.draw_fully(noise(seed, 1), [0], masks)

    assert ours == theirs


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("value", [float("-inf"), -3e38, float("inf"), 0.0])
def test_the_one_token_left_is_drawn_even_where_the_model_rules_it_out(
    name: str, value: float
) -> None:
    """A grammar's last way out is taken, and no row of nothing becomes a number that is none."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 123] = value

    (token,) = sampler_of(SETTINGS[name]).sample(logits, [0], {0: mask_of(123)})

    assert token.token_id == 123


def test_a_row_that_allows_nothing_draws_something_and_spoils_nobody() -> None:
    """Core never sends one; if it did, its neighbours' tokens would be their own all the same."""
    logits = noise(3, 2)
    sampler = sampler_of(SETTINGS["top-p"], SETTINGS["temperature"])
    alone = sampler_of(SETTINGS["top-p"], SETTINGS["temperature"]).sample(logits[1:], [1])

    both = sampler.sample(logits, [0, 1], {0: mask_of()})

    assert both[1] == alone[0]


def test_a_mask_that_allows_everything_changes_nothing() -> None:
    """The same seed draws the same tokens with a grammar that would have let them through."""
    everything = mask_of(*range(VOCAB))
    for sampling in SETTINGS.values():
        free, held = sampler_of(sampling), sampler_of(sampling)
        for seed in range(10):
            logits = noise(seed, 1)
            assert free.sample(logits, [0]) == held.sample(logits, [0], {0: everything})


def test_logprobs_stay_the_models_own() -> None:
    """What the model thought is reported, not what was left of it."""
    logits = noise(1, 1)
    sampling = Sampling(temperature=0, logprobs=2)
    expected = torch.log_softmax(logits[0], 0)

    (token,) = sampler_of(sampling).sample(logits, [0], {0: mask_of(5)})

    assert token.token_id == 5
    assert token.logprob == pytest.approx(float(expected[5]), abs=1e-5)
    assert token.top[0].token_id == int(expected.argmax())
