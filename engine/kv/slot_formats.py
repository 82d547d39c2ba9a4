"""What copies of a storage's blocks are in slots of host memory: formats, parts, blocks of a move.

Both transfer engines ask it before they touch a byte. It copies nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

from engine.api import Fidelity
from engine.kv.format import KvFormat
from engine.kv.storage import KvPool
from engine.moves import (
    WHOLE,
    Move,
    SlotFormat,
    SlotLayout,
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
        """Bytes of a packed block; of a lane's shard of it where lanes share blocks."""

    @property
    def fidelity(self) -> Fidelity:
        """How far a packed block is from what it was."""


P = TypeVar("P", bound=SizedPacker)


class SlotShape(NamedTuple, Generic[P]):
    """How a copy of one format lies in its slot: parts side by side, `part_bytes` from one to the
    next, each a block's shard that fills the first `stored_bytes`. A block of each of `groups` KV
    groups, one behind the other, and of each the shards of all `lanes` in their order."""

    packer: P | None
    """None if blocks are as they are."""
    groups: int
    lanes: int
    stored_bytes: int
    part_bytes: int

    @property
    def parts(self) -> int:
        """Parts of a copy."""
        return self.groups * self.lanes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a copy."""
        return self.parts * self.part_bytes


class SlotFormats(Generic[P]):
    """The formats of a transfer engine's copies: of a block of KV group 0, and with several KV
    groups of a block of each."""

    def __init__(self, storage: KvPool, packers: Mapping[str, P], layout: SlotLayout) -> None:
        """`packers`: by the name that `Move.format` gives. Raises ValueError if the memory has no
        room for a copy of one of the formats."""
        form = storage.format
        self._blocks, self._packed = len(storage.shards[0].data), sorted(packers)
        self._shapes = _shapes_of(form, packers)
        self.all = tuple(
            SlotFormat(name, one.slot_bytes, one.packer.fidelity if one.packer else form.fidelity)
            for name, one in self._shapes.items()
        )
        for one in self.all:
            if not layout.capacity(one.slot_bytes):
                what = one.name or "a block"
                raise ValueError(f"{layout}; {what} takes {one.slot_bytes} bytes")

    @property
    def packed_bytes_max(self) -> int:
        """Most bytes of a packed block; 0 without packed formats."""
        return max((one.stored_bytes for one in self._shapes.values() if one.packer), default=0)

    def shape(self, name: str) -> SlotShape[P]:
        """Return the shape of a format. Raises ValueError for one that there is not. O(1)."""
        found = self._shapes.get(name)
        if found is None:
            known = ", ".join(self._packed) or "none"
            what = packed_part(name) or name
            raise ValueError(f"no packed format {what!r}; expected one of: {known}")
        return found

    def blocks_of(self, move: Move) -> tuple[int, ...]:
        """Return a move's block of each KV group, all checked; below 0 for one that a load does not
        touch. Raises ValueError for an unknown format and for too few or too many blocks,
        IndexError for a block that there is not."""
        found, groups = (move.block, *move.beside), self.shape(move.format).groups
        if len(found) != groups:
            raise ValueError(f"{len(found)} blocks as {move.format!r}; expected {groups}")
        for index, block in enumerate(found):
            is_left_alone = block < 0 and index > 0 and move.kind == "load"
            if not is_left_alone and not 0 <= block < self._blocks:
                raise IndexError(f"block {block}; expected 0 to {self._blocks - 1}")
        return found


def copy_sizes(form: KvFormat, packed: Mapping[str, SizedPacker]) -> list[int]:
    """Return the bytes of a copy in each format, the pool's own first. `packed`: by name."""
    return [one.slot_bytes for one in _shapes_of(form, packed).values()]


def _shapes_of(form: KvFormat, packers: Mapping[str, P]) -> dict[str, SlotShape[P]]:
    """Return the shapes by format, the pool's own first; with several KV groups, then that of a
    block of each, and at the end those of a packed block of each. A packed part begins where slots
    may."""
    groups, lanes, plain = form.blocks_per_run, form.lanes, form.shard.block_bytes
    sizes = {name: one.block_bytes for name, one in packers.items()}
    found: dict[str, SlotShape[P]] = {"": SlotShape(None, 1, lanes, plain, plain)}
    if groups > 1:
        found[WHOLE] = SlotShape(None, groups, lanes, plain, plain)
    for name, size in sizes.items():
        part_bytes = size if lanes == 1 else stride_of(size)
        found[name] = SlotShape(packers[name], 1, lanes, size, part_bytes)
    if groups > 1:
        found |= {
            whole_format(name): SlotShape(packers[name], groups, lanes, size, stride_of(size))
            for name, size in sizes.items()
        }
    return found
