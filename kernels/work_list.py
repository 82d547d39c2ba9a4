"""The planner of tree attention: rows, block tables and groups in, units of work out. Numpy only.

A step's rows stand in depth-first tree order. A *slice* is one sequence's run of rows (one row when
decoding, more in a prefill chunk); a *group* is a run of slices whose block tables agree over a run
of blocks. The planner cuts keys into spans, spans and row tiles into units, and deals units to the
programs of a persistent grid so that all end at about the same time. It needs lengths, never token
values, so step N+1 is planned while N runs.

    keys ───────────────────────────────────────────▶
    row 0  ┌──────────────────┬───────────┬──────┐       one BIG unit per (span, 16 rows, KV head)
    row 1  │  group, level 1  │  level 2  │ own  │       for every group;
    row 2  │ (read once for   ├───────────┼────┐ │       one SMALL unit per sequence and KV head for
    row 3  │  all four rows)  │  level 2  │ own│ │       the keys it has to itself.
           └──────────────────┴───────────┴────┘
             part 0             part 1     part 2        a row's parts are merged at the end

Where spans are cut decides in which order floats are added. With `chunk_keys` they are cut at
absolute multiples of it and the tile class depends on the position alone, so a row's bits do not
depend on who shares with it (`docs/adr`, exactness).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

UNIT_FIELDS = ("row", "rows", "block_offset", "first_key", "keys", "part", "direct", "kv_head")
"""`keys` < 0: each row sees up to its own device-side length, minus `first_key`."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One compiled shape of the kernel: `vectors` query vectors (rows x heads of a group) against
    tiles of `keys` keys. `overhead_blocks`: what a unit costs beside its keys, in tiles of keys."""

    name: str
    vectors: int
    keys: int
    warps: int
    stages: int
    peel: bool
    programs_per_sm: int
    registers_max: int
    overhead_blocks: float


# Measured on an H200 (Triton 3.6, head_dim 128, bf16): see docs/gpu.md for what lost.
BIG = TileConfig("big", 64, 64, 4, 3, True, 2, 0, 2.2)
WIDE = TileConfig("wide", 128, 64, 8, 3, True, 1, 0, 5.0)
SMALL = TileConfig("small", 16, 64, 4, 2, False, 4, 128, 0.5)


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
    """Units of one tile class: program p does `units[starts[p]:starts[p + 1]]`, [n, 8] int32."""

    config: TileConfig
    starts: Int32
    units: Int32


@dataclass(frozen=True, slots=True)
class HostPlan:
    """`parts_of_row` [T]: how many parts the merge combines; 1 means written directly."""

    tiles: tuple[TileWork, ...]
    parts_of_row: Int32
    parts_max: int


@dataclass(frozen=True, slots=True)
class Planner:
    """The shape of the model and the device, and the rules of cutting.

    `span_keys_min`: a shared node is not cut finer (a part costs its store and its merge);
    `parts_max`: nor into more parts than the merge is worth. `chunk_keys` > 0: batch-invariant.
    `group_keys_min`: a shorter group is left to the rows below it.
    """

    kv_heads: int
    heads_per_group: int
    block_size: int
    multiprocessors: int
    chunk_keys: int = 0
    group_keys_min: int = 64
    span_keys_min: int = 1024
    own_span_keys_min: int = 256
    own_span_keys_target: int = 2048
    parts_max: int = 5

    @property
    def padded_heads(self) -> int:
        """Heads of a group rounded up to a power of two: what a row takes of a tile."""
        return 1 << (self.heads_per_group - 1).bit_length()

    def plan(self, slices: Slices, groups: Int32) -> HostPlan:
        """The work list of one step. groups: [n, 4] int32 (first slice, end slice, first block, end
        block), shallower before deeper. O(groups + slices + units), numpy.

        Every (row, key) pair is in exactly one unit per KV head: `check_plan` proves it.
        """
        first_row = np.concatenate([[0], np.cumsum(slices.rows)]).astype(np.int32)
        cutter = _ChunkCutter(self) if self.chunk_keys else _SpanCutter(self)
        tiles = cutter.cut(slices, first_row, groups)
        parts_of_row = np.repeat(cutter.parts, slices.rows).astype(np.int32)
        work = tuple(
            self._deal(config, tiles.get(config.name, [])) for config in (WIDE, BIG, SMALL)
        )
        return HostPlan(work, parts_of_row, int(cutter.parts.max(initial=1)))

    def _deal(self, config: TileConfig, tiles: list[Int32]) -> TileWork:
        """Tiles [n, 7] → units over KV heads, longest first, dealt to programs back and forth.

        The dealing is LPT's result for nearly equal units, without its heap: measured within 2 % of
        LPT, and the cut into spans matters far more than the scheduler.
        """
        programs = self.multiprocessors * config.programs_per_sm
        if not tiles:
            return TileWork(config, np.zeros(programs + 1, np.int32), np.zeros((0, 8), np.int32))
        rows = np.concatenate(tiles)
        units = np.repeat(rows, self.kv_heads, axis=0)
        heads = np.tile(np.arange(self.kv_heads, dtype=np.int32), len(rows))
        cost = units[:, 7].copy()
        units = np.concatenate([units[:, :7], heads[:, None]], axis=1)
        order = np.argsort(-cost, kind="stable")
        turn = np.arange(len(order)) % (2 * programs)
        program = np.minimum(turn, 2 * programs - 1 - turn)
        by_program = np.argsort(program, kind="stable")
        starts = np.zeros(programs + 1, np.int32)
        np.cumsum(np.bincount(program, minlength=programs), out=starts[1:])
        return TileWork(config, starts, np.ascontiguousarray(units[order][by_program]))

    def rows_per_tile(self, config: TileConfig) -> int:
        return config.vectors // self.padded_heads


def _tile_rows(row: int, rows: int, step: int) -> tuple[Int32, Int32]:
    first = np.arange(row, row + rows, step, dtype=np.int32)
    return first, np.minimum(step, row + rows - first).astype(np.int32)


class _Cutter:
    """Collects tiles by class; a tile is seven unit fields (all but the head) and its cost."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.tiles: dict[str, list[Int32]] = {}
        self.parts: Int32 = np.zeros(0, np.int32)

    def add(self, config: TileConfig, *columns: npt.ArrayLike) -> None:
        """Tiles of one class: row, rows, block offset, first key, keys, part, direct, cost."""
        assert len(columns) == 8
        table = np.stack(np.broadcast_arrays(*map(np.atleast_1d, columns)), axis=1)
        self.tiles.setdefault(config.name, []).append(table.astype(np.int32))

    def class_of(self, rows: int) -> TileConfig:
        """The tile class for a slice's own keys: by how many rows it has."""
        per_small = self.planner.rows_per_tile(SMALL)
        if rows <= max(per_small, 1):
            return SMALL
        return BIG if rows < 2 * self.planner.rows_per_tile(BIG) else WIDE

    def own(
        self, slices: Slices, first_row: Int32, first_key: Int32, spans: Int32, base: Int32
    ) -> None:
        """Tiles for keys [first_key, start + rows) of each slice, cut into `spans` equal spans.

        All spans but the last end at or below the slice's start, so that all rows see them whole.
        """
        size = self.planner.block_size
        rows_of = slices.rows
        for count in np.unique(rows_of):
            config = self.class_of(int(count))
            step = self.planner.rows_per_tile(config)
            at = np.flatnonzero(rows_of == count)
            for i in at if count > 1 else ():
                self._own_slice(config, step, slices, first_row, first_key, spans, base, int(i))
            if count == 1:
                self._own_decode(config, slices, first_row, first_key, spans, base, at, size)

    def _own_decode(
        self, config: TileConfig, slices: Slices, first_row: Int32, first_key: Int32,
        spans: Int32, base: Int32, at: npt.NDArray[np.intp], size: int,
    ) -> None:  # fmt: skip
        first, n = first_key[at], spans[at]
        total = slices.starts[at] + 1 - first
        which = np.repeat(np.arange(len(at)), n)
        k = np.arange(len(which)) - np.repeat(np.cumsum(n) - n, n)
        width = _round_up(-(-total // n), config.keys)[which]
        begin = first[which] + k * width
        last = k == n[which] - 1
        keys = np.where(last, -1, width)
        real = np.where(last, total[which] - k * width, width)
        self.add(
            config, first_row[:-1][at][which], 1,
            slices.table_offsets[at][which] + begin // size, begin, keys,
            base[at][which] + k, (base[at][which] + n[which]) == 1,
            real + int(config.overhead_blocks * config.keys),
        )  # fmt: skip

    def _own_slice(
        self, config: TileConfig, step: int, slices: Slices, first_row: Int32, first_key: Int32,
        spans: Int32, base: Int32, i: int,
    ) -> None:  # fmt: skip
        start, first, n = int(slices.starts[i]), int(first_key[i]), int(spans[i])
        row, rows = _tile_rows(int(first_row[i]), int(slices.rows[i]), step)
        width = _round_up(-(-(start - first) // n), config.keys) if n > 1 else 0
        overhead = int(config.overhead_blocks * config.keys)
        for k in range(n):
            begin = first + k * width
            last = k == n - 1
            keys = -1 if last else min(width, start - begin)
            seen = start + (row - first_row[i]) + rows - begin if last else keys
            self.add(
                config, row, rows,
                slices.table_offsets[i] + begin // self.planner.block_size,
                begin, keys, base[i] + k,
                base[i] + n == 1, np.asarray(seen + overhead, np.int32),
            )  # fmt: skip


def _round_up(x: Int32 | int, to: int) -> Int32:
    return np.asarray(-(-np.asarray(x) // to) * to, np.int32)


class _SpanCutter(_Cutter):
    """Spans cut for speed: few, equal, enough of them to fill the grid."""

    def cut(self, slices: Slices, first_row: Int32, groups: Int32) -> dict[str, list[Int32]]:
        p = self.planner
        n = len(slices.rows)
        own_block = np.zeros(n, np.int32)
        base = np.zeros(n, np.int32)
        kept = [g for g in groups.tolist() if self._worth(g)]
        wanted = self._spans(kept, first_row)
        for (a, b, first_block, end_block), spans in zip(kept, wanted, strict=True):
            # A group left out above this one: its keys are this one's to read as well.
            first_block = int(own_block[a])
            self._group(slices, first_row, a, b, first_block, end_block, spans, int(base[a]))
            keys = (end_block - first_block) * p.block_size
            base[a:b] += -(-keys // int(_round_up(-(-keys // spans), BIG.keys)))
            own_block[a:b] = end_block
        first_key = own_block * p.block_size
        spans_own = self._own_spans(slices, first_key)
        self.parts = base + spans_own
        self.own(slices, first_row, first_key, spans_own, base)
        return self.tiles

    def _worth(self, group: list[int]) -> bool:
        a, b, first_block, end_block = group
        return b - a > 1 and (end_block - first_block) * self.planner.block_size >= (
            self.planner.group_keys_min
        )

    def _spans(self, groups: list[list[int]], first_row: Int32) -> list[int]:
        """Equal spans of about `total / programs` keys: one wave, no finer than the minimum."""
        p = self.planner
        step = p.rows_per_tile(BIG)
        tiles = [-(-int(first_row[b] - first_row[a]) // step) for a, b, _, _ in groups]
        keys = [(e - f) * p.block_size for _, _, f, e in groups]
        programs = p.multiprocessors * BIG.programs_per_sm
        load = sum(t * k for t, k in zip(tiles, keys, strict=True)) * p.kv_heads / programs
        span = max(p.span_keys_min, int(load))
        return [min(p.parts_max - 1, max(1, round(k / span))) for k in keys]

    def _group(
        self, slices: Slices, first_row: Int32, a: int, b: int, first_block: int, end_block: int,
        spans: int, base: int,
    ) -> None:  # fmt: skip
        size = self.planner.block_size
        keys = (end_block - first_block) * size
        width = int(_round_up(-(-keys // spans), BIG.keys))
        row, rows = _tile_rows(
            int(first_row[a]),
            int(first_row[b] - first_row[a]),
            self.planner.rows_per_tile(BIG),
        )
        overhead = int(BIG.overhead_blocks * BIG.keys)
        for k, begin in enumerate(range(0, keys, width)):
            take = min(width, keys - begin)
            self.add(
                BIG, row, rows,
                slices.table_offsets[a] + first_block + begin // size,
                first_block * size + begin, take, base + k,
                0, take + overhead,
            )  # fmt: skip

    def _own_spans(self, slices: Slices, first_key: Int32) -> Int32:
        """Own keys are cut when there are too few units to fill the grid, or one is very long."""
        p = self.planner
        total = slices.starts + slices.rows - first_key
        units = max(1, len(total)) * p.kv_heads
        programs = p.multiprocessors * SMALL.programs_per_sm
        # One wave: as many units as programs, not one more.
        fill = max(1, programs // units)
        by_fill = np.minimum(fill, np.maximum(1, total // p.own_span_keys_min))
        load = max(p.own_span_keys_target, int(total.sum()) * p.kv_heads // programs)
        by_length = -(-total // (2 * load))
        spans = np.clip(np.maximum(by_fill, by_length), 1, 64)
        # A prefill slice is cut only before its start; the causal rest is the last span.
        before = slices.starts - first_key
        spans = np.where(slices.rows > 1, np.where(before >= 2048, np.minimum(spans, 2), 1), spans)
        width = _round_up(-(-total // np.maximum(spans, 1)), SMALL.keys)
        return np.where(slices.rows > 1, spans, -(-total // width)).astype(np.int32)


class _ChunkCutter(_Cutter):
    """Spans cut at absolute multiples of `chunk_keys`; a whole chunk is always BIG, the rest SMALL.

    A chunk that straddles the end of a group belongs to the groups, or the sequences, below it.
    """

    def cut(self, slices: Slices, first_row: Int32, groups: Int32) -> dict[str, list[Int32]]:
        p = self.planner
        size, chunk = p.block_size, p.chunk_keys
        n = len(slices.rows)
        done = np.zeros(n, np.int32)
        for a, b, _, end_block in groups.tolist():
            first, end = int(done[a]), end_block * size // chunk
            for c in range(first, end):
                self._chunk(slices, first_row, a, b, c)
            done[a:b] = np.maximum(done[a:b], end)
        for i in range(n):
            for c in range(int(done[i]), int(slices.starts[i]) // chunk):
                self._chunk(slices, first_row, i, i + 1, c)
        base = (slices.starts // chunk).astype(np.int32)
        self.parts = base + 1
        self.own(slices, first_row, base * chunk, np.ones(n, np.int32), base)
        return self.tiles

    def class_of(self, rows: int) -> TileConfig:
        return SMALL

    def _chunk(self, slices: Slices, first_row: Int32, a: int, b: int, c: int) -> None:
        p = self.planner
        row, rows = _tile_rows(
            int(first_row[a]), int(first_row[b] - first_row[a]), p.rows_per_tile(BIG)
        )
        first = c * p.chunk_keys
        self.add(
            BIG, row, rows, slices.table_offsets[a] + first // p.block_size,
            first, p.chunk_keys, c, 0,
            p.chunk_keys + int(BIG.overhead_blocks * BIG.keys),
        )  # fmt: skip


def check_plan(plan: HostPlan, slices: Slices, planner: Planner) -> None:
    """Every (row, key) once per KV head, parts numbered 0..n-1, direct exactly when there is one.

    O(rows x keys): for tests. Raises AssertionError with the first row that is wrong.
    """
    first_row = np.concatenate([[0], np.cumsum(slices.rows)])
    lengths = np.concatenate(
        [s + 1 + np.arange(n) for s, n in zip(slices.starts, slices.rows, strict=True)]
    )
    offset_of_row = np.repeat(slices.table_offsets, slices.rows)
    seen = [np.zeros((planner.kv_heads, int(n)), np.int32) for n in lengths]
    parts: list[set[int]] = [set() for _ in lengths]
    for work in plan.tiles:
        assert work.starts[-1] == len(work.units), work.config.name
        for row, rows, offset, first, keys, part, direct, head in work.units.tolist():
            assert 0 < rows <= planner.rows_per_tile(work.config)
            for r in range(row, row + rows):
                end = int(lengths[r]) if keys < 0 else first + keys
                assert end <= lengths[r], f"row {r} reads key {end} of {lengths[r]}"
                owner = int(np.searchsorted(first_row, r, "right")) - 1
                own = offset - int(offset_of_row[r]) == first // planner.block_size
                assert own or keys >= 0, f"row {r} of slice {owner} reads a foreign tail"
                assert first % planner.block_size == 0
                seen[r][head, first:end] += 1
                parts[r].add(part)
                assert bool(direct) == (plan.parts_of_row[r] == 1), f"row {r} direct"
    for r, counts in enumerate(seen):
        assert (counts == 1).all(), (
            f"row {r}: keys seen {sorted(set(counts.ravel().tolist()))} times"
        )
        assert parts[r] == set(range(plan.parts_of_row[r])), f"row {r}: parts {parts[r]}"
