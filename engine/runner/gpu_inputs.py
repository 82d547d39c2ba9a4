"""A step's numbers on their way to a GPU, and attention bound to them.

Buffers stay where they are, since CUDA graphs remember addresses. The device runner fills them.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.gpu_backend import GpuAttention


class StepInputs:
    """A step's numbers: one pinned host buffer, one device buffer, one copy.

    Sections of `width` int32 each: token ids (-1: the seat's last token), positions, slots (-1: no
    row), lengths, seats. Then five of sampling parameters as fp32 bits.
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
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        """Until the last copy has left the host's buffer."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self) -> None:
        """To the device, in order with everything launched after."""
        self.device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def section(self, name: str, rows: int) -> torch.Tensor:
        return self.device[self.SECTIONS.index(name), :rows]


class StepAttention:
    """`engine.attention.torch_backend.Attend` with one step's buffers bound to it."""

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
        """See `engine.attention.torch_backend`."""
        return self._attention.attend(
            layer, qkv, positions=self._positions, slots=self._slots, lengths=self._lengths,
            classes=self._classes, merge=self._merge, causal=self._causal,
        )  # fmt: skip
