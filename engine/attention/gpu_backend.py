"""Attention on a GPU: one step's rows as a work list, shared prefixes read once.

The backend of `engine.attention.torch_backend.Attention` over the kernels in
`kernels.gpu.tree_attention`. Block tables live on the device, one row per seat; a plan is made only
when the batch or its groups change, since lengths are read on the device and appending a token
leaves the plan valid.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.torch_backend import rope_tables
from engine.kv.storage import KvStorage
from engine.model_store import ModelConfig
from engine.plan import Group
from kernels.gpu.fused_ops import rope_kv_write
from kernels.gpu.tree_attention import PartialOutputs, WorkList, tree_attention
from kernels.gpu.work_list import BIG, SMALL, WIDE, HostPlan, Slices, WorkPlanner

Int32 = npt.NDArray[np.int32]

REPLAN_EVERY = 64
"""Steps after which a plan is made anew although nothing changed: own keys have grown."""

PART_ROWS = 65_536
"""Rows times parts that scratch memory is laid out for."""

TABLE_PADDING = 8
"""Entries the kernel may read behind a table's end; every one a valid block."""


class GpuAttention:
    """Plans and launches. `lengths` [T] and `positions`, `slots` [T] are the runner's device
    buffers, filled before `attend`.
    """

    def __init__(
        self,
        config: ModelConfig,
        kv: KvStorage,
        *,
        context: int,
        seats: int,
        tokens_max: int,
        chunk_keys: int = 0,
    ) -> None:
        device = kv.data.device
        self.kv = kv.data
        self.heads, self.dim = config.heads, config.head_dim
        self.size = kv.data.shape[4]
        self.stride = -(-context // self.size) + TABLE_PADDING
        self.tables = torch.zeros(seats * self.stride, dtype=torch.int32, device=device)
        cos, sin = rope_tables(config, context)
        self.cos, self.sin = cos.to(device), sin.to(device)
        multiprocessors = 4
        if device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        rows = PART_ROWS if device.type == "cuda" else 16 * tokens_max
        self.planner = WorkPlanner(
            kv_heads=config.kv_heads,
            heads_per_group=config.heads // config.kv_heads,
            block_size=self.size,
            multiprocessors=multiprocessors,
            chunk_keys=chunk_keys,
            part_rows=rows,
        )
        self.work = WorkList((WIDE, BIG, SMALL), multiprocessors, tokens_max, 16_384, device)
        self.parts = PartialOutputs(1, rows, config.heads, config.head_dim, device)
        self.part_rows = rows
        self.scratch = self.parts
        self.plan: HostPlan | None = None
        self._key: object = None
        self._age = 0
        self.planned = 0

    def prepare(
        self,
        members: tuple[int, ...],
        rows: Int32,
        starts: Int32,
        seats: Int32,
        groups: tuple[Group, ...],
    ) -> HostPlan:
        """The step's work list on the device. `members` names the batch: while it, its row counts
        and its groups stay the same, so does the plan.
        """
        is_decoding = bool((rows == 1).all())
        key = (members, groups) if is_decoding else None
        self._age += 1
        if key is not None and key == self._key and self._age < REPLAN_EVERY and self.plan:
            return self.plan
        flat = [(g.first_row, g.end_row, g.first_block, g.end_block) for g in groups]
        slices = Slices(rows, starts, (seats * self.stride).astype(np.int32))
        self.plan = self.planner.plan(slices, np.array(flat, np.int32).reshape(-1, 4))
        total = int(rows.sum())
        self.scratch = self.parts
        if self.plan.parts_max > 1 and self.plan.parts_max * total > self.part_rows:
            assert self.planner.chunk_keys, "spans are cut to fit, only chunks are where they are"
            self.scratch = PartialOutputs(
                self.plan.parts_max, total, self.heads, self.dim, self.kv.device
            )
        self.work.load(self.plan)
        self._key, self._age = key, 0
        self.planned += 1
        return self.plan

    def update_tables(self, places: torch.Tensor, blocks: torch.Tensor) -> None:
        """Write block ids into tables, at flat places."""
        self.tables[places] = blocks

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
        """Rotate, write KV, attend: [T, (H + 2K) * D] to [T, H * D]."""
        tokens = qkv.shape[0]
        q = qkv.new_empty(tokens, self.heads, self.dim)
        rope_kv_write(qkv, q, self.kv, layer, self.cos, self.sin, positions, slots)
        out = torch.empty_like(q)
        tree_attention(
            q, self.kv, layer, self.work, self.tables, lengths, out, self.scratch,
            classes=classes, causal=causal, dependent=not causal, merge=merge,
        )  # fmt: skip
        return out.view(tokens, self.heads * self.dim)
