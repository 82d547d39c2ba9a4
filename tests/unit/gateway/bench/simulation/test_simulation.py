"""Whole simulated fleets: what faults do, and what a better choice brings."""

from __future__ import annotations

from functools import cache

import pytest
from msgspec.structs import replace

from engine.scheduler.step_cost import StepWork
from gateway.bench.client import BenchError
from gateway.bench.simulation.engine_shape import SHAPES, fit_step_cost
from gateway.bench.simulation.faults import Fault, parse_fault
from gateway.bench.simulation.figures import GapCounts, PolicyFigures, figures_of
from gateway.bench.simulation.policies import POLICIES
from gateway.bench.simulation.simulation import SimulatedFleet, Simulation
from gateway.bench.simulation.traffic import SimulatedRequest, TenantTraffic, draw_tenants
from tests.tables import each_row

SHAPE = replace(SHAPES["8b"], kv_tokens=60_000)
BUSY = TenantTraffic(
    requests=240, per_s=40.0, tenants=30, system_tokens=2048, question_tokens=512, pause_s=2.0
)


def simulated(
    policy: str, *faults: str, requests: list[SimulatedRequest] | None = None
) -> tuple[Simulation, PolicyFigures]:
    """Run four replicas under drawn tenants."""
    requests = draw_tenants(BUSY, 1) if requests is None else requests
    run = Simulation(
        requests,
        SimulatedFleet(4, SHAPE, 128, 0.05),
        POLICIES[policy],
        [parse_fault(text, 4) for text in faults],
    )
    run.run()
    run.check()
    return run, figures_of(policy, run.outcomes, run.gaps, run.busy_s, run.computed_tokens)


usual = cache(simulated)
"""The run of a policy under no faults, which several tests compare with."""


def test_predicted_seconds_find_more_and_answer_sooner_than_turns() -> None:
    _, ours = usual("seconds")
    _, turns = usual("round-robin")

    assert (ours.hits or 0) > (turns.hits or 0) + 0.1
    assert (ours.first_token_p90_s or 9) < (turns.first_token_p90_s or 0)


def parted(*faults: str, gb_s: float, prefill: int = 1) -> tuple[Simulation, PolicyFigures]:
    """Run four replicas with long questions, whose prompts may be computed apart."""
    traffic = replace(BUSY, per_s=4.0, question_tokens=6_000, answer_tokens=400, requests=100)
    fleet = SimulatedFleet(4, replace(SHAPE, kv_tokens=200_000), 128, 0.05, prefill, gb_s * 1e9)
    wanted = [parse_fault(text, 4) for text in faults]
    run = Simulation(draw_tenants(traffic, 1), fleet, POLICIES["apart"], wanted)
    run.run()
    run.check()
    of = figures_of("apart", run.outcomes, run.gaps, run.busy_s, run.computed_tokens, run.apart)
    return run, of


def test_prompts_apart_spare_answers_and_cost_first_tokens() -> None:
    """A quarter of the gaps had a prompt in them. Over a slow link, and where each replica does
    all, nothing is parted."""
    run, apart = parted(gb_s=20.0)
    slow, together = parted(gb_s=0.5)
    _, equal = parted(gb_s=20.0, prefill=0)
    long_s = [one.percentile(75) or 0 for one in (run.gaps, slow.gaps)]

    assert apart.apart > 20
    assert (together.apart, equal.apart) == (0, 0)
    assert 2 * long_s[0] < long_s[1]
    assert apart.done == together.done == 100
    assert all(one.replica != 0 for one in run.outcomes)


def test_a_replica_that_dies_with_a_prompt_costs_no_answer() -> None:
    """Nor does one that was to answer."""
    for victim in ("r0", "r2"):
        run, figures = parted(f"kill@8-9:{victim}", gb_s=20.0)

        assert figures.done == 100
        assert run.apart > 10


def test_requests_of_a_killed_replica_go_on_elsewhere() -> None:
    run, figures = simulated("seconds", "kill@3:r0")
    moved = [one for one in run.outcomes if one.sent > 1]

    assert figures.done == BUSY.requests
    assert moved
    assert all(one.replica != 0 for one in moved)
    assert figures.again_tokens > 0


