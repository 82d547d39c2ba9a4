"""The layout of a sequence's recurrent states: bytes of all layers, one after another.

A layer has the last inputs of its short convolution, in the model's dtype, and with the delta rule
or Mamba-2 a matrix in fp32 for each head. Everything begins at a multiple of 64 bytes.
"""

from __future__ import annotations

import math

import torch

from engine.model_store import Architecture

ALIGNMENT = 64


class StateLayout:
    """Where the states of each recurrent layer lie in `bytes` bytes."""

    def __init__(self, config: Architecture, dtype: torch.dtype) -> None:
        self._dtype = dtype
        rule = config.rule
        self._inputs_shape = (config.conv_width - 1, config.convolved)
        self._matrices_shape = (0, 0, 0) if rule is None else rule.state
        self._matrices_dtype = torch.promote_types(dtype, torch.float32)
        self._starts: dict[int, tuple[int, int]] = {}
        self.bytes = 0
        """Of one sequence, all layers."""
        for layer in config.recurrent_layers:
            inputs = self._take(math.prod(self._inputs_shape) * dtype.itemsize)
            self._starts[layer] = (
                inputs, self._take(math.prod(self._matrices_shape) * self._matrices_dtype.itemsize)
            )  # fmt: skip

    def starts(self, layer: int) -> tuple[int, int]:
        """Return where a layer's inputs and its matrices begin, in bytes."""
        return self._starts[layer]

    def inputs(self, data: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the last inputs of a layer [N, W - 1, C], a view of N sequences' bytes [N, B]."""
        return _view(data, self._starts[layer][0], self._dtype, self._inputs_shape)

    def matrices(self, data: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the matrices of a layer [N, H, K, V], or with Mamba-2 [N, H, P, S] of S states to
        a channel, a view of N sequences' bytes [N, B]."""
        return _view(data, self._starts[layer][1], self._matrices_dtype, self._matrices_shape)

    def _take(self, count: int) -> int:
        start = self.bytes
        self.bytes += -(-count // ALIGNMENT) * ALIGNMENT
        return start


def _view(
    data: torch.Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    return data[:, start : start + size].view(dtype).view(len(data), *shape)
