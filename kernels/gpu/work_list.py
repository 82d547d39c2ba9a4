"""The work planner of tree attention: rows, block tables and groups in, tiles of work out.

A step's rows are in depth-first tree order. A *slice* is one sequence's run of rows (one row when
decoding, more in a prefill chunk); a *group* is a run of slices whose block tables are equal over a
run of blocks. The planner cuts keys into spans and the rows of a span into tiles, each of which is
one unit of work per KV head, and sorts tiles so that the programs of a persistent grid end at about
the same time. It needs lengths, never token values, so step N+1 is planned while N runs. Numpy
only. `engine.attention.gpu_backend` calls it.

    keys ───────────────────────────────────────────▶
    row 0  ┌──────────────────┬───────────┬──────┐       one BIG unit per (span, 16 rows, KV head)
    row 1  │  group, level 1  │  level 2  │ own  │       for every group;
    row 2  │ (read once for   ├───────────┼────┐ │       one SMALL unit per sequence and KV head for
    row 3  │  all four rows)  │  level 2  │ own│ │       the sequence's own keys.
           └──────────────────┴───────────┴────┘
             part 0             part 1     part 2        a row's parts are merged at the end

The cuts between spans determine the order in which floats are added, so a row's last bits depend
on its batch (ADR 0010).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

TILE_FIELDS = ("row", "rows", "block_offset", "first_key", "keys", "part", "direct", "cost")
"""Columns of a tile. `keys` < 0: each row sees keys up to its length on the GPU, less `first_key`.
`cost` orders the tiles; the kernels do not read it."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One compiled shape of the kernel: `vectors` query vectors (rows x heads of a group) against
    tiles of `keys` keys.

    `programs_per_sm`, `programs_beside`: programs per multiprocessor when the class runs by itself,
    and when two classes run side by side.
    """

    name: str
    vectors: int
    keys: int
    warps: int
    stages: int
    peel: bool
    programs_per_sm: int
    programs_beside: int
    overhead_blocks: float
    """Fixed cost of a unit, in tiles of keys."""


# Measured on an H200 (Triton 3.6, head_dim 128, bf16); docs/gpu-experiments.md has the
# alternatives.
BIG = TileConfig("big", 64, 64, 4, 3, True, 2, 2, 2.2)
WIDE = TileConfig("wide", 128, 64, 8, 3, True, 1, 1, 5.0)
SMALL = TileConfig("small", 16, 32, 1, 2, False, 8, 4, 0.5)

BIG_256 = TileConfig("big 256", 64, 32, 4, 3, True, 1, 1, 4.4)
WIDE_256 = TileConfig("wide 256", 128, 32, 8, 3, True, 1, 1, 10.0)
SMALL_256 = TileConfig("small 256", 16, 32, 2, 2, False, 4, 2, 0.5)

BIG_LATENT = TileConfig("big latent", 64, 64, 8, 2, False, 1, 1, 4.0)
WIDE_LATENT = TileConfig("wide latent", 64, 64, 8, 2, False, 1, 1, 4.0)
SMALL_LATENT = TileConfig("small latent", 16, 32, 4, 3, False, 2, 1, 2.0)

NO_TILES = np.zeros((0, 8), np.int32)

CLASSES = (WIDE, BIG, SMALL)
"""The tile classes, in the order of `HostPlan.work`."""

CLASSES_256 = (WIDE_256, BIG_256, SMALL_256)
"""The same for heads of more than 128 channels: fewer keys a tile, so that keys and values fit
shared memory."""


def classes_for(head_dim: int) -> tuple[TileConfig, TileConfig, TileConfig]:
    """Return the tile classes for heads of `head_dim` channels: wide, big and small."""
    return CLASSES if head_dim <= 128 else CLASSES_256


def wide_rows_min_prompts(head_dim: int) -> int:
    """Return from how many rows a step with prompts takes wide tiles: of wider heads sooner, since
    a multiprocessor holds one big tile of theirs."""
    return 2_049 if head_dim <= 128 else 1_025


LATENT_CLASSES = (WIDE_LATENT, BIG_LATENT, SMALL_LATENT)
"""The same for latents. Their accumulators leave no room for more than 64 vectors, so wide tiles
are big ones, and `latent_planner` takes none."""

SMALL_KEY_COST = 1.65
"""Time of a key in a small tile, relative to a key in a big tile."""


@dataclass(frozen=True, slots=True)
class Slices:
    """A step's slices in row order, as int32 arrays of one length.

    `rows[i]` query tokens of one sequence, the first at position `starts[i]`; the sequence's block
    ids begin at `table_offsets[i]` of the flat table that the kernel reads. Under attention windows
    a slice reads the first `sinks[i]` keys and those from `floors[i]` on, whole blocks of both, and
    is in no group; where it reads all keys both are 0.
    """

    rows: Int32
    starts: Int32
    table_offsets: Int32
    floors: Int32 | None = None
    sinks: Int32 | None = None


@dataclass(frozen=True, slots=True)
class TileWork:
    """Tiles of one class, longest first: [n, 8] int32, columns as in `TILE_FIELDS`.

    A tile is `kv_heads` units of work, one per KV head: unit u is head u % kv_heads of tile
    u // kv_heads.
    """

    config: TileConfig
    tiles: Int32


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The plan of one step, on the host.

    `parts_of_row` [T]: parts that the merge combines; 1 means that the row is written directly.
    """

    work: tuple[TileWork, ...]
    parts_of_row: Int32
    parts_max: int
    side_by_side: bool = False
    """Small tiles are launched first and big tiles run beside them."""

    @property
    def tile_count(self) -> int:
        """Tiles of all classes."""
        return sum(len(work.tiles) for work in self.work)

    @property
    def classes(self) -> tuple[int, ...]:
        """Tile classes that have units, in launch order."""
        used = tuple(i for i, work in enumerate(self.work) if len(work.tiles))
        return used[::-1] if self.side_by_side else used


