"""How much may still be promised to a payer, and the bound that is met first.

Promises are bounded by the payer's quota and ceiling, and by what floors and other payers' promises
leave of the pool; where a level below keeps promises, there and on the device. This module counts;
it promises nothing. `lease_manager`, `window_promises` and `block_promises` call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from engine.api import Bound, LeaseRequest, Quota
from engine.cache.blocks.block_manager import PROMISABLE
from engine.cache.tree.accounts import PayerAccount
from engine.cache.tree.fair_share import FairShare
from engine.cache.tree.leases import promised_seconds
from engine.cache.tree.prefix_tree import Node


@dataclass(slots=True)
class PromiseRoom:
    """The blocks that may still be promised to one payer.

    `total`: on the lowest level that keeps promises; `device`: those that no level below keeps yet.
    `waiting`: blocks that are covered and promised below, which the next block under them binds to
    the device if no level keeps that one. `total_bound`, `device_bound`: what limits each. Without
    levels both are the same number.
    """

    total: int
    total_bound: Bound
    device: int
    device_bound: Bound
    waiting: int = 0

    @property
    def blocks(self) -> int:
        """Return how many blocks may be promised on the device now."""
        return min(self.total, self.device - self.waiting)

    @property
    def bound(self) -> Bound:
        """Return the bound that is met first."""
        return self.total_bound if self.total <= self.device - self.waiting else self.device_bound

    def keep(self, blocks: int) -> None:
        """Leave room for `blocks` that were promised to the taker before, also where the bounds
        leave less now.
        """
        self.total = max(self.total, blocks)
        self.device = max(self.device, blocks)

    def take(self) -> bool:
        """Take room for one more block on the device, and for those that wait; return whether there
        was any.
        """
        if self.blocks < 1:
            return False
        self.total -= 1
        self.device -= 1 + self.waiting
        self.waiting = 0
        return True


NO_ROOM_ASKED = PromiseRoom(0, "", 0, "")
"""For requests without leases."""


def cover(known: Sequence[Node], covered: int, wanted: int, room: PromiseRoom) -> tuple[int, int]:
    """Cover blocks with a promise, from number `covered` to `wanted`, as far as there is room.

    `known`: those in the tree. Returns how many blocks are covered then, and how many of these are
    not computed yet. Takes the room. O(blocks).
    """
    reserved = 0
    while covered < wanted:
        node = known[covered] if covered < len(known) else None
        if node is not None and node.promised:
            room.waiting += not node.is_bound
        elif room.take():
            reserved += node is None
        else:
            break
        covered += 1
    return covered, reserved


def asks_promise(leases: Sequence[LeaseRequest]) -> bool:
    """Return whether any of these leases promises anything."""
    return any(promised_seconds(lease.retention) > 0 for lease in leases)


def room_of(
    fair_share: FairShare, payer_account: PayerAccount | None, quota: Quota, *, is_kept_below: bool
) -> PromiseRoom:
    """Return the room for promises to a payer, None for one without an account, and the bounds that
    limit it; of several equal bounds the payer's own first. Cost: see `FairShare`.
    """
    scale, ceiling = fair_share.scale, quota.ceiling_blocks
    mine = (0, 0)
    if payer_account is not None:
        mine = payer_account.promised, payer_account.promised_total
    on_device = fair_share.promisable - fair_share.claimed_by_others(payer_account)
    others_below = fair_share.claimed_below_by_others(payer_account)
    own = quota.promised_on_device_max if is_kept_below else quota.promised_blocks_max
    device = _least(
        mine[0],
        (own, "quota"),
        (ceiling and int(ceiling * PROMISABLE), "ceiling"),
        (on_device, "pool"),
    )
    if not is_kept_below:
        return PromiseRoom(*device, *device)
    total = _least(
        mine[1],
        (quota.promised_blocks_max, "quota"),
        (ceiling and int(int(ceiling * scale) * PROMISABLE), "ceiling"),
        (fair_share.promisable_below - others_below, "pool"),
    )
    return PromiseRoom(*total, *device)


def _least(promised: int, *bounds: tuple[int | None, Bound]) -> tuple[int, Bound]:
    """Return the blocks that the narrowest of these bounds leaves, and its name."""
    rooms = [(most - promised, name) for most, name in bounds if most is not None]
    return min(rooms, key=itemgetter(0))
