"""The sampling kernels against the full sampler: the same tokens for every way of sampling."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import SampledToken, Sampling
from engine.plan import BegunSequence, Mask
from engine.sampling.gpu_sampler import COUNT_MAX, DRAW_COLUMNS, Draws, GpuSampler
from engine.sampling.logprobs import logprob_entries
from engine.sampling.sampler import Sampler
from kernels.gpu.sampling import CANDIDATES
from tests.examples import examples
from tests.unit.engine.sampling.mask_bits import mask_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 300
ROWS = 16
HISTORY = (1, 2, 2, 5, 250)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""Infinite logits make the interpreter's numpy warn."""

KINDS = {
    "greedy": Sampling(temperature=0),
    "temperature": Sampling(temperature=0.8, seed=3),
    "hot": Sampling(temperature=90.0, seed=8),
    "top-k": Sampling(temperature=1.3, top_k=7, seed=4),
    "top-p": Sampling(temperature=1.0, top_p=0.7, seed=5),
    "min-p": Sampling(temperature=1.0, min_p=0.05, seed=6),
    "all filters": Sampling(temperature=1.5, top_k=40, top_p=0.9, min_p=0.01, seed=-7),
    "logprobs": Sampling(seed=1, logprobs=3),
    "bias": Sampling(seed=2, logit_bias={3: 5.0, 9: -100.0, 299: 4.5, 17: 0.5}),
    "greedy with penalties": Sampling(
        temperature=0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.3
    ),
    "frequency": Sampling(seed=11, frequency_penalty=1.7),
    "everything": Sampling(
        seed=12, temperature=1.2, top_k=200, top_p=0.95, min_p=0.001, repetition_penalty=1.3,
        presence_penalty=0.4, frequency_penalty=-0.2, logit_bias={5: 3.0, 2: 4.0}, logprobs=20,
    ),
}  # fmt: skip


