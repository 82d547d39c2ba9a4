"""A model over whole sequences in plain torch, of which each token sees what a window allows it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.api import AttentionWindow
from engine.attention.interface import attention_spec
from engine.attention.rope import rope_tables
from engine.model_store import Architecture
from engine.models.decoder import DecoderModel
from engine.models.layers import TorchOps
from engine.weights import Tensors
from kernels.reference import rotate


class MaskedAttention:
    """`LayerAttention` over the tokens of one sequence at once, whose keys are hidden by a mask."""

    def __init__(
        self, config: Architecture, tokens: int, asked: AttentionWindow | None, block_size: int
    ) -> None:
        self.config, self.spec = config, attention_spec(config)
        self._tables = rope_tables(config, tokens)
        at = torch.arange(tokens)
        self._behind = at[:, None] - at[None, :]
        self._hidden = self._behind < 0
        if asked is not None:
            before = at // block_size * block_size - asked.tokens
            is_between = (at[None, :] >= asked.sink_tokens) & (at[None, :] < before[:, None])
            self._hidden |= is_between

    def attend(
        self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `engine.attention.interface.LayerAttention`; without `sinks`."""
        assert sinks is None, "models with attention sinks are not read here"
        spec, tokens = self.spec, qkv.shape[0]
        cos, sin = self._tables[self.config.layers[layer].rope]
        parts = qkv.view(tokens, -1, spec.head_dim)
        q = rotate(parts[:, : spec.heads], cos[:tokens], sin[:tokens])
        k = rotate(parts[:, spec.heads : spec.heads + spec.kv_heads], cos[:tokens], sin[:tokens])
        v = parts[:, spec.heads + spec.kv_heads :]
        k, v = (x.repeat_interleave(spec.group_size, 1).transpose(0, 1) for x in (k, v))
        scores = q.transpose(0, 1) @ k.mT * spec.scale
        hidden, window = self._hidden, self.config.layers[layer].window
        if window:  # the layer's own, not the request's
            hidden = (self._behind < 0) | (self._behind >= window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights @ v).transpose(0, 1).reshape(tokens, spec.output_width)


def masked_logprobs(
    config: Architecture,
    weights: Tensors,
    tokens: Sequence[int],
    asked: AttentionWindow | None,
    block_size: int,
) -> torch.Tensor:
    """Return the logprobs [tokens, vocab] of the token behind each position, fp32 on the CPU."""
    named = {name: tensor.cpu().float() for name, tensor in weights.items()}
    model = DecoderModel(config, named, TorchOps())
    with torch.inference_mode():
        attention = MaskedAttention(config, len(tokens), asked, block_size)
        logits = model.logits(model.forward(torch.tensor(list(tokens)), attention))
    return logits.float().log_softmax(-1)
