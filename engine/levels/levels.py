"""Levels: host memory and disk below the device's pool, as the scheduler and core see them.

It decides what is copied, stored, looked up and loaded, through a transfer engine and a storage
whose outcomes it polls. A load is another way to fill blocks than computing them: whatever fails is
computed. It knows tokens, blocks and slots, never a tensor, and reads no clock. One thread calls
it. The rules are in `engine/levels/README.md`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from engine.api import (
    CacheGrant,
    Erase,
    Fidelity,
    LevelErased,
    LevelName,
    LevelStats,
    Namespace,
    Payer,
    PayerBytes,
    Quota,
)
from engine.cache import BlockTable, PrefixCache
from engine.cache.accounts import NamespaceAccount
from engine.cache.prefix_tree import Node
from engine.config import LevelsConfig
from engine.levels.copies import CopyBook
from engine.levels.load_choice import LevelPace, LoadChoice, choose_load
from engine.levels.loads import Load, Loads
from engine.levels.offloading import Offloading
from engine.levels.promises import RENEWED_PART, KeptPromises
from engine.levels.stored_prefixes import Copy
from engine.levels.storing import Storing
from engine.moves import (
    EraseStored,
    Fetched,
    Look,
    Looked,
    Renewed,
    SetStoredQuotas,
    Storage,
    StorageOutcome,
    StorageStats,
    Stored,
    StoredErased,
    TransferEngine,
)
from engine.storage.record import place_bytes_of

CROWDED: Final = 0.6
"""The part of the pool in use from which running sequences' blocks are copied, so that a preemption
finds them on host."""
STUCK_S: Final = 10.0
"""Seconds without an outcome after which nothing waits for moves any more. Of the time between two
turns one second counts: the machine may have paused."""
AWAY_S: Final = 60.0
"""Seconds without a disk after which the promises that it keeps count as lost."""
FIDELITIES: Final[tuple[Fidelity, ...]] = ("exact", "near", "rough")


class LoadPlan:
    """The copies that a request could load, and how much of them is worth it."""

    __slots__ = ("choice", "copies", "first")

    def __init__(self, first: int, copies: Sequence[Copy], choice: LoadChoice) -> None:
        self.first = first
        self.copies = copies
        self.choice = choice


class Levels:
    """The levels below one device pool.

    `storage` None: there is no disk. `on_erased` is called with the id that `erase` returned and
    with what the storage has taken, when it has.
    """

    def __init__(
        self,
        cache: PrefixCache,
        config: LevelsConfig,
        transfer: TransferEngine,
        storage: Storage | None = None,
        *,
        close_memory: Callable[[], None] = lambda: None,
    ) -> None:
        """`close_memory` is called when the transfer engine and the storage have been closed."""
        self.config = config
        self.cache = cache
        self.book = CopyBook(cache, transfer.slots)
        self.on_erased: Callable[[int, LevelErased], None] = lambda call_id, erased: None
        self._transfer = transfer
        self._storage = storage
        self._close_memory = close_memory
        self._last_id = 0
        self.paces: dict[LevelName, LevelPace] = {
            "host": LevelPace("host", transfer.slot_bytes),
            "disk": LevelPace("disk", transfer.slot_bytes, config.io_threads),
        }
        self.loads = Loads(cache, self.book, storage, self.paces, self._next_id, config.verify_host)
        self.offloading = Offloading(cache, self.book, self._next_id, self._copied)
        self._fidelity: dict[Namespace, Fidelity] = {}
        self._never_at_rest: set[Namespace] = set()
        self._storing: Storing | None = None
        self.promises = self._promises_below()
        if storage is not None:
            self._storing = Storing(
                self.book,
                storage,
                self._next_id,
                self._fidelity_of,
                self._never_at_rest,
                config.disk_tokens_min,
                self._confirmed,
            )
            self.offloading.is_storing = self._is_storing
        self._looks: dict[int, tuple[int, CacheGrant, Sequence[int], int]] = {}
        self._looked: list[int] = []
        self._erasures: set[int] = set()
        self._quotas: dict[bytes, Quota] = {}
        self._disk = StorageStats("off", "it has not been heard of yet")
        self._loaded_tokens: dict[LevelName, int] = {"host": 0, "disk": 0}
        self._chosen: Counter[LevelName] = Counter()
        self._declined: Counter[LevelName] = Counter()
        self._now_s = self._silent_s = self._away_s = 0.0
        self._was_open = False
        cache.watch(self._evicting, self._committed)

    # -- requests -----------------------------------------------------------------------------

    def has_records(self, namespace: Namespace) -> bool:
        """Return whether the disk may know prefixes of a namespace. O(1)."""
        return self._storage is not None and self._storage.has_records(namespace)

    def look(self, sequence_id: int, grant: CacheGrant, tokens: Sequence[int], here: int) -> bool:
        """Ask the disk for a longer prefix of a request's `tokens`, of which the device has `here`;
        return whether it is worth waiting for.
        """
        storage, size = self._storage, self.cache.block_size
        if storage is None:
            return False
        known = len(self.book.prefixes.match(grant.namespace, tokens, self._now_s)) * size
        whole = (len(tokens) - 1) // size * size
        if whole - max(here, known) < self.config.disk_tokens_min:
            return False
        self._note_grant(grant)
        call_id = self._next_id()
        epoch = self.book.epochs[grant.namespace]
        self._looks[call_id] = (sequence_id, grant, tokens, epoch)
        storage.send(Look(call_id, grant.namespace, tuple(tokens[:whole])))
        return True

    def take_looked(self) -> list[int]:
        """Return the sequences whose look has been answered since the last call."""
        looked, self._looked = self._looked, []
        return looked

    def plan(
        self,
        grant: CacheGrant,
        tokens: Sequence[int],
        whole: int,
        compute_s: Callable[[int, int], float],
        now_s: float,
    ) -> LoadPlan | None:
        """Return what to load behind the first `whole` runs of a sequence, which the device has;
        None if computing is no slower. `compute_s(start, count)`: seconds to compute tokens.
        """
        path = self.book.prefixes.match(grant.namespace, tokens, now_s)
        copies, size = path[whole:], self.cache.block_size
        if not copies:
            return None
        choice = choose_load(
            [copy.slot >= 0 for copy in copies],
            self.paces["host"],
            self.paces["disk"],
            lambda blocks: compute_s(whole * size, blocks * size),
            self._blocks_min,
            now_s,
        )
        level: LevelName = "host" if copies[0].slot >= 0 else "disk"
        (self._chosen if choice.blocks else self._declined)[level] += 1
        return LoadPlan(whole, copies[: choice.blocks], choice) if choice.blocks else None

    def begin(
        self, plan: LoadPlan, table: BlockTable, after_step: int, now_s: float
    ) -> Load | None:
        """Begin a planned load into a table that has grown to its end; None if it cannot begin.

        `after_step`: the last step that was launched before the table grew.
        """
        load = self.loads.begin(table, plan.first, plan.copies, plan.choice, now_s)
        if load is not None:
            load.after_step = after_step
        return load

    def give_up(self, load: Load) -> None:
        """End the load of a sequence that is released: its blocks are freed when its moves end."""
        self.loads.give_up(load)

    def take_ended(self, now_s: float) -> list[Load]:
        """Return the loads that have ended since the last call."""
        ended = self.loads.take_ended(now_s)
        for load in ended:
            self._judge(load, now_s)
        return ended

    def committed_load(self, load: Load, table: BlockTable) -> None:
        """Note that what a load has brought is in the device's tree: it is clean there."""
        node, nodes = table.node, list[Node]()
        while node.run and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        for node, copy in zip(nodes[load.first :], load.copies, strict=False):
            if copy.parent is not None and copy.run == node.run:
                self.book.link(copy, node)
                self.book.sync(copy, node)

    def used(self, grant: CacheGrant, table: BlockTable, now_s: float) -> None:
        """Note that a sequence has begun over a table: its leases hold on the copies it found."""
        self._note_grant(grant)
        for lease, _ in table.requested_leases:
            covered = min(table.committed, -(-lease.tokens // self.cache.block_size))
            node = _above(table.node, table.committed - covered)
            copy = self.book.nearest(node)
            if copy is not None and node is not None:
                self._renew(copy, node, lease.lease_id, now_s)
        if self.promises is not None and not table.requested_leases:
            self.promises.read(table.node, now_s)

    def set_quota(self, quota: Quota) -> None:
        """Apply a payer's changed quota on every level."""
        self.book.set_quota(quota)
        self._tell_quota(quota)

    # -- turns --------------------------------------------------------------------------------

    def turn(self, now_s: float, running: Iterable[BlockTable], collected: int) -> None:
        """Take the outcomes that have come, and begin what is wanted next.

        `running`: the tables of running sequences, those that would be preempted first in front.
        `collected`: the last step that was collected.
        """
        passed_s = min(1.0, max(0.0, now_s - self._now_s))
        self._silent_s += passed_s
        self._now_s = now_s
        outcomes = self._transfer.poll()
        if outcomes or not (self.offloading.moves or self.loads.moves or self._is_storing()):
            self._silent_s = 0.0
        for moved in outcomes:
            if not self.loads.moved(moved):
                self.offloading.moved(moved)
        if self._storage is not None:
            for outcome in self._storage.poll():
                if not isinstance(outcome, StorageStats):
                    self._silent_s = 0.0
                self._take(outcome)
            self._notice_absence(passed_s)
        if self.promises is not None:
            self.promises.turn(now_s)
        self.book.prefixes.expire(now_s)
        moves = self.loads.next_moves(collected)
        tables = running if self._is_crowded() else ()
        moves += self.offloading.next_moves(now_s, tables)
        if moves:
            self._transfer.submit(moves)
        if self._storing is not None and self._storage is not None:
            for store in self._storing.next_stores(now_s):
                self._storage.send(store)

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
            or bool(self._looks or self._erasures)
            or self._is_storing()
            or (self.promises is not None and self.promises.renewals > 0)
        )

    # -- erasure ------------------------------------------------------------------------------

    def erase(self, call: Erase) -> tuple[LevelErased, int | None]:
        """Erase copies on every level; call it before the device's tree is erased. Return what host
        memory lost, and an id that `on_erased` gets when the disk is done; None without a disk.
        """
        book, namespace = self.book, call.namespace
        book.epochs[namespace] += 1
        self.loads.void(namespace)
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
        before = book.host_blocks.get(namespace, 0)
        if self.promises is not None:
            self.promises.is_erasing = True
        for top in tops:
            if top.parent is not None:
                book.prefixes.remove(top)
        if self.promises is not None:
            self.promises.is_erasing = False
        blocks = before - book.host_blocks.get(namespace, 0)
        erased = LevelErased("host", blocks, blocks * self._transfer.slot_bytes)
        if self._storage is None:
            return erased, None
        call_id = self._next_id()
        self._erasures.add(call_id)
        self._storage.send(EraseStored(call_id, namespace, call.lease_id, call.tokens))
        return erased, call_id

    # -- reports ------------------------------------------------------------------------------

    def stored_tokens(
        self, namespace: Namespace, tokens: Sequence[int], here: int, now_s: float
    ) -> tuple[tuple[LevelName, int], ...]:
        """Return the further tokens of a prompt that are known below the device, by level."""
        size = self.cache.block_size
        copies = self.book.prefixes.match(namespace, tokens, now_s)[here // size :]
        on_host = sum(copy.slot >= 0 for copy in copies)
        counts: tuple[tuple[LevelName, int], ...] = (
            ("host", on_host * size),
            ("disk", (len(copies) - on_host) * size),
        )
        return tuple(pair for pair in counts if pair[1])

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
        return changed if self._storage is None else changed | self._storage.take_changed()

    def namespaces(self) -> list[Namespace]:
        """Return the namespaces with copies in host memory or on disk. O(these)."""
        stored = set() if self._storage is None else self._storage.namespaces()
        return list(stored.union(self.book.host_blocks))

    def host_bytes(self, namespace: Namespace) -> int:
        """Return the bytes of a namespace's copies in host memory. O(1)."""
        return self.book.host_blocks.get(namespace, 0) * self._transfer.slot_bytes

    def stats(self) -> tuple[LevelStats, ...]:
        """Return the statistics of host memory, and of the disk if there is one. O(1)."""
        loads, size, pace = self.loads, self._transfer.slot_bytes, self.paces["host"]
        kept = self.promises
        is_kept_here = kept is not None and kept.level == "host"
        promised = kept.kept_by_payer if kept is not None and is_kept_here else Counter[Payer]()
        host = LevelStats(
            name="host",
            state="open",
            capacity_bytes=self.book.accounts.slots * size,
            used_bytes=self.book.accounts.used * size,
            promised_bytes=promised.total() * size,
            blocks=self.book.accounts.used,
            offloaded_total=self.offloading.offloaded,
            loaded_total=loads.loaded_blocks["host"],
            failed_total=self.offloading.failed + loads.failed["host"],
            dropped_total=self.book.accounts.dropped_total,
            expired_total=self.book.prefixes.expired_total,
            loaded_tokens_total=self._loaded_tokens["host"],
            regret_s_total=pace.regret_s,
            bytes_per_s=pace.bytes_per_s,
            chosen_total=self._chosen["host"],
            declined_total=self._declined["host"],
            payers=tuple(
                PayerBytes(share.payer, share.used * size, promised[share.payer] * size)
                for share in self.book.accounts.shares()
                if share.used
            ),
        )
        return (host,) if self._storing is None else (host, self._disk_stats(self._storing))

    def check(self) -> None:
        """Recount the copies, and the promises that they keep. Raises InvariantViolation.
        O(copies).
        """
        self.book.check()
        if self.promises is not None:
            self.promises.check()

    def close(self) -> None:
        """End the transfer engine, then the storage, then their memory."""
        self._transfer.close()
        if self._storage is not None:
            self._storage.close()
        self._close_memory()

    # -- internals ----------------------------------------------------------------------------

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _promises_below(self) -> KeptPromises | None:
        """Return the promises of the lowest durable level; None where no level is durable."""
        storage, blocks = self._storage, self.book.accounts.slots
        if storage is not None:
            size = place_bytes_of(self._transfer.slot_bytes)
            blocks = int(self.config.disk_gib * 2**30) // size
            kept = KeptPromises(self.cache, self.book, "disk", self._next_id, storage.send)
        elif self.config.host_keeps_promises:
            kept = KeptPromises(self.cache, self.book, "host", self._next_id, lambda command: None)
        else:
            return None
        kept.copy_again = self._copy_again
        kept.store_again = self._store_again
        self.cache.keep_promises_below(kept, blocks)
        return kept

    def _copy_again(self, node: Node) -> None:
        self.offloading.promised(node, ())

    def _store_again(self, copy: Copy) -> None:
        if self._storing is not None:
            self._storing.copied([copy], self._now_s)

    def _confirmed(self, copies: Sequence[Copy], until_s: Sequence[float]) -> None:
        if self.promises is not None:
            self.promises.confirm(copies, until_s, self._now_s)

    def _notice_absence(self, passed_s: float) -> None:
        """Give up what only the disk has once it has been away for too long."""
        if self._disk.state != "off" or not self._was_open:
            self._away_s = 0.0
            return
        self._away_s += passed_s
        if self._away_s > AWAY_S and self.promises is not None:
            self._was_open = False
            self.promises.level_gone()

    def _fidelity_of(self, namespace: Namespace) -> Fidelity:
        return self._fidelity.get(namespace, "exact")

    def _is_storing(self) -> bool:
        return self._storing is not None and self._storing.has_work

    def _note_grant(self, grant: CacheGrant) -> None:
        if grant.fidelity != "exact":
            self._fidelity[grant.namespace] = grant.fidelity
        if not grant.at_rest:
            self._never_at_rest.add(grant.namespace)
        if self._storage is not None and self._quotas.get(grant.payer) != grant.quota:
            self._tell_quota(grant.quota, grant.payer)

    def _tell_quota(self, quota: Quota, payer: bytes = b"") -> None:
        """Tell the storage a payer's part of the disk, in blocks."""
        name = quota.payer or payer
        self._quotas[name] = quota
        if self._storage is None:
            return
        blocks = int(self.config.disk_gib * 2**30) // max(1, self._transfer.slot_bytes)
        part = blocks / self.cache.blocks
        ceiling = None if quota.ceiling_blocks is None else int(quota.ceiling_blocks * part)
        scaled = Quota(int(quota.floor_blocks * part), ceiling, quota.weight, None, name)
        self._storage.send(SetStoredQuotas((scaled,)))

    def _blocks_min(self, level: LevelName) -> int:
        tokens = self.config.host_tokens_min if level == "host" else self.config.disk_tokens_min
        return -(-tokens // self.cache.block_size)

    def _is_crowded(self) -> bool:
        held = self.cache.stats()
        return held.pinned >= CROWDED * held.blocks

    def _take(self, outcome: StorageOutcome) -> None:
        if isinstance(outcome, Fetched):
            self.loads.fetched_one(outcome)
        elif isinstance(outcome, Stored):
            if self._storing is not None:
                self._storing.finished(outcome)
        elif isinstance(outcome, Looked):
            self._take_look(outcome)
        elif isinstance(outcome, Renewed):
            if self.promises is not None:
                self.promises.renewed(outcome, self._now_s)
        elif isinstance(outcome, StoredErased):
            if outcome.call_id in self._erasures:
                self._erasures.discard(outcome.call_id)
                erased = LevelErased("disk", outcome.records, outcome.bytes, outcome.code)
                self.on_erased(outcome.call_id, erased)
        else:
            was_open, self._disk = self._disk.state == "open", outcome
            self._was_open = self._was_open or outcome.state != "off"
            if self._storing is not None:
                if outcome.state == "open" and not was_open:
                    self._storing.copied_all(self.book.prefixes, self._now_s)
                per_day = self.config.disk_write_gib_per_day or self.config.disk_gib
                self._storing.has_budget = (
                    outcome.state == "open" and outcome.written_bytes_today < per_day * 2**30
                )

    def _take_look(self, outcome: Looked) -> None:
        """Import the records that a look has found."""
        found = self._looks.pop(outcome.call_id, None)
        if found is None:
            return
        sequence_id, grant, tokens, epoch = found
        namespace = grant.namespace
        self._looked.append(sequence_id)
        if epoch != self.book.epochs[namespace]:
            return
        size, parent = self.cache.block_size, self.book.prefixes.root(namespace)
        allowed = FIDELITIES.index(self._fidelity_of(namespace))
        promised, until_s = list[Copy](), list[float]()
        node = self.cache.tree_root(namespace)
        for index, run in enumerate(outcome.runs):
            if FIDELITIES.index(run.fidelity) > allowed:
                break
            own = tuple(tokens[index * size : (index + 1) * size])
            copy = parent.children.get(own)
            if copy is None:
                copy = self.book.prefixes.add(parent, own, grant.payer, self._now_s)
                if run.limit_s is not None:
                    self.book.prefixes.set_limit(copy, self._now_s + run.limit_s)
            copy.promise_at_s = max(copy.promise_at_s, self._now_s + run.promise_s)
            self.book.set_record(copy, run.record_id)
            if run.promise_s > 0:
                until_s.append(self._now_s + run.promise_s)
                promised.append(copy)
            parent = copy
            node = None if node is None else node.children.get(own)
            if node is not None and self.book.of_node(node) is None:
                self.book.link(copy, node)
        self._confirmed(promised, until_s)

    def _copied(self, copies: list[Copy]) -> None:
        if self._storing is not None:
            self._storing.copied(copies, self._now_s)
        else:
            self._confirmed(copies, [math.inf] * len(copies))

    def _committed(self, table: BlockTable, before: int) -> None:
        """Have a sequence's blocks copied that were committed since there were `before`, if they
        are promised, and promises renewed on disk that this use has moved. O(these, leases).
        """
        if self.promises is not None:
            self.promises.read(table.node, self._now_s)
        if not table.requested_leases or table.committed == before:
            return
        node: Node | None = table.node
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
        if copy is not None and copy.record_id and copy.terms is None and node.terms is not None:
            self._send_renew(copy)

    def _renew(self, copy: Copy, node: Node, lease_id: str, now_s: float) -> None:
        """Lengthen the terms of the copies on a leased path, here and on disk."""
        self.book.prefixes.extend_lease(lease_id, copy)
        before = copy.promise_at_s
        above: Node | None = node
        while above is not None and above.run:
            if (one := self.book.of_node(above)) is not None:
                self.book.sync(one, above)
            above = above.parent
        left = max(0.0, before - now_s)
        if copy.record_id and copy.promise_at_s - max(before, now_s) > RENEWED_PART * left:
            self._send_renew(copy, (lease_id,))
        if self._storing is not None and not copy.record_id:
            self._storing.copied([copy], now_s)

    def _send_renew(self, copy: Copy, lease_ids: tuple[str, ...] = ()) -> None:
        if self.promises is not None and self._storage is not None:
            until_s = copy.promise_at_s, copy.limit_at_s
            self.promises.renew(copy.path(), *until_s, self._now_s, lease_ids)

    def _judge(self, load: Load, now_s: float) -> None:
        """Count what a load has brought, and judge the slowest level it came from."""
        for name, tokens in load.tokens_by_level(self.cache.block_size):
            self._loaded_tokens[name] += tokens
        for copy in load.copies:
            if copy.parent is not None:
                self.book.accounts.touch(copy, now_s)
        if load.loaded == len(load.pieces):
            names: list[LevelName] = [piece.level for piece in load.pieces]
            level: LevelName = "disk" if "disk" in names else "host"
            self.paces[level].record_load(now_s - load.began_s, load.choice.compute_s, now_s)

    def _disk_stats(self, storing: Storing) -> LevelStats:
        disk, pace = self._disk, self.paces["disk"]
        return LevelStats(
            name="disk",
            state=disk.state,
            reason=disk.reason,
            capacity_bytes=disk.capacity_bytes,
            used_bytes=disk.used_bytes,
            promised_bytes=disk.promised_bytes,
            blocks=disk.records,
            loaded_total=self.loads.loaded_blocks["disk"],
            stored_total=storing.stored,
            fetched_total=self.loads.fetched,
            failed_total=storing.failed + self.loads.failed["disk"],
            damaged_total=disk.damaged_total,
            dropped_total=disk.dropped_total,
            expired_total=disk.expired_total,
            loaded_tokens_total=self._loaded_tokens["disk"],
            regret_s_total=pace.regret_s,
            bytes_per_s=disk.read_bytes_per_s or pace.bytes_per_s,
            written_bytes_today=disk.written_bytes_today,
            written_bytes_total=disk.written_bytes_total,
            chosen_total=self._chosen["disk"],
            declined_total=self._declined["disk"],
            pending_erasures=len(self._erasures),
            payers=disk.payers,
        )


def _above(node: Node, steps: int) -> Node | None:
    """Return the ancestor `steps` above a node."""
    found: Node | None = node
    for _ in range(steps):
        found = None if found is None else found.parent
    return found
