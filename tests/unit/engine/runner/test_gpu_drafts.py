"""The GPU runner verifies drafts: tokens and logprobs are those of steps of one token.

Without a GPU the kernels run in Triton's interpreter, where a row's bits depend on no other row.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.api import CacheGrant, Grammar, Request, Sampling
from engine.drafts.drafter import Drafter
from engine.drafts.model import ModelSource
from engine.drafts.step_times import StepTimes
from engine.model_store import Architecture
from engine.plan import BegunSequence, Row, StepPlan
from engine.runner.gpu_runner import right_draws
from tests.checkers import FREE_DRAFTS
from tests.draft_oracle import OracleSource
from tests.unit.engine.runner.gpu_engine import FAMILIES, IN_INTERPRETER, VOCAB, Engine
from tests.unit.engine.runner.test_lanes import wide

pytestmark = IN_INTERPRETER

OUTPUT = 5
KINDS = {
    "greedy": Sampling(temperature=0, logprobs=1),
    "seeded": Sampling(seed=3),
    "filtered": Sampling(seed=4, top_k=20, top_p=0.9),
    "penalised": Sampling(
        seed=5, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.4
    ),
    "biased": Sampling(temperature=0, logit_bias={3: 1.5, 7: -2.0}, logprobs=0),
}


def requests(kinds: tuple[str, ...]) -> list[Request]:
    """Return a request of each kind; one is held to a grammar, one has two samples."""
    chance = random.Random(11)
    shared = [chance.randrange(VOCAB) for _ in range(20)]
    asked = [
        Request(
            name,
            (*shared, *(chance.randrange(VOCAB) for _ in range(3 * place))),
            max_tokens=OUTPUT,
            grant=CacheGrant(b"n"),
            sampling=KINDS[name],
            samples=2 if name == "seeded" else 1,
        )
        for place, name in enumerate(kinds)
    ]
    held = Request(
        "held", (1, 2, 3), OUTPUT, CacheGrant(b"n"), Sampling(seed=9),
        grammar=Grammar("regex", "(ab|ba){3}"),
    )  # fmt: skip
    return [*asked, held]


def drafted(
    right: float, kinds: tuple[str, ...], depth: int, lanes: int = 1,
    config: Architecture | None = None,
) -> tuple[Engine, Engine]:  # fmt: skip
    """Return engines that have run the requests, one without drafts and one with an oracle's."""
    blocks = 48 if config is None else 120
    plain = Engine(1, config=config, blocks=blocks)
    engine = Engine(depth, config=config, blocks=blocks, seats=16, lanes=lanes)
    plain.run(*requests(kinds))

    def answer(request_id: str, index: int) -> list[int]:
        return plain.output(request_id, index)

    source = OracleSource(answer, right, VOCAB, seed=1)
    engine.core.drafts.drafter = Drafter(FREE_DRAFTS[:16], [source])
    engine.run(*requests(kinds))
    return plain, engine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "depth", "lanes"),
    [
        (0.7, 2, 1),
        pytest.param(0.0, 1, 1, marks=pytest.mark.nightly),
        pytest.param(0.9, 1, 1, marks=pytest.mark.nightly),
        pytest.param(1.0, 2, 1, marks=pytest.mark.nightly),
        pytest.param(0.8, 2, 2, marks=pytest.mark.nightly),
    ],
)
def test_tokens_are_those_of_one_a_step(right: float, depth: int, lanes: int) -> None:
    """Greedy, seeded, filtered, under penalties, a bias or a grammar, and with logprobs."""
    plain, engine = drafted(right, tuple(KINDS), depth, lanes)

    assert_equal(plain, engine)
    if right:
        accepted = [d.accepted for f in engine.finished.values() for d in f.usage.drafts]
        assert sum(accepted) > 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lanes"),
    [
        ("qwen3_next", 1),
        ("lfm2", 1),
        pytest.param("granite hybrid", 1, marks=pytest.mark.nightly),
        pytest.param("qwen3_next", 2, marks=pytest.mark.nightly),
    ],
)
def test_tokens_of_a_model_with_states_are_those_of_one_a_step(name: str, lanes: int) -> None:
    """States are left before the drafts of a row, and take in those that were accepted."""
    config = FAMILIES[name] if lanes == 1 else wide(FAMILIES[name], lanes)
    plain, engine = drafted(0.7, ("greedy", "seeded"), 2, lanes, config)

    assert_equal(plain, engine)
    assert sum(d.accepted for f in engine.finished.values() for d in f.usage.drafts) > 4


def assert_equal(plain: Engine, engine: Engine) -> None:
    """Compare what two engines have drawn."""
    for key, tokens in plain.drawn.items():
        found = engine.drawn[key]
        assert [token.token_id for token in found] == [token.token_id for token in tokens], key
        for one, other in zip(found, tokens, strict=True):
            assert (one.logprob is None) == (other.logprob is None)
            if one.logprob is not None:
                assert one.logprob == pytest.approx(other.logprob, abs=2e-3)


