"""Short prompts before long ones of the same payer, within bounds.

A question of forty tokens that waits for a document of its own payer is answered late for nothing:
the document is hardly delayed if the question goes first. A prompt may pass those before it if each
of them has at least `RATIO` times its missing tokens; a prompt is passed at most `PASSES_MAX`
times, so that its own first token comes at most twice as late. Only the scheduler calls this
module; it changes nothing but the counts of passes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final

from engine.scheduler.request_queue import QueueEntry
from engine.scheduler.sequence import Sequence

LONG_TOKENS: Final = 256
"""A prompt with fewer missing tokens is never passed: nothing is gained."""
RATIO: Final = 4
PASSES_MAX: Final = 4
WINDOW: Final = 8
"""The prompts of a payer, from the first one on, of which some may pass others."""


def advance_short(entries: list[QueueEntry], count_missing: Callable[[Sequence], int]) -> None:
    """Move the short prompts of a payer before its long ones; its entries are in order.

    `count_missing` returns the tokens that a sequence has to compute, by its length or a look-up.
    O(1) where the first prompt is not long, else O(WINDOW) and at most as many look-ups.
    """
    if len(entries) < 2 or entries[0][1].tokens_to_compute < LONG_TOKENS:
        return
    window, bound = entries[:WINDOW], inf
    ahead: list[QueueEntry] = []
    behind: list[QueueEntry] = []
    for entry in window:
        key, sequence = entry
        is_ahead = behind and key[0] == behind[0][0][0]
        if is_ahead and not sequence.has_passed:
            is_ahead = bound > 0 and _is_short(sequence, bound, count_missing)
            if is_ahead:
                sequence.has_passed = True
                for _, passed in behind:
                    passed.passes += 1
                bound = min(_bound(passed, count_missing) for _, passed in behind)
        if is_ahead:
            ahead.append(entry)
        else:
            behind.append(entry)
            bound = min(bound, _bound(sequence, count_missing))
    entries[:WINDOW] = ahead + behind


def _bound(sequence: Sequence, count_missing: Callable[[Sequence], int]) -> float:
    """Return the most missing tokens of a prompt that may pass this one."""
    if sequence.passes >= PASSES_MAX:
        return 0.0
    missing = count_missing(sequence)
    return missing / RATIO if missing >= LONG_TOKENS else 0.0


def _is_short(sequence: Sequence, bound: float, count_missing: Callable[[Sequence], int]) -> bool:
    return sequence.tokens_to_compute <= bound or count_missing(sequence) <= bound
