"""A pair of replicas for a long prompt: one computes it, the other fetches it and answers.

Pure: numbers in, the best pair out. `gateway.routing.router` compares it with the best single
replica. The seconds that a prompt takes from the rows beside it count here: sparing them is what
a pair is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

from msgspec import Struct

APART_TOKENS_MIN = 2048
"""A prompt is computed apart where so many of its tokens are nowhere."""
APART_FACTOR = 1.2
"""A pair must be predicted to be so many times as fast as a single replica."""
PROMPTS_MAX = 4
"""Replicas that are looked at for the prompt: those that would be done with it first."""
HELD_S_MAX = 0.5
"""A second in which a row waits for another request's prompt counts as one of the request itself,
all of them as so many at most: so much later a first token may come for it."""


class PromptSide(Struct, frozen=True):
    """A replica that may compute the prompt. `own_s`: wait and fill; `held_s`: what its rows lose
    meanwhile. `peer`: where it fetches the first `peer_tokens` itself, "" for none."""

    replica: str
    own_s: float
    held_s: float
    peer: str = ""
    peer_tokens: int = 0
    pool_domain: str = ""


class AnswerSide(Struct, frozen=True):
    """A replica that may fetch the prompt and answer. `wait_s`: what is queued there now;
    `fetch_s`: of what it lacks, `near_fetch_s` from one of its own pool domain; `rest_s`: the
    tokens that are computed there; `decode_s`: of the answer."""

    replica: str
    wait_s: float
    fetch_s: float
    rest_s: float
    decode_s: float
    near_fetch_s: float = 0.0
    pool_domain: str = ""

    def seconds_from(self, prompt: PromptSide) -> float:
        """Return the seconds to fetch the prompt from a replica."""
        is_near = self.pool_domain and self.pool_domain == prompt.pool_domain
        return self.near_fetch_s if is_near else self.fetch_s


class PairCost(Struct, frozen=True, array_like=True):
    """The predicted seconds of a request whose prompt is computed at `prompt_at`, until its answer
    is whole at `replica`. `start_s`: until the answer begins, once the prompt is fetched. `peer`:
    see `PromptSide`."""

    prompt_at: str
    replica: str
    prompt_s: float
    fetch_s: float
    start_s: float
    decode_s: float
    held_s: float
    peer: str = ""
    peer_tokens: int = 0

    @property
    def total_s(self) -> float:
        """The sum of the terms."""
        return self.prompt_s + self.fetch_s + self.start_s + self.decode_s + self.held_s


def best_pair(prompts: Sequence[PromptSide], answers: Sequence[AnswerSide]) -> PairCost | None:
    """Return the pair of two different replicas with the least seconds; None without one.
    O(replicas): of `prompts`, the best `PROMPTS_MAX` are looked at.
    """
    near = nsmallest(PROMPTS_MAX, prompts, key=lambda one: (one.own_s + one.held_s, one.replica))
    pairs = [
        PairCost(
            prompt_at=one.replica,
            replica=other.replica,
            prompt_s=one.own_s,
            fetch_s=(fetch_s := other.seconds_from(one)),
            start_s=max(0.0, other.wait_s - one.own_s - fetch_s) + other.rest_s,
            decode_s=other.decode_s,
            held_s=one.held_s,
            peer=one.peer,
            peer_tokens=one.peer_tokens,
        )
        for one in near
        for other in answers
        if one.replica != other.replica
    ]
    return min(pairs, key=lambda pair: (pair.total_s, pair.prompt_at, pair.replica), default=None)
