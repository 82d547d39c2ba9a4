"""What a model's recurrent layers need of the states of a step's sequences.

`engine.states.sequence_states` implements it in torch, `engine.states.gpu_states` by kernels.
T tokens of the step; H heads.
"""

from __future__ import annotations

from typing import Protocol

import torch


class States(Protocol):
    """The recurrent states of a step's sequences, laid out for that step."""

    def convolve(
        self, layer: int, x: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None,
        *, silu: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Return a layer's convolution of the step's inputs x [T, C], with SiLU behind it if asked;
        keeps the last of each row.

        `taps` [C, W], the last of which is the input's own; `bias` [C]. Sums are fp32 at least.
        """

    def delta(
        self, layer: int, mixed: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor,
        rate: torch.Tensor, dt_bias: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return what the step's tokens read by the gated delta rule, [T, H, V]; updates the states
        of the rows. Inputs as `kernels.reference_delta.delta_inputs` takes them.
        """

    def mamba(
        self, layer: int, mixed: torch.Tensor, step: torch.Tensor, rate: torch.Tensor,
        dt_bias: torch.Tensor, through: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return what the step's tokens read by the rule of Mamba-2, and their inputs times
        `through` [H], [T, H, P]; updates the states of the rows. Inputs as
        `kernels.reference_mamba2.mamba2_inputs` takes them.
        """
