"""The planner: slices in, one `StepPlan` out, with the batch in the prefix tree's order.

It lays out rows and groups, introduces sequences to the runner, and forks a prompt's samples when
the row that finishes the prompt is launched. It decides nothing about who runs, reads no clock and
sees no result. Only `engine.core.core` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.cache import BlockTable, PrefixCache
from engine.core.tree_order import find_groups, order_key
from engine.plan import BegunSequence, Group, Row, StepPlan
from engine.scheduler.scheduler import Scheduler, Slice
from engine.scheduler.sequence import ActiveRequest
from engine.scheduler.sequence import Sequence as Running

Signature = list[tuple[BlockTable, int]]


@dataclass(slots=True)
class InFlightStep:
    """A launched step: its slices with the tables they were planned on, and who draws a token.

    `bystanders` have no row in it and yet a copy that runs with it.
    """

    step: int
    launched_at_s: float
    slices: list[tuple[Slice, BlockTable]] = field(default_factory=list)
    drawing: dict[int, Running] = field(default_factory=dict)
    bystanders: list[Running] = field(default_factory=list)


class StepPlanner:
    """Makes plans; remembers the last batch's order, which seldom changes between two steps."""

    def __init__(
        self,
        cache: PrefixCache,
        scheduler: Scheduler,
        add_sequence: Callable[[ActiveRequest], Running],
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._add_sequence = add_sequence
        self._signature: Signature = []
        self._order: list[int] = []
        self._groups: tuple[Group, ...] = ()

    def plan(
        self, step: int, slices: Sequence[Slice], now_s: float
    ) -> tuple[StepPlan, InFlightStep]:
        """The step's plan, and what core must remember of it until it is collected.

        From here on each sequence counts its slice as computed, and takes the pending copies and
        the ended sequences with it. O(rows), and O(rows * log blocks) when batch or tables changed.
        """
        flight = InFlightStep(step, now_s)
        begun: list[BegunSequence] = []
        rows = [self._row(piece, flight, begun) for piece in self._in_tree_order(slices)]
        copies = self._cache.take_copies()
        if copies:
            self._note_bystanders(flight, {copy.dst for copy in copies})
        ended = tuple(self._scheduler.runner_forgets)
        self._scheduler.runner_forgets.clear()
        masks = {i: s.mask for i, s in flight.drawing.items() if s.mask is not None}
        plan = StepPlan(
            step=step,
            rows=tuple(rows),
            groups=self._groups,
            begun=tuple(begun),
            ended=ended,
            copies=copies,
            masks=masks,
        )
        return plan, flight

    def fork(self, flight: InFlightStep) -> None:
        """Samples of a prompt that is now being finished: each takes a table over its blocks."""
        for piece, table in list(flight.slices):
            work = piece.sequence.work
            if work.is_forked or piece.sequence.sequence_id not in flight.drawing:
                continue
            forks = work.sequences[1:]
            for fork in forks:
                fork.table = self._cache.fork(table)
                fork.computed = fork.computed_before = piece.sequence.computed
                flight.slices.append((Slice(fork, fork.computed, 0), fork.table))
            self._scheduler.fork(piece.sequence, forks)

    # -- rows ---------------------------------------------------------------------------------

    def _row(self, piece: Slice, flight: InFlightStep, begun: list[BegunSequence]) -> Row:
        """The plan's row for a slice; the sequence is taken to have computed it from here on."""
        sequence, end = piece.sequence, piece.start + piece.count
        work, table, tokens = sequence.work, sequence.table, sequence.tokens
        request = work.request
        assert table is not None, "a slice belongs to a running sequence"
        flight.slices.append((piece, table))
        if not sequence.is_known:
            begun.append(_introduce(sequence))
        drawing: list[Running] = []
        if end == len(tokens) + sequence.in_flight and request.max_tokens > 0:
            drawing.append(sequence)
            if not work.is_forked and request.samples > 1:
                drawing += [self._add_sequence(work) for _ in range(1, request.samples)]
                begun.extend(_introduce(fork) for fork in drawing[1:])
        wants_logprobs = request.prompt_logprobs is not None and not work.is_forked
        in_prompt = wants_logprobs and piece.start < len(request.tokens)
        sequence.computed = end
        for drawer in drawing:
            drawer.in_flight += 1
            flight.drawing[drawer.sequence_id] = drawer
        return Row(
            sequence_id=sequence.sequence_id,
            start=piece.start,
            count=piece.count,
            block_ids=table.blocks,
            table_version=table.version,
            token_ids=tokens[piece.start : end] if end <= len(tokens) else None,
            samples=tuple(drawer.sequence_id for drawer in drawing),
            prompt_logprobs=request.prompt_logprobs if in_prompt else None,
            next_token_id=tokens[end] if in_prompt and end < len(request.tokens) else None,
        )

    def _note_bystanders(self, flight: InFlightStep, copied: set[int]) -> None:
        present = {piece.sequence.sequence_id for piece, _ in flight.slices}
        for sequence in self._scheduler.running:
            table = sequence.table
            if sequence.sequence_id in present or table is None:
                continue
            if not copied.isdisjoint(table.blocks):
                flight.bystanders.append(sequence)

    # -- order --------------------------------------------------------------------------------

    def _in_tree_order(self, slices: Sequence[Slice]) -> list[Slice]:
        """Order and groups change only with the batch or a table; appended blocks are private."""
        signature: Signature = []
        for piece in slices:
            table = piece.sequence.table
            assert table is not None, "a slice belongs to a running sequence"
            signature.append((table, table.version))
        if signature != self._signature:
            self._signature = signature
            keys = [
                _order_key(piece.sequence, table)
                for piece, (table, _) in zip(slices, signature, strict=True)
            ]
            self._order = sorted(range(len(keys)), key=keys.__getitem__)
            size = self._cache.block_size
            full = [min(slices[i].start // size, len(keys[i]) // 4) for i in self._order]
            self._groups = find_groups([keys[i] for i in self._order], full)
        return [slices[i] for i in self._order]


def _order_key(sequence: Running, table: BlockTable) -> bytes:
    """The table's order key, made anew when entries changed, extended when some were added."""
    known = len(sequence.order_key) // 4
    if sequence.order_version != table.version or known > len(table.blocks):
        sequence.order_version, sequence.order_key, known = table.version, b"", 0
    if known < len(table.blocks):
        sequence.order_key += order_key(table.blocks[known:])
    return sequence.order_key


def _introduce(sequence: Running) -> BegunSequence:
    sequence.is_known = True
    return BegunSequence(
        sequence_id=sequence.sequence_id,
        sampling=sequence.work.request.sampling,
        token_ids=sequence.tokens,
        prompt_tokens=len(sequence.work.request.tokens),
        sample_index=sequence.index,
    )
