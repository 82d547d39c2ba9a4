"""The choice of a replica: hard rules first, then the least predicted seconds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from heapq import nlargest
from typing import Final, Literal, NamedTuple

from msgspec import Struct, msgpack, structs

from engine.api import EngineRole
from gateway.routing.load import ReplicaLoad
from gateway.routing.pairs import (
    APART_FACTOR,
    APART_TOKENS_MIN,
    HELD_S_MAX,
    AnswerSide,
    PairCost,
    PromptSide,
    best_pair,
)
from gateway.routing.prefix_directory import Found

TIE_S = 0.005
"""Costs nearer than this are equal: then the hash of the first stride decides."""
PEER_S = 0.02
"""Seconds that a fetch from another replica takes beside its bytes."""
PEERS_MAX = 3
"""Replicas that are looked at for a fetch."""
PEER_FACTOR = 1.2
"""Fetching must be predicted to be faster than computing by this."""
EXPLAINED = 1000
RECORDED_COSTS = 4
"""Costs that the record of a request has: the least, and that of the chosen replica."""

Policy = Literal["time", "round_robin"]
Reason = Literal[
    "not ready",
    "failed a request",
    "stuck in a step",
    "not a home of this tenant",
    "no room",
    "computes prompts",
]
RESTING: Final = ("failed a request", "stuck in a step")
"""Reasons that do not count where no other replica may take the request."""


class ReplicaState(Struct):
    """What the choice needs to know of a replica. `number`: its bit in the directory.
    `is_resting`: it failed two requests in a row and gets the next one later. `displaced_weight`:
    what a displaced token costs, in tokens to compute; computing it again delays others, too.
    """

    name: str
    number: int
    is_ready: bool
    is_resting: bool
    max_sequence_tokens: int
    block_tokens: int
    bytes_per_token: int
    load: ReplicaLoad
    displaced_weight: float = 2.0
    may_send: bool = False
    """It drains: others may still fetch from it."""
    role: EngineRole = "any"
    is_stuck: bool = False
    """Its step takes many times as long as the longest of late."""
    pool_domain: str = ""
    """See `EngineInfo`."""

    def fetch_s(self, tokens: int, pool_domain: str) -> float:
        """Return the predicted seconds to fetch tokens from a replica of this pool domain."""
        report = self.load.report
        is_near = pool_domain == self.pool_domain != "" and report.near_bytes_per_s
        rate = report.near_bytes_per_s if is_near else report.peer_bytes_per_s
        return PEER_S + tokens * self.bytes_per_token / rate


class RouteRequest(Struct, frozen=True):
    """A request to be routed. `lease_blocks`: what its leases would promise. `homes`: the names of
    the replicas that a strict tenant's requests go to; None: all. `lease_id`: of its first lease.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    digests: Sequence[bytes]
    lease_blocks: int = 0
    homes: frozenset[str] | None = None
    lease_id: str = ""
    may_part: bool = False
    """Its prompt may be computed on another replica than its answer."""


class Cost(Struct, frozen=True, array_like=True):
    """The predicted seconds of a request on a replica, and what was found there. `peer`: the
    replica from which it would fetch the first `peer_tokens`, "" for none.
    """

    replica: str
    found: Found
    wait_s: float
    fill_s: float
    displaced_s: float
    decode_s: float
    peer: str = ""
    peer_tokens: int = 0

    @property
    def total_s(self) -> float:
        """The sum of the terms."""
        return self.wait_s + self.fill_s + self.displaced_s + self.decode_s


class RouteChoice(Struct, frozen=True, array_like=True):
    """Why a request went where it went: ids and terms, no tokens. `replica` None: none may take it,
    and `retry_after_s` is the least wait of those that may later. `pair`: the replica that computes
    the prompt for `replica`, None where it does so itself.
    """

    request_id: str
    policy: Policy
    replica: str | None
    costs: tuple[Cost, ...]
    refused: dict[str, Reason]
    retry_after_s: float | None = None
    pair: PairCost | None = None

    @property
    def cost(self) -> Cost | None:
        """The cost of the replica that was chosen."""
        return next((one for one in self.costs if one.replica == self.replica), None)

    def least(self, count: int) -> RouteChoice:
        """Return it with its `count` least costs, in order; that of the chosen replica stays."""
        ranked = sorted(self.costs, key=lambda cost: cost.total_s)
        kept = [
            cost
            for place, cost in enumerate(ranked)
            if place < count or cost.replica == self.replica
        ]
        return structs.replace(self, costs=tuple(kept))