def test_counts_of_penalties_forget_what_was_drawn_behind_a_wrong_draft() -> None:
    """The next step's draw is the one of an engine that has never seen these drafts."""
    sampling = Sampling(temperature=0, frequency_penalty=2.0, presence_penalty=1.0)
    prompt = [5, 9, 2, 7]
    alone = draw_one_by_one(sampling, prompt, 6)
    engine = Engine(1, seats=16)
    wrong = (alone[2] + 1) % VOCAB
    drafts = [alone[1], wrong, alone[0], alone[1], alone[2]]
    begun = BegunSequence(1, sampling, [*prompt, alone[0]], len(prompt))
    row = Row(1, 0, 5 + len(drafts), [0], 0, [*prompt, alone[0], *drafts], (1,), drafts=5)
    engine.runner.launch(StepPlan(0, (row,), begun=(begun,)))
    found = [token.token_id for token in engine.runner.collect().sampled[1]]
    for step in range(1, 4):
        start = len(prompt) + len(found)
        engine.runner.launch(
            StepPlan(step, (Row(1, start, 1, [0], 0, [[alone[0], *found][-1]], (1,)),))
        )
        found += [token.token_id for token in engine.runner.collect().sampled[1]]

    assert found[:2] == alone[1:3]
    assert found == alone[1:6]


def draw_one_by_one(sampling: Sampling, prompt: list[int], count: int) -> list[int]:
    """Return a sequence's tokens, each from a step of its own."""
    engine, tokens = Engine(1), list(prompt)
    begun = BegunSequence(1, sampling, list(prompt), len(prompt))
    row = Row(1, 0, len(prompt), [0], 0, list(prompt), (1,))
    engine.runner.launch(StepPlan(0, (row,), begun=(begun,)))
    tokens += [token.token_id for token in engine.runner.collect().sampled[1]]
    for step in range(1, count):
        row = Row(1, len(tokens) - 1, 1, [0], 0, None, (1,))
        engine.runner.launch(StepPlan(step, (row,)))
        tokens += [token.token_id for token in engine.runner.collect().sampled[1]]
    return tokens[len(prompt) :]


def test_a_step_without_a_number_at_a_draft_keeps_what_is_before_it() -> None:
    """A token behind NaN logits is none; the next step finds that at its first position."""
    assert right_draws([4, 5, -1], [4, 5]) == 2
    assert right_draws([-1, 5], [4]) == 0
    assert right_draws([4, 6, 7], [4, 5]) == 2
    assert right_draws([4, 5, 7], [4, 5]) == 3


def test_times_are_measured_only_where_a_device_tells_them() -> None:
    """The interpreter's times say nothing; nor does timing leave a trace."""
    engine = Engine(1, seats=16)
    with torch.inference_mode():
        times = engine.runner.time_steps(16)

    assert times == () or list(times) == sorted(times)
    assert not engine.kv.data[0].any()
    assert np.count_nonzero(engine.runner.last_tokens.cpu().numpy()) == 0


def test_few_sequences_have_room_for_their_drafts() -> None:
    """A step of four streams may verify as many drafts as one of many: each is a row of logits."""
    shapes = Engine(1, seats=4).runner.graph_shapes(4)

    assert {shape.rows: shape.draws for shape in shapes if shape.causal} == {
        16: 16, 32: 32, 48: 48, 64: 64, 96: 64, 128: 64,
    }  # fmt: skip


@pytest.mark.slow
def test_a_model_on_the_gpu_drafts_for_itself() -> None:
    """Two of its steps are in flight at once, and the next token stays on the device."""
    plain, engine, small = Engine(1), Engine(2, seats=16), Engine(1, blocks=64)
    source = ModelSource(
        small.runner, StepTimes((1e-6,) * 16), lambda: 0.0,
        places=2, vocab_size=VOCAB, block_size=16,
    )  # fmt: skip
    engine.core.drafts.drafter = Drafter(FREE_DRAFTS[:16], [], model=source)
    wanted = [
        Request(name, tokens, 10, CacheGrant(b"n"), Sampling(temperature=0))
        for name, tokens in (("short", (5, 9, 2)), ("long", tuple(range(20))))
    ]
    for one in (plain, engine):
        one.run(*wanted)

    for name in ("short", "long"):
        assert engine.output(name, 0) == plain.output(name, 0)
    counts = [count for final in engine.finished.values() for count in final.usage.drafts]
    drafted = sum(count.drafted for count in counts)
    assert drafted - sum(count.accepted for count in counts) <= 1
    assert drafted > 5
