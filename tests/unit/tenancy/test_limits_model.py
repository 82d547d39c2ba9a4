"""Limits against a model in exact fractions, over random histories."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from tenancy.limits import METERS, NO_DEMAND, Demand, Meter, limit_of
from tenancy.types import Limits
from tests.examples import examples
from tests.unit.tenancy.limits_driver import Desk, identity

LIMITS = st.sampled_from([None, 1, 2, 3, 7, 10, 11, 13, 60, 97, 600, 10**12])
"""Whether or not they divide a minute."""

OPERATIONS = st.one_of(
    st.tuples(st.just("wait"), st.integers(0, 20_000), st.just(0)),
    st.tuples(st.just("ask"), st.integers(0, 12), st.integers(0, 12)),
    st.tuples(st.just("extend"), st.integers(0, 12), st.integers(0, 12)),
    st.tuples(st.just("settle"), st.integers(0, 30), st.integers(0, 30)),
)


def on(demand: Demand, meter: Meter) -> int:
    """Return the demand's count on a meter."""
    return demand.counts[METERS.index(meter)]


class Model:
    """Token buckets in exact fractions, written in the plainest way."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.at_once = 0
        self.levels = {
            meter: Fraction(limit) for meter in METERS if (limit := limit_of(limits, meter))
        }

    def wait(self, ms: int) -> None:
        for meter in self.levels:
            limit = self._limit(meter)
            self.levels[meter] = min(limit, self.levels[meter] + limit * ms / 60_000)

    def ask(self, demand: Demand) -> bool:
        at_once = self.limits.requests_at_once
        if at_once is not None and self.at_once >= at_once:
            return False
        if any(on(NO_DEMAND, meter) > level for meter, level in self.levels.items()):
            return False
        for meter in self.levels:
            self.levels[meter] -= on(NO_DEMAND, meter)
        if not self.extend(NO_DEMAND, demand):
            return False
        self.at_once += 1
        return True

    def extend(self, before: Demand, after: Demand) -> bool:
        more = {meter: on(after, meter) - on(before, meter) for meter in self.levels}
        if any(count > max(Fraction(0), self.levels[meter]) for meter, count in more.items()):
            return False
        for meter, count in more.items():
            self.levels[meter] -= count
        return True

    def settle(self, estimate: Demand, actual: Demand) -> None:
        self.at_once -= 1
        for meter in self.levels:
            back = on(estimate, meter) - on(actual, meter)
            self.levels[meter] = min(self._limit(meter), self.levels[meter] + back)

    def _limit(self, meter: Meter) -> Fraction:
        return Fraction(limit_of(self.limits, meter) or 0)


@given(
    limits=st.builds(
        Limits,
        requests_per_minute=LIMITS,
        tokens_per_minute=LIMITS,
        input_tokens_per_minute=LIMITS,
        output_tokens_per_minute=LIMITS,
        requests_at_once=st.sampled_from([None, 1, 3]),
    ),
    operations=st.lists(OPERATIONS, max_size=40),
)
@settings(max_examples=examples(150), deadline=None)
def test_limiter_matches_the_model(limits: Limits, operations: list[tuple[str, int, int]]) -> None:
    """Admissions, refusals and remaining counts agree after any history."""
    desk, model = Desk(), Model(limits)
    estimates: list[Demand] = []
    for what, one, two in operations:
        if what == "wait":
            desk.clock.ms += one
            model.wait(one)
        elif what == "ask":
            expected = model.ask(Demand(one, two))
            assert (desk.ask(limits, Demand(one, two)) is None) == expected
            if expected:
                estimates.append(Demand(one, two))
        elif what == "extend" and estimates:
            before = estimates[-1]
            after = Demand(before.input_tokens + one, before.output_tokens + two)
            expected = model.extend(before, after)
            assert desk.extend(after) == expected
            estimates[-1] = after if expected else before
        elif what == "settle" and estimates:
            model.settle(estimates.pop(0), Demand(one, two))
            desk.settle(Demand(one, two))
        states = desk.limiter.status(identity(limits))
        left = {meter: max(0, int(level // 1)) for meter, level in model.levels.items()}
        assert {meter: state.remaining for meter, state in states.items()} == left


@given(
    limit=st.integers(1, 10**9),
    waits=st.lists(st.integers(0, 5_000), min_size=1, max_size=60),
    sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=8),
)
@settings(max_examples=examples(100), deadline=None)
def test_no_window_is_overspent(limit: int, waits: list[int], sizes: list[int]) -> None:
    """In any w seconds at most one full bucket and w seconds of refill are admitted.

    The limits divide nothing evenly, so roundings show if they favour the client.
    """
    desk, limits = Desk(), Limits(tokens_per_minute=limit)
    taken: list[tuple[int, int]] = []
    for number, wait in enumerate(waits):
        desk.clock.ms += wait
        size = min(limit, sizes[number % len(sizes)])
        if desk.ask(limits, Demand(size, 0)) is None:
            taken.append((desk.clock.ms, size))

    for first, (start_ms, _) in enumerate(taken):
        total = 0
        for at_ms, size in taken[first:]:
            total += size
            assert total <= limit + Fraction(limit * (at_ms - start_ms), 60_000)