@dataclass(frozen=True, slots=True)
class WorkPlanner:
    """Plans steps for one model shape and one GPU; the fields are the rules of cutting.

    `group_keys_min`, `group_rows_min`: rows read the keys of a shorter or smaller group themselves;
    `window_group_keys_min`: the same for keys within a window. `own_span_keys_*`: smallest and
    usual span of own keys. `wide_rows_min`, `wide_rows_min_prompts`: no step of fewer rows takes
    wide tiles, in decoding and in steps with prompts. Steps with prompts of at most `few_rows` rows
    cut shared keys into spans of `span_keys_few`, at most `parts_few` parts.
    """

    kv_heads: int
    heads_per_group: int
    block_size: int
    multiprocessors: int
    classes: tuple[TileConfig, TileConfig, TileConfig] = CLASSES
    group_keys_min: int = 64
    window_group_keys_min: int = 256
    span_keys_min: int = 1024
    """Smallest span of a shared node, because each part costs a store and a merge;
    `span_keys_beside` where tile classes run side by side. They do so below `beside_load_max`
    shared keys per program, and if own keys take at least `beside_share_min` of the shared keys'
    time."""
    span_keys_beside: int = 2048
    beside_load_max: int = 3072
    beside_share_min: float = 0.4
    wide_fill_min: float = 0.75
    """Fill from which shared keys take wide tiles."""
    group_rows_min: int = 2
    own_span_keys_min: int = 64
    own_span_keys_target: int = 2048
    parts_max: int = 5
    """Most parts of a node."""
    wide_rows_min: int = 65
    wide_rows_min_prompts: int = 2_049
    few_rows: int = 64
    span_keys_few: int = 256
    parts_few: int = 9
    prefill_span_keys_min: int = 256
    """Smallest span of the keys before a prompt's rows."""
    part_rows: int = 65_536
    """Rows times parts that the scratch memory holds; no cut exceeds it, however deep the tree: the
    deepest levels that have no room are read by each row itself."""

    @property
    def padded_heads(self) -> int:
        """Vectors of a tile that one row takes: heads of a group, rounded up to a power of two."""
        return 1 << (self.heads_per_group - 1).bit_length()

    @property
    def big(self) -> TileConfig:
        """The class of 64 query vectors."""
        return self.classes[1]

    @property
    def wide(self) -> TileConfig:
        """The class of 128 query vectors."""
        return self.classes[0]

    @property
    def small(self) -> TileConfig:
        """The class of 16 query vectors."""
        return self.classes[2]

    def plan(
        self, slices: Slices, groups: Int32, padded_rows: int = 0, window: int = 0
    ) -> HostPlan:
        """Return the plan of one step. O(groups + slices + tiles), numpy.

        groups: [n, 4] int32 (first slice, end slice, first block, end block), shallower before
        deeper. `padded_rows`: rows of the launch, where these are more than the slices' rows.
        `window`: rows see so many keys, their own the last, and the blocks before are not read; 0:
        all keys. With a short window each row reads by its own table, and `groups` is not used.
        Every (row, key) pair that counts is in exactly one tile.
        """
        cutter = _Cutter(self, slices, padded_rows, window)
        cutter.cut(groups[:0] if window and not self.shares_windows_of(window) else groups)
        parts_of_row = np.repeat(cutter.parts, slices.rows).astype(np.int32)
        work = tuple(_longest_first(config, cutter.tiles(config)) for config in self.classes)
        most = int(cutter.parts.max(initial=1))
        return HostPlan(work, parts_of_row, most, cutter.is_side_by_side)

    def shares_windows_of(self, window: int) -> bool:
        """Return whether rows may read keys together that lie within a window of this many."""
        return window >= self.window_group_keys_min

    def tiles_max(self, rows: int) -> int:
        """Return the most tiles of any plan of at most `rows` rows.

        Each tile is a part of at least one row, and rows times parts fit the scratch memory.
        """
        return max(self.part_rows, rows)

    def rows_per_tile(self, config: TileConfig) -> int:
        """Return how many rows a tile of the class holds."""
        assert self.padded_heads <= config.vectors, "a row has more heads than a tile has vectors"
        return config.vectors // self.padded_heads


