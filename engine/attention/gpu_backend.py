"""The attention backend of a GPU: a step's rows as work lists, shared prefixes read once.

It plans for the kernels in `kernels.gpu.tree_attention` and launches them. Block tables live on the
GPU, one row per seat and KV group; layers of one window share a work list. Lists are made only when
the batch or its groups change: the kernels read lengths on the GPU, so appending a token leaves
them valid. `engine.runner.gpu_runner` calls `prepare` and `update_tables`; a model's layers reach
`attend` through `engine.runner.gpu_inputs.StepAttention`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.interface import attention_spec
from engine.attention.rope import rope_tables
from engine.attention.row_pieces import pieces_of
from engine.kv.storage import KvStorage
from engine.model_store import Architecture
from engine.model_store.architecture import Latent
from engine.plan import Group, Row
from kernels.gpu.fused_ops import rope_kv_write
from kernels.gpu.latent_attention import (
    CHANNELS_MIN,
    can_run,
    latent_attention,
    rope_latent_write,
)
from kernels.gpu.tree_attention import PartialOutputs, WorkList, tree_attention
from kernels.gpu.work_list import (
    HostPlan,
    Slices,
    WorkPlanner,
    classes_for,
    latent_planner,
    wide_rows_min_prompts,
)

Int32 = npt.NDArray[np.int32]

REPLAN_EVERY = 64
"""Steps after which an unchanged batch is planned anew, and tokens: its sequences' own keys have
grown."""

PART_ROWS = 65_536
"""Rows times parts that the scratch memory holds."""

PART_VALUES = PART_ROWS * 4096
"""Values of parts that the scratch memory of latents holds: a gigabyte."""

TABLE_PADDING = 8
"""Block ids that the kernels may read behind a table's end; each is a valid block."""


def lacks_latent_kernel(latent: Latent) -> str:
    """Return why the kernel does not fit a model's latents, or "" if it does."""
    if can_run(latent.rope, latent.rank):
        return ""
    return (
        f"a latent has {latent.rope} + {latent.rank} channels; kernels take powers of two, from"
        f" {CHANNELS_MIN} of both"
    )


