"""What copies of a storage's blocks are in slots of host memory: formats, parts, blocks of a move.

Both transfer engines ask it before they touch a byte. It copies nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

from engine.api import Fidelity
from engine.kv.storage import KvStorage
from engine.moves import (
    WHOLE,
    Move,
    SlotFormat,
    SlotLayout,
    is_whole_format,
    packed_part,
    stride_of,
    whole_format,
)


class SlotMemory(Protocol):
    """Slots of host memory: `engine.storage.memory.arena.HostArena`, or a fake."""

    layout: SlotLayout

    def view(self, slot: int, slot_bytes: int) -> memoryview:
        """Return the bytes of a slot of this size, writable. Raises IndexError."""


class SizedPacker(Protocol):
    """What each packer of blocks says of its format."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a packed block."""

    @property
    def fidelity(self) -> Fidelity:
        """How far a packed block is from what it was."""


P = TypeVar("P", bound=SizedPacker)


class SlotFormats(Generic[P]):
    """The formats of a transfer engine's copies, and how a copy of each is laid out in its slot.

    A copy is one part, a block of group 0, or with several KV groups one part for each: equal parts
    side by side, each of `part_bytes`, of which a packed block fills the first `stored_bytes`.
    """

    def __init__(self, storage: KvStorage, packers: Mapping[str, P], layout: SlotLayout) -> None:
        """`packers`: by the name that `Move.format` gives. Raises ValueError if the memory has no
        room for a copy of one of the formats."""
        self.blocks = len(storage.data)
        self.block_bytes = storage.format.block_bytes
        self.groups = storage.format.blocks_per_run
        self._packers = dict(packers)
        self.all = self._list(storage.format.fidelity)
        for one in self.all:
            if not layout.capacity(one.slot_bytes):
                what = one.name or "a block"
                raise ValueError(f"{layout}; {what} takes {one.slot_bytes} bytes")

    @property
    def packed_bytes_max(self) -> int:
        """Most bytes of a packed block; 0 without packed formats."""
        return max((packer.block_bytes for packer in self._packers.values()), default=0)

    def packer(self, name: str) -> P | None:
        """Return what packs the blocks of a copy; None where they are as they are. Raises
        ValueError for a packed format that there is not."""
        packed = packed_part(name)
        if not packed:
            return None
        if packed not in self._packers:
            names = ", ".join(sorted(self._packers)) or "none"
            raise ValueError(f"no packed format {packed!r}; expected one of: {names}")
        return self._packers[packed]

    def blocks_of(self, move: Move) -> tuple[int, ...]:
        """Return a move's block of each part, all checked; below 0 for one that a load leaves
        alone. Raises ValueError for too few or too many, IndexError for one that there is not."""
        found = (move.block, *move.beside)
        if len(found) != (self.groups if is_whole_format(move.format) else 1):
            what = f"{self.groups} as {WHOLE!r}, one as any other"
            raise ValueError(f"{len(found)} blocks as {move.format!r}; expected {what}")
        for index, block in enumerate(found):
            is_left_alone = block < 0 and index and move.kind == "load"
            if not is_left_alone and not 0 <= block < self.blocks:
                raise IndexError(f"block {block}; expected 0 to {self.blocks - 1}")
        return found

    def stored_bytes(self, name: str) -> int:
        """Return the bytes of a block in a copy of a format."""
        packer = self.packer(name)
        return self.block_bytes if packer is None else packer.block_bytes

    def part_bytes(self, name: str) -> int:
        """Return the bytes from one part of a copy to the next: packed blocks begin where slots
        may."""
        stored = self.stored_bytes(name)
        return stride_of(stored) if packed_part(name) and is_whole_format(name) else stored

    def slot_bytes(self, name: str) -> int:
        """Return the bytes of a copy."""
        return self.part_bytes(name) * (self.groups if is_whole_format(name) else 1)

    def _list(self, fidelity: Fidelity) -> tuple[SlotFormat, ...]:
        """Return all formats, the pool's own first; with several KV groups, then that of a block in
        each, and at the end those of a packed block in each."""
        fidelities = {name: one.fidelity for name, one in self._packers.items()}
        own, packed = [("", fidelity)], list(fidelities.items())
        if self.groups > 1:
            own.append((WHOLE, fidelity))
            packed += [(whole_format(name), one) for name, one in fidelities.items()]
        return tuple(SlotFormat(name, self.slot_bytes(name), one) for name, one in [*own, *packed])
