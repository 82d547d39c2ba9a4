"""The GPU runner: executes step plans as CUDA graphs over state that stays on the GPU.

Each live sequence has a *seat*: a row of the block tables on the GPU and an entry for its last
token. A step copies lengths, positions and KV slots from one pinned buffer, replays the graph of
its batch bucket when every row decodes, or launches eagerly when the batch has prompts, samples,
and copies the tokens back without waiting. `collect` waits for that copy alone, so that the host
plans step N+1 while the GPU runs step N.

The runner also works on the CPU, in Triton's interpreter and without graphs: tests use that.
`engine.runner.gpu_build` builds it; core calls `launch` and `collect`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.api import SampledToken
from engine.attention.gpu_backend import GpuAttention
from engine.attention.interface import LayerAttention
from engine.kv.storage import KvStorage
from engine.models.interface import Model
from engine.plan import Row, Sampled, StepPlan, StepResult
from engine.runner.cuda_graphs import CudaGraphs, GraphKey
from engine.runner.gpu_inputs import StepAttention, StepInputs
from engine.runner.warmup import WarmupLimits, warmup_plans
from engine.sampling.gpu_sampler import GpuSampler

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Batch sizes that graphs are captured for; a batch is padded to the next one."""

CAPTURED_KINDS = (((2,), False), ((2,), True), ((0, 2), True), ((1, 2), True), ((2, 1), True))
"""Tile classes in launch order, and whether parts are merged: the kinds of graphs that decoding
needs.

Without shared prefixes: rows of one part, rows of several. With shared prefixes: each launch order.
"""

SPARE_SEATS = 32
"""Seats beyond `sequences_max`, for sequences that begin in the step in which others end."""

TOKEN_BUFFERS = 3
"""Pinned host buffers for sampled tokens: steps whose tokens may be in flight to the host."""


@dataclass(slots=True)
class _LaunchedStep:
    """A launched step: the sequences that sample, and the host buffer for their tokens."""

    step: int
    started_s: float
    drawing: list[int]
    host_tokens: torch.Tensor | None = None
    copied: torch.cuda.Event | None = None
    source_rows: list[int] = field(default_factory=list)
    tokens: list[SampledToken] | None = None
    prompt_logprobs: dict[int, tuple[SampledToken, ...]] = field(default_factory=dict)