def choose(
    request: RouteRequest,
    replicas: Sequence[ReplicaState],
    found: Mapping[int, Found],
    policy: Policy = "time",
    turn: int = 0,
) -> RouteChoice:
    """Choose a replica. Least seconds win; within 5 ms, the rendezvous hash of the first stride and
    the replica's name. With `round_robin`, `turn` counts over those that may take the request.
    """
    reasons = {replica.name: _refuse(request, replica) for replica in replicas}
    able = [replica for replica in replicas if reasons[replica.name] is None]
    able = able or [r for r in replicas if reasons[r.name] in RESTING]
    both = able
    able = [replica for replica in able if replica.role != "prefill"] or able
    reasons |= {one.name: "computes prompts" for one in both if one not in able}
    taken = {replica.name for replica in able}
    refused = {name: why for name, why in reasons.items() if why is not None and name not in taken}
    able = _with_lease_room(request, able)
    peers = _peers(request, replicas, found)
    costs = [
        _cost(request, replica, found.get(replica.number, _NOTHING), peers) for replica in able
    ]
    if not costs:
        waits = [replica.load.wait_s for replica in replicas]
        return RouteChoice(request.id, policy, None, (), refused, min(waits, default=None))
    if policy == "round_robin":
        chosen = costs[turn % len(costs)]
    else:
        least = min([cost.total_s for cost in costs])
        near = [cost for cost in costs if cost.total_s <= least + TIE_S]
        chosen = (
            near[0]
            if len(near) == 1
            else max(near, key=lambda cost: _weight(request, cost.replica))
        )
    pair = None
    if policy == "time" and request.may_part and len(both) > 1:
        pair = _pair(request, both, able, found, costs, peers)
    answers_at = chosen.replica if pair is None else pair.replica
    return RouteChoice(request.id, policy, answers_at, tuple(costs), refused, pair=pair)


def rank_homes(
    request: RouteRequest, replicas: Sequence[ReplicaState], found: Mapping[int, Found]
) -> list[str]:
    """Return the names of the replicas that may take a promise over, the best first: with room for
    it, with most of its prefix, then by the hash. So all gateways find the same one, and prefixes
    that begin alike stay together."""

    def rank(replica: ReplicaState) -> tuple[bool, int, bytes]:
        have = found.get(replica.number, _NOTHING)
        has_room = replica.load.report.promisable_blocks >= request.lease_blocks
        return has_room, have.device + have.below, _weight(request, replica.name)

    able = [one for one in replicas if _refuse(request, one) in (None, *RESTING)]
    able = [one for one in able if one.role != "prefill"] or able
    return [one.name for one in sorted(able, key=rank, reverse=True)]


def pack_choice(choice: RouteChoice) -> bytes:
    """Return a choice for the record of its request, with its least costs: 100 to 400 bytes."""
    return msgpack.encode(choice.least(RECORDED_COSTS))


def unpack_choice(packed: bytes) -> RouteChoice:
    """Return the choice of a record. Raises msgspec.MsgspecError."""
    return msgpack.decode(packed, type=RouteChoice)


class RecentChoices:
    """The last 1,000 choices, by request id."""

    def __init__(self) -> None:
        self._choices: OrderedDict[str, RouteChoice] = OrderedDict()

    def add(self, choice: RouteChoice) -> None:
        """Keep a choice; the oldest goes. A request chosen again has its last choice."""
        self._choices.pop(choice.request_id, None)
        self._choices[choice.request_id] = choice
        if len(self._choices) > EXPLAINED:
            self._choices.popitem(last=False)

    def get(self, request_id: str) -> RouteChoice | None:
        """Return the choice of a request, or None if it is not among the last 1,000."""
        return self._choices.get(request_id)

    def newest(self, count: int) -> list[RouteChoice]:
        """Return the last `count` choices, newest first."""
        return list(reversed(self._choices.values()))[:count]


_NOTHING = Found()


def _refuse(request: RouteRequest, replica: ReplicaState) -> Reason | None:
    if not replica.is_ready:
        return "not ready"
    if request.homes is not None and replica.name not in request.homes:
        return "not a home of this tenant"
    if request.prompt_tokens + request.output_tokens > replica.max_sequence_tokens:
        return "no room"
    if replica.is_stuck:
        return "stuck in a step"
    return "failed a request" if replica.is_resting else None


def _with_lease_room(request: RouteRequest, able: list[ReplicaState]) -> list[ReplicaState]:
    """Return those that can grant the leases whole, or all if none can."""
    if not request.lease_blocks:
        return able
    room = [
        replica for replica in able if replica.load.report.promisable_blocks >= request.lease_blocks
    ]
    return room or able


class _Source(NamedTuple):
    """A replica that could send the first `tokens` of a prompt; `on_device`: those that it has on
    its device, where others of its host read them."""

    tokens: int
    replica: ReplicaState
    on_device: int


