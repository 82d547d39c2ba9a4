"""The pieces of a row under an attention window: tokens that read the same blocks.

A token reads by the block that it lies in, so the tokens of one block read one list of blocks, and
those up to the shared blocks read all before them. Laid out by its blocks, such a piece is plain
causal attention over a shorter table, in every backend. The module knows no tensor. The backends
call it.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from engine.api import BlockWindow
from engine.plan import Row


class RowPiece(Struct, frozen=True, gc=False):
    """Tokens [first, end) of a row, counted from its beginning, which read the first `sinks` blocks
    of its table and those from `begin_block` to `end_block`, in this order.

    Where a piece reads all blocks, `sinks` and `begin_block` are 0.
    """

    first: int
    end: int
    at: int
    """Which of the keys of these blocks is the first token's own; each further token sees one
    more."""
    sinks: int
    begin_block: int
    end_block: int

    def blocks(self, row: Row) -> list[int]:
        """Return the blocks that the piece reads. O(these)."""
        ids = row.block_ids
        return [*ids[: self.sinks], *ids[self.begin_block : self.end_block]]


def pieces_of(row: Row, window: BlockWindow, block_size: int) -> Iterator[RowPiece]:
    """Yield the pieces of a row that has a window, in order. O(pieces)."""
    shared_tokens = window.shared_blocks * block_size
    position, end = row.start, row.start + row.count
    while position < end:
        sinks = begin = 0
        upto = min(end, shared_tokens)
        if position >= shared_tokens:
            block = position // block_size
            upto, sinks = min(end, (block + 1) * block_size), window.sinks
            begin = window.first_read(block)
        at = position - (begin - sinks) * block_size
        first, last = position - row.start, upto - row.start
        yield RowPiece(first, last, at, sinks, begin, -(-upto // block_size))
        position = upto
