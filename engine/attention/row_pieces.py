"""The pieces of a row under an attention window: tokens that read the same blocks.

A token reads by the block that it lies in, so the tokens of one block read one list of blocks, and
those up to the shared blocks read all before them. Laid out by its blocks alone, such a piece is
plain causal attention over a shorter table, whatever the backend. The module knows no tensor. The
backends call it.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from engine.plan import BlockWindow, Row


class RowPiece(Struct, frozen=True, gc=False):
    """Tokens [first, end) of a row, counted from its beginning, which read `blocks` in this order.

    `at`: which of the keys of `blocks` is the first token's own; each further token sees one more.
    """

    first: int
    end: int
    at: int
    blocks: list[int]


def pieces_of(row: Row, window: BlockWindow, block_size: int) -> Iterator[RowPiece]:
    """Yield the pieces of a row that has a window, in order. O(blocks that they read)."""
    ids, sinks = row.block_ids, window.sinks
    shared_tokens = window.shared_blocks * block_size
    position, end = row.start, row.start + row.count
    while position < end:
        if position < shared_tokens:
            upto = min(end, shared_tokens)
            blocks, skipped = list(ids[: -(-upto // block_size)]), 0
        else:
            block = position // block_size
            upto, first = min(end, (block + 1) * block_size), window.first_read(block)
            blocks, skipped = [*ids[:sinks], *ids[first : block + 1]], first - sinks
        at = position - skipped * block_size
        yield RowPiece(position - row.start, upto - row.start, at, blocks)
        position = upto