NEVER = 1 << 30
"""Rows that no step has."""


def latent_planner(
    heads: int, block_size: int, multiprocessors: int, part_rows: int
) -> WorkPlanner:
    """Return the planner of attention over latents: all heads read one record a token.

    Heads are dealt into groups of at most 16, as if each had a KV head of its own: a tile then has
    as many rows, and groups of one row meet in the L2. Records are few bytes, so fewer than 64 rows
    read those that they share faster each on their own; and a big tile takes a multiprocessor's
    shared memory, so none runs beside small ones.
    """
    group = max(size for size in range(1, SMALL_LATENT.vectors + 1) if heads % size == 0)
    return WorkPlanner(
        kv_heads=heads // group, heads_per_group=group, block_size=block_size,
        multiprocessors=multiprocessors, classes=LATENT_CLASSES, wide_rows_min=NEVER,
        wide_rows_min_prompts=NEVER, own_span_keys_min=256, part_rows=part_rows,
        group_rows_min=64, span_keys_min=256, beside_load_max=0,
    )  # fmt: skip


def _longest_first(config: TileConfig, tiles: Int32) -> TileWork:
    """Return the tiles in order of cost.

    Programs take their units back and forth, which approximates longest-processing-time scheduling
    without a heap: measured within 2 % of it, and the cut into spans matters far more.
    """
    if len(tiles) == 0:
        return TileWork(config, tiles)
    return TileWork(config, tiles[np.argsort(-tiles[:, 7], kind="stable")])


