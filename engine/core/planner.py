"""The step planner: turns slices into one `StepPlan`, with the batch in prefix-tree order.

It lays out rows and groups, introduces sequences to the runner, and forks a prompt's samples when
the row that finishes the prompt is launched. It does not decide which sequences run, reads no clock
and sees no result. Only `engine.core.core` calls it.

Tables that share blocks share a leading run of them (a child's path contains its parent's). So
sorting tables as lists of block ids puts the rows of every tree node side by side.
"""

from __future__ import annotations

import struct
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from engine.cache import BlockTable, PrefixCache
from engine.drafts.drafter import Draft
from engine.plan import BegunSequence, Group, Mask, Row, StateCopy, StepPlan
from engine.scheduler.scheduler import Scheduler, Slice
from engine.scheduler.sequence import ActiveRequest, Sequence

WINDOWED: Final = -1
"""Stands for a table's version where a row reads the table through an attention window."""
LAST_KEY: Final = b"\xff" * 4
"""The order key of such a row: it sorts behind the keys of all tables."""


@dataclass(slots=True)
class InFlightStep:
    """A launched step that has not been collected."""

    step: int
    launched_at_s: float
    slices: list[Slice]
    """Those of its `rows`, in their order, then one of no tokens for each fork."""
    rows: int
    sampling: dict[int, Sequence] = field(default_factory=dict)
    """The sequences that sample a token, by id."""
    masks: dict[int, Mask] = field(default_factory=dict)
    """Of those under a grammar."""
    ends_of_prompts: list[Slice] = field(default_factory=list)
    """The slices after which samples part."""
    drafts: dict[int, Draft] = field(default_factory=dict)
    """Of the sequences that have some, by id."""
    guessed_s: float | None = None
    """Seconds that a small model guessed for it, where it was planned behind all others for the
    sake of drafts."""
    copy_targets: list[Sequence] = field(default_factory=list)
    """Sequences without a row whose pending copy runs with the step."""


