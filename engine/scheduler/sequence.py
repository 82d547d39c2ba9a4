"""Sequences and the requests they answer: plain state, no decisions.

A *request* asks for one or more samples; each sample is a *sequence* with its own tokens and block
table. The first sequence computes the prompt, the others are forked from it. Scheduler and core
change these; nobody else sees them.
"""

from __future__ import annotations

from engine.api import Request, SampledToken, Usage
from engine.cache import BlockTable
from engine.grammar.grammar import Compiled, Matcher
from engine.plan import Mask


class Sequence:
    """One sample. There is no prefill and no decode, only `computed` on its way to `length`.

    `tokens`: prompt and outputs known to the host. `in_flight`: tokens being sampled by steps not
    yet collected. `computed`: tokens whose KV is in place or being written by a launched step;
    `table.kv_tokens` lags behind it by what is in flight. `computed_before`: how far it ever got,
    so that work done again after a preemption is known as such. `followers` wait for this one's
    blocks, each with the number of tokens it waits for; `leader` is whom this one waits for.
    `matcher`: its place in the request's grammar; `mask`: what may come next, None until that is
    made of the last token; `is_slow`: making it took long.
    """

    __slots__ = (
        "computed",
        "computed_before",
        "cumulative_logprob",
        "followers",
        "in_flight",
        "index",
        "is_ended",
        "is_known",
        "is_patient",
        "is_slow",
        "leader",
        "mask",
        "matcher",
        "order_key",
        "order_version",
        "output_tokens",
        "preemptions",
        "progress",
        "sequence_id",
        "stalled_steps",
        "table",
        "tokens",
        "work",
    )

    def __init__(self, work: ActiveRequest, index: int, sequence_id: int) -> None:
        self.work = work
        self.index = index
        self.sequence_id = sequence_id
        self.tokens: list[int] = list(work.request.tokens)
        self.output_tokens = 0
        self.in_flight = 0
        self.computed = 0
        self.computed_before = 0
        self.table: BlockTable | None = None
        self.cumulative_logprob = 0.0
        self.preemptions = 0
        self.is_ended = False
        self.is_known = False  # to the runner
        self.progress: list[SampledToken] = []  # prompt logprobs so far
        self.followers: list[tuple[int, Sequence]] = []
        self.leader: Sequence | None = None
        self.stalled_steps = 0  # without headway, while others waited for it
        self.is_patient = True  # may wait for a leader
        self.matcher: Matcher | None = None
        self.mask: Mask | None = None
        self.is_slow = False
        self.order_key = b""
        self.order_version = -1

    @property
    def length(self) -> int:
        """Tokens it has or is about to have."""
        return len(self.tokens) + self.in_flight

    @property
    def missing(self) -> int:
        """Tokens still to be computed before the next one can be drawn."""
        return self.length - self.computed

    @property
    def wants_row(self) -> bool:
        """Is there anything to compute? Not past its last token, known by counting.

        Under a grammar nothing is, while a token is on its way or the mask after it is not made.
        """
        request = self.work.request
        if self.is_ended or self.missing <= 0:
            return False
        if self.matcher is not None and (self.in_flight or self.mask is None):
            return False
        return self.output_tokens + self.in_flight < max(1, request.max_tokens)

    @property
    def is_decoding(self) -> bool:
        return self.missing == 1 and self.computed >= len(self.work.request.tokens)

    @property
    def places(self) -> int:
        """In the batch: one, and until its prompt is computed one for each sample it will have."""
        return 1 if self.work.is_forked else self.work.request.samples

    @property
    def rank(self) -> tuple[int, int, int]:
        """Lower is served first and preempted last."""
        return (-self.work.request.priority, self.work.arrival, self.index)


def common_tokens(a: Sequence, b: Sequence, size: int) -> int:
    """How many leading tokens two sequences share, in whole blocks of `size`, bar the last token.

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
    """One request on its way to its one final event, with what it has used so far."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "compiled",
        "computed_tokens",
        "deadline_at_s",
        "first_token_at_s",
        "is_finished",
        "is_forked",
        "is_prompt_told",
        "may_write",
        "preemptions",
        "received_at_s",
        "recomputed_tokens",
        "request",
        "sequences",
        "started_at_s",
    )

    def __init__(self, request: Request, arrival: int, now_s: float) -> None:
        self.request = request
        self.arrival = arrival
        self.received_at_s = now_s
        self.deadline_at_s = None if request.deadline_s is None else now_s + request.deadline_s
        self.started_at_s: float | None = None
        self.first_token_at_s: float | None = None
        self.sequences: list[Sequence] = []
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.recomputed_tokens = 0
        self.preemptions = 0
        self.is_forked = False
        self.is_prompt_told = False
        self.may_write = request.grant.write
        self.compiled: Compiled | None = None
        self.is_finished = False

    @property
    def is_compiling(self) -> bool:
        """Does it wait for its grammar?"""
        return self.request.grammar is not None and self.compiled is None

    def count_prompt(self, fresh: int, *, is_whole: bool) -> int:
        """So many more prompt tokens are computed; says how many that makes more than before.

        With the prompt whole, cached + computed is all of it.
        """
        before = self.computed_tokens
        self.computed_tokens += max(0, fresh)
        if is_whole:
            self.computed_tokens = len(self.request.tokens) - self.cached_tokens
        return max(0, self.computed_tokens - before)

    def usage(self, now_s: float) -> Usage:
        """What it has used up to now; see `engine.api.Usage` for the terms."""
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
        )
