"""Offloading: which blocks are copied to host memory, and the moves that do it.

Promised prefixes are copied as they are committed, and the blocks that would be evicted next ahead
of need, each from the root on, so that no prefix lacks its head. All else stays on the device.
Nothing waits for bytes to leave: a block that was not copied in time is simply evicted.

A copy is made in the smallest format that its namespace allows. A block whose values that format
cannot hold is copied as it is.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from engine.cache import BlockTable, PrefixCache
from engine.cache.tree.accounts import NamespaceAccount
from engine.cache.tree.prefix_tree import Node, WindowBlock, upward
from engine.levels.places import RunPlaces
from engine.levels.window_copies import WindowCopies
from engine.moves import OFFLOADS_MAX, Move, Moved

CLEAN_AHEAD: Final = 256
"""Of the next blocks to be evicted, how many are to have a copy: at least what may be under way,
and at most a part of the pool."""
CLEAN_PART: Final = 1 / 8
"""The part of the pool that is copied ahead, and that offloads may pin at a time."""
PARTIAL_MAX: Final = 64
"""Promised prefixes in a row that may be copied in parts, for want of slots."""
PAUSE_S: Final = 1.0
FAILURES_MAX: Final = 2
"""After so many failed moves in a row no offload begins for a while."""
UNPACKABLE_MAX: Final = 1024
"""Nodes that are remembered as such, whose blocks are copied as they are."""
UNPROVEN_MAX: Final = OFFLOADS_MAX
PROVEN_S: Final = 600.0
"""More than UNPROVEN_MAX offloads are under way for so long after a load, or for promises: where
nothing comes back, copying all that a GPU's steps fill took a tenth of the throughput and more."""
WAITING_MAX: Final = 4096
"""Promised prefixes that may wait for their offload; the oldest is given up for the next."""


Leases = tuple[tuple[str, int], ...]
"""The ids of leases, with the tokens of each."""


@dataclass(slots=True, eq=False, repr=False)
class _Offload:
    """The moves of one path. `nodes`: from the root on, to the last of the `wanted` ones that are
    copied. `is_cut`: a block could not be packed.
    """

    account: NamespaceAccount
    nodes: Sequence[Node]
    wanted: Sequence[Node]
    slots: list[int]
    leases: Leases
    checks: list[bytes | None] = field(init=False)
    left: int = field(init=False)
    pinned: int = 0
    is_cut: bool = False
    held: BlockTable | None = None

    def __post_init__(self) -> None:
        self.checks, self.left = [None] * len(self.slots), len(self.slots)


