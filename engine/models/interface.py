"""The model protocol: what runners need of a model of any architecture.

`engine.models.decoder` and `engine.models.cpu_decoder` implement it.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

from engine.model_store import Architecture

AttentionT = TypeVar("AttentionT", contravariant=True)


class Model(Protocol[AttentionT]):
    """Weights of one model on one device. T tokens, C channels.

    `AttentionT` is the attention backend that the model goes with: `LayerAttention` for models
    that run layer by layer in torch, `CpuAttention` for models that run a whole step in C.
    """

    @property
    def config(self) -> Architecture:
        """The model's shape."""

    def forward(
        self,
        token_ids: torch.Tensor,
        attention: AttentionT,
        output_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states [T, C] after the last norm; writes the KV of all T tokens.

        token_ids [T], laid out in `attention`, which the caller has prepared for this step. With
        `output_rows` (indices [R]): the hidden states of only these rows, [R, C]. The result may be
        scratch memory that the next call overwrites.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, vocab] of hidden states [T, C], in fp32 or the weights' dtype."""
