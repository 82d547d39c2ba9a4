"""The full sampler: against a reference, the statistics of its draws, and extreme parameters."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.api import SampledToken, Sampling
from engine.plan import BegunSequence
from engine.sampling.logprobs import LOGPROB_FLOOR
from engine.sampling.rng import philox4x32, uniform
from engine.sampling.sampler import Sampler
from tests.examples import examples

VOCAB = 600  # more than two chunks of the running sum, and not a multiple of a chunk


def begun(sampling: Sampling, sequence_id: int = 0, **more: Any) -> BegunSequence:
    fields = {"token_ids": [1], "prompt_tokens": 1, **more}
    return BegunSequence(sequence_id=sequence_id, sampling=sampling, **fields)


def draw(
    logits: Tensor, sampling: Sampling, history: Sequence[int] = (1,), prompt_tokens: int = 1
) -> SampledToken:
    """Return one draw of one sequence with a history."""
    sampler = Sampler(logits.shape[-1], rng=random.Random(1))
    sampler.begin(begun(sampling, token_ids=list(history), prompt_tokens=prompt_tokens))
    return sampler.sample(logits.reshape(1, -1), [0])[0]


def noise(seed: int, rows: int = 1, vocab: int = VOCAB, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def reference_probabilities(
    logits: Sequence[float], sampling: Sampling, history: Sequence[int], prompt_tokens: int
) -> list[float]:
    """Return the distribution that `Sampling`'s docstring describes, step by step."""
    x = [float(value) for value in logits]
    for token_id, bias in sampling.logit_bias.items():
        x[token_id] += bias
    outputs = Counter(history[prompt_tokens:])
    for token_id in set(history):
        factor = sampling.repetition_penalty
        x[token_id] = x[token_id] / factor if x[token_id] > 0 else x[token_id] * factor
        x[token_id] -= sampling.frequency_penalty * outputs[token_id]
        x[token_id] -= sampling.presence_penalty * (outputs[token_id] > 0)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if sampling.temperature == 0:
        return [float(i == order[0]) for i in range(len(x))]
    weights = [math.exp((value - max(x)) / sampling.temperature) for value in x]
    kept = order[: sampling.top_k] if sampling.top_k else order
    kept_total = math.fsum(weights[i] for i in kept)
    prefix, running = [], 0.0
    for i in kept:
        prefix.append(i)
        running += weights[i]
        if sampling.top_p < 1 and running >= sampling.top_p * kept_total:
            break
    prefix = [i for i in prefix if weights[i] >= sampling.min_p * weights[order[0]]]
    total = math.fsum(weights[i] for i in prefix)
    return [weights[i] / total if i in set(prefix) else 0.0 for i in range(len(x))]


def observed(logits: Tensor, sampling: Sampling, draws: int, history: list[int]) -> list[int]:
    """Return how often each token came in `draws` draws from the same row."""
    sampler = Sampler(logits.shape[-1], rng=random.Random(7))
    for sequence_id in range(draws):
        sampler.begin(
            begun(sampling, sequence_id, token_ids=history, prompt_tokens=2, sample_index=0)
        )
    tokens = sampler.sample(logits.expand(draws, -1), range(draws))
    counts = Counter(token.token_id for token in tokens)
    return [counts[i] for i in range(logits.shape[-1])]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    """With a wrong constant the numbers would still look random; the published vectors detect
    it."""
    assert expected == philox4x32(counter, key)


def test_neighbouring_seeds_and_positions_give_unrelated_numbers() -> None:
    """Clients use seeds 1, 2, 3; their draws must be uniform too."""
    numbers = [
        uniform(seed, sample, position)
        for seed in (-1, 0, 1, 2**63 - 1)
        for sample in range(16)
        for position in range(64)
    ]
    counts = Counter(int(number * 64) for number in numbers)
    statistic = sum((counts[i] - 64) ** 2 / 64 for i in range(64))

    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    assert statistic < 104  # chi-square, 63 degrees of freedom, p = 0.001


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=2.0, top_k=5),
        Sampling(top_p=0.8),
        Sampling(top_k=8, top_p=0.6),
        Sampling(min_p=0.1),
        Sampling(top_k=6, top_p=0.95, min_p=0.05),
        Sampling(repetition_penalty=1.6, presence_penalty=0.5, frequency_penalty=0.7),
        Sampling(logit_bias={0: 2.0, 3: -100.0}, top_p=0.9),
    ],
    ids=repr,
)
def test_draws_follow_the_described_distribution(sampling: Sampling) -> None:
    """Chi-square against the reference; tokens of probability 0 are never drawn."""
    draws, history = 4_000, [2, 5, 5, 7, 5]
    logits = noise(11, vocab=12, spread=1.5)[0]
    expected = reference_probabilities(logits.tolist(), sampling, history, 2)

    counts = observed(logits, sampling, draws, history)

    statistic = sum(
        (count - p * draws) ** 2 / (p * draws)
        for count, p in zip(counts, expected, strict=True)
        if p
    )
    assert [c if p == 0 else 0 for c, p in zip(counts, expected, strict=True)] == [0] * 12
    assert statistic < 31.3  # chi-square, 11 degrees of freedom, p = 0.001


