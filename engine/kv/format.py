"""The KV format: dtype, layout, shape and size of a block, and which layers share one.

Every other module asks a `KvFormat` for these; none reads them off the storage tensor's shape or
multiplies sizes itself. The format knows no device and no block id. Runners make one with
`kv_format`, allocate `engine.kv.storage.KvStorage` from it and report its name and block size to
the gateway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from msgspec import Struct
from msgspec.structs import replace

from engine.api import Fidelity
from engine.errors import ModelError
from engine.model_store import Architecture

Layout = Literal["slots", "panels"]
"""Order of the values inside one KV head of a block.

`slots`: [slot, head_dim], so that one token's key is contiguous. `panels`: the order in which the C
kernels read keys and values (`kernels/cpu/cpu_attention.c`), in which a token is not contiguous.
"""


WASTE_MAX = 0.15
"""Most of a token's bytes that layers which no group fills up may waste."""


class KvGroup(Struct, frozen=True):
    """Layers that keep the same tokens: the last `window` ones, or all if it is 0."""

    window: int
    layers: tuple[int, ...]


def deal_groups(windows: Sequence[int]) -> tuple[KvGroup, ...]:
    """Deal the layers of a model, given by their windows, into KV groups of blocks of one size.

    Group 0 has all layers without a window; the others go to groups of at most as many layers. One
    group of all layers, whose windows are then only masks, where all layers have a window or none
    has, where a window is of one token, or where more than `WASTE_MAX` of the bytes would be
    wasted. O(layers).
    """
    whole = KvGroup(0, tuple(range(len(windows))))
    full = tuple(index for index, window in enumerate(windows) if not window)
    if not full or len(full) == len(windows) or 1 in windows:
        return (whole,)
    groups = [KvGroup(0, full)]
    for window in sorted(set(windows) - {0}):
        layers = [index for index, own in enumerate(windows) if own == window]
        groups += [
            KvGroup(window, tuple(layers[first : first + len(full)]))
            for first in range(0, len(layers), len(full))
        ]
    rows = len(groups) * len(full)
    return (whole,) if rows > len(windows) * (1 + WASTE_MAX) else tuple(groups)


class KvFormat(Struct, frozen=True):
    """Format of a block: keys after rotation and values, the layers of one group, in one dtype.

    A block holds `block_size` tokens (slots) of `layers` layers and `kv_heads` KV heads of
    `head_dim` channels.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    layout: Layout = "slots"
    parts: int = 2
    """2, keys and values; 1, latents that are both."""
    groups: tuple[KvGroup, ...] = ()
    """The model's KV groups, if it has several; a group of fewer layers leaves the rest of its
    blocks empty. With torch.int8 each token and head has a scale, behind its head's slots
    (`kernels/reference_int8.py`)."""
    recurrent: tuple[int, ...] = ()
    """The model's layers that keep no KV, which are not among `layers`."""
    lanes: int = 1
    """GPUs that share a block by its KV heads: it is so many *shards* of one id, side by side in
    copies."""

    @property
    def name(self) -> str:
        """Name that differs where the bytes differ. Cache namespaces contain it, so that blocks
        of one format are never read as another's."""
        dtype = "int8t" if self.is_int8 else str(self.dtype).removeprefix("torch.")
        latents = "" if self.parts == 2 else "-latents"
        windows = "".join(f"-w{window}" for window in self.windows)
        layout = "" if self.layout == "slots" else f"-{self.layout}"
        lanes = f"-t{self.lanes}" if self.lanes > 1 else ""
        return f"{dtype}{latents}{layout}{windows}{lanes}"

    @property
    def shard(self) -> KvFormat:
        """Format of one lane's shard of a block."""
        return replace(self, kv_heads=self.kv_heads // self.lanes, lanes=1)

    @property
    def is_int8(self) -> bool:
        """Whether values have 8 bits, with a scale for each token and head."""
        return self.dtype == torch.int8

    @property
    def fidelity(self) -> Fidelity:
        """Fidelity of KV that was never below the device."""
        return "near" if self.is_int8 else "exact"

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows of the groups beside group 0, in tokens."""
        return tuple(group.window for group in self.groups[1:])

    @property
    def blocks_per_run(self) -> int:
        """Blocks that a run of `block_size` tokens takes, one in each group."""
        return max(1, len(self.groups))

    @property
    def group_of_layer(self) -> list[int]:
        """Group of each of the model's layers, 0 for one that keeps no KV. O(layers)."""
        return [group for group, _ in self._places()]

    @property
    def row_of_layer(self) -> list[int]:
        """Index of each of the model's layers within the blocks of its group, -1 for one that keeps
        no KV. O(layers)."""
        return [row for _, row in self._places()]

    def _places(self) -> list[tuple[int, int]]:
        keeping = sorted(set(range(self.layers + len(self.recurrent))) - set(self.recurrent))
        groups = self.groups or (KvGroup(0, tuple(keeping)),)
        found = {
            **dict.fromkeys(self.recurrent, (0, -1)),
            **{
                layer: (number, row)
                for number, group in enumerate(groups)
                for row, layer in enumerate(group.layers)
            },
        }
        return [found[layer] for layer in sorted(found)]

    @property
    def layer_shape(self) -> tuple[int, int, int, int]:
        """[parts, K, S, D]: keys and values, or latents, of one layer in one block. With int8
        D + 2: two bytes a token and head for scales, and only the product of S and D + 2 means
        anything."""
        width = self.head_dim + (2 if self.is_int8 else 0)
        return self.parts, self.kv_heads, self.block_size, width

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers of a group."""
        return self.layers * math.prod(self.layer_shape) * self.dtype.itemsize

    @property
    def copies_whole_blocks(self) -> bool:
        """Whether a copy-on-write must copy the whole block: a run of slots is not contiguous."""
        return self.layout == "panels" or self.is_int8

    def storage_shape(self, blocks: int) -> tuple[int, ...]:
        """[B, L, parts, K, S, D], or D + 2: block outermost, so that each block is contiguous."""
        return blocks, self.layers, *self.layer_shape


def kv_format(
    config: Architecture,
    dtype: torch.dtype,
    block_size: int,
    layout: Layout = "slots",
    *,
    has_groups: bool = False,
    lanes: int = 1,
) -> KvFormat:
    """Return the format of a model's KV in `dtype`, with `block_size` tokens to a block.

    `has_groups`: layers with a window get groups of their own, where that pays (`deal_groups`);
    otherwise all layers keep all tokens, and a window is a mask. `lanes`: GPUs that share the
    model. Raises ModelError `unsupported` for int8 where the model keeps latents.
    """
    if dtype == torch.int8 and config.latent is not None:
        raise ModelError(
            "unsupported",
            f"engine.kv_dtype is int8, which keeps keys and values; {config.family} keeps latents:"
            " expected auto, bf16 or fp32",
        )
    recurrent = config.layers_without_kv
    has_groups = has_groups and not recurrent  # no such model has windows
    groups = deal_groups([layer.window for layer in config.layers]) if has_groups else ()
    return KvFormat(
        layers=len(groups[0].layers) if groups else len(config.layers) - len(recurrent),
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=dtype,
        layout=layout,
        parts=2 if config.latent is None else 1,
        groups=groups if len(groups) > 1 else (),
        recurrent=recurrent,
        lanes=lanes,
    )
