"""The attention backend of the C kernels: a step's plan as bundles and segments.

A *bundle* is a run of query tokens computed together; a *segment* says which tiles of keys some of
its tokens read from one block table. Runs of blocks that decoding rows share, at every level of the
prefix tree, become segments of many tokens: the keys are read once for all of them. Each token
takes its tiles in ascending order with any sharing, so sharing changes no bit of its result. The
backend knows no weights. The CPU runner calls `begin`; `engine.models.cpu_decoder` reads `work`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from msgspec.structs import replace

from engine.attention.batch import Batch
from engine.attention.interface import AttentionSpec
from engine.attention.row_pieces import RowPiece, pieces_of
from engine.plan import Row, StepPlan

TILE = 64
"""Keys of a tile; shared runs are rounded down to a multiple."""

TILE_BLOCKS = 4
"""KV blocks of a tile."""

SHARED_TOKENS = 8
"""Most decoding tokens of a bundle. More would read shared keys less often, and leave a core idle
when the step has few bundles."""

BUNDLE_HEADS = 96
"""Most query tokens times group size in a prompt's bundle: bounds the kernel's scratch on the
stack."""

Ints = npt.NDArray[np.int32]
Pieces = dict[int, list[RowPiece]]


class CpuPlace(Struct, frozen=True):
    """A step as the layers of one KV group see it: int32, but `slots` is int64.

    `slots` [T]: -1 for a silent token, whose KV is cached. `own_keys` [T]: which key of its table
    each token's own is; its position, but under an attention window, where the table has the blocks
    alone that are read.
    """

    tables: Ints
    slots: torch.Tensor
    bundles: Ints
    segments: Ints
    own_keys: torch.Tensor


class CpuWork:
    """One step's arrays for the C kernels, valid for the step. int32. `places`: by KV group."""

    def __init__(self, batch: Batch, places: tuple[CpuPlace, ...]) -> None:
        self.tokens = len(batch.token_ids)
        self.token_ids = batch.token_ids.int()
        self.positions = batch.positions.int()
        self.places = places


