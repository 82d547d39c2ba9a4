"""The door of the cache: everything the scheduler and core may do to blocks.

It knows tokens, namespaces, leases and quotas, never a tensor or a tenant, and no clock but the
`now_s` it is given. One thread calls it. The numbered rules are in `engine/cache/README.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from engine.api import LeaseRequest, Namespace, Payer, Quota
from engine.cache.accounts import NamespaceAccount
from engine.cache.block_manager import BlockManager
from engine.cache.block_table import BlockTable
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
)
from engine.cache.lease_manager import LeaseManager
from engine.cache.prefix_tree import Node, TreeMatch
from engine.errors import InvariantViolation
from engine.plan import BlockCopy

DEFAULT_QUOTA = Quota()
Tell = Callable[[Fact], None]


class PrefixCache:
    """A pool of blocks, a radix tree of prefixes per namespace, and the books over both."""

    def __init__(
        self, *, blocks: int, block_size: int, context_tokens: int = 0, facts: Tell | None = None
    ) -> None:
        """All blocks free. `context_tokens`: of the longest sequence there may be; floors leave
        room for it. `facts` gets frozen values of `engine.cache.events` as things happen."""
        self.blocks = blocks
        self.block_size = block_size
        self._holdings = BlockManager(blocks, block_size, self._blocks_for(context_tokens))
        self._book = LeaseManager(self._holdings)
        self.floor_blocks_max = self._holdings.shares.floors_max
        self.facts = facts
        self._evicted = self._expired = self._copied = 0

    # -- looking ------------------------------------------------------------------------------

    def find(self, namespace: Namespace, tokens: Sequence[int], now_s: float) -> TreeMatch:
        """What `tokens` find now, for `begin`. Pins, renews and counts nothing. O(blocks
        matched)."""
        self.expire(now_s)
        account = self._holdings.accounts.get(namespace)
        return TreeMatch(None, [], None, 0) if account is None else account.tree.find(tokens)

    def unpinned(self, found: TreeMatch) -> int:
        """Of its whole blocks, those that count as room, and no longer once they are pinned."""
        refs = self._holdings.pool.ref_count
        return [refs[node.block] for node in found.path].count(1)

    def peek(self, namespace: Namespace, tokens: Sequence[int], now_s: float) -> CachePeek:
        """What `tokens` would find, as it is told to others. As `find`."""
        found = self.find(namespace, tokens, now_s)
        path = found.path if found.near is None else [*found.path, found.near]
        promised = sum([node.promised_as is not None for node in path]) * self.block_size
        ends_s = min([node.terms.limit_at_s for node in path if node.terms], default=math.inf)
        expires_at_s = None if ends_s == math.inf else ends_s
        return CachePeek(found.cached_tokens, min(found.cached_tokens, promised), expires_at_s)

    def room(self, namespace: Namespace, quota: Quota) -> int:
        """Tokens of the longest sequence that could run, alone in the pool, beside others' floors.
        O(1), or O(floors) where these ask for more than there is."""
        return self._holdings.room(namespace, quota) * self.block_size

    def rooms(self, namespace: Namespace, quota: Quota) -> tuple[int, float]:
        """Blocks it could take now, by free list and eviction: as many as the pool has, and as its
        payer's own ceiling leaves it (infinite without one). O(payers moved since asked)."""
        return self._holdings.rooms(namespace, quota)

    def available(self, namespace: Namespace, quota: Quota) -> int:
        """The lesser of `rooms`."""
        return int(min(self.rooms(namespace, quota)))

    def stats(self) -> CacheStats:
        """Counters and gauges. O(payers moved since asked)."""
        return self._holdings.stats(self._evicted, self._expired, self._copied)

    def namespaces(self) -> tuple[NamespaceUse, ...]:
        """What each namespace holds. O(namespaces)."""
        return tuple(map(self._holdings.use, self._holdings.accounts))

    def use(self, namespace: Namespace) -> NamespaceUse:
        """What one namespace holds, which may be nothing."""
        return self._holdings.use(namespace)

    def take_changed(self) -> set[Namespace]:
        """Namespaces whose use may be another than at the last call. O(these)."""
        return self._holdings.take_changed()

    def tree_root(self, namespace: Namespace) -> Node | None:
        """To look at, not to touch: the namespace's tree, if it has one."""
        account = self._holdings.accounts.get(namespace)
        return account.tree.root if account else None

    def set_quota(self, quota: Quota) -> None:
        """A payer's quota has changed. Begun sequences keep what they have. As `room`."""
        self._holdings.shares.set_quota(quota)

    def over_share(self, payer: Payer) -> float:
        """Blocks a payer has borrowed above its floor, per unit of weight (rule 9)."""
        share = self._holdings.shares.get(payer)
        return share.over() if share else 0.0

    # -- one sequence's life ------------------------------------------------------------------

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
    ) -> BlockTable:
        """Match and pin the longest live prefix of `tokens`, token-exact, at most len(tokens) - 1.

        `found`: what `find` said of it, which saves looking again where nothing has changed. A
        partial block is matched by taking a new block and a pending copy (see `take_copies`);
        when no block can be had the partial match is given up, never the request. Renews what it
        read and answers `leases` in `table.leases`. O(blocks matched).
        """
        self.expire(now_s)
        account = self._holdings.account(namespace, quota)
        account.tables += 1
        table = BlockTable(account, now_s, write)
        self._holdings.tables.add(table)
        path: list[Node] = []
        if read:
            if found is None or not found.holds_of(account.tree):
                found = account.tree.find(tokens)
            self._match(table, found, now_s)
            path = found.path
        self._book.answer(table, path, len(tokens), leases, now_s)
        self._tell(Matched(namespace, len(tokens), table.kv_tokens))
        return table

    def grow(
        self, table: BlockTable, tokens: int, now_s: float, *, start: int | None = None
    ) -> bool:
        """Make slots [start, tokens) exist and be writable.

        `start` is table.kv_tokens if not given; it lies further on when steps in flight are writing
        what comes before. Allocates, evicts by rule 9, and copies on write where one of these slots
        lies in a block that others hold too. False: no room, nothing changed. O(1) when the slots
        are there.
        """
        start = table.kv_tokens if start is None else start
        blocks, refs = table.blocks, self._holdings.pool.ref_count
        first = start // self.block_size
        shared = [i for i in range(first, len(blocks)) if refs[blocks[i]] > 1]
        missing = max(0, self._blocks_for(tokens) - len(blocks))
        if not shared and not missing:
            return True
        fresh = self._allocate(table.account, len(shared) + missing, now_s)
        if fresh is None:
            return False
        for index in shared:
            old, new = blocks[index], fresh.pop()
            filled = start - index * self.block_size
            if filled > 0:
                self._copy(table.account, old, new, filled)
            blocks[index] = new
            table.version += 1
            self._holdings.unpin(old)
        blocks.extend(fresh)
        return True

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Copies that must run before the next step's writes, in order.

        Their sources stay pinned until this is called; the caller launches the step that has them
        before it calls anything else that may allocate.
        """
        return self._holdings.take_copies() if self._holdings.copies else ()

    def commit(
        self, table: BlockTable, tokens: Sequence[int], kv_tokens: int, now_s: float
    ) -> None:
        """A completed step has put the KV of tokens[:kv_tokens] in place.

        Full blocks become findable; where the tree already has an equal block the table takes that
        one and frees its own. O(1) unless a block filled.
        """
        table.kv_tokens = kv_tokens
        full = kv_tokens // self.block_size
        if full == table.committed or not self._may_write(table):
            return
        first, size, new = table.committed, self.block_size, 0
        for index in range(first, full):
            run = tuple(tokens[index * size : (index + 1) * size])
            node = table.node.children.get(run)
            is_new = node is None
            if node is None:
                node, more = self._insert(table, run, index, now_s)
                new += more
            elif node.block != table.blocks[index]:
                self._holdings.pin(node)
                self._holdings.unpin(table.blocks[index])
                table.blocks[index] = node.block
                table.version += 1
            self._book.cover(table, node, index, now_s, is_new=is_new)
            self._book.computed(table, index)
            table.node = node
        table.committed = full
        self._tell(Committed(table.namespace, full - first, (full - first) * size, new))

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks, all pinned once more. O(blocks).

        The leases stay with the first table; what the fork adds rides under them.
        """
        fork = BlockTable(table.account, table.started_s, table.write)
        fork.blocks = list(table.blocks)
        fork.kv_tokens = table.kv_tokens
        fork.node, fork.committed = table.node, table.committed
        fork.write_epoch = table.write_epoch
        fork.asked = tuple((lease, 0) for lease, _ in table.asked)
        table.account.tables += 1
        self._holdings.tables.add(fork)
        for block in fork.blocks:
            self._holdings.share(block)
        return fork

    def release(
        self, table: BlockTable, tokens: Sequence[int], now_s: float, *, keep: bool = True
    ) -> None:
        """The sequence ends or is preempted: drop its holds, once. O(blocks).

        With `keep`, the partly filled last block (tokens up to table.kv_tokens) is left to the tree
        as well. Promises for blocks it never computed lapse.
        """
        if table not in self._holdings.tables:
            raise InvariantViolation("a block table was released twice")
        if keep:
            self._commit_tail(table, tokens, now_s)
        nodes = (self._holdings.node_of[block] for block in table.blocks[: table.committed])
        used = list(filter(None, nodes))  # the lower ones may have left the tree
        for node in used:
            node.last_use_s = now_s
        self._book.used(table.account, used, now_s)
        self._holdings.unpin_all(table.account, reversed(table.blocks))
        self._book.close(table)
        self._holdings.tables.remove(table)
        self._holdings.version += 1
        table.blocks = []
        table.account.tables -= 1
        self._holdings.forget_if_idle(table.account)

    # -- keeping house ------------------------------------------------------------------------

    def expire(self, now_s: float) -> int:
        """Let lapsed promises go and take out every block whose limit has passed; how many. Not of
        a block in use, where the clock counts from the last use. O(expired log n)."""
        self._book.lapse(now_s)
        expired = 0
        for account, node in self._book.expired(now_s):
            if not account.tree.holds(node):
                continue  # it went with a block above it
            blocks = self._holdings.detach(account, node)
            expired += blocks
            self._tell(Expired(account.namespace, blocks))
            self._holdings.forget_if_idle(account)
        self._expired += expired
        return expired

    def erase(
        self,
        namespace: Namespace,
        *,
        lease_id: str | None = None,
        tokens: Sequence[int] | None = None,
    ) -> int:
        """Forget a namespace, one lease of it, or everything under a token prefix; how many blocks.

        Blocks in use leave the tree at once and are freed with the last table that holds them.
        What now runs in the namespace commits nothing more: erased words must not come back. Of a
        lease, those that asked for it; a block that another covers too stays for that one.
        O(blocks of the namespace).
        """
        account = self._holdings.accounts.get(namespace)
        if account is None:
            return 0
        if lease_id is not None:
            tops = self._book.strike(account, lease_id)
        else:
            account.write_epoch += 1
            top = account.tree.root
            tops = account.tree.under(tokens) if tokens else list(top.children.values())
        blocks = sum(self._holdings.detach(account, top) for top in tops)
        if blocks:
            self._tell(BlocksErased(namespace, blocks))
        self._holdings.forget_if_idle(account)
        return blocks

    def recount(self) -> Iterator[None]:
        """Recount everything from scratch (I1, I2, I3, I5, I6, I9, I10, I11, I12), a millisecond
        or two at each step. Raises InvariantViolation with what is wrong. O(blocks) in all."""
        return recount(self._holdings)

    def check(self) -> None:
        """Recount everything at once."""
        for _ in self.recount():
            pass

    # -- inside -------------------------------------------------------------------------------

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _tell(self, fact: Fact) -> None:
        if self.facts is not None:
            self.facts(fact)

    def _match(self, table: BlockTable, found: TreeMatch, now_s: float) -> None:
        """Pin what is there. At least one token is left to compute."""
        account, path, near = table.account, found.path, found.near
        self._holdings.pin_all(account, path)
        self._read(account, path, now_s)
        if path:
            table.node = path[-1]
        table.blocks = [node.block for node in path]
        table.committed = len(path)
        table.kv_tokens = len(path) * self.block_size
        if near is not None:
            self._holdings.pin(near)
            fresh = self._allocate(account, 1, now_s)
            if fresh is not None:
                self._read(account, [near], now_s)
                self._copy(account, near.block, fresh[0], found.common)
                table.blocks.append(fresh[0])
                table.kv_tokens += found.common
            self._holdings.unpin(near.block)

    def _read(self, account: NamespaceAccount, nodes: Sequence[Node], now_s: float) -> None:
        for node in nodes:
            node.last_use_s = now_s
            node.hits += 1
        self._book.read(account, nodes, now_s)

    def _allocate(self, account: NamespaceAccount, count: int, now_s: float) -> list[int] | None:
        """`count` blocks for a namespace: free ones, else expired, else evicted; or None."""
        if self._holdings.shortage(account, count)[0] > 0:
            self.expire(now_s)
            if not self._holdings.can_evict(account, count):
                return None
            for victim, node in self._holdings.make_room(account, count):
                self._evicted += 1
                lived_s = now_s - node.since_s
                self._tell(Evicted(victim.namespace, account.namespace, 1, lived_s))
                self._holdings.forget_if_idle(victim)
        return self._holdings.allocate(account, count)

    def _copy(self, account: NamespaceAccount, src: int, dst: int, tokens: int) -> None:
        self._holdings.copy(src, dst, tokens)
        self._copied += 1
        self._tell(Copied(account.namespace, tokens))

    def _may_write(self, table: BlockTable) -> bool:
        """Not after an erasure, nor under a prefix that has left the tree meanwhile."""
        if table.write and (
            table.write_epoch != table.account.write_epoch
            or not table.account.tree.holds(table.node)
        ):
            table.write = False
        return table.write

    def _insert(
        self, table: BlockTable, run: tuple[int, ...], index: int, now_s: float
    ) -> tuple[Node, int]:
        block = table.blocks[index]
        node, more = self._holdings.insert(table.account, table.node, run, block, now_s)
        self._book.note(table.account, node, now_s)
        return node, more

    def _commit_tail(self, table: BlockTable, tokens: Sequence[int], now_s: float) -> None:
        """Leave the partly filled last block to the tree, unless the tree has as much already."""
        index = table.committed
        run = tuple(tokens[index * self.block_size : table.kv_tokens])
        if not 0 < len(run) < self.block_size or not self._may_write(table):
            return
        block = table.blocks[index]
        if block in self._holdings.copies or self._holdings.pool.ref_count[block] > 1:
            return  # its copy has not run, or a fork shares it and goes on writing there
        node, common = table.account.tree.nearest(table.node, run)
        is_new = node is None or common < len(run)
        if node is None or common < len(run):
            node, more = self._insert(table, run, index, now_s)
            self._tell(Committed(table.namespace, 1, len(run), more))
        self._book.cover(table, node, index, now_s, is_new=is_new)
        self._book.computed(table, index)
