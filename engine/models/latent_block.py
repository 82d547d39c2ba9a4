"""Multi-head latent attention around the backend: all heads read one latent a token.

The cached record of a token is its rotated channels and its normed latent. A head's query is taken
into the latent's space, attends there, and its output is taken out of it, so that keys and values
are never expanded. After DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1. `engine.models.decoder`
builds it.
"""

from __future__ import annotations

import torch

from engine.attention.interface import LayerAttention
from engine.model_store import Architecture
from engine.models.layers import Ops, TensorSource


class LatentBlock:
    """A layer's latent attention: H heads over one record of `rope + rank` channels. Two maps read
    its input, so that it has no `reader`."""

    def __init__(self, config: Architecture, source: TensorSource, ops: Ops) -> None:
        assert config.latent is not None
        self.reader = None
        self._latent = config.latent
        self._heads = config.heads
        self._ops = ops
        self._query_down = None
        if config.latent.query_rank:
            self._query_down = ops.linear(*source.joined("self_attn.q_a_proj"))
            self._query_norm = source.weight("self_attn.q_a_layernorm")
            self._query = ops.linear(*source.joined("self_attn.q_b_proj"))
        else:
            self._query = ops.linear(*source.joined("self_attn.q_proj"))
        self._down = ops.linear(*source.joined("self_attn.kv_a_proj_with_mqa"))
        self._down_norm = source.weight("self_attn.kv_a_layernorm")
        self._key = source.weight("self_attn.k_b_proj")  # [H, nope, rank]
        self._value = source.weight("self_attn.v_b_proj")  # [H, value, rank]
        self.output = ops.linear(*source.joined("self_attn.o_proj"))

    def attend(self, layer: int, x: torch.Tensor, attention: LayerAttention) -> torch.Tensor:
        """Return what the heads read, [T, H * value], before the output projection."""
        shape, tokens, eps = self._latent, len(x), self._latent.norm_eps
        if self._query_down is not None:
            down = self._query_down(x)
            x_query, _ = self._ops.norm(down, None, self._query_norm, eps, self._query)
        else:
            x_query = x
        query = self._query(x_query).view(tokens, self._heads, shape.nope + shape.rope)
        nope, rotating = torch.split(query, [shape.nope, shape.rope], -1)
        within = torch.einsum("t h n, h n r -> t h r", nope, self._key)
        latent, key = torch.split(self._down(x), [shape.rank, shape.rope], -1)
        latent, _ = self._ops.norm(latent.contiguous(), None, self._down_norm, eps)
        record = torch.cat([rotating, within], -1).flatten(1), key, latent
        read = attention.attend(layer, torch.cat(record, -1))
        read = read.view(tokens, self._heads, shape.rank)
        return torch.einsum("thr,hvr->thv", read, self._value).flatten(1)
