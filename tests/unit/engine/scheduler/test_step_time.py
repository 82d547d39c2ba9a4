"""Steps are bounded by time: how long a stream waits for its next token, and a prompt for its
turn.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.scheduler.scheduler import ALONE_AFTER_S
from engine.scheduler.step_cost import GUEST_TOKENS, StepWork
from tests.unit.engine.timed_engine import Machine, TimedWorld, fast, slow

TARGET_S = 0.05


def prompt(count: int, seed: int) -> tuple[int, ...]:
    chance = random.Random(seed)
    return tuple(chance.randrange(2) for _ in range(count))


def streaming(machine: Machine, **config: Any) -> TimedWorld:
    """Return an engine with one stream, whose decodes have a price by now."""
    world = TimedWorld(machine, **config)
    world.ask("stream", prompt(8, 0), max_tokens=900)
    world.step_on(40)
    return world


def beside_a_stream(machine: Machine, prompts: int, length: int) -> tuple[TimedWorld, list[float]]:
    """Run prompts beside one stream; return the seconds of each step after the first ten."""
    world = streaming(machine)
    for index in range(prompts):
        world.ask(f"p{index}", prompt(length, 1 + index), max_tokens=1, namespace=b"%d" % index)
    while any(name.startswith("p") for name in world.live):
        world.step()
    world.cancel("stream")
    world.settle()
    return world, world.took[44:]


@pytest.mark.parametrize("machine", [slow, fast])
def test_a_stream_waits_about_the_target_for_a_token(machine: Machine) -> None:
    """However long the prompts beside it are; and the prompts use the time that is left."""
    _, took = beside_a_stream(machine, 16, 900)

    assert max(took) <= 1.1 * TARGET_S
    assert sum(took) / len(took) >= 0.6 * TARGET_S


def test_on_a_fast_machine_prompts_lose_no_time_to_the_target() -> None:
    """Six prompts fit into few steps, as without a stream."""
    beside, _ = beside_a_stream(fast, 6, 900)
    alone = TimedWorld(fast)
    for index in range(6):
        alone.ask(f"p{index}", prompt(900, 1 + index), max_tokens=1, namespace=b"%d" % index)
    alone.settle()
    last = max(beside.first_token_s(f"p{index}") for index in range(6))

    assert last <= 1.6 * max(alone.first_token_s(f"p{index}") for index in range(6))


def test_prompts_are_computed_one_after_the_other() -> None:
    """Side by side, all first tokens would come last."""
    world = TimedWorld(slow)
    for index in range(4):
        world.ask(f"p{index}", prompt(512, index), max_tokens=1)
    world.settle()
    at_s = [world.first_token_s(f"p{index}") for index in range(4)]

    assert at_s[0] <= 0.4 * at_s[3]
    assert all(len(row) <= 2 for row in world.rows)


def test_a_request_that_arrives_waits_for_one_bounded_step() -> None:
    """No stream waits, but the next tenant's request may come at any time."""
    world = TimedWorld(slow)
    for index in range(6):
        world.ask(f"p{index}", prompt(900, index), max_tokens=1)
    world.step_on(6)
    world.ask("quiet", prompt(16, 99), max_tokens=1, namespace=b"quiet")
    world.settle()

    assert max(world.took[2:]) <= 2.2 * TARGET_S
    assert world.first_token_s("quiet") <= 2.2 * TARGET_S


def test_steps_stay_short_between_the_requests_of_another_tenant() -> None:
    """The next request of a chat waits for no long step; five seconds without one end that."""
    world = TimedWorld(slow)

    def steps_behind(number: int, *, pause_s: float) -> float:
        """Return the longest of the two steps that begin after the quiet tenant's request."""
        world.ask(f"quiet{number}", prompt(16, 99 + number), max_tokens=1, namespace=b"quiet")
        while f"quiet{number}" in world.live:
            world.step()
        world.clock.advance(pause_s)
        before = len(world.took)
        world.step()
        world.step()
        return max(world.took[before:])

    for index in range(20):
        world.ask(f"p{index}", prompt(900, index), max_tokens=1)
    world.step_on(6)

    assert steps_behind(0, pause_s=0.01) <= 1.1 * TARGET_S
    assert steps_behind(1, pause_s=6.0) >= 1.5 * TARGET_S