sampling_settings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-45, 0.3, 1.0, 100.0]),
    top_k=st.sampled_from([0, 1, 3, 2**31 - 1]),
    top_p=st.sampled_from([5e-324, 0.3, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 5e-324, 0.07, 1.0]),
    repetition_penalty=st.sampled_from([0.01, 1.0, 1.7, 100.0]),
    presence_penalty=st.sampled_from([-100.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.9, 100.0]),
    logit_bias=st.dictionaries(st.integers(0, 11), st.sampled_from([-100.0, 1.3, 100.0])),
    seed=st.integers(-(2**63), 2**63 - 1),
)


@settings(max_examples=examples(120), deadline=None)
@given(
    sampling=sampling_settings,
    logits_seed=st.integers(0, 1000),
    history=st.lists(st.integers(0, 11), min_size=2, max_size=12),
)
def test_drawn_token_has_weight_in_reference(
    sampling: Sampling, logits_seed: int, history: list[int]
) -> None:
    """Every combination of parameters, extreme ones too, draws a token that the reference
    allows."""
    logits = noise(logits_seed, vocab=12)[0]
    logits[logits_seed % 12] = -math.inf

    token = draw(logits, sampling, history, prompt_tokens=2)

    # Rounding may move a token across the edge of a filter; widen the reference a little.
    wide = Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=min(1.0, sampling.top_p * (1 + 1e-5)),
        min_p=sampling.min_p * (1 - 1e-5),
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
    )
    weights = reference_probabilities(logits.tolist(), wide, history, 2)
    assert weights[token.token_id] > 0


@settings(max_examples=examples(60), deadline=None)
@given(
    sampling=sampling_settings,
    value=st.sampled_from([-math.inf, math.inf, 0.0, 3e38, -3e38, math.nan]),
)
@example(Sampling(min_p=0.07), -math.inf)
def test_row_of_one_value_gives_token_or_none(sampling: Sampling, value: float) -> None:
    """Overflow gives a token of the vocabulary; a row of minus infinity or NaN gives none."""
    token = draw(torch.full((12,), value), sampling, [3, 4])

    assert (0 <= token.token_id < 12) == (value > -math.inf)


@settings(max_examples=examples(60), deadline=None)
@given(sampling=sampling_settings, place=st.integers(0, VOCAB - 1), size=st.sampled_from([1, 90]))
def test_row_with_nan_gives_no_token(sampling: Sampling, place: int, size: int) -> None:
    """The other logits of such a row may be wrong too. The next row still gives its token, and the
    history continues from the last drawn token."""
    logits = noise(8, rows=2)
    expected = draw(logits[1], sampling)
    logits[0, place : place + size] = math.nan
    sampler = Sampler(VOCAB, rng=random.Random(1))
    sampler.begin(begun(sampling, 1))
    sampler.begin(begun(sampling, 0))

    first = sampler.sample(logits, [0, 1])
    second = sampler.sample(logits[1:], [0])

    assert first == [SampledToken(-1), expected]
    assert sampling.seed is None or second == [expected]


def test_seeded_draws_do_not_depend_on_batch() -> None:
    """A draw depends on seed, sample, position and logits alone."""
    kinds = [
        Sampling(seed=5),
        Sampling(seed=5, top_p=0.9),
        Sampling(temperature=0),
        Sampling(seed=9, temperature=1.4, repetition_penalty=1.2),
        Sampling(seed=3, top_k=40, logprobs=2),
        Sampling(seed=-4, min_p=0.02, logit_bias={4: 3.0}),
    ]
    logits = noise(3, rows=len(kinds), vocab=5000)
    together = Sampler(5000, rng=random.Random(0))
    for i, sampling in enumerate(kinds):
        together.begin(begun(sampling, i))

    last = [together.sample(logits, range(len(kinds))) for _ in range(5)][-1]
    alone = []
    for i, sampling in enumerate(kinds):
        sampler = Sampler(5000, rng=random.Random(99))
        sampler.begin(begun(sampling, i))
        alone.append([sampler.sample(logits[i : i + 1], [i])[0] for _ in range(5)][-1])

    assert last == alone


