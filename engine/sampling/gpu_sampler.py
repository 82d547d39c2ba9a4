"""The GPU sampler: all sampling of a batch by kernels, without waiting for the GPU.

Each live sequence has a slot: its parameters on the host, and on the GPU its token counts and
biases. A step's draws are a table with one row each, which travels with the step's other inputs;
masks follow in a copy of their own. Counts are updated by the kernel that draws, so the next step
can be launched before the host has seen the token. Tokens and logprobs come back in one buffer.

`engine.runner.gpu_runner` calls, in this order and once per step,

    draws = sampler.fill(host_table, drawing, masks, source_rows)   before the inputs are sent
    sampler.draw(logits, table, out)                                inside a graph or not
    sampler.draw_extras(draws, logits, table, out)                  if `draws.has_extras`
    sampler.copy_results(draws, out, host)                          on the same stream
    tokens = sampler.results(draws, host)                           once the copy is complete
    sampler.accept(sequence, drawn, kept)                           of sequences with drafts

so one graph serves steps with and without extras: rows with a mask, a bias or penalties are left
out by `draw`, and reports come after it. A sequence with drafts has several rows, each as if the
drafts before it had been drawn. Those with penalties are drawn one after another, so that each
counts the tokens before it; what is drawn behind a wrong draft counts no more once it is known. The
extra launches are queued while the GPU runs the
model, which costs the host some tens of microseconds and the GPU no wait.
It knows no graph, seat or step. `engine.sampling.sampler` is the specification.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine.api import LOGIT_BIAS_MAX, SampledToken
from engine.plan import BegunSequence, Mask
from engine.sampling.filters import has_filters
from engine.sampling.logprobs import sampled_token
from engine.sampling.sampler import inverse_temperature
from kernels.gpu import sampling as kernels
from kernels.gpu.sampling import COLUMNS, REPORT_COLUMNS, TOP

Int32 = npt.NDArray[np.int32]

DRAW_COLUMNS: Final = COLUMNS
"""int32 columns of the draw table."""

ADJUSTED_ROWS: Final = 128
"""Rows adjusted at once; more take further launches."""

COUNT_MAX: Final = 16_382
"""Output counts beyond this are taken to be this."""


@dataclass(slots=True)
class Draws:
    """The draws of one step: their sequences, and which of them report logprobs."""

    drawing: Sequence[int]
    adjusted: int = 0
    """Numbers given to rows that have a mask, a bias or penalties; some are left out."""
    reporting: list[tuple[int, int]] = field(default_factory=list)
    """Per report, the index of its draw and the alternatives asked."""

    @property
    def has_extras(self) -> bool:
        """Whether a row needs more than `GpuSampler.draw`."""
        return bool(self.adjusted or self.reporting)


class SamplerMemory:
    """What a sampler has on one GPU: for each token of the vocabulary 2 bytes per slot, an eighth
    per row, and 4 for each of 128 adjusted rows."""

    def __init__(self, vocab_size: int, device: torch.device, slots: int, rows: int) -> None:
        def on_device(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.masks = on_device(rows, -(-vocab_size // 32))
        self.masks_copied = torch.cuda.Event() if device.type == "cuda" else None
        self.counts = on_device(slots, vocab_size, dtype=torch.int16)
        self.bias_ids = on_device(slots, LOGIT_BIAS_MAX)
        self.bias_values = on_device(slots, LOGIT_BIAS_MAX, dtype=torch.float32)
        at_once = min(rows, ADJUSTED_ROWS)
        self.adjusted = on_device(at_once, vocab_size, dtype=torch.float32)
        self.alive = on_device(at_once, kernels.adjust_splits(vocab_size))
        self.candidates = on_device(rows, kernels.CANDIDATES)
        splits = kernels.report_splits(vocab_size)
        self.best = on_device(rows, splits, TOP, dtype=torch.int64)
        self.sums = on_device(rows, splits, 2, dtype=torch.float32)
        self.reports = on_device(rows, REPORT_COLUMNS)


class GpuSampler:
    """Samples for the sequences begun here. Not thread-safe.

    `slots`: sequences live at once. `rows`: most draws of a step, padding included. GPU memory:
    150 MB for 288 slots and 256 rows of 128,256 tokens (`SamplerMemory`). With several GPUs, lanes,
    each has all of it: from the same logits all draw the same tokens.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        *,
        slots: int,
        rows: int,
        rng: random.Random | None = None,
        beside: Sequence[torch.device] = (),
    ) -> None:
        """`rng` gives a seed to each sequence that has none; by default the system's entropy.
        `beside`: the devices of lanes behind the first."""
        self._vocab_size = vocab_size
        self._is_cuda = device.type == "cuda"
        self._rng = rng or random.SystemRandom()
        self._slots: dict[int, int] = {}
        self._free_slots = list(range(slots - 1, -1, -1))
        self._parameters = np.zeros((slots, COLUMNS), np.int32)
        self._report_tops: list[int | None] = [None] * slots
        self._extra: set[int] = set()
        """Slots whose rows need more than `draw`, masks apart."""
        self._rows = rows
        words = -(-vocab_size // 32)
        self._host_masks = torch.zeros((rows, words), dtype=torch.int32, pin_memory=self._is_cuda)
        self._at_once = min(rows, ADJUSTED_ROWS)
        self._lanes = [SamplerMemory(vocab_size, one, slots, rows) for one in (device, *beside)]

    # -- sequences ----------------------------------------------------------------------------

    def begin(self, begun: BegunSequence) -> None:
        """Add a sequence with its history. O(1), or O(history + vocabulary) with penalties.

        Starts copies to the GPU for biases and penalties, and waits for none. Replaces the state of
        a sequence begun before.
        """
        sampling = begun.sampling
        slot = self._slots.get(begun.sequence_id)
        if slot is None:
            slot = self._slots[begun.sequence_id] = self._free_slots.pop()
        seed = sampling.seed
        if seed is None:
            seed = self._rng.getrandbits(64)
        row = self._parameters[slot]
        row[:] = _parameters(begun, seed, slot, self._vocab_size)
        self._report_tops[slot] = sampling.logprobs
        is_extra = row[kernels.FLAGS.value] & (kernels.ADJUSTED.value | kernels.REPORTS.value)
        (self._extra.add if is_extra else self._extra.discard)(slot)
        if row[kernels.FLAGS.value] & kernels.PENALISED.value:
            counts = _counts(begun, self._vocab_size)
            self._send(counts, [own.counts[slot] for own in self._lanes])
        if sampling.logit_bias:
            size = len(sampling.logit_bias)
            ids = np.fromiter(sampling.logit_bias, np.int32, size)
            values = np.fromiter(sampling.logit_bias.values(), np.float32, size)
            self._send(ids, [own.bias_ids[slot, :size] for own in self._lanes])
            self._send(values, [own.bias_values[slot, :size] for own in self._lanes])

    def end(self, sequence_id: int) -> None:
        """Remove a sequence; an unknown one is ignored."""
        slot = self._slots.pop(sequence_id, None)
        if slot is not None:
            self._free_slots.append(slot)
            self._extra.discard(slot)

    def _send(self, values: npt.NDArray[np.generic], targets: Sequence[torch.Tensor]) -> None:
        source = torch.from_numpy(values)
        if self._is_cuda:
            source = source.pin_memory()
        for target in targets:
            target.copy_(source, non_blocking=True)

    # -- a step -------------------------------------------------------------------------------

    def fill(
        self,
        host_table: Int32,
        drawing: Sequence[int],
        masks: Mapping[int, Mask] | None = None,
        source_rows: Sequence[int] | Int32 | None = None,
        offsets: Int32 | None = None,
        draft_masks: Mapping[int, Sequence[Mask]] | None = None,
    ) -> Draws:
        """Write the draw table of a step: row i draws for `drawing[i]`.

        host_table [rows, COLUMNS] int32, written whole: rows without a draw become inactive.
        `source_rows`: the row of logits of each draw, by default its own index. `offsets`: how many
        drafts of its sequence precede each draw, None where there are no drafts; `draft_masks`: the
        masks behind them, by sequence. Advances each sequence's position by one, and starts the
        copy of masks.
        """
        count = len(drawing)
        slots = np.fromiter(map(self._slots.__getitem__, drawing), np.int64, count)
        table = host_table[:count]
        np.take(self._parameters, slots, axis=0, out=table)
        host_table[count:] = 0
        self._parameters[slots, kernels.POSITION.value] += 1
        table[:, kernels.SOURCE.value] = np.arange(count) if source_rows is None else source_rows
        if offsets is not None:
            table[:, kernels.POSITION.value] += offsets
        if not masks and not self._extra:
            return Draws(drawing)
        given = [masks.get(sequence_id) for sequence_id in drawing] if masks else []
        if offsets is not None:
            for row in np.flatnonzero(offsets).tolist() if masks else ():
                behind = (draft_masks or {}).get(drawing[row])
                given[row] = behind[offsets[row] - 1] if behind else None
        if masks:
            self._fill_masks(table, given)
        flags = table[:, kernels.FLAGS.value]
        numbers = self._number(flags, offsets)
        table[:, kernels.ADJUSTED_ROW.value] = numbers
        reporting = np.flatnonzero(flags & kernels.REPORTS.value)
        table[reporting, kernels.REPORT_ROW.value] = np.arange(len(reporting))
        tops = [(i, self._report_tops[slots[i]] or 0) for i in reporting.tolist()]
        return Draws(drawing, int(numbers.max(initial=-1)) + 1, tops)

    def _number(self, flags: Int32, offsets: Int32 | None) -> Int32:
        """Return the number of each row that is adjusted, -1 for the others [R].

        Rows that are drawn at once have numbers of one multiple of the most that are: those with
        penalties behind drafts come after the rows on which their counts depend.
        """
        numbers = np.full(len(flags), -1, np.int32)
        is_adjusted = (flags & kernels.ADJUSTED.value) != 0
        turns = np.zeros(len(flags), np.int32)
        if offsets is not None:
            turns = np.where(flags & kernels.PENALISED.value, offsets, 0)
        end = 0
        for turn in np.unique(turns[is_adjusted]).tolist():
            rows = np.flatnonzero(is_adjusted & (turns == turn))
            start = -(-end // self._at_once) * self._at_once
            numbers[rows] = start + np.arange(len(rows), dtype=np.int32)
            end = start + len(rows)
        return numbers

    def _fill_masks(self, table: Int32, given: Sequence[Mask | None]) -> None:
        for own in self._lanes:
            if own.masks_copied is not None:
                own.masks_copied.synchronize()
        host, used = self._host_masks.numpy(), 0
        for row, mask in enumerate(given):
            if mask is not None:
                host[used] = mask
                table[row, kernels.FLAGS.value] |= kernels.MASKED.value
                table[row, kernels.MASK_ROW.value] = used
                used += 1
        for own in self._lanes:
            own.masks[:used].copy_(self._host_masks[:used], non_blocking=True)
            if own.masks_copied is not None:
                own.masks_copied.record(torch.cuda.current_stream(own.masks.device))

    def draw(
        self, logits: torch.Tensor, table: torch.Tensor, out: torch.Tensor, lane: int = 0
    ) -> None:
        """Write a token to `out` [R] int32 for each active row without a mask, bias or penalties.

        logits [S, vocab] fp32 or bf16, not written; table [R, COLUMNS] int32 on the device, as
        `fill` made it. A row without a candidate gives -1, as in `Sampler.sample`. One launch, for
        which a CUDA graph may hold R, the addresses and nothing else. All on the device of `lane`.
        """
        kernels.draw(logits, table, self._lanes[lane].candidates, out)

    def draw_extras(
        self, draws: Draws, logits: torch.Tensor, table: torch.Tensor, out: torch.Tensor,
        lane: int = 0,
    ) -> None:  # fmt: skip
        """Write the tokens of the other rows, and the reports. Arguments as of `draw`, after it."""
        own = self._lanes[lane]
        for first in range(0, draws.adjusted, len(own.adjusted)):
            kernels.adjust(
                logits, table, own.masks, own.counts, own.bias_ids, own.bias_values, own.adjusted,
                own.alive, first,
            )  # fmt: skip
            kernels.draw_adjusted(
                own.adjusted, table, own.alive, own.candidates, own.counts, out, first
            )
        if draws.reporting:
            kernels.report(logits, table, own.best, own.sums, out, own.reports)

    def host_results(self) -> torch.Tensor:
        """Return a pinned host buffer for the results of a step: tokens, then reports."""
        size = self._rows * (1 + REPORT_COLUMNS)
        return torch.zeros(size, dtype=torch.int32, pin_memory=self._is_cuda)

    def copy_results(self, draws: Draws, out: torch.Tensor, host: torch.Tensor) -> None:
        """Start copying the first lane's tokens, and the reports if there are any, to the host."""
        count, reports = len(draws.drawing), len(draws.reporting)
        host[:count].copy_(out[:count], non_blocking=True)
        if reports:
            target = host[self._rows :].view(self._rows, REPORT_COLUMNS)
            target[:reports].copy_(self._lanes[0].reports[:reports], non_blocking=True)

    def results(self, draws: Draws, host: torch.Tensor) -> list[SampledToken]:
        """Return the tokens that `copy_results` has copied, one per draw."""
        drawn = host.numpy()[: len(draws.drawing)].tolist()
        tokens = [SampledToken(token_id) for token_id in drawn]
        if draws.reporting:
            reported = [(drawn[i], top) for i, top in draws.reporting]
            reports = host[self._rows :].view(self._rows, REPORT_COLUMNS)
            entries = _entries(reported, reports, self._vocab_size)
            for (i, _), entry in zip(draws.reporting, entries, strict=True):
                if entry.token_id >= 0:
                    tokens[i] = entry
        return tokens

    def accept(self, sequence_id: int, drawn: Sequence[int], kept: int) -> None:
        """Keep the first `kept` of the tokens that a sequence drew in the last step, at the
        positions of its drafts and the one before them.

        The next draw is at the position behind. Takes the others out of its counts, which the next
        step reads: it must not be launched yet. O(others).
        """
        slot = self._slots[sequence_id]
        row = self._parameters[slot]
        row[kernels.POSITION.value] += kept - 1
        others = [token for token in drawn[kept:] if token >= 0]
        if others and row[kernels.FLAGS.value] & kernels.PENALISED.value:
            for own in self._lanes:
                device, counts = own.counts.device, own.counts[slot]
                places = torch.tensor(others, dtype=torch.int64, device=device)
                fewer = torch.full((len(others),), -2, dtype=counts.dtype, device=device)
                counts.index_put_((places,), fewer, accumulate=True)

    def prompt_logprobs(
        self, logits: torch.Tensor, next_token_ids: Sequence[int], top: int
    ) -> tuple[SampledToken, ...]:
        """Return logprobs of known tokens: of `next_token_ids[i]` under row i.

        logits: [rows, vocab] of the first lane, not written. `top`: alternatives to report. Waits
        for the GPU.
        """
        entries: list[SampledToken] = []
        own = self._lanes[0]
        for start in range(0, len(next_token_ids), self._rows):
            known = next_token_ids[start : start + self._rows]
            table = np.zeros((len(known), COLUMNS), np.int32)
            table[:, kernels.FLAGS.value] = kernels.REPORTS.value
            table[:, kernels.SOURCE.value] = start + np.arange(len(known))
            table[:, kernels.REPORT_ROW.value] = np.arange(len(known))
            device = own.reports.device
            kernels.report(
                logits, torch.from_numpy(table).to(device), own.best, own.sums,
                torch.tensor(known, dtype=torch.int32, device=device), own.reports,
            )  # fmt: skip
            reports = own.reports[: len(known)].cpu()
            entries += _entries([(token_id, top) for token_id in known], reports, self._vocab_size)
        return tuple(entries)


def _entries(
    reported: Sequence[tuple[int, int]], reports: torch.Tensor, vocab_size: int
) -> list[SampledToken]:
    """Return the tokens of some reports, each given by its id and the alternatives asked.

    reports: [rows, REPORT_COLUMNS] int32 on the host.
    """
    table = reports[: len(reported)].numpy()
    known = min(TOP, vocab_size)
    logprobs = table[:, : 1 + known].view(np.float32).tolist()
    ids = table[:, 1 + TOP : 1 + TOP + known].tolist()
    return [
        sampled_token(token_id, values[0], values[1:], likely, top)
        for (token_id, top), values, likely in zip(reported, logprobs, ids, strict=True)
    ]


def _parameters(begun: BegunSequence, seed: int, slot: int, vocab_size: int) -> Int32:
    """Return a sequence's row of the draw table, at its next output position."""
    sampling = begun.sampling
    row = np.zeros(COLUMNS, np.int32)
    flags = kernels.ACTIVE.value
    if sampling.temperature > 0:
        flags |= kernels.DRAWS.value
    if has_filters(sampling, vocab_size):
        flags |= kernels.FILTERS.value
    penalties = (
        sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
    )  # fmt: skip
    if penalties != (1, 0, 0):
        flags |= kernels.PENALISED.value
    if sampling.logit_bias:
        flags |= kernels.BIASED.value
    if sampling.logprobs is not None:
        flags |= kernels.REPORTS.value
    row[kernels.FLAGS.value] = flags
    row[kernels.SLOT.value] = slot
    row[kernels.POSITION.value] = len(begun.token_ids) - begun.prompt_tokens
    floats = row.view(np.float32)
    floats[kernels.INVERSE_TEMPERATURE.value] = inverse_temperature(sampling.temperature)
    row[kernels.TOP_K.value] = min(sampling.top_k, vocab_size)
    low = kernels.TOP_P_LOW.value
    row[low : low + 2] = np.array([sampling.top_p], np.float64).view(np.int32)
    row[kernels.FLOOR_KEY.value] = _floor_key(sampling.min_p)
    low = kernels.SEED_LOW.value
    row[low : low + 2] = np.array([seed % 2**64], np.uint64).view(np.int32)
    row[kernels.SAMPLE_INDEX.value] = begun.sample_index
    low = kernels.REPETITION.value
    floats[low : low + 3] = penalties
    row[kernels.BIAS_COUNT.value] = len(sampling.logit_bias)
    return row


def _floor_key(min_p: float) -> int:
    """Return the highest key that min-p keeps: the bits of the distance from the best, in nats."""
    if min_p <= 0:
        return int(kernels.KEY_FINITE.value)
    distance = max(0.0, -math.log(min_p))
    nearest = np.float32(distance)
    if float(nearest) > distance:
        nearest = np.nextafter(nearest, np.float32(0))
    return int(nearest.view(np.int32))


def _counts(begun: BegunSequence, vocab_size: int) -> npt.NDArray[np.int16]:
    """Return a sequence's token counts: bit 0 is set where the prompt has the token, above it is
    the count of the output."""
    token_ids = np.fromiter(begun.token_ids, np.int64, len(begun.token_ids))
    counts = np.zeros(vocab_size, np.int16)
    outputs = token_ids[begun.prompt_tokens :]
    if len(outputs):
        times = np.bincount(outputs, minlength=vocab_size)
        counts[:] = np.minimum(times, COUNT_MAX) << 1
    counts[token_ids[: begun.prompt_tokens]] |= 1
    return counts
