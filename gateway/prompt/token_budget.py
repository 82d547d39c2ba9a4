"""The tokens that one prompt may still take, and whether its client still waits.

The renderer passes a budget down to the tokenizer, which asks it between the parts of a long text:
work for a prompt that cannot fit, or for a client that has left, ends there.
"""

from __future__ import annotations

from collections.abc import Callable

UNLIMITED = 2**62


class TooManyTokensError(Exception):
    """A text has more tokens than the budget allows, which is `most`. `tokens`: how many it has at
    least."""

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(f"the prompt has at least {tokens} tokens; expected at most {most}")
        self.tokens, self.most = tokens, most


class AbandonedError(Exception):
    """The client has left; its prompt is not needed any more."""


class TokenBudget:
    """At most `most` tokens for one prompt. `is_abandoned`: whether its client has left."""

    def __init__(
        self, most: int = UNLIMITED, is_abandoned: Callable[[], bool] = lambda: False
    ) -> None:
        self._most = most
        self._is_abandoned = is_abandoned
        self._spent = 0

    def require(self, count: int) -> None:
        """Check that `count` more tokens would fit. Raises TooManyTokensError, AbandonedError."""
        if self._spent + count > self._most:
            raise TooManyTokensError(self._spent + count, self._most)
        if self._is_abandoned():
            raise AbandonedError

    def spend(self, count: int) -> None:
        """Take `count` tokens. Raises TooManyTokensError, AbandonedError."""
        self.require(count)
        self._spent += count