class StepPlanner:
    """Makes plans, and keeps the last batch's order, which seldom changes between two steps."""

    def __init__(
        self,
        cache: PrefixCache,
        scheduler: Scheduler,
        add_sequence: Callable[[ActiveRequest], Sequence],
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._add_sequence = add_sequence
        self._batch: tuple[list[BlockTable], list[int]] = [], []  # tables, and their versions
        self._order: list[int] = []
        self._groups: tuple[Group, ...] = ()
        self._runs: dict[tuple[BlockTable, int, BlockTable, int], int] = {}

    def plan(
        self, step: int, slices: abc.Sequence[Slice], now_s: float
    ) -> tuple[StepPlan, InFlightStep]:
        """Return the step's plan, and the record that core keeps until the step is collected.

        Counts each slice as computed, and takes the pending copies and the ended sequences.
        O(rows), and O(rows * log blocks) when the batch or a table changed.
        """
        in_flight = InFlightStep(step, now_s, self._in_tree_order(slices), len(slices))
        begun: list[BegunSequence] = []
        rows = self._rows(in_flight, begun)
        copies = self._cache.take_copies()
        if copies:
            self._add_copy_targets(in_flight, {copy.dst for copy in copies})
        restores = [
            StateCopy(piece.sequence.sequence_id, self._cache.states.take_restores(piece.table))
            for piece in in_flight.slices[: in_flight.rows]
            if piece.table.restores
        ]
        keeps = [
            *self._scheduler.last_keeps,
            *(
                StateCopy(piece.sequence.sequence_id, piece.keeps)
                for piece in in_flight.slices
                if piece.keeps
            ),
        ]
        ended = tuple(self._scheduler.ended_ids)
        self._scheduler.ended_ids.clear()
        self._scheduler.last_keeps.clear()
        plan = StepPlan(
            step=step,
            rows=tuple(rows),
            groups=self._groups,
            begun=tuple(begun),
            ended=ended,
            copies=copies,
            masks=in_flight.masks,
            restores=tuple(restores),
            keeps=tuple(keeps),
        )
        return plan, in_flight

    def fork(self, in_flight: InFlightStep) -> None:
        """Fork the samples of each prompt that this step finishes: each gets a table over its
        blocks.
        """
        for piece in in_flight.ends_of_prompts:
            forks = piece.sequence.parent.sequences[1:]
            for fork in forks:
                fork.table = self._cache.fork(piece.table)
                fork.computed = fork.computed_before = piece.sequence.computed
                in_flight.slices.append(Slice(fork, fork.table, fork.computed, 0))
            self._scheduler.fork(piece.sequence, forks)

    # -- rows ---------------------------------------------------------------------------------

    def _rows(self, in_flight: InFlightStep, begun: list[BegunSequence]) -> list[Row]:
        """Return the rows of the step's slices, and count these as computed.

        The slice that ends a prompt of several samples adds their sequences.
        """
        rows, sampling, masks = list[Row](), in_flight.sampling, in_flight.masks
        size = self._cache.block_size
        for piece in in_flight.slices:
            sequence, table, start = piece.sequence, piece.table, piece.start
            silent, tokens, end = piece.silent, sequence.tokens, start + piece.count
            sequence_id = sequence.sequence_id
            known = len(tokens)
            if not sequence.is_known_to_runner:
                begun.append(_introduce(sequence))
            samples: tuple[int, ...] = ()
            if end == known + sequence.in_flight and sequence.has_output:
                samples = (sequence_id,)
                sequence.in_flight += 1
                sampling[sequence_id] = sequence
                if sequence.mask is not None:
                    masks[sequence_id] = sequence.mask
            sequence.computed, sequence.state_lag = end, 0
            logprobs = next_token_id = window = None
            if start < sequence.prompt_tokens and not sequence.parent.is_forked:
                logprobs = sequence.parent.request.prompt_logprobs
                if logprobs is not None and end < sequence.prompt_tokens:
                    next_token_id = tokens[end]
                if samples:
                    in_flight.ends_of_prompts.append(piece)
                    samples += self._add_samples(sequence.parent, in_flight, begun)
            if table.attention is not None and _reads_window(piece, size):
                window = table.attention
            token_ids = tokens[start - silent : end] if end <= known else None
            count = piece.count + silent
            if token_ids is not None and piece.drafts:
                token_ids += piece.drafts
                count += len(piece.drafts)
            rows.append(
                Row(
                    sequence_id, start - silent, count, table.blocks, table.version,
                    token_ids, samples, logprobs, next_token_id, table.beside, window, silent,
                    len(piece.drafts), piece.draft_masks,
                )
            )  # fmt: skip
        return rows

    def _add_samples(
        self, active: ActiveRequest, in_flight: InFlightStep, begun: list[BegunSequence]
    ) -> tuple[int, ...]:
        """Add the sequences of a request's further samples, each of which samples a token after
        the prompt's last row; return their ids.
        """
        added = [self._add_sequence(active) for _ in range(1, active.request.samples)]
        for sequence in added:
            begun.append(_introduce(sequence))
            sequence.in_flight += 1
            in_flight.sampling[sequence.sequence_id] = sequence
            if sequence.mask is not None:
                in_flight.masks[sequence.sequence_id] = sequence.mask
        return tuple(sequence.sequence_id for sequence in added)

    def _add_copy_targets(self, in_flight: InFlightStep, copied: set[int]) -> None:
        """Note the sequences without a row into whose blocks the step copies."""
        present = {piece.sequence.sequence_id for piece in in_flight.slices}
        for sequence in self._scheduler.running:
            table = sequence.table
            if table is None or sequence.sequence_id in present:
                continue
            if not copied.isdisjoint(table.blocks):
                in_flight.copy_targets.append(sequence)

    # -- order --------------------------------------------------------------------------------

    def _in_tree_order(self, slices: abc.Sequence[Slice]) -> list[Slice]:
        """Return the slices in tree order, and update the groups.

        Both change only with the tables of the batch and their versions: appended blocks are
        private to a sequence. Rows that read through a window come last and share no run.
        """
        size = self._cache.block_size
        tables = [piece.table for piece in slices]
        versions = [table.version for table in tables]
        for index, table in enumerate(tables):
            if table.attention is not None and _reads_window(slices[index], size):
                versions[index] = WINDOWED
        batch = tables, versions
        if batch != self._batch:
            self._batch = batch
            keys = [
                LAST_KEY if version == WINDOWED else _key_of(piece.sequence, piece.table)
                for piece, version in zip(slices, versions, strict=True)
            ]
            self._order = sorted(range(len(keys)), key=keys.__getitem__)
            self._groups = find_groups(self._shared_runs(slices, versions, keys))
        return [slices[i] for i in self._order]

    def _shared_runs(
        self, slices: abc.Sequence[Slice], versions: list[int], keys: list[bytes]
    ) -> list[int]:
        """Return how many whole blocks each slice shares with the next one in order.

        `keys`: the order keys. Most neighbours were neighbours in the last batch, and what two
        tables share changes only with a version.
        """
        size, known, runs = self._cache.block_size, self._runs, list[int]()
        self._runs = {}
        for i, j in pairwise(self._order):
            pair = slices[i].table, versions[i], slices[j].table, versions[j]
            run = known.get(pair)
            if run is None:
                first, second = slices[i], slices[j]
                whole = min(first.start - first.silent, second.start - second.silent) // size
                is_windowed = versions[j] == WINDOWED  # where row i is, row j behind it is too
                run = 0 if is_windowed else shared_blocks(keys[i], keys[j], whole)
            self._runs[pair] = run
            runs.append(run)
        return runs


def _reads_window(piece: Slice, block_size: int) -> bool:
    """Return whether a token of a slice reads less than all tokens before it."""
    window = piece.table.attention
    end = piece.start + piece.count + len(piece.drafts)
    return window is not None and end > window.shared_blocks * block_size


def _key_of(sequence: Sequence, table: BlockTable) -> bytes:
    """Return the order key of a sequence's table: rebuilt when entries changed, extended when some
    were added.
    """
    known = len(sequence.order_key) // 4
    if sequence.order_version != table.version or known > len(table.blocks):
        sequence.order_version, sequence.order_key, known = table.version, b"", 0
    if known < len(table.blocks):
        sequence.order_key += order_key(table.blocks[known:])
    return sequence.order_key


def _introduce(sequence: Sequence) -> BegunSequence:
    sequence.is_known_to_runner = True
    return BegunSequence(
        sequence_id=sequence.sequence_id,
        sampling=sequence.parent.request.sampling,
        token_ids=sequence.tokens,
        prompt_tokens=sequence.prompt_tokens,
        sample_index=sequence.index,
    )


def order_key(block_ids: abc.Sequence[int]) -> bytes:
    """Return bytes that compare like the list of block ids: big-endian, so that memcmp does the
    work.

    O(blocks); comparing the keys of two tables of 512 blocks costs about 50 ns.
    """
    return struct.pack(f">{len(block_ids)}I", *block_ids)


def shared_blocks(a: bytes, b: bytes, limit: int) -> int:
    """Return how many leading blocks two order keys share, at most `limit`. O(log limit)."""
    if a[: 4 * limit] == b[: 4 * limit]:
        return min(limit, len(a) // 4, len(b) // 4)
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        if a[4 * low : 4 * middle] == b[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle
    return low


def find_groups(runs: abc.Sequence[int]) -> tuple[Group, ...]:
    """Return the groups of rows that are in depth-first order, shallower before deeper.

    `runs[i]`: how many leading blocks rows i and i + 1 share, all of them whole before the start of
    both. A group is a run of at least two rows over a run of at least one block: every level of the
    tree where rows part. O(rows).
    """
    groups: list[tuple[int, int, int, int]] = []
    open_nodes: list[tuple[int, int]] = []  # (first row, depth in blocks), deeper last
    for first, shared in enumerate((*runs, 0)):
        row = first + 1
        while open_nodes and open_nodes[-1][1] > shared:
            first, depth = open_nodes.pop()
            above = max(shared, open_nodes[-1][1] if open_nodes else 0)
            groups.append((first, row, above, depth))
        if shared and (not open_nodes or open_nodes[-1][1] < shared):
            open_nodes.append((first, shared))
    groups.sort(key=lambda group: (group[2], group[0]))
    return tuple(Group(*group) for group in groups)
