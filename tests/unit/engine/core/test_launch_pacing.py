"""Launch pacing: how long launches are held back, what late launches teach, and what core does
with it.
"""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from engine.api import CacheGrant
from engine.core.launch_pacing import (
    HOLD_S_MAX,
    LATE_STEP_S,
    LEAD_S,
    LEAD_S_MAX,
    LEAD_S_MIN,
    SLACK_S,
    SURE,
    LaunchPacing,
)
from engine.plan import StepPlan, StepResult
from engine.scheduler.step_cost import KNOWN_STEPS, StepWork
from tests.checkers import World
from tests.fakes import FakeClock
from tests.unit.engine.tiny_engines import ask, make_world

STEP_S, HOST_S = 0.010, 0.0012


@pytest.mark.parametrize(
    ("predicted_s", "held_s"),
    [(STEP_S, SURE * STEP_S - LEAD_S), (LEAD_S, 0.0), (100.0, HOLD_S_MAX)],
    ids=["usual", "shorter than the lead", "wrong"],
)
def test_launch_is_held_until_shortly_before_the_running_step_ends(
    predicted_s: float, held_s: float
) -> None:
    """A request that arrives before that joins the next step. A prediction of minutes must not hold
    the tokens of a finished step."""
    pacing = LaunchPacing()
    pacing.running_alone(5.0, predicted_s)

    assert pacing.hold_s(5.0) == pytest.approx(held_s)
    assert pacing.hold_s(5.0 + held_s) == 0


def test_nothing_is_held_without_a_running_step() -> None:
    """An idle engine launches at once."""
    pacing = LaunchPacing()
    assert pacing.hold_s(1.0) == 0
    pacing.running_alone(1.0, STEP_S)
    pacing.collected(0.0)
    assert pacing.hold_s(1.0) == 0


def test_late_launch_lengthens_the_lead_and_a_long_wait_shortens_it() -> None:
    """A late launch costs the device time; an early one costs a request a step."""
    pacing = LaunchPacing()
    hold_and_collect(pacing, 0.0)
    assert pacing.lead_s == pytest.approx(LEAD_S + LATE_STEP_S)
    for _ in range(200):
        hold_and_collect(pacing, 0.005)
    assert pacing.lead_s == LEAD_S_MIN
    for _ in range(200):
        hold_and_collect(pacing, 0.0)
    assert pacing.lead_s == LEAD_S_MAX
    pacing.check()


def test_launch_that_was_not_held_teaches_nothing() -> None:
    """Its wait is a whole step and says nothing about the lead."""
    pacing = LaunchPacing()
    pacing.running_alone(0.0, STEP_S)
    pacing.collected(STEP_S)

    assert pacing.lead_s == LEAD_S


@pytest.mark.parametrize("bias", [0.85, 1.0, 1.1])
def test_device_seldom_idles_and_launches_stay_late(bias: float) -> None:
    """Over steps that vary by a tenth and predictions that are wrong by as much, the lead settles:
    few launches are late, and the rest come close to the end.
    """
    noise, pacing = random.Random(7), LaunchPacing()
    late, waits = 0, []
    for step in range(3_000):
        took_s = STEP_S * noise.uniform(0.95, 1.05)
        pacing.running_alone(0.0, bias * STEP_S)
        launched_s = pacing.hold_s(0.0) + HOST_S * noise.uniform(0.8, 1.2)
        waited_s = max(0.0, took_s - launched_s)
        pacing.collected(waited_s)
        if step >= 500:
            late += waited_s == 0
            waits.append(waited_s)

    assert late < 0.03 * len(waits)
    assert sum(waits) / len(waits) < max(4 * SLACK_S, (1.02 - SURE * bias) * STEP_S)


