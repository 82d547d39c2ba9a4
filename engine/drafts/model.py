"""The source that drafts with a small model, which reads the same tokens and writes greedily.

Its keys and values lie in a pool of its own, in *places* of 512 tokens, one for each sequence that
it drafts for. Nothing there is found, promised, copied or billed. It reads the first token of a
text and the last 255, not the whole prompt. So a long cached prompt costs it no more than a short
one, and a wrong guess changes no token. A place that is full begins anew in the same way.

It knows a `Runner` and no tensor. Only `engine.drafts.drafter` calls it, once for all sequences of
a step: each further token is a step of the small model, of all sequences together.
"""

from __future__ import annotations

from collections import abc, deque
from typing import Final

from engine.api import Clock, Namespace, Sampling
from engine.config import DRAFT_PLACE_TOKENS
from engine.drafts.step_times import StepTimes
from engine.errors import InvariantViolation
from engine.plan import BegunSequence, Row, Runner, StepPlan, StepResult
from engine.scheduler.sequence import Sequence

READ_TOKENS: Final = 256
"""Most tokens of a text that a place begins with."""
DEPTH_MAX: Final = 8
"""Most drafts of a sequence in a step: each is a step of the small model."""
PENDING_MIN: Final = 2
"""Tokens that each sequence may have computed in any case: of a step whose drafts were all right,
the last one and the one behind it."""

_GREEDY: Final = Sampling(temperature=0)


