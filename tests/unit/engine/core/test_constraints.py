"""Requests under a grammar, through core over the token oracle, at both pipeline depths.

`World` compares every output with the tokens that the sequence samples alone under its grammar;
each test adds one behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.api import CacheGrant, Erase, Finished, Grammar, Quota, Request, Sampling
from engine.core.constraints import Constraints
from engine.grammar.compiler import Outcome
from engine.grammar.grammar import GrammarLimits, MaskFiller, Matcher, compile_grammar
from engine.plan import Mask
from tests.checkers import World
from tests.fakes import FakeClock
from tests.grammars import END, PolledGrammars, compiled, letters
from tests.unit.engine import tiny_engines
from tests.unit.engine.tiny_engines import make_world, run

LONG = Grammar("regex", "[ab]{30}")
PAIRS = Grammar("regex", "(ab){3}")
NOWHERE = Grammar("regex", "abc")


@pytest.fixture(params=[1, 2])
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


class SmallBounds(PolledGrammars):
    """A grammar source whose bounds are soon exceeded."""

    def take_ready(self) -> list[tuple[str, Outcome]]:
        small = letters(GrammarLimits(lexer_states_max=12))
        grammars = {name: grammar for name, _, grammar in self.asked}
        return [(name, compile_grammar(grammars[name], small)) for name, _ in super().take_ready()]


def ask(name: str, grammar: Grammar | None, **wanted: Any) -> Request:
    settings: dict[str, Any] = {"max_tokens": 30, "sampling": Sampling(temperature=1.0, seed=3)}
    return tiny_engines.ask(name, grammar=grammar, **(settings | wanted))


def test_a_grammar_takes_the_turn_of_its_request() -> None:
    """A member of a shared scope delays neither the other members nor the scope's owner."""
    source = PolledGrammars()
    constraints = Constraints(source)
    grant = CacheGrant(b"n", Quota(payer=b"owner"))
    constraints.submit(ask("own", PAIRS))
    constraints.submit(ask("payer", PAIRS, grant=grant))
    constraints.submit(ask("member", PAIRS, grant=grant, turn=b"member"))

    assert source.turns == [b"n", b"owner", b"member"]


def test_a_sample_with_a_complete_text_ends_as_stop(depth: int) -> None:
    """Nothing can follow, so neither an end token nor a further step is needed."""
    world = make_world(depth)

    (done,) = run(world, ask("r", PAIRS))

    stream = world.streams["r"]
    assert stream.outputs == [[0, 1, 0, 1, 0, 1]]
    assert [end.reason for end in stream.ended.values()] == ["stop"]
    assert done.ending == "done"


def test_a_truncated_text_ends_as_length(depth: int) -> None:
    """The client set `max_tokens`; half a document must not look complete."""
    world = make_world(depth)

    run(world, ask("r", PAIRS, max_tokens=5))

    assert [end.reason for end in world.streams["r"].ended.values()] == ["length"]


def test_an_end_token_comes_only_where_the_text_may_end(depth: int) -> None:
    """An end in the middle of a document is the most common way to break it."""
    world = make_world(depth)

    wanted = {"stop_token_ids": (END,), "max_tokens": 12}
    even = Grammar("regex", "(ab)+")
    run(world, *(ask(f"r{n}", even, sampling=Sampling(seed=n), **wanted) for n in range(20)))

    outputs = [stream.outputs[0] for stream in world.streams.values()]
    ended = [output for output in outputs if END in output]
    assert len(ended) > 5
    assert all(output.index(END) % 2 == 0 for output in ended)
    assert all(output.index(END) == len(output) - 1 for output in ended)


def test_an_end_token_ends_a_sample_without_stop_tokens(depth: int) -> None:
    """The text is over: the grammar allows no further token."""
    world = make_world(depth)

    (done,) = run(world, ask("r", Grammar("regex", "a{0}"), stop_token_ids=()))

    assert world.streams["r"].outputs == [[END]]
    assert done.ending == "done"


def test_min_tokens_delays_the_end_while_the_text_can_continue(depth: int) -> None:
    """A text that cannot continue ends all the same."""
    world = make_world(depth)

    _, short = run(
        world,
        ask("long", Grammar("regex", "a*"), min_tokens=7, stop_token_ids=(END,)),
        ask("short", PAIRS, min_tokens=20, stop_token_ids=(END,)),
    )

    assert world.streams["long"].outputs[0][:6] == [0] * 6
    assert world.streams["short"].outputs == [[0, 1, 0, 1, 0, 1]]
    assert short.ending == "done"


