"""Block uses by the time since the previous use, for a fixed set of retentions.

Counts are exact at each retention; buckets would round, and many prompts may return just after 300
seconds. A retention is judged by the uses that came after it had been observed for its own length:
before that, a miss might have been a hit on an earlier use. Until there are enough such uses, all
uses count, which gives a lower bound of the hit ratio.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

PROMPTS_MIN = 30
"""Fewer prompts give no verdict: even with this many the ratio's error is up to 9 points."""


class BlockUses:
    """Counts of used and missed blocks, and of the prompts that they came in.

    `held_s`: blocks times the seconds for which they are kept.
    """

    __slots__ = ("blocks", "held_s", "missed", "squares")

    def __init__(self) -> None:
        self.blocks = self.held_s = self.missed = self.squares = 0.0

    def add(self, other: BlockUses) -> None:
        """Add other counts."""
        self.blocks += other.blocks
        self.held_s += other.held_s
        self.missed += other.missed
        self.squares += other.squares

    def add_prompt(self, blocks: float) -> None:
        """Add a prompt of this many blocks."""
        self.blocks += blocks
        self.squares += blocks * blocks

    @property
    def prompts(self) -> float:
        """The effective number of equally long prompts (Kish, "Survey Sampling", 1965).

        A few long prompts dominate a ratio by tokens.
        """
        return self.blocks**2 / self.squares if self.squares else 0.0

    @property
    def hit_ratio(self) -> float:
        """The fraction of block uses that did not miss."""
        return min(1.0, max(0.0, 1 - self.missed / self.blocks)) if self.blocks else 0.0


class ReuseIntervals:
    """The reuse intervals of one tenant. `spans`: the retentions, in seconds."""

    def __init__(self, spans: Iterable[float]) -> None:
        self._spans = sorted(set(spans))
        counts = range(len(self._spans) + 1)
        # [n]: prompts that came when the first n spans had been observed for their length.
        # [n][m]: their blocks that the first m spans would not have kept, and the same blocks
        # times the seconds between uses.
        self._prompts = [BlockUses() for _ in counts]
        self._lost = [[0.0 for _ in counts] for _ in counts]
        self._gaps_s = [[0.0 for _ in counts] for _ in counts]
        self._since_s: float | None = None
        self._observed = 0
        self._until_s = -math.inf  # when the next span will have been observed

    def add_prompt(self, blocks: float, at_s: float) -> None:
        """Count a prompt of this many blocks. O(1)."""
        if at_s >= self._until_s:
            self._update_observed(at_s)
        self._prompts[self._observed].add_prompt(blocks)

    def count_reuse(self, blocks: float, gap_s: float) -> None:
        """Count blocks of the latest prompt that were last used `gap_s` ago. O(log spans)."""
        observed, spans = self._observed, bisect_left(self._spans, gap_s)
        self._lost[observed][spans] += blocks
        self._gaps_s[observed][spans] += blocks * gap_s

    def count_first(self, blocks: float) -> None:
        """Count blocks of the latest prompt that were never used before. O(1)."""
        self._lost[self._observed][-1] += blocks

    def total(self) -> BlockUses:
        """Return the counts of all prompts, without misses. O(spans)."""
        return self._since(0, len(self._spans) + 1)

    def kept_within(self, span: float) -> tuple[BlockUses, bool]:
        """Return what a retention would have kept, and whether it was observed too briefly.

        Blocks are held until their next use, or for the whole retention once per miss. O(spans^2).
        """
        after = self._spans.index(span) + 1
        found = self._since(after, after)
        is_early = found.prompts < PROMPTS_MIN
        if is_early:
            found = self._since(0, after)
        found.held_s += found.missed * span
        return found, is_early

    def _since(self, observed: int, spans: int) -> BlockUses:
        """Return prompts since the first `observed` spans were observed, and misses of `spans`."""
        found = BlockUses()
        for place in range(observed, len(self._prompts)):
            found.add(self._prompts[place])
            found.missed += sum(self._lost[place][spans:])
            found.held_s += sum(self._gaps_s[place][:spans])
        return found

    def _update_observed(self, at_s: float) -> None:
        if self._since_s is None:
            self._since_s = at_s
        self._observed = bisect_right(self._spans, at_s - self._since_s)
        rest = self._spans[self._observed :]
        self._until_s = self._since_s + rest[0] if rest else math.inf
