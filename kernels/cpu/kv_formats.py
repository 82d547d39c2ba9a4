"""Packs and unpacks KV blocks in C: `cpu_kv_formats.c` through ctypes, on the calling thread.

It knows addresses and a pool's shape, no storage and no block id. `engine.kv.packing` calls it.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_void_p
from pathlib import Path

from kernels import reference_kv
from kernels.reference_kv import PackedName, UnpackableError

DIM_STEP, DIM_MAX = 16, 512
"""Head sizes that the C code takes are multiples of the one, up to the other."""

NUMBERS: dict[PackedName, int] = {"int8c": 0, "int4c": 1, "int8t": 2}
REASONS = {
    1: "the block holds a value that is no number",
    2: "the block holds a value that is too large for its packed format",
}


class CKvShape(ctypes.Structure):
    """`KvShape` of `cpu_kv_formats.c`."""

    _fields_ = (
        *((name, c_int32) for name in (
            "layers", "kv_heads", "head_dim", "format", "is_bf16", "is_panels",
        )),
        ("signs", c_void_p), ("norm", c_float),
    )  # fmt: skip


class CBlockPacker:
    """Packs blocks of one shape into one format. Calls release the GIL; any thread may call."""

    def __init__(
        self,
        library: Path,
        name: PackedName,
        shape: tuple[int, int, int],
        *,
        is_bf16: bool,
        is_panels: bool,
    ) -> None:
        """`library`: from `kernels.cpu.build.compile_library`. `shape`: layers, KV heads, head_dim.
        Raises ValueError for a head size that the C code does not take, OSError."""
        layers, kv_heads, head_dim = shape
        if head_dim % DIM_STEP or head_dim > DIM_MAX:
            raise ValueError(
                f"heads of {head_dim}; the C packer takes multiples of {DIM_STEP} up to {DIM_MAX}"
            )
        c = ctypes.CDLL(str(library))
        self._pack, self._unpack = c.kv_pack, c.kv_unpack
        for function in (self._pack, self._unpack):
            function.argtypes = (POINTER(CKvShape), c_void_p, c_void_p, c_int32)
        self._pack.restype, self._unpack.restype = c_int32, None
        self._signs = reference_kv.signs(head_dim)
        self._shape = CKvShape(
            layers, kv_heads, head_dim, NUMBERS[name], is_bf16, is_panels,
            self._signs.data_ptr(), reference_kv.hadamard_norm(head_dim),
        )  # fmt: skip

    def pack(self, block: int, packed: int, tokens: int = reference_kv.SLOTS) -> None:
        """Pack the first `tokens` slots of the block at address `block` to address `packed`.

        Raises UnpackableError; what was written until then means nothing.
        """
        if failed := self._pack(self._shape, block, packed, tokens):
            raise UnpackableError(REASONS[failed])

    def unpack(self, packed: int, block: int, tokens: int = reference_kv.SLOTS) -> None:
        """Fill the block at address `block`; slots from `tokens` on become zero."""
        self._unpack(self._shape, packed, block, tokens)
