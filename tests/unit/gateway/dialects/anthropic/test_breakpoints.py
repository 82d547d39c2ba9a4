"""Breakpoints of a Messages request: their number, their order, and the automatic one."""

from __future__ import annotations

import pytest

from gateway.dialects.anthropic.breakpoints import Breakpoints
from gateway.dialects.anthropic.wire import CacheControl
from gateway.errors import Refusal

SHORT, LONG = CacheControl("ephemeral"), CacheControl("ephemeral", "1h")


def breakpoints_of(*controls: CacheControl | None) -> Breakpoints:
    """Add blocks one after the other."""
    marks = Breakpoints()
    for position, control in enumerate(controls):
        marks.add(position, f"b{position}", control)
    return marks


def refused(marks: Breakpoints) -> Refusal:
    """Return the refusal of these breakpoints."""
    with pytest.raises(Refusal) as raised:
        marks.resolve()
    return raised.value


def test_breakpoint_follows_its_block() -> None:
    """The default ttl is five minutes."""
    assert breakpoints_of(LONG, None, SHORT).resolve() == {0: "1h", 2: "5m?"}


def test_refuses_fifth_breakpoint_with_anthropics_sentence() -> None:
    """Some clients match this sentence."""
    refusal = refused(breakpoints_of(*[SHORT] * 5))

    assert refusal.message == ("A maximum of 4 blocks with cache_control may be provided. Found 5.")
    assert (refusal.code, refusal.param) == ("too_many_breakpoints", "b4")


def test_refuses_1h_after_5m() -> None:
    """A prefix cannot outlive its own beginning."""
    refusal = refused(breakpoints_of(SHORT, None, LONG))

    assert refusal.param == "b2.cache_control.ttl"
    assert "must not come after a ttl='5m'" in refusal.message
    assert "b0" in refusal.message


def test_automatic_breakpoint_follows_last_eligible_block() -> None:
    """Ineligible blocks are skipped without an error."""
    marks = breakpoints_of(None, None)
    marks.add(2, "thinking", None, is_eligible=False)
    marks.add_automatic(SHORT)

    assert marks.resolve() == {1: "5m?"}


def test_automatic_breakpoint_without_eligible_block_is_ignored() -> None:
    marks = Breakpoints()
    marks.add(0, "thinking", None, is_eligible=False)
    marks.add_automatic(SHORT)

    assert marks.resolve() == {}


def test_automatic_breakpoint_merges_with_equal_one() -> None:
    """Four breakpoints and an automatic one at the fourth are four."""
    marks = breakpoints_of(*[SHORT] * 4)
    marks.add_automatic(SHORT)

    assert marks.resolve() == dict.fromkeys(range(4), "5m?")


def test_automatic_breakpoint_counts_toward_the_limit() -> None:
    marks = breakpoints_of(*[SHORT] * 4, None)
    marks.add_automatic(SHORT)

    assert "Found 5" in refused(marks).message


def test_refuses_automatic_breakpoint_with_another_ttl() -> None:
    """Two ttls at one position contradict each other."""
    marks = breakpoints_of(SHORT)
    with pytest.raises(Refusal) as raised:
        marks.add_automatic(LONG)

    assert raised.value.param == "cache_control"
    assert "'1h'" in raised.value.message
    assert "'5m'" in raised.value.message


def test_refuses_automatic_1h_after_5m() -> None:
    """The rule of order holds for the automatic breakpoint too."""
    marks = breakpoints_of(SHORT, None)
    marks.add_automatic(LONG)

    assert refused(marks).param == "cache_control.ttl"


def test_longer_ttl_wins_at_a_shared_position() -> None:
    """A tool result and its last text end at one position."""
    marks = Breakpoints()
    marks.add(0, "result.content[0]", LONG)
    marks.add(0, "result", SHORT)

    assert marks.resolve() == {0: "1h"}
