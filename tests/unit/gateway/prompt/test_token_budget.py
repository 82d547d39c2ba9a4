"""A prompt's budget ends work that cannot fit or that has no client any more."""

from __future__ import annotations

import pytest

from gateway.prompt.token_budget import AbandonedError, TokenBudget, TooManyTokensError


def test_a_budget_is_spent_exactly() -> None:
    budget = TokenBudget(10)
    budget.spend(4)
    budget.require(6)
    budget.spend(6)

    with pytest.raises(TooManyTokensError, match="at least 11 tokens; expected at most 10"):
        budget.spend(1)


def test_the_refusal_names_the_least_number_of_tokens() -> None:
    budget = TokenBudget(10)
    budget.spend(4)

    with pytest.raises(TooManyTokensError) as raised:
        budget.require(100)
    assert raised.value.tokens == 104


def test_abandoned_work_ends_at_the_next_piece() -> None:
    has_left = False
    budget = TokenBudget(is_abandoned=lambda: has_left)
    budget.spend(10**9)
    has_left = True

    with pytest.raises(AbandonedError):
        budget.spend(1)
