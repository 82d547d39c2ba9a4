"""Ways to choose a replica, as pure functions: ours, two plain ones, and models of other routers.

A model follows the defaults of a router as we read them; it is not that router. Models get loads
that are exact and never late, which no real router has, and break ties by a hash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from zlib import crc32

from msgspec import Struct
from msgspec.structs import replace

from gateway.routing.prefix_directory import Found
from gateway.routing.router import ReplicaState, RouteChoice, RouteRequest, choose

COUNTED_BLOCK = 16
"""Tokens of a block, to those who count in blocks."""

LLM_D_PREFIX, LLM_D_QUEUE, LLM_D_ROOM = 3.0, 2.0, 2.0
"""Weights of its scorers."""
SGLANG_MATCH_MIN = 0.5
"""The part of a prompt that must match for the replica with the longest match to be taken."""
SGLANG_GAP, SGLANG_RATIO = 32, 1.1
"""Requests, and how many times the least, by which the busiest replica must be ahead for the least
busy one to be taken."""

_NOTHING = Found()


class ReplicaView(Struct):
    """What a router knows of a replica: `state` for ours, and the rest for models of others.

    `queued`, `sequences`: requests that wait, and all it has. `waiting_tokens`: of prompts still to
    be computed. `pinned_tokens`, `pool_tokens`: KV in use, and its room. `sent_strides`: distinct
    strides that were sent there.
    """

    state: ReplicaState
    pool_tokens: int
    queued: int = 0
    sequences: int = 0
    waiting_tokens: int = 0
    pinned_tokens: int = 0
    sent_strides: int = 0


class RouteView(Struct, frozen=True):
    """A request and the replicas that may take it, at least one. `found`: what they have, by
    number; `sent`: what was sent there. `turn` counts requests.
    """

    request: RouteRequest
    replicas: Sequence[ReplicaView]
    found: Mapping[int, Found] = {}
    sent: Mapping[int, Found] = {}
    turn: int = 0


Rule = Callable[[RouteView], ReplicaView | RouteChoice]


class RoutingPolicy(Struct, frozen=True):
    """A rule, and what it looks at."""

    rule: Rule
    knows_prefixes: bool = False
    knows_loads: bool = False
    """The exact ones; ours has reports."""
    knows_sent: bool = False
    has_roles: bool = False
    """Replicas have the roles that the fleet names; else each does all."""


def _seconds(view: RouteView) -> RouteChoice:
    return choose(view.request, [one.state for one in view.replicas], view.found)


def _apart(view: RouteView) -> RouteChoice:
    request = replace(view.request, may_part=True)
    return choose(request, [one.state for one in view.replicas], view.found)


def _conductor(view: RouteView) -> ReplicaView:
    """Take the least predicted first token: the wait and the fill, and nothing else."""
    choice = choose(view.request, [one.state for one in view.replicas], view.found)
    if not choice.costs:
        return view.replicas[0]
    best = min(choice.costs, key=lambda one: (one.wait_s + one.fill_s, one.replica))
    return named(view.replicas, best.replica)


def _round_robin(view: RouteView) -> ReplicaView:
    return view.replicas[view.turn % len(view.replicas)]


def _least_requests(view: RouteView) -> ReplicaView:
    return min(view.replicas, key=lambda one: (one.sequences, _tie(view, one)))


def _llm_d(view: RouteView) -> ReplicaView:
    """Weigh the share that is found, the place among the queues, and the free part of the pool."""
    queues = [one.queued for one in view.replicas]
    least, most = min(queues), max(queues)

    def score(one: ReplicaView) -> float:
        prefix = view.found.get(one.state.number, _NOTHING).device / view.request.prompt_tokens
        queue = 1.0 if most == least else (most - one.queued) / (most - least)
        room = 1 - min(1.0, one.pinned_tokens / one.pool_tokens)
        return LLM_D_PREFIX * prefix + LLM_D_QUEUE * queue + LLM_D_ROOM * room

    return max(view.replicas, key=lambda one: (score(one), _tie(view, one)))


def _dynamo(view: RouteView) -> ReplicaView:
    """Take the fewest blocks: those of prompts to be computed, this one's too, and those in use."""
    prompt = view.request.prompt_tokens

    def blocks(one: ReplicaView) -> float:
        missing = prompt - view.found.get(one.state.number, _NOTHING).device
        prefill = (one.waiting_tokens + missing) / COUNTED_BLOCK
        return prefill + (one.pinned_tokens + prompt) / COUNTED_BLOCK

    return min(view.replicas, key=lambda one: (blocks(one), _tie(view, one)))


def _sglang(view: RouteView) -> ReplicaView:
    """Take the longest match of what was sent, else the smallest tree; the least busy where the
    busiest is far ahead."""
    busy = [one.sequences for one in view.replicas]
    if max(busy) - min(busy) > SGLANG_GAP and max(busy) > SGLANG_RATIO * min(busy):
        return _least_requests(view)

    def match(one: ReplicaView) -> int:
        return view.sent.get(one.state.number, _NOTHING).device

    best = max(view.replicas, key=lambda one: (match(one), _tie(view, one)))
    if match(best) > SGLANG_MATCH_MIN * view.request.prompt_tokens:
        return best
    return min(view.replicas, key=lambda one: (one.sent_strides, _tie(view, one)))


OURS, APART = "seconds", "apart"
POLICIES: Mapping[str, RoutingPolicy] = {
    OURS: RoutingPolicy(_seconds, knows_prefixes=True),
    APART: RoutingPolicy(_apart, knows_prefixes=True, has_roles=True),
    "round-robin": RoutingPolicy(_round_robin),
    "least-requests": RoutingPolicy(_least_requests, knows_loads=True),
    "llm-d": RoutingPolicy(_llm_d, knows_prefixes=True, knows_loads=True),
    "dynamo": RoutingPolicy(_dynamo, knows_prefixes=True, knows_loads=True),
    "sglang": RoutingPolicy(_sglang, knows_loads=True, knows_sent=True),
    "conductor": RoutingPolicy(_conductor, knows_prefixes=True),
}
"""Policies by name. All but the first four are models of other routers."""
MODELS = ("llm-d", "dynamo", "sglang", "conductor")


def named(replicas: Sequence[ReplicaView], name: str | None) -> ReplicaView:
    """Return a replica by its name; the first one for none."""
    return next((one for one in replicas if one.state.name == name), replicas[0])


def _tie(view: RouteView, one: ReplicaView) -> int:
    return crc32(f"{view.request.id}/{one.state.name}".encode())
