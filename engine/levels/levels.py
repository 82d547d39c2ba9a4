"""Levels: host memory and disk below the device's pool, as the scheduler and core see them.

It decides what is copied, stored, looked up and loaded, through a transfer engine and a storage
whose outcomes it polls. A load is another way to fill blocks than computing them: what fails is
computed. It knows tokens, blocks and slots, never a tensor, and reads no clock. One thread calls
it. The rules are in `engine/cache/README.md`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from engine.api import (
    LEVELS_BELOW,
    AtRest,
    CacheGrant,
    Erase,
    Fidelity,
    LevelErased,
    LevelName,
    Namespace,
    Payer,
    Peer,
    Quota,
)
from engine.cache import BlockTable, PrefixCache
from engine.cache.tree.prefix_tree import Node, TreeBlock, upward
from engine.config import LevelsConfig
from engine.levels.copy_formats import OWN, laxest
from engine.levels.disk.disk_level import DiskLevel
from engine.levels.level_counts import LevelCounts
from engine.levels.level_use import FetchedTokens
from engine.levels.load_choice import LoadChoice, choose_load, first_paces
from engine.levels.loads import Load, LoadPlan, Loads
from engine.levels.offloading import Offloading
from engine.levels.peers.fetching import PeerFetching
from engine.levels.peers.near_fetching import NearFetching
from engine.levels.peers.shared_store import SharedStore
from engine.levels.peers.sharing import Sharing
from engine.levels.places import RunPlaces, level_of
from engine.levels.promise_terms import told_terms
from engine.levels.promises import RENEWED_PART, KeptPromises
from engine.levels.restarts.recovery import AT_START, KeptSlots, Recovery
from engine.levels.window_copies import WindowCopies
from engine.moves import (
    EraseStored,
    Fetched,
    FetchedRun,
    NearPeers,
    NearPools,
    Peers,
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
SHARED_LOOK_PART: Final = 0.75
"""Of the wait for a look, the part for which its answer waits for a shared store."""
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
        peers: Peers | None = None,
        near: NearPeers | None = None,
        pools: NearPools | None = None,
        view: Callable[[int, int], memoryview] | None = None,
    ) -> None:
        """`close_memory` is called when the transfer engine and the storage have been closed.
        `wipe` makes a slot's bytes zeros, `view` returns those of a slot of a size. `kept`: what
        outlives this engine of host memory; the copies of the engine before are taken over from it,
        as of `now_s`. `peers`: other engines, from which prefixes are fetched; they get those of
        this one, too. `near`: those of them whose `pools` this one reads."""
        self.config = config
        self.cache = cache
        self.places = RunPlaces(cache, transfer.layout, transfer.formats, wipe)
        self.on_erased: Callable[[int, tuple[LevelErased, ...]], None] = lambda call_id, erased: (
            None
        )
        self._transfer = transfer
        self._close_memory = close_memory
        self._last_id = 0
        sizes = [one.slot_bytes for one in transfer.formats]
        self.paces = first_paces(sizes, config.io_threads, transfer.bytes_per_s)
        verify, most = config.verify_host, transfer.loads_max
        self.loads = Loads(cache, self.places, storage, self.paces, self._next_id, verify, most)
        self.windows = WindowCopies(cache, self.places.formats)
        self.offloading = Offloading(
            cache, self.places, self._next_id, self._copied, self.windows, transfer.offloads_max
        )
        self._lossy: dict[Namespace, Fidelity] = {}  # of what was loaded in this engine's life
        self.promises: KeptPromises | None = None
        self._disk: DiskLevel | None = None
        if storage is not None:
            self._store_in(storage)
        elif config.host_keeps_promises:
            accounts = self.places.accounts
            blocks = accounts.capacity_bytes // accounts.pool.formats[OWN].slot_bytes
            self._promise_in("host", blocks, lambda command: None)
        else:
            cache.attach(self)
        self._erasures: dict[int, Namespace] = {}  # that the storage has to answer
        self._dropping: dict[int, tuple[Namespace, tuple[LevelErased, ...]]] = {}
        self.counts = LevelCounts(self.loads, self.paces)
        self._shared: SharedStore | None = None
        self._shared_fetching: PeerFetching | None = None
        if storage is not None and config.remote.shared and not self.windows.is_on:
            self._shared = SharedStore(storage)
            parts = cache, self.places, self._shared
            tokens_min = config.remote.tokens_min
            self._shared_fetching = PeerFetching(*parts, self._next_id, tokens_min, "remote")
        self.fetching: PeerFetching | None = None
        self.near_fetching: NearFetching | None = None
        self.sharing: Sharing | None = None
        if peers is not None and view is not None and not self.windows.is_on:
            self._open_peers(peers, view, near, pools)
        self._now_s = self._before_s = self.places.now_s = now_s
        self._silent_s = 0.0
        self._wiped_a_turn = max(1, WIPED_BYTES_A_TURN // max(1, transfer.formats[OWN].slot_bytes))
        self._recovery = None if kept is None else self._take_over(kept)

    # -- requests -----------------------------------------------------------------------------

    def at_rest(self, namespace: Namespace) -> AtRest:
        """Return the strictest word of a namespace's requests. O(1)."""
        return self.places.formats.at_rest(namespace)

    def has_records(self, namespace: Namespace) -> bool:
        """Return whether the disk may know prefixes of a namespace. O(1)."""
        return self._disk is not None and self._disk.storage.has_records(namespace)

    def may_know(self, grant: CacheGrant) -> bool:
        """Return whether a look may find anything for a request, on disk or in a shared store.
        O(1)."""
        return self._is_shared(grant) or self.has_records(grant.namespace)

    def _is_shared(self, grant: CacheGrant) -> bool:
        """Return whether a request may find copies of its namespace in a shared store."""
        is_let = grant.at_rest == self.at_rest(grant.namespace) == "remote"
        return self._shared is not None and is_let

    @property
    def pool_domain(self) -> str:
        """Return the domain of the engines whose pools are read; empty if none are."""
        return "" if self.near_fetching is None else self.near_fetching.domain

    @property
    def is_disk_lost(self) -> bool:
        """Return whether the disk is off and was heard of."""
        return self._disk is not None and self._disk.is_lost

    def look(self, sequence_id: int, grant: CacheGrant, tokens: Sequence[int], here: int) -> bool:
        """Ask the disk for a longer prefix of a request's `tokens`, of which the device has `here`;
        return whether it is worth waiting for."""
        looks = None if self._disk is None else self._disk.looks
        if looks is None:
            return False
        is_shared, what = self._is_shared(grant), (grant.namespace, tokens, here, self._now_s)
        least = None if self.has_records(grant.namespace) else self.config.remote.tokens_min
        if not looks.is_worth_it(*what, least):
            return False
        self._note_grant(grant)
        if is_shared:
            form = self.places.formats.formats[self.places.formats.of(grant.namespace)]
            wait_s = SHARED_LOOK_PART * self.config.look_ms / 1000
            looks.ask(sequence_id, grant, tokens, form, wait_s)
        else:
            looks.ask(sequence_id, grant, tokens)
        return True

    def take_offer(self, sequence_id: int) -> int:
        """Return how many tokens of a prompt the disk and a shared store have together, as an
        answered look has found; 0 where a shared store has no more. Once for each look."""
        return 0 if self._disk is None else self._disk.looks.take_offer(sequence_id)

    def fetch_shared(
        self,
        sequence_id: int,
        grant: CacheGrant,
        tokens: Sequence[int],
        there: int,
        compute_s: Callable[[int, int], float],
    ) -> float:
        """Begin to fetch what a look has found in a shared store; return the seconds that it is
        worth waiting for, 0 where nothing is begun. `there`: what `take_offer` has said;
        `compute_s`: as for `plan`."""
        if self._shared_fetching is None:
            return 0.0
        size = self.cache.block_size
        here = len(self.places.match(grant.namespace, tokens, self._now_s)) * size
        seconds = compute_s(here, max(0, there - here))
        what = sequence_id, grant, tokens, there, None, seconds
        return self._shared_fetching.begin(*what, self._now_s)

    def fetch(
        self,
        sequence_id: int,
        grant: CacheGrant,
        tokens: Sequence[int],
        peer: Peer,
        compute_s: float,
    ) -> float:
        """Begin to fetch what a peer has of a request's `tokens`; return the seconds that it is
        worth waiting for, 0 where nothing is begun. `compute_s`: predicted seconds to compute it.
        """
        if self.fetching is None:
            return 0.0
        self._note_grant(grant)
        if peer.is_near and self.near_fetching is not None:
            near = sequence_id, grant, tokens, peer, compute_s
            return self.near_fetching.begin(*near, self._now_s)
        what = sequence_id, grant, tokens, peer.tokens, peer, compute_s
        return self.fetching.begin(*what, self._now_s)

    def leave_fetch(self, sequence_id: int) -> FetchedTokens | None:
        """Stop the fetch of a sequence that does not wait any more; return what has come; None if
        it had none."""
        if self.near_fetching is not None and self.near_fetching.leave(sequence_id):
            return FetchedTokens()
        found = (one.leave(sequence_id) for one in self._fetchings)
        return next(filter(None, found), None)

    def take_fetched(self) -> dict[int, FetchedTokens]:
        """Return the sequences whose fetch has ended since the last call, with what has come. One
        whose peer had nothing on its device waits on, for copies from its host memory."""
        ended: dict[int, FetchedTokens] = {}
        for fetching in self._fetchings:
            ended.update(fetching.take_ended())
        if self.near_fetching is not None:
            ended.update(self.near_fetching.take_ended(self._now_s))
        return ended

    @property
    def _fetchings(self) -> list[PeerFetching]:
        return [one for one in (self.fetching, self._shared_fetching) if one is not None]

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
        path = self.places.match(grant.namespace, tokens, now_s)
        size, windows = self.cache.block_size, self.windows
        copies = path[whole : whole + windows.standing(path[whole:], whole, len(path) - whole)]
        if not copies:
            return None
        choice = choose_load(
            [level_of(node) for node in copies],
            self.paces,
            lambda blocks: compute_s(whole * size, blocks * size),
            self._blocks_min,
            now_s,
            copies[0].places[0].form,
        )
        stands = windows.standing(copies, whole, choice.blocks)
        choice = LoadChoice(stands, choice.load_s, choice.compute_s, choice.why)
        self.counts.choose(level_of(copies[0]), choice)
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

    def came_back(self) -> None:
        """Note that a load has come, so that copying is worth more time for a while."""
        self.offloading.loaded(self._now_s)

    def used(self, grant: CacheGrant, table: BlockTable, now_s: float) -> None:
        """Note that a sequence has begun over a table: its leases hold on the copies it found."""
        self._note_grant(grant)
        for lease, _ in table.requested_leases:
            covered = min(table.committed, -(-lease.tokens // self.cache.block_size))
            node = table.node.ancestor(table.committed - covered)
            copied = next((one for one in upward(node) if one.is_copied), None) if node else None
            if copied is not None:
                self._renew(copied, lease.lease_id, now_s)
        if self.promises is not None and not table.requested_leases:
            self.promises.read(table.node, now_s)

    def set_quota(self, quota: Quota) -> None:
        """Apply a payer's changed quota on every level."""
        self.places.set_quota(quota)
        if self._disk is not None:
            self._disk.set_quota(quota.payer, quota)

    # -- turns --------------------------------------------------------------------------------

    def turn(
        self,
        now_s: float,
        running: Iterable[BlockTable],
        collected: int,
        *,
        launched: int = 0,
        is_running: bool = False,
    ) -> None:
        """Take the outcomes that have come, and begin what is wanted next.

        `running`: the tables of running sequences, those that would be preempted first in front.
        `collected`, `launched`: the last steps that were. `is_running`: whether any sequence runs.
        """
        passed_s = min(1.0, max(0.0, now_s - self._now_s))
        self._silent_s += passed_s
        self._before_s, self._now_s, self.places.now_s = self._now_s, now_s, now_s
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
        for fetching in self._fetchings:
            fetching.turn(now_s)
        if self.near_fetching is not None:
            self.near_fetching.turn(now_s, launched, collected)
        if self.promises is not None:
            self.promises.turn(now_s)
        else:
            self.cache.expire(now_s)
        self.loads.collected = collected
        moves = self.loads.next_moves()
        crowd = filter(self._may_lose_blocks, running) if self._is_crowded() else ()
        moves += self.offloading.next_moves(now_s, crowd)
        if moves:
            self._transfer.submit(moves)
        if self.sharing is not None:
            self.sharing.turn(now_s, is_running=is_running)
        if self._disk is not None:
            self._disk.store(now_s)
        if self.places.notes is not None:
            self.places.notes.write_changed()
        self._wipe(self._wiped_a_turn)

    @property
    def is_moving(self) -> bool:
        """Return whether moves pin blocks, or promises that hold blocks on the device are about to
        move down, and still come to ends.
        """
        pins = bool(self.offloading.moves or len(self.loads) or self.near_fetching)
        pins = pins or (self.sharing is not None and self.sharing.is_lending)
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
            or bool(self.fetching or self.near_fetching or self.sharing or self._shared_fetching)
            or (self.places.remains.soiled > 0 and not self.places.accounts.is_closed)
            or (self.promises is not None and self.promises.renewals > 0)
        )

    # -- erasure ------------------------------------------------------------------------------

    def erase(self, call: Erase) -> tuple[int, LevelErased, int | None]:
        """Erase blocks and copies on every level. Return the blocks of the device, what host memory
        loses, and an id that `on_erased` gets when no later engine finds what was named; None where
        that is so now. Bytes are wiped now, or, where there are many, in the next turns.

        O(copies of the namespace), but for those of a whole namespace that have not been recovered
        yet: they are dropped in the next turns.
        """
        places, namespace = self.places, call.namespace
        pending, is_part = (0, 0), call.lease_id is not None or bool(call.tokens)
        if self._recovery is not None and not self._recovery.is_done:
            pending = self._recovery.erase(namespace, self._now_s, is_part=is_part)
            self._store_recovered()
        places.epochs[namespace] += 1
        self.loads.void(namespace)
        for fetching in self._fetchings:
            fetching.erase(namespace, self._now_s)
        if self.near_fetching is not None:
            self.near_fetching.erase(namespace)
        if not is_part:
            self._lossy.pop(namespace, None)
        blocks, size = places.host_blocks.get(namespace, 0), self.host_bytes(namespace)
        on_device = self.cache.erase(namespace, lease_id=call.lease_id, tokens=call.tokens)
        places.remains.soil(namespace)
        self._wipe(ERASED_TURNS * self._wiped_a_turn)
        blocks -= places.host_blocks.get(namespace, 0)
        size -= self.host_bytes(namespace)
        erased = LevelErased("host", blocks + pending[0], size + pending[1])
        if self._disk is None and not self._is_dropping(namespace):
            return on_device, erased, None
        call_id = self._next_id()
        if self._disk is None:
            self._dropping[call_id] = namespace, ()
            return on_device, erased, call_id
        self._disk.recall.erasing()
        self._erasures[call_id] = namespace
        self._disk.storage.send(EraseStored(call_id, namespace, call.lease_id, call.tokens))
        return on_device, erased, call_id

    def _is_dropping(self, namespace: Namespace) -> bool:
        """Return whether an erasure waits for copies of a namespace to be dropped."""
        return self._recovery is not None and namespace in self._recovery.dropping

    # -- reports ------------------------------------------------------------------------------

    def stored_tokens(
        self, namespace: Namespace, tokens: Sequence[int], here: int, now_s: float
    ) -> tuple[tuple[LevelName, int], ...]:
        """Return the further tokens of a prompt that are known below the device, by level."""
        size = self.cache.block_size
        copies = self.places.match(namespace, tokens, now_s)[here // size :]
        counts = Counter(map(level_of, copies))
        return tuple((name, counts[name] * size) for name in LEVELS_BELOW if counts[name])

    def promised_tokens(
        self, namespace: Namespace, tokens: Sequence[int], here: int, now_s: float
    ) -> int:
        """Return the tokens of a prompt behind the first `here` whose promises a level keeps."""
        if self.promises is None:
            return 0
        size = self.cache.block_size
        found = self.places.match(namespace, tokens, now_s)
        return sum(node.promised_below for node in found[-(-here // size) :]) * size

    def take_changed(self) -> set[Namespace]:
        """Return the namespaces whose bytes, or records, have changed since the last call.
        O(changed)."""
        changed, self.places.changed = self.places.changed, set()
        return changed if self._disk is None else changed | self._disk.storage.take_changed()

    def namespaces(self) -> list[Namespace]:
        """Return the namespaces with copies in host memory or on disk. O(these)."""
        stored = set() if self._disk is None else self._disk.storage.namespaces()
        pending = () if self._recovery is None else self._recovery.pending
        return list(stored.union(self.places.host_blocks, pending))

    def host_bytes(self, namespace: Namespace) -> int:
        """Return the bytes of a namespace's copies in host memory. O(1)."""
        pending = 0 if self._recovery is None else self._recovery.pending.get(namespace, 0)
        return self.places.host_bytes.get(namespace, 0) + pending

    def read_fidelity(self, namespace: Namespace) -> Fidelity:
        """Return how far what a namespace has on the device may be from exact: the laxest copy that
        was loaded for it in this engine's life. O(1).
        """
        return self._lossy.get(namespace, "exact")

    def stats(self) -> tuple[LevelStats, ...]:
        """Return the statistics of host memory, and of the disk and the remote store if there are
        any. O(payers)."""
        counts, kept = self.counts, self.promises
        promised = Counter[Payer]()
        if kept is not None and kept.level == "host":
            promised.update(self.cache.promised_below())
        unusable = self._transfer.unusable_bytes
        host = counts.of_host(self.places, self.offloading, promised, self._recovery, unusable)
        others: tuple[LevelStats, ...] = ()
        if self.fetching is not None and self.sharing is not None:
            peer = self.fetching.stats(counts.loaded_tokens["peer"], self.sharing.sent)
            near = self.near_fetching
            others = (peer if near is None else near.add_to(peer),)
        if self._disk is None:
            return (host, *others)
        disk = counts.of_disk(self._disk, len(self._erasures))
        remote = self._disk.stats.remote
        below: tuple[LevelStats, ...] = (host, disk)
        if remote is not None:
            below = (host, disk, counts.of_remote(remote, self._shared_fetching))
        return (*below, *others)

    def check(self) -> None:
        """Recount the copies, and the promises that they keep. Raises InvariantViolation.
        O(copies).
        """
        self.places.check()
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
        if self.fetching is not None:
            self.fetching.close()
        if self._disk is not None:
            self._disk.storage.close()
        if self.places.notes is not None:
            self.places.notes.write_changed(self.places.notes.waiting)
        self._close_memory()

    # -- over the end of an engine ------------------------------------------------------------

    def _take_over(self, kept: KeptSlots) -> Recovery:
        """Take over the copies that the engine before has left, the first of them at once."""
        keep = None if self.promises is None else self.promises.take_over
        found = Recovery(kept, self.cache, self.places, keep)
        for namespace, at_rest in found.at_rest.items():
            self._let_rest(namespace, at_rest)
        found.step(self._now_s, AT_START)
        return found

    def _go_on(self, found: Recovery) -> None:
        """Answer the erasures that waited for what a turn has brought, or dropped."""
        self._store_recovered()
        for call_id, (namespace, erased) in list(self._dropping.items()):
            if namespace not in found.dropping:
                del self._dropping[call_id]
                self.on_erased(call_id, erased)

    def _store_recovered(self) -> None:
        """Have what was recovered stored, where a disk has opened before."""
        if not self._is_recovering and self._disk is not None:
            self._disk.store_all(self.places)

    @property
    def _is_recovering(self) -> bool:
        return self._recovery is not None and not self._recovery.is_done

    def _wipe(self, most: int) -> None:
        if self.places.remains.soiled and not self.places.accounts.is_closed:
            self.places.remains.wipe_some(most)

    def _let_rest(self, namespace: Namespace, at_rest: AtRest) -> None:
        """Note how far copies of a namespace may go (rule *Rest*)."""
        is_closed = self.places.formats.limit_rest(namespace, at_rest)
        if is_closed and self._disk is not None:
            self._disk.keep_here(namespace)

    # -- internals ----------------------------------------------------------------------------

    def _open_peers(
        self,
        peers: Peers,
        view: Callable[[int, int], memoryview],
        near: NearPeers | None,
        pools: NearPools | None,
    ) -> None:
        """Fetch from other engines, and share with them, from now on."""
        own, tokens_min = (self.cache, self.places), self.config.host_tokens_min
        self.fetching = PeerFetching(*own, peers, self._next_id, tokens_min)
        pool = b"" if pools is None else pools.handle
        self.sharing = Sharing(
            *own, self.offloading, view, self.paces["host"], pool, self.read_fidelity
        )
        if near is not None and pools is not None:
            sizes = tokens_min, self.places.formats.formats[OWN].slot_bytes
            self.near_fetching = NearFetching(
                *own, self.fetching, near, pools, self._next_id, *sizes, self._note_fidelity
            )

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _store_in(self, storage: Storage) -> None:
        """Store copies on disk from now on, and let it keep promises."""
        place_bytes = place_bytes_of(self.places.formats.formats[OWN].slot_bytes)
        blocks = int(self.config.disk_gib * 2**30) // place_bytes
        kept, part = self._promise_in("disk", blocks, storage.send), blocks / self.cache.blocks
        self._disk = DiskLevel(
            self.cache, self.places, storage, self.config, kept, self._next_id, part
        )
        self.offloading.is_storing = self._is_storing

    def _promise_in(
        self, level: LevelName, blocks: int, send: Callable[[Renew], None]
    ) -> KeptPromises:
        """Let the lowest durable level, of so many blocks, keep promises."""
        parts = self.cache, self.places, self.windows
        self.promises = kept = KeptPromises(*parts, level, self._next_id, send)
        kept.copy_again = lambda node: self.offloading.promised(node, ())
        self.places.on_changed = kept.changed
        self.cache.attach(self, blocks)
        return kept

    def _is_storing(self) -> bool:
        return self._disk is not None and self._disk.storing.has_work

    def _note_grant(self, grant: CacheGrant) -> None:
        formats, namespace = self.places.formats, grant.namespace
        before = formats.terms_of(namespace)
        formats.allow(namespace, grant.fidelity)
        self._let_rest(namespace, grant.at_rest)
        if formats.terms_of(namespace) != before:
            self.places.note_namespace(namespace)
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
        """Return whether a running sequence may be preempted for another payer (rule *Fair share*).
        One that may not is not copied for a crowd: what its payer finds later must not tell of
        others.
        """
        payer = table.account.payer_account
        return payer.held > payer.floor_blocks

    def _take(self, disk: DiskLevel, outcome: StorageOutcome) -> None:
        if isinstance(outcome, Fetched):
            self.loads.fetched_one(outcome)
        elif isinstance(outcome, FetchedRun):
            if self._shared is not None:
                self._shared.take(outcome)
        elif not isinstance(outcome, StoredErased):
            disk.take(outcome, self._now_s)
        elif (namespace := self._erasures.pop(outcome.call_id, None)) is not None:
            erased = _erased_below(outcome)
            if self._is_dropping(namespace):  # host memory has something of it still
                self._dropping[outcome.call_id] = namespace, erased
            else:
                self.on_erased(outcome.call_id, erased)

    def _copied(self, copies: list[Node]) -> None:
        if self._disk is not None:
            self._disk.storing.copied(copies)
        elif self.promises is not None:
            self.promises.confirm(copies, [math.inf] * len(copies), self._now_s)

    # -- what the cache asks and tells; see `engine.cache.blocks.below` -----------------------

    def may_leave(self, block: TreeBlock) -> bool:
        """See `Below`."""
        return self.promises is not None and self.promises.may_leave(block)

    def is_fixed(self, node: Node) -> bool:
        """See `Below`."""
        return self.promises is not None and self.promises.is_fixed(node)

    def promise_changed(self, node: Node) -> None:
        """See `Below`."""
        if self.promises is not None:
            self.promises.changed(node)

    def leases_changed(self, node: Node) -> None:
        """See `Below`."""
        if self.places.notes is not None:
            self.places.notes.leases_changed(node)

    def removed(self, node: Node, *, is_expired: bool) -> None:
        """See `Below`."""
        self.places.expired_total += is_expired
        self.places.clear(node)

    def committed(self, table: BlockTable, last: Node, before: int) -> None:
        """Have a sequence's blocks copied that were committed since there were `before`, if they
        are promised, and promises renewed on disk that this use has moved: up to `last`, whose run
        may go beyond a tail's. O(these, leases).
        """
        new, node = table.committed - before, last
        if self.promises is not None:
            for _ in range(new):
                if node.is_copied or node.parent is None:
                    break
                node = node.parent
            self.promises.read(node, self._now_s)
        if not table.requested_leases or not new:
            return
        node = last
        for _ in range(new):
            if node.is_bound or node.parent is None:
                break
            node = node.parent
        if node.is_bound:
            leases = tuple((lease.lease_id, lease.tokens) for lease, _ in table.requested_leases)
            self.offloading.promised(node, leases)

    def evicting(self, node: Node) -> None:
        """See `Below`. The disk is told of terms under which it keeps no promise."""
        self.counts.uncopied += not node.is_copied and len(node.run) == self.cache.block_size
        if node.host is not None:
            self.places.accounts.reorder(node)
            if self.places.notes is not None:
                self.places.notes.terms_moved(node)
        if node.record is not None and node.terms is not None and not node.promised:
            self._send_renew(node)

    def _renew(self, node: Node, lease_id: str, now_s: float) -> None:
        """Have the terms of a leased path noted, up to its last copied node, and tell the disk."""
        self.cache.extend_lease(lease_id, node)
        if self.places.notes is not None:
            for above in upward(node):
                self.places.notes.terms_moved(above)
        if node.record is None:
            if self._disk is not None:
                self._disk.storing.copied([node])
            return
        promise_at_s = node.terms.promise_at_s if node.terms is not None else -math.inf
        known_s = max(now_s, node.record.kept_until_s)
        if promise_at_s - known_s > RENEWED_PART * (known_s - now_s):
            self._send_renew(node, (lease_id,))

    def _send_renew(self, node: Node, lease_ids: tuple[str, ...] = ()) -> None:
        if self.promises is not None and self._disk is not None:
            until_s = node.terms.promise_at_s if node.terms is not None else -math.inf
            times = until_s, node.limit_at_s, self._now_s
            self.promises.renew(node.path(), *times, lease_ids, told_terms(node))

    def _note_fidelity(self, namespace: Namespace, fidelity: Fidelity) -> None:
        """Note how far from exact is what has come to the device for a namespace."""
        if fidelity != "exact":
            self._lossy[namespace] = laxest(self.read_fidelity(namespace), fidelity)

    def _judge(self, load: Load, now_s: float) -> None:
        """Count what a load has brought, and judge the slowest level it came from, by the last turn
        that did not find all of it: what is computed waits for the turn after it, too."""
        if load.missed is not None:
            self.counts.miss(*load.missed)
        for node in load.copies:
            if node.parent is not None:
                self.places.accounts.touch(node, now_s)
        for form in load.forms() - {OWN}:
            self._note_fidelity(load.namespace, self.places.formats.formats[form].fidelity)
        if load.loaded == len(load.pieces):
            took_s = max(0.0, self._before_s - load.began_s)
            self.paces[load.level].record_load(took_s, load.plan.choice.compute_s, now_s)


def _erased_below(outcome: StoredErased) -> tuple[LevelErased, ...]:
    """Return what an erasure took from the disk, and from a shared store if there is one."""
    size, shared = outcome.bytes, outcome.shared
    disk = LevelErased("disk", outcome.records, size, outcome.code, outcome.is_shredded)
    if shared is None:
        return (disk,)
    return disk, LevelErased("remote", shared.objects, shared.bytes, shared.code)
