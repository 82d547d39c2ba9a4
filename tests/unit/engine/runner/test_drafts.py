"""The CPU runner verifies drafts: tokens and logprobs are those of steps of one token."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest

from engine.api import CacheGrant, Request, SampledToken, Sampling
from engine.config import EngineConfig
from engine.drafts.drafter import Drafter
from engine.model_store import ModelCard
from engine.models.cpu_decoder import Kernels
from engine.plan import BegunSequence, Row, StepPlan
from engine.runner.cpu_runner import CpuRunner
from tests.checkers import FREE_DRAFTS
from tests.draft_oracle import OracleSource
from tests.unit.engine.runner.cpu_engine import CpuEngine

BLOCKS = 120
Output = dict[tuple[str, int], list[SampledToken]]
SAMPLINGS = {
    "greedy": Sampling(temperature=0, logprobs=0),
    "seeded": Sampling(seed=3, logprobs=2),
    "filtered": Sampling(seed=4, top_k=20, top_p=0.9),
    "penalised": Sampling(
        seed=5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, logprobs=0
    ),
    "biased": Sampling(temperature=0, logit_bias={3: 1.5, 7: -2.0}, logprobs=0),
}


def requests() -> list[Request]:
    """Return a request for each sampling, two of which have several samples."""
    chance = random.Random(11)
    shared = [chance.randrange(250) for _ in range(40)]
    return [
        Request(
            name,
            (*shared, *(chance.randrange(250) for _ in range(5 * place))),
            max_tokens=36,
            grant=CacheGrant(b"n"),
            sampling=sampling,
            samples=2 if name in ("seeded", "penalised") else 1,
        )
        for place, (name, sampling) in enumerate(SAMPLINGS.items())
    ]


def config_of(pool: str) -> EngineConfig:
    """Return the settings of an engine with KV of this type."""
    return EngineConfig(kv_dtype=pool)  # type: ignore[arg-type]


def outputs(engine: CpuEngine) -> Output:
    """Run the requests; return each sample's tokens."""
    for request in requests():
        engine.core.submit(request)
    engine.settle()
    return engine.output


@pytest.fixture(scope="module")
def one_a_step(card: ModelCard) -> Callable[[str, Kernels | None], Output]:
    """Return a function that gives each sample's tokens without drafts, computed once."""

    @cache
    def found(pool: str, path: Kernels | None) -> Output:
        return outputs(CpuEngine(card, config_of(pool), BLOCKS, path))

    return found


@pytest.mark.parametrize("right", [0.0, 0.5, pytest.param(0.9, marks=pytest.mark.nightly), 1.0])
@pytest.mark.parametrize("pool", ["auto", "int8"])
def test_tokens_are_those_of_one_a_step(
    card: ModelCard,
    path: Kernels | None,
    right: float,
    pool: str,
    one_a_step: Callable[[str, Kernels | None], Output],
) -> None:
    """In C bit for bit, with their logprobs; in torch a product of several rows adds in another
    order."""
    plain, config = one_a_step(pool, path), config_of(pool)
    drafted = CpuEngine(card, config, BLOCKS, path)

    def answer(request_id: str, index: int) -> list[int]:
        return [token.token_id for token in plain[request_id, index]]

    vocab = card.config.vocab
    drafted.core.drafts.drafter = Drafter(FREE_DRAFTS, [OracleSource(answer, right, vocab, seed=1)])
    found = outputs(drafted)

    if path is not None:
        assert found == plain
    assert {key: [t.token_id for t in tokens] for key, tokens in found.items()} == {
        key: [t.token_id for t in tokens] for key, tokens in plain.items()
    }


def test_steps_are_timed_within_the_pool(card: ModelCard, path: Kernels | None) -> None:
    """More tokens never count as faster, and what the timing wrote is gone."""
    runner = CpuRunner(card, EngineConfig(), blocks=2, context=24, kernels=path)
    took_s = runner.time_steps(64)

    assert len(took_s) == 16
    assert list(took_s) == sorted(took_s)
    assert took_s[0] > 0
    assert not runner.kv.data.any()


def test_draws_end_at_the_first_that_differs(card: ModelCard, path: Kernels | None) -> None:
    """The draw there is the sequence's last token: the next row computes it."""
    runner = CpuRunner(card, EngineConfig(), blocks=8, context=64, kernels=path)
    prompt = [5, 9, 2, 77]
    begun = BegunSequence(1, Sampling(temperature=0), prompt, len(prompt))
    alone = [begun.token_ids[-1]]
    runner.launch(StepPlan(0, (Row(1, 0, 4, [0], 0, prompt, (1,)),), begun=(begun,)))
    (first,) = runner.collect().sampled[1]
    alone = [first.token_id]
    for step in range(1, 4):
        runner.launch(StepPlan(step, (Row(1, 3 + step, 1, [0], 0, None, (1,)),)))
        alone += [token.token_id for token in runner.collect().sampled[1]]
    wrong = (alone[2] + 1) % card.config.vocab

    runner.launch(StepPlan(4, (), ended=(1,)))
    runner.collect()
    again = BegunSequence(2, Sampling(temperature=0), [*prompt, alone[0]], len(prompt))
    drafts = [alone[1], wrong, 0]
    row = Row(2, 0, 8, [1], 0, [*prompt, alone[0], *drafts], (2,), drafts=3)
    runner.launch(StepPlan(5, (row,), begun=(again,)))
    sampled = runner.collect().sampled[2]
    runner.launch(StepPlan(6, (Row(2, 6, 1, [1], 0, None, (2,)),)))
    (after,) = runner.collect().sampled[2]

    assert [token.token_id for token in sampled] == alone[1:3]
    assert after.token_id == alone[3]