def test_steps_are_shorter_while_several_tenants_have_prompts() -> None:
    """On a GPU a quiet tenant's request should wait little; a tenant alone has long steps again."""
    world = streaming(fast, gap_target_shared_ms=20.0)
    for index in range(30):
        world.ask(f"p{index}", prompt(900, index), max_tokens=1, namespace=b"%d" % index)
    before = len(world.took)
    while len(world.live) > 1:
        world.step()
    shared = world.took[before + 8 :]  # prompts have a price by then
    world.clock.advance(6.0)
    for index in range(30, 60):
        world.ask(f"p{index}", prompt(900, index), max_tokens=1)
    before = len(world.took)
    world.step_on(6)

    assert 0.7 * 0.020 <= max(shared) <= 1.1 * 0.020
    assert max(world.took[before:]) >= 0.7 * 0.030


def test_a_large_batch_leaves_the_prompts_of_several_tenants_time() -> None:
    """Its decodes alone take longer than the target of shared steps."""

    def large(work: StepWork) -> float:
        return fast(work) + 5e-4 * (work.rows - 1)

    world = TimedWorld(large, gap_target_shared_ms=10.0, sequences_max=64)
    for index in range(16):
        world.ask(f"s{index}", prompt(8, index), max_tokens=400, namespace=b"%d" % index)
    world.step_on(40)
    for index in range(8):
        world.ask(f"p{index}", prompt(900, index), max_tokens=1, namespace=b"other")
    before = len(world.took)
    while len(world.live) > 16:
        world.step()

    decodes_s = 5e-3 + 16 * 5.1e-4
    assert max(world.took[before:]) >= 2.5 * decodes_s
    assert max(world.took[before:]) <= 3.4 * decodes_s


def quiet_beside_prompts(*, arrivals: int, others: int) -> tuple[TimedWorld, float]:
    """Ask short questions of one payer beside `others` payers' long prompts on a fast machine;
    return the longest step that answers one."""
    world = streaming(fast, gap_target_shared_ms=20.0)
    for index in range(60):
        world.ask(f"p{index}", prompt(900, index), max_tokens=1, namespace=b"%d" % (index % others))
    world.step_on(8)  # prompts have a price by then
    longest_s = 0.0
    for index in range(arrivals):
        world.ask(f"quiet{index}", prompt(16, 99 + index), max_tokens=1, namespace=b"quiet")
        while f"quiet{index}" in world.live:
            world.step()
        longest_s = max(longest_s, world.took[-1])
    return world, longest_s


def test_others_hardly_lengthen_the_step_that_answers_a_short_prompt() -> None:
    """It takes what it would alone, and a quarter of what is left until the target."""
    _, longest_s = quiet_beside_prompts(arrivals=6, others=1)

    alone_s = 5e-3 + 3e-5 * 16
    assert longest_s <= alone_s + 0.3 * (0.020 - alone_s)


@pytest.mark.parametrize("token_s", [2e-3, 1e-2])
@pytest.mark.parametrize("row_s", [3e-3, 6e-2])
def test_a_slow_machine_answers_a_short_prompt_in_a_short_step(
    token_s: float, row_s: float
) -> None:
    """Where not even the least slice fits the target, what others have beside it is a part of that
    slice; and the long prompts go on."""

    def machine(work: StepWork) -> float:
        return row_s * work.rows + token_s * work.prompt_tokens

    world = TimedWorld(machine)
    for index in range(4):
        world.ask(f"p{index}", prompt(900, index), max_tokens=1)
    world.step_on(8)
    for index in range(40):
        world.ask(f"quiet{index}", prompt(4, 99 + index), max_tokens=1, namespace=b"quiet")
        while f"quiet{index}" in world.live:
            world.step()
        assert world.took[-1] <= machine(StepWork(rows=2, prompt_tokens=4 + GUEST_TOKENS))
        assert sum(world.rows[-1].values()) > 4
    world.settle()