class Batch:
    """Sequences 0, 1, ... of both samplers, with one history."""

    def __init__(
        self, kinds: Sequence[Sampling], vocab: int = VOCAB, history: Sequence[int] = HISTORY,
        prompt_tokens: int = 2, ids: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.ids = list(range(len(kinds))) if ids is None else list(ids)
        self.gpu = GpuSampler(vocab, DEVICE, slots=ROWS, rows=ROWS, rng=random.Random(4))
        self.twin = Sampler(vocab)
        self.table = torch.zeros(ROWS, DRAW_COLUMNS, dtype=torch.int32)
        self.out = torch.full((ROWS,), -7, dtype=torch.int32, device=DEVICE)
        for i, sampling in zip(self.ids, kinds, strict=True):
            self.begin(BegunSequence(i, sampling, list(history), prompt_tokens, i % 3))

    def begin(self, begun: BegunSequence) -> None:
        self.gpu.begin(begun)
        self.twin.begin(begun)

    def launch(
        self, logits: torch.Tensor, masks: Mapping[int, Mask] | None = None,
        source_rows: Sequence[int] | None = None,
    ) -> tuple[Draws, torch.Tensor]:  # fmt: skip
        """Launch a step; the results are in the buffer once the device is done."""
        draws = self.gpu.fill(self.table.numpy(), self.ids, masks, source_rows)
        logits, table = logits.to(DEVICE), self.table.to(DEVICE)
        self.gpu.draw(logits, table, self.out)
        if draws.has_extras:
            self.gpu.draw_extras(draws, logits, table, self.out)
        host = self.gpu.host_results()
        self.gpu.copy_results(draws, self.out, host)
        return draws, host

    def collect(self, launched: tuple[Draws, torch.Tensor]) -> list[SampledToken]:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return self.gpu.results(*launched)

    def drawn(
        self, logits: torch.Tensor, masks: Mapping[int, Mask] | None = None
    ) -> list[SampledToken]:
        return self.collect(self.launch(logits, masks))

    def expected(
        self, logits: torch.Tensor, masks: Mapping[int, Mask] | None = None
    ) -> list[SampledToken]:
        return self.twin.sample(logits.float(), self.ids, masks)


def noise(seed: int, rows: int, vocab: int = VOCAB, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def assert_same(expected: Sequence[SampledToken], got: Sequence[SampledToken]) -> None:
    """Tokens and alternatives are equal; logprobs are equal but for rounding."""
    assert [t.token_id for t in expected] == [t.token_id for t in got]
    for a, b in zip(expected, got, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert [t.token_id for t in a.top] == [t.token_id for t in b.top]
        assert [t.logprob for t in a.top] == pytest.approx([t.logprob for t in b.top], abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("vocab", "spread"),
    [
        (VOCAB, 3.0),
        pytest.param(9_000, 0.3, marks=pytest.mark.nightly),
        pytest.param(9_000, 4.0, marks=pytest.mark.slow),
    ],
)
def test_every_kind_draws_tokens_of_full_sampler(
    vocab: int, spread: float, dtype: torch.dtype
) -> None:
    """Over small and large vocabularies, flat and peaked rows, and rows full of ties."""
    batch = Batch(tuple(KINDS.values()), vocab)
    for step in range(2):
        logits = noise(step, len(KINDS), vocab, spread).to(dtype)

        assert_same(batch.expected(logits), batch.drawn(logits))


@pytest.mark.slow
def test_result_does_not_depend_on_batch() -> None:
    """Tokens and logprobs, to the bit."""
    kinds = tuple(KINDS.values())
    logits = noise(3, len(kinds), 9_000, 1.0)
    together = Batch(kinds, 9_000).drawn(logits)

    for i, sampling in enumerate(kinds):
        (alone,) = Batch([sampling], 9_000, ids=[i]).drawn(logits[i : i + 1])

        assert together[i] == alone


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 5_000},
        pytest.param({"top_p": 0.5}, marks=pytest.mark.nightly),
        pytest.param({"min_p": 0.5}, marks=pytest.mark.nightly),
    ],
)
def test_more_ties_than_candidates(filters: dict[str, Any]) -> None:
    """All logits are equal: the filters keep the lowest ids, wherever the draw falls."""
    vocab = 3 * CANDIDATES
    batch = Batch([Sampling(seed=seed, **filters) for seed in range(3)], vocab)
    logits = torch.zeros(3, vocab)

    assert_same(batch.expected(logits), batch.drawn(logits))


def test_counts_are_kept_on_device() -> None:
    """Three steps are launched before the host sees a token: each knows the tokens before it."""
    sampling = Sampling(temperature=0, frequency_penalty=2.0, presence_penalty=1.0)
    batch = Batch([sampling, KINDS["greedy"]])
    logits = noise(4, 2, spread=1.0)
    expected = [batch.expected(logits) for _ in range(3)]

    launched = [batch.launch(logits) for _ in range(3)]

    for one, other in zip(expected, launched, strict=True):
        assert_same(one, batch.collect(other))
    assert len({tokens[0].token_id for tokens in expected}) > 1


def test_resumed_sequence_continues() -> None:
    """Preemption ends and begins a sequence: its counts and position come from its history."""
    sampling = Sampling(seed=17, temperature=1.5, presence_penalty=1.0, frequency_penalty=0.5)
    batch, rows = Batch([sampling], history=[1, 2], prompt_tokens=2), noise(8, 12)
    expected = [batch.expected(row[None])[0].token_id for row in rows]
    history, tokens = [1, 2], []

    for step, row in enumerate(rows):
        if step % 5 == 0:
            batch.gpu.end(0)
            batch.gpu.begin(BegunSequence(0, sampling, list(history), 2))
        tokens.append(batch.drawn(row[None])[0].token_id)
        history.append(tokens[-1])

    assert expected == tokens


