"""The places of runs below the device: slots of host memory, records of the disk.

The runs are nodes of the cache's trees, with their terms, leases and uses. This module gives them
places and takes places away, and holds the slots that moves read or fill. It moves no bytes and
decides nothing. Only this folder calls it.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from engine.api import FIDELITIES, LevelName, Namespace, Payer, Quota
from engine.cache import PrefixCache
from engine.cache.tree.places import HostPlace, RecordPlace
from engine.cache.tree.prefix_tree import Node, all_blocks, whole_runs
from engine.errors import InvariantViolation
from engine.levels.copy_formats import CopyFormats
from engine.levels.host.accounts import HostAccounts
from engine.levels.host.copy_notes import CopyNotes
from engine.levels.host.slot_pool import SlotPool
from engine.levels.host.slot_remains import SlotRemains
from engine.moves import RecalledRun, RecordId, SlotFormat, SlotLayout, StoredRun

RECORDS_ALONE_MAX: Final = 200_000
"""Runs that are only on disk and known here; beyond it the least recently used are forgotten: their
records stay, and are known again by the next look.
"""


class RunPlaces:
    """All places below one device pool."""

    def __init__(
        self,
        cache: PrefixCache,
        layout: SlotLayout,
        formats: Sequence[SlotFormat],
        wipe: Callable[[int, int], None] = lambda slot, slot_bytes: None,
    ) -> None:
        """`wipe` makes the bytes of a free slot zeros."""
        self.run_tokens = cache.block_size
        self.formats = CopyFormats(formats)
        """What copies are made in, and what each namespace allows."""
        self.accounts = HostAccounts(SlotPool(layout, formats), self._dropped, self._emptied)
        self.remains = SlotRemains(self.accounts, wipe)
        """Whose bytes lie in which slots."""
        self.notes: CopyNotes | None = None
        """What the next engine will know; None where host memory ends with this one."""
        self.epochs: Counter[Namespace] = Counter()
        """Grows with each erasure in a namespace; what began under another epoch brings nothing."""
        self.host_blocks: Counter[Namespace] = Counter()
        self.host_bytes: Counter[Namespace] = Counter()
        self.changed: set[Namespace] = set()
        """The namespaces where these two have changed."""
        self.expired_total = 0
        self.now_s = 0.0
        self.on_changed: Callable[[Node], None] = lambda node: None
        """Called with each node that has got or lost a place."""
        self._cache = cache
        self._held: Counter[int] = Counter()
        self._records_alone: OrderedDict[Node, None] = OrderedDict()

    # -- queries ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Node]:
        """Iterate over every node with a place below, children before parents. O(nodes)."""
        for root in self._cache.roots():
            yield from (node for node in root.subtree() if node.is_copied)

    def match(self, namespace: Namespace, tokens: Sequence[int], now_s: float) -> list[Node]:
        """Return the runs below of the longest leading part of `tokens`, leaving one token at
        least. O(runs matched).
        """
        root = self._cache.tree_root(namespace)
        if root is None:
            return []
        path = whole_runs(root, islice(tokens, max(0, len(tokens) - 1)), self.run_tokens)
        while path and not path[-1].is_copied:
            path.pop()
        over = [i for i, node in enumerate(path) if node.terms and node.terms.limit_at_s <= now_s]
        return path[: over[0]] if over else path

    # -- places -------------------------------------------------------------------------------

    def know(
        self,
        namespace: Namespace,
        payer: Payer,
        parent: Node | None,
        tokens: Sequence[int],
        run: StoredRun | RecalledRun,
        form: int,
    ) -> Node:
        """Return the node below `parent` with these tokens, of which the disk has told a record of
        a format; its limit only ever lengthens by that. O(log nodes).
        """
        node = self._cache.add_run(namespace, payer, parent, tuple(tokens))
        is_new = node.block < 0 and not node.is_copied
        self.set_record(node, run.record_id, form)
        assert node.record is not None, "it has just got one"
        node.record.is_remote = run.level == "remote"
        limit_at_s = math.inf if run.limit_s is None else self.now_s + run.limit_s
        self._cache.promises.extend_limit(node, limit_at_s, self.now_s, is_new=is_new)
        return node

    def give(self, node: Node, slot: int, check: bytes = b"") -> None:
        """Let a node have a held slot, full of its bytes; the hold becomes the node's. One that it
        had before is given up. O(log nodes).
        """
        was_copied = node.is_copied
        self._take_back(node)
        self._place(node, slot, check)
        self._count_copied(node, was_copied=was_copied)
        if self.notes is not None:
            self.notes.given(node)

    def recover(self, node: Node, slot: int, check: bytes) -> None:
        """Let a node have a claimed slot, in which an engine that has ended has left its bytes.
        O(log nodes).
        """
        was_copied = node.is_copied
        self._place(node, slot, check)
        self._count_copied(node, was_copied=was_copied)
        assert node.host is not None, "it has just got one"
        node.host.is_unverified = True

    def set_record(self, node: Node, record_id: RecordId, form: int) -> None:
        """Note a node's record on disk, and its format. O(log nodes)."""
        if node.record is None or node.record.record_id != record_id:
            was_copied = node.is_copied
            node.record = RecordPlace(record_id, form, self.formats.is_whole(form))
            _touch(node)
            self._count_copied(node, was_copied=was_copied)
        self.accounts.update(node)
        self._note_record_alone(node)
        self._windows_lost(node)

    def lose_record(self, node: Node) -> None:
        """Take note that a node's record is gone. Without any place below it leaves that part of
        the tree, with all that is below it. O(log nodes), or O(these).
        """
        if node.host is None:
            self.drop(node)
            return
        node.record = None
        self.accounts.update(node)
        self._windows_lost(node)
        self.on_changed(node)

    def strike(self, node: Node, slot: int) -> None:
        """Give up the place from which a move over `slot` failed: host memory's if it lies there,
        else the disk's.
        """
        if node.parent is None or node.slot not in (slot, -1):
            return  # another move has brought it meanwhile
        if node.slot != slot:
            if node.record is not None:
                self.lose_record(node)
        elif node.record is None:
            self.drop(node)
        else:
            self._take_back(node)
            self._note_record_alone(node)
            self._windows_lost(node)
            self.on_changed(node)

    def drop(self, top: Node) -> None:
        """Take all places below from a node and those below it: their promises are bound to the
        device, or lost. Nodes without any place leave the tree. O(these).
        """
        copied, stack = [], [top]
        while stack:
            node = stack.pop()
            copied.append(node)
            stack.extend(child for child in node.children.values() if child.is_copied)
        for node in reversed(copied):
            self.clear(node)
            for block in all_blocks(node):
                self._cache.promises.place_lost(block, self.now_s)
            self._cache.remove_placeless(node)

    def clear(self, node: Node) -> None:
        """Take all places below from a node, which are dropped, or which leaves the tree.
        O(log nodes).
        """
        was_copied = node.is_copied
        self._take_back(node)
        node.record = None
        _touch(node)
        self._records_alone.pop(node, None)
        self._count_copied(node, was_copied=was_copied)
        self.on_changed(node)

    # -- slots --------------------------------------------------------------------------------

    def take_slot(
        self,
        payer: Payer,
        namespace: Namespace,
        form: int,
        quota: Quota | None = None,
        used_at_s: float | None = None,
    ) -> int | None:
        """Return a slot of a format held for a move that fills it with bytes of a namespace, or
        None without room; see `HostAccounts.take`. O(payers).
        """
        self._set_share(payer, quota)
        return self.take_another(payer, namespace, form, used_at_s)

    def take_another(
        self, payer: Payer, namespace: Namespace, form: int, used_at_s: float | None = None
    ) -> int | None:
        """Return a further slot as `take_slot` does, of a payer whose share it has just set."""
        slot = self.accounts.take(payer, form, used_at_s)
        if slot is None:
            self.accounts.forget_if_idle(payer)
            return None
        self._held[slot] += 1
        self.remains.taken(slot, namespace)
        return slot

    def format_of(self, slot: int) -> SlotFormat:
        """Return the format of a slot in use. O(1)."""
        return self.formats.formats[self.accounts.pool.format_of(slot)]

    def claim(self, owners: Mapping[int, tuple[Payer, Namespace, int]]) -> None:
        """Hold free slots that have bytes of runs to `recover`, by their payers, namespaces and
        formats. O(slots).
        """
        self.accounts.claim({slot: (payer, form) for slot, (payer, _, form) in owners.items()})
        for slot, (_, namespace, _) in owners.items():
            self._held[slot] += 1
            self.remains.taken(slot, namespace)

    def hold(self, slot: int) -> None:
        """Hold a slot for a move or a store that reads it."""
        self.accounts.hold(slot)
        self._held[slot] += 1

    def release(self, slot: int) -> None:
        """Release a slot that a move or a store has held."""
        self._unhold(slot)
        self.accounts.release(slot)

    def set_quota(self, quota: Quota) -> None:
        """Apply a payer's changed quota."""
        self._set_share(quota.payer, quota)
        self.accounts.forget_if_idle(quota.payer)

    def note_namespace(self, namespace: Namespace) -> None:
        """Have all slots of a namespace noted anew. O(its nodes)."""
        root = self._cache.tree_root(namespace)
        if self.notes is not None and root is not None:
            for node in root.subtree():
                self.notes.changed(node)

    def check(self) -> None:
        """Recount. Raises InvariantViolation. O(nodes)."""
        nodes = list(self)
        self.accounts.check(nodes, dict(self._held))
        self.remains.check()
        if self.notes is not None:
            self.notes.check(nodes)
        sizes: Counter[Namespace] = Counter()
        own, formats = self.formats, self.formats.formats
        for node in nodes:
            allowed = FIDELITIES.index(own.allowed(node.namespace))
            for place in node.places:
                form = formats[place.form]
                if place.has_windows != own.is_whole(place.form):
                    raise InvariantViolation(f"a copy of format {form.name!r}: {place}")
                if not own.is_own(place.form) and FIDELITIES.index(form.fidelity) > allowed:
                    raise InvariantViolation(
                        f"a copy of format {form.name!r} in a namespace that allows"
                        f" {own.allowed(node.namespace)}"
                    )
            if node.host is not None:
                sizes[node.namespace] += formats[node.host.form].slot_bytes
                if self.accounts.pool.format_of(node.host.slot) != node.host.form:
                    raise InvariantViolation(f"slot {node.host.slot} has another format")
        if sizes != self.host_bytes:
            raise InvariantViolation(f"bytes by namespace {self.host_bytes}, recounted: {sizes}")

    # -- internals ----------------------------------------------------------------------------

    def _set_share(self, payer: Payer, quota: Quota | None) -> None:
        account = self._cache.payer_account(payer)
        floor = 0 if quota is None else quota.floor_blocks
        if account is not None:
            quota = quota or account.quota
            floor = min(quota.floor_blocks, account.floor_blocks)
        if quota is None:
            return  # unknown by now: what was last set holds
        per_block = self.accounts.capacity_bytes / self._cache.blocks
        ceiling = None if quota.ceiling_blocks is None else int(quota.ceiling_blocks * per_block)
        self.accounts.set_share(payer, int(floor * per_block), ceiling, quota.weight)

    def _place(self, node: Node, slot: int, check: bytes) -> None:
        self._unhold(slot)
        form = self.accounts.pool.format_of(slot)
        self.accounts.give(node, HostPlace(slot, form, self.formats.is_whole(form), check))
        self.remains.filled(slot, node.namespace)
        self._count_host(node, 1, self.accounts.pool.bytes_of(slot))
        self._records_alone.pop(node, None)
        _touch(node)
        self.on_changed(node)

    def _unhold(self, slot: int) -> None:
        left = self._held[slot] - 1
        if left:
            self._held[slot] = left
        else:
            self._held.pop(slot)

    def _take_back(self, node: Node) -> None:
        if node.host is not None:
            self._count_host(node, -1, -self.accounts.pool.bytes_of(node.host.slot))
            self.accounts.take_back(node)

    def _count_host(self, node: Node, blocks: int, size: int) -> None:
        namespace = node.namespace
        self.changed.add(namespace)
        self.host_blocks[namespace] += blocks
        self.host_bytes[namespace] += size
        if not self.host_blocks[namespace]:
            del self.host_blocks[namespace], self.host_bytes[namespace]

    def _count_copied(self, node: Node, *, was_copied: bool) -> None:
        """Keep the parent's count of children below the device, which it is not dropped before."""
        parent = node.parent
        if parent is not None and node.is_copied != was_copied:
            parent.copied_children += 1 if node.is_copied else -1
            self.accounts.update(parent)

    def _note_record_alone(self, node: Node) -> None:
        if node.host is not None or node.record is None:
            return
        self._records_alone[node] = None
        self._records_alone.move_to_end(node)
        for _ in range(2):
            if len(self._records_alone) <= RECORDS_ALONE_MAX:
                break
            oldest = next(iter(self._records_alone))
            if oldest.copied_children or oldest.keeps_promise:
                self._records_alone.move_to_end(oldest)
            else:
                self.drop(oldest)

    def _dropped(self, node: Node, size: int) -> None:
        """A node has lost its slot of so many bytes for room."""
        self._count_host(node, -1, -size)
        if node.record is None:
            self._count_copied(node, was_copied=True)
            self.drop(node)
        else:
            self._note_record_alone(node)
            self._windows_lost(node)
            self.on_changed(node)

    def _windows_lost(self, node: Node) -> None:
        """End what a node's places kept of its window blocks, if none of them has these."""
        if node.beside is None and node.away is None:
            return
        if not any(place.has_windows for place in node.places):
            for block in all_blocks(node)[1:]:
                self._cache.promises.place_lost(block, self.now_s)

    def _emptied(self, node: Node, slot: int) -> None:
        _touch(node)
        if self.notes is not None:
            self.notes.emptied(node, slot)


def _touch(node: Node) -> None:
    assert node.tree is not None, "it is, or was, in a tree"
    node.tree.touch(node)


def level_of(node: Node) -> LevelName:
    """Return the nearest level below the device on which a node is known to be."""
    if node.host is not None:
        return "host"
    return "remote" if node.record is not None and node.record.is_remote else "disk"