def _peers(
    request: RouteRequest, replicas: Sequence[ReplicaState], found: Mapping[int, Found]
) -> list[_Source]:
    """Return the replicas that could send most of a prompt, with their tokens of it."""
    last = request.prompt_tokens - 1
    able = [
        _Source(min(have.device + have.below, last), replica, have.device)
        for replica in replicas
        if (have := found.get(replica.number))
        and (replica.is_ready or replica.may_send)
        and replica.load.report.peer_bytes_per_s
    ]
    return nlargest(PEERS_MAX, able, key=lambda one: (one.tokens, -one.replica.load.wait_s))


def _pair(
    request: RouteRequest,
    both: Sequence[ReplicaState],
    able: Sequence[ReplicaState],
    found: Mapping[int, Found],
    costs: Sequence[Cost],
    peers: Sequence[_Source],
) -> PairCost | None:
    """Return the pair that is predicted to beat each single replica of `able`; None without one.
    `both`: those that may compute the prompt or answer. O(replicas)."""
    known = max((have.device + have.below for have in found.values()), default=0)
    if request.prompt_tokens - known < APART_TOKENS_MIN:
        return None
    by_name, single = {one.name: one for one in both}, {cost.replica: cost for cost in costs}
    singles = [cost.total_s + _held_s(by_name[name], cost) for name, cost in single.items()]
    prompts, answers = [], []
    for replica in both:
        if not replica.load.report.peer_bytes_per_s:
            continue
        have = found.get(replica.number, _NOTHING)
        cost = single.get(replica.name) or _cost(request, replica, have, peers)
        if replica.role != "decode":
            own_s = cost.wait_s + cost.fill_s + cost.displaced_s
            held_s, peer = _held_s(replica, cost), (cost.peer, cost.peer_tokens)
            prompts.append(PromptSide(replica.name, own_s, held_s, *peer, replica.pool_domain))
        if replica.role != "prefill" and replica in able:
            answers.append(_answer_side(request, replica, have, cost))
    pair = best_pair(prompts, answers)
    return pair if pair and APART_FACTOR * pair.total_s < min(singles) else None


def _held_s(replica: ReplicaState, cost: Cost) -> float:
    """Return what the answers on a replica lose to a prompt."""
    rows = 0 if replica.role == "prefill" else replica.load.rows
    return min(HELD_S_MAX, rows * cost.fill_s)


def _answer_side(
    request: RouteRequest, replica: ReplicaState, found: Found, cost: Cost
) -> AnswerSide:
    here = min(found.device + found.below, request.prompt_tokens - 1)
    lacking = request.prompt_tokens - here
    rest = min(lacking, replica.block_tokens)
    return AnswerSide(
        replica.name,
        cost.wait_s,
        replica.fetch_s(lacking, ""),
        rest / replica.load.prefill_tokens_per_s,
        cost.decode_s,
        replica.fetch_s(lacking, replica.pool_domain),
        replica.pool_domain,
    )


def _cost(
    request: RouteRequest,
    replica: ReplicaState,
    found: Found,
    peers: Sequence[_Source] = (),
) -> Cost:
    load, report = replica.load, replica.load.report
    rate = load.prefill_tokens_per_s
    last = request.prompt_tokens - 1  # at least one token is computed
    device = min(found.device, last)
    below = min(found.device + found.below, last) - device
    fill_s = (request.prompt_tokens - device) / rate
    if below and report.below_bytes_per_s:
        load_s = below * replica.bytes_per_token / report.below_bytes_per_s
        fill_s = min(fill_s, load_s + (request.prompt_tokens - device - below) / rate)
    peer, peer_tokens = "", 0
    alone_s = fill_s
    for tokens, other, on_device in peers if report.peer_bytes_per_s else ():
        if other is replica or tokens <= device + below:
            continue
        fetch_s = replica.fetch_s(tokens, other.pool_domain if on_device >= tokens else "")
        rest_s = (request.prompt_tokens - tokens) / rate
        if PEER_FACTOR * fetch_s < alone_s - rest_s and fetch_s + rest_s < fill_s:
            fill_s, peer, peer_tokens = fetch_s + rest_s, other.name, tokens
    room = report.free_blocks * replica.block_tokens
    displaced = max(0, request.prompt_tokens - device - room)
    return Cost(
        replica=replica.name,
        found=found,
        wait_s=load.wait_s,
        fill_s=fill_s,
        displaced_s=replica.displaced_weight * displaced / rate,
        decode_s=request.output_tokens * report.row_s * load.rows,
        peer=peer,
        peer_tokens=peer_tokens,
    )


def _weight(request: RouteRequest, name: str) -> bytes:
    first = request.digests[0] if request.digests else (request.lease_id or request.id).encode()
    return blake2b(first + name.encode(), digest_size=8).digest()
