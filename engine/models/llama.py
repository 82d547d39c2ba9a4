"""The Llama architecture, read from top to bottom.

Decoder blocks of RMS norm, rotary attention with grouped KV heads (as many as query heads: MHA;
one: MQA), and a gated SiLU MLP. Attention itself, with rotation and the KV write, is the backend's.
After Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.attention.torch_backend import Attend
from engine.model_store import ModelConfig
from engine.models.layers import Ops
from engine.weights import Weights


class LlamaModel:
    """Weights of one model on one device, and the way through them. T tokens, C channels."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        """Takes the tensors out of `weights`: q, k, v and gate, up are joined into one each."""
        self.config = config
        self.ops = ops
        self.embeddings = weights.pop("model.embed_tokens.weight")
        self.layers = [LlamaLayer(config, weights, i, ops) for i in range(config.layers)]
        self.norm = weights.pop("model.norm.weight")
        self.head = ops.linear(weights.pop("lm_head.weight", self.embeddings), None)

    def forward(
        self, token_ids: torch.Tensor, attention: Attend, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states [T, C] after the last norm, of tokens [T] laid out in `attention`.

        With `wanted` (indices [R]): of those rows only, [R, C]. The last block's KV is written for
        all rows; what comes after its attention is computed for the wanted ones alone.
        """
        hidden = F.embedding(token_ids, self.embeddings)
        residual: torch.Tensor | None = None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            rows = wanted if index == last else None
            hidden, residual = layer.forward(index, hidden, residual, attention, rows)
        hidden, _ = self.ops.norm(hidden, residual, self.norm, self.config.norm_eps)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, vocab] fp32."""
        return self.head(hidden).float()


class LlamaLayer:
    """One decoder block."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int, ops: Ops) -> None:
        at = f"model.layers.{index}."

        def joined(*names: str) -> tuple[torch.Tensor, torch.Tensor | None]:
            matrices = [weights.pop(f"{at}{name}.weight") for name in names]
            biases = [weights.pop(f"{at}{name}.bias", None) for name in names]
            bias = (
                torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None
            )
            return torch.cat(matrices) if len(matrices) > 1 else matrices[0], bias

        self.eps = config.norm_eps
        self.ops = ops
        self.attention_norm = weights.pop(f"{at}input_layernorm.weight")
        self.qkv = ops.linear(*joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
        self.output = ops.linear(*joined("self_attn.o_proj"))
        self.mlp_norm = weights.pop(f"{at}post_attention_layernorm.weight")
        self.gate_up = ops.linear(*joined("mlp.gate_proj", "mlp.up_proj"))
        self.down = ops.linear(*joined("mlp.down_proj"))

    def forward(
        self, index: int, hidden: torch.Tensor, residual: torch.Tensor | None, attention: Attend,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """`hidden` [T, C] is added to `residual` before each norm; both go on to the next block,
        or `wanted` rows of them."""
        hidden, residual = self.ops.norm(hidden, residual, self.attention_norm, self.eps)
        attended = attention.attend(index, self.qkv(hidden))
        if wanted is not None:
            attended, residual = attended[wanted], residual[wanted]
        hidden = self.output(attended)
        hidden, residual = self.ops.norm(hidden, residual, self.mlp_norm, self.eps)
        return self.down(self.ops.silu_mul(self.gate_up(hidden))), residual
