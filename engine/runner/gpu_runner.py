"""The GPU runner: executes step plans as CUDA graphs over state that stays on the GPU.

Each live sequence has a *seat*: a row of the block tables on the GPU and an entry for its last
token. A step copies its inputs from one pinned buffer, replays the graph of its shape, sampling
included, and copies the results back without waiting. `collect` waits only for that copy, so that
the host plans step N+1 while the GPU runs step N. Steps longer than the largest graph, and steps
with prompt logprobs, are launched operation by operation.

An engine over several GPUs has a lane for each (`engine.runner.lanes`): the step is planned once
and launched on all of them, by one thread under graphs and by a thread each without.

The runner also works on the CPU, in Triton's interpreter and without graphs: tests use that.
`engine.runner.gpu_build` builds it; core calls `launch` and `collect`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter

import numpy as np
import torch

from engine.api import SampledToken, Sampling
from engine.attention.gpu_backend import GpuAttention
from engine.attention.interface import LayerAttention
from engine.config import SPARE_SEATS
from engine.kv.storage import KvStorage
from engine.lanes.crew import Crew
from engine.models.interface import Model
from engine.plan import BegunSequence, Row, StateCopy, StepPlan, StepResult, TokensBySequence
from engine.runner.gpu_inputs import StepInputs, StepShape
from engine.runner.lanes import Lane
from engine.runner.seats import Int32, Seats, StepRows
from engine.runner.warmup import WarmupLimits, warmup_plans
from engine.sampling.gpu_sampler import Draws, GpuSampler
from engine.sampling.sampler import FAILURES
from engine.states.gpu_states import GpuStates
from engine.states.places import blocks_for_kv, blocks_of_state
from engine.states.step_runs import FEW, fill_runs

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

LANE_BUCKETS = tuple(range(2560, 8193, 512))
"""Rows of further graphs over several GPUs. Without one, threads that share an interpreter take 65
to 75 ms to launch a step of an 8B model, in which two H200s compute 4,500 rows."""

DECODE_KINDS = (((2,), False), ((2,), True), ((0, 2), True), ((1, 2), True), ((2, 1), True))
"""Tile classes in launch order, and whether parts are merged: the kinds of graphs that decoding
needs.

Without shared prefixes: rows of one part, rows of several. With shared prefixes: each launch order.
"""

DRAWS_MIN = 64
"""Logits rows of steps with prompts, at least: those of few sequences with their drafts."""

MIXED_CLASSES = (0, 1, 2)
"""Tile classes of a step with prompts; those of few rows have no wide tiles, whose empty launches
would cost 1 to 6 % of the step."""

TILE_KEYS_MAX = 128
"""Keys that attention reads at once, at most: some lie behind a row's last and are masked."""
RESULT_BUFFERS = 3
"""Pinned host buffers for sampled tokens: steps whose tokens may be in flight to the host."""

TIMES = 4
"""How often a step of each size is timed at the start; the least counts."""

SCORED_ROWS = 256
"""Prompt tokens that have their logits computed at once, for their logprobs. Those of a whole step
would take several times the memory of its other tensors, which no warm-up has seen."""

COMPARED_STEPS = 64
"""Of so many steps over several GPUs, one has the tokens of all lanes compared."""

_sequence_ids, _samples = attrgetter("sequence_id"), attrgetter("samples")
_drafts, _silent = attrgetter("drafts"), attrgetter("silent")


class _ResultBuffer:
    """A pinned host buffer for a step's results, and events on the device before its computation
    and after the copy of its results; none on the CPU."""

    def __init__(self, results: torch.Tensor, is_cuda: bool) -> None:
        self.results = results
        self.events: tuple[torch.cuda.Event, ...] = ()
        if is_cuda:
            self.events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.events[1].record()


