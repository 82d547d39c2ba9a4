"""The attention backend of a GPU: a step's rows as a work list, shared prefixes read once.

It plans for the kernels in `kernels.gpu.tree_attention` and launches them. Block tables live on the
GPU, one row per seat. A work list is made only when the batch or its groups change: the kernels
read lengths on the GPU, so appending a token leaves the list valid. `engine.runner.gpu_runner`
calls `prepare` and `update_tables`; a model's layers reach `attend` through
`engine.runner.gpu_inputs.StepAttention`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.interface import attention_spec
from engine.attention.rope import rope_tables
from engine.kv.storage import KvStorage
from engine.model_store import Architecture
from engine.plan import Group
from kernels.gpu.fused_ops import rope_kv_write
from kernels.gpu.tree_attention import PartialOutputs, WorkList, tree_attention
from kernels.gpu.work_list import CLASSES, HostPlan, Slices, WorkPlanner

Int32 = npt.NDArray[np.int32]

REPLAN_EVERY = 64
"""Steps after which an unchanged batch is planned anew: its sequences' own keys have grown."""

PART_ROWS = 65_536
"""Rows times parts that the scratch memory holds."""

TABLE_PADDING = 8
"""Block ids that the kernels may read behind a table's end; each is a valid block."""


class GpuAttention:
    """Plans steps and launches attention. The runner's GPU buffers `positions`, `slots` and
    `lengths`, [T] int32 each, are filled before `attend`.

    `seats`: sequences known at once. `tokens_max`: rows of a step. `chunk_keys`: see `WorkPlanner`.
    """

    def __init__(
        self,
        config: Architecture,
        kv: KvStorage,
        *,
        context: int,
        seats: int,
        tokens_max: int,
        chunk_keys: int = 0,
    ) -> None:
        device = kv.data.device
        self.kv = kv.data
        spec = attention_spec(config)
        self.spec = spec
        self.stride = -(-context // kv.format.block_size) + TABLE_PADDING
        self.tables = torch.zeros(seats * self.stride, dtype=torch.int32, device=device)
        tables = {
            name: (cos.to(device), sin.to(device))
            for name, (cos, sin) in rope_tables(config, context).items()
        }
        self.rotations = [tables[layer.rope] for layer in config.layers]
        multiprocessors = 4
        if device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        rows = PART_ROWS if device.type == "cuda" else 16 * tokens_max
        self.planner = WorkPlanner(
            kv_heads=spec.kv_heads,
            heads_per_group=spec.group_size,
            block_size=kv.format.block_size,
            multiprocessors=multiprocessors,
            chunk_keys=chunk_keys,
            part_rows=rows,
        )
        self.list = WorkList(
            CLASSES, multiprocessors, tokens_max, self.planner.tiles_max(tokens_max), device
        )
        self.work = self.list
        self.parts = PartialOutputs(1, rows, spec.heads, spec.head_dim, device)
        self.part_rows = rows
        self.scratch = self.parts
        self.plan: HostPlan | None = None
        self._key: object = None
        self._age = 0

    def prepare(
        self,
        members: tuple[int, ...],
        rows: Int32,
        starts: Int32,
        seats: Int32,
        groups: tuple[Group, ...],
        padded_rows: int,
    ) -> HostPlan:
        """Put the step's work list on the GPU and return it.

        `members`: the sequence ids of the batch. `rows`, `starts`, `seats`: per sequence, query
        tokens, first position and seat. `padded_rows`: rows of the launch. While a decoding batch
        and its groups stay the same, the last work list is returned again. O(rows + tiles)
        otherwise.
        """
        is_decoding = bool((rows == 1).all())
        key = (members, groups, padded_rows) if is_decoding else None
        self._age += 1
        if key is not None and key == self._key and self._age < REPLAN_EVERY and self.plan:
            return self.plan
        flat = [(g.first_row, g.end_row, g.first_block, g.end_block) for g in groups]
        slices = Slices(rows, starts, (seats * self.stride).astype(np.int32))
        self.plan = self.planner.plan(slices, np.array(flat, np.int32).reshape(-1, 4), padded_rows)
        self._take_memory(self.plan, padded_rows)
        self.work.load(self.plan)
        self._key, self._age = key, 0
        return self.plan

    def _take_memory(self, plan: HostPlan, rows: int) -> None:
        """Choose the step's list and scratch. Spans always fit those made at the start; chunks,
        whose cuts do not depend on the room, get memory of their own where they do not."""
        tiles, part_rows = plan.tile_count, plan.parts_max * rows
        device, known = self.kv.device, self.list
        self.work, self.scratch = known, self.parts
        if tiles <= known.capacity_tiles and (plan.parts_max == 1 or part_rows <= self.part_rows):
            return
        assert self.planner.chunk_keys, "spans are cut to fit the memory; only chunks are not"
        self.work = WorkList(CLASSES, known.multiprocessors, known.rows_max, tiles, device)
        spec = self.spec
        self.scratch = PartialOutputs(plan.parts_max, rows, spec.heads, spec.head_dim, device)

    @property
    def is_at_known_addresses(self) -> bool:
        """Whether the step uses the list and the scratch whose addresses graphs have recorded."""
        return self.work is self.list

    def update_tables(self, indices: torch.Tensor, blocks: torch.Tensor) -> None:
        """Write block ids into the flat tables, at `indices` (seat * stride + table entry)."""
        self.tables[indices] = blocks

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        *,
        positions: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        classes: tuple[int, ...],
        merge: bool,
        causal: bool,
    ) -> torch.Tensor:
        """Rotate, write KV and attend: qkv [T, (H + 2K) * D] → [T, H * D].

        `classes`, `merge` and `causal`: see `tree_attention`.
        """
        tokens = qkv.shape[0]
        q = qkv.new_empty(tokens, self.spec.heads, self.spec.head_dim)
        rope_kv_write(qkv, q, self.kv, layer, *self.rotations[layer], positions, slots)
        out = torch.empty_like(q)
        tree_attention(
            q, self.kv, layer, self.work, self.tables, lengths, out, self.scratch,
            classes=classes, causal=causal, dependent=True, merge=merge,
        )  # fmt: skip
        return out.view(tokens, self.spec.query_width)
