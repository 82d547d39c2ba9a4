"""What a simulated fleet is asked: requests of a trace, of a recorded ledger, or of drawn tenants.

A prompt is a list of stretches: a token id, and how often it follows. Equal stretches at the start
are a shared prefix. A block of a trace is one stretch, so its id stands for the same tokens
wherever it occurs. All chance comes from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count, groupby

from msgspec import Struct

from engine.api import Namespace
from gateway.bench.trace import BLOCK_TOKENS, Arrival

Stretch = tuple[int, int]
"""A token id, and how many of it follow one another."""

RECALLED_PROMPTS = 64
"""The newest prompts of a tenant of a ledger; what a request found cached is taken from these."""


class SimulatedRequest(Struct, frozen=True, gc=False):
    """A request and the answer that it will get."""

    number: int
    at_s: float
    namespace: Namespace
    prompt: tuple[Stretch, ...]
    prompt_tokens: int
    answer: Stretch

    @property
    def answer_tokens(self) -> int:
        """Return the tokens of the answer, at least one."""
        return self.answer[1]


class TenantTraffic(Struct, frozen=True):
    """Tenants by Zipf's law, each with a system prompt of its own, who hold conversations. A turn's
    prompt is the conversation so far, answers included, and a new question."""

    requests: int = 10_000
    per_s: float = 60.0
    tenants: int = 150
    zipf: float = 1.1
    system_tokens: int = 6144
    question_tokens: int = 1024
    answer_tokens: int = 256
    turns: int = 5
    pause_s: float = 25.0
    """The mean time between two turns; a fifth of it passes always."""

    @property
    def name(self) -> str:
        """Return what a report calls it."""
        return f"{self.tenants} tenants at {self.per_s:g} requests/s"


def tokens_of(stretches: Sequence[Stretch]) -> list[int]:
    """Return the tokens of stretches. O(tokens)."""
    tokens: list[int] = []
    for token, length in stretches:
        tokens += [token] * length
    return tokens


def draw_tenants(traffic: TenantTraffic, seed: int) -> list[SimulatedRequest]:
    """Return the first `requests` requests of the tenants, in the order of their times."""
    chance, fresh = random.Random(f"{seed}/tenants"), count(traffic.tenants)
    weights = [1 / (rank + 1) ** traffic.zipf for rank in range(traffic.tenants)]
    drawn: list[tuple[float, int, tuple[Stretch, ...], Stretch]] = []
    begins_s = 0.0
    while len(drawn) < traffic.requests:
        begins_s += chance.expovariate(traffic.per_s / traffic.turns)
        tenant = chance.choices(range(traffic.tenants), weights)[0]
        prompt: tuple[Stretch, ...] = ((tenant, traffic.system_tokens),)
        at_s = begins_s
        for _ in range(traffic.turns):
            answer = (next(fresh), max(1, traffic.answer_tokens))
            prompt = (*prompt, (next(fresh), traffic.question_tokens))
            drawn.append((at_s, tenant, prompt, answer))
            prompt = (*prompt, answer)
            at_s += traffic.pause_s * (0.2 + 0.8 * chance.expovariate(1.0))
    drawn.sort(key=lambda one: one[0])
    return [
        SimulatedRequest(
            *(number, at_s, b"tenant %d" % tenant, prompt, sum(n for _, n in prompt), answer)
        )
        for number, (at_s, tenant, prompt, answer) in enumerate(drawn[: traffic.requests])
    ]


def trace_requests(
    arrivals: Sequence[Arrival], *, speed: float, seed: int
) -> list[SimulatedRequest]:
    """Return the requests of a trace that runs `speed` times as fast.

    Requests with one and the same stamp are spread over the time to the next stamp: some traces
    have a stamp every three seconds. `Arrival.blocks` say which prefixes are shared; without
    blocks, what a ledger says was cached is taken from the tenant's newest prompts, and else
    nothing is shared.
    """
    fresh, numbers = count(), dict[int, int]()
    ledgers: dict[str, _LedgerTenant] = {}
    requests = []
    for number, (at_s, one) in enumerate(_spread(arrivals, random.Random(f"{seed}/spread"))):
        if one.blocks:
            ids = [numbers.setdefault(block, -1) for block in one.blocks]
            ids = [block if block >= 0 else next(fresh) for block in ids]
            numbers.update(zip(one.blocks, ids, strict=True))
            last = one.prompt_tokens - BLOCK_TOKENS * (len(ids) - 1)
            prompt = (*((block, BLOCK_TOKENS) for block in ids[:-1]), (ids[-1], last))
            tenant = None
        else:
            tenant = ledgers.setdefault(one.tenant, _LedgerTenant(next(fresh)))
            prompt = (
                *tenant.recall(min(one.cached_tokens, one.prompt_tokens - 1)),
                (next(fresh), one.prompt_tokens - min(one.cached_tokens, one.prompt_tokens - 1)),
            )
        answer = (next(fresh), max(1, one.output_tokens))
        if tenant is not None:
            tenant.note((*prompt, answer))
        namespace = f"tenant {one.tenant}".encode()
        requests.append(
            SimulatedRequest(number, at_s / speed, namespace, prompt, one.prompt_tokens, answer)
        )
    return requests


class _LedgerTenant:
    """The newest prompts of a tenant of a ledger, with their answers."""

    def __init__(self, earlier: int) -> None:
        self._earlier = earlier
        """The token of what was cached before the record begins."""
        self._newest: list[tuple[Stretch, ...]] = []

    def recall(self, tokens: int) -> tuple[Stretch, ...]:
        """Return the first `tokens` of the newest prompt that has so many, else of what came before
        the record."""
        if not tokens:
            return ()
        for prompt in reversed(self._newest):
            if sum(length for _, length in prompt) >= tokens:
                return tuple(_first(prompt, tokens))
        return ((self._earlier, tokens),)

    def note(self, prompt: tuple[Stretch, ...]) -> None:
        """Keep a prompt and its answer."""
        self._newest.append(prompt)
        del self._newest[:-RECALLED_PROMPTS]


def _first(stretches: Sequence[Stretch], tokens: int) -> Iterator[Stretch]:
    for token, length in stretches:
        if tokens <= 0:
            return
        yield token, min(length, tokens)
        tokens -= length


def _spread(arrivals: Sequence[Arrival], chance: random.Random) -> Iterator[tuple[float, Arrival]]:
    """Yield arrivals with their times; those of one stamp are spread up to the next one."""
    groups = [(at_s, list(found)) for at_s, found in groupby(arrivals, key=lambda one: one.at_s)]
    for index, (at_s, found) in enumerate(groups):
        later_s = groups[index + 1][0] if index + 1 < len(groups) else at_s
        if len(found) == 1:
            yield at_s, found[0]
            continue
        drawn = sorted(at_s + chance.random() * (later_s - at_s) for _ in found)
        yield from zip(drawn, found, strict=True)


def endless_hits(requests: Sequence[SimulatedRequest]) -> float:
    """Return the share of prompt tokens that one cache without bounds would find, if each request
    had ended before the next one begins: no fleet finds more. O(stretches).

    Prefixes are told apart by their stretches, so a prompt that leaves a stretch halfway counts
    the tokens up to there.
    """
    roots: dict[Namespace, dict[int, _Known]] = {}
    found = total = 0
    for request in requests:
        children = roots.setdefault(request.namespace, {})
        hit, is_known = 0, True
        for token, length in (*request.prompt, request.answer):
            known = children.get(token)
            if known is None:
                known = children[token] = _Known()
            if is_known:
                hit += min(length, known.length)
                is_known = known.length == length
            known.length = max(known.length, length)
            children = known.children
        found += min(hit, request.prompt_tokens - 1)
        total += request.prompt_tokens
    return found / total if total else 0.0


class _Known:
    """A stretch that some prompt had, and what came behind it."""

    __slots__ = ("children", "length")

    def __init__(self) -> None:
        self.length = 0
        self.children: dict[int, _Known] = {}