def test_slot_forgets_its_former_sequence() -> None:
    """Biases, counts and parameters of an ended sequence do not reach the next one."""
    batch = Batch([KINDS["everything"]] * ROWS)
    for i in range(ROWS):
        batch.gpu.end(i)
        batch.gpu.begin(BegunSequence(i, KINDS["frequency"], [7], 1))
        batch.twin.begin(BegunSequence(i, KINDS["frequency"], [7], 1))
    logits = noise(5, ROWS)

    assert_same(batch.expected(logits), batch.drawn(logits))


def test_very_long_output_saturates_its_count() -> None:
    """A count has 14 bits; one more token must not make it negative."""
    sampling = Sampling(temperature=0, frequency_penalty=1e-3)
    batch = Batch([sampling], history=[1] + [2] * (COUNT_MAX + 5), prompt_tokens=1)
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 100.0

    tokens = [batch.drawn(logits)[0].token_id for _ in range(4)]

    assert tokens == [2] * 4


@pytest.mark.parametrize("kind", ["temperature", "top-k", "top-p", "greedy", "everything"])
@pytest.mark.parametrize("vocab", [VOCAB, 9_000], ids=["one stride", "two"])
def test_row_with_nan_has_no_token(kind: str, vocab: int) -> None:
    """A NaN first, last, at the best token or beside infinity: the runner ends that sequence alone
    with nan_logits. A row of minus infinity has no token either."""
    batch = Batch([KINDS[kind]] * 7, vocab)
    rows = noise(3, 7, vocab)
    rows[1, 0] = rows[2, -1] = rows[3, int(rows[3].argmax())] = rows[6] = float("nan")
    rows[4, 7], rows[4, 8] = float("nan"), float("inf")
    rows[5] = float("-inf")

    got = batch.drawn(rows)

    assert [token.token_id >= 0 for token in got] == [True] + [False] * 6
    assert got[1:] == [SampledToken(-1)] * 6


@pytest.mark.parametrize("others", ["noise", "least"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.5}])
def test_infinite_logits_share_the_draw(filters: dict[str, Any], others: str) -> None:
    """Overflow makes infinite logits: all are equally likely, and likelier than any finite one."""
    batch = Batch([Sampling(temperature=0.7, seed=seed, **filters) for seed in range(4)])
    rows = noise(4, 4)
    if others == "least":
        rows[:] = torch.finfo(torch.float32).min
    rows[:, [17, 211]] = float("inf")

    got = batch.drawn(rows)

    assert_same(batch.expected(rows), got)
    assert {token.token_id for token in got} == {17, 211}


@pytest.mark.parametrize("vocab", [VOCAB, pytest.param(9_000, marks=pytest.mark.nightly)])
def test_masks_apply_to_their_own_rows(vocab: int) -> None:
    """Every kind, with a mask on every second row; forbidden tokens are never drawn."""
    batch = Batch(tuple(KINDS.values()), vocab)
    masks = {i: mask_of(vocab, *range(i, vocab, 7)) for i in range(0, len(KINDS), 2)}
    logits = noise(0, len(KINDS), vocab)

    got = batch.drawn(logits, masks)

    assert_same(batch.expected(logits, masks), got)
    assert all(got[i].token_id % 7 == i % 7 for i in masks)


@pytest.mark.parametrize("value", [float("-inf"), -3e38, float("inf"), 0.0])
def test_only_allowed_token_is_drawn_at_any_logit(value: float) -> None:
    """Even with probability 0 from the model, and without a NaN."""
    logits = torch.zeros(len(KINDS), VOCAB)
    logits[:, 123] = value
    batch = Batch(tuple(KINDS.values()))

    got = batch.drawn(logits, dict.fromkeys(batch.ids, mask_of(VOCAB, 123)))

    assert {token.token_id for token in got} == {123}


def test_samples_of_one_row_of_logits() -> None:
    """After a fork several sequences draw from one row; adjusting one must not change another."""
    batch = Batch([Sampling(seed=1, logit_bias={4: 30.0}), Sampling(temperature=0), KINDS["top-p"]])
    logits = noise(6, 2)

    got = batch.collect(batch.launch(logits, source_rows=[1, 1, 0]))

    assert_same(batch.expected(logits[[1, 1, 0]]), got)


