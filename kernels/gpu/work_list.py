"""The planner of tree attention: rows, block tables and groups in, units of work out. Numpy only.

A step's rows stand in depth-first tree order. A *slice* is one sequence's run of rows (one row when
decoding, more in a prefill chunk); a *group* is a run of slices whose block tables agree over a run
of blocks. The planner cuts keys into spans, spans and row tiles into units, and sorts units so that
the programs of a persistent grid end at about the same time. It needs lengths, never token values,
so step N+1 is planned while N runs.

    keys ───────────────────────────────────────────▶
    row 0  ┌──────────────────┬───────────┬──────┐       one BIG unit per (span, 16 rows, KV head)
    row 1  │  group, level 1  │  level 2  │ own  │       for every group;
    row 2  │ (read once for   ├───────────┼────┐ │       one SMALL unit per sequence and KV head for
    row 3  │  all four rows)  │  level 2  │ own│ │       the keys it has to itself.
           └──────────────────┴───────────┴────┘
             part 0             part 1     part 2        a row's parts are merged at the end

Where spans are cut decides in which order floats are added. With `chunk_keys` they are cut at its
absolute multiples and the tile class depends on the position alone, so bits do not depend on who
shares (`docs/adr`, exactness).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

UNIT_FIELDS = ("row", "rows", "block_offset", "first_key", "keys", "part", "direct", "kv_head")
"""`keys` < 0: each row sees up to its own device-side length, minus `first_key`."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One compiled shape of the kernel: `vectors` query vectors (rows x heads of a group) against
    tiles of `keys` keys. Programs a multiprocessor runs of it alone, and while two classes run side
    by side. `overhead_blocks`: what a unit costs beside its keys, in tiles of keys."""

    name: str
    vectors: int
    keys: int
    warps: int
    stages: int
    peel: bool
    programs_per_sm: int
    programs_beside: int
    registers_max: int
    overhead_blocks: float


# Measured on an H200 (Triton 3.6, head_dim 128, bf16): see docs/gpu.md for what lost.
BIG = TileConfig("big", 64, 64, 4, 3, True, 2, 2, 0, 2.2)
WIDE = TileConfig("wide", 128, 64, 8, 3, True, 1, 1, 0, 5.0)
SMALL = TileConfig("small", 16, 32, 1, 2, False, 8, 4, 0, 0.5)

SMALL_KEY_COST = 1.65
"""Time of a key in a small tile, in that of one in a big tile."""


@dataclass(frozen=True, slots=True)
class Slices:
    """A step's slices in row order, as int32 arrays of one length.

    `rows[i]` query tokens of one sequence, the first at position `starts[i]`; its block ids begin
    at `table_offsets[i]` of the flat table the kernel reads.
    """

    rows: Int32
    starts: Int32
    table_offsets: Int32


@dataclass(frozen=True, slots=True)
class TileWork:
    """Units of one tile class, the longest first: [n, 8] int32."""

    config: TileConfig
    units: Int32


@dataclass(frozen=True, slots=True)
class HostPlan:
    """`parts_of_row` [T]: how many parts the merge combines; 1 means written directly.

    `side_by_side`: the small tiles are launched first and the big ones beside them.
    """

    tiles: tuple[TileWork, ...]
    parts_of_row: Int32
    parts_max: int
    side_by_side: bool = False

    @property
    def classes(self) -> tuple[int, ...]:
        """The tile classes that have any unit, in the order of their launches."""
        used = tuple(i for i, work in enumerate(self.tiles) if len(work.units))
        return used[::-1] if self.side_by_side else used


@dataclass(frozen=True, slots=True)
class WorkPlanner:
    """The shape of the model and the device, and the rules of cutting.

    `span_keys_min`: a shared node is not cut finer (a part costs its store and its merge), nor than
    `span_keys_beside` where classes run side by side, which they do below `beside_load_max` shared
    keys a program and from `beside_share_min` of own keys' time in shared keys'.
    `parts_max`: nor into more parts than the merge is worth. `chunk_keys` > 0: batch-invariant.
    `group_keys_min`: a shorter group is left to the rows below it. `part_rows`: rows times parts
    that there is scratch memory for; without chunks nothing is cut finer than that allows.
    """

    kv_heads: int
    heads_per_group: int
    block_size: int
    multiprocessors: int
    chunk_keys: int = 0
    group_keys_min: int = 64
    span_keys_min: int = 1024
    span_keys_beside: int = 2048
    beside_load_max: int = 3072
    beside_share_min: float = 0.4
    wide_fill_min: float = 0.75
    own_span_keys_min: int = 64
    own_span_keys_target: int = 2048
    parts_max: int = 5
    part_rows: int = 65_536

    @property
    def padded_heads(self) -> int:
        """Heads of a group rounded up to a power of two: what a row takes of a tile."""
        return 1 << (self.heads_per_group - 1).bit_length()

    def plan(self, slices: Slices, groups: Int32) -> HostPlan:
        """The work list of one step. groups: [n, 4] int32 (first slice, end slice, first block, end
        block), shallower before deeper. O(groups + slices + units), numpy.

        Every (row, key) pair is in exactly one unit per KV head.
        """
        cutter = _ChunkCutter(self, slices) if self.chunk_keys else _SpanCutter(self, slices)
        cutter.cut(groups)
        parts_of_row = np.repeat(cutter.parts, slices.rows).astype(np.int32)
        work = tuple(self._units(config, cutter.tiles(config)) for config in (WIDE, BIG, SMALL))
        most = int(cutter.parts.max(initial=1))
        return HostPlan(work, parts_of_row, most, cutter.is_side_by_side)

    def _units(self, config: TileConfig, tiles: Int32) -> TileWork:
        """Tiles [n, 8] to units over KV heads, longest first.

        Programs take them back and forth, which is LPT's result for nearly equal units without its
        heap: measured within 2 % of LPT, and the cut into spans matters far more.
        """
        units = np.repeat(tiles, self.kv_heads, axis=0)
        order = np.argsort(-units[:, 7], kind="stable")
        units[:, 7] = np.tile(np.arange(self.kv_heads, dtype=np.int32), len(tiles))
        return TileWork(config, units[order])

    def rows_per_tile(self, config: TileConfig) -> int:
        assert self.padded_heads <= config.vectors, "a row has more heads than a tile has vectors"
        return config.vectors // self.padded_heads


class _Cutter(ABC):
    """Collects spans, each a run of rows against a run of keys, and cuts them into row tiles.

    A span is (row, rows, block offset, first key, keys, part, direct, keys before): the unit's
    fields, and for causal spans (`keys` < 0) how many keys the span's first row sees before itself.
    """

    def __init__(self, planner: WorkPlanner, slices: Slices) -> None:
        self.planner = planner
        self.slices = slices
        ends = np.cumsum(slices.rows)
        self.first_row = (ends - slices.rows).astype(np.int32)
        self.row_edges: list[int] = [0, *ends.tolist()]
        self.offsets: list[int] = slices.table_offsets.tolist()
        self.parts: Int32 = np.ones(len(slices.rows), np.int32)
        self.is_side_by_side = False
        self._spans: dict[str, list[tuple[int, ...]]] = {}
        self._arrays: dict[str, list[Int32]] = {}

    @abstractmethod
    def cut(self, groups: Int32) -> None:
        """Add every span of the step, and set `parts`."""

    def add(self, config: TileConfig, *span: int) -> None:
        assert len(span) == 8
        self._spans.setdefault(config.name, []).append(span)

    def add_group(self, config: TileConfig, a: int, b: int, key: int, keys: int, part: int) -> None:
        """Keys [key, key + keys) for all rows of slices [a, b), through the table of the first."""
        row = self.row_edges[a]
        offset = self.offsets[a] + key // self.planner.block_size
        self.add(config, row, self.row_edges[b] - row, offset, key, keys, part, 0, 0)

    def add_own(self, first_key: Int32, spans: Int32, base: Int32) -> None:
        """Keys [first_key, start + rows) of each slice, cut into `spans` about equal ones.

        All spans but the last end at or below the slice's start, so that all rows see them whole.
        """
        one = self.slices.rows == 1
        self._own_decode(np.flatnonzero(one), first_key, spans, base)
        for i in np.flatnonzero(~one).tolist():
            self._own_slice(i, int(first_key[i]), int(spans[i]), int(base[i]))

    def _own_decode(
        self, at: npt.NDArray[np.intp], first_key: Int32, spans: Int32, base: Int32
    ) -> None:
        if len(at) == 0:
            return
        slices, n = self.slices, spans[at]
        which = np.repeat(np.arange(len(at)), n)
        k = np.arange(len(which)) - np.repeat(np.cumsum(n) - n, n)
        width = _round_up(-(-(slices.starts[at] + 1 - first_key[at]) // n), SMALL.keys)[which]
        begin = first_key[at][which] + k * width
        keys = np.where(k == n[which] - 1, -1, width)
        columns = (
            self.first_row[at][which],
            np.ones_like(which),
            slices.table_offsets[at][which] + begin // self.planner.block_size,
            begin,
            keys,
            base[at][which] + k,
            (base[at] + n == 1)[which],
            slices.starts[at][which] - begin,
        )
        table = np.stack(columns, axis=1).astype(np.int32)
        self._arrays.setdefault(SMALL.name, []).append(table)

    def _own_slice(self, i: int, first: int, spans: int, base: int) -> None:
        start, rows = int(self.slices.starts[i]), int(self.slices.rows[i])
        config = self.class_of(rows)
        width = int(_round_up(-(-(start - first) // spans), config.keys)) if spans > 1 else 0
        for k in range(spans):
            begin = first + k * width
            keys = -1 if k == spans - 1 else min(width, start - begin)
            offset = self.offsets[i] + begin // self.planner.block_size
            direct = int(base + spans == 1)
            span = (self.row_edges[i], rows, offset, begin, keys, base + k, direct, start - begin)
            self.add(config, *span)

    def class_of(self, rows: int) -> TileConfig:
        """The tile class for a slice's own keys: by how many rows it has."""
        if rows <= self.planner.rows_per_tile(SMALL):
            return SMALL
        return BIG if rows < 2 * self.planner.rows_per_tile(BIG) else WIDE

    def tiles(self, config: TileConfig) -> Int32:
        """Every span of one class cut into row tiles: [n, 8], the unit's fields and the cost."""
        spans = [np.array(self._spans.get(config.name, []), np.int32).reshape(-1, 8)]
        table = np.concatenate(spans + self._arrays.get(config.name, []))
        step = self.planner.rows_per_tile(config)
        per_span = -(-table[:, 1] // step)
        tiles = np.repeat(table, per_span, axis=0)
        done = np.arange(len(tiles)) - np.repeat(np.cumsum(per_span) - per_span, per_span)
        done = (done * step).astype(np.int32)
        tiles[:, 0] += done
        tiles[:, 1] = np.minimum(step, tiles[:, 1] - done)
        seen = np.where(tiles[:, 4] >= 0, tiles[:, 4], tiles[:, 7] + done + tiles[:, 1])
        tiles[:, 7] = seen + int(config.overhead_blocks * config.keys)
        return tiles


def _round_up(x: Int32 | int, to: int) -> Int32:
    return np.asarray(-(-np.asarray(x) // to) * to, np.int32)


class _SpanCutter(_Cutter):
    """Spans cut for speed: few, equal, enough of them to fill the grid."""

    def cut(self, groups: Int32) -> None:
        p = self.planner
        own_block, base = np.zeros_like(self.slices.rows), np.zeros_like(self.slices.rows)
        room = max(1, p.part_rows // max(1, self.row_edges[-1]))
        kept = [g for g in groups.tolist() if self._worth(g)]
        self.is_side_by_side = self._keeps_company(kept)
        config = self._class_of_groups(kept)
        spans_of = self._group_spans(kept, config)
        for (a, b, _, end_block), wanted in zip(kept, spans_of, strict=True):
            part = int(base[a])
            spans = min(wanted, room - 1 - part)  # One is for the rows' own keys.
            if spans < 1:
                continue  # So deep in the tree few rows share it, and each can read it.
            # Where a group above was left out its keys are this one's to read as well.
            first, end = int(own_block[a]) * p.block_size, end_block * p.block_size
            width = int(_round_up(-(-(end - first) // spans), config.keys))
            for key in range(first, end, width):
                self.add_group(config, a, b, key, min(width, end - key), part)
                part += 1
            base[a:b] = part
            own_block[a:b] = end_block
        first_key = own_block * p.block_size
        spans_own = self._own_spans(first_key, room - np.maximum(base, p.parts_max))
        self.parts = base + spans_own
        self.add_own(first_key, spans_own, base)

    def _keeps_company(self, groups: list[list[int]]) -> bool:
        """Would own keys hide behind shared ones, read side by side?

        Decoding alone, shared keys of little more than one wave, and own ones that take a good
        part of their time: more waves are better had by two big programs a multiprocessor.
        """
        p, slices = self.planner, self.slices
        if not groups or (slices.rows > 1).any():
            return False
        tiles, keys = self._group_tiles(groups, BIG)
        shared = sum(t * k for t, k in zip(tiles, keys, strict=True))
        load = shared * p.kv_heads / (p.multiprocessors * BIG.programs_per_sm)
        own = int((slices.starts + 1).sum())
        own -= sum((b - a) * k for (a, b, _, _), k in zip(groups, keys, strict=True))
        return load <= p.beside_load_max and SMALL_KEY_COST * own >= p.beside_share_min * shared

    def _class_of_groups(self, groups: list[list[int]]) -> TileConfig:
        """A wide tile reads keys once for twice the rows, where there are rows to fill it and no
        small programs to stand beside it."""
        p = self.planner
        if self.is_side_by_side:
            return BIG
        tiles, keys = self._group_tiles(groups, WIDE)
        room = p.rows_per_tile(WIDE) * sum(t * k for t, k in zip(tiles, keys, strict=True))
        used = sum(
            (self.row_edges[g[1]] - self.row_edges[g[0]]) * k
            for g, k in zip(groups, keys, strict=True)
        )
        return WIDE if used >= p.wide_fill_min * room else BIG

    def _group_tiles(
        self, groups: list[list[int]], config: TileConfig
    ) -> tuple[list[int], list[int]]:
        """Row tiles and keys of each group."""
        p = self.planner
        step = p.rows_per_tile(config)
        tiles = [-(-(self.row_edges[b] - self.row_edges[a]) // step) for a, b, _, _ in groups]
        return tiles, [(e - f) * p.block_size for _, _, f, e in groups]

    def _worth(self, group: list[int]) -> bool:
        a, b, first_block, end_block = group
        keys = (end_block - first_block) * self.planner.block_size
        return b - a > 1 and keys >= self.planner.group_keys_min

    def _group_spans(self, groups: list[list[int]], config: TileConfig) -> list[int]:
        """Equal spans of about `total / programs` keys: one wave, no finer than the minimum."""
        p = self.planner
        tiles, keys = self._group_tiles(groups, config)
        programs = p.multiprocessors * config.programs_per_sm
        load = sum(t * k for t, k in zip(tiles, keys, strict=True)) * p.kv_heads / programs
        least = p.span_keys_beside if self.is_side_by_side else p.span_keys_min
        span = max(least, int(load))
        return [min(p.parts_max - 1, max(1, round(k / span))) for k in keys]

    def _own_spans(self, first_key: Int32, room: Int32) -> Int32:
        """Own keys are cut when there are too few units to fill the grid, or one is very long."""
        p, slices = self.planner, self.slices
        total = slices.starts + slices.rows - first_key
        units = max(1, len(total)) * p.kv_heads
        programs = p.multiprocessors * SMALL.programs_per_sm
        # One wave: as many units as programs, not one more.
        fill = max(1, programs // units)
        by_fill = np.minimum(fill, np.maximum(1, total // p.own_span_keys_min))
        load = max(p.own_span_keys_target, int(total.sum()) * p.kv_heads // programs)
        by_length = -(-total // (2 * load))
        spans = np.clip(np.maximum(by_fill, by_length), 1, np.clip(room, 1, 64))
        # A prefill slice is cut only before its start; the causal rest is the last span.
        before = slices.starts - first_key
        spans = np.where(slices.rows > 1, np.where(before >= 2048, np.minimum(spans, 2), 1), spans)
        width = _round_up(-(-total // np.maximum(spans, 1)), SMALL.keys)
        return np.where(slices.rows > 1, spans, -(-total // width)).astype(np.int32)


class _ChunkCutter(_Cutter):
    """Spans cut at absolute multiples of `chunk_keys`; a whole chunk is always BIG, the rest SMALL.

    A chunk that straddles the end of a group belongs to the groups, or the sequences, below it.
    """

    def cut(self, groups: Int32) -> None:
        size, chunk = self.planner.block_size, self.planner.chunk_keys
        done = [0] * len(self.slices.rows)
        for a, b, _, end_block in groups.tolist():
            first, end = done[a], end_block * size // chunk
            if end > first:
                self._chunks(a, b, first, end)
                done[a:b] = [end] * (b - a)
        base = (self.slices.starts // chunk).astype(np.int32)
        for i, (first, end) in enumerate(zip(done, base.tolist(), strict=True)):
            self._chunks(i, i + 1, first, end)
        self.parts = base + 1
        self.add_own(base * chunk, np.ones_like(base), base)

    def class_of(self, rows: int) -> TileConfig:
        return SMALL

    def _chunks(self, a: int, b: int, first: int, end: int) -> None:
        keys = self.planner.chunk_keys
        for c in range(first, end):
            self.add_group(BIG, a, b, c * keys, keys, c)
