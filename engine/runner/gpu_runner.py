"""The GPU runner: executes step plans as CUDA graphs over state that stays on the GPU.

Each live sequence has a *seat*: a row of the block tables on the GPU and an entry for its last
token. A step copies its inputs from one pinned buffer, replays the graph of its shape, sampling
included, and copies the results back without waiting. `collect` waits only for that copy, so that
the host plans step N+1 while the GPU runs step N. Steps longer than the largest graph, and steps
with prompt logprobs, are launched operation by operation.

The runner also works on the CPU, in Triton's interpreter and without graphs: tests use that.
`engine.runner.gpu_build` builds it; core calls `launch` and `collect`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

import numpy as np
import torch

from engine.api import SampledToken
from engine.attention.gpu_backend import GpuAttention
from engine.attention.interface import LayerAttention
from engine.kv.storage import KvStorage
from engine.models.interface import Model
from engine.plan import Row, StepPlan, StepResult
from engine.runner.cuda_graphs import CudaGraphs
from engine.runner.gpu_inputs import StepAttention, StepInputs, StepShape
from engine.runner.seats import Seats, StepRows
from engine.runner.warmup import WarmupLimits, warmup_plans
from engine.sampling.gpu_sampler import Draws, GpuSampler
from engine.sampling.sampler import FAILURES

BUCKETS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256),
    *(320, 384, 512, 640, 768, 896, 1024),
)
"""Batch sizes that graphs of decoding steps are captured for; a batch is padded to the next one.

448 is left out: cuBLAS takes longer for 448 rows than for 512 (15.9 and 13.8 ms on an H200).
"""

MIXED_BUCKETS = (
    *(16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512),
    *(640, 768, 896, 1024, 1280, 1536, 1792, 2048),
)
"""Rows that graphs of steps with prompts are captured for. Longer steps are bound by the GPU."""

DECODE_KINDS = (((2,), False), ((2,), True), ((0, 2), True), ((1, 2), True), ((2, 1), True))
"""Tile classes in launch order, and whether parts are merged: the kinds of graphs that decoding
needs.