@dataclass(slots=True)
class _LaunchedStep:
    """A launched step: its draws, where their results come, prompt logprobs by sequence, and drafts
    by sequence."""

    step: int
    draws: Draws | None = None
    buffer: _ResultBuffer | None = None
    before: _ResultBuffer | None = None
    """That of the step before."""
    prompt_logprobs: dict[int, tuple[SampledToken, ...]] = field(default_factory=dict)
    drafts: dict[int, Sequence[int]] = field(default_factory=dict)
    others: list[torch.Tensor] = field(default_factory=list)
    """The tokens of the lanes behind the first, where they are compared."""

    def wait(self) -> tuple[float, float]:
        """Wait for the results; return the seconds that the device took, and those that it had
        waited for the launch. 0 without a GPU."""
        if self.buffer is None or self.before is None or not self.buffer.events:
            return 0.0, 0.0
        began, copied = self.buffer.events
        copied.synchronize()
        waited_ms = self.before.events[1].elapsed_time(began)
        return began.elapsed_time(copied) / 1e3, waited_ms / 1e3


class GpuRunner:
    """`engine.plan.Runner` on one GPU, or on several as lanes.

    `context`: tokens of the longest sequence. `seats`: sequences live at once. `tokens_max`: tokens
    of a step. `graphs` False: every step is launched operation by operation, without padding, as a
    comparison needs. `beside`: the models and the KV of lanes behind the first; `crew` runs them;
    `check_lanes` raises RuntimeError if a lane has lost another. `vocab`: of the whole model, where
    lanes share it. `states`: of each lane's recurrent layers, if there are any, for as many seats.
    """

    def __init__(
        self, model: Model[LayerAttention], kv: KvStorage, *, context: int, seats: int,
        tokens_max: int, graphs: bool = True, vocab: int = 0, crew: Crew | None = None,
        beside: Sequence[tuple[Model[LayerAttention], KvStorage]] = (),
        check_lanes: Callable[[], None] = lambda: None, states: Sequence[GpuStates] = (),
    ) -> None:  # fmt: skip
        shares = [(model, kv), *beside]
        devices = [one.data.device for _, one in shares]
        self.graphs_on = graphs
        self._is_cuda = devices[0].type == "cuda"
        self._stream = torch.cuda.current_stream(devices[0]) if self._is_cuda else None
        self._crew, self._check_lanes = crew or Crew(devices[:1]), check_lanes
        self.block_size = kv.format.block_size
        self._context = context
        width = max(tokens_max, seats)
        attentions = [
            GpuAttention(one.config, own, context=context, seats=seats, tokens_max=width)
            for one, own in shares
        ]
        self.attention = attentions[0]
        self.attention.beside = tuple(attentions[1:])
        self._mixed_buckets = MIXED_BUCKETS + (LANE_BUCKETS if len(shares) > 1 else ())
        sequences = seats - SPARE_SEATS if seats > SPARE_SEATS else seats
        self._draws_max = max(DRAWS_MIN, _bucket(sequences, BUCKETS) or sequences)
        draws = max(self._draws_max, seats)
        self.sampler = GpuSampler(
            vocab or model.config.vocab, devices[0], slots=seats, rows=draws, beside=devices[1:]
        )
        groups = kv.format.blocks_per_run
        runs = bool(states)
        self.inputs = StepInputs(width, draws, devices[0], groups, has_runs=runs)
        inputs = [
            self.inputs,
            *(StepInputs(width, draws, one, groups, self.inputs, has_runs=runs)
              for one in devices[1:]),
        ]  # fmt: skip
        parts = zip(shares, inputs, attentions, states or (None,) * len(shares), strict=True)
        self._lanes = [
            Lane(number, *share, own, self.sampler, attention, seats, kept)
            for number, (share, own, attention, kept) in enumerate(parts)
        ]
        self._padding_seat = seats
        self._padding_row = np.array([[0], [0], [-1], [1], [seats]], np.int32)
        """As `StepInputs.SECTIONS` has them: a row that writes no KV."""
        self._result_buffers = [
            _ResultBuffer(self.sampler.host_results(), self._is_cuda) for _ in range(RESULT_BUFFERS)
        ]
        ahead = TILE_KEYS_MAX // self.block_size if states else 0
        self._seats = Seats(seats, self.attention.stride, groups, ahead)
        self._in_flight: deque[_LaunchedStep] = deque()
        self._buffer_index = 0

    @property
    def model(self) -> Model[LayerAttention]:
        """The first lane's model."""
        return self._lanes[0].model

    @property
    def kv(self) -> KvStorage:
        """The first lane's KV."""
        return self._lanes[0].kv

    @property
    def last_tokens(self) -> torch.Tensor:
        """Of each seat, on the first lane."""
        return self._lanes[0].last_tokens

    @property
    def states(self) -> GpuStates | None:
        """The first lane's states of recurrent layers."""
        return self._lanes[0].states

    def _each_states(self) -> Iterator[GpuStates]:
        """Yield the states of each lane, whose device is the current one meanwhile."""
        for lane in self._lanes:
            if lane.states is not None:
                with self._crew.on(lane.number):
                    yield lane.states

    @property
    def state_blocks(self) -> int:
        """Blocks that a kept state takes; 0 where there is none, or a run-up replaces it."""
        if self.states is None or self.model.config.run_up:
            return 0
        return blocks_of_state(self.states.layout, self.kv.format.block_bytes)

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
                for lane in self._lanes if self._is_cuda else ():
                    with suppress(RuntimeError):  # the first error says more
                        torch.cuda.current_stream(lane.kv.data.device).synchronize()
                raise

    def collect(self) -> StepResult:
        """Wait for the oldest launched step's tokens and return its result.

        Raises RuntimeError if lanes have lost each other, or have drawn unlike tokens.
        """
        launched = self._in_flight.popleft()
        pairs: list[tuple[int, SampledToken]] = []
        elapsed_s, waited_s = launched.wait()
        self._check_lanes()
        self._compare_lanes(launched)
        if launched.draws is not None and launched.buffer is not None:
            tokens = self.sampler.results(launched.draws, launched.buffer.results)
            pairs = list(zip(launched.draws.drawing, tokens, strict=True))
        sampled: TokensBySequence = {s: (token,) for s, token in pairs if token.token_id >= 0}
        failed = {s: FAILURES[token.token_id] for s, token in pairs if token.token_id < 0}
        for sequence_id, drafts in launched.drafts.items():
            drawn = [token for s, token in pairs if s == sequence_id]
            kept = right_draws([token.token_id for token in drawn], drafts)
            self.sampler.accept(sequence_id, [token.token_id for token in drawn], kept)
            if kept:
                failed.pop(sequence_id, None)
                sampled[sequence_id] = tuple(drawn[:kept])
            else:
                sampled.pop(sequence_id, None)
                failed[sequence_id] = FAILURES[drawn[0].token_id]
        return StepResult(
            step=launched.step,
            sampled=sampled,
            prompt_logprobs=launched.prompt_logprobs,
            failed=failed,
            elapsed_s=elapsed_s,
            waited_s=waited_s,
        )

    def warm_up(self, limits: WarmupLimits) -> None:
        """Capture all graphs, and run the warm-up plans.

        Call it while no block and no seat is in use. Blocks, seats and last tokens are restored.
        """
        self.capture_all(limits.sequences)
        for states in self._each_states() if self.state_blocks else ():
            states.keep([(self._padding_seat, [0])])
            states.restore([(self._padding_seat, [0])])
        for plan in warmup_plans(limits):
            self.launch(plan)
            self.collect()
            ended = tuple(begun.sequence_id for begun in plan.begun)
            self._update_seats(StepPlan(plan.step, (), ended=ended[::-1]))
        for lane in self._lanes:
            lane.kv.data[[0, -1]] = 0
            lane.last_tokens.zero_()

    def time_steps(self, tokens_max: int) -> tuple[float, ...]:
        """Return the seconds of steps of 1, 2, 3… up to `tokens_max` tokens of one sequence that
        all are drawn from: of one token as in decoding, of more as where drafts are verified.

        Under the conditions of `warm_up`, behind it; each graph is run a few times. Nothing where
        the device tells no times.
        """
        most = min(tokens_max, self._draws_max, self._context)
        sizes = [1, *(size for size in MIXED_BUCKETS if size <= most)]
        took_s: list[float] = []
        for size in sizes:
            least_s = min(self._time_step(size) for _ in range(TIMES))
            took_s += [least_s] * (size - len(took_s))
        for lane in self._lanes:
            lane.kv.data[0] = 0
            lane.last_tokens.zero_()
        return tuple(np.maximum.accumulate(took_s).tolist()) if took_s[0] > 0 else ()

    def _time_step(self, tokens: int) -> float:
        """Return the seconds of a step of a sequence's first tokens, all but one of them drafts;
        with recurrent states, of several sequences."""
        longest = tokens if self.states is None else FEW
        counts = {-1 - at: min(longest, tokens - at) for at in range(0, tokens, longest)}
        table = [0] * -(-longest // self.block_size)
        rows = tuple(
            Row(
                sequence, 0, count, table, 0, [0] * count, (sequence,), drafts=count - 1,
                beside=(table,) * (self.kv.format.blocks_per_run - 1),
            )
            for sequence, count in counts.items()
        )  # fmt: skip
        begun = tuple(BegunSequence(one, Sampling(temperature=0), [0], 1) for one in counts)
        self.launch(StepPlan(0, rows, begun=begun))
        elapsed_s = self.collect().elapsed_s
        self._update_seats(StepPlan(0, (), ended=tuple(counts)[::-1]))
        return elapsed_s

    def capture_all(self, sequences: int) -> None:
        """Capture the graphs that are not yet captured, of all steps of at most `sequences`."""
        if self._is_cuda and self.graphs_on:
            for shape in self.graph_shapes(sequences):
                if shape not in self._lanes[0].graphs:
                    self._capture(shape)

    @property
    def graph_count(self) -> int:
        """Graphs captured so far, on each lane."""
        return len(self._lanes[0].graphs)

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
        buckets = self._mixed_buckets
        longest = _bucket(self.inputs.width, buckets) or buckets[-1]
        shapes += [self._mixed_shape(b) for b in buckets if b <= longest]
        return sorted(shapes, key=lambda shape: -shape.rows)

    # -- a step -------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan) -> _LaunchedStep:
        self._update_seats(plan)
        for states in self._each_states():
            states.clear(blocks_for_kv(plan, self.block_size))
        for lane in self._lanes if plan.copies else ():
            with self._crew.on(lane.number):
                lane.kv.copy(plan.copies)
        rows = plan.rows
        if not rows:
            return _LaunchedStep(plan.step)
        members = tuple(map(_sequence_ids, rows))
        step = StepRows(rows, self._seats.of(members))
        self._update_tables(step)
        counts, total = step.counts, step.total
        drafts = {row.sequence_id: _drafts_of(row) for row in rows if row.drafts}
        drawing = list(chain.from_iterable(map(_drawing, rows) if drafts else map(_samples, rows)))
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
        self._fill_rows(step, shape)
        offsets = self._fill_draws(rows, counts, drawing, shape.draws or shape.rows)
        draft_masks = {row.sequence_id: row.draft_masks for row in rows if row.draft_masks}
        draws = self.sampler.fill(
            self.inputs.host_draws, drawing, plan.masks,
            _logit_rows(rows) if is_scored else None, offsets, draft_masks,
        )  # fmt: skip
        launched = self._begin(plan.step, draws, drafts)
        for lane in self._lanes:
            lane.inputs.send()
        if is_scored:
            logits = self._score(launched, rows, shape)
        else:
            logits = self._run(
                shape, has_graph=bool(bucket) and self.attention.is_at_known_addresses
            )
        if draws.has_extras:
            for lane in self._lanes:
                with self._crew.on(lane.number):
                    self._draw_extras(lane, draws, logits[lane.number])
        self._start_copy(launched, draws)
        self._leave_states(plan)
        return launched

    def _bucket_of(self, total: int, draws: int, is_decoding: bool) -> int:
        """Return the rows of the graph that holds the step, or 0 if none does."""
        if not self.graphs_on or draws > self._draws_max:
            return 0
        buckets = BUCKETS if is_decoding else self._mixed_buckets
        return _bucket(max(total, draws), buckets)

    def _mixed_shape(self, rows: int, draws: int = 0) -> StepShape:
        """Return the shape of a step with prompts; `draws` 0: as many as its graph has."""
        first = int(rows < self.attention.planner.wide_rows_min_prompts)
        draws = draws or min(rows, self._draws_max)
        return StepShape(rows, draws, MIXED_CLASSES[first:], merge=True, causal=True)

    def _update_seats(self, plan: StepPlan) -> None:
        ended = set(plan.ended) if plan.keeps else ()
        self._keep_states([copy for copy in plan.keeps if copy.sequence_id in ended])
        for sequence_id in plan.ended:
            self._seats.release(sequence_id)
            self.sampler.end(sequence_id)
        for begun in plan.begun:
            self._seats.take(begun.sequence_id)
            self.sampler.begin(begun)
        if self.states is None:
            return
        restores = [(self._seats.seat(c.sequence_id), c.blocks) for c in plan.restores]
        restored = {seat for seat, _ in restores}
        begun_seats = [self._seats.seat(begun.sequence_id) for begun in plan.begun]
        for states in self._each_states():
            states.begin(seat for seat in begun_seats if seat not in restored)
            states.restore(restores)

    def _keep_states(self, copies: Sequence[StateCopy]) -> None:
        kept = [(self._seats.seat(c.sequence_id), c.blocks) for c in copies]
        for states in self._each_states() if kept else ():
            states.keep(kept)

    def _leave_states(self, plan: StepPlan) -> None:
        """Keep what the plan keeps after the rows, and give the states of rows to the sequences
        that part from them."""
        if self.states is None:
            return
        ended = set(plan.ended) if plan.keeps else ()
        self._keep_states([copy for copy in plan.keeps if copy.sequence_id not in ended])
        for row in plan.rows:
            others = [self._seats.seat(s) for s in row.samples if s != row.sequence_id]
            for states in self._each_states() if others else ():
                states.part(self._seats.seat(row.sequence_id), others)

    def _update_tables(self, step: StepRows) -> None:
        """Copy new block table entries to the GPU."""
        entries = self._seats.new_entries(step.rows, step.seats)
        if entries is not None:
            for lane in self._lanes:
                with self._crew.on(lane.number):
                    lane.attention.update_tables(*lane.entries.send(*entries))

    def _fill_rows(self, step: StepRows, shape: StepShape) -> None:
        """Lay out the rows in the pinned buffer; padding rows up to the shape's write no KV."""
        width = shape.rows
        for lane in self._lanes:
            lane.inputs.wait()
        host, total = self.inputs.host, step.total
        at, seats = step.positions()
        block, offset = np.divmod(at, self.block_size)
        step.write_token_ids(host[0, :total])
        host[1, :total] = at
        np.add(at, 1, out=host[3, :total])
        host[4, :total] = seats
        host[:5, total:width] = self._padding_row
        for table, section in zip(
            self._seats.tables, (host[2], *self.inputs.host_slots), strict=True
        ):
            section[:total] = table[seats, block] * self.block_size + offset
            section[total:width] = -1
            if self.states is not None:
                _silence(step.rows, section)
        if self.states is not None and shape.causal:
            drafts = np.fromiter(map(_drafts, step.rows), np.int32, len(step.rows))
            fill_runs(self.inputs.host_runs, step.counts, drafts)

    def _fill_draws(
        self, rows: Sequence[Row], counts: np.ndarray, drawing: list[int], width: int
    ) -> Int32 | None:
        """Lay out in the pinned buffer which rows are sampled, and for which seats; return how many
        drafts of its sequence precede each draw, None where there are none.

        Padding draws up to `width` read the first row for the spare seat; the sampler skips them.
        That seat takes the tokens of sequences with drafts, too: their next rows know theirs.
        """
        draw_rows, draw_seats = self.inputs.host[5:7]
        count, offsets = len(drawing), None
        samples = np.fromiter(map(len, map(_samples, rows)), np.int32, len(rows))
        last, seats = np.cumsum(counts) - 1, self._seats.of(tuple(drawing))
        if count == samples.sum():
            draw_rows[:count] = np.repeat(last, samples)
        else:
            drafts = np.fromiter(map(_drafts, rows), np.int32, len(rows))
            draws = samples + drafts
            is_draft = np.repeat(drafts > 0, draws)
            place = np.arange(count) - np.repeat(np.cumsum(draws) - draws, draws)
            offsets = np.where(is_draft, place, 0).astype(np.int32)
            draw_rows[:count] = np.repeat(last - drafts, draws) + offsets
            seats = np.where(is_draft, self._padding_seat, seats)
        draw_rows[count:width] = 0
        draw_seats[:count] = seats
        draw_seats[count:width] = self._padding_seat
        return offsets

    # -- the model ----------------------------------------------------------------------------

    def _run(self, shape: StepShape, *, has_graph: bool) -> list[torch.Tensor]:
        """Compute and sample, by the shape's graph where it has one, captured on first use; return
        the logits of the draws, of each lane."""
        if not has_graph or not self._is_cuda:
            return self._crew.run(lambda number: self._lanes[number].compute(shape))
        if shape not in self._lanes[0].graphs:
            self._capture(shape)
        logits = []
        for lane in self._lanes:
            with self._crew.on(lane.number):
                logits.append(lane.graphs.replay(shape))
        return logits

    def _draw_extras(self, lane: Lane, draws: Draws, logits: torch.Tensor) -> None:
        """Launch what the rows with masks, biases, penalties or logprobs need beyond the graph."""
        count = len(draws.drawing)
        table, out = lane.inputs.draws[:count], lane.sampled[:count]
        self.sampler.draw_extras(draws, logits, table, out, lane.number)
        if draws.adjusted:
            lane.last_tokens[lane.inputs.section("draw_seats", count)] = out

    def _capture(self, shape: StepShape) -> None:
        """Capture a shape's graph on each lane, one after the other. All are run once before: a
        launch that meets others must wait for no compiler."""
        self._synchronize()
        kept = [lane.hide_inputs(self._padding_seat) for lane in self._lanes]

        def warm(number: int) -> None:
            lane = self._lanes[number]
            lane.graphs.warm(lambda: lane.compute(shape))

        self._crew.run(warm)
        self._synchronize()
        for lane in self._lanes:
            with self._crew.on(lane.number):
                lane.graphs.capture(shape, partial(lane.compute, shape))
        for lane, inputs in zip(self._lanes, kept, strict=True):
            lane.inputs.device.copy_(inputs)

    def _synchronize(self) -> None:
        for lane in self._lanes:
            torch.cuda.synchronize(lane.kv.data.device)

    # -- tokens -------------------------------------------------------------------------------

    def _start_copy(self, launched: _LaunchedStep, draws: Draws) -> None:
        """Start copying the sampled tokens and their logprobs to the host."""
        assert launched.buffer is not None, "made when it was launched"
        self.sampler.copy_results(draws, self._lanes[0].sampled, launched.buffer.results)
        if self._is_cuda:
            launched.buffer.events[1].record(self._stream)
        if len(self._lanes) > 1 and launched.step % COMPARED_STEPS == 0:
            count = len(draws.drawing)
            launched.others = [lane.sampled[:count].clone() for lane in self._lanes[1:]]

    def _compare_lanes(self, launched: _LaunchedStep) -> None:
        """Raise RuntimeError if lanes have drawn unlike tokens."""
        if launched.buffer is None or not launched.others:
            return
        for number, tokens in enumerate(launched.others, 1):
            found, first = tokens.tolist(), launched.buffer.results[: len(tokens)].tolist()
            if found != first:
                row = next(
                    i for i, pair in enumerate(zip(found, first, strict=True)) if len(set(pair)) > 1
                )
                raise RuntimeError(
                    f"GPU {number} drew token {found[row]} where GPU 0 drew {first[row]}, in draw"
                    f" {row} of step {launched.step}: their sums differ"
                )

    def _begin(self, step: int, draws: Draws, drafts: dict[int, Sequence[int]]) -> _LaunchedStep:
        """Return a step whose inputs are about to be sent."""
        before = self._result_buffers[self._buffer_index]
        self._buffer_index = (self._buffer_index + 1) % RESULT_BUFFERS
        buffer = self._result_buffers[self._buffer_index]
        if self._is_cuda:
            buffer.events[0].record(self._stream)
        return _LaunchedStep(step, draws, buffer, before, drafts=drafts)

    def _score(
        self, launched: _LaunchedStep, rows: Sequence[Row], shape: StepShape
    ) -> list[torch.Tensor]:
        """Compute and sample a step with prompt logprobs, and keep these; return the logits of each
        lane.

        Waits for the GPU.
        """
        hidden = self._crew.run(lambda number: self._lanes[number].forward(shape, None))
        drawn_from: list[int] = []
        end = 0
        for row in rows:
            first, end = end, end + row.count
            if row.samples:
                drawn_from += range(end - 1 - row.drafts, end)
            if row.prompt_logprobs is not None:
                known = [own[first:end] for own in hidden]
                launched.prompt_logprobs[row.sequence_id] = self._prompt_logprobs(known, row)
        if not drawn_from:
            return [own[:0] for own in hidden]
        count = 0 if launched.draws is None else len(launched.draws.drawing)

        def draw(number: int) -> torch.Tensor:
            lane = self._lanes[number]
            logits = lane.model.logits(hidden[number][lane.indices(drawn_from)])
            lane.draw(logits, count)
            return logits

        return self._crew.run(draw)

    def _prompt_logprobs(self, hidden: list[torch.Tensor], row: Row) -> tuple[SampledToken, ...]:
        """Return logprobs of the known tokens that follow each position of a row.

        hidden: [row.count, C] of each lane. Waits for the GPU.
        """
        following = list((row.token_ids or ())[1:])
        following += [] if row.next_token_id is None else [row.next_token_id]
        entries: list[SampledToken] = []
        for start in range(0, len(following), SCORED_ROWS):
            known = following[start : start + SCORED_ROWS]
            logits = self._crew.run(partial(self._logits, hidden, start, start + len(known)))
            top = row.prompt_logprobs or 0
            entries += self.sampler.prompt_logprobs(logits[0], known, top)
        return tuple(entries)

    def _logits(
        self, hidden: list[torch.Tensor], first: int, end: int, number: int
    ) -> torch.Tensor:
        """Return a lane's logits of some of its hidden states."""
        return self._lanes[number].model.logits(hidden[number][first:end])


def _bucket(rows: int, buckets: Sequence[int]) -> int:
    """Return the smallest bucket that holds `rows`, or 0 if none does."""
    return next((bucket for bucket in buckets if bucket >= rows), 0)


def _silence(rows: Sequence[Row], slots: Int32) -> None:
    """Have tokens whose KV is in place write none: `slots` [T] of a step's tokens, written."""
    if not any(map(_silent, rows)):
        return
    first = 0
    for row in rows:
        slots[first : first + row.silent] = -1
        first += row.count


def _logit_rows(rows: Sequence[Row]) -> list[int]:
    """Return the row of logits of each draw in a step with prompt logprobs: see `_score`."""
    found: list[int] = []
    end = 0
    for row in rows:
        if row.samples:
            found += range(end, end + 1 + row.drafts) if row.drafts else [end] * len(row.samples)
            end += 1 + row.drafts
    return found


def _drawing(row: Row) -> tuple[int, ...]:
    """Return the sequence of each draw of a row."""
    return row.samples * (1 + row.drafts)


def _drafts_of(row: Row) -> Sequence[int]:
    """Return the drafts of a row that has some."""
    assert row.token_ids is not None, "drafts follow a token that the plan knows"
    return row.token_ids[row.count - row.drafts : row.count]


def right_draws(drawn: Sequence[int], drafts: Sequence[int]) -> int:
    """Return how many of a sequence's draws are its tokens: those up to the first that differs from
    the draft at its place, or that is no token.
    """
    for place, token in enumerate(drawn):
        if token < 0:
            return place
        if place == len(drafts) or token != drafts[place]:
            return place + 1
    return len(drawn)
