"""The checker: recounts the cache from scratch, in pieces, and reports the first mismatch.

It changes nothing and trusts no counter. The parts are independent: the free list, each namespace,
each payer, the sums over all payers. A part that is larger than a piece is checked in several
pieces, and restarts if the cache has changed between two of them. `PrefixCache.recount` exposes the
checker; core runs it when idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

from engine.cache.blocks.block_manager import BlockManager
from engine.cache.blocks.block_table import BlockTable
from engine.cache.tree.accounts import NamespaceAccount, PayerAccount
from engine.cache.tree.prefix_tree import (
    Node,
    State,
    TreeBlock,
    WindowBlock,
    all_blocks,
    tree_blocks,
)
from engine.cache.tree.window_groups import HOLE
from engine.errors import InvariantViolation

PIECE_BLOCKS = 256
"""Blocks checked in one piece: one to two milliseconds."""

TRIES_MAX = 3
"""Restarts of a part while the cache keeps changing; after these the part is checked in one go."""

Steps = Iterator[int]
"""An iterator over the amounts of work done. Raises InvariantViolation at the first mismatch."""


def recount(manager: BlockManager) -> Iterator[None]:
    """Check every part, one piece per step. O(blocks) in all.

    Raises: InvariantViolation at the first mismatch.
    """
    work = 0
    for part in _parts(manager):
        tries, is_complete = 0, False
        while not is_complete:
            tries, version, is_complete = tries + 1, manager.version, True
            for done in part():
                work += done
                if work < PIECE_BLOCKS or tries > TRIES_MAX:
                    continue
                work = 0
                yield
                if manager.tables or manager.version != version:
                    is_complete = False
                    break


def _parts(manager: BlockManager) -> Iterator[Callable[[], Steps]]:
    yield partial(_check_free, manager)
    for account in list(manager.accounts.values()):
        yield partial(_check_account, manager, account)
    for payer_account in list(manager.fair_share):
        yield partial(_check_payer, manager, payer_account)
    yield partial(_check_sums, manager)


def _expect(holds: bool, mismatch: str, found: object) -> None:
    if not holds:
        raise InvariantViolation(f"{mismatch}, recounted: {found}")


def _check_free(manager: BlockManager) -> Steps:
    """Check that a free block has no reference (rule *Reference*) and no owner."""
    yield from manager.pool.check()
    window_blocks = 0
    for block, count in enumerate(manager.pool.ref_count):
        _expect((manager.owner[block] is None) == (count == 0), f"block {block}'s owner", count)
        window_blocks += isinstance(manager.node_of[block], WindowBlock)
        if block % 1024 == 0:
            yield 32
    _expect(
        window_blocks == manager.window_blocks,
        f"{manager.window_blocks} window blocks in trees",
        window_blocks,
    )


def _check_account(manager: BlockManager, account: NamespaceAccount) -> Steps:
    """Check one namespace: block references and states, the shape of its tree, its counts."""
    if manager.accounts.get(account.namespace) is not account:
        return  # deleted before its turn
    refs, owner, name = manager.pool.ref_count, manager.owner, account.namespace
    tables = [table for table in manager.tables if table.account is account]
    references: Counter[int] = Counter()
    for table in tables:
        references.update(table.pinned)
        _check_holes(table)
        _check_writable(manager, table)
        references.update(table.restores)
        references.update(chain(_check_windows(table), *table.kept.values()))
    references.update(c.src for c in manager.copies.values() if owner[c.src] is account)
    yield 1 + len(tables) + len(references) // 8
    cached = evictable = ends = bound = below = away = 0
    promised: Counter[str] = Counter()
    stack = [account.tree.root]
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        ends += account.lease_endpoints.check_node(node)
        yield from _check_node(manager, node)
        has_more = node.beside is not None or node.away is not None or node.states is not None
        for one in all_blocks(node) if has_more else (node,):
            bound += one.is_bound
            if one.promised_class is not None:
                promised[one.promised_class] += 1
                below += not one.is_bound
                away += one.block < 0
        if node.block < 0:
            continue
        for held in tree_blocks(node) if has_more else (node,):
            references[held.block] += 1
            is_cached = refs[held.block] == 1
            cached += is_cached
            is_evictable = is_cached and not held.is_bound
            evictable += is_evictable
            is_next = is_evictable and not held.device_children
            if is_next or held.eviction_score is not None:
                _check_order(account, held, is_next=is_next)
    for number, (block, count) in enumerate(references.items()):
        _expect(refs[block] == count, f"block {block}: {refs[block]} references", count)
        _expect(owner[block] is account, f"block {block}'s owner", name)
        if number % 256 == 0:
            yield 32
    account.lease_endpoints.check_total(ends)
    for mismatch, has, found in (
        ("held", account.held, len(references)),
        ("cached", account.cached, cached),
        ("evictable", account.evictable, evictable),
        ("promised", account.promised, promised.total()),
        ("promised by class", account.promised_in, promised),
        ("tables", account.tables, len(tables)),
        ("bound", account.bound, bound),
        ("promised below", account.below, below),
        ("promised away from the device", account.away, away),
        ("reserved", account.reserved, sum(table.reserved for table in tables)),
    ):
        _expect(has == found, f"{name!r}: {has} {mismatch}", found)


def _check_order(account: NamespaceAccount, block: TreeBlock, *, is_next: bool) -> None:
    """Check that a block is in the eviction order if it may be the next to leave, else not."""
    is_ordered = block.eviction_score is not None
    _expect(is_ordered == is_next, f"block {block.block} in the eviction order", is_next)
    is_held = account.payer_account.eviction_order.holds(block)
    _expect(is_held, f"block {block.block}: missing in the eviction order", is_held)


def _check_holes(table: BlockTable) -> None:
    """Check that the holes of a table lie behind its sinks, and that it commits nothing there."""
    if table.attention is None:
        _expect(not table.holes, f"{table.holes} holes without an attention window", 0)
        return
    first = table.attention.sinks
    here = table.blocks[first : first + table.holes]
    _expect(here == [HOLE] * table.holes, f"{table.holes} holes behind {first}", here.count(HOLE))
    _expect(table.blocks.count(HOLE) == table.holes, "holes", table.blocks.count(HOLE))
    shared = table.attention.shared_blocks
    _expect(table.committed <= shared, f"{table.committed} committed blocks", shared)
    _expect(not table.holes or table.committed <= first, "holes in the tree's part", first)


def _check_writable(manager: BlockManager, table: BlockTable) -> None:
    """Check that the last block that a table may write without asking is whole and its own (rule
    *Reference*), where any slot of it is still to be written. A table that has let its blocks go
    writes nothing before it has asked.
    """
    if not table.blocks:
        return
    whole, rest = divmod(table.writable_tokens, manager.block_size)
    _expect(not rest and whole <= len(table.blocks), f"{whole} writable blocks", len(table.blocks))
    if table.writable_tokens <= table.kv_tokens:
        return
    for row in (table.blocks, *table.beside):
        refs = manager.pool.ref_count[row[whole - 1]]
        _expect(refs == 1, f"writable block {row[whole - 1]}: {refs} references", 1)


def _check_windows(table: BlockTable) -> list[int]:
    """Check that the KV groups of a table agree and that only its beginning has holes; return the
    blocks it holds in window groups.
    """
    held = []
    for row, first in zip(table.beside, table.first, strict=True):
        _expect(len(row) == len(table.blocks), "the runs of a window group", len(table.blocks))
        _expect(row.count(HOLE) == first, f"holes up to {first}", row.count(HOLE))
        held += row[first:]
        _expect(HOLE not in row[first:], f"a hole behind {first}", first)
    for _, blocks in table.aside:
        _expect(HOLE not in blocks, "a hole set aside", blocks)
        held += blocks
    return held


def _check_window_blocks(manager: BlockManager, node: Node) -> None:
    """Check the window blocks of a node: none outlives, outpins or outpromises it."""
    refs, groups = manager.pool.ref_count, len(manager.windows.windows)
    _expect(len(node.beside or ()) == groups, "the window groups of a node", node.run)
    for group, block in enumerate(node.beside or ()):
        if block is None:
            continue
        _expect(manager.node_of[block.block] is block, f"block {block.block}'s node", node.run)
        is_at_home = block.parent is node and block.group == group
        _expect(is_at_home, f"window block {block.block} of another node", node.run)
        is_pinned, is_node_pinned = refs[block.block] > 1, refs[node.block] > 1
        _expect(is_node_pinned or not is_pinned, "a window block pinned alone", node.run)
        _expect(node.is_bound or not block.is_bound, "a window block bound alone", node.run)


def _check_state(manager: BlockManager, node: Node, state: State) -> None:
    """Check that a state stands behind its node, and has blocks of its own."""
    _expect(state.node is node and node.block >= 0, "a state behind no block", node.run)
    _expect(len(state.run) < manager.block_size, "a state's tokens behind its node", state.run)
    _expect(0 < len(state.blocks) <= state.size, "blocks of a state", state.size)
    for block in state.blocks:
        _expect(manager.node_of[block.block] is block, f"block {block.block}'s state", state.run)
        is_at_home = block.state is state and block.parent is node
        _expect(is_at_home, f"block {block.block} of another state", state.run)
        is_pinned = manager.pool.ref_count[block.block] > 1
        _expect(state.is_whole or not is_pinned, "a broken state in use", state.run)
        _expect(node.is_bound or not block.is_bound, "a state bound alone", node.run)


def _check_node(manager: BlockManager, node: Node) -> Steps:
    """Check one node of a tree, and its children."""
    refs, is_evictable = manager.pool.ref_count, False
    here = copied = binds = 0
    for number, below in enumerate(node.children.values()):
        here += below.block >= 0
        copied += below.is_copied
        binds += below.is_bound
        if number % 1024 == 1023:
            yield 128
    if node.run:
        _expect(len(node.run) <= manager.block_size, "a run's length", node.run)
        if len(node.run) < manager.block_size:
            _expect(not node.children, "a tail with children", node.run)
            _expect(not node.is_copied, "a tail below the device", node.run)
        _expect(node.block >= 0 or node.is_copied, "a node without a place", node.run)
        _expect(node.block >= 0 or not here, "a hole on the device", node.run)
        _expect(node.is_copied or not copied, "a hole below the device", node.run)
    if node.block >= 0:
        _expect(manager.node_of[node.block] is node, f"block {node.block}'s node", node.run)
        is_evictable = refs[node.block] == 1 and not node.is_bound
        if node.beside is not None or manager.windows.windows:
            _check_window_blocks(manager, node)
    for state in node.states or ():
        _check_state(manager, node, state)
    for group, block in enumerate(node.away or ()):
        if block is not None:
            is_away = block.promised and block.block < 0
            is_at_home = block.parent is node and block.group == group
            _expect(is_away and is_at_home, "a window block away from its node", node.run)
    _check_binds(manager, node, binds)
    _expect(node.device_children == here, f"{node.device_children} on the device", here)
    _expect(node.copied_children == copied, f"{node.copied_children} below the device", copied)
    order, many = node.child_order, len(node.children) > 1
    _expect(order is not None or not many, "children without an order", len(node.children))
    runs = order
    if runs is None:
        runs = [run for run, child in node.children.items() if child.block >= 0]
    _expect(len(runs) == here, "children out of order", len(runs))
    before = None
    for run in runs:
        child = node.children.get(run)
        _expect(child is not None, "an ordered child that is missing", run)
        assert child is not None
        _expect(child.parent is node and child.run == run, "a child of another parent", run)
        if before is not None:
            _expect(before < run, "children out of order", (before, run))
            _expect(before != run[: len(before)], "a run is a prefix of its sibling's", run)
        if is_evictable:
            is_free = refs[child.block] == 1 and not child.is_bound
            _expect(is_free, "an evictable block above one that is not", run)
        before = run
        yield 1
    yield 0


def _check_binds(manager: BlockManager, node: Node, binds: int) -> None:
    """Check what binds a node to the device: its children, of which `binds` are bound, its window
    blocks, tables, and its own promise.
    """
    if node.beside is not None or node.states is not None:
        binds += sum(block.is_bound for block in tree_blocks(node)[1:])
    if binds != node.bound_below:
        binds += sum(table.binds is node for table in manager.tables)
    _expect(node.bound_below == binds, f"{node.bound_below} that bind a node", binds)
    if node.run:
        _expect(node.is_bound or not binds, "a bound block below one that is not", node.run)
        _expect(node.is_bound <= (node.promised or binds > 0), "a node bound by nothing", node.run)


def _check_payer(manager: BlockManager, payer_account: PayerAccount) -> Steps:
    """Check that each account has one payer, that no idle payer is kept, and that the sums are
    right.
    """
    fair_share, payer = manager.fair_share, payer_account.payer
    if fair_share.get(payer) is not payer_account:
        return  # deleted before its turn
    _expect(not payer_account.is_idle, f"{payer!r}: an idle account", payer)
    yield 1
    sums = [0, 0, 0, 0, 0, 0]
    for number, (name, account) in enumerate(payer_account.accounts.items()):
        _expect(account.payer_account is payer_account, f"{name!r}: another payer's account", payer)
        _expect(manager.accounts.get(name) is account, f"{name!r}: an unknown account", payer)
        counts = (account.held, account.cached, account.evictable)
        promises = account.bound + account.reserved, account.promised + account.reserved
        for position, more in enumerate((*counts, *promises, account.below)):
            sums[position] += more
        if number % 16 == 0:
            yield 8
    has = [
        payer_account.held,
        payer_account.cached,
        payer_account.evictable,
        payer_account.promised,
        payer_account.promised_total,
        payer_account.below,
    ]
    names = "held, cached, evictable, promised, on any level, below"
    _expect(has == sums, f"{payer!r}: {names} {has}", sums)
    order, before = payer_account.eviction_order, None
    for start in range(0, len(order), PIECE_BLOCKS):
        for score, serial, node in order.entries(start, start + PIECE_BLOCKS):
            key = (score, serial)
            _expect(before is None or before < key, "the eviction order", node.block)
            is_current = key == (node.eviction_score, node.serial)
            _expect(is_current, "a stale eviction score", node.block)
            owner = manager.owner[node.block]
            belongs = owner is not None and owner.payer_account is payer_account
            _expect(belongs, "another payer's block in the eviction order", node.block)
            before = key
        yield PIECE_BLOCKS // 2


def _check_sums(manager: BlockManager) -> Steps:
    """Check that the payers' sums cover the pool and that floors and promises keep their bounds."""
    fair_share = manager.fair_share
    yield from fair_share.check()
    held = floors = promised = accounts = 0
    for number, payer_account in enumerate(fair_share):
        held += payer_account.held
        floors += payer_account.floor_blocks
        promised += payer_account.promised
        accounts += len(payer_account.accounts)
        if number % 64 == 0:
            yield 8
    in_use = manager.pool.blocks - len(manager.pool.free)
    _expect(in_use == held, f"{in_use} blocks in use", held)
    _expect(accounts == len(manager.accounts), "accounts of payers", accounts)
    _expect(floors <= fair_share.floors_max, f"floors of more than {fair_share.floors_max}", floors)
    _expect(
        promised <= fair_share.promisable, f"more than {fair_share.promisable} promised", promised
    )
