"""The block pool: the free list, and the reference count of each block.

It knows no tokens, trees or namespaces. The cache's modules reach it as `BlockManager.pool`.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.errors import InvariantViolation


class BlockPool:
    """Reference counts of `blocks` blocks, and the free list.

    `ref_count[b]` = tables that hold b + 1 if the tree does + 1 while b is the source of a copy not
    yet launched. Every call is O(1) unless it says otherwise.
    """

    __slots__ = ("blocks", "free", "ref_count")

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.ref_count = [0] * blocks
        self.free = list(range(blocks - 1, -1, -1))

    def allocate(self, count: int) -> list[int]:
        """Return `count` free blocks with one reference each. The caller has checked that there are
        as many. O(count).
        """
        first = len(self.free) - count
        blocks = self.free[first:]
        del self.free[first:]
        blocks.reverse()  # the last one that was freed comes first
        refs = self.ref_count
        for block in blocks:
            if refs[block] != 0:
                raise InvariantViolation(f"block {block} is on the free list with references")
            refs[block] = 1
        return blocks

    def add_ref(self, block: int) -> int:
        """Add one reference to a block in use. Return the new count."""
        count = self.ref_count[block] + 1
        if count == 1:
            raise InvariantViolation(f"block {block} is free; expected a block in use")
        self.ref_count[block] = count
        return count

    def drop_ref(self, block: int) -> int:
        """Drop one reference; at 0 the block is free. Return the new count."""
        count = self.ref_count[block] - 1
        if count < 0:
            raise InvariantViolation(f"block {block} was freed twice")
        self.ref_count[block] = count
        if count == 0:
            self.free.append(block)
        return count

    def check(self) -> Iterator[int]:
        """Check that a block is free exactly when its reference count is zero (rule *Reference*).

        O(blocks). Yields the amount of work after each piece, in the checker's units.
        """
        found: set[int] = set()
        for start in range(0, len(self.free), 4096):
            some = self.free[start : start + 4096]
            if any(self.ref_count[block] for block in some):
                raise InvariantViolation("a block on the free list has references")
            found.update(some)
            yield 64
        if not len(found) == len(self.free) == self.ref_count.count(0):
            raise InvariantViolation("the free list differs from the blocks without references")
