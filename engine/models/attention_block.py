"""Grouped-query attention around the backend: projections, and norms of queries and keys.

Attention has grouped KV heads (as many as query heads: MHA; one: MQA). It knows no rotation, no KV
and no mask: those are the attention backend's. `engine.models.decoder` builds it.
"""

from __future__ import annotations

import torch

from engine.attention.interface import LayerAttention
from engine.model_store import Architecture
from engine.models.layers import Ops, Rows, TensorSource


class AttentionBlock:
    """A layer's attention: H query heads over K KV heads of D channels."""

    def __init__(self, config: Architecture, source: TensorSource, ops: Ops) -> None:
        self._ops = ops
        self._eps = config.norm_eps
        self._heads, self._kv_heads = config.heads, config.kv_heads
        self._head_dim = config.head_dim
        self._qk_norm = config.qk_norm
        parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        self._gate_width = config.heads * config.head_dim if config.output_gate else 0
        if config.output_gate:
            parts.append("self_attn.gate_proj")
        self.reader = ops.linear(*source.joined(*parts))
        self.output = ops.part_linear(*source.joined("self_attn.o_proj"))
        self.sinks = source.tensor("self_attn.sinks") if config.sinks else None
        if config.qk_norm:
            self._q_norm = source.weight("self_attn.q_norm")
            self._k_norm = source.weight("self_attn.k_norm")

    def attend(self, layer: int, x: Rows, attention: LayerAttention) -> torch.Tensor:
        """Return what the heads read, [T, H * D], before the output projection. Only `reader` reads
        x."""
        qkv = self.reader(x)
        gate = None
        if self._gate_width:
            widths = [qkv.shape[1] - self._gate_width, self._gate_width]
            qkv, gate = torch.split(qkv, widths, dim=1)
            qkv = qkv.contiguous()
        if self._qk_norm == "head":
            heads = qkv.view(len(qkv), -1, self._head_dim)
            self._ops.norm_heads(heads, self._heads, self._q_norm, self._k_norm, self._eps)
        elif self._qk_norm:
            self._norm_whole(qkv)
        attended = attention.attend(layer, qkv, self.sinks)
        return attended if gate is None else attended * torch.sigmoid(gate)

    def _norm_whole(self, qkv: torch.Tensor) -> None:
        """Norm all queries at once, and all keys, in place."""
        queries = self._heads * self._head_dim
        keys = queries + self._kv_heads * self._head_dim
        for part, weight in (
            (qkv[:, :queries], self._q_norm),
            (qkv[:, queries:keys], self._k_norm),
        ):
            normed, _ = self._ops.norm(part, None, weight, self._eps)
            part.copy_(normed)
