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
from engine.kv.format import KvFormat
from engine.model_store import Architecture
from engine.plan import StepPlan


class AttentionSpec(Struct, frozen=True):
    """Shape of a model's attention: `heads` query heads over `kv_heads` KV heads (H and K) of
    `head_dim` channels (D). MHA, GQA or MQA by `kv_heads`."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """Factor of the scores before the softmax."""
    cap: float = 0.0
    """See `Architecture.score_cap`."""
    latent: int = 0
    """0, or the channels at the end of a key that are the value too (V): keys and values are one
    record."""

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def value_dim(self) -> int:
        """Channels of a value, V: those of a key, or of a latent."""
        return self.latent or self.head_dim

    @property
    def query_width(self) -> int:
        """Columns of the queries, H * D."""
        return self.heads * self.head_dim

    @property
    def output_width(self) -> int:
        """Columns of the output, H * V."""
        return self.heads * self.value_dim

    @property
    def qkv_width(self) -> int:
        """Columns of queries, keys and values side by side, (H + 2K) * D; with latents without the
        values, (H + K) * D."""
        return (self.heads + (1 if self.latent else 2) * self.kv_heads) * self.head_dim


def attention_spec(config: Architecture) -> AttentionSpec:
    """Return the attention shape of a model; all layers have the same."""
    return AttentionSpec(
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        scale=config.score_scale or config.head_dim**-0.5,
        cap=config.score_cap,
        latent=config.latent.rank if config.latent is not None else 0,
    )


def lacks_attention_windows(config: Architecture, form: KvFormat) -> str:
    """Return why no backend computes attention windows for a model, or "" if they do.

    Layers with sliding windows of their own keep these, in KV groups of their own. Where they share
    group 0's blocks, blocks that they read may have been released. So may those that a sequence
    reads again to bring recurrent states up to its prefix.
    """
    if config.recurrent_layers:
        return "recurrent layers run up over tokens whose blocks a window may have released"
    pairs = zip(config.layers, form.group_of_layer, strict=True)
    if any(layer.window and group == 0 for layer, group in pairs):
        return "layers with sliding windows share the blocks of layers without"
    return ""


class LayerAttention(Protocol):
    """Attention as a model's layer calls it, laid out for one step."""

    def attend(
        self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rotate, write the layer's KV of the step's tokens, and attend.

        qkv [T, (H + 2K) * D] → [T, H * V]; of latents [T, (H + K) * D]. `sinks` [H]: a logit of
        each head that takes part in the softmax and has no value.
        """


class AttentionBackend(Protocol):
    """A backend that takes a step as a plan and its batch."""

    def begin(self, plan: StepPlan, batch: Batch) -> None:
        """Lay out a step. O(rows and their blocks)."""