class Offloading:
    """What is to be copied, and what is under way.

    `on_copied` is called with the copies that one offload has made, from the root on. `is_storing`
    says whether stores are under way, which will free slots.
    """

    def __init__(
        self,
        cache: PrefixCache,
        places: RunPlaces,
        next_id: Callable[[], int],
        on_copied: Callable[[list[Node]], None],
        windows: WindowCopies,
        moves_max: int,
    ) -> None:
        """`moves_max`: most offloads of one block under way at a time, once copies came back."""
        self._cache = cache
        self._places = places
        self._next_id = next_id
        self._on_copied = on_copied
        self._windows = windows
        self._moves: dict[int, tuple[_Offload, int]] = {}
        self._busy: set[Node] = set()
        self._pinned = 0
        self._promised: deque[tuple[Node, Leases]] = deque(maxlen=WAITING_MAX)
        self._moves_most = moves_max
        self._moves_max = min(UNPROVEN_MAX, moves_max)
        self._proven_until_s = float("-inf")
        self._pinned_max = max(1, int(cache.blocks * CLEAN_PART))
        self._failures = 0
        self._partial = 0
        self._unpackable: OrderedDict[Node, None] = OrderedDict()
        self._is_paused = False
        self._resume_at_s = float("-inf")
        self.is_storing: Callable[[], bool] = lambda: False
        self.offloaded = 0
        self.failed = 0

    @property
    def moves(self) -> int:
        """Return the offloads of one block that are under way."""
        return len(self._moves)

    @property
    def has_promised(self) -> bool:
        """Return whether a promised prefix waits for its offload, and not for a pause to end or for
        the storage process of an earlier engine."""
        is_waiting = self._is_paused or self._places.accounts.is_closed
        return bool(self._promised) and not is_waiting

    def promised(self, node: Node, leases: Leases) -> None:
        """Have the path to a promised node copied. `leases`: those that cover it, with the tokens
        of each.
        """
        self._promised.append((node, leases))

    def loaded(self, now_s: float) -> None:
        """Note that a copy has come back: copying is worth more time for a while."""
        self._proven_until_s = now_s + PROVEN_S

    def next_moves(self, now_s: float, running: Iterable[BlockTable]) -> list[Move]:
        """Return the moves to submit now. `running`: the tables of the sequences that would be
        preempted first, for whose blocks no more than these moves are wanted.
        """
        moves: list[Move] = []
        if self._failures >= FAILURES_MAX:
            self._failures, self._resume_at_s = 0, now_s + PAUSE_S
        self._is_paused = now_s < self._resume_at_s
        if self._is_paused:
            return moves
        is_wanted = bool(self._promised) or now_s < self._proven_until_s
        self._moves_max = self._moves_most if is_wanted else min(UNPROVEN_MAX, self._moves_most)
        if not self._promised:
            self._partial = 0
        while self._promised and self._has_room():
            node, leases = self._promised.popleft()
            begun = self._begin(node, leases, moves, now_s, is_promised=True)
            if begun is None:  # it waits for moves under way, or for a slot
                self._promised.append((node, leases))
                break
        ahead = min(max(CLEAN_AHEAD, self._moves_max), self._pinned_max)
        few = ahead - self._cache.moves.free_blocks
        if few > 0 and self._has_room():
            for victim in list(islice(self._cache.moves.next_victims(), few)):
                if not self._has_room():
                    break
                self._clean(victim, moves, now_s)
        for table in running:
            if len(self._moves) >= self._moves_max:
                break
            self._clean(table.node, moves, now_s, pins=False)
        return moves

    def take(self, outcomes: Iterable[Moved]) -> None:
        """Take the outcomes of moves that were offloads. O(these, the paths that have ended)."""
        for outcome in outcomes:
            found = self._moves.pop(outcome.move_id, None)
            if found is None:
                continue
            offload, index = found
            offload.left -= 1
            if outcome.is_done:
                offload.checks[index] = outcome.check
                self._failures = 0
            elif outcome.is_unpackable:
                self._note_unpackable(offload.wanted[index])
                offload.is_cut = True
            else:
                self.failed += 1
                self._failures += 1
            if not offload.left:
                self._finish(offload)

    # -- internals ----------------------------------------------------------------------------

    def _has_room(self) -> bool:
        return len(self._moves) < self._moves_max and (
            not self._pinned or self._pinned < self._pinned_max
        )

    def _clean(self, node: Node, moves: list[Move], now_s: float, *, pins: bool = True) -> None:
        """Have a node copied that may leave the device; of a tail, the node above it."""
        if len(node.run) < self._cache.block_size:
            if node.parent is None:
                return
            node = node.parent
        if not node.run or node in self._busy:
            return
        if not node.is_copied or self._windows.lacks(node):
            self._begin(node, (), moves, now_s, pins=pins)

    def _begin(
        self,
        node: Node,
        leases: Leases,
        moves: list[Move],
        now_s: float,
        *,
        pins: bool = True,
        is_promised: bool = False,
    ) -> bool | None:
        """Begin to copy what has no copy on the path to `node`, as far as there are slots. Return
        whether anything was begun; None where it has to wait. `pins`: no sequence pins the path.
        `leases`: those that cover it, where it `is_promised`.
        """
        account = self._cache.moves.account_of(node)
        if account is None:
            return False
        path = _path_to(node, self._cache.block_size)
        first = next((i for i, one in enumerate(path) if not one.is_copied), len(path))
        lacking = [one for one in path[:first] if self._windows.lacks(one)]
        self._extend_leases(path, first, leases)
        wanted = [*lacking, *path[first:]][: self._moves_max - len(self._moves)]
        if not wanted:
            return False
        if not self._busy.isdisjoint(wanted):
            return None
        beside = self._window_blocks(path, wanted, leases, is_running=not pins)
        used_at_s = node.last_use_s if pins and not is_promised else None
        if pins and not is_promised:
            pinned = path.index(wanted[-1]) + 1 + sum(map(len, beside))
            if self._cache.moves.spare_blocks < pinned:
                return False  # its pins would take blocks that floors of others may claim
        above = path[first - 1] if first else None
        slots = self._take_slots(account, above, wanted, beside, used_at_s)
        if not slots:
            is_closed = self._places.accounts.is_closed
            may_come = bool(self._moves) or self.is_storing() or is_closed
            return None if is_promised and may_come else False
        copied = wanted[: len(slots)]
        nodes = path[: path.index(copied[-1]) + 1]
        offload = _Offload(account, nodes, copied, slots, leases)
        self._submit(offload, beside, moves, now_s, pins=pins)
        is_partial = len(slots) < len(path) - first + len(lacking)
        if is_partial and is_promised and self._partial < PARTIAL_MAX:
            self._partial += 1  # without an end to it, two would take each other's slots for ever
            self._promised.append((node, leases))
        return True

    def _submit(
        self,
        offload: _Offload,
        beside: Sequence[Sequence[WindowBlock]],
        moves: list[Move],
        now_s: float,
        *,
        pins: bool,
    ) -> None:
        """Hold what an offload reads, and add its moves. `beside`: the window blocks of each."""
        some = [block for blocks in beside[: len(offload.slots)] for block in blocks]
        offload.held = self._cache.moves.hold(offload.account, offload.nodes, now_s, some)
        offload.pinned = len(offload.nodes) + len(some) if pins else 0
        self._pinned += offload.pinned
        items = zip(offload.slots, offload.wanted, beside, strict=False)
        for index, (slot, one, windows) in enumerate(items):
            move_id = self._next_id()
            self._moves[move_id] = (offload, index)
            self._busy.add(one)
            name = self._places.format_of(slot).name
            others = tuple(block.block for block in windows)
            move = Move(move_id, "offload", one.block, slot, format=name, beside=others)
            moves.append(move)

    def _window_blocks(
        self,
        path: Sequence[Node],
        wanted: Sequence[Node],
        leases: Leases,
        *,
        is_running: bool,
    ) -> list[list[WindowBlock]]:
        """Return the window blocks that go into the copy of each wanted node. `is_running`: the
        path is that of a sequence, which would resume at its end.
        """
        if not self._windows.is_on:
            return [[] for _ in wanted]
        most = len(path) * self._cache.block_size
        ends = [tokens for _, tokens in leases] + [most] * is_running
        indices = {node: index for index, node in enumerate(path)}
        return [self._windows.blocks_of(node, indices[node], ends) for node in wanted]

    def _take_slots(
        self,
        account: NamespaceAccount,
        above: Node | None,
        wanted: Sequence[Node],
        beside: Sequence[Sequence[WindowBlock]],
        used_at_s: float | None,
    ) -> list[int]:
        """Return slots for the first of the wanted nodes. That of the node `above` them is not
        given up for them: it would be copied and dropped for ever. `beside`: the window blocks that
        each takes with it.
        """
        kept, slots = -1 if above is None else above.slot, list[int]()
        formats, payer = self._places.formats, account.payer_account.payer
        if kept >= 0:
            self._places.hold(kept)
        for node, windows in zip(wanted, beside, strict=True):
            is_whole, is_own = bool(windows), node in self._unpackable
            form = formats.of(account.namespace, is_whole=is_whole, is_own=is_own)
            take = self._places.take_another if slots else self._places.take_slot
            slot = take(payer, account.namespace, form, used_at_s=used_at_s)
            if slot is None:
                break
            slots.append(slot)
        if kept >= 0:
            self._places.release(kept)
        return slots

    def _note_unpackable(self, node: Node) -> None:
        self._unpackable[node] = None
        if len(self._unpackable) > UNPACKABLE_MAX:
            self._unpackable.popitem(last=False)

    def _extend_leases(self, path: Sequence[Node], copied: int, leases: Leases) -> None:
        """Note leases on the last copies that they cover."""
        for lease_id, tokens in leases:
            runs = min(copied, -(-tokens // self._cache.block_size))
            if runs and path[runs - 1].parent is not None:
                self._cache.extend_lease(lease_id, path[runs - 1])

    def _finish(self, offload: _Offload) -> None:
        """Give nodes what has arrived, from the root on, up to the first failure."""
        items = zip(offload.slots, offload.checks, strict=True)
        arrived = dict(zip(offload.wanted, items, strict=True))
        found: list[tuple[Node, int, bytes]] = []
        has_above, reached = True, 0
        for node in offload.nodes:
            slot, check = arrived.get(node, (-1, None))
            has_above = has_above and node.parent is not None
            if slot >= 0:
                self._busy.discard(node)
                if has_above and check is not None:
                    found.append((node, slot, check))
                else:
                    self._places.release(slot)
            has_above = has_above and (node.is_copied or check is not None)
            reached += has_above
        made = self._give_all(found)
        if made:
            self._extend_leases(offload.nodes, reached, offload.leases)
        last = offload.nodes[-1]
        if offload.is_cut and offload.leases and last.parent is not None:
            self._promised.append((last, offload.leases))
        assert offload.held is not None, "it is held since it began"
        self._pinned -= offload.pinned
        self._cache.moves.unhold(offload.held)
        if made:
            self._on_copied(made)

    def _give_all(self, found: Sequence[tuple[Node, int, bytes]]) -> list[Node]:
        """Let nodes have the slots that an offload has filled; return those that have got theirs,
        from the root on. The last one gets its own first: what something hangs on may not be
        dropped, so that it never enters the order of those that may.
        """
        made: list[Node] = []
        for node, slot, check in reversed(found):
            if node.host is None or self._is_better(node, slot):
                self._places.give(node, slot, check)
                self.offloaded += 1
                made.append(node)
            else:
                self._places.release(slot)
        made.reverse()
        return made

    def _is_better(self, node: Node, slot: int) -> bool:
        """Return whether a filled slot has more of a node's run than the place that it has."""
        is_whole = self._places.formats.is_whole(self._places.accounts.pool.format_of(slot))
        return is_whole and not self._windows.is_whole(node)


def _path_to(node: Node, run_tokens: int) -> list[Node]:
    """Return the nodes from the first to this one, without a tail. O(depth)."""
    path = [step for step in upward(node) if len(step.run) == run_tokens]
    path.reverse()
    return path