class GpuAttention:
    """Plans steps and launches attention. The runner's GPU buffers `positions`, `slots` and
    `lengths`, [T] int32 each, are filled before `attend`.

    `seats`: sequences known at once. `tokens_max`: rows of a step.
    """

    def __init__(
        self,
        config: Architecture,
        kv: KvStorage,
        *,
        context: int,
        seats: int,
        tokens_max: int,
    ) -> None:
        device = kv.data.device
        self.kv = kv.data
        spec = attention_spec(config)
        self.spec = spec
        stride = -(-context // kv.format.block_size) + TABLE_PADDING
        self.stride = -(-stride // 4) * 4  # each group's tables begin at a multiple of 16 bytes
        self._group_entries = seats * self.stride
        tables = kv.format.blocks_per_run * self._group_entries
        self.tables = torch.zeros(tables, dtype=torch.int32, device=device)
        rotations = {
            name: (cos.to(device), sin.to(device))
            for name, (cos, sin) in rope_tables(config, context).items()
        }
        self.rotations = [rotations[layer.rope] for layer in config.layers]
        self._growth = None
        if config.query_growth is not None:
            beta, original = config.query_growth
            steps = (torch.arange(context) // original).float()
            self._growth = (1 + beta * torch.log1p(steps)).to(device)
        self._places = list(zip(kv.format.group_of_layer, kv.format.row_of_layer, strict=True))
        self._window_of = [layer.window for layer in config.layers]
        self.windows = tuple(sorted(set(self._window_of)))
        multiprocessors = 4
        if device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        rows = PART_ROWS if device.type == "cuda" else 16 * tokens_max
        if spec.latent:  # a part is wider
            rows = min(rows, PART_VALUES // spec.output_width)
        if spec.latent:
            size = kv.format.block_size
            self.planner = latent_planner(spec.heads, size, multiprocessors, rows)
        else:
            self.planner = WorkPlanner(
                kv_heads=spec.kv_heads,
                heads_per_group=spec.group_size,
                block_size=kv.format.block_size,
                multiprocessors=multiprocessors,
                classes=classes_for(spec.head_dim),
                wide_rows_min_prompts=wide_rows_min_prompts(spec.head_dim),
                part_rows=rows,
            )
        tiles = self.planner.tiles_max(tokens_max)
        self._lists = {
            window: WorkList(self.planner.classes, multiprocessors, tokens_max, tiles, device)
            for window in self.windows
        }
        self._works = dict(self._lists)
        self.parts = PartialOutputs(1, rows, spec.heads, spec.value_dim, device)
        self.part_rows = rows
        self.scratch = self.parts
        self.plan: HostPlan | None = None
        self.beside: tuple[GpuAttention, ...] = ()
        """The same attention on other GPUs, with as many heads: what is planned here is loaded
        there, too."""
        self._key: object = None
        self._age, self._starts = 0, np.zeros(0, np.int32)

    @property
    def work(self) -> WorkList:
        """The step's work list of layers without a window; of the shortest window, if all have
        one."""
        return self._works[self.windows[0]]

    def prepare(
        self,
        members: tuple[int, ...],
        rows: Int32,
        starts: Int32,
        seats: Int32,
        groups: tuple[Group, ...],
        padded_rows: int,
        windowed: Sequence[Row] = (),
    ) -> HostPlan:
        """Put the step's work lists, one for each window, on the GPU; return the first, that of
        `work`.

        `members`: the sequence ids of the batch. `rows`, `starts`, `seats`: per sequence, query
        tokens, first position and seat. `padded_rows`: rows of the launch. `windowed`: the plan's
        rows, where some are under attention windows. While a batch, its tokens (one each, or with
        as many drafts as before), its seats, its groups and the blocks that its windows begin with
        stay the same, and it has grown little, the last work lists are returned again: the last
        span of each sequence reads keys up to its length on the GPU. O(rows + tiles) otherwise.
        """
        slices, floors = None, b""
        if windowed:
            slices = self._windowed_slices(windowed, seats * self.stride)
            assert slices.floors is not None, "made with floors"
            floors = slices.floors.tobytes()
        # Preempted together, sequences may come back in each other's seats.
        key = members, rows.tobytes(), seats.tobytes(), groups, padded_rows, floors
        self._age += 1
        if key == self._key and self._age < REPLAN_EVERY and self.plan:
            grown = starts - self._starts
            may_keep = not windowed or int(rows.max()) == 1  # longer rows are cut at blocks
            if may_keep and int(grown.min()) >= 0 and int(grown.max()) < REPLAN_EVERY:
                return self.plan
        flat = [(g.first_row, g.end_row, g.first_block, g.end_block) for g in groups]
        shared = np.array(flat, np.int32).reshape(-1, 4)
        whole = Slices(rows, starts, (seats * self.stride).astype(np.int32))
        plans = {
            window: self.planner.plan(
                whole if slices is None or window else slices, shared, padded_rows, window
            )
            for window in self.windows
        }
        for one in (self, *self.beside):
            one.load(plans, padded_rows, may_grow=bool(windowed))
        self.plan = plans[self.windows[0]]
        self._key, self._age, self._starts = key, 0, starts
        return self.plan

    def load(self, plans: dict[int, HostPlan], padded_rows: int, *, may_grow: bool) -> None:
        """Put work lists, by window, on the GPU."""
        self._take_memory(plans, padded_rows, may_grow=may_grow)
        for window, plan in plans.items():
            self._works[window].load(plan)

    def _windowed_slices(self, rows: Sequence[Row], offsets: Int32) -> Slices:
        """Return the slices of rows some of which are under attention windows: such a row is one
        slice for each block of it."""
        size = self.planner.block_size
        found: list[tuple[int, int, int, int, int]] = []
        for row, offset in zip(rows, offsets.tolist(), strict=True):
            if row.attention is None:
                found.append((row.count, row.start, offset, 0, 0))
                continue
            for piece in pieces_of(row, row.attention, size):
                both = piece.begin_block * size, piece.sinks * size
                found.append((piece.end - piece.first, row.start + piece.first, offset, *both))
        columns = np.array(found, np.int32).T
        return Slices(*(np.ascontiguousarray(column) for column in columns))

    def _take_memory(self, plans: dict[int, HostPlan], rows: int, *, may_grow: bool) -> None:
        """Choose the step's lists and scratch. Spans fit those made at the start, but where
        attention windows leave room for one part and each row has two (`may_grow`), the step gets
        memory of its own."""
        self._works, self.scratch = dict(self._lists), self.parts
        spec, device = self.spec, self.kv.device
        most = max(plan.parts_max for plan in plans.values())
        if most > 1 and most * rows > self.part_rows:
            assert may_grow, "spans are cut to fit the memory; only those of windows are not"
            self.scratch = PartialOutputs(most, rows, spec.heads, spec.value_dim, device)
        for window, plan in plans.items():
            known = self._lists[window]
            if plan.tile_count > known.capacity_tiles or self.scratch is not self.parts:
                tiles = max(plan.tile_count, 1)
                self._works[window] = WorkList(
                    known.configs, known.multiprocessors, known.rows_max, tiles, device
                )

    @property
    def is_at_known_addresses(self) -> bool:
        """Whether the step uses the lists and the scratch whose addresses graphs have recorded."""
        return all(self._works[window] is self._lists[window] for window in self.windows)

    def update_tables(self, indices: torch.Tensor, blocks: torch.Tensor) -> None:
        """Write block ids, int32, into the flat tables, at `indices`, int64 (seat * stride + table
        entry)."""
        self.tables.index_put_((indices,), blocks)

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        *,
        positions: torch.Tensor,
        slots: tuple[torch.Tensor, ...],
        lengths: torch.Tensor,
        classes: tuple[int, ...],
        merge: bool,
        causal: bool,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rotate, write KV and attend: qkv [T, (H + 2K) * D] → [T, H * D]; of latents
        [T, (H + 1) * D] → [T, H * V], and the queries are rotated in place.

        `slots`: by KV group. `classes` and `merge`: of `work`; `causal`: see `tree_attention`.
        """
        tokens, spec = qkv.shape[0], self.spec
        group, row = self._places[layer]
        window = self._window_of[layer]
        if window != self.windows[0] and not causal:
            # Any cut of the first work list has the same launches here: one graph a shape.
            classes, merge = (1, 2) if self.planner.shares_windows_of(window) else (2,), True
        works, tables = self._works[window], self.tables[group * self._group_entries :]
        out = qkv.new_empty(tokens, spec.heads, spec.value_dim)
        if spec.latent:
            qkv = qkv.view(tokens, spec.heads + 1, spec.head_dim)
            rope_latent_write(
                qkv, self.kv, row, *self.rotations[layer], positions, slots[group], spec.latent
            )
            latent_attention(
                qkv, self.kv, row, works, tables, lengths, out, self.scratch,
                self.planner.heads_per_group, spec.scale, classes=classes, causal=causal,
                dependent=True, merge=merge,
            )  # fmt: skip
            return out.view(tokens, spec.output_width)
        q = qkv.new_empty(tokens, spec.heads, spec.head_dim)
        rope_kv_write(
            qkv, q, self.kv, row, *self.rotations[layer], positions, slots[group], self._growth
        )
        tree_attention(
            q, self.kv, row, works, tables, lengths, out, self.scratch, classes=classes,
            causal=causal, dependent=True, merge=merge, scale=spec.scale, window=window,
            cap=spec.cap, sinks=sinks,
        )  # fmt: skip
        return out.view(tokens, spec.output_width)
