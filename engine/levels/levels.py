"""Levels: host memory and disk below the device's pool, as the scheduler and core see them.

It decides what is copied, stored, looked up and loaded, through a transfer engine and a storage
whose outcomes it polls. A load is another way to fill blocks than computing them: what fails is
computed. It knows tokens, blocks and slots, never a tensor, and reads no clock. One thread calls
it. The rules are in `engine/levels/README.md`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from engine.api import (
    AtRest,
    CacheGrant,
    Erase,
    Fidelity,
    LevelErased,
    LevelName,
    Namespace,
    Quota,
)
from engine.cache import BlockTable, PrefixCache
from engine.cache.tree.accounts import NamespaceAccount
from engine.cache.tree.prefix_tree import Node, upward
from engine.config import LevelsConfig
from engine.levels.copies import CopyBook
from engine.levels.copy_formats import OWN, laxest
from engine.levels.disk.disk_level import DiskLevel
from engine.levels.level_counts import LevelCounts
from engine.levels.load_choice import LoadChoice, choose_load, first_paces
from engine.levels.loads import Load, LoadPlan, Loads
from engine.levels.offloading import Offloading
from engine.levels.promises import RENEWED_PART, KeptPromises
from engine.levels.restarts.recovery import AT_START, KeptSlots, Recovery
from engine.levels.stored_prefixes import Copy
from engine.levels.window_copies import WindowCopies
from engine.moves import (
    EraseStored,
    Fetched,
    Renew,
    Storage,
    StorageOutcome,
    StorageStats,
    StoredErased,
    TransferEngine,
)
from engine.statistics import LevelStats
from engine.storage.slabs.record import place_bytes_of

CROWDED: Final = 0.6
"""The part of the pool in use from which running sequences' blocks are copied, so that a preemption
finds them on host."""
STUCK_S: Final = 10.0
"""Seconds without an outcome after which nothing waits for moves any more. Of the time between two
turns one second counts: the machine may have paused."""
WIPED_BYTES_A_TURN: Final = 4 * 2**20
"""Bytes of host memory that a turn wipes, in about a millisecond."""
ERASED_TURNS: Final = 4
"""What an erasure wipes before it returns, in bytes of as many turns."""


class Levels:
    """The levels below one device pool.

    `storage` None: there is no disk. `on_erased` is called with the id that `erase` returned when
    all of it is gone, and with what the storage has taken, if there is one.
    """

    def __init__(
        self,
        cache: PrefixCache,
        config: LevelsConfig,
        transfer: TransferEngine,
        storage: Storage | None = None,
        *,
        close_memory: Callable[[], None] = lambda: None,
        wipe: Callable[[int, int], None] = lambda slot, slot_bytes: None,
        kept: KeptSlots | None = None,
        now_s: float = 0.0,
    ) -> None:
        """`close_memory` is called when the transfer engine and the storage have been closed.
        `wipe` makes a slot's bytes zeros. `kept`: what outlives this engine of host memory; the
        copies of the engine before are taken over from it, as of `now_s`."""
        self.config = config
        self.cache = cache
        self.book = CopyBook(cache, transfer.layout, transfer.formats, wipe)
        self.on_erased: Callable[[int, LevelErased | None], None] = lambda call_id, erased: None
        self._transfer = transfer
        self._close_memory = close_memory
        self._last_id = 0
        sizes = [one.slot_bytes for one in transfer.formats]
        self.paces = first_paces(sizes, config.io_threads, transfer.bytes_per_s)
        verify, most = config.verify_host, transfer.loads_max
        self.loads = Loads(cache, self.book, storage, self.paces, self._next_id, verify, most)
        self.windows = WindowCopies(cache, self.book)
        self.offloading = Offloading(
            cache, self.book, self._next_id, self._copied, self.windows, transfer.offloads_max
        )
        self._lossy: dict[Namespace, Fidelity] = {}  # of what was loaded in this engine's life
        self.promises: KeptPromises | None = None
        self._disk: DiskLevel | None = None
        if storage is not None:
            self._store_in(storage)
        elif config.host_keeps_promises:
            accounts = self.book.accounts
            blocks = accounts.capacity_bytes // accounts.pool.formats[OWN].slot_bytes
            self._promise_in("host", blocks, lambda command: None)
        self._erasures: dict[int, Namespace] = {}  # that the storage has to answer
        self._dropping: dict[int, tuple[Namespace, LevelErased | None]] = {}
        self.counts = LevelCounts(self.loads, self.paces)
        self._now_s = self._before_s = now_s
        self._silent_s = 0.0
        self._wiped_a_turn = max(1, WIPED_BYTES_A_TURN // max(1, transfer.formats[OWN].slot_bytes))
        self._recovery = None if kept is None else self._take_over(kept)
        cache.watch(self._evicting, self._committed)

    # -- requests -----------------------------------------------------------------------------

    def has_records(self, namespace: Namespace) -> bool:
        """Return whether the disk may know prefixes of a namespace. O(1)."""
        return self._disk is not None and self._disk.storage.has_records(namespace)

    @property
    def is_disk_lost(self) -> bool:
        """Return whether the disk is off and was heard of."""
        return self._disk is not None and self._disk.is_lost

    def look(self, sequence_id: int, grant: CacheGrant, tokens: Sequence[int], here: int) -> bool:
        """Ask the disk for a longer prefix of a request's `tokens`, of which the device has `here`;
        return whether it is worth waiting for."""
        looks = None if self._disk is None else self._disk.looks
        if looks is None or not looks.is_worth_it(grant.namespace, tokens, here, self._now_s):
            return False
        self._note_grant(grant)
        looks.ask(sequence_id, grant, tokens)
        return True

    def take_looked(self) -> list[int]:
        """Return the sequences whose look has been answered since the last call."""
        return [] if self._disk is None else self._disk.looks.take_answered()

    def plan(
        self,
        grant: CacheGrant,
        tokens: Sequence[int],
        whole: int,
        compute_s: Callable[[int, int], float],
        now_s: float,
    ) -> LoadPlan | None:
        """Return what to load behind the first `whole` runs of a sequence, which the device has;
        None where no copy is known. `compute_s(start, count)`: seconds to compute tokens."""
        path = self.book.prefixes.match(grant.namespace, tokens, now_s)
        size, windows = self.cache.block_size, self.windows
        copies = path[whole : whole + windows.standing(path[whole:], whole, len(path) - whole)]
        if not copies:
            return None
        top = copies[0]
        on_host = top.slot >= 0
        form = self.book.accounts.pool.format_of(top.slot) if on_host else top.record_format
        choice = choose_load(
            [copy.level for copy in copies],
            self.paces,
            lambda blocks: compute_s(whole * size, blocks * size),
            self._blocks_min,
            now_s,
            form,
        )
        stands = windows.standing(copies, whole, choice.blocks)
        choice = LoadChoice(stands, choice.load_s, choice.compute_s, choice.why)
        self.counts.choose(top.level, choice)
        return LoadPlan(whole, copies[: choice.blocks], len(copies), choice)

    def begin_moves(self) -> None:
        """Begin the moves of new loads, where no step in flight is in their way."""
        if moves := self.loads.next_moves():
            self._transfer.submit(moves)

    def take_ended(self, now_s: float) -> list[Load]:
        """Return the loads that have ended since the last call."""
        ended = self.loads.take_ended(now_s)
        for load in ended:
            self._judge(load, now_s)
        return ended

    def committed_load(self, load: Load, table: BlockTable, since: int) -> None:
        """Note that what a load has brought, but for its first `since` runs, is in the device's
        tree: it is clean there."""
        self.offloading.loaded(self._now_s)
        node, nodes = table.node, list[Node]()
        for _ in range(table.committed - load.first - since):
            if not node.run or node.parent is None:
                break
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        for node, copy in zip(nodes, load.copies_from(since), strict=False):
            if copy.parent is not None and copy.run == node.run:
                self.book.link(copy, node)
                self.book.sync(copy, node)

    def used(self, grant: CacheGrant, table: BlockTable, now_s: float) -> None:
        """Note that a sequence has begun over a table: its leases hold on the copies it found."""
        self._note_grant(grant)
        for lease, _ in table.requested_leases:
            covered = min(table.committed, -(-lease.tokens // self.cache.block_size))
            node = table.node.ancestor(table.committed - covered)
            copy = self.book.nearest(node)
            if copy is not None and node is not None:
                self._renew(copy, node, lease.lease_id, now_s)
        if self.promises is not None and not table.requested_leases:
            self.promises.read(table.node, now_s)

    def set_quota(self, quota: Quota) -> None:
        """Apply a payer's changed quota on every level."""
        self.book.set_quota(quota)
        if self._disk is not None:
            self._disk.set_quota(quota.payer, quota)

    # -- turns --------------------------------------------------------------------------------

    def turn(self, now_s: float, running: Iterable[BlockTable], collected: int) -> None:
        """Take the outcomes that have come, and begin what is wanted next.

        `running`: the tables of running sequences, those that would be preempted first in front.
        `collected`: the last step that was collected.
        """
        passed_s = min(1.0, max(0.0, now_s - self._now_s))
        self._silent_s += passed_s
        self._before_s, self._now_s = self._now_s, now_s
        if self._recovery is not None and self._recovery.turn(now_s):
            self._go_on(self._recovery)
        outcomes = self._transfer.poll()
        if outcomes or not (self.offloading.moves or self.loads.moves or self._is_storing()):
            self._silent_s = 0.0
        self.offloading.take(self.loads.take(outcomes))
        if self._disk is not None:
            for outcome in self._disk.storage.poll():
                if not isinstance(outcome, StorageStats):
                    self._silent_s = 0.0
                self._take(self._disk, outcome)
            self._disk.notice_absence(passed_s)
        if self.promises is not None:
            self.promises.turn(now_s)
        self.book.prefixes.expire(now_s)
        self.loads.collected = collected
        moves = self.loads.next_moves()
        crowd = filter(self._may_lose_blocks, running) if self._is_crowded() else ()
        moves += self.offloading.next_moves(now_s, crowd)
        if moves:
            self._transfer.submit(moves)
        if self._disk is not None:
            self._disk.store(now_s)
        if self.book.notes is not None:
            self.book.notes.write_changed()
        self._wipe(self._wiped_a_turn)

    @property
    def is_moving(self) -> bool:
        """Return whether moves pin blocks, or promises that hold blocks on the device are about to
        move down, and still come to ends.
        """
        pins = bool(self.offloading.moves or len(self.loads))
        if self.promises is not None and self.promises.has_ends:
            pins = pins or self.offloading.has_promised or self._is_storing()
        return pins and self._silent_s <= STUCK_S

    @property
    def is_busy(self) -> bool:
        """Return whether outcomes are awaited, so that the next turn should come soon."""
        return (
            self.offloading.moves > 0
            or len(self.loads) > 0
            or self.offloading.has_promised
            or bool(self._erasures)
            or (self._disk is not None and self._disk.is_busy)
            or self._is_recovering
            or (self.book.remains.soiled > 0 and not self.book.accounts.is_closed)
            or (self.promises is not None and self.promises.renewals > 0)
        )

    # -- erasure ------------------------------------------------------------------------------

    def erase(self, call: Erase) -> tuple[LevelErased, int | None]:
        """Erase copies on every level; call it before the device's tree is erased. Return what host
        memory loses, and an id that `on_erased` gets when no later engine finds what was named;
        None where that is so now. Bytes are wiped now, or, where there are many, in the next turns.

        O(copies of the namespace), but for those of a whole namespace that have not been recovered
        yet: they are dropped in the next turns.
        """
        book, namespace = self.book, call.namespace
        pending, is_part = (0, 0), call.lease_id is not None or bool(call.tokens)
        if self._recovery is not None and not self._recovery.is_done:
            pending = self._recovery.erase(namespace, self._now_s, is_part=is_part)
            self._store_recovered()
        book.epochs[namespace] += 1
        self.loads.void(namespace)
        if not is_part:
            self._lossy.pop(namespace, None)
        if call.lease_id is None:
            tops = book.prefixes.under(namespace, call.tokens)
        else:
            for node in self.cache.lease_ends(namespace, call.lease_id):
                if (copy := book.nearest(node)) is not None:
                    book.prefixes.extend_lease(call.lease_id, copy)
            for copy in book.prefixes.ends_of(namespace, call.lease_id):
                # What was loaded since is covered on the device as its copies are here.
                if (loaded := book.nearest_node(copy)) is not None:
                    self.cache.extend_lease(call.lease_id, loaded)
            tops = book.prefixes.revoke(namespace, call.lease_id)
        blocks, size = book.host_blocks.get(namespace, 0), self.host_bytes(namespace)
        if self.promises is not None:
            self.promises.is_erasing = True
        for top in tops:
            if top.parent is not None:
                book.prefixes.remove(top)
        if self.promises is not None:
            self.promises.is_erasing = False
        book.remains.soil(namespace)
        self._wipe(ERASED_TURNS * self._wiped_a_turn)
        blocks -= book.host_blocks.get(namespace, 0)
        size -= self.host_bytes(namespace)
        erased = LevelErased("host", blocks + pending[0], size + pending[1])
        if self._disk is None and not self._is_dropping(namespace):
            return erased, None
        call_id = self._next_id()
        if self._disk is None:
            self._dropping[call_id] = namespace, None
            return erased, call_id
        self._disk.recall.erasing()
        self._erasures[call_id] = namespace
        self._disk.storage.send(EraseStored(call_id, namespace, call.lease_id, call.tokens))
        return erased, call_id

    def _is_dropping(self, namespace: Namespace) -> bool:
        """Return whether an erasure waits for copies of a namespace to be dropped."""
        return self._recovery is not None and self._recovery.is_erasing(namespace)

    # -- reports ------------------------------------------------------------------------------

    def stored_tokens(
        self, namespace: Namespace, tokens: Sequence[int], here: int, now_s: float
    ) -> tuple[tuple[LevelName, int], ...]:
        """Return the further tokens of a prompt that are known below the device, by level."""
        size = self.cache.block_size
        copies = self.book.prefixes.match(namespace, tokens, now_s)[here // size :]
        counts = Counter(copy.level for copy in copies)
        names: tuple[LevelName, ...] = ("host", "disk", "remote")
        return tuple((name, counts[name] * size) for name in names if counts[name])

    def promised_tokens(
        self, namespace: Namespace, tokens: Sequence[int], here: int, now_s: float
    ) -> int:
        """Return the tokens of a prompt behind the first `here` whose promises a level keeps."""
        if self.promises is None:
            return 0
        size = self.cache.block_size
        found = self.promises.terms_of(namespace, tokens[: len(tokens) - 1], now_s)
        return sum(terms is not None for terms in found[-(-here // size) :]) * size

    def take_changed(self) -> set[Namespace]:
        """Return the namespaces whose bytes, or records, have changed since the last call.
        O(changed)."""
        changed, self.book.changed = self.book.changed, set()
        return changed if self._disk is None else changed | self._disk.storage.take_changed()

    def namespaces(self) -> list[Namespace]:
        """Return the namespaces with copies in host memory or on disk. O(these)."""
        stored = set() if self._disk is None else self._disk.storage.namespaces()
        pending = () if self._recovery is None else self._recovery.pending
        return list(stored.union(self.book.host_blocks, pending))

    def host_bytes(self, namespace: Namespace) -> int:
        """Return the bytes of a namespace's copies in host memory. O(1)."""
        pending = 0 if self._recovery is None else self._recovery.pending.get(namespace, 0)
        return self.book.host_bytes.get(namespace, 0) + pending

    def read_fidelity(self, namespace: Namespace) -> Fidelity:
        """Return how far what a namespace has on the device may be from exact: the laxest copy that
        was loaded for it in this engine's life. O(1).
        """
        return self._lossy.get(namespace, "exact")

    def stats(self) -> tuple[LevelStats, ...]:
        """Return the statistics of host memory, and of the disk and the remote store if there are
        any. O(payers)."""
        counts, kept = self.counts, self.promises
        promised = kept.kept_by_payer if kept is not None and kept.level == "host" else Counter()
        unusable = self._transfer.unusable_bytes
        host = counts.of_host(self.book, self.offloading, promised, self._recovery, unusable)
        if self._disk is None:
            return (host,)
        disk = counts.of_disk(self._disk, len(self._erasures))
        remote = self._disk.stats.remote
        return (host, disk) if remote is None else (host, disk, counts.of_remote(remote))

    def check(self) -> None:
        """Recount the copies, and the promises that they keep. Raises InvariantViolation.
        O(copies).
        """
        self.book.check()
        if self.promises is not None:
            self.promises.check()

    def disown(self) -> None:
        """Hand nothing on to the next engine: a structure has violated its rules, so that copies
        may not be what they are noted as."""
        if self._recovery is not None:
            self._recovery.disown()

    def close(self) -> None:
        """End the transfer engine, then the storage, then their memory. Where promises end is
        told before."""
        if self.promises is not None:
            self.promises.tell_all(self._now_s)
        self._transfer.close()
        if self._disk is not None:
            self._disk.storage.close()
        if self.book.notes is not None:
            self.book.notes.write_changed(self.book.notes.waiting)
        self._close_memory()

    # -- over the end of an engine ------------------------------------------------------------

    def _take_over(self, kept: KeptSlots) -> Recovery:
        """Take over the copies that the engine before has left, the first of them at once."""
        keep = None if self.promises is None else self.promises.take_over
        found = Recovery(kept, self.book, keep, self._now_s)
        for namespace, at_rest in found.at_rest.items():
            self._let_rest(namespace, at_rest)
        found.step(self._now_s, AT_START)
        return found

    def _go_on(self, found: Recovery) -> None:
        """Answer the erasures that waited for what a turn has brought, or dropped."""
        self._store_recovered()
        for call_id, (namespace, erased) in list(self._dropping.items()):
            if not found.is_erasing(namespace):
                del self._dropping[call_id]
                self.on_erased(call_id, erased)

    def _store_recovered(self) -> None:
        """Have what was recovered stored, where a disk has opened before."""
        if not self._is_recovering and self._disk is not None:
            self._disk.store_all(self.book.prefixes, self._now_s)

    @property
    def _is_recovering(self) -> bool:
        return self._recovery is not None and not self._recovery.is_done

    def _wipe(self, most: int) -> None:
        if self.book.remains.soiled and not self.book.accounts.is_closed:
            self.book.remains.wipe_some(most)

    def _let_rest(self, namespace: Namespace, at_rest: AtRest) -> None:
        """Note how far copies of a namespace may go (rule 33)."""
        is_closed = self.book.formats.limit_rest(namespace, at_rest)
        if is_closed and self._disk is not None:
            self._disk.keep_here(namespace)

    # -- internals ----------------------------------------------------------------------------

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _store_in(self, storage: Storage) -> None:
        """Store copies on disk from now on, and let it keep promises."""
        place_bytes = place_bytes_of(self.book.formats.formats[OWN].slot_bytes)
        blocks = int(self.config.disk_gib * 2**30) // place_bytes
        kept, part = self._promise_in("disk", blocks, storage.send), blocks / self.cache.blocks
        self._disk = DiskLevel(self.book, storage, self.config, kept, self._next_id, part)
        self.offloading.is_storing = self._is_storing

    def _promise_in(
        self, level: LevelName, blocks: int, send: Callable[[Renew], None]
    ) -> KeptPromises:
        """Let the lowest durable level, of so many blocks, keep promises."""
        parts = self.cache, self.book, self.windows
        self.promises = kept = KeptPromises(*parts, level, self._next_id, send)
        kept.copy_again = lambda node: self.offloading.promised(node, ())
        self.cache.promises.keep_in(kept, blocks)
        return kept

    def _is_storing(self) -> bool:
        return self._disk is not None and self._disk.storing.has_work

    def _note_grant(self, grant: CacheGrant) -> None:
        formats, namespace = self.book.formats, grant.namespace
        before = formats.terms_of(namespace)
        formats.allow(namespace, grant.fidelity)
        self._let_rest(namespace, grant.at_rest)
        if formats.terms_of(namespace) != before:
            self.book.note_namespace(namespace)
        if self._disk is not None:
            self._disk.note_quota(grant.quota.payer or grant.payer, grant.quota)

    def _blocks_min(self, level: LevelName) -> int:
        tokens = {
            "host": self.config.host_tokens_min,
            "remote": self.config.remote.tokens_min,
        }.get(level, self.config.disk_tokens_min)
        return -(-tokens // self.cache.block_size)

    def _is_crowded(self) -> bool:
        return self.cache.moves.pinned_blocks >= CROWDED * self.cache.blocks

    def _may_lose_blocks(self, table: BlockTable) -> bool:
        """Return whether a running sequence may be preempted for another payer (rule 9). One that
        may not is not copied for a crowd: what its payer finds later must not tell of others.
        """
        payer = table.account.payer_account
        return payer.held > payer.floor_blocks

    def _take(self, disk: DiskLevel, outcome: StorageOutcome) -> None:
        if isinstance(outcome, Fetched):
            self.loads.fetched_one(outcome)
        elif not isinstance(outcome, StoredErased):
            disk.take(outcome, self._now_s)
        elif (namespace := self._erasures.pop(outcome.call_id, None)) is not None:
            erased = LevelErased(
                "disk", outcome.records, outcome.bytes, outcome.code, outcome.is_shredded
            )
            if self._is_dropping(namespace):  # host memory has something of it still
                self._dropping[outcome.call_id] = namespace, erased
            else:
                self.on_erased(outcome.call_id, erased)

    def _copied(self, copies: list[Copy]) -> None:
        if self._disk is not None:
            self._disk.storing.copied(copies, self._now_s)
        elif self.promises is not None:
            self.promises.confirm(copies, [math.inf] * len(copies), self._now_s)

    def _committed(self, table: BlockTable, last: Node, before: int) -> None:
        """Have a sequence's blocks copied that were committed since there were `before`, if they
        are promised, and promises renewed on disk that this use has moved: up to `last`, whose run
        may go beyond a tail's. O(these, leases).
        """
        if self.promises is not None:
            known: Node | None = last
            for _ in range(table.committed - before):
                if known is None or self.book.of_node(known) is not None:
                    break
                known = known.parent
            if known is not None:
                self.promises.read(known, self._now_s)
        if not table.requested_leases or table.committed == before:
            return
        node: Node | None = last
        for _ in range(table.committed - before):
            if node is None or node.promised:
                break
            node = node.parent
        if node is not None and node.promised:
            leases = tuple((lease.lease_id, lease.tokens) for lease, _ in table.requested_leases)
            self.offloading.promised(node, leases)

    def _evicting(self, account: NamespaceAccount, node: Node) -> None:
        """The device is about to evict a leaf: its copy takes over what is known of it."""
        copy = self.book.evicting(account, node)
        self.counts.uncopied += copy is None and len(node.run) == self.cache.block_size
        if copy is not None and copy.record_id and copy.terms is None and node.terms is not None:
            self._send_renew(copy)

    def _renew(self, copy: Copy, node: Node, lease_id: str, now_s: float) -> None:
        """Lengthen the terms of the copies on a leased path, here and on disk."""
        self.book.prefixes.extend_lease(lease_id, copy)
        before = copy.promise_at_s
        for above in upward(node):
            if (one := self.book.of_node(above)) is not None:
                self.book.sync(one, above)
        left = max(0.0, before - now_s)
        if copy.record_id and copy.promise_at_s - max(before, now_s) > RENEWED_PART * left:
            self._send_renew(copy, (lease_id,))
        if self._disk is not None and not copy.record_id:
            self._disk.storing.copied([copy], now_s)

    def _send_renew(self, copy: Copy, lease_ids: tuple[str, ...] = ()) -> None:
        if self.promises is not None and self._disk is not None:
            times = copy.promise_at_s, copy.limit_at_s, self._now_s
            self.promises.renew(copy.path(), *times, lease_ids, copy.promise_terms())

    def _judge(self, load: Load, now_s: float) -> None:
        """Count what a load has brought, and judge the slowest level it came from, by the last turn
        that did not find all of it: what is computed waits for the turn after it, too."""
        if load.missed is not None:
            self.counts.miss(*load.missed)
        for copy in load.copies:
            if copy.parent is not None:
                self.book.accounts.touch(copy, now_s)
        for form in load.forms() - {OWN}:
            fidelity = self.book.formats.formats[form].fidelity
            self._lossy[load.namespace] = laxest(self.read_fidelity(load.namespace), fidelity)
        if load.loaded == len(load.pieces):
            took_s = max(0.0, self._before_s - load.began_s)
            self.paces[load.level].record_load(took_s, load.plan.choice.compute_s, now_s)
