"""The block pool: which blocks are free, and how many refer to each.

It knows nothing of tokens, trees or namespaces. Only `prefix_cache` calls it.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.errors import InvariantViolation


class BlockPool:
    """Reference counts of `blocks` blocks and the list of those nobody refers to.

    `ref_count[b]` = tables that hold b + 1 if the tree does + 1 while b is the source of a copy not
    yet launched. Every call is O(1).
    """

    __slots__ = ("blocks", "free", "ref_count")

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.ref_count = [0] * blocks
        self.free = list(range(blocks - 1, -1, -1))

    def allocate(self) -> int:
        """A free block with one reference; the caller has made sure that there is one."""
        block = self.free.pop()
        if self.ref_count[block] != 0:
            raise InvariantViolation(f"block {block} is on the free list and referred to")
        self.ref_count[block] = 1
        return block

    def add_ref(self, block: int) -> int:
        """One more refers to a block that is in use. Returns the new count."""
        count = self.ref_count[block] + 1
        if count == 1:
            raise InvariantViolation(f"block {block} is free and was referred to")
        self.ref_count[block] = count
        return count

    def drop_ref(self, block: int) -> int:
        """One fewer refers to it; at 0 it is free. Returns the new count."""
        count = self.ref_count[block] - 1
        if count < 0:
            raise InvariantViolation(f"block {block} was freed twice")
        self.ref_count[block] = count
        if count == 0:
            self.free.append(block)
        return count

    def check(self) -> Iterator[int]:
        """Free exactly when nobody refers to it (I1). O(blocks), in steps that say how much of it
        each was, as `audit` counts."""
        found: set[int] = set()
        for start in range(0, len(self.free), 4096):
            some = self.free[start : start + 4096]
            if any(self.ref_count[block] for block in some):
                raise InvariantViolation("a block on the free list is referred to")
            found.update(some)
            yield 64
        if not len(found) == len(self.free) == self.ref_count.count(0):
            raise InvariantViolation("the free list is not the blocks that nobody refers to")
