"""The audit: recounts the cache from scratch, piece by piece, and says what does not add up.

It changes nothing and trusts no counter. Its parts each hold for themselves: the free list, every
namespace, every payer, the sums over all. A part that is larger than a piece is looked at in
several, and from its beginning where anything has moved between two of them.
`PrefixCache.recount` gives it out; core goes on with it when idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

from engine.cache.accounts import NamespaceAccount, PayerAccount
from engine.cache.block_manager import BlockManager
from engine.cache.prefix_tree import Node
from engine.errors import InvariantViolation

PIECE_BLOCKS = 256
"""Blocks that are looked at in one go: one or two milliseconds."""

TRIES_MAX = 3
"""Beginnings of a part among work that goes on all the time; then it is looked at in one go."""

Steps = Iterator[int]
"""Raises InvariantViolation at the first thing that is wrong; what it has looked at, in between."""


def recount(holdings: BlockManager) -> Iterator[None]:
    """Every part, a piece at each step. Raises InvariantViolation. O(blocks) in all."""
    looked = 0
    for part in _parts(holdings):
        tries, is_whole = 0, False
        while not is_whole:
            tries, version, is_whole = tries + 1, holdings.version, True
            for seen in part():
                looked += seen
                if looked < PIECE_BLOCKS or tries > TRIES_MAX:
                    continue
                looked = 0
                yield
                if holdings.tables or holdings.version != version:
                    is_whole = False
                    break


def _parts(holdings: BlockManager) -> Iterator[Callable[[], Steps]]:
    yield partial(_check_free, holdings)
    for account in list(holdings.accounts.values()):
        yield partial(_check_account, holdings, account)
    for share in list(holdings.shares):
        yield partial(_check_share, holdings, share)
    yield partial(_check_sums, holdings)


def _expect(holds: bool, what: str, found: object) -> None:
    if not holds:
        raise InvariantViolation(f"{what}, recounted: {found}")


def _check_free(holdings: BlockManager) -> Steps:
    """Nobody refers to free blocks (I1), and nobody owns them."""
    yield from holdings.pool.check()
    for block, count in enumerate(holdings.pool.ref_count):
        _expect((holdings.owner[block] is None) == (count == 0), f"block {block}'s owner", count)
        if block % 1024 == 0:
            yield 32


def _check_account(holdings: BlockManager, account: NamespaceAccount) -> Steps:
    """One namespace: references to its blocks and their state (I1, I2, I3), the shape of its tree
    (I5, I6, I9), its counts (I10, I12)."""
    if holdings.accounts.get(account.namespace) is not account:
        return  # it was forgotten before its turn came
    refs, owner, name = holdings.pool.ref_count, holdings.owner, account.namespace
    tables = [table for table in holdings.tables if table.account is account]
    references: Counter[int] = Counter()
    for table in tables:
        references.update(table.blocks)
    references.update(c.src for c in holdings.copies.values() if owner[c.src] is account)
    yield 1 + len(tables) + len(references) // 8
    cached = evictable = ends = 0
    promised: Counter[str] = Counter()
    stack = [account.tree.root]
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        ends += account.ends.check(node)
        yield from _check_node(holdings, account, node)
        if node.block < 0:
            continue
        references[node.block] += 1
        if node.promised_as is not None:
            promised[node.promised_as] += 1
        is_cached = refs[node.block] == 1
        cached += is_cached
        is_evictable = is_cached and not node.promised
        evictable += is_evictable
        is_leaf = is_evictable and not node.children
        _expect(node.in_order == is_leaf, "in the order of eviction", node.run)
        if is_leaf:
            entry = (node.last_use_s, node.serial, node)
            _expect(entry in account.share.order, "not in the order of eviction", node.run)
    for number, (block, count) in enumerate(references.items()):
        _expect(refs[block] == count, f"block {block}: {refs[block]} references", count)
        _expect(owner[block] is account, f"block {block}'s owner", name)
        if number % 256 == 0:
            yield 32
    account.ends.check_sum(ends)
    for what, has, found in (
        ("held", account.held, len(references)),
        ("cached", account.cached, cached),
        ("evictable", account.evictable, evictable),
        ("promised", account.promised, promised.total()),
        ("promised by class", account.promised_in, promised),
        ("tables", account.tables, len(tables)),
        ("reserved", account.reserved, sum(table.reserved for table in tables)),
    ):
        _expect(has == found, f"{name!r}: {has} {what}", found)


def _check_node(holdings: BlockManager, account: NamespaceAccount, node: Node) -> Steps:
    """One block of a tree, and the order of those directly below it."""
    refs, is_evictable = holdings.pool.ref_count, False
    if node.block >= 0:
        _expect(0 < len(node.run) <= holdings.block_size, "a run's length", node.run)
        is_whole = len(node.run) == holdings.block_size
        _expect(is_whole or not node.children, "a tail with children", node.run)
        _expect(holdings.node_of[node.block] is node, f"block {node.block}'s node", node.run)
        is_evictable = refs[node.block] == 1 and not node.promised
    runs = node.children if node.order is None else node.order
    _expect(len(runs) == len(node.children), "children out of order", len(runs))
    _expect(len(runs) < 2 or node.order is not None, "children without an order", len(runs))
    before = None
    for run in runs:
        child = node.children.get(run)
        _expect(child is not None, "an ordered child that is not there", run)
        assert child is not None
        _expect(child.parent is node and child.run == run, "a child of another", run)
        if before is not None:
            _expect(before < run, "children out of order", (before, run))
            _expect(before != run[: len(before)], "a run is a prefix of its sibling's", run)
        if is_evictable:
            is_free = refs[child.block] == 1 and not child.promised
            _expect(is_free, "something under an evictable block holds it", run)
        before = run
        yield 1
    yield 0


def _check_share(holdings: BlockManager, share: PayerAccount) -> Steps:
    """Every account is in one share, its own; no share is kept for nothing."""
    shares, payer = holdings.shares, share.payer
    if shares.get(payer) is not share:
        return  # it was forgotten before its turn came
    _expect(not share.is_idle, f"{payer!r}: an idle share", payer)
    yield 1
    sums = [0, 0, 0, 0]
    for number, (name, account) in enumerate(share.accounts.items()):
        _expect(account.share is share, f"{name!r}: in another's share", payer)
        _expect(holdings.accounts.get(name) is account, f"{name!r}: nobody's account", payer)
        of_it = (account.held, account.cached, account.evictable)
        for place, more in enumerate((*of_it, account.promised + account.reserved)):
            sums[place] += more
        if number % 16 == 0:
            yield 8
    has = [share.held, share.cached, share.evictable, share.promised]
    _expect(has == sums, f"{payer!r}: held, cached, evictable, promised in all {has}", sums)
    before = None
    for start in range(0, len(share.order), PIECE_BLOCKS):
        for entry in islice(share.order, start, start + PIECE_BLOCKS):
            node: Node = entry[2]
            _expect(before is None or before < entry[:2], "the order of eviction", node.run)
            _expect(entry[:2] == (node.last_use_s, node.serial), "its use in the order", node.run)
            account_of = holdings.owner[node.block]
            is_its = node.in_order and account_of is not None and account_of.share is share
            _expect(is_its, "another's block in the order of eviction", node.run)
            before = entry[:2]
        yield PIECE_BLOCKS // 2


def _check_sums(holdings: BlockManager) -> Steps:
    """Nothing is left over, and no more is guaranteed and promised than may be."""
    shares = holdings.shares
    yield from shares.check()
    held = floors = promised = accounts = 0
    for number, share in enumerate(shares):
        held += share.held
        floors += share.floor_blocks
        promised += share.promised
        accounts += len(share.accounts)
        if number % 64 == 0:
            yield 8
    in_use = holdings.pool.blocks - len(holdings.pool.free)
    _expect(in_use == held, f"{in_use} blocks in use", held)
    _expect(accounts == len(holdings.accounts), "accounts in shares", accounts)
    _expect(floors <= shares.floors_max, f"floors of more than {shares.floors_max}", floors)
    _expect(promised <= shares.promisable, f"more than {shares.promisable} promised", promised)
