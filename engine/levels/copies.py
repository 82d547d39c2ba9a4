"""The book of copies: the tree of copies and the slots of host memory, kept in step.

It knows which copy stands for which node of the device's tree, and applies a node's limits,
promises and leases to its copy. It moves nothing and decides nothing. Only this folder calls it.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from engine.api import FIDELITIES, Namespace, Payer, Quota
from engine.cache import PrefixCache
from engine.cache.tree.accounts import NamespaceAccount
from engine.cache.tree.prefix_tree import Node, upward
from engine.errors import InvariantViolation
from engine.levels.copy_formats import CopyFormats
from engine.levels.host.accounts import HostAccounts
from engine.levels.host.copy_notes import CopyNotes
from engine.levels.host.slot_pool import SlotPool
from engine.levels.host.slot_remains import SlotRemains
from engine.levels.stored_prefixes import Copy, StoredPrefixes
from engine.moves import RecalledRun, SlotFormat, SlotLayout, StoredRun

DISK_ONLY_MAX: Final = 200_000
"""Copies that are only on disk and known here; beyond it the least recently used are pruned: their
records stay, and are imported again by the next look.
"""


class CopyBook:
    """All copies below the device.

    `epochs`: grows with each erasure in a namespace; what began under another epoch brings nothing.
    `host_blocks`, `host_bytes`: copies in host memory by namespace; `changed`: the namespaces where
    these have changed. `formats`: what copies are made in, and what each namespace allows. `notes`:
    what the next engine will know of them, None where host memory ends with this one. `remains`:
    whose bytes lie in which slots. `on_removed` is called with each copy that leaves the tree,
    while its node is still known; `on_lesser` with each that has lost its slot, or its record, and
    stays.
    """

    def __init__(
        self,
        cache: PrefixCache,
        layout: SlotLayout,
        formats: Sequence[SlotFormat],
        wipe: Callable[[int, int], None] = lambda slot, slot_bytes: None,
    ) -> None:
        """`wipe` makes the bytes of a free slot zeros."""
        self.prefixes = StoredPrefixes(
            cache.block_size,
            self._removed,
            self._changed,
            self.terms_changed,
            self._leases_changed,
        )
        self.formats = CopyFormats(formats)
        self.accounts = HostAccounts(SlotPool(layout, formats), self._dropped, self._emptied)
        self.remains = SlotRemains(self.accounts, wipe)
        self.notes: CopyNotes | None = None
        self.epochs: Counter[Namespace] = Counter()
        self.host_blocks: Counter[Namespace] = Counter()
        self.host_bytes: Counter[Namespace] = Counter()
        self.changed: set[Namespace] = set()
        self._cache = cache
        self._by_block: dict[int, Copy] = {}
        self._held: Counter[int] = Counter()
        self._disk_only: OrderedDict[Copy, None] = OrderedDict()
        self.on_removed: Callable[[Copy], None] = lambda copy: None
        self.on_lesser: Callable[[Copy], None] = lambda copy: None

    # -- copies -------------------------------------------------------------------------------

    def of_node(self, node: Node) -> Copy | None:
        """Return the copy that is known to stand for a node of the device's tree, or None. O(1)."""
        copy = self._by_block.get(node.block)
        if copy is None or copy.node is not node or copy.parent is None:
            return None
        return copy

    def link(self, copy: Copy, node: Node) -> None:
        """Note that a copy has the tokens of a node. O(1)."""
        copy.node = node
        self._by_block[node.block] = copy

    def find_node(self, copy: Copy) -> Node | None:
        """Return the device's node with the tokens of a copy, linked to it; None if the device has
        none, or none with those of the copy before. O(1).
        """
        above = copy.parent
        assert above is not None, "a copy in the tree has a parent"
        parent = self._cache.tree_root(copy.namespace) if above.is_root else above.node
        if parent is None or (not above.is_root and parent.parent is None):
            return None
        node = parent.children.get(copy.run)
        if node is not None and self.of_node(node) is None:
            self.link(copy, node)
        return node

    def know(
        self,
        parent: Copy,
        tokens: Sequence[int],
        run: StoredRun | RecalledRun,
        form: int,
        payer: Payer,
        now_s: float,
    ) -> Copy:
        """Return the copy below `parent` with these tokens, of which the disk has told a record of
        a format; its limit and promise only ever lengthen by that. O(log copies).
        """
        own, limit_s = tuple(tokens), math.inf if run.limit_s is None else run.limit_s
        copy = parent.children.get(own)
        if copy is None:
            copy = self.prefixes.add(parent, own, payer, now_s)
            self.prefixes.set_limit(copy, now_s + limit_s)
        elif copy.limit_at_s < now_s + limit_s:
            self.prefixes.set_limit(copy, now_s + limit_s)
        copy.is_remote = run.level == "remote"
        self.set_record(copy, run.record_id, form)
        if run.promise_s > 0:
            copy.promise_at_s = max(copy.promise_at_s, now_s + run.promise_s)
        self.find_node(copy)
        return copy

    def give(self, copy: Copy, slot: int, check: bytes = b"") -> None:
        """Let a copy have a held slot, full of its bytes; the hold becomes the copy's.
        O(log copies).
        """
        self._place(copy, slot, check)
        if self.notes is not None:
            self.notes.given(copy)

    def exchange(self, copy: Copy, slot: int, check: bytes) -> None:
        """Let a copy have another held slot than its own, full of more of its run's bytes.
        O(log copies).
        """
        self._take_back(copy)
        self.give(copy, slot, check)

    def recover(self, copy: Copy, slot: int, check: bytes) -> None:
        """Let a copy have a claimed slot, in which an engine that has ended has left its bytes.
        O(log copies).
        """
        self._place(copy, slot, check)
        copy.is_unverified = True

    def set_record(self, copy: Copy, record_id: int, form: int = 0) -> None:
        """Note a copy's record on disk, and its format; 0: it has none. O(log copies)."""
        if copy.record_id != record_id:
            copy.kept_until_s = copy.renew_at_s = -math.inf
        copy.record_id, copy.record_format = record_id, form
        self.accounts.update(copy)
        self._note_disk_only(copy)
        if copy.window_terms and copy.parent is not None:
            self.on_lesser(copy)

    def strike(self, copy: Copy, slot: int) -> None:
        """Give up the copy from which a move over `slot` failed: host memory's if it lies there,
        else the disk's. Without any copy left it leaves the tree with all below it.
        """
        if copy.parent is None or copy.slot not in (slot, -1):
            return  # another move has brought it meanwhile
        if copy.slot == slot:
            self._take_back(copy)
            self._note_disk_only(copy)
        else:
            self.set_record(copy, 0)
        if copy.slot < 0 and not copy.record_id:
            self.prefixes.remove(copy)
        elif copy.window_terms:
            self.on_lesser(copy)

    def sync(self, copy: Copy, node: Node) -> None:
        """Apply a node's terms to its copy: limits and promises only ever lengthen."""
        terms = node.terms
        limit_at_s = math.inf if terms is None else terms.limit_at_s
        if copy.limit_at_s < limit_at_s:
            self.prefixes.set_limit(copy, limit_at_s)
        is_promised = terms is not None and (node.promised or terms.below_class is not None)
        if is_promised and terms is not None and copy.promise_at_s < terms.promise_at_s:
            copy.promise_at_s = terms.promise_at_s
            self.terms_changed(copy)
        for lease_id in node.ending_leases:
            self.prefixes.extend_lease(lease_id, copy)

    def terms_changed(self, copy: Copy) -> None:
        """Have a copy noted anew, with its terms. O(1)."""
        if self.notes is not None:
            self.notes.changed(copy)

    def note_promise(self, copy: Copy) -> None:
        """Have the promise noted that a copy keeps: reads may have moved its end."""
        if copy.terms is not None and copy.terms.promise_at_s > copy.promise_at_s:
            copy.promise_at_s = copy.terms.promise_at_s
            self.terms_changed(copy)

    def first_sync(self, copy: Copy, node: Node) -> None:
        """Apply a node's terms to the copy just made of it."""
        if node.terms is not None:
            self.prefixes.set_limit(copy, node.terms.limit_at_s)
        self.sync(copy, node)

    def evicting(self, account: NamespaceAccount, node: Node) -> Copy | None:
        """Let the copy of a node that is about to be evicted take over its terms and its use.
        Return it, or None where there is none. O(log copies).
        """
        copy = self.of_node(node)
        if copy is None:
            return None
        self.sync(copy, node)
        del self._by_block[node.block]
        copy.node = None
        if node.last_use_s > copy.last_use_s:
            hits = copy.hits + bool(node.hits)
            self.accounts.touch(copy, node.last_use_s)
            copy.hits = max(copy.hits - 1, hits)
        return copy

    def nearest(self, node: Node | None) -> Copy | None:
        """Return the copy of the node or of its nearest ancestor that has one. O(depth)."""
        found = () if node is None else map(self.of_node, upward(node))
        return next(filter(None, found), None)

    def nearest_node(self, copy: Copy) -> Node | None:
        """Return the node of the copy or of its nearest ancestor whose block the device has.
        O(depth).
        """
        for above in upward(copy):
            if above.node is not None and above.node.parent is not None:
                return above.node
        return None

    def child(self, parent: Copy, node: Node) -> Copy | None:
        """Return the copy of `node` below `parent`, linked to it, or None. O(1)."""
        copy = parent.children.get(node.run)
        if copy is not None and copy.node is not node:
            self.link(copy, node)
            self.sync(copy, node)
        return copy

    def note_namespace(self, namespace: Namespace) -> None:
        """Have all copies of a namespace noted anew. O(these)."""
        if self.notes is not None and self.prefixes.has(namespace):
            for copy in self.prefixes.root(namespace).subtree():
                self.notes.changed(copy)

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
        """Hold free slots that have bytes of copies to `recover`, by their payers, namespaces and
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

    def check(self) -> None:
        """Recount. Raises InvariantViolation. O(copies)."""
        self.prefixes.check()
        self.accounts.check(self.prefixes, dict(self._held))
        self._check_host()
        self.remains.check()
        if self.notes is not None:
            self.notes.check(self.prefixes)

    def _check_host(self) -> None:
        sizes: Counter[Namespace] = Counter()
        own, formats = self.formats, self.formats.formats
        for copy in self.prefixes:
            allowed = FIDELITIES.index(own.allowed(copy.namespace))
            used = [copy.record_format] if copy.record_id else []
            if copy.slot >= 0:
                used.append(self.accounts.pool.format_of(copy.slot))
                sizes[copy.namespace] += formats[used[-1]].slot_bytes
            for form in used:
                if not own.is_own(form) and FIDELITIES.index(formats[form].fidelity) > allowed:
                    raise InvariantViolation(
                        f"a copy of format {formats[form].name!r} in a namespace that allows"
                        f" {own.allowed(copy.namespace)}"
                    )
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

    def _place(self, copy: Copy, slot: int, check: bytes) -> None:
        self._unhold(slot)
        self.accounts.give(copy, slot, check)
        self.remains.filled(slot, copy.namespace)
        copy.is_unverified = False
        self._count_host(copy, 1, self.accounts.pool.bytes_of(slot))
        self._disk_only.pop(copy, None)

    def _unhold(self, slot: int) -> None:
        left = self._held[slot] - 1
        if left:
            self._held[slot] = left
        else:
            self._held.pop(slot)

    def _take_back(self, copy: Copy) -> None:
        if copy.slot >= 0:
            self._count_host(copy, -1, -self.accounts.pool.bytes_of(copy.slot))
        self.accounts.take_back(copy)

    def _count_host(self, copy: Copy, blocks: int, size: int) -> None:
        namespace = copy.namespace
        self.changed.add(namespace)
        self.host_blocks[namespace] += blocks
        self.host_bytes[namespace] += size
        if not self.host_blocks[namespace]:
            del self.host_blocks[namespace], self.host_bytes[namespace]

    def _note_disk_only(self, copy: Copy) -> None:
        if copy.parent is None or copy.slot >= 0 or not copy.record_id:
            return
        self._disk_only[copy] = None
        self._disk_only.move_to_end(copy)
        for _ in range(2):
            if len(self._disk_only) <= DISK_ONLY_MAX:
                break
            oldest = next(iter(self._disk_only))
            if oldest.children or oldest.keeps_promise:
                self._disk_only.move_to_end(oldest)
            else:
                self.prefixes.remove(oldest)

    def _dropped(self, copy: Copy, size: int) -> None:
        """A copy has lost its slot of so many bytes for room."""
        self._count_host(copy, -1, -size)
        if copy.record_id:
            self._note_disk_only(copy)
            if copy.window_terms:
                self.on_lesser(copy)
        else:
            self.prefixes.remove(copy)

    def _removed(self, copy: Copy) -> None:
        self.on_removed(copy)
        self._take_back(copy)
        self._disk_only.pop(copy, None)
        node = copy.node
        if node is not None and self._by_block.get(node.block) is copy:
            del self._by_block[node.block]

    def _emptied(self, copy: Copy, slot: int) -> None:
        if self.notes is not None:
            self.notes.emptied(copy, slot)

    def _leases_changed(self, copy: Copy) -> None:
        if self.notes is not None:
            self.notes.leases_changed(copy)

    def _changed(self, copy: Copy) -> None:
        if not copy.is_root:
            self.accounts.update(copy)