class _Cutter:
    """Collects spans, each a run of rows against a run of keys, and cuts them into row tiles: few
    spans of equal length, and enough to fill the grid.

    A span is (row, rows, block offset, first key, keys, part, direct, keys before): the unit's
    fields, and for causal spans (`keys` < 0) how many keys the span's first row sees before itself.
    """

    def __init__(self, planner: WorkPlanner, slices: Slices, padded_rows: int, window: int) -> None:
        self.planner = planner
        self.slices = slices
        self.window = window
        self.floor = np.zeros_like(slices.starts)  # the first key that a slice reads
        if window:
            seen = np.maximum(slices.starts + 1 - window, 0)
            self.floor = (seen // planner.block_size * planner.block_size).astype(np.int32)
        if slices.floors is not None:
            assert not window, "layers with windows of their own compute no attention windows"
            self.floor = slices.floors
        ends = np.cumsum(slices.rows)
        self.total_rows = int(ends[-1]) if len(ends) else 0
        self.padded_rows = max(1, padded_rows, self.total_rows)
        self.first_row = (ends - slices.rows).astype(np.int32)
        self.row_edges: list[int] = [0, *ends.tolist()]
        self.offsets: list[int] = slices.table_offsets.tolist()
        self.parts: Int32 = np.ones(len(slices.rows), np.int32)
        self.is_side_by_side = False
        self.has_prompts = bool((slices.rows > 1).any())
        self.takes_wide_tiles = self.total_rows >= (
            planner.wide_rows_min_prompts if self.has_prompts else planner.wide_rows_min
        )
        self._spans: dict[str, list[tuple[int, ...]]] = {}
        self._arrays: dict[str, list[Int32]] = {}

    def cut(self, groups: Int32) -> None:
        """Add every span of the step and set `parts`, the number of parts per slice."""
        p = self.planner
        own_block, base = np.zeros_like(self.slices.rows), np.zeros_like(self.slices.rows)
        room = max(1, p.part_rows // self.padded_rows)
        kept = [g for g in self._seen(groups) if self._is_worth_a_unit(g)]
        self.is_side_by_side = self._should_overlap(kept)
        config = self._class_of_groups(kept)
        spans_of = self._group_spans(kept, config)
        for (a, b, _, end_block), preferred in zip(kept, spans_of, strict=True):
            part = int(base[a])
            spans = min(preferred, room - 1 - part)  # one part is for own keys
            if spans < 1:
                continue  # so deep in the tree few rows share a node, and each reads it itself
            # If a group above was skipped, this group reads its keys too.
            first = max(int(own_block[a]) * p.block_size, int(self.floor[a:b].min()))
            end = end_block * p.block_size
            width = -(-(end - first) // (spans * config.keys)) * config.keys
            for key in range(first, end, width):
                self.add_group(config, a, b, key, min(width, end - key), part)
                part += 1
            base[a:b] = part
            own_block[a:b] = end_block
        first_key = np.maximum(own_block * p.block_size, self.floor)
        self._add_sinks(base)
        spans_own = self._own_spans(first_key, room - np.maximum(base, p.parts_max))
        self.parts = base + spans_own
        self.add_own(first_key, spans_own, base)

    def add(self, config: TileConfig, *span: int) -> None:
        """Add one span of a tile class."""
        assert len(span) == 8
        self._spans.setdefault(config.name, []).append(span)

    def add_group(self, config: TileConfig, a: int, b: int, key: int, keys: int, part: int) -> None:
        """Add keys [key, key + keys) for all rows of slices [a, b), by the table of the slice that
        has most of them: with a window, the others may have let blocks go."""
        row = self.row_edges[a]
        owner = a + int(np.argmin(self.floor[a:b])) if self.window else a
        offset = self.offsets[owner] + key // self.planner.block_size
        self.add(config, row, self.row_edges[b] - row, offset, key, keys, part, 0, 0)

    def add_own(self, first_key: Int32, spans: Int32, base: Int32) -> None:
        """Add keys [first_key, start + rows) of each slice, cut into `spans` spans of about equal
        length.

        All spans but the last end at or before the slice's start, so that every row sees all their
        keys.
        """
        one = self.slices.rows == 1
        for at, add in (
            (one.nonzero()[0], self._own_decode),
            ((~one).nonzero()[0], self._own_slices),
        ):
            if len(at):
                add(at, first_key[at], spans[at], base[at])

    def _own_decode(
        self, at: npt.NDArray[np.intp], first_key: Int32, spans: Int32, base: Int32
    ) -> None:
        """Add the own keys of the decoding slices `at`; the other arguments are only theirs."""
        starts, count = self.slices.starts[at], int(spans.sum())
        width = _round_up(-(-(starts + 1 - first_key) // spans), self.planner.small.keys)
        ends = np.cumsum(spans)
        which = np.repeat(np.arange(len(at)), spans) if count > len(at) else slice(None)
        k = np.arange(count) - (ends - spans)[which]
        table = np.empty((count, 8), np.int32)
        begin = first_key[which] + k * width[which]
        table[:, 0] = self.first_row[at][which]
        table[:, 1] = 1
        table[:, 2] = self.slices.table_offsets[at][which] + begin // self.planner.block_size
        table[:, 3] = begin
        table[:, 4] = width[which]
        table[ends - 1, 4] = -1
        table[:, 5] = base[which] + k
        table[:, 6] = (base + spans == 1)[which]
        table[:, 7] = starts[which] - begin
        self._arrays.setdefault(self.planner.small.name, []).append(table)

    def _own_slices(
        self, at: npt.NDArray[np.intp], first_key: Int32, spans: Int32, base: Int32
    ) -> None:
        """Add the own keys of the slices `at` of several rows; the other arguments are only
        theirs."""
        p, starts, rows = self.planner, self.slices.starts[at], self.slices.rows[at]
        which = np.repeat(np.arange(len(at)), spans)
        k = np.arange(len(which)) - (np.cumsum(spans) - spans)[which]
        width = self._prefill_width(starts - first_key, spans)[which]
        table = np.empty((len(which), 8), np.int32)
        begin = first_key[which] + k * width
        before = starts[which] - begin
        table[:, 0] = self.first_row[at][which]
        table[:, 1] = rows[which]
        table[:, 2] = self.slices.table_offsets[at][which] + begin // p.block_size
        table[:, 3] = begin
        table[:, 4] = np.where(k == spans[which] - 1, -1, np.minimum(width, before))
        table[:, 5] = base[which] + k
        table[:, 6] = (base + spans == 1)[which]
        table[:, 7] = before
        configs = [self.class_of(count) for count in rows.tolist()]
        for config in p.classes:
            chosen = np.array([one is config for one in configs])[which]
            if chosen.any():
                self._arrays.setdefault(config.name, []).append(table[chosen])

    def class_of(self, rows: int) -> TileConfig:
        """Return the tile class for a slice's own keys, by its number of rows."""
        p = self.planner
        if rows <= p.rows_per_tile(p.small):
            return p.small
        return p.wide if self.takes_wide_tiles and rows >= 2 * p.rows_per_tile(p.big) else p.big

    def _prefill_width(self, before: Int32 | int, spans: Int32 | int) -> Int32:
        """Return the keys per span of the `before` keys that precede a prompt's rows."""
        width = np.asarray(-(-np.asarray(before) // spans), np.int32)
        return _round_up(width, self.planner.big.keys)

    def _seen(self, groups: Int32) -> list[list[int]]:
        """Return the groups, without the blocks that no row of theirs sees."""
        found: list[list[int]] = groups.tolist()
        if self.window:
            for group in found:
                a, b, first, _ = group
                group[2] = max(first, int(self.floor[a:b].min()) // self.planner.block_size)
        return [group for group in found if group[2] < group[3]]

    def _add_sinks(self, base: Int32) -> None:
        """Add the first keys that slices under attention windows read, as a part of each."""
        if self.slices.sinks is None:
            return
        for i in np.flatnonzero(self.slices.sinks).tolist():
            config = self.class_of(int(self.slices.rows[i]))
            self.add_group(config, i, i + 1, 0, int(self.slices.sinks[i]), int(base[i]))
            base[i] += 1

    def _should_overlap(self, groups: list[list[int]]) -> bool:
        """Return whether own keys should be read beside shared keys.

        Yes only for decoding, with shared keys of little more than one wave, and own keys that take
        a good part of their time. More waves run better as two big programs per multiprocessor.
        """
        p, slices = self.planner, self.slices
        if not groups or self.has_prompts or self.window:
            return False
        tiles, keys = self._group_tiles(groups, p.big)
        shared = sum(t * k for t, k in zip(tiles, keys, strict=True))
        load = shared * p.kv_heads / (p.multiprocessors * p.big.programs_per_sm)
        own = int((slices.starts + 1 - self.floor).sum())
        own -= sum((b - a) * k for (a, b, _, _), k in zip(groups, keys, strict=True))
        return load <= p.beside_load_max and SMALL_KEY_COST * own >= p.beside_share_min * shared

    def _class_of_groups(self, groups: list[list[int]]) -> TileConfig:
        """Return the tile class of shared keys: wide, which reads keys once for twice the rows, if
        rows fill it and no small tiles run beside it; else big."""
        p = self.planner
        if self.is_side_by_side or self.window or not self.takes_wide_tiles:
            return p.big
        tiles, keys = self._group_tiles(groups, p.wide)
        room = p.rows_per_tile(p.wide) * sum(t * k for t, k in zip(tiles, keys, strict=True))
        used = sum(
            (self.row_edges[g[1]] - self.row_edges[g[0]]) * k
            for g, k in zip(groups, keys, strict=True)
        )
        return p.wide if used >= p.wide_fill_min * room else p.big

    def _group_tiles(
        self, groups: list[list[int]], config: TileConfig
    ) -> tuple[list[int], list[int]]:
        """Return the number of row tiles and of keys of each group."""
        p = self.planner
        step = p.rows_per_tile(config)
        tiles = [-(-(self.row_edges[b] - self.row_edges[a]) // step) for a, b, _, _ in groups]
        return tiles, [(e - f) * p.block_size for _, _, f, e in groups]

    def _is_worth_a_unit(self, group: list[int]) -> bool:
        """Return whether a group has several slices, enough rows and enough keys."""
        a, b, first_block, end_block = group
        p, keys = self.planner, (end_block - first_block) * self.planner.block_size
        least = p.window_group_keys_min if self.window else p.group_keys_min
        rows = self.row_edges[b] - self.row_edges[a]
        return b - a > 1 and rows >= p.group_rows_min and keys >= least

    def _group_spans(self, groups: list[list[int]], config: TileConfig) -> list[int]:
        """Return the number of spans per group: equal spans of about `total / programs` keys, which
        make one wave, but not below the smallest span."""
        p = self.planner
        tiles, keys = self._group_tiles(groups, config)
        programs = p.multiprocessors * config.programs_per_sm
        load = sum(t * k for t, k in zip(tiles, keys, strict=True)) * p.kv_heads / programs
        few = self.total_rows <= p.few_rows and self.has_prompts
        least = p.span_keys_beside if self.is_side_by_side else p.span_keys_min
        span = max(p.span_keys_few if few else least, int(load))
        most = p.parts_few if few else p.parts_max
        return [min(most - 1, max(1, round(k / span))) for k in keys]

    def _own_spans(self, first_key: Int32, room: Int32) -> Int32:
        """Return spans of own keys per slice: several if units do not fill the grid or are very
        long."""
        p, slices = self.planner, self.slices
        total = slices.starts + slices.rows - first_key
        units = max(1, len(total)) * p.kv_heads
        programs = p.multiprocessors * p.small.programs_per_sm
        # One wave: at most as many units as programs.
        fill = max(1, programs // units)
        by_fill = np.minimum(fill, np.maximum(1, total // p.own_span_keys_min))
        load = max(p.own_span_keys_target, int(total.sum()) * p.kv_heads // programs)
        by_length = -(-total // (2 * load))
        most = np.minimum(np.maximum(room, 1), 64)
        spans = np.minimum(np.maximum(by_fill, by_length), most)
        width = _round_up(-(-total // spans), p.small.keys)
        spans = -(-total // width)
        if self.has_prompts:
            # A prefill slice is cut only before its start; the causal remainder is the last span.
            spans = np.where(slices.rows > 1, self._prefill_spans(first_key, room), spans)
        return np.asarray(spans, np.int32)

    def _prefill_spans(self, first_key: Int32, room: Int32) -> Int32:
        """Return spans of own keys per slice of several rows: as many as fill the grid, of at least
        `prefill_span_keys_min` keys before the slice."""
        p, rows = self.planner, self.slices.rows
        several = rows[rows > 1]
        step = p.rows_per_tile(p.wide if self.takes_wide_tiles else p.big)
        units = max(1, int((-(-several // step)).sum()) * p.kv_heads)
        programs = p.multiprocessors * p.big.programs_per_sm
        before = self.slices.starts - first_key
        most = np.clip(room, 1, max(1, programs // units))
        spans = np.clip(before // p.prefill_span_keys_min, 1, most)
        # Widths are rounded up, so fewer spans may have all keys; the last begins before the rows.
        width = np.maximum(p.big.keys, self._prefill_width(before, spans))
        return np.asarray(np.maximum(1, -(-before // width)), np.int32)

    def tiles(self, config: TileConfig) -> Int32:
        """Return the spans of one class cut into row tiles: [n, 8], the last column the cost."""
        parts = list(self._arrays.get(config.name, ()))
        if spans := self._spans.get(config.name):
            parts.append(np.array(spans, np.int32))
        if not parts:
            return NO_TILES
        tiles = parts[0] if len(parts) == 1 else np.concatenate(parts)
        step = self.planner.rows_per_tile(config)
        if int(tiles[:, 1].max()) > step:
            per_span = -(-tiles[:, 1] // step)
            tiles = np.repeat(tiles, per_span, axis=0)
            done = np.arange(len(tiles)) - np.repeat(np.cumsum(per_span) - per_span, per_span)
            done = (done * step).astype(np.int32)
            tiles[:, 0] += done
            tiles[:, 1] = np.minimum(step, tiles[:, 1] - done)
            tiles[:, 7] += done
        seen = np.where(tiles[:, 4] >= 0, tiles[:, 4], tiles[:, 7] + tiles[:, 1])
        if self.window:
            seen = np.minimum(seen, self.window + tiles[:, 1])
        tiles[:, 7] = seen + int(config.overhead_blocks * config.keys)
        return tiles


def _round_up(x: Int32 | int, to: int) -> Int32:
    return np.asarray(-(-np.asarray(x) // to) * to, np.int32)