def test_a_killed_replica_comes_back_empty() -> None:
    """It is sent requests again, and the first of them finds nothing there."""
    run, _ = simulated("round-robin", "kill@3-4:r0")
    back = [one for one in run.outcomes if one.replica == 0 and one.request.at_s > 4]

    assert back
    assert back[0].cached_tokens == 0


def test_a_draining_replica_takes_nothing_new() -> None:
    run, figures = simulated("round-robin", "drain@3:r1")

    assert figures.done == BUSY.requests
    assert figures.moved == 0
    assert all(one.replica != 1 for one in run.outcomes if one.request.at_s > 3)


def test_a_slow_replica_is_sent_fewer_requests() -> None:
    """Its queue and its measured rate tell."""
    slow, _ = simulated("seconds", "slow@0:r2=8")
    equal, _ = usual("seconds")

    assert sum(one.replica == 2 for one in slow.outcomes) < 0.6 * sum(
        one.replica == 2 for one in equal.outcomes
    )


def test_late_facts_change_what_is_chosen() -> None:
    late, _ = simulated("seconds", "late@0:all=60")
    prompt, _ = usual("seconds")

    assert [one.replica for one in late.outcomes] != [one.replica for one in prompt.outcomes]


def test_requests_without_a_replica_wait_for_one_or_end() -> None:
    """A fleet that is gone serves nobody; one that comes back serves all that waited."""
    _, gone = simulated("seconds", "kill@3:all")
    _, back = simulated("seconds", "kill@3-30:all")

    assert gone.no_replica > 0
    assert gone.done + gone.no_replica == BUSY.requests
    assert back.done == BUSY.requests


def test_a_prompt_that_fits_no_engine_is_not_served() -> None:
    request = SimulatedRequest(0, 0.0, b"n", ((1, 60_000),), 60_000, (2, 500))
    _, figures = simulated("seconds", requests=[request])

    assert (figures.done, figures.too_long, figures.hits) == (0, 1, None)


def test_a_first_token_takes_its_steps() -> None:
    """2,500 tokens alone: two targets' worth, and what is left; then decodes."""
    request = SimulatedRequest(0, 1.0, b"n", ((1, 2500),), 2500, (2, 11))
    run, figures = simulated("seconds", requests=[request])
    (outcome,) = run.outcomes
    cost = fit_step_cost(SHAPE)
    first_s = 2 * cost.seconds(StepWork(1)) + 2500 / SHAPE.prefill_tokens_per_s

    assert outcome.first_token_s == pytest.approx(first_s, rel=0.02)
    assert figures.ended_s - 1.0 == pytest.approx(first_s + 10 * 0.006035, rel=0.02)


@each_row(
    ("text", "expected"),
    [
        ("kill@60:r3", Fault("kill", 60.0, float("inf"), (3,))),
        ("kill@60-90:r3", Fault("kill", 60.0, 90.0, (3,))),
        ("slow@0.5-2:r0=5", Fault("slow", 0.5, 2.0, (0,), 5.0)),
        ("late@0:all=2", Fault("late", 0.0, float("inf"), (0, 1, 2, 3), 2.0)),
        ("drain@7:r1", Fault("drain", 7.0, float("inf"), (1,))),
    ],
)
def test_faults_are_read(text: str, expected: Fault) -> None:
    assert parse_fault(text, 4) == expected


@each_row(
    "text", ["", "kill", "kill@x:r0", "burn@1:r0", "kill@1:r4", "kill@9-3:r0", "slow@1:r0",
             "slow@1:r0=0", "kill@1:r0=2", "late@1:r0"],
)  # fmt: skip
def test_wrong_faults_are_named(text: str) -> None:
    """With what would be right."""
    with pytest.raises(BenchError, match="expected") as caught:
        parse_fault(text, 4)

    assert repr(text) in str(caught.value)


def test_gaps_have_percentiles_by_nearest_rank() -> None:
    gaps = GapCounts()
    gaps.add(0.010, 98)
    gaps.add(0.0501, 2)

    assert (gaps.percentile(50), gaps.percentile(98)) == (0.010, 0.010)
    assert gaps.percentile(99) == pytest.approx(0.0501)
    assert GapCounts().percentile(50) is None