class _Place:
    """Room for one sequence's keys and values. `blocks`: its tables, one for each KV group.

    The first `kv` tokens are in place. They stand for the sequence's tokens before `end`; behind
    them are the drafts `ahead`, of which those that were right will count.
    """

    __slots__ = (
        "ahead", "begins_late", "block_size", "blocks", "end", "is_begun", "kv", "number", "turn",
    )  # fmt: skip

    def __init__(self, number: int, blocks: tuple[list[int], ...], block_size: int) -> None:
        self.number, self.blocks, self.block_size = number, blocks, block_size
        self.turn = 0
        self.is_begun = False
        self.clear()

    def clear(self) -> None:
        """Hold nothing."""
        self.kv = self.end = 0
        self.ahead: list[int] = []
        self.begins_late = False

    def follow(self, tokens: abc.Sequence[int], room: int) -> None:
        """Keep what was right of the drafts, and begin anew where the tokens to read, and `room`
        for drafts behind them, do not fit.
        """
        for draft in self.ahead:
            if self.end == len(tokens) or tokens[self.end] != draft:
                break
            self.kv, self.end = self.kv + 1, self.end + 1
        self.ahead = []
        if self.end == len(tokens):  # nothing came behind the last guess: its last token again
            self.kv, self.end = self.kv - 1, self.end - 1
        pending = len(tokens) - self.end
        if pending > READ_TOKENS or self.kv + pending + room > DRAFT_PLACE_TOKENS or not self.kv:
            self.clear()
            self.begins_late = len(tokens) > READ_TOKENS
            self.end = len(tokens) - READ_TOKENS + 1 if self.begins_late else 0

    def read(self, tokens: abc.Sequence[int], most: int) -> list[int]:
        """Return at most `most` of the tokens to compute, which count as in place from now on."""
        first = [tokens[0]] if self.begins_late else []
        fed = [*first, *tokens[self.end : self.end + most - len(first)]]
        self.begins_late = False
        self.kv, self.end = self.kv + len(fed), self.end + len(fed) - len(first)
        return fed

    def row(
        self, start: int, token_ids: list[int] | None, count: int, samples: tuple[int, ...]
    ) -> Row:
        """Return a row over its blocks, as far as it reads and writes them."""
        used = -(-(start + count) // self.block_size)
        first, *beside = (table[:used] for table in self.blocks)
        return Row(self.number, start, count, first, 0, token_ids, samples, beside=tuple(beside))


class ModelSource:
    """Drafts of a small model for the sequences that were begun. `places`: most sequences at once.

    `runner`: the model's, over `places` times 512 tokens in each of `kv_groups`; its steps take
    `times`, and its clock is `clock`. `vocab_size`: of the tokens that both models have. `spent_s`:
    seconds that the last guess took.
    """

    name = "model"

    def __init__(
        self,
        runner: Runner,
        times: StepTimes,
        clock: Clock,
        *,
        places: int,
        vocab_size: int,
        block_size: int,
        kv_groups: int = 1,
    ) -> None:
        self.times = times
        self.spent_s = 0.0
        self._runner, self._clock, self._vocab_size = runner, clock, vocab_size
        size = DRAFT_PLACE_TOKENS // block_size
        tables = [
            list(range(first, first + size)) for first in range(0, places * kv_groups * size, size)
        ]
        self._places = [
            _Place(number, tuple(tables[number * kv_groups : (number + 1) * kv_groups]), block_size)
            for number in range(places)
        ]
        self._free = self._places[::-1]
        self._of: dict[int, _Place] = {}
        self._live: dict[int, Sequence] = {}
        self._step = self._turn = 0

    def begin(self, sequence: Sequence) -> None:
        """Take a sequence. O(1): what it has is read with its first drafts."""
        self._live[sequence.sequence_id] = sequence

    def end(self, sequence_id: int) -> None:
        """Forget a sequence. O(1)."""
        self._live.pop(sequence_id, None)
        if (place := self._of.pop(sequence_id, None)) is not None:
            self._free.append(place)

    def erase(self, namespace: Namespace) -> None:
        """Do nothing: what a sequence has in the pool ends with it."""

    def seconds(self, sequence_ids: abc.Collection[int]) -> tuple[float, float]:
        """Return how long it takes to guess one draft of each, and to read before that what was not
        read of their texts. O(sequences)."""
        rows = max(1, len(sequence_ids))
        one_s = self.times.seconds(rows)
        slices, rest = divmod(sum(map(self.unread, sequence_ids)), READ_TOKENS)
        reading_s = slices * (self.times.seconds(rows + READ_TOKENS) - one_s)
        return one_s, reading_s + self.times.seconds(rows + rest) - one_s

    def unread(self, sequence_id: int) -> int:
        """Return how many tokens of a sequence are read before its next drafts, the last one apart.
        O(1)."""
        place, length = self._of.get(sequence_id), len(self._live[sequence_id].tokens)
        return max(0, min(length - (0 if place is None else place.end), READ_TOKENS) - 1)

    def tokens_within(self, seconds: float) -> int:
        """Return how many tokens a step of about that time computes, at most those that a place
        begins with."""
        tokens = READ_TOKENS
        while tokens > PENDING_MIN and self.times.seconds(tokens) > seconds:
            tokens //= 2
        return tokens

    def guess(self, limits: abc.Mapping[int, int], tokens_max: int) -> dict[int, tuple[int, ...]]:
        """Return at most so many drafts of each sequence; none of one that has no place, or whose
        text is still being read: a call reads `tokens_max` tokens, and two of each sequence.

        Takes a step of the model for each draft of the sequence that gets most. Raises what its
        runner raises; the source is not to be used after that.
        """
        self._turn += 1
        began_s = self._clock()
        rows, begun, drafting = self._first_rows(limits, tokens_max)
        drafts: dict[int, list[int]] = {place.number: [] for place, _ in drafting.values()}
        launched: deque[tuple[int, int]] = deque()  # of each step in flight: depth and tokens
        depth, at_s = 1, self._clock()
        while rows:
            self._step += 1
            self._runner.launch(StepPlan(self._step, tuple(rows), begun=begun))
            launched.append((depth, sum(row.count for row in rows)))
            begun = ()
            rows = [_next_row(one, depth) for one, most in drafting.values() if most > depth]
            depth += 1
            while launched and (len(launched) > 1 or not rows):
                number, tokens = launched.popleft()
                _take(self._runner.collect(), number, drafts)
                now_s = self._clock()
                self.times.record(tokens, now_s - at_s)
                at_s = now_s
        self.spent_s = at_s - began_s
        found: dict[int, tuple[int, ...]] = {}
        for sequence_id, (place, _) in drafting.items():
            token_ids = drafts[place.number]
            place.ahead = token_ids[:-1]  # the last one was not read
            if not token_ids:
                place.clear()  # logits that are no numbers
            known = next(
                (i for i, token in enumerate(token_ids) if token >= self._vocab_size),
                len(token_ids),
            )
            if known:
                found[sequence_id] = tuple(token_ids[:known])
        return found

    def _first_rows(
        self, limits: abc.Mapping[int, int], tokens_max: int
    ) -> tuple[list[Row], tuple[BegunSequence, ...], dict[int, tuple[_Place, int]]]:
        """Return rows that read what was not read of each sequence, the places that are new to the
        runner, and by sequence the places that draft and how much.
        """
        rows: list[Row] = []
        begun: list[BegunSequence] = []
        drafting: dict[int, tuple[_Place, int]] = {}
        left, last = tokens_max, self._vocab_size - 1
        for sequence_id, most in limits.items():
            place = self._place_of(sequence_id)
            if place is None:
                continue
            tokens = self._live[sequence_id].tokens
            place.follow(tokens, most)
            start = place.kv
            fed = place.read(tokens, max(left, PENDING_MIN))
            left -= len(fed)
            if not place.is_begun:
                place.is_begun = True
                begun.append(BegunSequence(place.number, _GREEDY, fed[:1], 1))
            samples: tuple[int, ...] = ()
            if place.end == len(tokens):
                samples = (place.number,)
                drafting[sequence_id] = place, most
            # A token that the small model lacks is read as its last one.
            rows.append(place.row(start, [min(token, last) for token in fed], len(fed), samples))
        return rows, tuple(begun), drafting

    def _place_of(self, sequence_id: int) -> _Place | None:
        """Return a sequence's place: its own, a free one, or that of the sequence which was drafted
        for longest ago, but not in this turn."""
        place = self._of.get(sequence_id)
        if place is None:
            if self._free:
                place = self._free.pop()
            else:
                other = min(self._of, key=lambda one: self._of[one].turn)
                if self._of[other].turn >= self._turn - 1:
                    return None
                place = self._of.pop(other)
            place.clear()
            self._of[sequence_id] = place
        place.turn = self._turn
        return place

    def check(self, live: abc.Collection[int]) -> None:
        """Check that each place is free or a live sequence's. Raises InvariantViolation."""
        held = [*self._free, *self._of.values()]
        if len({id(place) for place in held}) != len(held) or len(held) != len(self._places):
            counts = f"{len(self._free)} are free and {len(self._of)} are held"
            raise InvariantViolation(f"of {len(self._places)} places of drafts {counts}")
        if unknown := (self._of.keys() | self._live.keys()) - set(live):
            raise InvariantViolation(f"ended sequences {sorted(unknown)} have places of drafts")


def _next_row(place: _Place, depth: int) -> Row:
    """Return the row that reads a place's draft of this depth."""
    return place.row(place.kv + depth - 1, None, 1, (place.number,))


def _take(result: StepResult, depth: int, drafts: dict[int, list[int]]) -> None:
    """Add the drafts of one depth; a place that has missed one gets no more."""
    for number, tokens in result.sampled.items():
        if len(drafts[number]) == depth - 1:
            drafts[number].append(tokens[0].token_id)
