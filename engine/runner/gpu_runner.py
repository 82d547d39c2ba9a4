"""The GPU runner: step plans as CUDA graphs over state that stays on the device.

Each sequence known to it has a *seat*: a row of the device's block tables and a place for its last
token. A step sends one pinned copy of lengths, positions and slots, replays the graph of its batch
bucket when every row decodes, or launches eagerly when prompts are among them, samples, and copies
the tokens back without waiting. `collect` waits for that copy alone, so that the host plans step
N+1 while the device runs N.

It runs on the CPU too, in Triton's interpreter, without graphs: that is how it is tested.
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
from engine.kv.storage import KvStorage
from engine.models.llama import LlamaModel
from engine.plan import Row, Sampled, StepPlan, StepResult
from engine.runner.cuda_graphs import CudaGraphs, Key
from engine.runner.gpu_inputs import StepAttention, StepInputs
from engine.runner.warmup import WarmupLimits, first_steps
from engine.sampling.gpu_sampler import GpuSampler

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Batch sizes that graphs are captured for; a batch takes the next one up."""

CAPTURED = (((2,), False), ((2,), True), ((0, 2), True), ((1, 2), True), ((2, 1), True))
"""Tile classes in the order of their launches, and whether parts are merged: what decoding needs.

Without shared prefixes, with one part a row and with several; and with, in each order."""

SPARE_SEATS = 32
"""For sequences that begin in the step in which others end."""

RINGS = 3
"""Steps whose tokens may be on their way to the host."""


@dataclass(slots=True)
class _Flight:
    """A launched step: where its tokens arrive, and whose they are."""

    step: int
    started_s: float
    drawing: list[int]
    host_tokens: torch.Tensor | None = None
    arrived: torch.cuda.Event | None = None
    from_row: list[int] = field(default_factory=list)
    tokens: list[SampledToken] | None = None
    prompt_logprobs: dict[int, tuple[SampledToken, ...]] = field(default_factory=dict)