class GpuRunner:
    """`engine.plan.Runner` on one GPU.

    `context`: tokens of the longest sequence. `seats`: sequences live at once. `tokens_max`: tokens
    of a step. `chunk_keys`: see `WorkPlanner`.
    """

    def __init__(
        self, model: Model[LayerAttention], kv: KvStorage, *, context: int, seats: int,
        tokens_max: int, chunk_keys: int = 0,
    ) -> None:  # fmt: skip
        self.model = model
        self.kv = kv
        device = kv.data.device
        self._is_cuda = device.type == "cuda"
        self.block_size = kv.format.block_size
        width = max(tokens_max, seats)
        self.attention = GpuAttention(
            model.config, kv, context=context, seats=seats, tokens_max=width, chunk_keys=chunk_keys
        )
        self.sampler = GpuSampler(model.config.vocab, device)
        self.inputs = StepInputs(width, device)
        # One entry more than seats: padding rows of a batch write their token there.
        self.last_tokens = torch.zeros(seats + 1, dtype=torch.int32, device=device)
        self._padding_seat = seats
        self._sampled = torch.zeros(width, dtype=torch.int32, device=device)
        self._token_buffers = [
            torch.zeros(width, dtype=torch.int32, pin_memory=self._is_cuda)
            for _ in range(TOKEN_BUFFERS)
        ]
        self._seats: dict[int, int] = {}
        self._free_seats = list(range(seats - 1, -1, -1))
        self._tables: dict[int, tuple[int, int]] = {}
        self._graphs = CudaGraphs()
        self._in_flight: deque[_LaunchedStep] = deque()
        self._buffer_index = 0

    # -- Runner -------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> None:
        """Launch the step. Waits for the GPU only if a row needs the full sampler."""
        with torch.inference_mode():
            self._in_flight.append(self._launch(plan))

    def collect(self) -> StepResult:
        """Wait for the oldest launched step's tokens and return its result."""
        launched = self._in_flight.popleft()
        tokens = launched.tokens
        if tokens is None:
            assert launched.host_tokens is not None
            if launched.copied is not None:
                launched.copied.synchronize()
            drawn = launched.host_tokens[: len(launched.drawing)].tolist()
            tokens = [SampledToken(token_id) for token_id in drawn]
        pairs = list(zip(launched.drawing, tokens, strict=True))
        return StepResult(
            step=launched.step,
            sampled=tuple(Sampled(s, (token,)) for s, token in pairs if token.token_id >= 0),
            prompt_logprobs=launched.prompt_logprobs,
            failed={s: "nan_logits" for s, token in pairs if token.token_id < 0},
            elapsed_s=time.perf_counter() - launched.started_s,
        )

    def warm_up(self, limits: WarmupLimits) -> None:
        """Capture the graphs that decoding needs, and run the warm-up plans.

        Call it while no block and no seat is in use. Blocks, seats and last tokens are restored.
        """
        buckets = [b for b in BUCKETS if self._is_cuda and b < 2 * limits.sequences]
        for key in [(bucket, *kind) for bucket in buckets for kind in CAPTURED_KINDS]:
            self._capture(key)
        for plan in warmup_plans(limits):
            self.launch(plan)
            self.collect()
            ended = tuple(begun.sequence_id for begun in plan.begun)
            self._update_seats(StepPlan(plan.step, (), ended=ended[::-1]))
        self.kv.data[[0, -1]] = 0
        self.last_tokens.zero_()

    # -- a step -------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan) -> _LaunchedStep:
        started_s = time.perf_counter()
        self._update_seats(plan)
        self.kv.copy(plan.copies)
        rows = plan.rows
        self._update_tables(rows)
        counts = np.fromiter((row.count for row in rows), np.int32, len(rows))
        starts = np.fromiter((row.start for row in rows), np.int32, len(rows))
        seats = np.fromiter((self._seats[row.sequence_id] for row in rows), np.int32, len(rows))
        members = tuple(row.sequence_id for row in rows)
        drawing = [s for row in rows for s in row.samples]
        work = self.attention.prepare(members, counts, starts, seats, plan.groups)
        classes, merge = work.classes, work.parts_max > 1
        is_decoding = bool((counts == 1).all()) and drawing == list(members)
        total = int(counts.sum())
        bucket = _bucket(total) if is_decoding else 0
        self._fill_inputs(rows, counts, starts, seats, bucket or total)
        is_plain = not plan.masks and self.sampler.is_plain(drawing)
        is_plain = is_plain and all(row.prompt_logprobs is None for row in rows)
        if is_plain and drawing:
            self.inputs.host_parameters[:, : len(drawing)] = self.sampler.parameters(drawing)
        self.inputs.send()
        if bucket:
            logits = self._run_decode(bucket, classes, merge)
        else:
            logits = self._run_eagerly(rows, counts, classes, merge)
        launched = _LaunchedStep(plan.step, started_s, drawing)
        if not is_decoding:
            last = np.cumsum([bool(row.samples) for row in rows]) - 1
            launched.source_rows = [int(last[i]) for i, row in enumerate(rows) for _ in row.samples]
        if not is_plain:
            self._sample_fully(launched, plan, logits)
            return launched
        if not bucket:
            self._sample(launched, logits)
        self._start_token_copy(launched)
        return launched

    def _update_seats(self, plan: StepPlan) -> None:
        for sequence_id in plan.ended:
            self._free_seats.append(self._seats.pop(sequence_id))
            self._tables.pop(sequence_id, None)
            self.sampler.end(sequence_id)
        for begun in plan.begun:
            self._seats[begun.sequence_id] = self._free_seats.pop()
            self.sampler.begin(begun)

    def _update_tables(self, rows: Sequence[Row]) -> None:
        """Copy new block table entries to the GPU: a whole table when its version changed, else the
        appended entries."""
        indices: list[int] = []
        blocks: list[int] = []
        for row in rows:
            known, version = self._tables.get(row.sequence_id, (0, -1))
            if version != row.table_version:
                known = 0
            count = len(row.block_ids)
            if known < count:
                base = self._seats[row.sequence_id] * self.attention.stride
                indices.extend(range(base + known, base + count))
                blocks.extend(row.block_ids[known:count])
                self._tables[row.sequence_id] = (count, row.table_version)
        if indices:
            both = torch.tensor([indices, blocks], dtype=torch.int32)
            if self._is_cuda:
                both = both.pin_memory().to(self.kv.data.device, non_blocking=True)
            self.attention.update_tables(both[0].long(), both[1])

    def _fill_inputs(
        self, rows: Sequence[Row], counts: np.ndarray, starts: np.ndarray, seats: np.ndarray,
        width: int,
    ) -> None:  # fmt: skip
        """Lay out the step in the pinned buffer; padding rows up to `width` write no KV."""
        self.inputs.wait()
        token_ids, positions, slots, lengths, seat_of = self.inputs.host[:5]
        total = int(counts.sum())
        first = np.cumsum(counts) - counts
        within = np.arange(total, dtype=np.int32) - np.repeat(first, counts)
        at = np.repeat(starts, counts) + within
        positions[:total] = at
        lengths[:total] = at + 1
        seat_of[:total] = np.repeat(seats, counts)
        size, place = self.block_size, 0
        for row in rows:
            end = place + row.count
            token_ids[place:end] = -1 if row.token_ids is None else row.token_ids
            if row.count == 1:
                slots[place] = row.block_ids[row.start // size] * size + row.start % size
            else:
                from_block = row.start // size
                table = np.asarray(row.block_ids[from_block:], np.int32)
                here = at[place:end]
                slots[place:end] = table[here // size - from_block] * size + here % size
            place = end
        for section, value in ((token_ids, 0), (positions, 0), (slots, -1), (lengths, 1)):
            section[total:width] = value
        seat_of[total:width] = self._padding_seat

    # -- the model ----------------------------------------------------------------------------

    def _forward(
        self, rows: int, classes: tuple[int, ...], merge: bool, causal: bool,
        output_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        given = self.inputs.section("token_ids", rows)
        last = self.last_tokens[self.inputs.section("seats", rows)]
        token_ids = torch.where(given >= 0, given, last.clamp(min=0))
        attention = StepAttention(self.attention, self.inputs, rows, classes, merge, causal)
        return self.model.forward(token_ids, attention, output_rows)

    def _run_eagerly(
        self, rows: Sequence[Row], counts: np.ndarray, classes: tuple[int, ...], merge: bool
    ) -> torch.Tensor:
        """Launch without a graph; return the logits of the rows that need them."""
        output_rows: list[int] = []
        end = 0
        for row in rows:
            end += row.count
            if row.prompt_logprobs is not None:
                output_rows.extend(range(end - row.count, end))
            elif row.samples:
                output_rows.append(end - 1)
        causal = bool((counts > 1).any())
        hidden = self._forward(end, classes, merge, causal, self._indices(output_rows))
        return self.model.logits(hidden)

    def _run_decode(self, bucket: int, classes: tuple[int, ...], merge: bool) -> torch.Tensor:
        """Decode and sample by the bucket's graph, captured on first use; return the logits."""
        key = (bucket, classes, merge)
        if not self._is_cuda:
            return self._decode_and_sample(key)
        if key not in self._graphs:
            self._capture(key)
        return self._graphs.replay(key)

    def _decode_and_sample(self, key: GraphKey) -> torch.Tensor:
        bucket, classes, merge = key
        logits = self.model.logits(self._forward(bucket, classes, merge, causal=False))
        out = self._sampled[:bucket]
        self.sampler.draw(logits, self.inputs.parameters[:, :bucket], out)
        self.last_tokens[self.inputs.section("seats", bucket)] = out
        return logits

    def _capture(self, key: GraphKey) -> None:
        bucket = key[0]
        torch.cuda.synchronize()
        kept = self.inputs.device.clone()
        self.inputs.section("slots", bucket).fill_(-1)  # a capture writes no KV
        self.inputs.section("seats", bucket).fill_(self._padding_seat)  # and no live seat's token
        self._graphs.capture(key, lambda: self._decode_and_sample(key))
        self.inputs.device.copy_(kept)

    # -- tokens -------------------------------------------------------------------------------

    def _sample(self, launched: _LaunchedStep, logits: torch.Tensor) -> None:
        """Sample by the kernel; the tokens stay on the GPU for the next step."""
        count = len(launched.drawing)
        if not count:
            return
        if len(logits) != count:
            logits = logits[self._indices(launched.source_rows)]
        out = self._sampled[:count]
        self.sampler.draw(logits, self.inputs.parameters[:, :count], out)
        self.last_tokens[self._indices([self._seats[s] for s in launched.drawing])] = out

    def _start_token_copy(self, launched: _LaunchedStep) -> None:
        """Start copying the sampled tokens to the host."""
        count = len(launched.drawing)
        self._buffer_index = (self._buffer_index + 1) % TOKEN_BUFFERS
        launched.host_tokens = self._token_buffers[self._buffer_index]
        launched.host_tokens[:count].copy_(self._sampled[:count], non_blocking=True)
        if self._is_cuda:
            launched.copied = torch.cuda.Event()
            launched.copied.record()

    def _sample_fully(self, launched: _LaunchedStep, plan: StepPlan, logits: torch.Tensor) -> None:
        """Sample by the full sampler, with prompt logprobs; waits for the GPU."""
        end, source_rows = 0, []
        for row in plan.rows:
            if row.prompt_logprobs is not None:
                following = list((row.token_ids or ())[1:])
                following += [] if row.next_token_id is None else [row.next_token_id]
                known = logits[end : end + len(following)]
                launched.prompt_logprobs[row.sequence_id] = self.sampler.prompt_logprobs(
                    known, following, row.prompt_logprobs
                )
            end += row.count if row.prompt_logprobs is not None else bool(row.samples)
            source_rows += [end - 1] * len(row.samples)
        launched.tokens = []
        if source_rows:
            picked = logits[self._indices(source_rows)]
            launched.tokens = self.sampler.draw_fully(picked, launched.drawing, plan.masks)
            drawn = self._indices([token.token_id for token in launched.tokens])
            self.last_tokens[self._indices([self._seats[s] for s in launched.drawing])] = (
                drawn.int()
            )

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        tensor = torch.tensor(values, dtype=torch.int64)
        if self._is_cuda:
            tensor = tensor.pin_memory().to(self.kv.data.device, non_blocking=True)
        return tensor


def _bucket(rows: int) -> int:
    """Return the smallest bucket that holds `rows`, or 0 if none does."""
    return next((bucket for bucket in BUCKETS if bucket >= rows), 0)