def test_resumed_sequence_continues_its_draws() -> None:
    """Preemption ends and begins the sequence; its history and position must be restored."""
    sampling = Sampling(seed=17, temperature=1.5, presence_penalty=1.0, frequency_penalty=0.5)
    rows = noise(8, rows=20)
    uninterrupted = Sampler(VOCAB)
    uninterrupted.begin(begun(sampling, token_ids=[1, 2], prompt_tokens=2))
    expected = [uninterrupted.sample(row[None], [0])[0].token_id for row in rows]

    preempted = Sampler(VOCAB)
    history = [1, 2]
    tokens = []
    for step, row in enumerate(rows):
        if step % 7 == 0:
            preempted.end(0)
            preempted.begin(begun(sampling, token_ids=list(history), prompt_tokens=2))
        tokens.append(preempted.sample(row[None], [0])[0].token_id)
        history.append(tokens[-1])

    assert expected == tokens


def test_samples_of_one_request_differ() -> None:
    """`n` samples share a seed and, at first, the same logits."""
    sampler = Sampler(VOCAB)
    for index in range(8):
        sampler.begin(begun(Sampling(seed=1), index, sample_index=index))

    tokens = sampler.sample(noise(5, spread=0.5).expand(8, -1), range(8))

    assert len({token.token_id for token in tokens}) > 4


def test_sequences_without_seed_get_different_seeds() -> None:
    """Two clients that send the same prompt must not always get the same answer."""
    sampler = Sampler(VOCAB, rng=random.Random(4))
    for sequence_id in range(8):
        sampler.begin(begun(Sampling(), sequence_id))

    tokens = sampler.sample(noise(5, spread=0.5).expand(8, -1), range(8))

    assert len({token.token_id for token in tokens}) > 4


def test_top_k_keeps_lower_ids_of_equal_logits() -> None:
    """A tie at the edge has one result, so that a replay on another build agrees."""
    logits = torch.zeros(VOCAB)
    drawn = {draw(logits, Sampling(top_k=3, seed=seed)).token_id for seed in range(60)}

    assert drawn == {0, 1, 2}


def test_logprobs_are_of_unmodified_logits() -> None:
    """Temperature, bias and penalties change the choice, not the reported logprobs."""
    logits = noise(2)
    expected = torch.log_softmax(logits[0].double(), dim=-1)

    token = draw(logits, Sampling(temperature=0, logit_bias={9: 100.0}, logprobs=20), [9, 9])

    assert token.token_id == 9
    assert token.logprob == pytest.approx(float(expected[9]), abs=1e-4)
    assert [t.token_id for t in token.top] == expected.topk(20).indices.tolist()
    assert [t.logprob for t in token.top] == pytest.approx(
        expected.topk(20).values.tolist(), abs=1e-4
    )


def test_logprobs_are_reported_on_request_only() -> None:
    """None reports nothing; 0 reports the chosen token's logprob alone."""
    none = draw(noise(2), Sampling(temperature=0))
    own = draw(noise(2), Sampling(temperature=0, logprobs=0))

    assert (none.logprob, none.top) == (None, ())
    assert own.logprob is not None
    assert own.top == ()


def test_impossible_token_has_finite_logprob() -> None:
    """JSON has no minus infinity, and one such value would fail the whole response."""
    logits = torch.full((12,), -math.inf)
    logits[3] = 1.0

    token = draw(logits, Sampling(temperature=0, logprobs=2))

    assert (token.top[0].logprob, token.top[1].logprob) == (0.0, LOGPROB_FLOOR)


@pytest.mark.parametrize("equal", [30, 300])
def test_alternatives_are_lowest_ids_of_equal_logits(equal: int) -> None:
    """Twenty of many likeliest tokens: the same ones in every batch and on every device."""
    logits = torch.zeros(VOCAB)
    logits[7] = 1.0
    logits[VOCAB - equal :] = 0.5

    token = draw(logits, Sampling(temperature=0, logprobs=20))

    assert [t.token_id for t in token.top] == [7, *range(VOCAB - equal, VOCAB - equal + 19)]


def test_sampler_keeps_logits_and_forgets_ended_sequences() -> None:
    """The runner may read the rows again, and state must not grow in a long-running server."""
    logits = noise(1, rows=3)
    before = logits.clone()
    sampler = Sampler(VOCAB)
    for i, sampling in enumerate(
        [Sampling(temperature=0, logit_bias={3: 9.0}), Sampling(top_p=0.5), Sampling()]
    ):
        sampler.begin(begun(sampling, i))

    sampler.sample(logits, [0, 1, 2])
    for sequence_id in (0, 1, 2, 3):
        sampler.end(sequence_id)

    assert torch.equal(before, logits)
    for sequence_id in (0, 1, 2):
        with pytest.raises(KeyError):
            sampler.sample(logits[:1], [sequence_id])
