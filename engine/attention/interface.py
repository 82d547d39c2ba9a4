"""The attention interface: what models and runners need of an attention backend.

A step goes through a backend in two parts. The runner lays the step out once
(`AttentionBackend.begin`, or `GpuAttention.prepare` with its own arguments); then each layer of the
model calls `LayerAttention.attend`. The C backend has no second part: the C kernels run all layers
in one call over what `begin` laid out.
"""

from __future__ import annotations

from typing import Protocol

import torch
from msgspec import Struct

from engine.attention.batch import Batch
from engine.model_store import ModelConfig
from engine.plan import StepPlan


class AttentionSpec(Struct, frozen=True):
    """Shape of a model's attention: `heads` query heads over `kv_heads` KV heads (H and K) of
    `head_dim` channels (D). MHA, GQA or MQA by `kv_heads`."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        """Factor of the scores before the softmax."""
        return float(self.head_dim**-0.5)

    @property
    def query_width(self) -> int:
        """Columns of the queries, H * D; of the output too."""
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Columns of queries, keys and values side by side, (H + 2K) * D."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def attention_spec(config: ModelConfig) -> AttentionSpec:
    """Return the attention shape of a model; all layers have the same."""
    return AttentionSpec(config.heads, config.kv_heads, config.head_dim)


class LayerAttention(Protocol):
    """Attention as a model's layer calls it, laid out for one step."""

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Rotate, write the layer's KV of the step's tokens, and attend.

        qkv [T, (H + 2K) * D] → [T, H * D].
        """


class AttentionBackend(Protocol):
    """A backend that takes a step as a plan and its batch."""

    def begin(self, plan: StepPlan, batch: Batch) -> None:
        """Lay out a step. O(rows and their blocks)."""
