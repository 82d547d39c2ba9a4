"""One GPU's share of a runner: a model, its KV, block tables, last tokens, graphs and buffers.

A runner has one lane for each GPU of its engine, most often one. It plans a step once and launches
it on every lane. All lanes have the same logits, so that each draws the same tokens.
`engine.runner.gpu_runner` owns lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.gpu_backend import GpuAttention
from engine.attention.interface import LayerAttention
from engine.kv.storage import KvStorage
from engine.models.interface import Model
from engine.runner.cuda_graphs import CudaGraphs
from engine.runner.gpu_inputs import StepAttention, StepInputs, StepShape, TableEntries
from engine.sampling.gpu_sampler import GpuSampler
from engine.states.gpu_states import GpuStates


class Lane:
    """`number`: which of its runner's lanes, and of its sampler's memories. `states`: of its
    model's recurrent layers."""

    def __init__(
        self, number: int, model: Model[LayerAttention], kv: KvStorage, inputs: StepInputs,
        sampler: GpuSampler, attention: GpuAttention, seats: int, states: GpuStates | None = None,
    ) -> None:  # fmt: skip
        self.number = number
        self.states, self._seats = states, seats
        self.model, self.kv = model, kv
        self.inputs, self.attention = inputs, attention
        self._sampler = sampler
        device = kv.data.device
        # One entry more than seats: padding rows of a batch write their token there.
        self.last_tokens = torch.zeros(seats + 1, dtype=torch.int32, device=device)
        self.sampled = torch.zeros(inputs.width, dtype=torch.int32, device=device)
        self.graphs, self.entries = CudaGraphs(), TableEntries(device)

    def forward(self, shape: StepShape, output_rows: torch.Tensor | None) -> torch.Tensor:
        """Return the hidden states of a step's rows, or of `output_rows` of them."""
        given = self.inputs.section("token_ids", shape.rows)
        last = self.last_tokens[self.inputs.section("seats", shape.rows)]
        token_ids = torch.where(given >= 0, given, last.clamp(min=0))
        attention = StepAttention(self.attention, self.inputs, shape)
        if self.states is not None:
            self.states.enter(self.inputs.step_runs(shape, self._seats))
        return self.model.forward(token_ids, attention, output_rows)

    def compute(self, shape: StepShape) -> torch.Tensor:
        """Compute a step and sample; return the logits of the draws."""
        draws, seats, picked = shape.rows, "seats", None
        if shape.draws:
            draws, seats = shape.draws, "draw_seats"
            picked = self.inputs.section("draw_rows", draws)
        logits = self.model.logits(self.forward(shape, picked))
        self.draw(logits, draws, seats)
        return logits

    def draw(self, logits: torch.Tensor, draws: int, seats: str = "draw_seats") -> None:
        """Sample the first `draws` draws, and keep their tokens for the seats of this section."""
        out = self.sampled[:draws]
        self._sampler.draw(logits, self.inputs.draws[:draws], out, lane=self.number)
        self.last_tokens[self.inputs.section(seats, draws)] = out

    def hide_inputs(self, padding_seat: int) -> torch.Tensor:
        """Have a launch of any shape write no KV and no live seat's token, and draw none. Return
        the inputs, for `inputs.device` afterwards."""
        kept = self.inputs.device.clone()
        width = self.inputs.width
        for name in self.inputs.slots:
            self.inputs.section(name, width).fill_(-1)
        for name in ("seats", "draw_seats"):
            self.inputs.section(name, width).fill_(padding_seat)
        self.inputs.draws.zero_()
        self.inputs.runs.zero_()
        return kept

    def indices(self, values: Sequence[int]) -> torch.Tensor:
        """Return indices on the device, without a wait."""
        tensor = torch.tensor(values, dtype=torch.int64)
        device = self.kv.data.device
        if device.type == "cuda":
            tensor = tensor.pin_memory().to(device, non_blocking=True)
        return tensor
