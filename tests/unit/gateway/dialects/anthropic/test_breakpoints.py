"""Breakpoints of a Messages request: how many, in which order, where the automatic one stands."""

from __future__ import annotations

import pytest

from gateway.dialects.anthropic.breakpoints import Breakpoints
from gateway.dialects.anthropic.wire import CacheControl
from gateway.errors import Refusal

SHORT, LONG = CacheControl("ephemeral"), CacheControl("ephemeral", "1h")


def placed(*controls: CacheControl | None) -> Breakpoints:
    """Blocks one after the other."""
    marks = Breakpoints()
    for place, control in enumerate(controls):
        marks.add(place, f"b{place}", control)
    return marks


def refused(marks: Breakpoints) -> Refusal:
    """Why they are refused."""
    with pytest.raises(Refusal) as raised:
        marks.resolve()
    return raised.value


def test_each_breakpoint_stands_after_its_block() -> None:
    """Five minutes unless an hour is asked for."""
    assert placed(LONG, None, SHORT).resolve() == {0: "1h", 2: "5m"}


def test_a_fifth_breakpoint_is_refused_in_the_words_clients_know() -> None:
    """Some clients look for this sentence."""
    refusal = refused(placed(*[SHORT] * 5))

    assert refusal.message == ("A maximum of 4 blocks with cache_control may be provided. Found 5.")
    assert (refusal.code, refusal.param) == ("too_many_breakpoints", "b4")


def test_a_longer_promise_after_a_shorter_one_is_refused() -> None:
    """A prefix cannot outlive the beginning of it."""
    refusal = refused(placed(SHORT, None, LONG))

    assert refusal.param == "b2.cache_control.ttl"
    assert "must not come after a ttl='5m'" in refusal.message
    assert "b0" in refusal.message


def test_the_automatic_one_stands_at_the_last_block_that_may_have_one() -> None:
    """Whatever cannot have a breakpoint is walked over in silence."""
    marks = placed(None, None)
    marks.add(2, "thinking", None, is_eligible=False)
    marks.add_automatic(SHORT)

    assert marks.resolve() == {1: "5m"}


def test_the_automatic_one_is_none_where_no_block_may_have_one() -> None:
    """Nothing to keep is no mistake."""
    marks = Breakpoints()
    marks.add(0, "thinking", None, is_eligible=False)
    marks.add_automatic(SHORT)

    assert marks.resolve() == {}


def test_the_automatic_one_changes_nothing_where_the_same_stands_already() -> None:
    """So that four and the automatic one at the fourth are four."""
    marks = placed(*[SHORT] * 4)
    marks.add_automatic(SHORT)

    assert marks.resolve() == dict.fromkeys(range(4), "5m")


def test_the_automatic_one_counts_as_a_fifth() -> None:
    """It takes one of the four."""
    marks = placed(*[SHORT] * 4, None)
    marks.add_automatic(SHORT)

    assert "Found 5" in refused(marks).message


def test_the_automatic_one_does_not_overrule_the_last_blocks_own() -> None:
    """Two promises for one place: somebody meant something else."""
    marks = placed(SHORT)
    with pytest.raises(Refusal) as raised:
        marks.add_automatic(LONG)

    assert raised.value.param == "cache_control"
    assert "'1h'" in raised.value.message
    assert "'5m'" in raised.value.message


def test_an_automatic_hour_after_five_minutes_is_out_of_order() -> None:
    """The same rule as for any other."""
    marks = placed(SHORT, None)
    marks.add_automatic(LONG)

    assert refused(marks).param == "cache_control.ttl"


def test_of_two_at_one_place_the_longer_is_kept() -> None:
    """A tool's result and the last text in it end together."""
    marks = Breakpoints()
    marks.add(0, "result.content[0]", LONG)
    marks.add(0, "result", SHORT)

    assert marks.resolve() == {0: "1h"}