def test_a_dead_end_fails_only_its_own_request(depth: int) -> None:
    """No token of the model can continue the text."""
    world = make_world(depth)

    lost, free, held = run(world, ask("lost", NOWHERE), ask("free", None), ask("held", PAIRS))

    assert (lost.ending, lost.code) == ("failed", "grammar_dead_end")
    assert lost.usage.output_tokens == 2
    assert (free.ending, held.ending) == ("done", "done")


def test_every_sample_has_its_own_matcher(depth: int) -> None:
    """Forks share a prompt, not a place in the grammar."""
    world = make_world(depth)

    run(world, ask("r", Grammar("regex", "[ab]{2}(a|b[ab]{3})"), samples=4, max_tokens=8))

    outputs = world.streams["r"].outputs
    assert len({tuple(output) for output in outputs}) > 1
    assert all(len(output) == (3 if output[2] == 0 else 6) for output in outputs)


def test_a_preempted_sample_keeps_its_place_in_the_grammar(depth: int) -> None:
    """Only KV is recomputed."""
    world = make_world(depth, blocks=12)

    run(world, *(ask(name, LONG, sampling=Sampling(seed=ord(name))) for name in "abc"))

    assert world.core.scheduler.preemptions > 0
    assert [len(world.streams[name].outputs[0]) for name in "abc"] == [30, 30, 30]


def test_a_constrained_sample_has_one_token_in_flight() -> None:
    """With two steps in flight it runs in every other one; its neighbours run in each."""
    world = make_world(2)
    world.submit(ask("held", LONG, max_tokens=10))
    world.submit(ask("free", None, max_tokens=20))

    while "held" in world.live:
        world.step()

    assert len(world.streams["free"].outputs[0]) >= 17


def test_only_its_own_request_waits_for_a_grammar(depth: int) -> None:
    """The engine steps on while the grammar is compiled."""
    world = make_world(depth, polls=12)
    world.submit(ask("slow", PAIRS))
    world.submit(ask("free", None, max_tokens=6))

    while "free" in world.live:
        world.step()
        assert not world.core.is_waiting_for_grammars or "free" not in world.live
    assert world.core.is_waiting_for_grammars
    world.settle()

    assert world.streams["slow"].started is not None
    assert world.final("slow").ending == "done"


def test_waiting_for_a_grammar_is_no_stall(depth: int) -> None:
    world = make_world(depth, polls=15)

    (done,) = run(world, ask("r", PAIRS))

    assert done.ending == "done"


@pytest.mark.parametrize("how", ["cancel", "deadline", "drain"])
def test_a_request_may_end_while_its_grammar_is_compiled(depth: int, how: str) -> None:
    """Each ending has one final event, and the late grammar is dropped."""
    world = make_world(depth, polls=6)
    world.submit(ask("r", PAIRS, deadline_s=1.0 if how == "deadline" else None))
    world.step()

    if how == "cancel":
        world.cancel("r")
    if how == "drain":
        world.core.drain(1.0)
    world.clock.advance(2.0)
    world.settle()

    ending = {"cancel": "cancelled", "deadline": "timeout", "drain": "shutdown"}[how]
    assert world.final("r").ending == ending
    assert world.grammars.take_ready() == []


def test_a_reused_id_gets_its_own_grammar(depth: int) -> None:
    """A cancelled request's grammar, ready by then, must not go to its successor."""
    world = make_world(depth, polls=0)
    world.core.submit(ask("r", Grammar("regex", "b{3}")))
    world.core.cancel("r")
    world.core.step()

    run(world, ask("r", PAIRS))

    assert world.streams["r"].outputs == [[0, 1, 0, 1, 0, 1]]


def test_an_invalid_grammar_is_refused(depth: int) -> None:
    """It is refused before it is scheduled, with the reason."""
    world = make_world(depth)

    (refused,) = run(world, ask("r", Grammar("regex", "(a")))

    assert (refused.ending, refused.code) == ("refused", "grammar_invalid")
    assert "unclosed group" in refused.message
    assert world.streams["r"].started is None


def test_an_engine_without_grammars_refuses_a_grammar(depth: int) -> None:
    world = make_world(depth)
    world.core.constraints = Constraints()

    world.submit(ask("free", None))
    world.core.submit(ask("r", PAIRS))
    (refused, *_) = world.core.step()

    assert isinstance(refused, Finished)
    assert (refused.ending, refused.code) == ("refused", "grammar_unsupported")


