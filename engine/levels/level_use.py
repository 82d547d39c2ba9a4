"""What the levels below the device have done for one request, before its first step.

`scheduler.loading` notes it, and core tells it once, when the request starts. It decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from engine.api import LEVELS_BELOW, LevelName, LevelWait, LoadMiss

_RANKS: Final[tuple[LoadMiss, ...]] = ("", "not_worth_loading", "level_failed", "damaged")


class FetchedTokens(NamedTuple):
    """The tokens of a prompt from `start` to `end`, which a fetch from a level has brought."""

    level: LevelName = "peer"
    start: int = 0
    end: int = 0


NOTHING: Final = FetchedTokens()


@dataclass(slots=True)
class LevelUse:
    """One request's use of the levels below the device.

    `known_tokens`: how much of its prompt the device and a level had together, at most, or may have
    had where a level could not be asked. `cause`: why a part of that was not brought; of several
    the gravest, since the others would not have cost this part. `load_s`: seconds that it waited
    for loads; `level`: the slowest that they came from. `fetched`: the level from which its tokens
    between two positions were fetched for it, to host memory or to the device.
    """

    known_tokens: int = 0
    cause: LoadMiss = ""
    load_s: float = 0.0
    level: LevelName | None = None
    fetched: FetchedTokens = NOTHING

    def know(self, tokens: int) -> None:
        """Note that a level has, or may have, the prompt up to `tokens`."""
        self.known_tokens = max(self.known_tokens, tokens)

    def miss(self, cause: LoadMiss) -> None:
        """Note why something known is not brought."""
        self.cause = max(self.cause, cause, key=_RANKS.index)

    def forget(self) -> None:
        """Note that what was known is erased: no level has it, so none failed to bring it."""
        self.known_tokens, self.cause = 0, ""

    def wait(self, seconds: float, level: LevelName) -> None:
        """Note the end of a load that the request waited for."""
        self.load_s += max(0.0, seconds)
        self.level = level if self.level is None else max(self.level, level, key=LEVELS_BELOW.index)

    def level_at(self, position: int, level: LevelName) -> LevelName:
        """Return where the token at a position, which has come from `level`, was before."""
        _, start, end = self.fetched
        return self.fetched.level if start <= position < end else level

    def fetched_tokens(self, cached_tokens: int) -> int:
        """Return how many of so many cached tokens were fetched for it."""
        _, start, end = self.fetched
        return max(0, min(cached_tokens, end) - start)

    def told(self, cached_tokens: int) -> LevelWait | None:
        """Return what is told of a request that starts with so many cached tokens; None where no
        level had anything more.
        """
        missed = max(0, self.known_tokens - cached_tokens) if self.cause else 0
        if not missed and self.level is None:
            return None
        return LevelWait(self.load_s, self.level, missed, self.cause if missed else "")
