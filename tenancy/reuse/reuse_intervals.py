"""Block uses by the time since the use before, against retentions that are known beforehand.

Exact at each of them: no bucket to round to, where half of a tenant's prompts may come back after
300 seconds and a bit. A retention is judged by the uses that came once it had been watched for as
long as it keeps; of those before, the one that missed might have been there from earlier. Until
there are enough it is judged by all, which is the least that it hits. `reuse` tells it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

PROMPTS_MIN = 30
"""Fewer say nothing yet: of so many, a ratio's error is still up to 9 points."""


class BlockUses:
    """How many blocks were used, and how many of them missed; in prompts, which go together.

    `held_s`: blocks times the seconds for which they are kept.
    """

    __slots__ = ("blocks", "held_s", "missed", "squares")

    def __init__(self) -> None:
        self.blocks = self.held_s = self.missed = self.squares = 0.0

    def add(self, other: BlockUses) -> None:
        """More of them."""
        self.blocks += other.blocks
        self.held_s += other.held_s
        self.missed += other.missed
        self.squares += other.squares

    def prompt(self, blocks: float) -> None:
        """One more."""
        self.blocks += blocks
        self.squares += blocks * blocks

    @property
    def prompts(self) -> float:
        """As how many of one length they count: a few long ones decide a ratio by tokens (Kish,
        "Survey Sampling", 1965)."""
        return self.blocks**2 / self.squares if self.squares else 0.0

    @property
    def hit_ratio(self) -> float:
        return min(1.0, max(0.0, 1 - self.missed / self.blocks)) if self.blocks else 0.0


class ReuseIntervals:
    """Of one tenant. `spans`: the retentions, in seconds."""

    def __init__(self, spans: Iterable[float]) -> None:
        self._spans = sorted(set(spans))
        counts = range(len(self._spans) + 1)
        # [n]: prompts that came when the first n had been watched for long enough, and [n][m]
        # blocks of them that the first m would not have kept, and by the seconds between uses.
        self._prompts = [BlockUses() for _ in counts]
        self._lost = [[0.0 for _ in counts] for _ in counts]
        self._gaps_s = [[0.0 for _ in counts] for _ in counts]
        self._since_s: float | None = None
        self._watched = 0
        self._until_s = -math.inf  # one more will have been watched then

    def prompt(self, blocks: float, at_s: float) -> None:
        """A prompt of so many blocks. O(1)."""
        if at_s >= self._until_s:
            self._watch(at_s)
        self._prompts[self._watched].prompt(blocks)

    def again(self, blocks: float, gap_s: float) -> None:
        """Blocks of the latest prompt that were used so long before. O(log spans)."""
        watched, spans = self._watched, bisect_left(self._spans, gap_s)
        self._lost[watched][spans] += blocks
        self._gaps_s[watched][spans] += blocks * gap_s

    def first(self, blocks: float) -> None:
        """Blocks of the latest prompt that were never used before. O(1)."""
        self._lost[self._watched][-1] += blocks

    def all(self) -> BlockUses:
        """All prompts, and nothing missed. O(spans)."""
        return self._since(0, len(self._spans) + 1)

    def within(self, span: float) -> tuple[BlockUses, bool]:
        """What one of the spans would have kept, and for how long: to the next use, and to its end
        once for each miss. Was it watched for too short? O(spans^2)."""
        after = self._spans.index(span) + 1
        found = self._since(after, after)
        is_early = found.prompts < PROMPTS_MIN
        if is_early:
            found = self._since(0, after)
        found.held_s += found.missed * span
        return found, is_early

    def _since(self, watched: int, spans: int) -> BlockUses:
        """Prompts since the first `watched` had been watched, and what the first `spans` missed."""
        found = BlockUses()
        for place in range(watched, len(self._prompts)):
            found.add(self._prompts[place])
            found.missed += sum(self._lost[place][spans:])
            found.held_s += sum(self._gaps_s[place][:spans])
        return found

    def _watch(self, at_s: float) -> None:
        if self._since_s is None:
            self._since_s = at_s
        self._watched = bisect_right(self._spans, at_s - self._since_s)
        rest = self._spans[self._watched :]
        self._until_s = self._since_s + rest[0] if rest else math.inf