def test_a_stop_string_ends_a_constrained_sample(depth: int) -> None:
    """The gateway may end any sample, even if its grammar requires more text."""
    world = make_world(depth)
    world.submit(ask("r", LONG))
    while len(world.streams["r"].outputs[0]) < 4:
        world.step()

    world.end_sample("r", 0, 3)
    world.settle()

    assert world.final("r").ending == "done"
    assert world.final("r").usage.output_tokens == 3


def test_a_grammar_that_grows_too_big_fails_and_is_refused_later(depth: int) -> None:
    bomb = Grammar("regex", "[ab]*a[ab]{12}")
    source = SmallBounds()
    world = make_world(depth)
    world.core.constraints = Constraints(source)
    world.core.submit(ask("r", bomb))
    events = [event for _ in range(80) for event in world.core.step()]

    (over,) = [event for event in events if isinstance(event, Finished)]
    assert (over.ending, over.code) == ("failed", "grammar_too_big")
    assert source.dropped == [(b"n", bomb)]


# -- masks that take long ---------------------------------------------------------------------


class SlowMasks(MaskFiller):
    """A mask filler in which matchers of `slow` take half a second each, others no time."""

    def __init__(self, clock: FakeClock, slow: Grammar) -> None:
        super().__init__()
        self.clock = clock
        self.slow_fork = compiled(slow).first_mask.tolist()
        self.fillings: list[int] = []

    def fill(self, matchers: Sequence[Matcher], suppress_end: Sequence[bool]) -> Mask:
        masks = super().fill(matchers, suppress_end)
        slow = [mask for mask in masks if mask.tolist() == self.slow_fork]
        self.clock.advance(0.5 * len(slow))
        self.fillings.append(len(slow))
        return masks


def slow_world(depth: int) -> World:
    """Return an engine where "[ab]{30}" is slow, and "(ab){3}", "a*" and the like are not."""
    world = make_world(depth)
    world.core.constraints = Constraints(world.grammars, SlowMasks(world.clock, LONG))
    return world


def test_a_slow_mask_delays_only_its_own_sample(depth: int) -> None:
    """A grammar made to be slow gets a bounded share of the time."""
    world = slow_world(depth)
    world.submit(ask("slow", LONG))
    for name in ("a", "b"):
        world.submit(ask(name, Grammar("regex", "a{20}"), max_tokens=25))
    world.submit(ask("free", None, max_tokens=25))
    began_s = world.clock()

    while {"a", "b", "free"} & set(world.live):
        world.clock.advance(0.01)
        world.step()

    # Twenty-five slow masks would have taken twelve seconds.
    assert world.clock() - began_s < 3.0
    assert "slow" in world.live
    assert 1 <= len(world.streams["slow"].outputs[0]) < 10


def test_a_slow_mask_gets_its_share(depth: int) -> None:
    """It does not starve: with time, its sample finishes beside busy neighbours."""
    world = slow_world(depth)
    world.submit(ask("slow", LONG, max_tokens=6))

    for number in range(60):
        if "slow" not in world.live:
            break
        world.submit(ask(f"n{number}", None, max_tokens=12))
        for _ in range(6):
            world.clock.advance(0.2)
            world.step()

    assert world.streams["slow"].finished is not None
    world.settle()


def test_an_idle_engine_makes_slow_masks_at_once(depth: int) -> None:
    """The engine uses idle time in full, and does not report a stall."""
    world = slow_world(depth)

    run(world, ask("slow", LONG), ask("too", LONG, sampling=Sampling(seed=9)))

    assert [len(world.streams[name].outputs[0]) for name in ("slow", "too")] == [30, 30]


def test_one_slow_row_does_not_make_its_neighbours_slow_for_good(depth: int) -> None:
    """Filled together they take equally long; filled alone, each shows its own time."""
    world = slow_world(depth)
    world.submit(ask("slow", LONG))
    world.submit(ask("quick", Grammar("regex", "a{20}"), max_tokens=25))

    for _ in range(30):
        world.clock.advance(0.01)
        world.step()

    sequences = {work.request.request_id: work.sequences[0] for work in world.core.requests}
    assert sequences["slow"].has_slow_mask
    assert "quick" not in sequences or not sequences["quick"].has_slow_mask
    world.settle()


def test_erasing_a_namespace_forgets_its_schemas(depth: int) -> None:
    """Compiled grammars are the tenant's own text; erasing a lease does not remove them."""
    world = make_world(depth)

    world.core.erase(Erase(1, b"n", lease_id="a"))
    world.erase(b"n")

    assert world.grammars.erased == [b"n"]
