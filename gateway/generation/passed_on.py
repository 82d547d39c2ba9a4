"""How many of a choice's tokens have been given out: all of their text, and nothing of it held.

What waits for the rest of a character, for what may be a stop string, or for the end of a call does
not count, and so does not end up on a bill if the server dies. It changes nothing; `stream` has one
for each choice.
"""

from __future__ import annotations

from gateway.generation.output_parser import ChoiceOutput
from gateway.prompt.detokenizer import Detokenizer


class PassedOn:
    """One choice's."""

    __slots__ = ("_before_call", "_calls", "_output", "_text", "_tokens")

    def __init__(self, text: Detokenizer, output: ChoiceOutput) -> None:
        self._text = text
        self._output = output
        self._before_call = 0
        self._calls = 0
        self._tokens = 0

    def upto(self, tokens: int) -> int:
        """Of so many tokens, which are all that its text was spelt by, the first that have been
        given out; of those that are held for now perhaps fewer than could be said."""
        if self._text.released and not (self._calls or self._is_holding()):
            self._tokens = tokens
        return self._tokens

    def note(self, tokens: int) -> None:
        """The same, where calls are read: to be told after each piece of text, for a call counts
        whole, and with what comes behind it. Not every dialect writes it in pieces."""
        if self._output.calls > self._calls:
            self._calls, self._tokens = self._output.calls, self._before_call
        if not self._is_holding():
            self._before_call = tokens

    def _is_holding(self) -> bool:
        return self._text.is_holding or self._output.is_holding
