"""Places of sequences' states on a device that needs no fixed addresses: memory that grows with the
sequences at once, and the copies that plans ask for.

`sequence_states` and `cpu_states` compute over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from engine.model_store import Architecture
from engine.plan import StateCopy, StepPlan
from engine.states.layout import StateLayout

SEQUENCES_AT_START = 8


class StateBlocks:
    """The blocks of a pool that a state was copied to, until they are cleared."""

    def __init__(self, pool: torch.Tensor | None) -> None:
        self._pool = pool
        self._held: set[int] = set()

    def note(self, blocks: Iterable[int]) -> None:
        """Note that a state was copied to these blocks."""
        self._held.update(blocks)

    def clear(self, blocks: Iterable[int]) -> None:
        """Zero those of the blocks, which get KV next, that hold a state: attention reads slots
        that it masks, and a state's bits may be no number there. O(blocks) while any holds one."""
        if self._held and (found := self._held.intersection(blocks)):
            assert self._pool is not None, "a state was copied to it"
            self._held -= found
            index = torch.tensor(sorted(found), dtype=torch.int64)
            if self._pool.is_cuda:
                index = index.pin_memory().to(self._pool.device, non_blocking=True)
            self._pool.index_fill_(0, index, 0)


class StatePlaces:
    """The states of all sequences that a runner knows, as bytes, which `layout` lays out.

    `data`: [places, bytes]. `pool`: the KV blocks as bytes [B, block bytes], to and from which
    states are copied; None for a model that keeps none.
    """

    def __init__(
        self, config: Architecture, dtype: torch.dtype, device: torch.device,
        pool: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.layout = StateLayout(config, dtype)
        self._pool = pool
        self.data = torch.zeros(
            SEQUENCES_AT_START, self.layout.bytes, dtype=torch.uint8, device=device
        )
        self._free = list(range(SEQUENCES_AT_START))
        self._places: dict[int, int] = {}
        self._held = StateBlocks(pool)

    @property
    def places(self) -> int:
        """Sequences for which there is memory."""
        return len(self.data)

    def begin(self, plan: StepPlan) -> list[int]:
        """Return the place of each row's sequence. Sequences begin from zeros, or from restored
        states. O(rows)."""
        for copy in plan.keeps:
            if copy.sequence_id in plan.ended:
                self._keep(copy)
        for sequence_id in plan.ended:
            if (place := self._places.pop(sequence_id, None)) is not None:
                self._free.append(place)
        for begun in plan.begun:
            self.data[self._place(begun.sequence_id)] = 0
        for copy in plan.restores:
            self._restore(copy)
        return [self._place(row.sequence_id) for row in plan.rows]

    def clear(self, blocks: Iterable[int]) -> None:
        """See `StateBlocks.clear`. Call it behind `begin`, before the plan's copies."""
        self._held.clear(blocks)

    def end(self, plan: StepPlan) -> None:
        """Keep what the plan keeps after the rows, and give the states of rows to the sequences
        that part from them.
        """
        for copy in plan.keeps:
            if copy.sequence_id not in plan.ended:
                self._keep(copy)
        for row in plan.rows:
            for sample in row.samples:
                if sample != row.sequence_id:
                    to = self._place(sample)  # may move all of the memory
                    self.data[to] = self.data[self._places[row.sequence_id]]

    def _keep(self, copy: StateCopy) -> None:
        """Copy a sequence's states to blocks."""
        pool, data = self._pool, self.data[self._places[copy.sequence_id]]
        assert pool is not None, "the model keeps states"
        for block, part in zip(copy.blocks, torch.split(data, pool.shape[1]), strict=True):
            pool[block, : len(part)] = part
        self._held.note(copy.blocks)

    def _restore(self, copy: StateCopy) -> None:
        """Copy states from blocks to a sequence."""
        pool, data = self._pool, self.data[self._places[copy.sequence_id]]
        assert pool is not None, "the model keeps states"
        for block, part in zip(copy.blocks, torch.split(data, pool.shape[1]), strict=True):
            part.copy_(pool[block, : len(part)])

    def _place(self, sequence_id: int) -> int:
        """Return a sequence's place; a new one's has any values."""
        if (place := self._places.get(sequence_id)) is not None:
            return place
        if not self._free:
            count = len(self.data)
            self.data = torch.cat([self.data, torch.zeros_like(self.data)])
            self._free.extend(range(count, 2 * count))
        self._places[sequence_id] = self._free.pop()
        return self._places[sequence_id]


def blocks_for_kv(plan: StepPlan, block_size: int) -> Iterator[int]:
    """Yield the blocks that get KV for the first time in a step: those that are copied to, and
    those of its rows' tables in which the rows' sequences have written nothing."""
    for copy in plan.copies:
        yield copy.dst
    for row in plan.rows:
        first = -(-row.start // block_size)
        for table in (row.block_ids, *row.beside):
            yield from table[first:]


def blocks_of_state(layout: StateLayout, block_bytes: int) -> int:
    """Return the blocks that a kept state takes."""
    return math.ceil(layout.bytes / block_bytes)
