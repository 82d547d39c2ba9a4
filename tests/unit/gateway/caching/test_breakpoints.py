"""The positions at which breakpoints look up and write prefixes."""

from __future__ import annotations

from engine.api import Retention
from gateway.caching.breakpoints import marks_of, plan_breakpoints
from gateway.dialects.canonical import Boundary, CacheDirectives

CLASSES = {"5m": Retention("5m", 300, 300), "30m": Retention("30m", 1800)}


def tried(marks: list[Boundary], ask: CacheDirectives, min_tokens: int = 1) -> list[int]:
    return list(plan_breakpoints(marks, ask, CLASSES, min_tokens).candidates)


def written(
    marks: list[Boundary], ask: CacheDirectives, min_tokens: int = 1
) -> list[tuple[int, str]]:
    look = plan_breakpoints(marks, ask, CLASSES, min_tokens)
    return [(place.tokens, place.retention.name) for place in look.writes]


def test_looks_back_twenty_positions() -> None:
    """Including its own; the contract excludes earlier ones."""
    marks = [Boundary(10 * n, f"m[{n}]") for n in range(1, 31)]
    marks[-1] = Boundary(300, "m[30]", "5m")

    found = tried(marks, CacheDirectives(lookback=20))

    assert found == [10 * n for n in range(11, 31)]


def test_run_of_tool_calls_is_one_position() -> None:
    """Otherwise parallel calls would use up the lookback."""
    calls = [Boundary(10 * n, f"m[{n}]", run="call") for n in range(2, 30)]
    marks = [Boundary(10, "m[1]"), *calls, Boundary(300, "m[30]", "5m")]

    found = tried(marks, CacheDirectives(lookback=3))

    assert found[0] == 10
    assert len(found) == 30


def test_no_lookup_or_write_without_breakpoint() -> None:
    marks = [Boundary(10, "m[0]"), Boundary(20, "m[1]")]

    assert tried(marks, CacheDirectives()) == []
    assert written(marks, CacheDirectives()) == []


def test_implicit_breakpoint_is_end_of_latest_user_message() -> None:
    """Not the assistant's open answer, nor a part within a message."""
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


def test_last_tool_result_of_a_run_is_a_message_end() -> None:
    """An agent's turn ends with results."""
    marks = [
        Boundary(10, "m[0]", role="user"),
        Boundary(20, "m[1]", role="tool", run="result"),
        Boundary(30, "m[2]", role="tool", run="result"),
    ]

    assert written(marks, CacheDirectives(implicit="30m")) == [(30, "30m")]


def test_ignores_breakpoints_below_minimum() -> None:
    marks = [Boundary(10, "m[0]", "5m"), Boundary(1024, "m[1]", "5m")]

    assert tried(marks, CacheDirectives(), 1024) == [1024]
    assert written(marks, CacheDirectives(), 1024) == [(1024, "5m")]


def test_writes_latest_breakpoints_and_looks_up_the_others() -> None:
    """An earlier, shorter request may have written at one of them."""
    marks = [
        Boundary(10 * n, f"m[{n}]", "30m" if n in (1, 5, 40, 80, 120) else None)
        for n in range(1, 121)
    ]

    ask = CacheDirectives(lookback=3, writes_max=2)

    assert written(marks, ask) == [(800, "30m"), (1200, "30m")]
    assert tried(marks, ask) == [10, 50, 400, 780, 790, 800, 1180, 1190, 1200]


def test_looks_up_first_two_and_latest_fifty_breakpoints() -> None:
    """A client that marks everything must not slow down its requests."""
    marks = [Boundary(10 * n, f"m[{n}]", "30m") for n in range(1, 101)]

    found = tried(marks, CacheDirectives(lookback=1, writes_max=4))

    assert found == [10, 20, *(10 * n for n in range(51, 101))]


def test_marks_are_the_ends_of_the_last_message_the_system_text_and_the_tools() -> None:
    """Where clients come back, the likeliest first; a part within a message is none of them."""
    boundaries = [
        Boundary(12, "tools[0]", tier="tools"),
        Boundary(25, "tools[1]", tier="tools"),
        Boundary(40, "m[0]", tier="system", role="system"),
        Boundary(50, "m[1]"),
        Boundary(60, "m[2]", role="assistant"),
        Boundary(65, "m[3].content[0]", ends_message=False),
        Boundary(70, "m[3].content[1]"),
    ]

    assert marks_of(boundaries) == (70, 40, 25)
    assert marks_of(boundaries[:3]) == (40, 25)
    assert marks_of(()) == ()


def test_a_template_that_writes_tools_into_the_system_text_gives_one_mark_for_both() -> None:
    """The furthest end of both counts, and a mark names a length once."""
    boundaries = [
        Boundary(40, "tools[0]", tier="tools"),
        Boundary(40, "m[0]", tier="system", role="system", own_tokens=20),
        Boundary(50, "m[1]"),
    ]

    assert marks_of(boundaries) == (50, 40)
