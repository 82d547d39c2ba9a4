"""Token masks, and the full sampler under masks."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import SampledToken, Sampling
from engine.plan import BegunSequence
from engine.sampling.sampler import NONE_ALLOWED, Sampler
from engine.sampling.token_masks import apply_masks, mask_bias
from tests.examples import examples
from tests.tables import each_row
from tests.unit.engine.sampling.mask_bits import mask_of

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


def sampler_of(*samplings: Sampling) -> Sampler:
    sampler = Sampler(VOCAB)
    for sequence_id, sampling in enumerate(samplings):
        sampler.begin(BegunSequence(sequence_id, sampling, [1, 2], 2))
    return sampler


def noise(seed: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def allowed(bias: torch.Tensor) -> list[int]:
    """Return the allowed tokens of one row."""
    assert set(bias.tolist()) <= {0.0, float("-inf")}
    return torch.isfinite(bias).nonzero()[:, 0].tolist()


def test_bit_i_is_token_i() -> None:
    """Across words, with the sign bit and the last, partial word."""
    mask = mask_of(VOCAB, 0, 31, 32, 63, 298, 299)

    bias = mask_bias(torch.from_numpy(mask[None]), VOCAB)

    assert bias.shape == (1, VOCAB)
    assert allowed(bias[0]) == [0, 31, 32, 63, 298, 299]


@given(seed=st.integers(0, 10_000))
@settings(max_examples=examples(20))
def test_mask_bias_equals_counted_bits(seed: int) -> None:
    """By a table of bytes, and by counting bits here."""
    words = np.random.default_rng(seed).integers(-(2**31), 2**31, (3, 10)).astype(np.int32)

    for row, bias in zip(words, mask_bias(torch.from_numpy(words), VOCAB), strict=True):
        counted = [i for i in range(VOCAB) if int(row[i // 32]) >> i % 32 & 1]
        assert allowed(bias) == counted


def test_rows_without_mask_are_unchanged() -> None:
    """A batch without any mask is not copied."""
    logits = noise(0, 2)

    masked = apply_masks(logits, [5, 6], {6: mask_of(VOCAB, 3, 4)})

    assert torch.equal(masked[0], logits[0])
    assert torch.isfinite(masked[1]).nonzero()[:, 0].tolist() == [3, 4]
    assert apply_masks(logits, [5, 6], {9: mask_of(VOCAB, 1)}) is logits


@each_row("seed", range(examples(600)))
def test_no_settings_of_a_request_leave_it_without_a_token(seed: int) -> None:
    """A client could otherwise end its request at the operator's cost, with or without a grammar.

    Every penalty is tried, also those that the engine's interface refuses: 5e-324 is 0 in fp32, and
    0 times a forbidden token's minus infinity is no number.
    """
    rng = random.Random(seed)
    sampling = Sampling(
        temperature=rng.choice([0.0, 5e-324, 1e-38, 1.0, 100.0]),
        top_k=rng.choice([0, 1, 2**31 - 1]),
        top_p=rng.choice([5e-324, 1e-30, 0.5, 1.0]),
        min_p=rng.choice([0.0, 1e-320, 0.5, 1.0]),
        repetition_penalty=rng.choice([0.0, 5e-324, 1e-45, 1e-38, 0.01, 1.0, 100.0, 3e38]),
        presence_penalty=rng.choice([-100.0, 0.0, 100.0]),
        frequency_penalty=rng.choice([-100.0, 0.0, 100.0]),
        logit_bias={rng.randrange(VOCAB): rng.choice([-100.0, 5e-324, 100.0]) for _ in range(9)},
        seed=rng.choice([None, -(2**63), 2**63 - 1]),
    )
    allowed = rng.sample(range(VOCAB), rng.choice([1, 2, 200]))
    masks = {0: mask_of(VOCAB, *allowed)} if rng.random() < 0.7 else {}
    history = rng.choices(range(VOCAB), k=40)
    sampler = Sampler(VOCAB, random.Random(seed))
    sampler.begin(BegunSequence(0, sampling, history, 20))
    logits = noise(seed, 1) * rng.choice([1.0, 1e30, 1e37])
    logits[0, rng.randrange(VOCAB)] = rng.choice([0.0, float("-inf"), float("inf")])

    drawn = [sampler.sample(logits, [0], masks)[0].token_id for _ in range(3)]

    assert set(drawn) <= set(allowed if masks else range(VOCAB))


@each_row("name", SETTINGS)
def test_forbidden_token_is_never_drawn(name: str) -> None:
    """With any bias, penalty, temperature or filter."""
    sampling = msgspec.structs.replace(SETTINGS[name], seed=None)
    allowed = {11, 12, 200}
    sampler = Sampler(VOCAB, random.Random(1))
    sampler.begin(BegunSequence(0, sampling, [1, 2, 11], 2))

    drawn = {
        sampler.sample(noise(seed, 1), [0], {0: mask_of(VOCAB, *allowed)})[0].token_id
        for seed in range(60)
    }

    assert drawn <= allowed
    assert len(drawn) > 1


@each_row("name", SETTINGS)
@each_row("value", [float("-inf"), -3e38, float("inf"), 0.0])
def test_only_allowed_token_is_drawn_at_any_logit(name: str, value: float) -> None:
    """Even with probability 0 from the model, and without a NaN."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 123] = value

    (token,) = sampler_of(SETTINGS[name]).sample(logits, [0], {0: mask_of(VOCAB, 123)})

    assert token.token_id == 123


def test_mask_without_tokens_does_not_change_other_rows() -> None:
    """Core never sends such a mask; if it did, its row alone would have no token."""
    logits = noise(3, 2)
    sampler = sampler_of(SETTINGS["top-p"], SETTINGS["temperature"])
    alone = sampler_of(SETTINGS["top-p"], SETTINGS["temperature"]).sample(logits[1:], [1])

    both = sampler.sample(logits, [0, 1], {0: mask_of(VOCAB)})

    assert both == [SampledToken(NONE_ALLOWED), alone[0]]


def test_mask_of_all_tokens_changes_nothing() -> None:
    """A seed draws the same tokens with a grammar that allows all of them."""
    everything = mask_of(VOCAB, *range(VOCAB))
    for sampling in SETTINGS.values():
        free, constrained = sampler_of(sampling), sampler_of(sampling)
        for seed in range(10):
            logits = noise(seed, 1)
            assert free.sample(logits, [0]) == constrained.sample(logits, [0], {0: everything})


def test_logprobs_are_of_unmasked_logits() -> None:
    """The mask changes the choice, not the reported logprobs."""
    logits = noise(1, 1)
    sampling = Sampling(temperature=0, logprobs=2)
    expected = torch.log_softmax(logits[0], 0)

    (token,) = sampler_of(sampling).sample(logits, [0], {0: mask_of(VOCAB, 5)})

    assert token.token_id == 5
    assert token.logprob == pytest.approx(float(expected[5]), abs=1e-5)
    assert token.top[0].token_id == int(expected.argmax())
