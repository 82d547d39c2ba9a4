"""A simulated fleet finds the tokens that two real engines find, on the same requests."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.api import CacheGrant, Request, Sampling
from engine.config import EngineConfig
from gateway.bench.simulation.engine_shape import SHAPES
from gateway.bench.simulation.policies import POLICIES
from gateway.bench.simulation.simulation import SimulatedFleet, Simulation
from gateway.bench.simulation.traffic import SimulatedRequest, Stretch, tokens_of
from tests.models import prepared
from tests.unit.engine.runner.cpu_engine import BLOCK, CpuEngine

BLOCKS = 40
"""Room for about three conversations: most of what is found later was evicted in between."""
APART_S = 1000.0


def traffic(seed: int, vocab: int) -> list[SimulatedRequest]:
    """Draw bursts of one to three requests that come together, with prompts of drawn tokens: turns
    of conversations under four system prompts."""
    chance = random.Random(seed)

    def words(count: int) -> tuple[Stretch, ...]:
        return tuple((chance.randrange(vocab), 1) for _ in range(count))

    systems = [words(chance.randrange(20, 150)) for _ in range(4)]
    turns: list[tuple[Stretch, ...]] = list(systems)
    requests: list[SimulatedRequest] = []
    for burst in range(30):
        forced = chance.randrange(vocab)
        for _ in range(chance.choice([1, 1, 2, 3])):
            prompt = (*chance.choice(turns[-6:] + systems), *words(chance.randrange(1, 40)))
            answer = (forced, chance.randrange(1, 20))
            if len(prompt) > 300:
                continue
            requests.append(
                SimulatedRequest(len(requests), burst * APART_S, b"n", prompt, len(prompt), answer)
            )
            turns.append((*prompt, *[(forced, 1)] * answer[1]))
    return requests


@pytest.mark.parametrize("policy", ["seconds", "round-robin"])
def test_hits_equal_those_of_two_real_engines(policy: str, tmp_path: Path) -> None:
    """To the token and for each request, with answers, evictions, shared blocks and requests that
    wait for each other's prefixes; the real ones run a model."""
    card = prepared(tmp_path)
    shape = replace(SHAPES["cpu"], kv_tokens=BLOCKS * BLOCK)
    requests = traffic(7, card.config.vocab)
    run = Simulation(requests, SimulatedFleet(2, shape, BLOCK), POLICIES[policy])
    run.run()
    run.check()

    engines = [CpuEngine(card, EngineConfig(), BLOCKS, is_recounted=False) for _ in range(2)]
    for at_s in sorted({one.at_s for one in requests}):
        for one in (one for one in requests if one.at_s == at_s):
            engines[run.outcomes[one.number].replica or 0].core.submit(
                Request(
                    str(one.number),
                    tuple(tokens_of(one.prompt)),
                    one.answer_tokens,
                    CacheGrant(one.namespace),
                    Sampling(temperature=0, logit_bias={one.answer[0]: 100.0}),
                )
            )
        for engine in engines:
            engine.settle()
    found = {name: tokens for engine in engines for name, tokens in engine.cached.items()}
    simulated = {str(one.request.number): one.cached_tokens for one in run.outcomes}

    assert found == simulated
    assert 0.2 < sum(found.values()) / sum(one.prompt_tokens for one in requests) < 0.9
    assert sum(engine.cache.stats().evicted_blocks_total for engine in engines) > 2 * BLOCKS