def test_long_prompts_go_on_beside_short_ones_in_every_step() -> None:
    """They have a part of each step, and take no more than three times as long."""
    world, _ = quiet_beside_prompts(arrivals=100, others=3)
    world.cancel("stream")
    world.settle()
    begun_s = world.streams["p0"].submitted_s
    last_s = max(first_done(world, f"p{index}") for index in range(60)) - begun_s
    alone, _ = quiet_beside_prompts(arrivals=0, others=3)
    alone.cancel("stream")
    alone.settle()
    without_s = max(first_done(alone, f"p{index}") for index in range(60))

    assert last_s <= 3 * (without_s - alone.streams["p0"].submitted_s)


def test_a_payer_whose_stream_has_just_ended_is_not_forgotten() -> None:
    """Two payers that only decode share the engine, too, and the next request of either may come
    soon: without prompts in the steps that was not noted.
    """
    world = TimedWorld(slow)
    for name, most in (("ours", 400), ("theirs", 300)):
        world.ask(name, prompt(8, 0), max_tokens=most, namespace=name.encode())
    while world.streams["theirs"].finished is None:
        world.clock.advance(0.1)
        world.step()

    assert world.core.scheduler.is_shared(world.clock())
    world.clock.advance(ALONE_AFTER_S + 0.1)
    world.step()
    assert not world.core.scheduler.is_shared(world.clock())


def documents_and_questions(questions: int, payer_of: bytes = b"n") -> TimedWorld:
    """Run three long prompts, then short ones that arrive while the first is computed."""
    world = TimedWorld(slow)
    for index in range(3):
        world.ask(f"long{index}", prompt(900, index), max_tokens=1)
    world.step()
    for index in range(questions):
        world.ask(f"short{index}", prompt(40, 50 + index), max_tokens=1, namespace=payer_of)
    world.settle()
    return world


def test_short_prompts_pass_long_ones_of_their_payer() -> None:
    """The mean first token is earlier, and the long prompts wait for little more."""
    world = documents_and_questions(3)
    shorts = [world.first_token_s(f"short{index}") for index in range(3)]

    assert max(shorts) < world.first_token_s("long0")


def test_a_long_prompt_is_passed_a_bounded_number_of_times() -> None:
    """However many short prompts its payer sends, it is late by four of them."""
    alone, beside = documents_and_questions(0), documents_and_questions(40)

    assert beside.first_token_s("long0") <= 2 * alone.first_token_s("long0")
    order = sorted(beside.streams, key=lambda name: first_done(beside, name))
    assert order.index("long0") <= 4


def first_done(world: TimedWorld, name: str) -> float:
    stream = world.streams[name]
    return stream.submitted_s + world.first_token_s(name)


def test_a_warm_long_prompt_counts_by_its_missing_tokens() -> None:
    """A conversation of 900 tokens of which 880 are cached is short."""
    world = TimedWorld(slow)
    said = prompt(900, 9)
    world.ask("before", said, max_tokens=1)
    world.settle()
    for index in range(2):
        world.ask(f"long{index}", prompt(900, index), max_tokens=1)
    world.step()
    world.ask("turn", (*said, 1, 0, 1), max_tokens=1)
    world.settle()

    assert first_done(world, "turn") < first_done(world, "long0")


def test_a_payer_alone_may_wait_longer_for_its_own_prompts() -> None:
    """Beside sixteen streams that take 20 ms a step, slices of 30 ms would cost throughput; with
    another payer's stream among them the target holds.
    """
    longest = []
    for payer in (b"n", b"other"):
        world = TimedWorld(lambda work: 0.02 * (work.rows > 1) + slow(work), sequences_max=24)
        for index in range(16):
            name = payer if index == 0 else b"n"
            world.ask(f"s{index}", prompt(8, index), max_tokens=600, namespace=name)
        world.step_on(60)
        for index in range(4):
            world.ask(f"p{index}", prompt(900, 20 + index), max_tokens=1)
        begun = len(world.took) + 4
        while any(name.startswith("p") for name in world.live):
            world.step()
        longest.append(max(world.took[begun:]))

    assert 0.1 < longest[0] < 0.25
    assert longest[1] <= 1.2 * TARGET_S


def test_no_time_is_left_and_prompts_progress() -> None:
    """Streams alone take longer than the target: prompts get a few tokens in each step."""
    world = streaming(lambda work: 0.2 + slow(work))
    world.ask("p", prompt(320, 1), max_tokens=1, namespace=b"p")
    world.step_on(12)

    assert world.streams["p"].finished is not None
