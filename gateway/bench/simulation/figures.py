"""What a simulated run amounts to: the outcome of each request, and a row of figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from gateway.bench.figures import percentile
from gateway.bench.simulation.traffic import SimulatedRequest

GAP_UNIT_S = 1e-4
SOON_S = 2.0
"""A first token within this time is a quick one."""

Ending = Literal["", "done", "too_long", "no_replica"]
"""`too_long`: no engine has room for it. `no_replica`: none was ready until the end."""


class GapCounts:
    """How many gaps between two tokens of an answer were how long, to a tenth of a millisecond."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, gap_s: float, gaps: int) -> None:
        """Count gaps of one length. O(1)."""
        if gaps:
            self._counts[round(gap_s / GAP_UNIT_S)] += gaps

    @property
    def total(self) -> int:
        """Return how many gaps were counted."""
        return self._counts.total()

    def percentile(self, percent: float) -> float | None:
        """Return the percentile in seconds, by nearest rank; None without gaps. O(lengths)."""
        rank, seen = -(-self.total * percent // 100), 0
        for length, gaps in sorted(self._counts.items()):
            seen += gaps
            if seen >= rank:
                return length * GAP_UNIT_S
        return None


class RequestOutcome:
    """What became of a request. `sent`: how often it was sent to a replica. `cached_tokens`: those
    of its prompt that the replica that ended it had.
    """

    __slots__ = (
        "cached_tokens",
        "ended_s",
        "ending",
        "first_s",
        "last_s",
        "replica",
        "request",
        "sent",
    )

    def __init__(self, request: SimulatedRequest) -> None:
        self.request = request
        self.ending: Ending = ""
        self.sent = 0
        self.replica: int | None = None
        """Where it was sent last."""
        self.cached_tokens: int | None = None
        self.first_s: float | None = None
        self.ended_s: float | None = None
        self.last_s: float | None = None
        """When its replica died, if it had answered."""

    @property
    def computed_tokens(self) -> int:
        """Return the tokens of its prompt that were not cached."""
        return self.request.prompt_tokens - (self.cached_tokens or 0)

    @property
    def first_token_s(self) -> float | None:
        """Return the seconds from its arrival to its first token."""
        return None if self.first_s is None else self.first_s - self.request.at_s

    def send(self, replica: int) -> None:
        """Note that it goes to a replica."""
        self.sent += 1
        self.replica = replica

    def begin(self, cached_tokens: int) -> None:
        """Note that a replica has begun it, with so many tokens of its prompt cached."""
        self.cached_tokens = cached_tokens

    def answer(self, now_s: float) -> float | None:
        """Note the first token from a replica; return its gap where another one had answered."""
        gap_s = None if self.last_s is None else now_s - self.last_s
        self.first_s = now_s if self.first_s is None else self.first_s
        self.last_s = None
        return gap_s

    def lose(self, now_s: float, answered: int) -> None:
        """Note that its replica has died, after so many tokens."""
        self.last_s = now_s if answered else None

    def end(self, ending: Ending, now_s: float) -> None:
        """Note its one end."""
        assert not self.ending, f"{self.request.number} ends twice"
        self.ending, self.ended_s = ending, now_s

    def check(self) -> None:
        """Check that it has ended once, with all its tokens."""
        assert self.ending, f"{self.request.number} has not ended"
        if self.ending == "done":
            assert self.cached_tokens is not None
            assert self.first_s is not None
            assert self.ended_s is not None
            assert 0 <= self.cached_tokens <= self.request.prompt_tokens
            assert self.request.at_s <= self.first_s <= self.ended_s


class PolicyFigures(Struct, frozen=True):
    """The figures of one policy. Times are in seconds, None where nothing was measured."""

    policy: str
    requests: int
    done: int
    too_long: int
    no_replica: int
    moved: int
    """Requests that went on at another replica, or at another life of theirs."""
    apart: int
    """Requests whose prompt was computed on another replica than the answer."""
    prompt_tokens: int
    cached_tokens: int
    hits: float | None
    """Cached over prompt tokens of the requests that are done."""
    first_token_p50_s: float | None
    first_token_p90_s: float | None
    first_token_p99_s: float | None
    under_2_s: float | None
    """The share of all requests that had their first token within two seconds."""
    gap_p99_s: float | None
    imbalance: float | None
    """The busiest replica's seconds of work over their mean."""
    again_tokens: int
    """Tokens that were computed again because a replica died."""
    ended_s: float


def figures_of(
    policy: str,
    outcomes: Sequence[RequestOutcome],
    gaps: GapCounts,
    busy_s: Sequence[float],
    computed_tokens: int,
    apart: int = 0,
) -> PolicyFigures:
    """Return the figures of a run that has ended. O(n log n)."""
    done = [one for one in outcomes if one.ending == "done"]
    endings = Counter(one.ending for one in outcomes)
    first = [one.first_token_s for one in done if one.first_token_s is not None]
    prompt = sum(one.request.prompt_tokens for one in done)
    cached = sum(one.cached_tokens or 0 for one in done)
    mean_s = sum(busy_s) / len(busy_s)

    def rank(percent: float) -> float | None:
        return _rounded(percentile(first, percent)) if first else None

    return PolicyFigures(
        policy=policy,
        requests=len(outcomes),
        done=len(done),
        too_long=endings["too_long"],
        no_replica=endings["no_replica"],
        moved=sum(one.sent > 1 for one in outcomes),
        apart=apart,
        prompt_tokens=prompt,
        cached_tokens=cached,
        hits=_rounded(cached / prompt) if prompt else None,
        first_token_p50_s=rank(50),
        first_token_p90_s=rank(90),
        first_token_p99_s=rank(99),
        under_2_s=_rounded(sum(s < SOON_S for s in first) / len(outcomes)) if outcomes else None,
        gap_p99_s=_rounded(gaps.percentile(99)),
        imbalance=_rounded(max(busy_s) / mean_s) if mean_s else None,
        again_tokens=computed_tokens - (prompt - cached),
        ended_s=round(max((one.ended_s or 0.0 for one in outcomes), default=0.0), 3),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
