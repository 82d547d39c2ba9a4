"""The model protocol: what runners need of a model, whatever its architecture.

An architecture is a class that satisfies `Model`; `engine.models.registry` maps architecture names
to constructors. Runners, builders and warm-up name this protocol and never a model class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from engine.attention.interface import LayerAttention
from engine.model_store import ModelConfig
from engine.models.layers import Ops
from engine.weights import Weights

AttentionT = TypeVar("AttentionT", contravariant=True)


class Model(Protocol[AttentionT]):
    """Weights of one model on one device. T tokens, C channels.

    `AttentionT` is the attention backend that the model goes with: `LayerAttention` for models
    that run layer by layer in torch, `CpuAttention` for models that run a whole step in C.
    """

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""

    def forward(
        self,
        token_ids: torch.Tensor,
        attention: AttentionT,
        output_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states [T, C] after the last norm; writes the KV of all T tokens.

        token_ids [T], laid out in `attention`, which the caller has prepared for this step. With
        `output_rows` (indices [R]): the hidden states of these rows alone, [R, C]. The result may
        be scratch memory that the next call overwrites.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, vocab] of hidden states [T, C], in fp32 or the weights' dtype."""


ModelConstructor = Callable[[ModelConfig, Weights, Ops], Model[LayerAttention]]
"""Builds a model from its config, its weights and a device's layers. Removes the tensors that it
uses from the weights. Raises KeyError for a missing tensor."""