class GpuRunner:
    """`engine.core.core.Runner` on one device. `seats`: sequences known at once; `tokens_max`: rows
    of a step in all."""

    def __init__(
        self, model: LlamaModel, kv: KvStorage, *, context: int, seats: int, tokens_max: int,
        chunk_keys: int = 0,
    ) -> None:  # fmt: skip
        self.model = model
        self.kv = kv
        device = kv.data.device
        self._is_cuda = device.type == "cuda"
        self.block_size = kv.data.shape[4]
        width = max(tokens_max, seats)
        self.attention = GpuAttention(
            model.config, kv, context=context, seats=seats, tokens_max=width, chunk_keys=chunk_keys
        )
        self.sampler = GpuSampler(model.config.vocab, device)
        self.inputs = StepInputs(width, device)
        # One seat more than there are: rows that only fill a batch up write their token there.
        self.last_tokens = torch.zeros(seats + 1, dtype=torch.int32, device=device)
        self._nobody = seats
        self._drawn = torch.zeros(width, dtype=torch.int32, device=device)
        self._rings = [
            torch.zeros(width, dtype=torch.int32, pin_memory=self._is_cuda) for _ in range(RINGS)
        ]
        self._seats: dict[int, int] = {}
        self._free_seats = list(range(seats - 1, -1, -1))
        self._tables: dict[int, tuple[int, int]] = {}
        self._graphs = CudaGraphs()
        self._flights: deque[_Flight] = deque()
        self._turn = 0

    # -- Runner -------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> None:
        """Send the step on its way; nothing is waited for unless a row needs the full sampler."""
        with torch.inference_mode():
            self._flights.append(self._launch(plan))

    def collect(self) -> StepResult:
        """Wait for the oldest step's tokens."""
        flight = self._flights.popleft()
        tokens = flight.tokens
        if tokens is None:
            assert flight.host_tokens is not None
            if flight.arrived is not None:
                flight.arrived.synchronize()
            drawn = flight.host_tokens[: len(flight.drawing)].tolist()
            tokens = [SampledToken(token_id) for token_id in drawn]
        pairs = list(zip(flight.drawing, tokens, strict=True))
        return StepResult(
            step=flight.step,
            sampled=tuple(Sampled(s, token) for s, token in pairs if token.token_id >= 0),
            prompt_logprobs=flight.prompt_logprobs,
            failed={s: "nan_logits" for s, token in pairs if token.token_id < 0},
            elapsed_s=time.perf_counter() - flight.started_s,
        )

    def warm_up(self, limits: WarmupLimits) -> None:
        """Capture the graphs that decoding will want, and take the first steps.

        Nobody's blocks, seats or tokens may be in use; they are as they were afterwards.
        """
        buckets = [b for b in BUCKETS if self._is_cuda and b < 2 * limits.sequences]
        for key in [(bucket, *kind) for bucket in buckets for kind in CAPTURED]:
            self._capture(key)
        for plan in first_steps(limits):
            self.launch(plan)
            self.collect()
            ended = tuple(begun.sequence_id for begun in plan.begun)
            self._seat(StepPlan(plan.step, (), ended=ended[::-1]))
        self.kv.data[[0, -1]] = 0
        self.last_tokens.zero_()

    # -- a step -------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan) -> _Flight:
        started_s = time.perf_counter()
        self._seat(plan)
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
        self._fill(rows, counts, starts, seats, bucket or total)
        is_plain = not plan.masks and self.sampler.is_plain(drawing)
        is_plain = is_plain and all(row.prompt_logprobs is None for row in rows)
        if is_plain and drawing:
            self.inputs.host_parameters[:, : len(drawing)] = self.sampler.parameters(drawing)
        self.inputs.send()
        if bucket:
            logits = self._decode(bucket, classes, merge)
        else:
            logits = self._eager(rows, counts, classes, merge)
        flight = _Flight(plan.step, started_s, drawing)
        if not is_decoding:
            last = np.cumsum([bool(row.samples) for row in rows]) - 1
            flight.from_row = [int(last[i]) for i, row in enumerate(rows) for _ in row.samples]
        if not is_plain:
            self._draw_fully(flight, plan, logits)
            return flight
        if not bucket:
            self._draw(flight, logits)
        self._fetch(flight)
        return flight

    def _seat(self, plan: StepPlan) -> None:
        for sequence_id in plan.ended:
            self._free_seats.append(self._seats.pop(sequence_id))
            self._tables.pop(sequence_id, None)
            self.sampler.end(sequence_id)
        for begun in plan.begun:
            self._seats[begun.sequence_id] = self._free_seats.pop()
            self.sampler.begin(begun)

    def _update_tables(self, rows: Sequence[Row]) -> None:
        """Send what is new of the block tables: a few entries a step, a whole table when it is."""
        places: list[int] = []
        blocks: list[int] = []
        for row in rows:
            known, version = self._tables.get(row.sequence_id, (0, -1))
            if version != row.table_version:
                known = 0
            count = len(row.block_ids)
            if known < count:
                base = self._seats[row.sequence_id] * self.attention.stride
                places.extend(range(base + known, base + count))
                blocks.extend(row.block_ids[known:count])
                self._tables[row.sequence_id] = (count, row.table_version)
        if places:
            both = torch.tensor([places, blocks], dtype=torch.int32)
            if self._is_cuda:
                both = both.pin_memory().to(self.kv.data.device, non_blocking=True)
            self.attention.update_tables(both[0].long(), both[1])

    def _fill(
        self, rows: Sequence[Row], counts: np.ndarray, starts: np.ndarray, seats: np.ndarray,
        width: int,
    ) -> None:  # fmt: skip
        """Lay out the step in the pinned buffer; rows up to `width` that are none write nothing."""
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
        seat_of[total:width] = self._nobody

    # -- the model ----------------------------------------------------------------------------

    def _forward(
        self, rows: int, classes: tuple[int, ...], merge: bool, causal: bool,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        given = self.inputs.section("token_ids", rows)
        last = self.last_tokens[self.inputs.section("seats", rows)]
        token_ids = torch.where(given >= 0, given, last.clamp(min=0))
        attention = StepAttention(self.attention, self.inputs, rows, classes, merge, causal)
        return self.model.forward(token_ids, attention, wanted)

    def _eager(
        self, rows: Sequence[Row], counts: np.ndarray, classes: tuple[int, ...], merge: bool
    ) -> torch.Tensor:
        """Logits of the rows that need them."""
        wanted: list[int] = []
        end = 0
        for row in rows:
            end += row.count
            if row.prompt_logprobs is not None:
                wanted.extend(range(end - row.count, end))
            elif row.samples:
                wanted.append(end - 1)
        causal = bool((counts > 1).any())
        hidden = self._forward(end, classes, merge, causal, self._indices(wanted))
        return self.model.head(hidden)

    def _decode(self, bucket: int, classes: tuple[int, ...], merge: bool) -> torch.Tensor:
        """A batch of decoding rows, drawn and all: the bucket's graph, captured when needed."""
        key = (bucket, classes, merge)
        if not self._is_cuda:
            return self._decode_eagerly(key)
        if key not in self._graphs:
            self._capture(key)
        return self._graphs.replay(key)

    def _decode_eagerly(self, key: Key) -> torch.Tensor:
        bucket, classes, merge = key
        logits = self.model.head(self._forward(bucket, classes, merge, causal=False))
        out = self._drawn[:bucket]
        self.sampler.draw(logits, self.inputs.parameters[:, :bucket], out)
        self.last_tokens[self.inputs.section("seats", bucket)] = out
        return logits

    def _capture(self, key: Key) -> None:
        bucket = key[0]
        torch.cuda.synchronize()
        kept = self.inputs.device.clone()
        self.inputs.section("slots", bucket).fill_(-1)  # a warm-up writes no KV
        self.inputs.section("seats", bucket).fill_(self._nobody)  # and nobody's token
        self._graphs.capture(key, lambda: self._decode_eagerly(key))
        self.inputs.device.copy_(kept)

    # -- tokens -------------------------------------------------------------------------------

    def _draw(self, flight: _Flight, logits: torch.Tensor) -> None:
        """By the kernel; the tokens stay on the device for the next step."""
        count = len(flight.drawing)
        if not count:
            return
        if len(logits) != count:
            logits = logits[self._indices(flight.from_row)]
        out = self._drawn[:count]
        self.sampler.draw(logits, self.inputs.parameters[:, :count], out)
        self.last_tokens[self._indices([self._seats[s] for s in flight.drawing])] = out

    def _fetch(self, flight: _Flight) -> None:
        """Send the drawn tokens on their way to the host."""
        count = len(flight.drawing)
        self._turn = (self._turn + 1) % RINGS
        flight.host_tokens = self._rings[self._turn]
        flight.host_tokens[:count].copy_(self._drawn[:count], non_blocking=True)
        if self._is_cuda:
            flight.arrived = torch.cuda.Event()
            flight.arrived.record()

    def _draw_fully(self, flight: _Flight, plan: StepPlan, logits: torch.Tensor) -> None:
        at, from_row = 0, []
        for row in plan.rows:
            if row.prompt_logprobs is not None:
                following = list((row.token_ids or ())[1:])
                following += [] if row.next_token_id is None else [row.next_token_id]
                known = logits[at : at + len(following)]
                flight.prompt_logprobs[row.sequence_id] = self.sampler.prompt_logprobs(
                    known, following, row.prompt_logprobs
                )
            at += row.count if row.prompt_logprobs is not None else bool(row.samples)
            from_row += [at - 1] * len(row.samples)
        flight.tokens = []
        if from_row:
            picked = logits[self._indices(from_row)]
            flight.tokens = self.sampler.draw_fully(picked, flight.drawing, plan.masks)
            drawn = self._indices([token.token_id for token in flight.tokens])
            self.last_tokens[self._indices([self._seats[s] for s in flight.drawing])] = drawn.int()

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        tensor = torch.tensor(values, dtype=torch.int64)
        if self._is_cuda:
            tensor = tensor.pin_memory().to(self.kv.data.device, non_blocking=True)
        return tensor


def _bucket(rows: int) -> int:
    """The smallest bucket that holds `rows`; 0 if none does."""
    return next((bucket for bucket in BUCKETS if bucket >= rows), 0)
