"""The order of calls and results in a history."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.openai.tools import HistoryPlace, with_results_behind_calls


def history_of(kinds: list[int], seed: int) -> list[HistoryPlace]:
    """Return a history of turns with so many calls each, results at random places behind them."""
    chance = random.Random(seed)
    places: list[HistoryPlace] = []
    for turn, calls in enumerate(kinds):
        at = len(places)
        ids = [f"{turn}.{number}" for number in range(calls)]
        places += [HistoryPlace(), *(HistoryPlace((call_id,), continues=True) for call_id in ids)]
        for call_id in ids:
            places.insert(
                chance.randint(at + calls + 1, len(places)), HistoryPlace(answers=call_id)
            )
        for _ in range(chance.randrange(3)):
            places.insert(chance.randint(at + calls + 1, len(places)), HistoryPlace())
    return places


@given(st.lists(st.integers(0, 3), max_size=5), st.integers(0, 2**32))
def test_every_history_reads_as_if_results_had_come_at_once(kinds: list[int], seed: int) -> None:
    """Each message is there once, each turn's results follow it in the order of its calls, and a
    longer history begins as the shorter one did: that is what the cache finds again."""
    places = history_of(kinds, seed)
    order = with_results_behind_calls(places)
    read = [places[at] for at in order]
    more = [
        HistoryPlace(),
        HistoryPlace(("x",), continues=True),
        HistoryPlace(),
        HistoryPlace(answers="x"),
    ]
    longer = with_results_behind_calls([*places, *more])

    assert sorted(order) == list(range(len(places)))
    assert list(longer[: len(order)]) == list(order)
    pending: list[str] = []
    for place in read:
        if place.answers is not None:
            assert place.answers == pending.pop(0)
        else:
            assert place.calls or not pending
        pending += place.calls
    assert pending == []