Without shared prefixes: rows of one part, rows of several. With shared prefixes: each launch order.
"""

MIXED_CLASSES = (0, 1, 2)
"""Tile classes of a step with prompts; those of few rows have no wide tiles, whose empty launches
would cost 1 to 6 % of the step."""

SPARE_SEATS = 32
"""Seats beyond `sequences_max`, for sequences that begin in the step in which others end."""

RESULT_BUFFERS = 3
"""Pinned host buffers for sampled tokens: steps whose tokens may be in flight to the host."""

SCORED_ROWS = 256
"""Prompt tokens that have their logits computed at once, for their logprobs. Those of a whole step
would take several times the memory of its other tensors, which no warm-up has seen."""

_sequence_ids, _samples = attrgetter("sequence_id"), attrgetter("samples")


@dataclass(slots=True)
class _LaunchedStep:
    """A launched step: its draws, the host buffer for their results, events on the device before
    its computation and after the copy of its results, and prompt logprobs by sequence."""

    step: int
    draws: Draws | None = None
    results: torch.Tensor | None = None
    began: torch.cuda.Event | None = None
    copied: torch.cuda.Event | None = None
    prompt_logprobs: dict[int, tuple[SampledToken, ...]] = field(default_factory=dict)

    def wait(self) -> float:
        """Wait for the results; return the seconds that the device took, 0 without a GPU."""
        if self.began is None or self.copied is None:
            return 0.0
        self.copied.synchronize()
        return float(self.began.elapsed_time(self.copied)) / 1000


class GpuRunner:
    """`engine.plan.Runner` on one GPU.

    `context`: tokens of the longest sequence. `seats`: sequences live at once. `tokens_max`: tokens
    of a step. `graphs` False: every step is launched operation by operation, without padding, as a
    comparison needs.
    """

    def __init__(
        self, model: Model[LayerAttention], kv: KvStorage, *, context: int, seats: int,
        tokens_max: int, graphs: bool = True,
    ) -> None:  # fmt: skip
        self.model = model
        self.graphs_on = graphs
        self.kv = kv
        device = kv.data.device
        self._is_cuda = device.type == "cuda"
        self.block_size = kv.format.block_size
        width = max(tokens_max, seats)
        self.attention = GpuAttention(
            model.config, kv, context=context, seats=seats, tokens_max=width
        )
        sequences = seats - SPARE_SEATS if seats > SPARE_SEATS else seats
        self._draws_max = _bucket(sequences, BUCKETS) or sequences
        draws = max(self._draws_max, seats)
        self.sampler = GpuSampler(model.config.vocab, device, slots=seats, rows=draws)
        groups = kv.format.blocks_per_run
        self.inputs = StepInputs(width, draws, device, groups)
        # One entry more than seats: padding rows of a batch write their token there.
        self.last_tokens = torch.zeros(seats + 1, dtype=torch.int32, device=device)
        self._padding_seat = seats
        self._sampled = torch.zeros(width, dtype=torch.int32, device=device)
        self._result_buffers = [self.sampler.host_results() for _ in range(RESULT_BUFFERS)]
        self._seats = Seats(seats, self.attention.stride, groups)
        self._graphs = CudaGraphs()
        self._in_flight: deque[_LaunchedStep] = deque()
        self._buffer_index = 0

    # -- Runner -------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> None:
        """Launch the step.

        Waits for the GPU only if a row reports prompt logprobs, or if the launch fails: core then
        takes the step for ended, and a load may fill its blocks.
        """
        with torch.inference_mode():
            try:
                self._in_flight.append(self._launch(plan))
            except BaseException:
                if self._is_cuda:
                    with suppress(RuntimeError):  # the first error says more
                        torch.cuda.current_stream().synchronize()
                raise

    def collect(self) -> StepResult:
        """Wait for the oldest launched step's tokens and return its result."""
        launched = self._in_flight.popleft()
        pairs: list[tuple[int, SampledToken]] = []
        elapsed_s = launched.wait()
        if launched.draws is not None and launched.results is not None:
            tokens = self.sampler.results(launched.draws, launched.results)
            pairs = list(zip(launched.draws.drawing, tokens, strict=True))
        return StepResult(
            step=launched.step,
            sampled={s: (token,) for s, token in pairs if token.token_id >= 0},
            prompt_logprobs=launched.prompt_logprobs,
            failed={s: FAILURES[token.token_id] for s, token in pairs if token.token_id < 0},
            elapsed_s=elapsed_s,
        )

    def warm_up(self, limits: WarmupLimits) -> None:
        """Capture all graphs, and run the warm-up plans.

        Call it while no block and no seat is in use. Blocks, seats and last tokens are restored.
        """
        self.capture_all(limits.sequences)
        for plan in warmup_plans(limits):
            self.launch(plan)
            self.collect()
            ended = tuple(begun.sequence_id for begun in plan.begun)
            self._update_seats(StepPlan(plan.step, (), ended=ended[::-1]))
        self.kv.data[[0, -1]] = 0
        self.last_tokens.zero_()

    def capture_all(self, sequences: int) -> None:
        """Capture the graphs that are not yet captured, of all steps of at most `sequences`."""
        if self._is_cuda and self.graphs_on:
            for shape in self.graph_shapes(sequences):
                if shape not in self._graphs:
                    self._capture(shape)

    @property
    def graph_count(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def graph_shapes(self, sequences: int) -> list[StepShape]:
        """Return the shapes of all steps that run under graphs, longest first. `sequences`: most
        sequences at once."""
        decoding = [b for b in BUCKETS if b <= self._draws_max and b < 2 * sequences]
        shapes = [
            StepShape(bucket, 0, classes, merge, causal=False)
            for bucket in decoding
            for classes, merge in DECODE_KINDS
            if bucket >= self.attention.planner.wide_rows_min or 0 not in classes
        ]
        longest = _bucket(self.inputs.width, MIXED_BUCKETS) or MIXED_BUCKETS[-1]
        shapes += [self._mixed_shape(b) for b in MIXED_BUCKETS if b <= longest]
        return sorted(shapes, key=lambda shape: -shape.rows)

    # -- a step -------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan) -> _LaunchedStep:
        self._update_seats(plan)
        self.kv.copy(plan.copies)
        rows = plan.rows
        if not rows:
            return _LaunchedStep(plan.step)
        members = tuple(map(_sequence_ids, rows))
        step = StepRows(rows, self._seats.of(members))
        self._update_tables(step)
        counts, total = step.counts, step.total
        drawing = list(chain.from_iterable(map(_samples, rows)))
        is_scored = any(row.prompt_logprobs is not None for row in rows)
        is_decoding = total == len(rows) and drawing == list(members)
        bucket = 0 if is_scored else self._bucket_of(total, len(drawing), is_decoding)
        work = self.attention.prepare(
            members, counts, step.starts, step.seats, plan.groups, bucket or total,
            rows if rows[-1].attention is not None else (),
        )  # fmt: skip
        if is_decoding:
            shape = StepShape(bucket or total, 0, work.classes, work.parts_max > 1, causal=False)
        else:
            shape = self._mixed_shape(bucket or total, 0 if bucket else max(1, len(drawing)))
        assert set(work.classes) <= set(shape.classes), "the step's graph lacks a tile class"
        self._fill_rows(step, shape.rows)
        self._fill_draws(rows, counts, drawing, shape.draws or shape.rows)
        draws = self.sampler.fill(
            self.inputs.host_draws, drawing, plan.masks, _logit_rows(rows) if is_scored else None
        )
        launched = _LaunchedStep(plan.step, draws, began=self._timed_event())
        self.inputs.send()
        if is_scored:
            logits = self._score(launched, rows, shape)
        else:
            logits = self._run(
                shape, has_graph=bool(bucket) and self.attention.is_at_known_addresses
            )
        if draws.has_extras:
            self._draw_extras(draws, logits)
        self._start_copy(launched, draws)
        return launched

    def _bucket_of(self, total: int, draws: int, is_decoding: bool) -> int:
        """Return the rows of the graph that holds the step, or 0 if none does."""
        if not self.graphs_on or draws > self._draws_max:
            return 0
        buckets = BUCKETS if is_decoding else MIXED_BUCKETS
        return _bucket(max(total, draws), buckets)

    def _mixed_shape(self, rows: int, draws: int = 0) -> StepShape:
        """Return the shape of a step with prompts; `draws` 0: as many as its graph has."""
        first = int(rows < self.attention.planner.wide_rows_min_prompts)
        draws = draws or min(rows, self._draws_max)
        return StepShape(rows, draws, MIXED_CLASSES[first:], merge=True, causal=True)

    def _update_seats(self, plan: StepPlan) -> None:
        for sequence_id in plan.ended:
            self._seats.release(sequence_id)
            self.sampler.end(sequence_id)
        for begun in plan.begun:
            self._seats.take(begun.sequence_id)
            self.sampler.begin(begun)

    def _update_tables(self, step: StepRows) -> None:
        """Copy new block table entries to the GPU."""
        entries = self._seats.new_entries(step.rows, step.seats)
        if entries is not None:
            both = torch.from_numpy(np.stack(entries))
            if self._is_cuda:
                both = both.pin_memory().to(self.kv.data.device, non_blocking=True)
            self.attention.update_tables(both[0].long(), both[1])

    def _fill_rows(self, step: StepRows, width: int) -> None:
        """Lay out the rows in the pinned buffer; padding rows up to `width` write no KV."""
        self.inputs.wait()
        token_ids, positions, slots, lengths, seat_of = self.inputs.host[:5]
        beside = self.inputs.host[len(self.inputs.SECTIONS) :]
        total, size = step.total, self.block_size
        at, seats = step.positions()
        step.write_token_ids(token_ids[:total])
        positions[:total] = at
        lengths[:total] = at + 1
        seat_of[:total] = seats
        for table, section in zip(self._seats.tables, (slots, *beside), strict=True):
            section[:total] = table[seats, at // size] * size + at % size
            section[total:width] = -1
        for section, value in ((token_ids, 0), (positions, 0), (lengths, 1)):
            section[total:width] = value
        seat_of[total:width] = self._padding_seat

    def _fill_draws(
        self, rows: Sequence[Row], counts: np.ndarray, drawing: list[int], width: int
    ) -> None:
        """Lay out in the pinned buffer which rows are sampled, and for which seats.

        Padding draws up to `width` read the first row for the spare seat; the sampler skips them.
        """
        draw_rows, draw_seats = self.inputs.host[5:7]
        count = len(drawing)
        samples = np.fromiter(map(len, map(_samples, rows)), np.int32, len(rows))
        draw_rows[:count] = np.repeat(np.cumsum(counts) - 1, samples)
        draw_rows[count:width] = 0
        draw_seats[:count] = self._seats.of(tuple(drawing))
        draw_seats[count:width] = self._padding_seat

    # -- the model ----------------------------------------------------------------------------

    def _forward(self, shape: StepShape, output_rows: torch.Tensor | None) -> torch.Tensor:
        given = self.inputs.section("token_ids", shape.rows)
        last = self.last_tokens[self.inputs.section("seats", shape.rows)]
        token_ids = torch.where(given >= 0, given, last.clamp(min=0))
        attention = StepAttention(self.attention, self.inputs, shape)
        return self.model.forward(token_ids, attention, output_rows)

    def _run(self, shape: StepShape, *, has_graph: bool) -> torch.Tensor:
        """Compute and sample, by the shape's graph where it has one, captured on first use; return
        the logits of the draws."""
        if not has_graph or not self._is_cuda:
            return self._compute(shape)
        if shape not in self._graphs:
            self._capture(shape)
        return self._graphs.replay(shape)

    def _compute(self, shape: StepShape) -> torch.Tensor:
        draws, seats, picked = shape.rows, "seats", None
        if shape.draws:
            draws, seats = shape.draws, "draw_seats"
            picked = self.inputs.section("draw_rows", draws)
        logits = self.model.logits(self._forward(shape, picked))
        out = self._sampled[:draws]
        self.sampler.draw(logits, self.inputs.draws[:draws], out)
        self.last_tokens[self.inputs.section(seats, draws)] = out
        return logits

    def _draw_extras(self, draws: Draws, logits: torch.Tensor) -> None:
        """Launch what the rows with masks, biases, penalties or logprobs need beyond the graph."""
        count = len(draws.drawing)
        out = self._sampled[:count]
        self.sampler.draw_extras(draws, logits, self.inputs.draws[:count], out)
        if draws.adjusted:
            self.last_tokens[self.inputs.section("draw_seats", count)] = out

    def _capture(self, shape: StepShape) -> None:
        torch.cuda.synchronize()
        kept = self.inputs.device.clone()
        width = self.inputs.width
        for name in self.inputs.slots:
            self.inputs.section(name, width).fill_(-1)  # a capture writes no KV
        for name in ("seats", "draw_seats"):  # and no live seat's token
            self.inputs.section(name, width).fill_(self._padding_seat)
        self.inputs.draws.zero_()  # and draws none
        self._graphs.capture(shape, lambda: self._compute(shape))
        self.inputs.device.copy_(kept)

    # -- tokens -------------------------------------------------------------------------------

    def _start_copy(self, launched: _LaunchedStep, draws: Draws) -> None:
        """Start copying the sampled tokens and their logprobs to the host."""
        self._buffer_index = (self._buffer_index + 1) % RESULT_BUFFERS
        launched.results = self._result_buffers[self._buffer_index]
        self.sampler.copy_results(draws, self._sampled, launched.results)
        launched.copied = self._timed_event()

    def _timed_event(self) -> torch.cuda.Event | None:
        """Return an event that the device reaches after all that was launched; None on the CPU."""
        if not self._is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _score(
        self, launched: _LaunchedStep, rows: Sequence[Row], shape: StepShape
    ) -> torch.Tensor:
        """Compute and sample a step with prompt logprobs, and keep these; return its logits.

        Waits for the GPU.
        """
        hidden = self._forward(shape, None)
        drawn_from: list[int] = []
        end = 0
        for row in rows:
            first, end = end, end + row.count
            if row.samples:
                drawn_from.append(end - 1)
            if row.prompt_logprobs is not None:
                found = self._prompt_logprobs(hidden[first:end], row)
                launched.prompt_logprobs[row.sequence_id] = found
        if not drawn_from:
            return hidden[:0]
        logits = self.model.logits(hidden[self._indices(drawn_from)])
        count = 0 if launched.draws is None else len(launched.draws.drawing)
        out = self._sampled[:count]
        self.sampler.draw(logits, self.inputs.draws[:count], out)
        self.last_tokens[self.inputs.section("draw_seats", count)] = out
        return logits

    def _prompt_logprobs(self, hidden: torch.Tensor, row: Row) -> tuple[SampledToken, ...]:
        """Return logprobs of the known tokens that follow each position of a row.

        hidden: [row.count, C]. Waits for the GPU.
        """
        following = list((row.token_ids or ())[1:])
        following += [] if row.next_token_id is None else [row.next_token_id]
        entries: list[SampledToken] = []
        for start in range(0, len(following), SCORED_ROWS):
            known = following[start : start + SCORED_ROWS]
            logits = self.model.logits(hidden[start : start + len(known)])
            entries += self.sampler.prompt_logprobs(logits, known, row.prompt_logprobs or 0)
        return tuple(entries)

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        tensor = torch.tensor(values, dtype=torch.int64)
        if self._is_cuda:
            tensor = tensor.pin_memory().to(self.kv.data.device, non_blocking=True)
        return tensor


def _bucket(rows: int, buckets: Sequence[int]) -> int:
    """Return the smallest bucket that holds `rows`, or 0 if none does."""
    return next((bucket for bucket in buckets if bucket >= rows), 0)


def _logit_rows(rows: Sequence[Row]) -> list[int]:
    """Return the row of logits of each draw in a step with prompt logprobs: see `_score`."""
    sampling = [row.samples for row in rows if row.samples]
    return [index for index, samples in enumerate(sampling) for _ in samples]
