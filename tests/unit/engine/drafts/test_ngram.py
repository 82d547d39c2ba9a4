"""N-grams of a sequence's own text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafts.ngram import WINDOW_TOKENS, OwnText
from tests.examples import examples


def plain(tokens: list[int], limit: int) -> list[int]:
    """Return what followed the latest earlier occurrence of the last 3, else 2 tokens."""
    for order in (3, 2):
        for place in range(len(tokens) - 1, order - 1, -1):
            if len(tokens) > order and tokens[place - order : place] == tokens[-order:]:
                return tokens[place : place + limit]
    return []


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 15))
@settings(max_examples=examples(120))
def test_drafts_are_those_of_a_plain_search(tokens: list[int], limit: int) -> None:
    """The latest earlier place of the longest context."""
    assert OwnText(tokens).propose(limit) == plain(tokens, limit)


@given(
    st.lists(st.integers(0, 2), max_size=20),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=10),
)
@settings(max_examples=examples(80))
def test_drafts_come_from_the_text(prompt: list[int], steps: list[list[int]]) -> None:
    """While an answer goes on as an earlier place did, drafts follow that place."""
    text, said = OwnText(prompt), list(prompt)
    for step in steps:
        draft = text.propose(4)
        joined = [said[place : place + len(draft)] for place in range(len(said))]
        assert draft == [] or draft in joined
        text.extend(step)
        said += step


def test_a_repeated_line_is_drafted_whole() -> None:
    text = OwnText([*range(30), 99, 0, 1])

    assert text.propose(15) == list(range(2, 17))
    text.extend([2, 3, 4])
    assert text.propose(3) == [5, 6, 7]
    text.extend([50])
    assert text.propose(3) == []


def test_the_search_ends_at_its_window() -> None:
    """A lookup in a long text costs no more than in one of the window's length."""
    far = OwnText([1, 2, 3, *[9, 8] * (WINDOW_TOKENS // 2), 1, 2])

    assert far.propose(2) == []
