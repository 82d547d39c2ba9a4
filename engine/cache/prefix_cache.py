"""The prefix cache's entry point: every operation on blocks that the scheduler and core may use.

It knows tokens, namespaces, leases and quotas, never a tensor or a tenant, and reads no clock:
callers pass `now_s`. One thread calls it. The rules are in `engine/cache/README.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec.structs import replace

from engine.api import BlockWindow, Bound, LeaseRequest, Namespace, Payer, Quota, tokens_within
from engine.cache.attention_windows import AttentionWindows
from engine.cache.block_promises import BlockPromises
from engine.cache.blocks.below import Below
from engine.cache.blocks.block_manager import BlockManager
from engine.cache.blocks.block_table import BlockTable
from engine.cache.checker import recount
from engine.cache.events import (
    BlocksErased,
    CachePeek,
    CacheStats,
    Committed,
    Copied,
    Evicted,
    Expired,
    Fact,
    Matched,
    NamespaceUse,
    PromiseLost,
    peek_of,
)
from engine.cache.filled_blocks import FilledBlocks
from engine.cache.lease_manager import LeaseManager, promised_blocks, table_spans
from engine.cache.moved_blocks import MovedBlocks
from engine.cache.state_manager import StateManager
from engine.cache.tree.accounts import NamespaceAccount, PayerAccount
from engine.cache.tree.eviction_policy import EvictionPolicy, LeastRecentlyUsed
from engine.cache.tree.prefix_tree import (
    Node,
    Run,
    TreeBlock,
    TreeMatch,
    WindowBlock,
    nodes_under,
    tree_blocks,
)
from engine.cache.tree.window_groups import WindowGroups
from engine.cache.window_manager import WindowManager
from engine.errors import InvariantViolation
from engine.plan import BlockCopy

DEFAULT_QUOTA = Quota()
DEFAULT_EVICTION_POLICY = LeastRecentlyUsed()
FactListener = Callable[[Fact], None]


class PrefixCache:
    """A pool of blocks, a radix tree of prefixes per namespace, and the accounts over both."""

    def __init__(
        self,
        *,
        blocks: int,
        block_size: int,
        context_tokens: int = 0,
        facts: FactListener | None = None,
        eviction_policy: EvictionPolicy = DEFAULT_EVICTION_POLICY,
        windows: Sequence[int] = (),
        state_blocks: int = 0,
        state_spacing: int | None = None,
    ) -> None:
        """Make a cache of `blocks` free blocks of `block_size` tokens.

        `context_tokens`: the length of the longest sequence; floors leave room for it. `facts`: a
        callable that receives the frozen events of `engine.cache.events` as they happen.
        `eviction_policy` chooses among the evictable leaves of a payer. `windows`: the tokens of
        each window group's window; a run of `block_size` tokens takes a block in each of these and
        one in group 0. `state_blocks`: the blocks that a kept state takes, of a model with
        recurrent layers; `state_spacing`: tokens within which a sequence keeps no second one (None:
        by its room). Raises ValueError for a window below two tokens.
        """
        self.blocks = blocks
        self.block_size = block_size
        self.windows = WindowGroups(windows, block_size)
        longest = self.windows.blocks_of(context_tokens)
        self._manager = BlockManager(blocks, self.windows, longest, eviction_policy)
        self.promises = BlockPromises(self._manager, self._emit)
        self._leases = LeaseManager(self._manager, self.promises)
        self._windows = WindowManager(self._manager, self.promises)
        self._attention = AttentionWindows(self._manager, self._leases)
        self._has_windows = bool(self.windows.windows)
        self.states = StateManager(
            self._manager, self.promises, self._allocate, self._emit, state_blocks, state_spacing
        )
        self.moves = MovedBlocks(self._manager, self._allocate)
        self.fills = FilledBlocks(self._manager, self.promises, self._allocate, self._emit)
        self.strides = self._manager.strides
        self.floor_blocks_max = self._manager.fair_share.floors_max
        self.facts = facts
        self._evicted = self._expired = self._copied = self._resume_gap = 0

    # -- queries ------------------------------------------------------------------------------

    def find(self, namespace: Namespace, tokens: Sequence[int], now_s: float) -> TreeMatch:
        """Return the longest cached prefix of `tokens`, to be passed to `begin`.

        It pins, renews and counts nothing; blocks past their limit leave the tree. O(blocks
        matched).
        """
        self.expire(now_s)
        account = self._manager.accounts.get(namespace)
        return TreeMatch(None, [], None, 0) if account is None else self._find(account, tokens)

    def count_unpinned(self, found: TreeMatch) -> int:
        """Return how many blocks that the match would pin may be evicted, so that they are room."""
        refs = self._manager.pool.ref_count
        path: Sequence[TreeBlock] = found.path
        if self._has_windows:
            path = [*path, *self._windows.read_blocks(found)]
        if found.state is not None:
            path = [*path, *found.state.blocks]
        return [refs[block.block] for block in path if not block.is_bound].count(1)

    def blocks_to_start(
        self,
        namespace: Namespace,
        quota: Quota,
        tokens: int,
        found: TreeMatch | None,
        step_tokens: int,
        attention: BlockWindow | None = None,
    ) -> int:
        """Return the blocks that a sequence of `tokens` needs beyond those it finds pinned, if
        `step_tokens` are computed at a time, or fewer where the namespace may not hold so many.

        O(blocks matched), and as `max_sequence_tokens` with window groups.
        """
        needed, matched = self._blocks_for(tokens), 0 if found is None else len(found.path)
        if self._has_windows or attention is not None:
            most = self._manager.max_sequence_blocks(namespace, quota)
            needed = self.windows.blocks_of(tokens, step_tokens, attention)
            needed = min(needed, max(most, self.windows.blocks_of(tokens, 1, attention)))
        if found is None:
            return needed
        if self._has_windows:
            matched += len(self._windows.read_blocks(found))
        # A matched block that may be evicted counts as room now and will be pinned by the match.
        return needed - (matched - self.count_unpinned(found))

    def blocks_to_grow(self, table: BlockTable | None, tokens: int) -> int:
        """Return the blocks that a table lacks to hold `tokens`; None stands for an empty table."""
        held = 0 if table is None else len(table.blocks)
        runs = self._blocks_for(tokens)
        if table is not None and table.attention is not None:
            runs = min(runs, held + max(1, table.attention.blocks_of(runs) - table.held_blocks))
        return (runs - held) * self.windows.groups

    def tokens_to_grow(self, table: BlockTable, blocks: int) -> int:
        """Return how many tokens a table holds if it grows by at most `blocks`."""
        return (blocks // self.windows.groups + len(table.blocks)) * self.block_size

    def peek(self, namespace: Namespace, tokens: Sequence[int], now_s: float) -> CachePeek:
        """Return what `tokens` would match, as a report. Cost: as `find`."""
        return peek_of(self.find(namespace, tokens, now_s), self.block_size)

    def max_sequence_tokens(self, namespace: Namespace, quota: Quota) -> int:
        """Return the tokens of the longest sequence that could run alone beside other payers'
        floors.

        O(1), or O(floors) when the floors together exceed their bound.
        """
        blocks = self._manager.max_sequence_blocks(namespace, quota) - self.states.blocks
        return tokens_within(blocks, self.windows.windows, self.block_size)

    def available_blocks(
        self,
        namespace: Namespace,
        quota: Quota,
        found: TreeMatch | None = None,
        *,
        freed_by_others: int = 0,
        freed_own: int = 0,
    ) -> tuple[int, float]:
        """Return the blocks a namespace could take now, from the free list and by eviction.

        The first number is what the pool has, the second what the payer's ceiling leaves (infinite
        without one). `found`: what the taker will match; `freed_by_others`, `freed_own`: blocks
        that preempted sequences of other payers, and of its own, would leave. O(payers changed
        since the last query).
        """
        pinning = self.count_unpinned(found) if found is not None and quota.floor_blocks else 0
        return self._manager.available_blocks(namespace, quota, pinning, freed_by_others, freed_own)

    def stats(self) -> CacheStats:
        """Return totals and gauges. O(payers changed since the last query)."""
        return self._manager.stats(self._evicted, self._expired, self._copied, self._resume_gap)

    def namespaces(self) -> tuple[NamespaceUse, ...]:
        """Return how many blocks each namespace holds. O(namespaces)."""
        return tuple(map(self._manager.use, self._manager.accounts))

    def use(self, namespace: Namespace) -> NamespaceUse:
        """Return how many blocks one namespace holds; zeros for an unknown namespace."""
        return self._manager.use(namespace)

    def take_changed(self) -> set[Namespace]:
        """Return the namespaces whose use has changed since the last call. O(changed)."""
        return self._manager.take_changed()

    def tree_root(self, namespace: Namespace) -> Node | None:
        """Return the root of the namespace's tree, for reading only, or None."""
        account = self._manager.accounts.get(namespace)
        return account.tree.root if account else None

    def set_quota(self, quota: Quota) -> None:
        """Apply a payer's changed quota; sequences keep their blocks. O(1), or O(floors)."""
        self._manager.fair_share.set_quota(quota)

    def over_share(self, payer: Payer) -> float:
        """Return the blocks that a payer has borrowed above its floor, per unit of weight."""
        return self._manager.fair_share.over_share(payer)

    def is_inside_floor(self, namespace: Namespace, quota: Quota, wanted: int) -> bool:
        """Return whether a payer that takes `wanted` more blocks, its own evictable ones first,
        stays inside its floor. O(1).
        """
        return self._manager.fair_share.is_inside_floor(namespace, quota, wanted)

    # -- life of a sequence -------------------------------------------------------------------

    def begin(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        now_s: float,
        *,
        quota: Quota = DEFAULT_QUOTA,
        leases: Sequence[LeaseRequest] = (),
        read: bool = True,
        write: bool = True,
        found: TreeMatch | None = None,
        attention: BlockWindow | None = None,
        suspended: BlockTable | None = None,
        marks: Sequence[int] = (),
        renews: bool = True,
    ) -> BlockTable:
        """Match and pin the longest live prefix of `tokens`, token-exact, at most len(tokens) - 1.

        `found`: the result of `find`, which is used if the tree has not changed since. A partial
        block is matched by a new block and a pending copy (see `take_copies`); when no block is
        available the cache drops the partial match, never the request. Renews the leases of the
        blocks it read, and puts the answers to `leases` in `table.leases`. With an `attention`
        window only what the window shares is matched and promised. `suspended`: the table of the
        sequence before it was preempted, which ends; its promises need no room, and what of them
        cannot be given again is told as lost. `marks`: `Request.marks`. `renews`:
        it renews the leases of the blocks that it uses. O(blocks matched).
        """
        self.expire(now_s)
        account = self._manager.account(namespace, quota)
        self._manager.fair_share.note_use(account.payer_account, now_s)
        beside = tuple(list[int]() for _ in self.windows.windows)
        table = BlockTable(account, now_s, write, attention, renews, beside)
        self._manager.add_table(table)
        path: list[Node] = []
        prompt_tokens, asked = len(tokens), leases
        if attention is not None:
            tokens, leases = self._attention.sharable(attention, tokens, leases)
        if read:
            if found is None or not found.is_current(account.tree):
                found = self._find(account, tokens)
            path = self._match(table, found, now_s)
            table.resume_gap_tokens = found.matched_tokens - found.cached_tokens
            self._resume_gap += table.resume_gap_tokens
        if lost := self._leases.grant(table, path, tokens, leases, now_s, suspended, reads=read):
            self._emit(PromiseLost(namespace, lost))
        if suspended is not None:
            self._manager.remove_table(suspended)
        if len(leases) < len(asked):
            self._attention.refuse_others(table, asked)
        parting = found.matched_tokens if read and found is not None else 0
        ends = {min(lease.tokens, len(tokens)) for lease in leases}
        if table.beside:
            self._windows.add_marks(table, {len(tokens), parting, *ends})
        elif self.states.blocks and write:
            ahead = (mark for mark in marks if mark <= len(tokens))
            points = (*sorted(ends, reverse=True), *ahead, parting, len(tokens))
            self.states.add_marks(table, points)
        self._emit(Matched(namespace, prompt_tokens, table.kv_tokens))
        return table

    def grow(
        self, table: BlockTable, tokens: int, now_s: float, *, start: int | None = None
    ) -> bool:
        """Make slots [start, tokens) exist and be writable. Return False, changing nothing, without
        room.

        `start` is table.kv_tokens if not given; it lies further on when steps in flight write the
        tokens before it. Allocates, evicts by rule *Fair share*, and copies on write where a slot's
        block has other holders. O(1) when the slots exist; no call is needed below
        `table.writable_tokens`.
        """
        start = table.kv_tokens if start is None else start
        blocks, refs = table.blocks, self._manager.pool.ref_count
        first = start // self.block_size
        shared = [(blocks, i) for i in range(first, len(blocks)) if refs[blocks[i]] > 1]
        for row in table.beside:
            shared += [(row, i) for i in range(first, len(row)) if refs[row[i]] > 1]
        missing = max(0, self._blocks_for(tokens) - len(blocks))
        if not shared and not missing:
            table.writable_tokens = len(blocks) * self.block_size
            return True
        wanted = len(shared) + missing * self.windows.groups
        new_blocks = self._allocate(table.account, wanted, now_s)
        if new_blocks is None:
            return False
        for row, index in shared:
            old, new = row[index], new_blocks.pop()
            filled = start - index * self.block_size
            if filled > 0:
                self._copy(table.account, old, new, filled)
            row[index] = new
            table.version += 1
            self._manager.unpin(old)
        blocks.extend(new_blocks[:missing])
        for group, row in enumerate(table.beside, start=1):
            row.extend(new_blocks[group * missing : (group + 1) * missing])
        table.writable_tokens = len(blocks) * self.block_size
        return True

    def grow_freely(self, table: BlockTable, tokens: int, now_s: float, *, start: int) -> bool:
        """Make slots [start, tokens) exist and be writable by free blocks alone: evict nothing.
        Return False, changing nothing, where that does not do. O(1).
        """
        missing = max(0, self._blocks_for(tokens) - len(table.blocks)) * self.windows.groups
        if missing and self._manager.shortage(table.account, missing)[0] > 0:
            return False
        return self.grow(table, tokens, now_s, start=start)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Return the copies that must run before the next step's writes, in order.

        Their sources stay pinned until this call. The caller must launch the step with these copies
        before any other call that may allocate.
        """
        return self._manager.take_copies() if self._manager.copies else ()

    def commit(
        self, table: BlockTable, tokens: Sequence[int], kv_tokens: int, now_s: float
    ) -> None:
        """Commit the KV of tokens[:kv_tokens], which a completed step has written.

        Full blocks become findable. Where the tree already has an equal block, the table takes that
        block and frees its own. It lets the blocks go that lie behind a window, in window groups
        (rule *Window*) and under an attention window (rule *Attention window*). O(1) unless a block
        filled.
        """
        table.kv_tokens = kv_tokens
        full, attention = kv_tokens // self.block_size, table.attention
        if attention is not None:
            full = min(full, attention.shared_blocks)
        if full != table.committed and self._may_write(table):
            self._commit_full(table, tokens, full, now_s)
        if table.beside:
            self._windows.advance(table, now_s)
        if table.kept:
            self._commit_states(table, tokens, now_s)
        if attention is not None:
            self._attention.advance(table, attention, now_s)

    def commit_tokens(self, tables: Iterable[BlockTable]) -> None:
        """Commit the KV of one more token of each table, where that fills no block and no window
        moves on: `commit` would do nothing else. O(tables).
        """
        for table in tables:
            table.kv_tokens += 1

    def _commit_full(
        self, table: BlockTable, tokens: Sequence[int], full: int, now_s: float
    ) -> None:
        """Commit the blocks from `table.committed` to `full`, all of whose slots are written."""
        first, size, new = table.committed, self.block_size, 0
        is_plain, spans = self._leases.is_plain(table), table_spans(table, now_s)
        for index in range(first, full):
            run = tuple(tokens[index * size : (index + 1) * size])
            node = table.node.children.get(run)
            is_new = node is None
            if node is None or node.block < 0:
                node, added = self._insert(table, run, index, now_s, node)
                new += added
            else:
                if node.block != table.blocks[index]:
                    self._manager.pin(node)
                    self._manager.unpin(table.blocks[index])
                    table.blocks[index] = node.block
                    table.version += 1
                if table.beside:
                    new += self._windows.commit(table, node, index, now_s)
            if is_plain:
                if node.terms is not None:
                    node.terms.limit_at_s = math.inf
                table.node = node
                continue
            if dropped := self._leases.regain(table, node, index):
                self._emit(PromiseLost(table.namespace, dropped))
                spans = table_spans(table, now_s)
            self._leases.apply_leases(table, node, index, spans, now_s, is_new=is_new)
            table.node = node
            self._leases.release_reservation(table, index)
        table.committed = full
        if table.reserved or table.binds is not None:
            self._leases.rebind(table)
        if self._manager.below is not None:
            self._manager.below.committed(table, table.node, first)
        self._emit(Committed(table.namespace, full - first, (full - first) * size, new))

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second table over the same blocks, all pinned once more. O(blocks).

        The leases stay with the first table; blocks that the fork adds have no limit of their own.
        """
        fork = table.forked()
        table.writable_tokens = 0
        self._manager.add_table(fork)
        for block in (*fork.pinned, *fork.window_blocks):
            self._manager.pin_again(block)
        return fork

    def mark_resume_point(self, table: BlockTable, tokens: int) -> None:
        """Note that another request will resume at `tokens`, which `table` has not computed yet
        (rules *Resume point*, *State*).
        """
        if table.beside:
            self._windows.add_marks(table, {tokens})
        elif self.states.blocks and table.write:
            self.states.add_marks(table, (tokens,))

    def release(
        self, table: BlockTable, tokens: Sequence[int], now_s: float, *,
        keep: bool = True, is_complete: bool = False,
    ) -> None:  # fmt: skip
        """Release a table once, when its sequence ends. O(blocks).

        With `keep`, the partly filled last block (tokens up to table.kv_tokens) goes to the tree as
        well. Promises for blocks that were never computed lapse; they are told as lost where the
        sequence `is_complete`. Raises: InvariantViolation on a second call.
        """
        if table not in self._manager.tables:
            raise InvariantViolation("a block table was released twice")
        if not table.is_suspended:
            self._let_go(table, tokens, now_s, keep=keep, covered=0)
        elif is_complete and table.reserved and not table.is_erased:
            self._emit(PromiseLost(table.namespace, table.reserved))
        self._leases.release_reservations(table, now_s)
        self._manager.remove_table(table)

    def suspend(
        self, table: BlockTable, tokens: Sequence[int], now_s: float, *, keep: bool = True
    ) -> bool:
        """Let the blocks of a preempted sequence's table go; keep the room of its promises until it
        is given to `begin` or released. A tail inside them, whose block would take room twice, is
        not kept. Return False, changing nothing, where it promises nothing. O(blocks).
        """
        if not (covered := promised_blocks(table)):
            return False
        self._let_go(table, tokens, now_s, keep=keep, covered=covered)
        table.is_suspended = True
        return True

    def _let_go(
        self, table: BlockTable, tokens: Sequence[int], now_s: float, *, keep: bool, covered: int
    ) -> None:
        """Unpin the blocks of a table whose use ends; begin the leases that count from there."""
        if keep and table.committed >= covered:
            self._commit_tail(table, tokens, now_s)
        if keep and self._has_windows:
            self._windows.mark_resume(table, table.kv_tokens, now_s)
        self._leases.end_use(table, now_s)
        self._manager.unpin_all(table.account, reversed(table.pinned))
        self._manager.unpin_all(table.account, table.window_blocks)
        if keep and table.kept:
            self._commit_states(table, tokens, now_s)
        self.states.drop(table)
        for _, aside in table.aside:
            self._manager.unpin_all(table.account, aside)
        self._manager.version += 1
        table.resumed = self._leases.last_windows(table) if table.reserved else []
        table.blocks, table.beside, table.first, table.holes, table.aside = [], (), [], 0, ()

    # -- levels below -------------------------------------------------------------------------

    def payer_account(self, payer: Payer) -> PayerAccount | None:
        """Return a payer's account, for reading only, or None. O(1)."""
        return self._manager.fair_share.get(payer)

    def whole_blocks(self, found: TreeMatch) -> TreeMatch:
        """Return the deepest hit of a match that stands at the end of a whole block. O(windows)."""
        whole = found.whole_blocks()
        return self.states.cut(whole) if self.states.blocks else self.windows.cut(whole)

    def lease_ends(self, namespace: Namespace, lease_id: str) -> list[Node]:
        """Return the last nodes that a lease covers, for reading only. O(these)."""
        account = self._manager.accounts.get(namespace)
        return [] if account is None else account.lease_endpoints.nodes_of(lease_id)

    def extend_lease(self, lease_id: str, node: Node) -> None:
        """Note that a lease covers everything up to a node of the tree. O(1)."""
        if (account := self._manager.account_of(node)) is not None:
            account.lease_endpoints.extend(lease_id, node)

    def attach(self, below: Below, promised_blocks: int = 0) -> None:
        """Put levels below the device, before anything is cached. `promised_blocks`: the blocks of
        the level that keeps promises, 0 where none does.
        """
        self._manager.below = below
        if promised_blocks:
            self.promises.keep_below(promised_blocks)

    def roots(self) -> list[Node]:
        """Return the roots of all trees. O(namespaces)."""
        return [account.tree.root for account in self._manager.accounts.values()]

    def promised_below(self) -> dict[Payer, int]:
        """Return the blocks whose promises a level below keeps, by payer. O(payers)."""
        return {one.payer: one.below for one in self._manager.fair_share if one.below}

    def payer_of(self, namespace: Namespace) -> Payer:
        """Return the payer of a namespace that has a tree. O(1)."""
        return self._manager.accounts[namespace].payer_account.payer

    def add_run(self, namespace: Namespace, payer: Payer, parent: Node | None, run: Run) -> Node:
        """Return the node of `run` below `parent`, or below the namespace's root: a new one, which
        the caller gives a place below the device at once, where the tree has none. Where the
        payer's quota is not known, it has none until its next request. O(log children).
        """
        account = self._manager.accounts.get(namespace)
        if account is None:
            share = self._manager.fair_share.get(payer)
            quota = replace(Quota() if share is None else share.quota, payer=payer)
            account = self._manager.account(namespace, quota)
        above = account.tree.root if parent is None else parent
        return above.children.get(run) or account.tree.add(above, run)

    def window_block(self, node: Node, group: int, now_s: float) -> WindowBlock:
        """Return the block of a node in a window group; where it has none, one that is away from
        the device, which the caller promises at once. O(1).
        """
        return node.window_block(group) or self._manager.add_away(node, group, now_s)

    def remove_placeless(self, node: Node) -> None:
        """Remove a leaf from the tree that has no place on any level any more. O(log nodes)."""
        account, parent = self._manager.account_of(node), node.parent
        if account is None or parent is None or node.block >= 0 or node.is_copied:
            return
        self._manager.detach(account, node)
        self._settle(account, parent)

    # -- promises -----------------------------------------------------------------------------

    def promisable(
        self, namespace: Namespace, tokens: Sequence[int], quota: Quota, now_s: float
    ) -> tuple[int, Bound] | None:
        """Return how many leading tokens of a prompt a lease could promise now, and the bound that
        would clip more; None with window groups. Changes nothing. Cost: as `find`.
        """
        if self._has_windows:
            return None
        path = self.find(namespace, tokens, now_s).path
        return self._leases.promisable(namespace, path, tokens, quota, now_s)

    @property
    def promisable_blocks(self) -> int:
        """Return the most that promises and floors together may take, on the lowest level that
        keeps promises."""
        return self._manager.fair_share.promisable_below

    @property
    def promisable_on_device(self) -> int:
        """Return the most that they may take on the device; 0 where no level below keeps
        promises."""
        return self._manager.fair_share.promisable if self.promises.keeps_below else 0

    # -- expiry, erasure, checks --------------------------------------------------------------

    def expire(self, now_s: float) -> int:
        """Lapse overdue promises and remove every block whose limit has passed. Return how many.

        A block in use stays where its clock counts from the last use. O(expired log n).
        """
        self.promises.lapse_promises(now_s)
        self._manager.fair_share.rest(now_s)
        expired = 0
        for account, node in self.promises.take_expired(now_s):
            if not account.tree.contains(node):
                continue  # removed with a block above it
            parent = node.parent
            blocks = self._manager.detach(account, node, is_expired=True)
            expired += blocks
            if blocks:
                self._emit(Expired(account.namespace, blocks))
            self._settle(account, parent)
        self._expired += expired
        return expired

    def erase(
        self,
        namespace: Namespace,
        *,
        lease_id: str | None = None,
        tokens: Sequence[int] | None = None,
    ) -> int:
        """Erase a namespace, one lease of it, or everything under a token prefix. Return how many
        blocks.

        Blocks in use leave the tree at once and are freed with the last table that holds them.
        Sequences that run in the namespace commit nothing more, so that erased tokens do not
        return; for a lease, only the sequences that asked for it. A block that another lease covers
        too stays. O(blocks of the namespace).
        """
        account = self._manager.accounts.get(namespace)
        if account is None:
            return 0
        if lease_id is not None:
            tops = self._leases.revoke(account, lease_id)
        else:
            account.write_epoch += 1
            tops = nodes_under(account.tree.root, tokens or (), self.block_size)
        parents = {top.parent for top in tops}
        blocks = sum(self._manager.detach(account, top) for top in tops)
        if blocks:
            self._emit(BlocksErased(namespace, blocks))
        for parent in parents:
            self._settle(account, parent)
        self._manager.forget_if_idle(account)
        return blocks

    def recount(self) -> Iterator[None]:
        """Return an iterator that recounts the cache.

        Each step takes one to two milliseconds. O(blocks) in all. Raises: InvariantViolation at the
        first mismatch.
        """
        return recount(self._manager)

    def check(self) -> None:
        """Recount the whole cache at once. Raises: InvariantViolation at the first mismatch."""
        for _ in self.recount():
            pass

    # -- internals ----------------------------------------------------------------------------

    def _settle(self, account: NamespaceAccount, parent: Node | None) -> None:
        """Let go what was bound by what has left the tree below `parent`."""
        if parent is not None and parent.is_bound:
            self.promises.settle_later(parent)
        self._manager.forget_if_idle(account)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _emit(self, fact: Fact) -> None:
        if self.facts is not None:
            self.facts(fact)

    def _find(self, account: NamespaceAccount, tokens: Sequence[int]) -> TreeMatch:
        found = account.tree.find(tokens)
        if self.states.blocks:
            return self.states.cut(found)
        return self.windows.cut(found) if self._has_windows else found

    def _match(self, table: BlockTable, found: TreeMatch, now_s: float) -> list[Node]:
        """Pin the matched blocks; return the nodes of the whole ones. At least one token is left to
        compute.
        """
        account, path, partial_node = table.account, found.path, found.partial_node
        self._manager.pin_all(account, path)
        self._renew(table, path, now_s)
        table.start_at(path)
        if self._has_windows:
            self._windows.pin(table, found, now_s)
        self.states.pin(table, found, now_s)
        if partial_node is None:
            return path
        sources: list[TreeBlock] = [partial_node, *filter(None, partial_node.beside or ())]
        for source in sources:
            self._manager.pin(source)
        new_blocks = self._allocate(account, len(sources), now_s)
        if new_blocks is not None:
            self._renew(table, [partial_node], now_s)
            for row, source, new in zip(
                (table.blocks, *table.beside), sources, new_blocks, strict=True
            ):
                self._copy(account, source.block, new, found.partial_tokens)
                row.append(new)
            table.kv_tokens += found.partial_tokens
        elif table.beside:
            path = self._windows.shorten(table, path, now_s)
        elif found.state is not None:
            path = self._without_state(table)
        for source in sources:
            self._manager.unpin(source.block)
        return path

    def _without_state(self, table: BlockTable) -> list[Node]:
        """Give back a match that ends within a block, for whose copy there was no room: no state
        stands before it. O(blocks).
        """
        self.states.drop(table)
        self._manager.unpin_all(table.account, reversed(table.blocks))
        table.start_at([])
        return []

    def _renew(self, table: BlockTable, nodes: Sequence[Node], now_s: float) -> None:
        for node in nodes:
            node.last_use_s = now_s
            node.hits += 1
        self.promises.renew_on_read(table, nodes, now_s)

    def _allocate(self, account: NamespaceAccount, count: int, now_s: float) -> list[int] | None:
        """Allocate `count` blocks: free ones, else expired, else evicted; None without room."""
        if self._manager.shortage(account, count)[0] > 0:
            self.expire(now_s)
            if not self._manager.can_evict(account, count):
                return None
            for victim, gone in self._manager.make_room(account, count):
                self._evicted += len(gone)
                lived_s = sum([now_s - node.inserted_at_s for node in gone])
                self._emit(Evicted(victim.namespace, account.namespace, len(gone), lived_s))
                self._manager.forget_if_idle(victim)
        return self._manager.allocate(account, count)

    def _copy(self, account: NamespaceAccount, src: int, dst: int, tokens: int) -> None:
        self._manager.add_copy(src, dst, tokens)
        self._copied += 1
        self._emit(Copied(account.namespace, tokens))

    def _may_write(self, table: BlockTable) -> bool:
        """Return whether the table may commit: not after an erasure, nor under a prefix that left
        the tree.
        """
        if table.is_erased or not table.account.tree.contains(table.node):
            table.write = False
        return table.write

    def _insert(
        self, table: BlockTable, run: Run, index: int, now_s: float, known: Node | None = None
    ) -> tuple[Node, int]:
        block, beside = table.blocks[index], [row[index] for row in table.beside]
        node, added = self._manager.insert(
            table.account, table.node, run, block, now_s, beside, known
        )
        if known is not None and known.promised:
            # A level below has kept the promise: its use is a read.
            self.promises.renew_on_read(table, tree_blocks(node), now_s)
        if node.terms is not None or beside:
            for tree_block in tree_blocks(node):
                self.promises.update_deadlines(table.account, tree_block, now_s)
        return node, added

    def _commit_states(self, table: BlockTable, tokens: Sequence[int], now_s: float) -> None:
        """Put the written states of a table into the tree, and promise those that leases do."""
        for position, state in self.states.commit(table, tokens, now_s):
            self._leases.promise_state(table, position, state, now_s)

    def _commit_tail(self, table: BlockTable, tokens: Sequence[int], now_s: float) -> None:
        """Leave the partly filled last block to the tree, unless it already holds its tokens."""
        index = table.committed
        if table.attention is not None and index >= table.attention.shared_blocks:
            return
        run = tuple(tokens[index * self.block_size : table.kv_tokens])
        if not 0 < len(run) < self.block_size or not self._may_write(table):
            return
        block = table.blocks[index]
        if block in self._manager.copies or self._manager.pool.ref_count[block] > 1:
            return  # its copy has not run, or a fork shares it and still writes there
        node, common = table.account.tree.longest_common_child(table.node, run)
        is_new = node is None or common < len(run)
        if node is None or common < len(run):
            node, added = self._insert(table, run, index, now_s)
            self._emit(Committed(table.namespace, 1, len(run), added))
        elif (
            table.beside
            and node.run == run
            and (filled := self._windows.commit(table, node, index, now_s))
        ):
            self._emit(Committed(table.namespace, 0, 0, filled))
        spans = table_spans(table, now_s)
        self._leases.apply_leases(table, node, index, spans, now_s, is_new=is_new)
        self._leases.release_reservation(table, index)
        self._leases.rebind(table)
        if self._manager.below is not None:
            self._manager.below.committed(table, node, index)