class CpuAttention:
    """`engine.attention.interface.AttentionBackend` for the C kernels."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._prompt_tokens = max(1, BUNDLE_HEADS // spec.group_size)
        self._decoding_tokens = max(1, min(SHARED_TOKENS, self._prompt_tokens))
        self.work: CpuWork | None = None

    def begin(self, plan: StepPlan, batch: Batch) -> None:
        """Lay out a step. O(blocks of its rows + rows * groups above them)."""
        starts = [0, *batch.row_ends]
        tables: list[Sequence[int]] = [row.block_ids for row in plan.rows]
        positions, pieces = batch.positions.int(), Pieces()
        own_keys = positions
        if plan.rows[-1].attention is not None:  # rows under windows come last
            pieces, own_keys = self._pieces(plan), positions.clone()
        for index, found in pieces.items():
            row = plan.rows[index]
            tables[index] = [block for piece in found for block in piece.blocks(row)]
            for piece in found:
                first, end = starts[index] + piece.first, starts[index] + piece.end
                own_keys[first:end] = torch.arange(piece.at, piece.at + end - first)
        offsets = np.cumsum([0, *map(len, tables)]).tolist()
        cut = self._cut(plan, starts, offsets, pieces)
        slots = batch.slots[0]
        if batch.written is not None:
            slots = torch.full_like(slots, -1).index_copy_(0, batch.written, slots[batch.written])
        places = [CpuPlace(_joined(tables), slots, *cut, own_keys)]
        if len(batch.slots) > 1:
            # In a window group each row reads by its own table: another's may have holes where
            # the row still sees keys. A request's window is none of these layers'.
            offsets = np.cumsum([0, *(len(row.block_ids) for row in plan.rows)]).tolist()
            alike = {index: _whole(plan.rows[index], found) for index, found in pieces.items()}
            bundles, segments = self._cut(replace(plan, groups=()), starts, offsets, alike)
            for group, slots in enumerate(batch.slots[1:]):
                tables = [row.beside[group] for row in plan.rows]
                places.append(CpuPlace(_joined(tables), slots, bundles, segments, positions))
        self.work = CpuWork(batch, tuple(places))

    def _pieces(self, plan: StepPlan) -> Pieces:
        """Return the pieces of the rows under an attention window, by row."""
        return {
            index: list(pieces_of(row, row.attention, TILE // TILE_BLOCKS))
            for index, row in enumerate(plan.rows)
            if row.attention is not None
        }

    def _cut(
        self, plan: StepPlan, starts: list[int], offsets: list[int], pieces: Pieces
    ) -> tuple[Ints, Ints]:
        """Return the bundles and segments of a step."""
        bundles: list[tuple[int, int, int, int]] = []
        segments: list[tuple[int, int, int, int, int]] = []
        index = 0
        while index < len(plan.rows):
            row = plan.rows[index]
            if row.count > 1:
                first, table = starts[index], offsets[index]
                if index not in pieces:
                    self._prompt(first, row.count, row.start, table, bundles, segments)
                for piece in pieces.get(index, ()):
                    count = piece.end - piece.first
                    self._prompt(first + piece.first, count, piece.at, table, bundles, segments)
                    table += piece.sinks + piece.end_block - piece.begin_block
                index += 1
                continue
            end = index + 1
            while (
                end < len(plan.rows)
                and plan.rows[end].count == 1
                and end - index < self._decoding_tokens
            ):
                end += 1
            first = len(segments)
            self._decoding(plan, index, end, starts[index], offsets, segments, pieces)
            bundles.append((starts[index], starts[end], first, len(segments)))
            index = end
        return np.array(bundles, np.int32), np.array(segments, np.int32)

    def _prompt(
        self, first: int, count: int, at: int, table: int,
        bundles: list[tuple[int, int, int, int]],
        segments: list[tuple[int, int, int, int, int]],
    ) -> None:  # fmt: skip
        """Cut `count` tokens of a prompt, from token `first` of the step and key `at` of `table`
        on, into bundles, each with every tile up to its last token's."""
        for start in range(0, count, self._prompt_tokens):
            end = min(start + self._prompt_tokens, count)
            tiles = -(-(at + end) // TILE)
            segments.append((first + start, first + end, 0, tiles, table))
            bundles.append((first + start, first + end, len(segments) - 1, len(segments)))

    def _decoding(
        self, plan: StepPlan, first: int, end: int, token: int, offsets: list[int],
        segments: list[tuple[int, int, int, int, int]], pieces: Pieces,
    ) -> None:  # fmt: skip
        """Add the segments of decoding rows [first, end), one token each from `token`: the runs
        that groups share, from the root down, then each row's own tiles."""
        covered = [0] * (end - first)
        for group in plan.groups:
            low, high = max(group.first_row, first), min(group.end_row, end)
            if high - low < 2:
                continue
            tiles = group.end_block // TILE_BLOCKS
            begin = covered[low - first]
            if tiles <= begin:
                continue
            at = token + low - first
            segments.append((at, at + high - low, begin, tiles, offsets[low]))
            covered[low - first : high - first] = [tiles] * (high - low)
        for index in range(first, end):
            own = pieces[index][0].at if index in pieces else plan.rows[index].start
            tiles = own // TILE + 1
            at, begin = token + index - first, covered[index - first]
            segments.append((at, at + 1, begin, tiles, offsets[index]))


def _whole(row: Row, pieces: list[RowPiece]) -> list[RowPiece]:
    """Return pieces with the same tokens that read the row's whole table: all places of a step have
    the same number of bundles."""
    return [
        replace(piece, at=row.start + piece.first, sinks=0, begin_block=0, end_block=0)
        for piece in pieces
    ]


def _joined(tables: Sequence[Sequence[int]]) -> Ints:
    """Return block tables behind each other, with any block for a hole: it is never counted."""
    joined: Ints = np.concatenate([np.array(table, np.int32) for table in tables])
    joined[joined < 0] = 0
    return joined
