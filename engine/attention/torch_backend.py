"""The attention backend in plain torch, on any device: paged KV, shared prefixes read once.

The rows of a group are one matrix product against the keys of their shared run of blocks, at every
level of the prefix tree; a row's parts are merged by their log-sum-exps. A row's own keys are read
per row for prompts, and in one padded batch for decoding rows. A layer with a window reads the
blocks that overlap it, row by row; a row under an attention window is laid out by the blocks that
it reads, for layers without a window. The backend computes every kind of attention that an
`Architecture` describes; runners use it where the C or GPU kernels do not fit the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.batch import Batch
from engine.attention.interface import attention_spec
from engine.attention.rope import rope_tables
from engine.attention.row_pieces import pieces_of
from engine.kv.storage import KvStorage
from engine.kv.token_rows import token_rows
from engine.model_store import Architecture
from engine.plan import StepPlan
from kernels.reference import rotate

GROUP_KEYS_MIN = 64
"""Fewest keys of a shared run. Each row reads a shorter run itself: a product and a merge for the
group would cost more."""

TILE_ROWS = 256
"""Query tokens of a prompt per product: bounds the score matrix, and skips keys that the causal
mask hides from the whole tile."""


@dataclass(slots=True)
class _Shared:
    """Query tokens [first, end) that all see the keys of `blocks`."""

    first: int
    end: int
    blocks: torch.Tensor


@dataclass(slots=True)
class _Prompt:
    """Query tokens [first, end) of one sequence against the keys of `blocks`, of which that number
    `at` is the first token's own."""

    first: int
    end: int
    at: int
    blocks: torch.Tensor


@dataclass(slots=True)
class _Layout:
    """A step as the layers of one KV group and window see it (0: no window).

    `slot_block` and `slot_offset` [T]: where the tokens' KV goes.
    """

    window: int
    slot_block: torch.Tensor
    slot_offset: torch.Tensor
    shared: list[_Shared]
    prompts: list[_Prompt]
    rows: torch.Tensor
    """The tokens that decode, with their blocks in `table` [R, blocks] and `hidden` [R, keys], the
    keys that they do not see."""
    table: torch.Tensor
    hidden: torch.Tensor