def test_core_holds_the_launch_only_while_a_step_runs_whose_time_is_known() -> None:
    """Without measured steps, with events to report and with nothing in flight it does not wait."""
    world, clock = slow_world()
    assert world.core.launch_hold_s() == 0
    world.core.submit(ask("a", max_tokens=12))
    world.core.step()
    assert world.core.launch_hold_s() == 0, "no step was measured"
    for _ in range(KNOWN_STEPS):
        world.core.engine_stats.step_cost.record(StepWork(1, 0, 10), STEP_S)
    world.core.step()
    held_s = world.core.launch_hold_s()
    assert 0 < held_s < STEP_S
    clock.now_s += held_s
    assert world.core.launch_hold_s() == 0, "the launch is due"
    world.core.cancel("a")
    assert world.core.launch_hold_s() == 0, "a final event waits to be sent"


def test_request_that_arrives_during_a_hold_is_in_the_next_step() -> None:
    """Launched at once, the step would have missed the request."""
    world, _ = slow_world()
    for _ in range(KNOWN_STEPS):
        world.core.engine_stats.step_cost.record(StepWork(1, 0, 10), STEP_S)
    world.core.submit(ask("a", max_tokens=12))
    world.core.step()
    world.core.step()
    assert world.core.launch_hold_s() > 0
    step = world.core.engine_stats.step
    world.core.submit(ask("b", max_tokens=2))
    assert world.core.launch_hold_s() > 0, "a request alone does not end the hold"
    world.core.step()

    active = world.core.requests.get("b")
    assert active is not None
    assert active.started_at_s is not None
    assert world.core.engine_stats.step == step + 1


def test_core_holds_no_launch_for_a_step_that_failed() -> None:
    """The next request would wait for a step that does not run."""
    world, _ = slow_world()
    for _ in range(KNOWN_STEPS):
        world.core.engine_stats.step_cost.record(StepWork(1, 0, 10), 10 * STEP_S)
    world.core.submit(ask("a", max_tokens=12))
    world.core.step()
    world.core.step()
    assert world.core.launch_hold_s() > 0
    world.runner.fail_collect |= {2, 3}
    world.core.step()
    world.core.step()
    world.core.submit(ask("b"))

    assert world.core.launch_hold_s() == 0


@pytest.mark.parametrize(("other", "holds"), [(b"other", True), (b"n", False)])
def test_launch_is_held_beside_prompts_only_where_several_payers_have_some(
    other: bytes, holds: bool
) -> None:
    """The turn of another payer's next request may come first; one payer's prompts are work
    enough.
    """
    world, _ = slow_world(blocks=40)
    for _ in range(KNOWN_STEPS):
        world.core.engine_stats.step_cost.record(StepWork(1, 32, 500), STEP_S)
    for number, namespace in enumerate((b"n", b"n", other)):
        prompt = tuple(number >> at % 2 & 1 for at in range(40))
        world.core.submit(ask(f"{number}", prompt, grant=CacheGrant(namespace)))
    world.core.step()
    world.core.step()

    assert (world.core.launch_hold_s() > 0) == holds


def test_time_of_a_step_is_the_devices_own() -> None:
    """The time in which a launch was held is no part of it, or each hold would lengthen the
    next one.
    """
    world, _ = slow_world(device_s=0.004)
    world.core.submit(ask("a", max_tokens=12))
    for _ in range(12):
        world.clock.advance(world.core.launch_hold_s() + 0.050)
        world.core.step()

    assert world.core.engine_stats.step_cost.seconds(StepWork(1, 8, 0)) < STEP_S


def hold_and_collect(pacing: LaunchPacing, waited_s: float) -> None:
    """Run one step whose launch is held and whose collect waits `waited_s`."""
    pacing.running_alone(0.0, 1.0)
    pacing.hold_s(0.0)
    pacing.collected(waited_s)


def slow_world(device_s: float = 0.0, blocks: int = 16) -> tuple[World, FakeClock]:
    """Return an engine with one step in flight whose collects take a step's time and report
    `device_s`."""
    world = make_world(2, blocks=blocks)

    class SlowRunner:
        """The world's runner; a collect takes `STEP_S` on the world's clock."""

        def __init__(self) -> None:
            self._inner = world.runner

        def launch(self, plan: StepPlan) -> None:
            self._inner.launch(plan)

        def collect(self) -> StepResult:
            world.clock.now_s += STEP_S
            return structs.replace(self._inner.collect(), elapsed_s=device_s)

    world.core.runner = SlowRunner()
    return world, world.clock
