"""An engine over several GPUs gives what one gives: the same requests through both.

Without GPUs lanes are threads in Triton's interpreter, which meet at a barrier.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from msgspec import structs

from engine.api import Grammar, Request, Sampling
from engine.model_store import Architecture
from engine.plan import BegunSequence, Row, StepPlan
from engine.runner import gpu_runner
from tests.unit.engine.runner.gpu_engine import (
    DEVICE,
    FAMILIES,
    GREEDY,
    IN_INTERPRETER,
    Engine,
    config_of,
    request,
    tokens_of,
)

ERROR_MAX = 1e-5 if DEVICE.type == "cpu" else 5e-3
"""Largest difference of a logprob; on a GPU fp32 attention multiplies in tf32."""
BLOCKS = 26
"""A pool in which sequences are preempted and cached runs are evicted."""

pytestmark = [*IN_INTERPRETER, pytest.mark.usefixtures("every_step_compared")]


@pytest.fixture
def every_step_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """All lanes draw the same tokens in each step."""
    monkeypatch.setattr(gpu_runner, "COMPARED_STEPS", 1)


def wide(config: Architecture, lanes: int) -> Architecture:
    """Return a shape whose heads so many lanes can share."""
    delta, mamba = config.delta, config.mamba
    return structs.replace(
        config, heads=2 * lanes, kv_heads=lanes, hidden=32,
        delta=delta and structs.replace(delta, key_heads=lanes, value_heads=2 * lanes),
        mamba=mamba and structs.replace(mamba, heads=2 * lanes, groups=lanes),
    )  # fmt: skip


SAMPLINGS = (
    Sampling(temperature=0, logprobs=2),
    Sampling(seed=5, logprobs=0),
    Sampling(seed=6, top_k=9, top_p=0.8, logprobs=1),
    Sampling(temperature=0, logit_bias={3: 2.0, 9: -4.0}, logprobs=0),
    Sampling(seed=7, repetition_penalty=1.3, presence_penalty=0.2, logprobs=0),
)


def requests_of(rng: random.Random, count: int) -> list[Request]:
    """Return requests of which some share a prefix, fork, have a grammar or prompt logprobs."""
    shared = tokens_of(rng.randrange(100), 50)
    found = []
    for index in range(count):
        own = tokens_of(rng.randrange(1000), rng.randrange(1, 40))
        options: dict[str, Any] = {"count": rng.randrange(1, 5), "samples": rng.choice((1, 1, 2))}
        if rng.random() < 0.2:
            options |= {"prompt_logprobs": 1, "samples": 1}
        elif rng.random() < 0.2:
            options["grammar"] = Grammar("regex", "[a-m]+")
        prompt = shared[: rng.choice((0, 33, 50))] + own
        found.append(request(str(index), prompt, rng.choice(SAMPLINGS), **options))
    return found


def run(engine: Engine, seed: int, count: int) -> int:
    """Submit requests a few at a time; return the number of steps."""
    rng = random.Random(seed)
    waiting, steps = requests_of(rng, count), 0
    while waiting or engine.core.has_work():
        for _ in range(rng.choice((0, 0, 1, 3))):
            if waiting:
                engine.core.submit(waiting.pop())
        if engine.core.has_work():
            engine.step()
            steps += 1
    engine.core.cache.check()
    return steps


def check_alike(one: Engine, several: Engine) -> None:
    """Both gave the same tokens and, to rounding, the same logprobs."""
    assert one.drawn.keys() == several.drawn.keys()
    assert one.finished.keys() == several.finished.keys()
    for key, tokens in one.drawn.items():
        found = several.drawn[key]
        assert [t.token_id for t in found] == [t.token_id for t in tokens], key
        for mine, other in zip(tokens, found, strict=True):
            if mine.logprob is not None:
                assert other.logprob == pytest.approx(mine.logprob, abs=ERROR_MAX), key
    assert one.prompt_logprobs.keys() == several.prompt_logprobs.keys()


CASES = [
    pytest.param("llama", 2, 2, marks=pytest.mark.slow),
    *(
        pytest.param(name, lanes, 6, marks=pytest.mark.nightly)
        for name in ("llama", "gemma3", "qwen3_moe")
        for lanes in (2, 4)
    ),
    *(
        pytest.param(name, 2, 4, marks=pytest.mark.nightly)
        for name in ("gemma2", "attention of gpt-oss", "cohere2", "granite", "ministral3")
    ),
    *(
        pytest.param(name, 2, 4, marks=pytest.mark.nightly)
        for name in ("lfm2", "qwen3_next", "granite hybrid")
    ),
]
"""Family, lanes, and requests: in the interpreter a request takes half a minute."""


@pytest.mark.parametrize(("name", "lanes", "count"), CASES)
def test_lanes_give_what_one_gives(name: str, lanes: int, count: int) -> None:
    """Over random requests with forks, copies, masks, penalties, hits and preemption."""
    config = wide(FAMILIES[name] if name in FAMILIES else config_of(4, 2), lanes)
    engines = [Engine(2, config=config, blocks=BLOCKS, lanes=n) for n in (1, lanes)]

    steps = [run(engine, seed=lanes, count=count) for engine in engines]

    assert steps[0] == steps[1]
    check_alike(*engines)


def test_an_error_of_a_lane_ends_the_step_and_says_what_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others do not wait for it without end."""
    engine = Engine(1, config=wide(config_of(4, 2), 2), lanes=2)

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(engine.runner.model, "forward", fail)

    with pytest.raises(RuntimeError, match="planted"):
        engine.runner.launch(plan_of())


def test_lanes_that_draw_unlike_tokens_end_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane whose sums are wrong is found, and no answer goes on with its tokens."""
    engine = Engine(1, config=wide(config_of(4, 2), 2), lanes=2)
    logits = engine.runner.model.logits

    def shifted(hidden: torch.Tensor) -> torch.Tensor:
        return logits(hidden).roll(1, -1)

    monkeypatch.setattr(engine.runner.model, "logits", shifted)
    engine.runner.launch(plan_of())

    with pytest.raises(RuntimeError, match=r"GPU 1 drew token .* in draw 0 of step 0"):
        engine.runner.collect()


def plan_of() -> StepPlan:
    """Return a step of one short prompt."""
    prompt = tokens_of(1, 4)
    begun = BegunSequence(7, GREEDY, prompt, len(prompt))
    row = Row(7, 0, len(prompt), [3], 0, prompt, samples=(7,))
    return StepPlan(0, (row,), begun=(begun,))
