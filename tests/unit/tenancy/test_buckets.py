"""`TokenBucket` against exact arithmetic: debt, waiting time and changed limits."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from tenancy.limits import MINUTE_NS, SECOND_NS, TokenBucket

LIMITS = st.sampled_from([1, 7, 60, 1_000])
STEPS = st.lists(
    st.tuples(st.integers(0, 90 * SECOND_NS), LIMITS, st.integers(0, 2_000)), max_size=20
)


def bucket(limit: int, owed: int = 0) -> TokenBucket:
    """Return a bucket at instant 0."""
    return TokenBucket("key", 0, limit, full_at=owed * MINUTE_NS)


@given(steps=STEPS)
def test_debt_drains_at_the_limit_exactly(steps: list[tuple[int, int, int]]) -> None:
    """As exact fractions, less than one unit above for each change of the limit."""
    one, now_ns, owed, more, before = bucket(1), 0, Fraction(0), Fraction(0), 1
    for wait_ns, limit, cost in steps:
        now_ns += wait_ns
        owed = max(Fraction(0), owed - Fraction(wait_ns * before, MINUTE_NS))
        more = more * limit / before + (limit != before)
        owed, before = owed * limit / before + cost, limit
        one.resize(now_ns, limit)
        one.full_at = one.owed(now_ns) + (now_ns * limit) + cost * MINUTE_NS

        assert owed <= Fraction(one.owed(now_ns), MINUTE_NS) <= owed + more / MINUTE_NS


def test_cost_fits_exactly_after_its_wait() -> None:
    """To the nanosecond."""
    one = bucket(60, owed=60)
    wait_ns = one.wait_ns(0, 3 * MINUTE_NS)
    left = [one.wait_ns(wait_ns + more_ns, 3 * MINUTE_NS) for more_ns in (-1, 0, 1)]

    assert (wait_ns, left) == (3 * SECOND_NS, [1, 0, 0])


def test_retries_queue_behind_earlier_refusals() -> None:
    """Each refusal takes a turn, at most a minute away; a look takes none."""
    one = bucket(60, owed=60)
    turns = [one.take_turn_ns(0, 20 * MINUTE_NS) // SECOND_NS for _ in range(5)]

    assert turns == [20, 40, 60, 60, 60]
    assert not one.is_idle(MINUTE_NS)
    assert one.is_idle(2 * MINUTE_NS)
    assert one.owed(0) == 60 * MINUTE_NS
