"""A client's prediction: drafts follow it, and find back to it behind an edit."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafts.prediction import WINDOW_TOKENS, Prediction
from tests.examples import examples

TEXT = list(range(100, 160))
LIMIT = 4


def steps_of(predicted: list[int], answer: list[int], limit: int = LIMIT) -> int:
    """Return the steps that an answer takes: each has the accepted drafts and one token more."""
    prediction, at, steps = Prediction(predicted), 0, 0
    while at < len(answer):
        draft = prediction.propose(answer[:at], limit)
        assert len(draft) <= limit
        accepted = 0
        while accepted < len(draft) and answer[at : at + accepted + 1] == draft[: accepted + 1]:
            accepted += 1
        new = answer[at : at + accepted + 1]
        prediction.extend(new)
        at, steps = at + len(new), steps + 1
    return steps


def test_an_answer_as_predicted_takes_a_step_for_each_draft() -> None:
    """Sixty tokens, of which each step verifies four and samples one."""
    assert steps_of(TEXT, TEXT) == 12


def test_drafts_go_on_behind_an_edit() -> None:
    """A changed, an added and a missing token each cost the steps in which the place is lost."""
    changed = [*TEXT[:20], 7, *TEXT[21:]]
    added = [*TEXT[:20], 7, *TEXT[20:]]
    missing = [*TEXT[:20], *TEXT[21:]]

    for answer in (changed, added, missing):
        assert 12 < steps_of(TEXT, answer) <= 16


def test_another_answer_takes_a_step_for_each_token() -> None:
    """A wrong prediction is not drafted from for ever."""
    assert steps_of(TEXT, list(range(60))) == 60


def test_the_place_is_found_near_the_last_one_only() -> None:
    """A long prediction costs a lookup no more than a short one."""
    far = [*TEXT[:3], *[9] * (WINDOW_TOKENS + 10), 1, 2, 3, 4]
    prediction = Prediction(far)
    prediction.extend([1, 2, 3])

    assert prediction.propose([1, 2, 3], LIMIT) == []


def test_a_prediction_without_tokens_drafts_nothing() -> None:
    """An empty text is a prediction, too."""
    assert steps_of([], TEXT) == 60


@given(
    st.lists(st.integers(0, 1), max_size=30),
    st.lists(st.integers(0, 1), max_size=30),
    st.integers(1, 9),
)
@settings(max_examples=examples(80))
def test_no_prediction_costs_a_step(predicted: list[int], answer: list[int], limit: int) -> None:
    """However wrong, an answer takes at most one step a token, and each draft was predicted."""
    assert steps_of(predicted, answer, limit) <= len(answer)
    draft = Prediction(predicted).propose(answer, limit)
    assert draft == predicted[:limit]
