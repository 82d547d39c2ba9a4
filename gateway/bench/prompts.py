"""Seeded prompts of a given length: token ids, or words for endpoints that take only text.

Token ids are exact for any endpoint with a vocabulary of at least 16,000 tokens. A word is about
one token; figures use the counts that the endpoint reports.
"""

from __future__ import annotations

import random

FIRST_ID, LAST_ID = 1_000, 16_000
"""Range of token ids: above special tokens and single bytes, inside common vocabularies."""

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
    """Makes prompts from a seed. Its prompts differ; two makers of one seed make the same ones.

    `chance`: where they come from, for the other draws of a run.
    """

    def __init__(self, seed: int | str, *, in_text: bool = False) -> None:
        self.in_text = in_text
        self.chance = random.Random(seed)

    def make(self, tokens: int) -> Prompt:
        """Return a new prompt of `tokens` tokens."""
        if self.in_text:
            return self.words(tokens)
        return [self.chance.randrange(FIRST_ID, LAST_ID) for _ in range(tokens)]

    def words(self, count: int) -> str:
        """Return `count` words, each with a space before it."""
        return "".join(f" {self.chance.choice(WORDS)}" for _ in range(count))


def join_prompts(*parts: Prompt) -> Prompt:
    """Return the concatenated prompts."""
    if all(isinstance(part, str) for part in parts):
        return "".join(part for part in parts if isinstance(part, str))
    return [token for part in parts if isinstance(part, list) for token in part]
