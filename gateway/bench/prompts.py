"""Seeded prompts of a known length: token ids where an endpoint takes them, else plain words.

Token ids are exact for any endpoint whose vocabulary has 16,000 tokens. Words are close to one
token each; what counts is the usage that the endpoint reports.
"""

from __future__ import annotations

import random

FIRST_ID, LAST_ID = 1_000, 16_000
"""Above special tokens and single bytes, below the end of any vocabulary worth measuring."""

_TEXT = (
    "time year people way day man thing woman life child world school state family student group"
    " country problem hand part place case week company system program question work government"
    " number night point home water room mother area money story fact month lot right study book"
    " eye job word business issue side kind head house service friend father power hour game line"
    " end member law car city name president team minute idea body back parent face others level"
    " office door health person art war history party result change morning reason research girl"
)
WORDS = tuple(_TEXT.split())

Prompt = list[int] | str


class PromptMaker:
    """Makes prompts from one seed: two made alike differ, two makers of one seed do not."""

    def __init__(self, seed: int | str, *, in_text: bool = False) -> None:
        self.in_text = in_text
        self._random = random.Random(seed)

    def make(self, tokens: int) -> Prompt:
        """A prompt nobody has seen."""
        if self.in_text:
            return self.words(tokens)
        return [self._random.randrange(FIRST_ID, LAST_ID) for _ in range(tokens)]

    def words(self, count: int) -> str:
        """So many words, with a space before each."""
        return "".join(f" {self._random.choice(WORDS)}" for _ in range(count))


def joined(*parts: Prompt) -> Prompt:
    """Prompts one after the other."""
    if all(isinstance(part, str) for part in parts):
        return "".join(part for part in parts if isinstance(part, str))
    return [token for part in parts if isinstance(part, list) for token in part]
