"""Small simulated fleets: every request ends once, no token is lost, and nothing is left to chance.

Few blocks, prompts of few stretches and all kinds of faults; the engines check themselves.
"""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.bench.simulation.engine_shape import SHAPES, EngineShape
from gateway.bench.simulation.faults import Fault
from gateway.bench.simulation.figures import PolicyFigures, figures_of
from gateway.bench.simulation.policies import POLICIES
from gateway.bench.simulation.simulation import SimulatedFleet, Simulation
from gateway.bench.simulation.traffic import SimulatedRequest
from tests.examples import examples

BLOCK = 16
REPLICAS = 3

_shapes = st.builds(
    lambda blocks, sequences, step_tokens: replace(
        SHAPES["8b"],
        kv_tokens=blocks * BLOCK,
        sequences_max=sequences,
        step_tokens_max=step_tokens,
        prefill_tokens_per_s=500.0,
    ),
    blocks=st.sampled_from([12, 40]),
    sequences=st.sampled_from([1, 2, 8]),
    step_tokens=st.sampled_from([16, 256]),
)
_prompts = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([1, 16, 40, 130])), min_size=1, max_size=3
)
_drawn = st.lists(
    st.tuples(st.sampled_from([0.0, 0.01, 0.3]), _prompts, st.integers(1, 30), st.booleans()),
    min_size=1,
    max_size=12,
)
_faults = st.lists(
    st.builds(
        Fault,
        st.sampled_from(["kill", "slow", "late", "drain"]),
        st.sampled_from([0.0, 0.1, 0.2]),
        st.sampled_from([0.25, 0.9]),
        st.sampled_from([(0,), (1,), (0, 1, 2)]),
        st.sampled_from([0.5, 3.0]),
    ),
    max_size=3,
)
_policies = st.sampled_from(sorted(POLICIES))


def made(drawn: list[tuple[float, list[tuple[int, int]], int, bool]]) -> list[SimulatedRequest]:
    """Requests of two namespaces, in the order of their times."""
    requests, at_s = [], 0.0
    for number, (pause_s, prompt, answer, is_other) in enumerate(drawn):
        at_s += pause_s
        tokens = sum(length for _, length in prompt)
        name = b"b" if is_other else b"a"
        requests.append(
            SimulatedRequest(number, at_s, name, tuple(prompt), tokens, (100 + number, answer))
        )
    return requests


def simulated(
    requests: list[SimulatedRequest], shape: EngineShape, policy: str, faults: list[Fault]
) -> tuple[Simulation, PolicyFigures]:
    """Run a fleet to its end, and check it."""
    run = Simulation(requests, SimulatedFleet(REPLICAS, shape, BLOCK), POLICIES[policy], faults)
    run.run()
    run.check()
    figures = figures_of(policy, run.outcomes, run.gaps, run.busy_s, run.computed_tokens)
    return run, figures


@settings(max_examples=examples(200))
@given(_drawn, _shapes, _policies, _faults)
def test_every_request_ends_once_and_no_token_is_lost(
    drawn: list[tuple[float, list[tuple[int, int]], int, bool]],
    shape: EngineShape,
    policy: str,
    faults: list[Fault],
) -> None:
    """Killed, drained or late engines lose no request, since one comes back in the end."""
    requests = made(drawn)
    run, figures = simulated(requests, shape, policy, faults)

    for request, outcome in zip(requests, run.outcomes, strict=True):
        fits = request.prompt_tokens + request.answer_tokens <= shape.kv_tokens // BLOCK * BLOCK
        assert outcome.ending == ("done" if fits else "too_long")
    done = [one for one in run.outcomes if one.ending == "done"]
    prompt = sum(one.request.prompt_tokens for one in done)
    cached = sum(one.cached_tokens or 0 for one in done)
    assert run.computed_tokens == prompt - cached + figures.again_tokens
    assert figures.again_tokens >= 0
    gaps = sum(one.request.answer_tokens - 1 for one in done)
    assert run.gaps.total >= gaps
    if not any(fault.kind == "kill" for fault in faults):
        assert (figures.again_tokens, run.gaps.total) == (0, gaps)
        assert figures.moved == 0


FILLS_ALL = [
    *([(0.0, [(0, 1)], 1, False)] * REPLICAS),
    (0.0, [(0, 1), (0, 40), (0, 130)], 7, False),
]
"""The last begins within a block that is cached, and fills the whole pool."""


@settings(max_examples=examples(60))
@example(FILLS_ALL, replace(SHAPES["8b"], kv_tokens=12 * BLOCK), "conductor", [])
@given(_drawn, _shapes, _policies, _faults)
def test_the_same_requests_give_the_same_figures(
    drawn: list[tuple[float, list[tuple[int, int]], int, bool]],
    shape: EngineShape,
    policy: str,
    faults: list[Fault],
) -> None:
    one, other = (simulated(made(drawn), shape, policy, faults)[1] for _ in range(2))

    assert one == other


@settings(max_examples=examples(60))
@given(_drawn, _shapes)
def test_one_replica_finds_the_same_whatever_the_policy(
    drawn: list[tuple[float, list[tuple[int, int]], int, bool]], shape: EngineShape
) -> None:
    """There is nothing to choose, so a policy that changed a hit would touch the cache."""
    found = []
    for policy in sorted(POLICIES):
        run = Simulation(made(drawn), SimulatedFleet(1, shape, BLOCK), POLICIES[policy])
        run.run()
        run.check()
        found.append([(one.cached_tokens, one.first_s, one.ended_s) for one in run.outcomes])

    assert all(one == found[0] for one in found)
