"""Requests that go on behind output which another engine has given out, over the token oracle."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from engine.api import CacheGrant, Event, Finished, Grammar, Request, SampleEnded, Started, Tokens
from engine.cache import PrefixCache
from engine.core.constraints import Constraints
from engine.core.core import Core
from tests.fakes import FakeClock, FakeRunner
from tests.grammars import END, PolledGrammars
from tests.strategies import samplings
from tests.unit.engine.tiny_engines import CONFIG, PROMPT, ask

BLOCKS, BLOCK, STEPS_MAX = 16, 4, 200
grammars = st.sampled_from(
    [None, Grammar("regex", "[ab]*"), Grammar("regex", "(ab)+"), Grammar("regex", "(ab){3}")]
)


def make_core(polls: int = 0) -> Core:
    """Return an engine without anything cached."""
    cache = PrefixCache(blocks=BLOCKS, block_size=BLOCK)
    runner = FakeRunner(BLOCKS, BLOCK, vocab_size=3)
    return Core(
        *(cache, runner, CONFIG, FakeClock()),
        vocab_size=3,
        context_tokens=48,
        constraints=Constraints(PolledGrammars(polls)),
    )


def run(core: Core, request: Request) -> list[Event]:
    """Return the events of a request."""
    core.submit(request)
    events: list[Event] = []
    for _ in range(STEPS_MAX):
        events += core.step()
        if any(isinstance(event, Finished) for event in events):
            core.cache.check()
            return events
    raise AssertionError("the request did not end")


def output(events: list[Event]) -> list[int]:
    return [one.token_id for event in events if isinstance(event, Tokens) for one in event.tokens]


def end(events: list[Event]) -> tuple[str, str, int]:
    """Return why the sample ended, how the request did, and its output tokens."""
    last = events[-1]
    assert isinstance(last, Finished)
    reasons = [event.reason for event in events if isinstance(event, SampleEnded)]
    return " ".join(reasons), last.ending + last.code, last.usage.output_tokens


def resumed(request: Request, found: list[int]) -> Request:
    return structs.replace(request, tokens=(*request.tokens, *found), resumed_tokens=len(found))


@given(samplings, grammars, st.integers(0, 12), st.sampled_from([1, 5, 12]), st.data())
def test_a_cut_answer_goes_on_as_if_it_had_not_been_cut(
    sampling: Any, grammar: Grammar | None, min_tokens: int, max_tokens: int, data: st.DataObject
) -> None:
    """Greedy and seeded, under a grammar, at any token, the last one included."""
    request = ask(
        sampling=sampling,
        grammar=grammar,
        min_tokens=min(min_tokens, max_tokens),
        max_tokens=max_tokens,
        stop_token_ids=(END,),
    )
    whole = run(make_core(), request)
    tokens = output(whole)
    cut = data.draw(st.integers(0, len(tokens)))
    core = make_core(data.draw(st.sampled_from([0, 2])))
    rest = run(core, resumed(request, tokens[:cut]))

    assert output(rest) == tokens[cut:]
    assert end(rest) == end(whole)
    stats = core.stats()
    assert stats.output_tokens_total == len(tokens) - cut
    assert (stats.running, stats.waiting, stats.pinned_blocks) == (0, 0, 0)


def test_the_prompt_alone_is_the_prompt() -> None:
    """Resumed tokens are output: prices of prompts do not apply to them again."""
    request = ask(max_tokens=8)
    tokens = output(run(make_core(), request))
    core = make_core()
    run(core, request)
    rest = run(core, resumed(request, tokens[:6]))
    (started,) = [event for event in rest if isinstance(event, Started)]

    assert started.prompt_tokens == len(PROMPT)
    assert 0 < started.cached_tokens <= len(PROMPT)
    last = rest[-1]
    assert isinstance(last, Finished)
    assert last.usage.prompt_tokens == len(PROMPT)
    assert core.stats().prompt_tokens_total == 2 * len(PROMPT)


def test_a_text_that_the_grammar_cannot_have_fails() -> None:
    """Another engine gave it out under the same grammar, so one of them is wrong."""
    wrong = resumed(ask(max_tokens=8, grammar=Grammar("regex", "(ab)+")), [1, 1])
    last = run(make_core(), wrong)[-1]

    assert isinstance(last, Finished)
    assert (last.ending, last.code) == ("failed", "grammar_dead_end")


@pytest.mark.parametrize(
    "changes", [{"samples": 2}, {"prompt_logprobs": 0}, {"resumed_tokens": len(PROMPT)}]
)
def test_what_cannot_resume_is_refused(changes: dict[str, Any]) -> None:
    request = structs.replace(ask(max_tokens=8), **({"resumed_tokens": 2} | changes))
    last = run(make_core(), request)[-1]

    assert isinstance(last, Finished)
    assert (last.ending, last.code) == ("refused", "answer_lost")


def test_a_stop_found_before_the_cut_ends_it() -> None:
    """The gateway found a stop string, and the engine was lost before it knew."""
    request = ask(max_tokens=8)
    tokens = output(run(make_core(), request))
    core = make_core()
    core.submit(resumed(request, tokens[:6]))
    core.end_sample("r", 0, 4)
    events: list[Event] = []
    while not any(isinstance(event, Finished) for event in events):
        events += core.step()

    assert end(events) == ("stop", "done", 4)


@pytest.mark.parametrize("cut", [0, 3])
def test_what_its_connection_has_left_is_counted_apart(cut: int) -> None:
    """Nobody enters it, so books and counters agree without it."""
    request = ask(max_tokens=20, grant=CacheGrant(b"n"))
    tokens = output(run(make_core(), request))
    core = make_core()
    core.submit(resumed(request, tokens[:cut]))
    for _ in range(6):
        core.step()
    made = core.stats().output_tokens_total
    core.abandon("r")
    core.step()
    stats = core.stats()

    assert made > 0
    assert stats.abandoned_prompt_tokens_total == stats.prompt_tokens_total == len(PROMPT)
    assert stats.abandoned_cached_tokens_total == stats.cached_tokens_total
    assert stats.abandoned_output_tokens_total == stats.output_tokens_total == made
    assert (stats.running, stats.pinned_blocks) == (0, 0)
