"""The decoder: one forward pass for every family of `engine.model_store.families`.

A layer is a mixer (attention or a convolution) and an MLP or experts, with norms where the
architecture places them. The attention backend rotates, writes KV and attends; this file has
everything else. It knows no family, file format or device: an `Architecture` says what a layer
computes, `Ops` how.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.attention.interface import LayerAttention
from engine.model_store import Architecture
from engine.models.attention_block import AttentionBlock
from engine.models.latent_block import LatentBlock
from engine.models.layers import Mlp, Ops, PartLinear, PlainMlp, Rows, TensorSource, mean_norm
from engine.models.moe import Experts
from engine.models.recurrent_blocks import ConvolutionBlock, DeltaBlock, MambaBlock
from engine.states.interface import States
from engine.weights import Weights

Norm = Callable[
    [Rows, torch.Tensor | None, torch.Tensor, float, PartLinear | None],
    tuple[Rows, torch.Tensor],
]


class DecoderModel:
    """`engine.models.interface.Model` for every architecture, on any device by `ops`.

    T tokens, C channels.
    """

    def __init__(
        self, config: Architecture, weights: Weights, ops: Ops,
        states: States | None = None,
    ) -> None:  # fmt: skip
        """Removes the tensors from `weights`: q, k and v are joined into one matrix, gate and up
        into another. `states`: of the architecture's recurrent layers, if it has any."""
        self.config = config
        top = TensorSource(weights, "")
        self.embeddings = top.weight("model.embed_tokens")
        self._norm = _norm_of(config, ops)
        self._embed = ops.embed
        self.layers = [
            DecoderLayer(config, TensorSource(weights, f"model.layers.{i}."), i, ops, states)
            for i in range(len(config.layers))
        ]
        self.norm = top.weight("model.norm")
        self.head = ops.head(weights.pop("lm_head.weight", self.embeddings))

    def forward(
        self,
        token_ids: torch.Tensor,
        attention: LayerAttention,
        output_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `engine.models.interface.Model`.

        With `output_rows`, everything after the last layer's attention is computed only for these
        rows.
        """
        hidden = self._embed(token_ids, self.embeddings)
        if self.config.embed_scale != 1.0:
            hidden = hidden * self.config.embed_scale
        residual: torch.Tensor | None = None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            rows = output_rows if index == last else None
            hidden, residual = layer.forward(hidden, residual, attention, rows)
        normed: torch.Tensor
        normed, _ = self._norm(hidden, residual, self.norm, self.config.norm_eps, None)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `engine.models.interface.Model`; in the weights' dtype."""
        logits, config = self.head(hidden), self.config
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        if config.logit_cap:
            logits = torch.tanh(logits / config.logit_cap) * config.logit_cap
        return logits


def _norm_of(config: Architecture, ops: Ops) -> Norm:
    if config.norm == "rms":
        return ops.norm
    return lambda x, residual, weight, eps, _: mean_norm(ops.total(x), residual, weight, eps)


class DecoderLayer:
    """One decoder layer. Norms that the architecture does not place are None."""

    def __init__(
        self, config: Architecture, source: TensorSource, index: int, ops: Ops,
        states: States | None,
    ) -> None:  # fmt: skip
        layer = config.layers[index]
        self.index = index
        self.is_parallel = config.place == "parallel"
        self.eps = config.norm_eps
        self.residual_scale = config.residual_scale
        self._norm, self._total = _norm_of(config, ops), ops.total
        norms = {name: source.weight(name) for name in config.layer_norms}
        self.attention_norm = norms.get("input_layernorm")
        self.attention_output_norm = norms.get("attention_output_layernorm")
        self.mlp_norm = norms.get("post_attention_layernorm")
        self.mlp_output_norm = norms.get("mlp_output_layernorm")
        self.mixer: AttentionBlock | LatentBlock | ConvolutionBlock | DeltaBlock | MambaBlock | None
        if layer.mixer == "none":
            self.mixer = None
        elif layer.mixer == "gqa":
            self.mixer = AttentionBlock(config, source, ops)
        elif layer.mixer == "mla":
            self.mixer = LatentBlock(config, source, ops)
        else:
            assert states is not None, "the architecture has recurrent layers"
            if layer.mixer == "delta":
                self.mixer = DeltaBlock(config, source, ops, states)
            elif layer.mixer == "mamba":
                self.mixer = MambaBlock(config, source, ops, states)
            else:
                self.mixer = ConvolutionBlock(source, ops, states)
        self.mlp: Mlp | PlainMlp | Experts | None = None
        if layer.ffn == "moe":
            self.mlp = Experts(config, source, ops)
        elif layer.ffn == "dense" and config.activation == "relu2":
            self.mlp = PlainMlp(source, ops, "mlp")
        elif layer.ffn == "dense" and config.activation != "relu2":
            self.mlp = Mlp(source, ops, config.activation, "mlp")

    def forward(
        self, hidden: Rows, residual: torch.Tensor | None,
        attention: LayerAttention, output_rows: torch.Tensor | None = None,
    ) -> tuple[Rows, torch.Tensor]:  # fmt: skip
        """Return (hidden, residual) for the next layer, both [T, C], or `output_rows` of them.

        `hidden` is added to `residual` before each norm.
        """
        if self.mixer is None or self.mlp is None:
            return self._forward_single(hidden, residual, attention, output_rows)
        reader = None if self.is_parallel else self.mixer.reader
        hidden, residual = self._enter(hidden, residual, self.attention_norm, reader)
        attended = self.mixer.attend(self.index, hidden, attention)
        if output_rows is not None:
            attended, residual = attended[output_rows], residual[output_rows]
            hidden = hidden[output_rows] if self.is_parallel else hidden
        mixed = self._leave(self.mixer.output(attended), self.attention_output_norm)
        if self.is_parallel:
            return mixed + self._leave(self.mlp(hidden), None), residual
        hidden, residual = self._enter(mixed, residual, self.mlp_norm, self.mlp.reader)
        return self._leave(self.mlp(hidden), self.mlp_output_norm), residual

    def _forward_single(
        self, hidden: Rows, residual: torch.Tensor | None, attention: LayerAttention,
        output_rows: torch.Tensor | None,
    ) -> tuple[Rows, torch.Tensor]:  # fmt: skip
        """Compute a layer that is a mixer or an MLP alone."""
        if (mixer := self.mixer) is None:
            assert self.mlp is not None, "a layer has a block"
            hidden, residual = self._enter(hidden, residual, self.attention_norm, self.mlp.reader)
            if output_rows is not None:
                hidden, residual = hidden[output_rows], residual[output_rows]
            return self._leave(self.mlp(hidden), None), residual
        hidden, residual = self._enter(hidden, residual, self.attention_norm, mixer.reader)
        attended = mixer.attend(self.index, hidden, attention)
        if output_rows is not None:
            attended, residual = attended[output_rows], residual[output_rows]
        return self._leave(mixer.output(attended), None), residual

    def _enter(
        self, hidden: Rows, residual: torch.Tensor | None, norm: torch.Tensor | None,
        reader: PartLinear | None,
    ) -> tuple[Rows, torch.Tensor]:  # fmt: skip
        """Return a block's input, as its reader takes it, and the residual stream, `hidden`
        added."""
        if norm is not None:
            return self._norm(hidden, residual, norm, self.eps, reader)
        whole = self._total(hidden)
        total = whole if residual is None else residual + whole
        return total, total

    def _leave(self, hidden: Rows, norm: torch.Tensor | None) -> Rows:
        """Return a block's output as it is added to the residual stream."""
        if norm is not None:
            hidden, _ = self._norm(hidden, None, norm, self.eps, None)
        return hidden if self.residual_scale == 1.0 else hidden * self.residual_scale
