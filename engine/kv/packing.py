"""Packed formats: smaller, lossy copies of blocks, for levels below the device.

`packed_format` says what a format takes of a pool and refuses pools that it does not fit;
`StoragePacker` packs the blocks of one CPU storage. The bytes are specified in
`kernels/reference_kv.py`; C writes them where it was compiled, torch elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct

from engine.api import Fidelity
from engine.kv.format import KvFormat
from engine.kv.storage import KvStorage
from kernels import reference_kv
from kernels.cpu.build import compile_library
from kernels.cpu.kv_formats import DIM_MAX, DIM_STEP, CBlockPacker
from kernels.reference_kv import PackedName, UnpackableError

__all__ = [
    "PackedFormat",
    "PackedName",
    "StoragePacker",
    "UnpackableError",
    "compiled_kernels",
    "packed_format",
    "packers_of",
]

FIDELITIES: dict[PackedName, Fidelity] = {"int8c": "near", "int8t": "near", "int4c": "rough"}


class PackedFormat(Struct, frozen=True):
    """A packed format of one pool: its name, the bytes of a block, and its fidelity."""

    name: PackedName
    block_bytes: int
    fidelity: Fidelity


def packed_format(name: str, kv: KvFormat) -> PackedFormat:
    """Return the packed format `name` of a pool.

    Raises ValueError for an unknown name, and for pools that the format does not fit: int8, whose
    copies are as they are, latents, blocks that are not of 16 tokens, and for `int4c` a head size
    that is no power of two.
    """
    known: tuple[PackedName, ...] = get_args(PackedName)
    found = next((known_name for known_name in known if known_name == name), None)
    if found is None:
        raise ValueError(f"no packed format {name!r}; expected one of: {', '.join(known)}")
    if kv.is_int8:
        raise ValueError(f"{name} packs bf16 and fp32; this pool is {kv.name}, copied as it is")
    if kv.block_size != reference_kv.SLOTS:
        raise ValueError(f"{name} packs blocks of 16 tokens; these have {kv.block_size}")
    if kv.parts != 2:
        raise ValueError(f"{name} packs keys and values; this model keeps latents")
    if found == "int4c" and kv.head_dim & (kv.head_dim - 1):
        raise ValueError(
            f"int4c rotates heads whose size is a power of two; this model's have {kv.head_dim}; "
            "int8c takes any"
        )
    size = reference_kv.packed_block_bytes(found, kv.layers, kv.kv_heads, kv.head_dim)
    return PackedFormat(found, size, FIDELITIES[found])


class StoragePacker:
    """`engine.kv.transfer.BlockPacker` over a storage in host memory, in slots or panels."""

    def __init__(self, storage: KvStorage, name: str, library: Path | None = None) -> None:
        """`library`: the compiled kernels; None: torch. Raises ValueError as `packed_format`."""
        self.format = packed_format(name, storage.format)
        self.block_bytes, self.fidelity = self.format.block_bytes, self.format.fidelity
        kv = storage.format
        self._storage = storage
        self._shape = (kv.layers, kv.kv_heads, kv.head_dim)
        self._c: CBlockPacker | None = None
        is_ours = kv.dtype in (torch.bfloat16, torch.float32)
        if library is not None and is_ours and kv.head_dim % DIM_STEP == 0 <= DIM_MAX - kv.head_dim:
            self._c = CBlockPacker(
                library,
                self.format.name,
                self._shape,
                is_bf16=kv.dtype == torch.bfloat16,
                is_panels=kv.layout == "panels",
            )

    def pack(self, block: int, out: npt.NDArray[np.uint8]) -> None:
        """Pack a block. Raises UnpackableError, a ValueError, for what is no number or too large;
        `out` then means nothing."""
        _check(out, self.block_bytes)
        data = self._storage.data[block]
        if self._c is not None:
            self._c.pack(data.data_ptr(), out.ctypes.data)
            return
        if self._storage.format.layout == "panels":
            _, kv_heads, head_dim = self._shape
            data = reference_kv.from_panels(data.flatten(-3), kv_heads, head_dim)
        out[:] = reference_kv.pack(data, self.format.name).numpy()

    def unpack(self, packed: npt.NDArray[np.uint8], block: int) -> None:
        """Fill a block."""
        _check(packed, self.block_bytes)
        data = self._storage.data[block]
        if self._c is not None:
            self._c.unpack(packed.ctypes.data, data.data_ptr())
            return
        found = reference_kv.unpack(
            torch.from_numpy(packed.copy()), self.format.name, self._shape, data.dtype
        )
        if self._storage.format.layout == "panels":
            found = reference_kv.to_panels(found).view(data.shape)
        data.copy_(found)


def compiled_kernels() -> Path | None:
    """Return the compiled kernels, with which `StoragePacker` packs; None without a compiler."""
    return compile_library()


def packers_of(
    storage: KvStorage,
    library: Path | None = None,
    names: Sequence[PackedName] = get_args(PackedName),
) -> dict[str, StoragePacker]:
    """Return a packer by name for each of these formats that fits the storage; none for latents."""
    found: dict[str, StoragePacker] = {}
    for name in names:
        with contextlib.suppress(ValueError):
            found[name] = StoragePacker(storage, name, library)
    return found


def _check(packed: npt.NDArray[np.uint8], size: int) -> None:
    """Raise ValueError unless `packed` is `size` contiguous bytes: C would write beyond them."""
    if packed.nbytes != size or not packed.flags.c_contiguous:
        raise ValueError(f"{packed.nbytes} bytes for a packed block; expected {size} in one piece")
