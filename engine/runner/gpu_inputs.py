"""A step's input buffers on a GPU, and the attention that reads them.

The buffers keep their addresses, because CUDA graphs record addresses. `engine.runner.gpu_runner`
fills them.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.gpu_backend import GpuAttention


class StepInputs:
    """A step's inputs: one pinned host buffer, one GPU buffer, one copy per step.

    Sections of `width` int32 each: token ids (-1: the seat's last token), positions, KV slots (-1:
    padding row), lengths, seats. Then five sections of sampling parameters, as fp32 bits.
    """

    SECTIONS = ("token_ids", "positions", "slots", "lengths", "seats")

    def __init__(self, width: int, device: torch.device) -> None:
        self.width = width
        shape = (len(self.SECTIONS) + 5, width)
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.device = torch.zeros(shape, dtype=torch.int32, device=device)
        self.host = self._host.numpy()
        self.parameters = self.device[len(self.SECTIONS) :].view(torch.float32)
        self.host_parameters = self.host[len(self.SECTIONS) :].view(np.float32)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        """Wait until the last copy has read the host buffer."""
        if self._copied is not None:
            self._copied.synchronize()

    def send(self) -> None:
        """Copy the host buffer to the GPU, ordered before later launches on the stream."""
        self.device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def section(self, name: str, rows: int) -> torch.Tensor:
        """Return the first `rows` entries of a section on the GPU, as a view."""
        return self.device[self.SECTIONS.index(name), :rows]


class StepAttention:
    """`engine.attention.interface.LayerAttention` over one step's input buffers."""

    def __init__(
        self, attention: GpuAttention, inputs: StepInputs, rows: int,
        classes: tuple[int, ...], merge: bool, causal: bool,
    ) -> None:  # fmt: skip
        self._attention = attention
        self._positions = inputs.section("positions", rows)
        self._slots = inputs.section("slots", rows)
        self._lengths = inputs.section("lengths", rows)
        self._classes, self._merge, self._causal = classes, merge, causal

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """See `engine.attention.interface.LayerAttention`."""
        return self._attention.attend(
            layer, qkv, positions=self._positions, slots=self._slots, lengths=self._lengths,
            classes=self._classes, merge=self._merge, causal=self._causal,
        )  # fmt: skip
