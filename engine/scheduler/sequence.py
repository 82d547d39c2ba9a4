"""Sequences and active requests: plain state, no decisions.

A *request* asks for one or more samples; each sample is a *sequence* with its own tokens and block
table. The first sequence computes the prompt, the others are forked from it. Only the scheduler and
core change them.
"""

from __future__ import annotations

from engine.api import BlockWindow, DraftCount, LevelName, Request, Usage
from engine.cache import BlockTable
from engine.grammar.grammar import CompiledGrammar, Matcher
from engine.levels.level_use import LevelUse
from engine.levels.loads import Load
from engine.plan import Mask


class Sequence:
    """One sample of a request. Prefill and decode are the same: `computed` approaches `length`,
    which at `length_max` leaves nothing to compute: the last output token is not read.

    `parent`: the active request. `tokens`: prompt and outputs known to the host. `in_flight`:
    tokens being sampled by steps not yet collected. `computed`: tokens whose KV is in place or
    being written by a launched step; `table.kv_tokens` lags behind it by the steps in flight.
    `computed_before`: the most ever computed, so that recomputation after a preemption is counted
    as such. `followers`: the sequences that wait for this one's blocks, each with the number of
    tokens it waits for; `leader`: the sequence this one waits for. `load`: what fills its blocks
    from a level below the device; `is_halted`: that is under way, or the sequence has ended, and it
    computes nothing. `matcher`: its place in the request's grammar; `mask`: the tokens that may
    come next, None until it is computed for the last token; `has_slow_mask`: computing it took
    long. `preemptions`: how often it was preempted for lack of blocks or for a higher priority;
    `claims`: for another payer's share. `state_lag`: its last computed tokens that its recurrent
    states have not taken in: accepted drafts. `suspended`: its table from before the last
    preemption, which keeps the room of its promises.
    """

    __slots__ = (
        "claims",
        "computed",
        "computed_before",
        "cumulative_logprob",
        "followers",
        "has_output",
        "has_passed",
        "has_slow_mask",
        "in_flight",
        "index",
        "is_ended",
        "is_halted",
        "is_known_to_runner",
        "leader",
        "length_max",
        "load",
        "mask",
        "matcher",
        "may_wait",
        "missing_tokens",
        "order_key",
        "order_version",
        "output_tokens",
        "parent",
        "passes",
        "preemptions",
        "prompt_tokens",
        "sequence_id",
        "stalled_steps",
        "state_lag",
        "suspended",
        "table",
        "tokens",
    )

    def __init__(self, active: ActiveRequest, index: int, sequence_id: int) -> None:
        self.parent = active
        self.index = index
        self.sequence_id = sequence_id
        self.tokens: list[int] = list(active.request.tokens)
        self.output_tokens = active.request.resumed_tokens
        self.in_flight = 0
        self.prompt_tokens = len(self.tokens) - self.output_tokens
        self.has_output = active.request.max_tokens > 0
        self.length_max = self.prompt_tokens + max(1, active.request.max_tokens)
        self.computed = 0
        self.computed_before = 0
        self.table: BlockTable | None = None
        self.suspended: BlockTable | None = None
        self.cumulative_logprob = 0.0
        self.preemptions = 0
        self.claims = 0
        self.passes = 0  # shorter prompts that went first
        self.has_passed = False
        self.missing_tokens: int | None = None  # of a waiting prompt that was looked up
        self.is_ended = self.is_halted = False
        self.is_known_to_runner = False
        self.state_lag = 0
        self.followers: list[tuple[int, Sequence]] = []
        self.leader: Sequence | None = None
        self.load: Load | None = None
        self.stalled_steps = 0  # steps without progress while followers waited
        self.may_wait = True  # may wait for a leader
        self.matcher: Matcher | None = None
        self.mask: Mask | None = None
        self.has_slow_mask = False
        self.order_key = b""
        self.order_version = -1

    @property
    def length(self) -> int:
        """Return the number of tokens, including those in flight, one a step (plan's rule 4)."""
        return len(self.tokens) + self.in_flight

    @property
    def tokens_to_compute(self) -> int:
        """Return the tokens to compute before the next one can be sampled."""
        return self.length - self.computed

    @property
    def tokens_left(self) -> int:
        """Return the most tokens that are still to be computed, its answer included."""
        return self.prompt_tokens + self.parent.request.max_tokens - self.computed

    @property
    def is_schedulable(self) -> bool:
        """Return whether there are tokens to compute; false after the last token.

        Under a grammar it is false while a token is in flight or the mask after it is not ready.
        """
        length = len(self.tokens) + self.in_flight
        if self.is_halted or not self.computed < length < self.length_max:
            return False
        return self.matcher is None or not (self.in_flight or self.mask is None)

    @property
    def is_decoding(self) -> bool:
        """Return whether only the last output token is to be computed."""
        return self.tokens_to_compute == 1 and self.computed >= self.prompt_tokens

    def tokens_read(self, position: int) -> int:
        """Return how many tokens before `position` the token there reads, to within a block."""
        window = self.parent.request.attention
        return position if window is None else min(position, window.sink_tokens + window.tokens)

    def shared_tokens(self, tokens: int, block_size: int) -> int:
        """Return how many of its first `tokens` tokens are computed as without a window."""
        window = self.parent.attention
        return tokens if window is None else min(tokens, window.shared_blocks * block_size)

    def findable_tokens(self, block_size: int) -> list[int]:
        """Return the tokens to look up: all, or those it may share and one to compute."""
        if self.parent.attention is None:
            return self.tokens
        return self.tokens[: self.shared_tokens(len(self.tokens), block_size) + 1]

    @property
    def batch_slots(self) -> int:
        """Return the batch slots it takes: one, or until its prompt is computed one per sample."""
        return 1 if self.parent.is_forked else self.parent.request.samples

    @property
    def rank(self) -> tuple[int, int, int]:
        """Return the rank: the lower, the earlier served and the later preempted."""
        return (-self.parent.request.priority, self.parent.arrival, self.index)


