"""The Llama architecture: decoder blocks of RMS norm, rotary attention and a gated SiLU MLP.

Attention has grouped KV heads (as many as query heads: MHA; one: MQA). The attention backend
rotates, writes KV and attends; this file has everything else. After Touvron et al., "LLaMA: Open
and Efficient Foundation Language Models" (2023).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.attention.interface import LayerAttention
from engine.model_store import ModelConfig
from engine.models.layers import Ops
from engine.weights import Weights


class LlamaModel:
    """`engine.models.interface.Model` for Llama and Mistral, on any device by `ops`.

    T tokens, C channels.
    """

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        """Removes the tensors from `weights`: q, k and v are joined into one matrix, gate and up
        into another."""
        self.config = config
        self.ops = ops
        self.embeddings = weights.pop("model.embed_tokens.weight")
        self.layers = [LlamaLayer(config, weights, i, ops) for i in range(config.layers)]
        self.norm = weights.pop("model.norm.weight")
        self.head = ops.linear(weights.pop("lm_head.weight", self.embeddings), None)

    def forward(
        self,
        token_ids: torch.Tensor,
        attention: LayerAttention,
        output_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `engine.models.interface.Model`.

        With `output_rows`, everything after the last block's attention is computed for these rows
        alone.
        """
        hidden = F.embedding(token_ids, self.embeddings)
        residual: torch.Tensor | None = None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            rows = output_rows if index == last else None
            hidden, residual = layer.forward(index, hidden, residual, attention, rows)
        hidden, _ = self.ops.norm(hidden, residual, self.norm, self.config.norm_eps)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `engine.models.interface.Model`; in the weights' dtype."""
        return self.head(hidden)


class LlamaLayer:
    """One decoder block."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int, ops: Ops) -> None:
        prefix = f"model.layers.{index}."

        def joined(*names: str) -> tuple[torch.Tensor, torch.Tensor | None]:
            matrices = [weights.pop(f"{prefix}{name}.weight") for name in names]
            biases = [weights.pop(f"{prefix}{name}.bias", None) for name in names]
            bias = (
                torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None
            )
            return torch.cat(matrices) if len(matrices) > 1 else matrices[0], bias

        self.eps = config.norm_eps
        self.ops = ops
        self.attention_norm = weights.pop(f"{prefix}input_layernorm.weight")
        self.qkv = ops.linear(*joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
        self.output = ops.linear(*joined("self_attn.o_proj"))
        self.mlp_norm = weights.pop(f"{prefix}post_attention_layernorm.weight")
        self.gate_up = ops.linear(*joined("mlp.gate_proj", "mlp.up_proj"))
        self.down = ops.linear(*joined("mlp.down_proj"))

    def forward(
        self, index: int, hidden: torch.Tensor, residual: torch.Tensor | None,
        attention: LayerAttention, output_rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return (hidden, residual) for the next block, both [T, C], or `output_rows` of them.

        `hidden` is added to `residual` before each norm.
        """
        hidden, residual = self.ops.norm(hidden, residual, self.attention_norm, self.eps)
        attended = attention.attend(index, self.qkv(hidden))
        if output_rows is not None:
            attended, residual = attended[output_rows], residual[output_rows]
        hidden = self.output(attended)
        hidden, residual = self.ops.norm(hidden, residual, self.mlp_norm, self.eps)
        return self.down(self.ops.silu_mul(self.gate_up(hidden))), residual
