"""When a step has taken too long to send an engine further requests."""

from __future__ import annotations

from engine.client.step_pace import KEPT, STUCK_S_MIN, STUCK_STEPS, StepPace


def test_an_engine_of_short_steps_is_stuck_after_the_least_time() -> None:
    pace = StepPace(0.0)
    for step in range(1, 11):
        pace.note(step / 10)

    assert not pace.is_stuck(1.0 + STUCK_S_MIN)
    assert pace.is_stuck(1.01 + STUCK_S_MIN)


def test_long_steps_are_waited_for_and_forgotten() -> None:
    """A machine whose steps take 3 s is not stuck for 15; one that is quick again is, soon."""
    pace = StepPace(0.0)
    pace.note(3.0)
    assert not pace.is_stuck(3.0 + STUCK_STEPS * 3.0)
    assert pace.is_stuck(3.1 + STUCK_STEPS * 3.0)

    now_s = 3.0
    while 3.0 * KEPT ** ((now_s - 3.0) / 0.01) * STUCK_STEPS > STUCK_S_MIN:
        now_s += 0.01
        pace.note(now_s)
    assert pace.is_stuck(now_s + STUCK_S_MIN + 0.1)


def test_idle_time_is_no_step() -> None:
    """A request that comes after an hour is not sent to an engine that is taken for stuck."""
    pace = StepPace(0.0)
    pace.begin(3600.0)
    pace.note(3600.1)

    assert not pace.is_stuck(3602.0)
    assert pace.is_stuck(3603.0)
