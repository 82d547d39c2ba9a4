"""Where breakpoints look, and where they write."""

from __future__ import annotations

from engine.api import Retention
from gateway.caching.breakpoints import plan_breakpoints
from gateway.dialects.canonical import Boundary, CacheDirectives

CLASSES = {"5m": Retention("5m", 300, 300), "30m": Retention("30m", 1800)}


def tried(marks: list[Boundary], ask: CacheDirectives, min_tokens: int = 1) -> list[int]:
    return [
        position.tokens for position in plan_breakpoints(marks, ask, CLASSES, min_tokens).candidates
    ]


def written(
    marks: list[Boundary], ask: CacheDirectives, min_tokens: int = 1
) -> list[tuple[int, str]]:
    look = plan_breakpoints(marks, ask, CLASSES, min_tokens)
    return [(place.tokens, place.retention.name) for place in look.writes]


def test_a_breakpoint_looks_back_twenty_positions_itself_the_first() -> None:
    """Further back is not looked, however much is there: that is what the contract says."""
    marks = [Boundary(10 * n, f"m[{n}]") for n in range(1, 31)]
    marks[-1] = Boundary(300, "m[30]", "5m")

    found = tried(marks, CacheDirectives(lookback=20))

    assert found == [10 * n for n in range(11, 31)]


def test_a_run_of_tool_calls_is_one_position() -> None:
    """Parallel calls would otherwise use the whole way back up."""
    calls = [Boundary(10 * n, f"m[{n}]", run="call") for n in range(2, 30)]
    marks = [Boundary(10, "m[1]"), *calls, Boundary(300, "m[30]", "5m")]

    found = tried(marks, CacheDirectives(lookback=3))

    assert found[0] == 10
    assert len(found) == 30


def test_without_a_breakpoint_nothing_is_tried_or_written() -> None:
    """Only what is asked for is promised."""
    marks = [Boundary(10, "m[0]"), Boundary(20, "m[1]")]

    assert tried(marks, CacheDirectives()) == []
    assert written(marks, CacheDirectives()) == []


def test_the_implicit_breakpoint_is_the_end_of_the_latest_user_message() -> None:
    """Not the assistant's begun answer, nor a part within a message."""
    marks = [
        Boundary(5, "m[0]", tier="system", role="system"),
        Boundary(10, "m[1]", role="user"),
        Boundary(20, "m[2]", role="assistant"),
        Boundary(25, "m[3].content[0]", role="user", ends_message=False),
        Boundary(30, "m[3].content[1]", role="user"),
        Boundary(40, "m[4]", role="assistant"),
    ]

    ask = CacheDirectives(implicit="30m")

    assert written(marks, ask) == [(30, "30m")]
    assert tried(marks, ask) == [5, 10, 30]


def test_the_last_of_a_run_of_tool_results_is_an_end() -> None:
    """An agent's turn ends with results; each of them alone is none."""
    marks = [
        Boundary(10, "m[0]", role="user"),
        Boundary(20, "m[1]", role="tool", run="result"),
        Boundary(30, "m[2]", role="tool", run="result"),
    ]

    assert written(marks, CacheDirectives(implicit="30m")) == [(30, "30m")]


def test_what_is_too_short_is_neither_tried_nor_written() -> None:
    """Below the minimum a breakpoint is silently none."""
    marks = [Boundary(10, "m[0]", "5m"), Boundary(1024, "m[1]", "5m")]

    assert tried(marks, CacheDirectives(), 1024) == [1024]
    assert written(marks, CacheDirectives(), 1024) == [(1024, "5m")]


def test_of_more_marks_than_may_be_written_the_latest_are_and_the_others_looked_up() -> None:
    """An earlier, shorter request wrote at one of them; it may stand far back by now."""
    marks = [
        Boundary(10 * n, f"m[{n}]", "30m" if n in (1, 5, 40, 80, 120) else None)
        for n in range(1, 121)
    ]

    ask = CacheDirectives(lookback=3, writes_max=2)

    assert written(marks, ask) == [(800, "30m"), (1200, "30m")]
    assert tried(marks, ask) == [10, 50, 400, 780, 790, 800, 1180, 1190, 1200]


def test_the_first_two_and_the_latest_fifty_marks_are_looked_up() -> None:
    """Whoever marks everything does not make each request slower than the one before."""
    marks = [Boundary(10 * n, f"m[{n}]", "30m") for n in range(1, 101)]

    found = tried(marks, CacheDirectives(lookback=1, writes_max=4))

    assert found == [10, 20, *(10 * n for n in range(51, 101))]