def common_tokens(a: Sequence, b: Sequence, size: int) -> int:
    """Return how many leading tokens two sequences share, in whole blocks of `size`, without the
    last.

    O(log blocks) comparisons of slices.
    """
    low, high = 0, (min(len(a.tokens), len(b.tokens)) - 1) // size
    while low < high:
        middle = (low + high + 1) // 2
        if a.tokens[low * size : middle * size] == b.tokens[low * size : middle * size]:
            low = middle
        else:
            high = middle - 1
    return low * size


class ActiveRequest:
    """One live request and its usage so far. It ends with exactly one final event.

    `payer` pays for its blocks; `turn` is the payer whose slots and time it uses, and `token_cost`
    what a token adds to that payer's counter in the request queue. `loaded_tokens`:
    the part of its cached tokens that was loaded for it, by level. `level_use`: what levels below
    the device have done for it; None while none was asked. `attention`: its attention window, in
    blocks, None without.
    """

    __slots__ = (
        "arrival",
        "attention",
        "cached_tokens",
        "compiled",
        "computed_tokens",
        "deadline_at_s",
        "drafts",
        "first_token_at_s",
        "is_finished",
        "is_forked",
        "level_use",
        "loaded_tokens",
        "may_write",
        "payer",
        "preemptions",
        "prompt_logprobs_sent",
        "received_at_s",
        "recomputed_tokens",
        "request",
        "sequences",
        "started_at_s",
        "token_cost",
        "turn",
    )

    def __init__(self, request: Request, arrival: int, now_s: float) -> None:
        self.request = request
        self.payer = request.grant.payer
        self.turn = request.turn_payer
        self.token_cost = 1 / request.weight
        self.arrival = arrival
        self.received_at_s = now_s
        self.deadline_at_s = None if request.deadline_s is None else now_s + request.deadline_s
        self.started_at_s: float | None = None
        self.first_token_at_s: float | None = None
        self.sequences: list[Sequence] = []
        self.cached_tokens = 0
        self.loaded_tokens: tuple[tuple[LevelName, int], ...] = ()
        self.level_use: LevelUse | None = None
        self.computed_tokens = 0
        self.recomputed_tokens = 0
        self.preemptions = 0
        self.is_forked = False
        self.prompt_logprobs_sent = 0  # entries, the first token's included
        self.may_write = request.grant.write
        self.compiled: CompiledGrammar | None = None
        self.attention: BlockWindow | None = None
        self.is_finished = False
        self.drafts: tuple[DraftCount, ...] = ()

    @property
    def is_compiling(self) -> bool:
        """Return whether the request waits for its grammar."""
        return self.request.grammar is not None and self.compiled is None

    def count_prompt(self, fresh: int, *, is_whole: bool) -> int:
        """Count `fresh` more computed prompt tokens; return the increase.

        `is_whole`: the prompt is complete, so cached + computed is all of it.
        """
        before = self.computed_tokens
        self.computed_tokens += max(0, fresh)
        if is_whole:
            self.computed_tokens = self.request.prompt_tokens - self.cached_tokens
        return max(0, self.computed_tokens - before)

    def count_drafts(self, counts: tuple[DraftCount, ...]) -> None:
        """Add the drafts of a sequence that ends to those of the request."""
        if counts:
            sums = {one.source: (one.drafted, one.accepted) for one in self.drafts}
            for one in counts:
                drafted, accepted = sums.get(one.source, (0, 0))
                sums[one.source] = drafted + one.drafted, accepted + one.accepted
            self.drafts = tuple(DraftCount(name, *pair) for name, pair in sums.items())

    def usage(self, now_s: float) -> Usage:
        """Return the usage up to `now_s`; see `engine.api.Usage` for the terms."""
        waited_until_s = now_s if self.started_at_s is None else self.started_at_s
        first_s = self.first_token_at_s
        return Usage(
            prompt_tokens=self.cached_tokens + self.computed_tokens,
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed_tokens,
            output_tokens=sum(sequence.output_tokens for sequence in self.sequences),
            recomputed_tokens=self.recomputed_tokens,
            preemptions=self.preemptions,
            queue_s=max(0.0, waited_until_s - self.received_at_s),
            first_token_s=None if first_s is None else max(0.0, first_s - self.received_at_s),
            total_s=max(0.0, now_s - self.received_at_s),
            drafts=self.drafts,
        )
