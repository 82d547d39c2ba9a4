"""The audit: recounts the cache from scratch and says what does not add up.

It changes nothing and trusts no counter. `PrefixCache.check` calls it; core does when idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from engine.cache.block_table import BlockTable
from engine.cache.eviction import Account
from engine.cache.holdings import Holdings
from engine.cache.prefix_tree import Node
from engine.errors import InvariantViolation


def check_holdings(holdings: Holdings) -> None:
    """Raise InvariantViolation at the first thing that is wrong. O(blocks).

    References (I1, I2), the state of every block (I3), the shape of every tree (I5, I6, I9), and
    each account's counts and eviction order (I10, I12).
    """
    holdings.pool.check()
    references: Counter[int] = Counter()
    for table in holdings.tables:
        references.update(table.blocks)
    references.update(copy.src for copy in holdings.copies.values())
    for account in holdings.accounts.values():
        for node in account.tree.root.below():
            if node.block >= 0:
                references[node.block] += 1
    for block, count in enumerate(holdings.pool.ref_count):
        _expect(references[block] == count, f"block {block}: {count} references", references[block])
        _expect((holdings.owner[block] is None) == (count == 0), f"block {block}'s owner", count)
    held = Counter(map(id, filter(None, holdings.owner)))
    tables: dict[int, list[BlockTable]] = {}
    for table in holdings.tables:
        tables.setdefault(id(table.account), []).append(table)
    for account in holdings.accounts.values():
        _check_tree(holdings, account)
        _check_account(holdings, account, held[id(account)], tables.get(id(account), []))
    _check_shares(holdings)


def _expect(holds: bool, what: str, found: object) -> None:
    if not holds:
        raise InvariantViolation(f"{what}, recounted: {found}")


def _check_shares(holdings: Holdings) -> None:
    """Every account is in one share, its own; no share is kept for nothing."""
    found = {}
    shares = holdings.shares
    shares.check()
    floors = sum(share.floor_blocks for share in shares)
    _expect(floors <= shares.promisable, f"floors of more than {shares.promisable}", floors)
    promised = sum(share.promised for share in shares)
    _expect(promised <= shares.promisable, f"more than {shares.promisable} promised", promised)
    for share in shares:
        payer = share.payer
        _expect(shares.get(payer) is share, "a share under another's name", payer)
        leaves = [n for a in share.accounts.values() for n in a.tree.root.below() if n.in_order]
        order = sorted((node.last_use_s, node.serial) for node in leaves)
        _expect(order == [entry[:2] for entry in share.order], "the order of eviction", order)
        _expect(not share.is_idle, f"{payer!r}: an idle share", payer)
        for name, account in share.accounts.items():
            _expect(account.share is share, f"{name!r}: in another's share", payer)
            found[name] = account
        mine = share.accounts.values()
        for what, has, sums in (
            ("held", share.held, sum(a.held for a in mine)),
            ("cached", share.cached, sum(a.cached for a in mine)),
            ("evictable", share.evictable, sum(a.evictable for a in mine)),
            ("promised", share.promised, sum(a.promised + a.reserved for a in mine)),
        ):
            _expect(has == sums, f"{payer!r}: {has} {what} in all", sums)
    _expect(found == holdings.accounts, "accounts in shares", sorted(found))


def _check_tree(holdings: Holdings, account: Account) -> None:
    size = holdings.block_size
    account.ends.check(account.tree.root)
    for node in account.tree.root.below():
        runs = sorted(node.children)
        _expect(node.order is None or list(node.order) == runs, "children out of order", runs)
        for a, b in pairwise(runs):
            _expect(a != b[: len(a)], "a child's run is a prefix of its sibling's", (a, b))
        for run, child in node.children.items():
            _expect(child.parent is node and child.run == run, "a child of another", run)
        if node.block < 0:
            continue
        _expect(0 < len(node.run) <= size, "a run's length", node.run)
        _expect(not node.children or len(node.run) == size, "a tail with children", node.run)
        _expect(holdings.node_of[node.block] is node, f"block {node.block}'s node", node.run)
        _expect(holdings.owner[node.block] is account, f"block {node.block}'s owner", node.run)


def _check_account(
    holdings: Holdings, account: Account, held: int, tables: Sequence[BlockTable]
) -> None:
    def count(nodes: list[Node], found: int, what: str) -> None:
        _expect(found == len(nodes), f"{account.namespace!r}: {found} {what}", len(nodes))

    nodes = [node for node in account.tree.root.below() if node.block >= 0]
    cached = [node for node in nodes if holdings.pool.ref_count[node.block] == 1]
    evictable = [node for node in cached if not node.promised]
    leaves = {node for node in evictable if not node.children}
    count(cached, account.cached, "cached")
    count(evictable, account.evictable, "evictable")
    count([node for node in nodes if node.promised], account.promised, "promised")
    classes = Counter(node.promised_as for node in nodes if node.promised)
    _expect(classes == account.promised_in, f"{account.namespace!r}: promised by class", classes)
    for node in nodes:
        _expect(node.in_order == (node in leaves), "in the order of eviction", node.run)
    _expect(held == account.held, f"{account.namespace!r}: {account.held} held", held)
    _expect(len(tables) == account.tables, f"{account.namespace!r}: tables", len(tables))
    reserved = sum(table.reserved for table in tables)
    _expect(reserved == account.reserved, f"{account.namespace!r}: reserved", reserved)
    free_to_go = set(evictable)
    for node in evictable:
        for child in node.children.values():
            _expect(child in free_to_go, "something under an evictable block holds it", child.run)
