"""The attention backend in plain torch, on the CPU: paged KV, shared prefixes read once.

The rows of a group are one matrix product against the keys of their shared run of blocks, at every
level of the prefix tree; a row's parts are merged by their log-sum-exps. A row's own keys are read
per row for prompts, and in one padded batch for decoding rows. The CPU runner uses this backend
where no C compiler works or the model's shape does not fit the C kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.batch import Batch
from engine.attention.interface import attention_spec
from engine.attention.rope import rope_tables
from engine.kv.storage import KvStorage
from engine.model_store import ModelConfig
from engine.plan import StepPlan
from kernels.reference import rotate

GROUP_KEYS_MIN = 64
"""Fewest keys of a shared run. Each row reads a shorter run itself: a product and a merge for the
group would cost more."""

TILE_ROWS = 256
"""Query tokens of a prompt per product: bounds the score matrix, and skips keys that the causal
mask hides from the whole tile."""


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Return x with NaN and infinities set to zero.

    Padded products multiply slots behind a sequence's end by zero, and these slots may belong to
    another sequence. The sequence that produced the NaN fails by its own logits.
    """
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(slots=True)
class _Shared:
    """Query tokens [first, end) that all see the keys of `blocks`."""

    first: int
    end: int
    blocks: torch.Tensor


@dataclass(slots=True)
class _Prompt:
    """Query tokens [first, end) of one sequence, the first at position `start`, against its keys
    from `from_key` in `blocks`."""

    first: int
    end: int
    start: int
    from_key: int
    blocks: torch.Tensor


class TorchAttention:
    """`AttentionBackend` and `LayerAttention` in torch, in any dtype that the CPU multiplies."""

    def __init__(self, config: ModelConfig, kv: KvStorage, context: int) -> None:
        self.kv = kv.data
        self.block_size = kv.format.block_size
        self.spec = attention_spec(config)
        self._cos, self._sin = rope_tables(config, context)
        self._shared: list[_Shared] = []
        self._prompts: list[_Prompt] = []

    def begin(self, plan: StepPlan, batch: Batch) -> None:
        """Find shared runs, prompts and decoding rows. O(rows + their blocks)."""
        size = self.block_size
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
        self._lay_out_decoding(decoding)

    def _lay_out_decoding(self, decoding: list[tuple[int, list[int], int]]) -> None:
        self._rows = torch.tensor([row for row, _, _ in decoding], dtype=torch.int64)
        longest = max((len(blocks) for _, blocks, _ in decoding), default=0)
        table = np.zeros((len(decoding), longest), np.int64)
        for index, (_, blocks, _) in enumerate(decoding):
            table[index, : len(blocks)] = blocks
        lengths = torch.tensor([keys for _, _, keys in decoding], dtype=torch.int64)
        self._table = torch.from_numpy(table)
        self._hidden = torch.arange(longest * self.block_size)[None, :] >= lengths[:, None]

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """See `engine.attention.interface.LayerAttention`."""
        tokens, spec = qkv.shape[0], self.spec
        heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
        qkv = qkv.view(tokens, heads + 2 * kv_heads, dim)
        q = rotate(qkv[:, :heads], self.cos, self.sin)
        k = rotate(qkv[:, heads : heads + kv_heads], self.cos, self.sin)
        v = qkv[:, heads + kv_heads :]
        self.kv[self.slot_block, layer, 0, :, self.slot_offset] = _finite(k).to(self.kv.dtype)
        self.kv[self.slot_block, layer, 1, :, self.slot_offset] = _finite(v).to(self.kv.dtype)
        # [K, T, G, D]: the query heads of a KV head side by side, so that they are rows of one
        # matrix product.
        q = (q * spec.scale).view(tokens, kv_heads, spec.group_size, dim).transpose(0, 1)
        out = torch.empty_like(q)
        lse = q.new_empty(kv_heads, tokens, spec.group_size)
        for prompt in self._prompts:
            self._attend_prompt(layer, prompt, q, out, lse)
        if len(self._rows):
            self._attend_decoding(layer, q, out, lse)
        for shared in self._shared:
            self._attend_shared(layer, shared, q, out, lse)
        return out.transpose(0, 1).reshape(tokens, spec.query_width)

    def _keys(self, layer: int, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return K and V of a run of blocks: [2, K, keys, D]."""
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
            unmasked = int(position[0]) + 1  # keys that every token of the tile sees
            mask = torch.arange(unmasked, seen)[None, :] > position[:, None]
            mask = mask.repeat_interleave(self.spec.group_size, 0)
            scores[:, :, unmasked:].masked_fill_(mask, -math.inf)
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
        """Write the softmax of scores [K, n * G, keys] over values to out [K, n, G, D], and lse."""
        highest = scores.amax(-1, keepdim=True)
        scores.sub_(highest).exp_()
        total = scores.sum(-1, keepdim=True)
        out.copy_((scores @ values).div_(total).view(out.shape))
        lse.copy_((highest + total.log_()).view(lse.shape))
