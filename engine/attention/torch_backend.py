"""Attention over paged KV for one step's batch, on the CPU, in torch.

A shared run of blocks is read once for all rows of its group, at every level of the tree: the rows
of a group are one matrix product against its keys, and a row's parts are merged by their
log-sum-exps. What a row has to itself is read per row for prompts, and in one padded batch for
decoding rows. Backends share the interface: `begin(plan, batch)` once a step, then
`attend(layer, qkv)` once a layer, which rotates, writes KV and attends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.attention.batch import Batch
from engine.kv.storage import KvStorage
from engine.model_store import ModelConfig
from engine.plan import StepPlan
from kernels.reference import rotate

GROUP_KEYS_MIN = 64
"""A shorter shared run is read by each row: its own product and merge would cost more."""

TILE_ROWS = 256
"""Query tokens of a prompt per product: bounds the score matrix and skips what causality masks."""


class Attend(Protocol):
    """What a model sees of a backend, laid out for one step."""

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """qkv [T, (H + 2K) * D] in; [T, H * D] out. Writes the layer's KV of the batch's slots."""


def rope_tables(config: ModelConfig, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [context, D / 2] fp32, with Llama 3's stretching where the model has it.

    Frequencies whose wavelength exceeds the original context over `low_freq_factor` are divided by
    `factor`, those below it over `high_freq_factor` are kept, and between them it is blended.
    """
    half = config.head_dim // 2
    power = torch.arange(half, dtype=torch.float64) / half
    frequencies = config.rope_theta**-power
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling is not None and scaling.kind == "divisors":
        frequencies = frequencies / torch.tensor(scaling.divisors, dtype=torch.float64)
    elif scaling is not None:
        turns = scaling.original_context * frequencies / (2 * math.pi)
        blend = (turns - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        blend = blend.clamp(0.0, 1.0)
        frequencies = frequencies * (blend + (1 - blend) / scaling.factor)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Zero for what is no number: padded products multiply slots behind a sequence's end by zero,
    and these may be another's. Whoever made it fails by its own logits."""
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(slots=True)
class _Shared:
    """Query tokens [first, end) all see the keys of `blocks`."""

    first: int
    end: int
    blocks: torch.Tensor


@dataclass(slots=True)
class _Prompt:
    """Query tokens [first, end) of one sequence, the first at `start`; its keys from `from_key`."""

    first: int
    end: int
    start: int
    from_key: int
    blocks: torch.Tensor


class TorchAttention:
    """The backend without a compiler: torch alone, any dtype the CPU multiplies."""

    def __init__(self, config: ModelConfig, kv: KvStorage, context: int) -> None:
        self.kv = kv.data
        self.heads, self.kv_heads, self.dim = config.heads, config.kv_heads, config.head_dim
        self.group = config.heads // config.kv_heads
        self.scale = config.head_dim**-0.5
        self._cos, self._sin = rope_tables(config, context)
        self._shared: list[_Shared] = []
        self._prompts: list[_Prompt] = []

    def begin(self, plan: StepPlan, batch: Batch) -> None:
        """Find shared runs, prompts and decoding rows. O(rows + their blocks)."""
        size = self.kv.shape[4]
        self.cos, self.sin = self._cos[batch.positions], self._sin[batch.positions]
        self.slot_block, self.slot_offset = batch.slots // size, batch.slots % size
        starts = [0, *batch.row_ends]
        covered = [0] * len(plan.rows)
        self._shared, self._prompts = [], []
        for group in plan.groups:
            first = covered[group.first_row]
            if (group.end_block - first) * size < GROUP_KEYS_MIN:
                continue
            blocks = plan.rows[group.first_row].block_ids[first : group.end_block]
            self._shared.append(
                _Shared(starts[group.first_row], starts[group.end_row], torch.tensor(blocks))
            )
            covered[group.first_row : group.end_row] = [group.end_block] * (
                group.end_row - group.first_row
            )
        decoding: list[tuple[int, list[int], int]] = []
        for index, row in enumerate(plan.rows):
            from_block = covered[index]
            last = -(-(row.start + row.count) // size)
            blocks = row.block_ids[from_block:last]
            if row.count == 1:
                decoding.append((starts[index], list(blocks), row.start + 1 - from_block * size))
                continue
            self._prompts.append(
                _Prompt(
                    starts[index], starts[index + 1], row.start, from_block * size,
                    torch.tensor(blocks),
                )
            )  # fmt: skip
        self._lay_out_decoding(decoding, size)

    def _lay_out_decoding(self, decoding: list[tuple[int, list[int], int]], size: int) -> None:
        self._rows = torch.tensor([row for row, _, _ in decoding], dtype=torch.int64)
        longest = max((len(blocks) for _, blocks, _ in decoding), default=0)
        table = np.zeros((len(decoding), longest), np.int64)
        for index, (_, blocks, _) in enumerate(decoding):
            table[index, : len(blocks)] = blocks
        lengths = torch.tensor([keys for _, _, keys in decoding], dtype=torch.int64)
        self._table = torch.from_numpy(table)
        self._hidden = torch.arange(longest * size)[None, :] >= lengths[:, None]

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """See `Attention.attend`."""
        tokens = qkv.shape[0]
        q_end, k_end = self.heads * self.dim, (self.heads + self.kv_heads) * self.dim
        q = rotate(qkv[:, :q_end].view(tokens, self.heads, self.dim), self.cos, self.sin)
        k = rotate(qkv[:, q_end:k_end].view(tokens, self.kv_heads, self.dim), self.cos, self.sin)
        v = qkv[:, k_end:].view(tokens, self.kv_heads, self.dim)
        self.kv[self.slot_block, layer, 0, :, self.slot_offset] = _finite(k).to(self.kv.dtype)
        self.kv[self.slot_block, layer, 1, :, self.slot_offset] = _finite(v).to(self.kv.dtype)
        # [K, T, G, D]: the query heads of a KV head side by side, so that they are rows of one
        # matrix product.
        q = (q * self.scale).view(tokens, self.kv_heads, self.group, self.dim).transpose(0, 1)
        out = torch.empty_like(q)
        lse = q.new_empty(self.kv_heads, tokens, self.group)
        for prompt in self._prompts:
            self._attend_prompt(layer, prompt, q, out, lse)
        if len(self._rows):
            self._attend_decoding(layer, q, out, lse)
        for shared in self._shared:
            self._attend_shared(layer, shared, q, out, lse)
        return out.transpose(0, 1).reshape(tokens, self.heads * self.dim)

    def _keys(self, layer: int, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """K and V of a run of blocks: [2, K, keys, D]."""
        run = self.kv[blocks, layer]
        return run.permute(1, 2, 0, 3, 4).flatten(2, 3).to(dtype)

    def _attend_prompt(
        self, layer: int, p: _Prompt, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        keys, values = self._keys(layer, p.blocks, q.dtype)
        for first in range(p.first, p.end, TILE_ROWS):
            end = min(first + TILE_ROWS, p.end)
            seen = p.start + (end - p.first) - p.from_key
            tile = q[:, first:end].flatten(1, 2)
            scores = tile @ keys[:, :seen].transpose(1, 2)
            position = torch.arange(first, end) - p.first + p.start - p.from_key
            whole = int(position[0]) + 1  # keys every token of the tile sees
            edge = torch.arange(whole, seen)[None, :] > position[:, None]
            edge = edge.repeat_interleave(self.group, 0)
            scores[:, :, whole:].masked_fill_(edge, -math.inf)
            self._store(scores, values[:, :seen], out[:, first:end], lse[:, first:end])

    def _attend_decoding(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        run = self.kv[self._table, layer]  # [R, blocks, 2, K, S, D]
        keys, values = run.permute(2, 3, 0, 1, 4, 5).flatten(3, 4).to(q.dtype)
        scores = q[:, self._rows] @ keys.transpose(2, 3)  # [K, R, G, keys]
        scores.masked_fill_(self._hidden[None, :, None, :], -math.inf)
        lse[:, self._rows] = part = scores.logsumexp(-1)
        out[:, self._rows] = (scores - part[..., None]).exp_() @ values

    def _attend_shared(
        self, layer: int, s: _Shared, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        keys, values = self._keys(layer, s.blocks, q.dtype)
        here, weight = out[:, s.first : s.end], lse[:, s.first : s.end]
        part, part_lse = torch.empty_like(here), torch.empty_like(weight)
        scores = q[:, s.first : s.end].flatten(1, 2) @ keys.transpose(1, 2)
        self._store(scores, values, part, part_lse)
        total = torch.logaddexp(weight, part_lse)
        here.mul_((weight - total).exp_()[..., None])
        here.add_(part * (part_lse - total).exp_()[..., None])
        weight.copy_(total)

    def _store(
        self, scores: torch.Tensor, values: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Softmax of scores [K, n * G, keys] over values, into out [K, n, G, D] and lse."""
        highest = scores.amax(-1, keepdim=True)
        scores.sub_(highest).exp_()
        total = scores.sum(-1, keepdim=True)
        out.copy_((scores @ values).div_(total).view(out.shape))
        lse.copy_((highest + total.log_()).view(lse.shape))