class TorchAttention:
    """`AttentionBackend` and `LayerAttention` in torch, on the device of the KV.

    Scores and softmax are fp32 at least, for any dtype of the model.
    """

    def __init__(self, config: Architecture, kv: KvStorage, context: int) -> None:
        self._rows = token_rows(kv)
        self.device = kv.data.device
        self.block_size = kv.format.block_size
        self.spec = attention_spec(config)
        self._growth = config.query_growth
        windows = [layer.window for layer in config.layers]
        self._places = list(zip(kv.format.group_of_layer, windows, strict=True))
        self._row_of_layer = kv.format.row_of_layer
        self._ropes = [layer.rope for layer in config.layers]
        self._tables = {
            name: (cos.to(self.device), sin.to(self.device))
            for name, (cos, sin) in rope_tables(config, context).items()
        }
        self._layouts: dict[tuple[int, int], _Layout] = {}

    def begin(self, plan: StepPlan, batch: Batch) -> None:
        """Find shared runs, prompts and decoding rows. O(rows + their blocks), for each KV group
        and window."""
        positions = batch.positions.to(self.device)
        self.rotations = {
            name: (cos[positions], sin[positions]) for name, (cos, sin) in self._tables.items()
        }
        if self._growth is not None:
            beta, original = self._growth
            self._grown = 1 + beta * torch.log1p((positions // original).float())
        starts = [0, *batch.row_ends]
        self._written = None if batch.written is None else batch.written.to(self.device)
        slots = [slots.to(self.device) for slots in batch.slots]
        self._layouts = {
            (group, window): self._lay_out(plan, starts, slots[group], group, window)
            for group, window in set(self._places)
        }

    def _lay_out(
        self, plan: StepPlan, starts: list[int], slots: torch.Tensor, kv_group: int, window: int
    ) -> _Layout:
        size = self.block_size
        shared, prompts = list[_Shared](), list[_Prompt]()
        tables = [(row.block_ids, *row.beside)[kv_group] for row in plan.rows]
        covered = [0] * len(plan.rows)
        for group in plan.groups if not window else ():
            first = covered[group.first_row]
            if (group.end_block - first) * size < GROUP_KEYS_MIN:
                continue
            blocks = tables[group.first_row][first : group.end_block]
            shared.append(
                _Shared(starts[group.first_row], starts[group.end_row], self._tensor(blocks))
            )
            covered[group.first_row : group.end_row] = [group.end_block] * (
                group.end_row - group.first_row
            )
        decoding: list[tuple[int, list[int], int]] = []
        for index, row in enumerate(plan.rows):
            first = starts[index]
            if row.attention is not None and not window:
                runs = [
                    (first + piece.first, first + piece.end, piece.at, piece.blocks(row))
                    for piece in pieces_of(row, row.attention, size)
                ]
            else:
                begin = max(0, row.start - window + 1) // size if window else covered[index]
                blocks = tables[index][begin : -(-(row.start + row.count) // size)]
                runs = [(first, starts[index + 1], row.start - begin * size, list(blocks))]
            for first, end, at, blocks in runs:
                if end - first == 1:
                    decoding.append((first, blocks, at + 1))
                else:
                    prompts.append(_Prompt(first, end, at, self._tensor(blocks)))
        return _Layout(
            window, slots // size, slots % size, shared, prompts,
            *self._decoding_tables(decoding, window),
        )  # fmt: skip

    def _tensor(self, blocks: object) -> torch.Tensor:
        return torch.as_tensor(blocks, dtype=torch.int64).to(self.device)

    def _decoding_tables(
        self, decoding: list[tuple[int, list[int], int]], window: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `rows`, `table` and `hidden` of a layout. `decoding`: each token, its blocks, and
        the number of keys up to its own."""
        longest = max((len(blocks) for _, blocks, _ in decoding), default=0)
        table = np.zeros((len(decoding), longest), np.int64)
        for index, (_, blocks, _) in enumerate(decoding):
            table[index, : len(blocks)] = blocks
        lengths = self._tensor([keys for _, _, keys in decoding])[:, None]
        keys = torch.arange(longest * self.block_size, device=self.device)[None, :]
        hidden = keys >= lengths
        if window:
            hidden |= keys < lengths - window
        rows = self._tensor([row for row, _, _ in decoding])
        return rows, torch.from_numpy(table).to(self.device), hidden

    def attend(
        self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `engine.attention.interface.LayerAttention`."""
        tokens, spec, layout = qkv.shape[0], self.spec, self._layouts[self._places[layer]]
        heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
        qkv = qkv.view(tokens, -1, dim)
        cos, sin = self.rotations[self._ropes[layer]]
        layer = self._row_of_layer[layer]
        block, offset, written = layout.slot_block, layout.slot_offset, self._written
        q = rotate(qkv[:, :heads], cos, sin)
        k = rotate(qkv[:, heads : heads + kv_heads], cos, sin)
        v = qkv[:, heads + kv_heads :]
        if written is not None:
            block, offset, k, v = block[written], offset[written], k[written], v[written]
        self._rows.write(layer, 0, block, offset, k)
        if not spec.latent:
            self._rows.write(layer, 1, block, offset, v)
        q = q.to(torch.promote_types(q.dtype, torch.float32)) * spec.scale
        if self._growth is not None:
            q = q * self._grown[:, None, None]
        # [K, T, G, D]: the query heads of a KV head side by side, so that they are rows of one
        # matrix product.
        q = q.view(tokens, kv_heads, spec.group_size, dim).transpose(0, 1)
        out = q.new_empty(*q.shape[:-1], spec.value_dim)
        lse = q.new_empty(kv_heads, tokens, spec.group_size)
        for prompt in layout.prompts:
            self._attend_prompt(layer, layout.window, prompt, q, out, lse)
        if len(layout.rows):
            self._attend_decoding(layer, layout, q, out, lse)
        for shared in layout.shared:
            self._attend_shared(layer, shared, q, out, lse)
        if sinks is not None:  # the sink takes its share of the softmax and adds nothing
            own = sinks.to(lse.dtype).view(kv_heads, 1, spec.group_size)
            out.mul_(torch.sigmoid(lse - own)[..., None])
        return out.transpose(0, 1).reshape(tokens, spec.output_width).to(qkv.dtype)

    def _split(self, run: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of KV [parts, ...]; a latent's values are the end of its keys."""
        if self.spec.latent:
            return run[0], run[0, ..., -self.spec.latent :]
        return run[0], run[1]

    def _keys(
        self, layer: int, blocks: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K [K, keys, D] and V [K, keys, V] of a run of blocks."""
        run = self._rows.read(blocks, layer)
        return self._split(run.permute(1, 2, 0, 3, 4).flatten(2, 3).to(dtype))

    def _capped(self, scores: torch.Tensor) -> torch.Tensor:
        cap = self.spec.cap
        return scores.div_(cap).tanh_().mul_(cap) if cap else scores

    def _attend_prompt(
        self, layer: int, window: int, p: _Prompt, q: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:  # fmt: skip
        keys, values = self._keys(layer, p.blocks, q.dtype)
        for first in range(p.first, p.end, TILE_ROWS):
            end = min(first + TILE_ROWS, p.end)
            seen = p.at + end - p.first
            at = p.at + first - p.first  # the tile's first token among the keys
            low = max(0, at - window + 1) if window else 0
            tile = q[:, first:end].flatten(1, 2)
            scores = self._capped(tile @ keys[:, low:seen].transpose(1, 2))
            position = torch.arange(at, at + end - first, device=self.device)[:, None]
            # Without a window every token of the tile sees all keys up to the first token's own.
            unmasked = 0 if window else at + 1
            key = torch.arange(low + unmasked, seen, device=self.device)[None, :]
            mask = key > position
            if window:
                mask |= key <= position - window
            mask = mask.repeat_interleave(self.spec.group_size, 0)
            scores[:, :, unmasked:].masked_fill_(mask, -math.inf)
            self._store(scores, values[:, low:seen], out[:, first:end], lse[:, first:end])

    def _attend_decoding(
        self, layer: int, layout: _Layout, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        run = self._rows.read(layout.table, layer)  # [R, blocks, parts, K, S, D]
        keys, values = self._split(run.permute(2, 3, 0, 1, 4, 5).flatten(3, 4).to(q.dtype))
        scores = self._capped(q[:, layout.rows] @ keys.transpose(2, 3))  # [K, R, G, keys]
        scores.masked_fill_(layout.hidden[None, :, None, :], -math.inf)
        lse[:, layout.rows] = part = scores.logsumexp(-1)
        out[:, layout.rows] = (scores - part[..., None]).exp_() @ values

    def _attend_shared(
        self, layer: int, s: _Shared, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        keys, values = self._keys(layer, s.blocks, q.dtype)
        here, weight = out[:, s.first : s.end], lse[:, s.first : s.end]
        part, part_lse = torch.empty_like(here), torch.empty_like(weight)
        scores = self._capped(q[:, s.first : s.end].flatten(1, 2) @ keys.transpose(1, 2))
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
