"""A step's input buffers on a GPU, and the attention that reads them.

The buffers keep their addresses, because CUDA graphs record addresses. `engine.runner.gpu_runner`
fills them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct

from engine.attention.gpu_backend import GpuAttention
from engine.sampling.gpu_sampler import DRAW_COLUMNS
from engine.states.step_runs import RUN_SECTIONS, StepRuns, step_runs

Int32 = npt.NDArray[np.int32]


class StepShape(Struct, frozen=True):
    """What the launches of a step depend on, apart from the values in its buffers.

    `classes`, `merge`, `causal`: see `tree_attention`.
    """

    rows: int
    """Query tokens, padding included."""
    draws: int
    """Logits rows, padding included; 0 if every row samples, so that no rows are picked."""
    classes: tuple[int, ...]
    merge: bool
    causal: bool


class StepInputs:
    """A step's inputs: one pinned host buffer, one GPU buffer, one copy per step.

    Sections of `width` int32 each. Per row: token id (-1: the seat's last token), position, KV slot
    (-1: padding row), length, seat. Per draw: the row that it samples from, and the seat that keeps
    its token. Then the rows' slots in each KV group beside the first, for a model with recurrent
    layers the lists of `engine.states.step_runs`, and the GPU sampler's draw table,
    [draws, DRAW_COLUMNS] int32.

    `pinned`: the host buffer, flat; `host`, `host_draws`: its parts; `host_slots`, `host_runs`:
    parts of `host`, slots beside the first group and the lists. `runs`: the lists on the GPU.
    """

    SECTIONS = ("token_ids", "positions", "slots", "lengths", "seats", "draw_rows", "draw_seats")

    def __init__(
        self, width: int, draws: int, device: torch.device, kv_groups: int,
        beside: StepInputs | None = None, *, has_runs: bool = False,
    ) -> None:  # fmt: skip
        """`beside`: inputs of the same sizes whose host buffer these share."""
        self.width = width
        self.slots = ("slots", *(f"slots {group}" for group in range(1, kv_groups)))
        self._names = (*self.SECTIONS, *self.slots[1:])
        sections = (len(self._names) + RUN_SECTIONS * has_runs) * width
        size = sections + draws * DRAW_COLUMNS
        is_cuda = device.type == "cuda"
        if beside is None:
            self.pinned = torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda)
        else:
            self.pinned = beside.pinned
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self._sections = self.device[:sections].view(-1, width)
        self.draws = self.device[sections:].view(draws, DRAW_COLUMNS)
        self.host = self.pinned.numpy()[:sections].reshape(-1, width)
        self.host_slots = self.host[len(self.SECTIONS) : len(self._names)]
        self.host_runs = self.host[len(self._names) :]
        self.runs = self._sections[len(self._names) :]
        self.host_draws = self.pinned.numpy()[sections:].reshape(draws, DRAW_COLUMNS)
        self._copied = torch.cuda.Event() if is_cuda else None
        self._stream = torch.cuda.current_stream(device) if is_cuda else None

    def wait(self) -> None:
        """Wait until the last copy has read the host buffer."""
        if self._copied is not None:
            self._copied.synchronize()

    def send(self) -> None:
        """Copy the host buffer to the GPU, ordered before later launches on the stream."""
        self.device.copy_(self.pinned, non_blocking=True)
        if self._copied is not None:
            self._copied.record(self._stream)

    def section(self, name: str, rows: int) -> torch.Tensor:
        """Return the first `rows` entries of a section on the GPU, as a view."""
        return self._sections[self._names.index(name), :rows]

    def step_runs(self, shape: StepShape, seats: int) -> StepRuns:
        """Return the runs of a step's rows, of up to so many seats."""
        lists = self.runs if shape.causal else None
        return step_runs(self.section("seats", shape.rows), seats, lists)


class TableEntries:
    """Sends new entries of block tables to a GPU, through a pinned buffer that grows as needed."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._host = self._there = torch.zeros(0, dtype=torch.int32)
        self._copied = torch.cuda.Event() if self._is_cuda else None
        self._stream = torch.cuda.current_stream(device) if self._is_cuda else None

    def send(self, indices: Int32, blocks: Int32) -> tuple[torch.Tensor, torch.Tensor]:
        """Return indices, int64, and block ids, int32, on the GPU, once the copy is done; valid
        until the next call. Waits until the copy before has read the buffer."""
        count = len(indices)
        if self._copied is not None:
            self._copied.synchronize()
        if 3 * count > len(self._host):
            size = 3 << (count - 1).bit_length()
            self._host = torch.zeros(size, dtype=torch.int32, pin_memory=self._is_cuda)
            self._there = torch.zeros(size, dtype=torch.int32, device=self._device)
        host, there = self._host.numpy(), self._there[: 3 * count]
        host[: 2 * count].view(np.int64)[:] = indices
        host[2 * count : 3 * count] = blocks
        there.copy_(self._host[: 3 * count], non_blocking=True)
        if self._copied is not None:
            self._copied.record(self._stream)
        return there[: 2 * count].view(torch.int64), there[2 * count :]


class StepAttention:
    """`engine.attention.interface.LayerAttention` over one step's input buffers."""

    def __init__(self, attention: GpuAttention, inputs: StepInputs, shape: StepShape) -> None:
        self._attention = attention
        self._positions = inputs.section("positions", shape.rows)
        self._slots = tuple(inputs.section(name, shape.rows) for name in inputs.slots)
        self._lengths = inputs.section("lengths", shape.rows)
        self._shape = shape

    def attend(
        self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `engine.attention.interface.LayerAttention`."""
        shape = self._shape
        return self._attention.attend(
            layer, qkv, positions=self._positions, slots=self._slots, lengths=self._lengths,
            classes=shape.classes, merge=shape.merge, causal=shape.causal, sinks=sinks,
        )  # fmt: skip