def test_row_without_draw_is_inactive() -> None:
    """A batch padded to its bucket neither writes a token nor counts one."""
    batch = Batch([KINDS["greedy with penalties"]] * 4)
    batch.drawn(noise(7, 4))
    before = batch.out.clone()
    batch.ids = [0]

    batch.drawn(noise(8, 4))

    assert not batch.table[1:].any()
    assert torch.equal(before[1:], batch.out[1:])


@pytest.mark.parametrize(
    ("sampling", "has_extras"),
    [
        (Sampling(temperature=0), False),
        (Sampling(top_k=3, top_p=0.5, min_p=0.1, seed=1), False),
        (Sampling(logprobs=0), True),
        (Sampling(logit_bias={1: 2.0}), True),
        (Sampling(presence_penalty=0.1), True),
        (Sampling(frequency_penalty=0.1), True),
        (Sampling(repetition_penalty=1.1), True),
    ],
)
def test_only_extras_take_more_than_one_kernel(sampling: Sampling, has_extras: bool) -> None:
    """Rows that ask for nothing pay nothing; a seed is no extra."""
    batch = Batch([Sampling(), sampling])

    assert batch.gpu.fill(batch.table.numpy(), [0, 1]).has_extras is has_extras
    assert batch.gpu.fill(batch.table.numpy(), [0]).has_extras is False
    assert batch.gpu.fill(batch.table.numpy(), [0], {0: mask_of(VOCAB, 1)}).has_extras is True


def test_sequences_without_seed_get_different_seeds() -> None:
    """Two clients that send the same prompt must not always get the same answer."""
    batch = Batch([Sampling()] * 8)

    tokens = batch.drawn(noise(5, 1, spread=0.5).expand(8, -1).contiguous())

    assert len({token.token_id for token in tokens}) > 4


def test_prompt_logprobs_are_of_given_tokens() -> None:
    """More rows than one launch reports, and ties among the likeliest."""
    count = 2 * ROWS + 3
    logits = noise(6, count).bfloat16()
    known = [(7 * i) % VOCAB for i in range(count)]

    entries = Batch([]).gpu.prompt_logprobs(logits[2:].to(DEVICE), known[2:], top=20)

    assert_same(logprob_entries(logits.float(), known, [20] * count)[2:], entries)


@settings(max_examples=examples(30), deadline=None)
@given(
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 100.0]),
        top_k=st.sampled_from([0, 1, 3, 2**31 - 1]),
        top_p=st.sampled_from([1e-9, 0.3, 0.97, 1.0]),
        min_p=st.sampled_from([0.0, 1e-30, 0.07, 1.0]),
        repetition_penalty=st.sampled_from([5e-324, 1e-3, 1.0, 1.7, 100.0]),
        presence_penalty=st.sampled_from([-100.0, 0.0, 0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.9, 100.0]),
        logit_bias=st.dictionaries(st.integers(0, 11), st.sampled_from([-100.0, 1.3, 100.0])),
        logprobs=st.sampled_from([None, 0, 4, 20]),
        seed=st.integers(-(2**63), 2**63 - 1),
    ),
    seed=st.integers(0, 1000),
    history=st.lists(st.integers(0, 11), min_size=2, max_size=12),
    allowed=st.none() | st.sets(st.integers(0, 11), min_size=1),
)
def test_any_parameters_draw_tokens_of_full_sampler(
    sampling: Sampling, seed: int, history: list[int], allowed: set[int] | None
) -> None:
    """Every combination, extreme values too, with a token that the model excludes."""
    logits = noise(seed, 1, 12)
    logits[0, seed % 12] = float("-inf")
    batch = Batch([sampling], 12, history)
    masks = None if allowed is None else {0: mask_of(12, *allowed)}

    for _ in range(2):
        assert_same(batch.expected(logits, masks), batch.drawn(logits, masks))
